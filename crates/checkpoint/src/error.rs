//! Why a checkpoint is refused.

use std::fmt;
use std::io;
use std::path::PathBuf;

use crate::config::Family;

/// The kind of a [`CheckpointError`], as one word for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorClass {
    /// The container is malformed.
    Format,
    /// Recognised but not supported.
    Unsupported,
    /// Metadata is missing, of the wrong type or contradictory.
    Config,
    /// A named file or tensor is absent.
    Missing,
    /// Tensor shapes contradict the metadata.
    Shape,
    /// The operating system refused.
    Io,
    /// A limit of this program.
    Limit,
}

impl fmt::Display for ErrorClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Format => "format",
            Self::Unsupported => "unsupported",
            Self::Config => "config",
            Self::Missing => "missing",
            Self::Shape => "shape",
            Self::Io => "io",
            Self::Limit => "limit",
        })
    }
}

/// Why a checkpoint is refused: the file, the thing, what was found, what was needed, and what may help.
///
/// Names and strings that come from the file are shortened and stripped of control characters, so that a message
/// is safe to print.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The operating system refused.
    #[error("{}: {source}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// Not something that holds bytes at offsets.
    #[error("{} is {found}; a model is a regular file\n\nhint: name the .gguf file itself", file.display())]
    NotAFile {
        /// The path.
        file: PathBuf,
        /// `a directory`, `a pipe`, …
        found: &'static str,
    },
    /// There is no such file.
    #[error("{}: no such file\n\nhint: check the path; a split model is named by any of its parts", file.display())]
    NoSuchFile {
        /// The path.
        file: PathBuf,
    },
    /// A file that others need is absent.
    #[error("{}: no such file; found nothing, needed because {needed}\n\nhint: {hint}", file.display())]
    NeededFile {
        /// Its path.
        file: PathBuf,
        /// Why it is needed.
        needed: String,
        /// What may help.
        hint: &'static str,
    },
    /// A part of a split model is absent.
    #[error("{}: no such file, but it is part {part} of {parts} of the model\n\nhint: all parts must lie in one folder under their original names", file.display())]
    MissingPart {
        /// Its path.
        file: PathBuf,
        /// Its number, from 1.
        part: u64,
        /// Parts of the model.
        parts: u64,
    },
    /// A part of a split model under a name that does not tell the others.
    #[error("{}: it is one of {parts} parts, and its name does not tell where the others are\n\nhint: give all parts their original names, NAME-00001-of-{parts:05}.gguf and so on, in one folder", file.display())]
    LonePart {
        /// Its path.
        file: PathBuf,
        /// Parts of the model.
        parts: u64,
    },
    /// The container is malformed.
    #[error("{}: {what}: found {found}, needed {needed}\n\nhint: the file is damaged or cut short; compare its size and checksum with the source's", file.display())]
    Format {
        /// The file.
        file: PathBuf,
        /// The thing.
        what: String,
        /// What was found.
        found: String,
        /// What was needed.
        needed: String,
    },
    /// Larger than this program wants to handle.
    #[error("{}: {what}: found {found}, needed at most {limit}\n\nhint: no known model comes near this limit; the file is damaged or made to harm", file.display())]
    Limit {
        /// The file.
        file: PathBuf,
        /// The thing.
        what: String,
        /// What was found.
        found: u64,
        /// What is accepted.
        limit: u64,
    },
    /// Recognised but not supported.
    #[error("{}: {what}: found {found}, which is not supported; supported: {supported}\n\nhint: look for a conversion of the model that keeps to these", file.display())]
    Unsupported {
        /// The file.
        file: PathBuf,
        /// The thing.
        what: String,
        /// What was found.
        found: String,
        /// What would do.
        supported: String,
    },
    /// A tensor that the family, as it is known here, does not have.
    #[error("{}: tensor `{tensor}`{}: found in the file, needed by no layer of a {family} model with {blocks} blocks; leaving it out would change the output\n\nhint: the file needs a newer version of this program, or another conversion of the model", file.display(), more(*others))]
    UnknownTensor {
        /// The file.
        file: PathBuf,
        /// Its name.
        tensor: String,
        /// How many more there are.
        others: usize,
        /// The family.
        family: Family,
        /// Blocks by the metadata, drafts included.
        blocks: u32,
    },
    /// Metadata is missing, of the wrong type or contradictory.
    #[error("{}: metadata `{key}`: found {found}, needed {needed}\n\nhint: the file was converted incompletely or edited; convert it again or fetch another copy", file.display())]
    Config {
        /// The file.
        file: PathBuf,
        /// The key.
        key: String,
        /// What was found.
        found: String,
        /// What was needed.
        needed: String,
    },
    /// A tensor is absent.
    #[error("{}: tensor `{tensor}`: found nothing, needed because {needed}\n\nhint: the file is incomplete or of an unknown layout; fetch another copy or another conversion", file.display())]
    MissingTensor {
        /// The file.
        file: PathBuf,
        /// Its name.
        tensor: String,
        /// Why it is needed.
        needed: String,
    },
    /// A tensor's shape contradicts the metadata.
    #[error("{}: tensor `{tensor}`: found shape {found:?}, needed {needed}\n\nhint: metadata and tensors are of two models; convert it again or fetch another copy", file.display())]
    Shape {
        /// The file.
        file: PathBuf,
        /// Its name.
        tensor: String,
        /// Row-major shape.
        found: Vec<u64>,
        /// What was needed, and where that comes from.
        needed: String,
    },
}

impl CheckpointError {
    /// A warning that says why a model has no draft head.
    pub(crate) fn without_draft(&self) -> String {
        let error = self.to_string();
        format!("the draft block is left out: {}", error.lines().next().unwrap_or_default())
    }

    /// The kind of error, for programs.
    pub const fn class(&self) -> ErrorClass {
        match self {
            Self::Io { .. } | Self::NotAFile { .. } => ErrorClass::Io,
            Self::Format { .. } => ErrorClass::Format,
            Self::Limit { .. } => ErrorClass::Limit,
            Self::Unsupported { .. } | Self::UnknownTensor { .. } => ErrorClass::Unsupported,
            Self::Config { .. } => ErrorClass::Config,
            Self::NoSuchFile { .. }
            | Self::NeededFile { .. }
            | Self::MissingPart { .. }
            | Self::LonePart { .. }
            | Self::MissingTensor { .. } => ErrorClass::Missing,
            Self::Shape { .. } => ErrorClass::Shape,
        }
    }
}

/// How many other things there are of the kind just named.
fn more(others: usize) -> String {
    if others == 0 { String::new() } else { format!(" and {others} more") }
}

/// Most characters of a file's text in a message.
const SHOWN: usize = 160;

/// A file's text for a message: shortened, on one line, without characters that steer a terminal or reorder text.
pub(crate) fn printable(text: &str) -> String {
    let mut shown = String::new();
    for (index, c) in text.chars().enumerate() {
        if index == SHOWN {
            shown.push('…');
            break;
        }
        let steers = c.is_control()
            || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        if steers {
            shown.extend(c.escape_unicode());
        } else {
            shown.push(c);
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::printable;

    #[test]
    fn text_from_a_file_cannot_steer_a_terminal_or_flood_it() {
        assert_eq!(printable("blk.0.attn_q.weight"), "blk.0.attn_q.weight");
        assert_eq!(printable("a\x1b[2Jb\n"), "a\\u{1b}[2Jb\\u{a}");
        assert_eq!(printable("\u{202e}gpj"), "\\u{202e}gpj");
        assert_eq!(printable(&"é".repeat(1000)).chars().count(), 161);
    }
}

//! Why a checkpoint is refused.

use std::fmt;
use std::io;
use std::path::PathBuf;

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

/// Why a checkpoint is refused: the file, the thing, what was found, what was needed.
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
    #[error("{}: {what}: found {found}, the limit is {limit}", file.display())]
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
    #[error("{}: {what} `{found}` is not supported; supported: {supported}", file.display())]
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
    /// Metadata is missing, of the wrong type or contradictory.
    #[error("{}: metadata `{key}`: found {found}, needed {needed}", file.display())]
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
    #[error("{}: tensor `{tensor}` is missing; {needed}\n\nhint: the file is incomplete or of an unknown layout; `sakia inspect` lists what it holds", file.display())]
    MissingTensor {
        /// The file.
        file: PathBuf,
        /// Its name.
        tensor: String,
        /// Why it is needed.
        needed: String,
    },
    /// A part of a split model is absent.
    #[error("{} is missing: {needed}\n\nhint: all parts must lie in one folder under their original names", file.display())]
    MissingFile {
        /// Its path.
        file: PathBuf,
        /// Why it is needed.
        needed: String,
    },
    /// A tensor's shape contradicts the metadata.
    #[error("{}: tensor `{tensor}` has shape {found:?}, needed {needed}", file.display())]
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
    /// The kind of error, for programs.
    pub const fn class(&self) -> ErrorClass {
        match self {
            Self::Io { .. } | Self::NotAFile { .. } => ErrorClass::Io,
            Self::Format { .. } => ErrorClass::Format,
            Self::Limit { .. } => ErrorClass::Limit,
            Self::Unsupported { .. } => ErrorClass::Unsupported,
            Self::Config { .. } => ErrorClass::Config,
            Self::MissingTensor { .. } | Self::MissingFile { .. } => ErrorClass::Missing,
            Self::Shape { .. } => ErrorClass::Shape,
        }
    }
}

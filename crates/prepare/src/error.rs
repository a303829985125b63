//! What can go wrong while a model is packed or checked.

use std::io;
use std::path::{Path, PathBuf};

use checkpoint::CheckpointError;
use expert_store::{ReadError, StoreError};
use units::Bytes;

/// Why there is no pack, or no verdict.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// The source, or what was written, is no checkpoint that can be used.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The source's files cannot be opened for reading.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Bytes of the source did not come.
    #[error("{name}: {source}")]
    Read {
        /// What was being read.
        name: String,
        /// Why.
        source: ReadError,
    },
    /// The disk has too little room.
    #[error(
        "{} has {free} free, and {needed} more are needed for the pack\n\nhint: make room, or name a file on another disk with `--out`",
        folder.display()
    )]
    Space {
        /// Where the pack was to go.
        folder: PathBuf,
        /// What is still to be written.
        needed: Bytes,
        /// What there is.
        free: Bytes,
    },
    /// The name is taken.
    #[error("{} exists already\n\nhint: use `--force` to replace it, or another name", path.display())]
    Exists {
        /// The target.
        path: PathBuf,
    },
    /// The unfinished pack's name is taken by a file that no packing left.
    #[error(
        "{} is in the way: found a file that no interrupted `sakia pack` of this target left\n\n\
         hint: remove it, use `--force` to replace it, or name another target",
        path.display()
    )]
    InTheWay {
        /// The name of the unfinished pack.
        path: PathBuf,
    },
    /// The target is something that a pack cannot be.
    #[error("{} is {found}; the name of a file is needed", path.display())]
    NotAFile {
        /// The target.
        path: PathBuf,
        /// `a folder`, …
        found: &'static str,
    },
    /// The target is a file of the source.
    #[error("{} is read by this very command as {}: its content would be lost; name another file", path.display(), input.display())]
    IsSource {
        /// The target, or the unfinished pack.
        path: PathBuf,
        /// The source's name for it.
        input: PathBuf,
    },
    /// Another process writes the same pack.
    #[error("{} is being written by another process; wait for it, or name another target", path.display())]
    Busy {
        /// The target.
        path: PathBuf,
    },
    /// The system refuses.
    #[error("cannot {verb} {}: {source}", path.display())]
    Io {
        /// What was tried.
        verb: &'static str,
        /// With which file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The user ended it.
    #[error("interrupted; run the same command again to go on from here")]
    Stopped,
}

impl PrepareError {
    /// An error of the system about a file.
    pub(crate) fn io(verb: &'static str, path: &Path) -> impl Fn(io::Error) -> Self {
        move |source| Self::Io { verb, path: path.to_owned(), source }
    }

    /// The kind of error as one word, for programs.
    pub fn class(&self) -> String {
        match self {
            Self::Checkpoint(error) => error.class().to_string(),
            Self::Store(_) | Self::Read { .. } | Self::Io { .. } => "io".to_owned(),
            Self::Space { .. } => "limit".to_owned(),
            Self::Exists { .. }
            | Self::InTheWay { .. }
            | Self::NotAFile { .. }
            | Self::IsSource { .. } => "config".to_owned(),
            Self::Busy { .. } => "busy".to_owned(),
            Self::Stopped => "interrupted".to_owned(),
        }
    }
}

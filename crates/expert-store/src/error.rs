//! What can go wrong when a store is opened and when it reads.

use std::io;
use std::path::PathBuf;

use crate::reader::ReaderKind;

/// Why a store could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The path is not a regular file, so positional reads of it make no sense (or would block forever).
    #[error("{} is a {found}; a regular file is needed", path.display())]
    NotAFile {
        /// The path as given.
        path: PathBuf,
        /// What is there: `directory`, `FIFO`, `socket`, `device`.
        found: &'static str,
    },
    /// The file cannot be looked at or opened.
    #[error("cannot open {}: {source}", path.display())]
    Open {
        /// The path as given.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A mirror's file is not as long as the file that it should be a copy of.
    #[error("{} has {found} bytes, the file that it should be a copy of has {needed}", path.display())]
    NotACopy {
        /// The file of the mirror.
        path: PathBuf,
        /// Its bytes.
        found: u64,
        /// Bytes of the other.
        needed: u64,
    },
    /// More disks than make sense.
    #[error("{found} mirrors were given; at most {most} are possible")]
    MirrorCount {
        /// What was asked for.
        found: usize,
        /// [`MAX_DISKS`](crate::MAX_DISKS), less one.
        most: usize,
    },
    /// A number of reader threads that makes no sense.
    #[error("{found} reader threads were asked for; 1 to {most} are possible")]
    ThreadCount {
        /// What was asked for.
        found: usize,
        /// [`MAX_THREADS`](crate::MAX_THREADS).
        most: usize,
    },
    /// The system does not read in the way that was asked for.
    #[error("{} is not possible here: {source}; read with pread, which is the default (`--reader pread`)", kind.name())]
    Reader {
        /// What was asked for.
        kind: ReaderKind,
        /// What the system says.
        source: io::Error,
    },
    /// The system gives no thread.
    #[error("cannot start reader thread {index}: {source}")]
    Thread {
        /// Which one, from 0.
        index: usize,
        /// What the system says.
        source: io::Error,
    },
}

/// Why bytes did not arrive. The destination then holds an unspecified mix of old and new bytes.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file ends before the bytes that are needed.
    #[error(
        "{} ends too early: {found} of {needed} bytes found at offset {offset}, the file had {size_at_open} bytes \
         when it was opened; if it was cut, fetch it again",
        path.display()
    )]
    Short {
        /// The file.
        path: PathBuf,
        /// Where the read began.
        offset: u64,
        /// Bytes found there.
        found: u64,
        /// Bytes needed there.
        needed: u64,
        /// Size of the file when the store was opened.
        size_at_open: u64,
    },
    /// The system reports an error.
    #[error("cannot read {bytes} bytes at offset {offset} of {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Where the read began.
        offset: u64,
        /// Its length.
        bytes: u64,
        /// What the system says.
        source: io::Error,
    },
    /// Somebody wrote to the file while it was in use, so old and new bytes may be mixed.
    #[error("{} was changed while it was in use: {what}; start again when it is complete", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
        /// Size or modification time, before and after.
        what: String,
    },
    /// A reader thread died. A bug of this crate, reported rather than waited for.
    #[error("a reader thread stopped unexpectedly; no further reads are possible")]
    Stopped,
}

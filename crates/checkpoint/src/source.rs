//! Bytes at offsets: a file, or memory in tests.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;

use crate::error::CheckpointError;

/// Something that holds bytes at offsets.
pub trait Source {
    /// Bytes in all. The same at every call.
    fn len(&self) -> u64;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fills `out` from `offset`.
    ///
    /// # Errors
    /// Fewer bytes than wanted, or the operating system refuses.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()>;
}

/// A source in memory.
#[derive(Debug, Clone)]
pub struct MemorySource<'a>(pub &'a [u8]);

impl Source for MemorySource<'_> {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let range = usize::try_from(offset)
            .ok()
            .and_then(|start| self.0.get(start..start.checked_add(out.len())?));
        out.copy_from_slice(range.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// A regular file, read at positions: no cursor, no map, so a file that shrinks is an error and not a signal.
#[derive(Debug)]
pub(crate) struct FileSource {
    file: File,
    bytes: u64,
}

impl FileSource {
    /// Opens a regular file.
    ///
    /// The kind is looked up before opening, because opening a pipe blocks until somebody writes; and again
    /// afterwards, because the name may point elsewhere by then.
    pub(crate) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::NotFound => CheckpointError::NoSuchFile { file: path.to_owned() },
            _ => CheckpointError::Io { file: path.to_owned(), source },
        };
        regular(path, &std::fs::metadata(path).map_err(failed)?)?;
        let file = OpenOptions::new().read(true).open(path).map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        regular(path, &metadata)?;
        Ok(Self { file, bytes: metadata.len() })
    }
}

fn regular(path: &Path, metadata: &Metadata) -> Result<(), CheckpointError> {
    let kind = metadata.file_type();
    let found = if kind.is_file() {
        return Ok(());
    } else if kind.is_dir() {
        "a directory"
    } else if kind.is_fifo() {
        "a pipe"
    } else {
        "a device or a socket"
    };
    Err(CheckpointError::NotAFile { file: path.to_owned(), found })
}

impl Source for FileSource {
    fn len(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(out, offset).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!(
                    "the file ended before byte {}; it was {} bytes long when it was opened",
                    offset + out.len() as u64,
                    self.bytes
                ),
            ),
            _ => error,
        })
    }
}

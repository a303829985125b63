//! Bytes at offsets: a file, or memory in tests.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use crate::error::CheckpointError;

/// Something that holds bytes at offsets.
pub trait Source {
    /// Bytes in all.
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

/// A regular file.
#[derive(Debug)]
pub(crate) struct FileSource {
    file: File,
    bytes: u64,
}

impl FileSource {
    /// Opens a regular file; never blocks on a pipe.
    pub(crate) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let io_error = |source| CheckpointError::Io { file: path.to_owned(), source };
        let kind = std::fs::metadata(path).map_err(io_error)?;
        if !kind.is_file() {
            return Err(CheckpointError::NotAFile {
                file: PathBuf::from(path),
                found: describe(&kind),
            });
        }
        let file = OpenOptions::new().read(true).open(path).map_err(io_error)?;
        let bytes = file.metadata().map_err(io_error)?.len();
        Ok(Self { file, bytes })
    }
}

fn describe(kind: &std::fs::Metadata) -> &'static str {
    use std::os::unix::fs::FileTypeExt;
    let file_type = kind.file_type();
    if file_type.is_dir() {
        "a directory"
    } else if file_type.is_fifo() {
        "a pipe"
    } else {
        "a device or socket"
    }
}

impl Source for FileSource {
    fn len(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        use std::os::unix::fs::FileExt;
        self.file.read_exact_at(out, offset)
    }
}

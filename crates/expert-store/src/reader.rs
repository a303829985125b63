//! How one read reaches the disk.

use std::io;

use crate::file::OpenFile;

pub(crate) mod faulty;
pub(crate) mod pread;

/// One positional read of one file at a time. Every reader thread has its own.
pub(crate) trait Reader: Send {
    /// Reads up to `out.len()` bytes at `offset`; fewer at the end of the file or when interrupted, 0 only at the
    /// end. On files that are read directly, offset, length and memory are multiples of 4096.
    ///
    /// # Errors
    /// Whatever the system reports, also interruptions.
    fn read_at(&self, file: &OpenFile, offset: u64, out: &mut [u8]) -> io::Result<usize>;
}

//! How one read reaches the disk.

use std::io;
use std::sync::Arc;

use crate::file::OpenFile;
use crate::slots::Slots;

pub(crate) mod faulty;
pub(crate) mod pread;
pub(crate) mod simulated;
#[cfg(all(target_os = "linux", feature = "io-uring"))]
pub(crate) mod uring;

/// Which calls of the system read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ReaderKind {
    /// `pread`: everywhere.
    #[default]
    Pread,
    /// `io_uring`: Linux, where it is allowed.
    IoUring,
}

impl ReaderKind {
    /// What it is called in messages and records.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pread => "pread",
            Self::IoUring => "io_uring",
        }
    }

    /// Something that reads in this way, for one thread; `slots` may be told later.
    ///
    /// # Errors
    /// What the system says against it.
    pub(crate) fn reader(self, slots: &Arc<Slots>) -> io::Result<Box<dyn Reader>> {
        match self {
            Self::Pread => Ok(Box::new(pread::PreadReader)),
            #[cfg(all(target_os = "linux", feature = "io-uring"))]
            Self::IoUring => Ok(Box::new(uring::UringReader::new(Arc::clone(slots))?)),
            #[cfg(not(all(target_os = "linux", feature = "io-uring")))]
            Self::IoUring => {
                let _ = slots;
                Err(io::Error::from(io::ErrorKind::Unsupported))
            }
        }
    }
}

/// One positional read of one file at a time. Every reader thread has its own.
pub(crate) trait Reader: Send {
    /// Reads up to `out.len()` bytes at `offset`; fewer at the end of the file or when interrupted, 0 only at the
    /// end. On files that are read directly, offset, length and memory are multiples of 4096.
    ///
    /// # Errors
    /// Whatever the system reports, also interruptions.
    fn read_at(&self, file: &OpenFile, offset: u64, out: &mut [u8]) -> io::Result<usize>;
}

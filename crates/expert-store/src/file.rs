//! The files of a checkpoint: opened once, checked to be what they seem, and watched for changes.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::destination::ALIGN;
use crate::error::{ReadError, StoreError};
use crate::staging::Staging;
use crate::sys;

/// Whether reads may go past the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum DirectMode {
    /// Where the file system can do it: `O_DIRECT` on Linux, `F_NOCACHE` on macOS. Tried per file at open.
    #[default]
    Auto,
    /// Never: through the page cache, whose pages are dropped after each read.
    Off,
}

/// A file of the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileStatus {
    /// The path that it was opened by.
    pub path: PathBuf,
    /// Its size when it was opened.
    pub bytes: u64,
    /// Whether it is read past the page cache.
    pub direct: bool,
}

/// What tells a file from a changed one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Version {
    bytes: u64,
    modified: (i64, i64),
}

impl Version {
    fn of(metadata: &Metadata) -> Self {
        Self { bytes: metadata.size(), modified: (metadata.mtime(), metadata.mtime_nsec()) }
    }
}

#[derive(Debug)]
pub(crate) struct OpenFile {
    pub(crate) path: PathBuf,
    file: File,
    direct: bool,
    version: Version,
}

impl OpenFile {
    /// Opens a regular file; anything else is refused without being opened, or at least without blocking.
    pub(crate) fn open(path: &Path, mode: DirectMode) -> Result<Self, StoreError> {
        let fail = |source| StoreError::Open { path: path.to_owned(), source };
        let regular = |metadata: &Metadata| match kind(metadata) {
            None => Ok(()),
            Some(found) => Err(StoreError::NotAFile { path: path.to_owned(), found }),
        };
        // Opening a device can do things, so the path is looked at first. It may be replaced in between: then
        // O_NONBLOCK keeps a FIFO from blocking, and the second look finds it.
        regular(&std::fs::metadata(path).map_err(fail)?)?;
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(path)
            .map_err(fail)?;
        let metadata = file.metadata().map_err(fail)?;
        regular(&metadata)?;
        let direct = mode == DirectMode::Auto && make_direct(&file, metadata.size());
        if !direct {
            sys::expect_scattered_reads(&file);
        }
        Ok(Self { path: path.to_owned(), file, direct, version: Version::of(&metadata) })
    }

    /// Whether reads have to be aligned to [`ALIGN`].
    pub(crate) const fn direct(&self) -> bool {
        self.direct
    }

    /// Its size when it was opened.
    pub(crate) const fn bytes_at_open(&self) -> u64 {
        self.version.bytes
    }

    /// Whether it has as many bytes as what it is a copy of.
    pub(crate) fn check_size(&self, needed: u64) -> Result<(), StoreError> {
        let found = self.version.bytes;
        if found == needed {
            return Ok(());
        }
        Err(StoreError::NotACopy { path: self.path.clone(), found, needed })
    }

    pub(crate) fn status(&self) -> FileStatus {
        FileStatus { path: self.path.clone(), bytes: self.version.bytes, direct: self.direct }
    }

    /// For calls that the standard library does not make.
    #[cfg(all(target_os = "linux", feature = "io-uring"))]
    pub(crate) fn as_raw_fd(&self) -> std::os::fd::RawFd {
        std::os::fd::AsRawFd::as_raw_fd(&self.file)
    }

    /// One positional read.
    pub(crate) fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<usize> {
        self.file.read_at(out, offset)
    }

    /// Leaves nothing of a buffered read in the page cache.
    pub(crate) fn drop_pages(&self, offset: u64, bytes: u64) {
        // Only whole pages inside the span are dropped, so it grows to the pages that the read touched.
        let start = offset - offset % ALIGN as u64;
        let end = (offset + bytes).next_multiple_of(ALIGN as u64);
        sys::drop_pages(&self.file, start, end - start);
    }

    /// Whether it is still the file that was opened: same size, not written to.
    ///
    /// A file that is *replaced* under its name is no problem: the open one stays readable and unchanged.
    pub(crate) fn check_unchanged(&self) -> Result<(), ReadError> {
        let changed = |what| ReadError::Changed { path: self.path.clone(), what };
        let metadata = self.file.metadata().map_err(|error| changed(error.to_string()))?;
        let (was, is) = (self.version, Version::of(&metadata));
        if was.bytes != is.bytes {
            return Err(changed(format!("it had {} bytes and now has {}", was.bytes, is.bytes)));
        }
        if was.modified != is.modified {
            let (was, is) = (was.modified, is.modified);
            let what =
                format!("modified at {}.{:09}, before at {}.{:09}", is.0, is.1, was.0, was.1);
            return Err(changed(what));
        }
        Ok(())
    }
}

/// What the path is, if not a regular file.
fn kind(metadata: &Metadata) -> Option<&'static str> {
    let kind = metadata.file_type();
    match () {
        () if kind.is_file() => None,
        () if kind.is_dir() => Some("directory"),
        () if kind.is_fifo() => Some("FIFO"),
        () if kind.is_socket() => Some("socket"),
        () if kind.is_block_device() || kind.is_char_device() => Some("device"),
        () => Some("special file"),
    }
}

/// Turns the page cache off if the file system agrees and 4096-byte alignment is enough for it.
fn make_direct(file: &File, bytes: u64) -> bool {
    let enough = |need: u32| need != 0 && ALIGN.is_multiple_of(need as usize);
    if let Some((memory, offset)) = sys::direct_alignment(file)
        && !(enough(memory) && enough(offset))
    {
        return false;
    }
    if sys::bypass_page_cache(file, true).is_err() {
        return false;
    }
    // Some file systems take the flag and then refuse to read.
    let mut staging = Staging::with_bytes(ALIGN);
    let works = file.read_at(staging.bytes(), 0).is_ok_and(|n| n > 0 || bytes == 0);
    if !works {
        // Were the flag to stay, reads would fail loudly.
        let _ = sys::bypass_page_cache(file, false);
    }
    works
}

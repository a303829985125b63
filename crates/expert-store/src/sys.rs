//! The calls of the operating system that the standard library does not have.
//!
//! Each takes an open [`File`], so the descriptor is valid for the length of the call, and none keeps it.
#![allow(unsafe_code, reason = "fcntl, statx and posix_fadvise are C functions")]

use std::fs::File;
use std::io;
#[cfg(any(target_os = "linux", target_os = "macos"))]
use std::os::fd::AsRawFd;

/// Reads of this file shall not go through the page cache: `O_DIRECT`.
#[cfg(target_os = "linux")]
pub(crate) fn bypass_page_cache(file: &File, on: bool) -> io::Result<()> {
    let fd = file.as_raw_fd();
    // SAFETY: `fd` is open; F_GETFL takes no argument.
    let flags = check(unsafe { libc::fcntl(fd, libc::F_GETFL) })?;
    let flags = if on { flags | libc::O_DIRECT } else { flags & !libc::O_DIRECT };
    // SAFETY: `fd` is open; F_SETFL takes an int.
    check(unsafe { libc::fcntl(fd, libc::F_SETFL, flags) }).map(drop)
}

/// Reads of this file shall not stay in the page cache: `F_NOCACHE`, and no read-ahead.
#[cfg(target_os = "macos")]
pub(crate) fn bypass_page_cache(file: &File, on: bool) -> io::Result<()> {
    let fd = file.as_raw_fd();
    // SAFETY: `fd` is open; F_NOCACHE takes an int.
    check(unsafe { libc::fcntl(fd, libc::F_NOCACHE, libc::c_int::from(on)) })?;
    // SAFETY: `fd` is open; F_RDAHEAD takes an int.
    check(unsafe { libc::fcntl(fd, libc::F_RDAHEAD, libc::c_int::from(!on)) }).map(drop)
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
pub(crate) fn bypass_page_cache(_file: &File, _on: bool) -> io::Result<()> {
    Err(io::Error::from(io::ErrorKind::Unsupported))
}

/// Alignment in bytes that direct reads of this file need, of memory and of offsets; zeros if it takes none.
/// None: the kernel (before 6.1) or the file system does not say.
#[cfg(target_os = "linux")]
pub(crate) fn direct_alignment(file: &File) -> Option<(u32, u32)> {
    // SAFETY: `statx` is plain numbers, for which all zeros is a value.
    let mut found: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: `fd` is open, the path is an empty C string (as AT_EMPTY_PATH wants), `found` is valid for writes.
    let result = check(unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            &raw mut found,
        )
    });
    let known = result.is_ok() && found.stx_mask & libc::STATX_DIOALIGN != 0;
    known.then_some((found.stx_dio_mem_align, found.stx_dio_offset_align))
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn direct_alignment(_file: &File) -> Option<(u32, u32)> {
    None
}

/// Reads through the page cache will be scattered: no read-ahead, which would fill it with what nobody asked for.
pub(crate) fn expect_scattered_reads(file: &File) {
    advise(file, 0, 0, Advice::Scattered);
}

/// The pages of this span are not needed again.
pub(crate) fn drop_pages(file: &File, offset: u64, len: u64) {
    advise(file, offset, len, Advice::Drop);
}

#[derive(Clone, Copy)]
enum Advice {
    Scattered,
    Drop,
}

/// Advice may be refused without harm, so errors are ignored.
#[cfg(target_os = "linux")]
fn advise(file: &File, offset: u64, len: u64, advice: Advice) {
    let (Ok(offset), Ok(len)) = (libc::off_t::try_from(offset), libc::off_t::try_from(len)) else {
        return;
    };
    let advice = match advice {
        Advice::Scattered => libc::POSIX_FADV_RANDOM,
        Advice::Drop => libc::POSIX_FADV_DONTNEED,
    };
    // SAFETY: `fd` is open; the other arguments are numbers.
    let _ = unsafe { libc::posix_fadvise(file.as_raw_fd(), offset, len, advice) };
}

#[cfg(not(target_os = "linux"))]
fn advise(_file: &File, _offset: u64, _len: u64, _advice: Advice) {}

#[cfg(any(target_os = "linux", target_os = "macos"))]
fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

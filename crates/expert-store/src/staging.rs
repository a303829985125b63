//! Memory in which readers put bytes together.
//!
//! It is mapped, not allocated: an allocator may keep what is freed for later, and the plan counts on this memory when it
//! is given up.
#![allow(unsafe_code, reason = "mmap and munmap are C functions")]

use std::alloc::{Layout, handle_alloc_error};
use std::ptr::{self, NonNull};

use crate::destination::ALIGN;

/// Zeroed memory on a multiple of [`ALIGN`].
pub(crate) struct Staging {
    start: NonNull<u8>,
    len: usize,
    /// Whether an expert was the last to need it, so that the next one will.
    pub(crate) for_experts: bool,
}

// SAFETY: it owns its memory, as a `Box` does.
unsafe impl Send for Staging {}

impl Staging {
    /// # Panics
    /// If `len` is 0.
    pub(crate) fn with_bytes(len: usize) -> Self {
        assert!(len > 0, "staging holds something");
        // SAFETY: a new private mapping at an address of the system's choice touches no other memory.
        let start = unsafe {
            libc::mmap(
                ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANON,
                -1,
                0,
            )
        };
        let start = NonNull::new(start.cast::<u8>()).filter(|_| start != libc::MAP_FAILED);
        let Some(start) = start else {
            // As any other allocation that fails.
            handle_alloc_error(Layout::array::<u8>(len).unwrap_or(Layout::new::<u8>()));
        };
        debug_assert!(start.addr().get().is_multiple_of(ALIGN), "mappings begin on a page");
        Self { start, len, for_experts: false }
    }

    pub(crate) const fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping has `len` readable and writable bytes, initialised to zero, for as long as `self` lives,
        // and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and nothing borrows it any more.
        let unmapped = unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert_eq!(unmapped, 0, "a whole mapping can be given back");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_zeroed_aligned_and_writable() {
        for len in [1, ALIGN, 3 * ALIGN + 5] {
            let mut staging = Staging::with_bytes(len);
            let bytes = staging.bytes();
            assert_eq!(bytes.len(), len);
            assert!(bytes.as_ptr().addr().is_multiple_of(ALIGN));
            assert!(bytes.iter().all(|byte| *byte == 0));
            bytes.fill(7);
        }
    }
}

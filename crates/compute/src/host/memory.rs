//! Memory from the operating system: page-aligned, zeroed, committed when it is first touched.
#![allow(unsafe_code, reason = "maps and unmaps pages, and views them as slices")]

use std::num::NonZero;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::backend::ComputeError;

/// What regions are aligned to and sized in.
pub(crate) const PAGE: usize = 4096;

/// A private anonymous mapping.
#[derive(Debug)]
pub(crate) struct Region {
    base: NonNull<u8>,
    /// A multiple of [`PAGE`]; 0 means nothing is mapped.
    len: usize,
}

// SAFETY: a region owns its pages; access follows `&` and `&mut` like that of a `Vec`.
unsafe impl Send for Region {}

impl Region {
    /// Nothing, aligned for whatever it is nothing of.
    const EMPTY: Self = {
        let page = NonZero::new(PAGE).expect("pages are not empty");
        Self { base: NonNull::without_provenance(page), len: 0 }
    };

    /// At least `bytes` zeroed bytes.
    pub(crate) fn new(what: &'static str, bytes: usize) -> Result<Self, ComputeError> {
        if bytes == 0 {
            return Ok(Self::EMPTY);
        }
        let error = ComputeError::OutOfMemory { what, bytes };
        let len = bytes.checked_next_multiple_of(PAGE).ok_or_else(|| error.clone())?;
        // SAFETY: an anonymous mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(
                std::ptr::null_mut(),
                len,
                protection,
                libc::MAP_PRIVATE | libc::MAP_ANON,
                -1,
                0,
            )
        };
        match NonNull::new(base.cast::<u8>()) {
            Some(base) if base.as_ptr().cast() != libc::MAP_FAILED => Ok(Self { base, len }),
            _ => Err(error),
        }
    }

    /// Bytes of the mapping.
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// Its first byte.
    pub(crate) const fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// The first `n` bytes.
    pub(crate) fn bytes(&self, n: usize) -> &[u8] {
        assert!(n <= self.len, "bytes inside the region");
        // SAFETY: mapped and zeroed by the kernel, in bounds; writers hold `&mut self` (see `Region::base` users for
        // weights, which are filled before the first pass).
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().cast_const(), n) }
    }

    /// The first `n` bytes.
    pub(crate) fn bytes_mut(&mut self, n: usize) -> &mut [u8] {
        assert!(n <= self.len, "bytes inside the region");
        // SAFETY: as in `bytes`, and `&mut self` makes it the only view.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), n) }
    }

    /// The first `n` values.
    pub(crate) fn f32s(&self, n: usize) -> &[f32] {
        assert!(n <= self.len / 4, "values inside the region");
        // SAFETY: as in `bytes`; a page boundary is aligned for f32, and every bit pattern is one.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().cast_const().cast(), n) }
    }

    /// The first `n` values.
    pub(crate) fn f32s_mut(&mut self, n: usize) -> &mut [f32] {
        assert!(n <= self.len / 4, "values inside the region");
        // SAFETY: as in `f32s`, and `&mut self` makes it the only view.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().cast(), n) }
    }

    /// The first `n` values.
    pub(crate) fn u16s(&self, n: usize) -> &[u16] {
        assert!(n <= self.len / 2, "values inside the region");
        // SAFETY: as in `f32s`, for u16.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().cast_const().cast(), n) }
    }

    /// The first `n` values.
    pub(crate) fn u16s_mut(&mut self, n: usize) -> &mut [u16] {
        assert!(n <= self.len / 2, "values inside the region");
        // SAFETY: as in `f32s_mut`, for u16.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().cast(), n) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: the mapping was made in `new` with this length and is unmapped once; no view outlives `self`.
            let outcome = unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
            debug_assert_eq!(outcome, 0, "a mapping of ours can be unmapped");
        }
    }
}

/// Floats in pages of their own. The default is none.
#[derive(Debug)]
pub(crate) struct Floats {
    region: Region,
    len: usize,
}

impl Floats {
    /// `n` zeros.
    pub(crate) fn zeroed(what: &'static str, n: usize) -> Result<Self, ComputeError> {
        Ok(Self { region: Region::new(what, n.saturating_mul(4))?, len: n })
    }

    /// Bytes of memory.
    pub(crate) const fn bytes(&self) -> u64 {
        self.region.len as u64
    }
}

impl Default for Floats {
    fn default() -> Self {
        Self { region: Region::EMPTY, len: 0 }
    }
}

impl Deref for Floats {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        self.region.f32s(self.len)
    }
}

impl DerefMut for Floats {
    fn deref_mut(&mut self) -> &mut [f32] {
        self.region.f32s_mut(self.len)
    }
}

/// The slots of the pool: one mapping, cut into strides.
#[derive(Debug)]
pub(crate) struct SlotMemory {
    region: Region,
    /// Offset and stride of every slot.
    slots: Vec<(usize, usize)>,
}

impl SlotMemory {
    pub(crate) const fn none() -> Self {
        Self { region: Region::EMPTY, slots: Vec::new() }
    }

    /// Slots class after class, `(how many, stride)` each.
    pub(crate) fn new(classes: impl Iterator<Item = (usize, usize)>) -> Result<Self, ComputeError> {
        let mut slots = Vec::new();
        let mut end = 0_usize;
        for (n, stride) in classes {
            assert!(stride.is_multiple_of(PAGE), "slots are made of whole pages");
            let too_large = ComputeError::OutOfMemory { what: "expert slots", bytes: usize::MAX };
            let class =
                n.checked_mul(stride).and_then(|bytes| end.checked_add(bytes)).ok_or(too_large)?;
            slots.extend((0..n).map(|i| (end + i * stride, stride)));
            end = class;
        }
        Ok(Self { region: Region::new("expert slots", end)?, slots })
    }

    /// First byte and stride of a slot.
    pub(crate) fn memory(&self, slot: usize) -> (NonNull<u8>, usize) {
        let (offset, stride) = self.slots[slot];
        // SAFETY: `new` placed the slot inside the region.
        (unsafe { self.region.base.add(offset) }, stride)
    }

    /// The bytes of a published slot.
    ///
    /// # Safety
    /// Nobody writes into the slot while the slice lives: it is published, and stays so.
    pub(crate) unsafe fn published(&self, slot: usize) -> &[u8] {
        let (base, stride) = self.memory(slot);
        // SAFETY: in bounds by `memory`, zeroed or filled by a completed read, not written by the caller's promise.
        unsafe { std::slice::from_raw_parts(base.as_ptr().cast_const(), stride) }
    }

    /// The same, to be rewritten.
    ///
    /// # Safety
    /// As [`Self::published`], and nobody reads it either while the slice lives.
    pub(crate) unsafe fn published_mut(&mut self, slot: usize) -> &mut [u8] {
        let (base, stride) = self.memory(slot);
        // SAFETY: as in `published`, and `&mut self` and the caller's promise make it the only view.
        unsafe { std::slice::from_raw_parts_mut(base.as_ptr(), stride) }
    }
}

/// Writes bytes to memory that a backend gave out for them.
pub(crate) fn fill((base, len): (NonNull<u8>, usize), bytes: &[u8]) {
    assert!(bytes.len() <= len, "bytes inside the memory");
    // SAFETY: backends give out `len` bytes that they own and that no pass reads before it is recorded; `bytes` is a
    // borrow of other memory.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), base.as_ptr(), bytes.len()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_are_zeroed_and_page_aligned() {
        let mut region = Region::new("test", 5000).unwrap();
        assert_eq!((region.len(), region.base().as_ptr() as usize % PAGE), (8192, 0));
        assert!(region.bytes(8192).iter().all(|b| *b == 0));
        region.f32s_mut(3)[2] = 1.0;
        assert_eq!(region.f32s(3), [0.0, 0.0, 1.0]);
        assert_eq!(Region::new("test", 0).unwrap().bytes(0), []);
        assert!(Region::new("test", usize::MAX).is_err());
        assert!(Region::new("test", 1 << 60).is_err());
    }

    #[test]
    fn floats_are_zeros_that_can_be_written() {
        let mut floats = Floats::zeroed("test", 1025).unwrap();
        assert_eq!((floats.len(), floats.bytes(), floats.iter().sum::<f32>()), (1025, 8192, 0.0));
        floats[1024] = 2.0;
        assert_eq!(floats.last(), Some(&2.0));
        assert!(Floats::default().is_empty());
        assert!(Floats::zeroed("test", usize::MAX / 2).is_err());
    }

    #[test]
    fn slots_of_all_classes_follow_each_other() {
        let slots = SlotMemory::new([(2, 4096), (1, 8192)].into_iter()).unwrap();
        let base = slots.memory(0).0.as_ptr() as usize;
        let places: Vec<_> = (0..3)
            .map(|i| (slots.memory(i).0.as_ptr() as usize - base, slots.memory(i).1))
            .collect();
        assert_eq!(places, [(0, 4096), (4096, 4096), (8192, 8192)]);
    }
}

//! An output that many tasks write, each its own part.
#![allow(
    unsafe_code,
    reason = "the parts that tasks write are interleaved, so no split of a slice gives them"
)]

use std::marker::PhantomData;
use std::ops::Range;

/// A mutable slice, shared by tasks that promise to take disjoint parts.
pub(crate) struct Scatter<'a, T> {
    start: *mut T,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: the only access is `part`, whose caller promises disjoint ranges; elements may be sent.
unsafe impl<T: Send> Sync for Scatter<'_, T> {}
// SAFETY: it is a `&mut [T]` with a weaker promise.
unsafe impl<T: Send> Send for Scatter<'_, T> {}

impl<'a, T> Scatter<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), borrow: PhantomData }
    }

    /// A part of the slice.
    ///
    /// # Panics
    /// If it reaches past the end.
    ///
    /// # Safety
    /// Parts that live at the same time, on any thread, must not overlap.
    #[allow(clippy::mut_from_ref, reason = "disjointness is the caller's duty")]
    pub(crate) unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "a part of the slice");
        // SAFETY: in bounds by the assertion; exclusive by the caller's promise and the borrow in `self`.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

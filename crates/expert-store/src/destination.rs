//! Raw memory that reads land in, and the only place where it becomes a slice.
//!
//! A [`Destination`] is cut once into [`Window`]s that are in bounds and disjoint, one per piece, and each window is
//! handed out once. The rest of the crate is safe code that passes windows around; what it has to keep is written
//! at [`Destination::new`]: nobody holds a window when the destination goes back to the caller.
#![allow(
    unsafe_code,
    reason = "slots are raw memory owned by a backend; slices of them are made here"
)]

use std::ops::Range;
use std::ptr::NonNull;

use checkpoint::{DIRECT_ALIGN, Piece, Pieces};

/// Alignment of direct reads: file offset, length and memory.
pub(crate) const ALIGN: usize = DIRECT_ALIGN as usize;

/// Memory that a read may write to.
///
/// Put it on a multiple of 4096 bytes: reads then land in it without a copy.
#[derive(Debug)]
pub struct Destination {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a destination is an exclusive claim on plain bytes, like `&mut [u8]`, which may move between threads.
unsafe impl Send for Destination {}

impl Destination {
    /// Claims `len` bytes at `base`.
    ///
    /// # Safety
    ///
    /// Until the read has ended (its completion was received, a cancel of it returned true, or the store was
    /// dropped; for [`Store::read_many`](crate::Store::read_many): the call has returned):
    /// - `base` points to `len` initialised bytes of one allocation that stays alive
    /// - nobody else reads or writes them
    pub const unsafe fn new(base: NonNull<u8>, len: usize) -> Self {
        Self { base, len }
    }

    /// Claims a slice without its lifetime.
    ///
    /// # Safety
    ///
    /// The slice must stay borrowed until the read has ended, see [`Destination::new`].
    pub(crate) const unsafe fn lend(out: &mut [u8]) -> Self {
        let len = out.len();
        // A slice's pointer is never null.
        Self { base: NonNull::from_mut(out).cast(), len }
    }

    /// Memory that nobody else has or ever frees.
    #[cfg(test)]
    pub(crate) fn leaked(len: usize) -> Self {
        // SAFETY: a leaked box is borrowed for ever.
        unsafe { Self::lend(Box::leak(vec![0; len].into_boxed_slice())) }
    }

    /// Bytes claimed.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is claimed.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Cuts it into consecutive parts of `chunk` bytes; the last may be shorter.
    pub(crate) fn chunks(self, chunk: usize) -> impl Iterator<Item = Self> {
        let Self { base, len } = self;
        (0..len).step_by(chunk).map(move |start| {
            // SAFETY: `start < len`, so the sum stays inside the claimed allocation. The parts are disjoint, and
            // `self` was consumed, so each keeps its share of the exclusive claim.
            Self { base: unsafe { base.add(start) }, len: chunk.min(len - start) }
        })
    }

    /// Cuts it in two after `at` bytes.
    ///
    /// # Panics
    /// If it is shorter.
    pub(crate) fn split_at(self, at: usize) -> (Self, Self) {
        let Self { base, len } = self;
        assert!(at <= len, "{at} of {len} bytes");
        // SAFETY: as in `chunks`; at the end it is one past the claimed bytes, which are then none.
        (Self { base, len: at }, Self { base: unsafe { base.add(at) }, len: len - at })
    }

    fn is_aligned(&self) -> bool {
        self.base.addr().get().is_multiple_of(ALIGN)
    }
}

/// Where a slot is, for a reader that prepares its memory once. No claim on its bytes.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(
    not(all(target_os = "linux", feature = "io-uring")),
    allow(dead_code, reason = "only rings prepare slots")
)]
pub struct SlotMemory {
    address: usize,
    len: usize,
}

#[cfg_attr(
    not(all(target_os = "linux", feature = "io-uring")),
    allow(dead_code, reason = "only rings prepare slots")
)]
impl SlotMemory {
    /// Names the `len` bytes at `base`.
    ///
    /// # Safety
    ///
    /// They are one slot, inside one allocation that stays where it is until the store that gets this is dropped. Were
    /// other memory to take their address, reads into that would end in the old one.
    pub unsafe fn new(base: NonNull<u8>, len: usize) -> Self {
        Self { address: base.addr().get(), len }
    }

    /// For tests that look at addresses only.
    #[cfg(test)]
    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self { address: bytes.as_ptr().addr(), len: bytes.len() }
    }

    pub(crate) const fn address(&self) -> usize {
        self.address
    }

    pub(crate) const fn len(&self) -> usize {
        self.len
    }
}

/// Exclusive access to the bytes of one piece, and for a piece that is aligned like its place also to the slack
/// around it up to the next multiples of 4096.
#[derive(Debug)]
pub(crate) struct Window {
    base: NonNull<u8>,
    len: usize,
    /// Bytes before the payload.
    head: usize,
}

// SAFETY: as for `Destination`.
unsafe impl Send for Window {}

impl Window {
    /// Bytes of the window that lie before the payload.
    pub(crate) const fn head(&self) -> usize {
        self.head
    }

    /// Whether a direct read from a multiple of 4096 in the file can fill it.
    pub(crate) fn takes_direct_reads(&self) -> bool {
        self.base.addr().get().is_multiple_of(ALIGN) && self.len.is_multiple_of(ALIGN)
    }

    /// The bytes.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY:
        // - in bounds, initialised, alive: windows are checked against the destination's length in
        //   `Split::new`; the rest is the promise of `Destination::new`
        // - exclusive: windows of a destination are disjoint (checked there) and handed out once (`Split::next`);
        //   the slice borrows this one mutably
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

/// Where a piece may be cut in the file.
const CUT: u64 = DIRECT_ALIGN;

/// A destination on its way into windows, in order: one for each piece, or several for a long one.
#[derive(Debug)]
pub(crate) struct Split {
    destination: Destination,
    pieces: Pieces,
    /// Whether windows include the slack around their payload.
    widened: bool,
    /// Longer pieces are cut into parts of about this many bytes.
    part_bytes: u64,
    /// Pieces that were handed out whole.
    handed_out: usize,
    /// Bytes of the next piece that were handed out.
    within: u64,
    /// Windows to come.
    left: usize,
}

impl Split {
    /// Plans the windows: with the slack around each piece if that is in bounds and disjoint and the memory is
    /// aligned, else exactly the payload. Pieces that are much longer than `part_bytes` get several.
    ///
    /// # Panics
    ///
    /// If payloads overlap or lie outside of the destination. Records are laid out by `checkpoint`, slots are made
    /// from the same sizes, so only a bug can do that.
    pub(crate) fn new(destination: Destination, pieces: &Pieces, part_bytes: u64) -> Self {
        let len = destination.len as u64;
        assert!(fits(pieces, payload, len), "pieces overlap or exceed {len} bytes: {pieces:?}");
        let widened = destination.is_aligned() && fits(pieces, widen, len);
        let part_bytes = part_bytes.max(CUT);
        let left = pieces.iter().map(|piece| count_parts(piece, part_bytes)).sum();
        Self { destination, pieces: *pieces, widened, part_bytes, handed_out: 0, within: 0, left }
    }

    /// The next piece or part of one, and its window.
    pub(crate) fn next(&mut self) -> Option<(Piece, Window)> {
        let whole = self.pieces.get(self.handed_out)?;
        let bytes = part(whole, self.within, self.part_bytes);
        let (offset, place) = (whole.offset + self.within, whole.place + self.within);
        let piece = Piece { offset, bytes, place, ..*whole };
        self.within += bytes;
        if self.within == whole.bytes {
            (self.handed_out, self.within) = (self.handed_out + 1, 0);
        }
        self.left -= 1;
        let range = if self.widened { widen(&piece) } else { payload(&piece) };
        let range = range.expect("`new` has seen these ranges");
        // SAFETY: `new` checked that the range of the whole piece ends inside of the destination. Parts are cut at
        // multiples of 4096 in the file, so where slack is included, which takes a piece that lies alike in memory,
        // theirs is part of that of the whole, and they are disjoint.
        let base = unsafe { self.destination.base.add(range.start as usize) };
        let (len, head) = (range.end - range.start, piece.place - range.start);
        Some((piece, Window { base, len: len as usize, head: head as usize }))
    }

    /// Windows that were not handed out yet.
    pub(crate) const fn left(&self) -> usize {
        self.left
    }

    /// Hands out no more windows.
    pub(crate) fn stop(&mut self) {
        (self.handed_out, self.within, self.left) = (self.pieces.len(), 0, 0);
    }
}

/// Bytes of the part that begins `from` bytes after the start of a piece: about `part_bytes`, up to where a page of the
/// file ends. A rest that is hardly longer stays in one, and so does what is put together from several runs of bytes.
fn part(piece: &Piece, from: u64, part_bytes: u64) -> u64 {
    let rest = piece.bytes - from;
    let no_end = piece.offset.checked_add(piece.bytes).is_none();
    if piece.blocks.is_some() || no_end || rest / 3 <= part_bytes / 2 {
        return rest;
    }
    let start = piece.offset + from;
    let end = start + part_bytes;
    end - end % CUT - start
}

fn count_parts(piece: &Piece, part_bytes: u64) -> usize {
    let (mut from, mut n) = (part(piece, 0, part_bytes), 1);
    while from < piece.bytes {
        from += part(piece, from, part_bytes);
        n += 1;
    }
    n
}

fn payload(piece: &Piece) -> Option<Range<u64>> {
    Some(piece.place..piece.place.checked_add(piece.memory_bytes())?)
}

/// The payload and what lies around it up to multiples of 4096; none if the piece lies differently on the disk. What is
/// put together from several runs of bytes needs no slack.
fn widen(piece: &Piece) -> Option<Range<u64>> {
    if piece.blocks.is_some() {
        return payload(piece);
    }
    let head = piece.offset % DIRECT_ALIGN;
    if piece.place % DIRECT_ALIGN != head {
        return None;
    }
    let end = piece.place.checked_add(piece.bytes)?.checked_next_multiple_of(DIRECT_ALIGN)?;
    Some(piece.place - head..end)
}

/// Whether the ranges of all pieces exist, end at or before `len` and are disjoint.
fn fits(pieces: &[Piece], range: impl Fn(&Piece) -> Option<Range<u64>>, len: u64) -> bool {
    // Nine pieces at most: comparing all pairs is cheaper than a sorted copy.
    pieces.iter().enumerate().all(|(i, piece)| {
        range(piece).is_some_and(|a| {
            let apart = |b: Range<u64>| a.end <= b.start || b.end <= a.start;
            a.end <= len && pieces[..i].iter().all(|earlier| range(earlier).is_some_and(apart))
        })
    })
}

#[cfg(test)]
mod tests {
    use units::FileIndex;

    use super::*;

    /// Four pages on a page boundary.
    #[repr(align(4096))]
    struct Memory([u8; 4 * ALIGN]);

    fn pieces(parts: &[(u64, u64, u64)]) -> Pieces {
        let mut pieces = Pieces::default();
        for &(offset, bytes, place) in parts {
            pieces.push(Piece { file: FileIndex(0), offset, bytes, place, blocks: None });
        }
        pieces
    }

    /// `(start, length, head)` of every window in memory of `len` bytes that starts `shift` after a page.
    fn windows(parts: &[(u64, u64, u64)], shift: usize, len: usize) -> Vec<(usize, usize, usize)> {
        windows_of(parts, shift, len, u64::MAX)
    }

    /// The same with a length that pieces are cut to.
    fn windows_of(
        parts: &[(u64, u64, u64)],
        shift: usize,
        len: usize,
        part_bytes: u64,
    ) -> Vec<(usize, usize, usize)> {
        let mut memory = Box::new(Memory([0; 4 * ALIGN]));
        let base = memory.0.as_ptr().addr() + shift;
        // SAFETY: the memory outlives the windows, which end with this function.
        let destination = unsafe { Destination::lend(&mut memory.0[shift..shift + len]) };
        let mut split = Split::new(destination, &pieces(parts), part_bytes);
        let left = split.left();
        let windows: Vec<_> = std::iter::from_fn(|| split.next())
            .map(|(_, w)| (w.base.addr().get() - base, w.len, w.head()))
            .collect();
        assert_eq!((windows.len(), split.left()), (left, 0));
        windows
    }

    #[test]
    fn windows_grow_to_whole_pages_where_memory_and_file_agree() {
        let parts = [(10_000, 5000, 1808), (4096, 4096, 8192)];
        assert_eq!(windows(&parts, 0, 3 * ALIGN), [(0, 8192, 1808), (8192, 4096, 0)]);
    }

    #[test]
    fn windows_are_exact_where_growing_is_impossible() {
        let exact = |parts: &[(u64, u64, u64)]| -> Vec<_> {
            parts.iter().map(|&(_, bytes, place)| (place as usize, bytes as usize, 0)).collect()
        };
        let parts = [(10_000, 5000, 1808), (4096, 4096, 8192)];
        assert_eq!(windows(&parts, 16, 3 * ALIGN), exact(&parts), "memory off the page");
        let parts = [(10_000, 5000, 1808)];
        assert_eq!(windows(&parts, 0, 2 * ALIGN - 1), exact(&parts), "no slack at the end");
        let parts = [(10_000, 5000, 0)];
        assert_eq!(windows(&parts, 0, 2 * ALIGN), exact(&parts), "another place in the page");
        let parts = [(0, 100, 0), (8392, 100, 200)];
        assert_eq!(windows(&parts, 0, 2 * ALIGN), exact(&parts), "two in a page");
    }

    #[test]
    fn a_long_piece_is_cut_where_pages_of_the_file_end() {
        // 1808 bytes into the page at 8192, 12,000 bytes: pages end after 2288, 6384 and 10,480.
        let parts = [(10_000, 12_000, 1808)];
        let cut = |shift| windows_of(&parts, shift, 4 * ALIGN - shift, 4096);
        assert_eq!(cut(0), [(0, 4096, 1808), (4096, 4096, 0), (8192, 8192, 0)]);
        let exact = [(1808, 2288, 0), (4096, 4096, 0), (8192, 5616, 0)];
        assert_eq!(cut(16), exact, "memory off the page");
        assert_eq!(windows_of(&parts, 0, 4 * ALIGN, 8192), [(0, 16_384, 1808)], "hardly longer");
    }

    #[test]
    fn a_piece_that_no_file_has_is_not_cut() {
        let parts = [(u64::MAX - 10, 9000, 1)];
        assert_eq!(windows_of(&parts, 0, 3 * ALIGN, 4096), [(1, 9000, 0)]);
    }

    #[test]
    fn overlaps_and_overruns_are_refused() {
        for parts in [
            &[(0, 4097, 0), (0, 10, 4096)][..],
            &[(0, 10, 4096), (0, 4097, 0)],
            &[(0, 1, 3 * 4096)],
            &[(0, u64::MAX, 1)],
        ] {
            let refused = std::panic::catch_unwind(|| windows(parts, 0, 3 * ALIGN));
            assert!(refused.is_err(), "{parts:?}");
        }
    }

    #[test]
    fn chunks_cover_everything_once() {
        let mut bytes = vec![0u8; 1000];
        let base = bytes.as_ptr().addr();
        // SAFETY: `bytes` outlives the chunks.
        let destination = unsafe { Destination::lend(&mut bytes) };
        let chunks: Vec<_> =
            destination.chunks(300).map(|c| (c.base.addr().get() - base, c.len())).collect();
        assert_eq!(chunks, [(0, 300), (300, 300), (600, 300), (900, 100)]);
        assert_eq!(Destination::leaked(0).chunks(300).count(), 0);
    }

    #[test]
    fn halves_lie_behind_each_other() {
        let whole = Destination::leaked(10);
        let base = whole.base.addr().get();
        let (front, back) = whole.split_at(7);
        assert_eq!((front.base.addr().get() - base, front.len()), (0, 7));
        assert_eq!((back.base.addr().get() - base, back.len()), (7, 3));
        assert!(back.split_at(3).1.is_empty());
        assert!(std::panic::catch_unwind(|| Destination::leaked(1).split_at(2)).is_err());
    }
}

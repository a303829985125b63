//! What the targets share.

use std::io;

use checkpoint::{MemorySource, Source};

/// A header with room behind it: the bytes, then zeros, as if the weights were there.
///
/// Parsing reads headers only, so inputs stay small and still describe files of any family that bind.
#[derive(Debug)]
pub struct Hollow<'a>(pub &'a [u8]);

/// More than any header of a few kilobytes describes by accident, less than what overflows on purpose.
const ROOM: u64 = 1 << 40;

impl Source for Hollow<'_> {
    fn len(&self) -> u64 {
        self.0.len() as u64 + ROOM
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        if offset.checked_add(out.len() as u64).is_none_or(|end| end > self.len()) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let start = self.0.len().min(usize::try_from(offset).unwrap_or(usize::MAX));
        let present = out.len().min(self.0.len() - start);
        out.fill(0);
        MemorySource(self.0).read_at(start as u64, &mut out[..present])
    }
}

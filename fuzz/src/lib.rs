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
        Padded { bytes: self.0, len: self.len() }.read_at(offset, out)
    }
}

/// Bytes with zeros behind them up to a length.
#[derive(Debug)]
pub struct Padded<'a> {
    /// What is there; at most `len`.
    pub bytes: &'a [u8],
    /// Bytes in all.
    pub len: u64,
}

impl Source for Padded<'_> {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        if offset.checked_add(out.len() as u64).is_none_or(|end| end > self.len) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let start = self.bytes.len().min(usize::try_from(offset).unwrap_or(usize::MAX));
        let present = out.len().min(self.bytes.len() - start);
        out.fill(0);
        MemorySource(self.bytes).read_at(start as u64, &mut out[..present])
    }
}

/// A safetensors file with this header: its length in front, and as much data behind it as it describes.
pub fn safetensors(header: &[u8]) -> (Vec<u8>, u64) {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    let len = bytes.len() as u64 + described(header);
    (bytes, len)
}

/// The largest end of a tensor that a header names, up to [`ROOM`]: data has no gaps, so that is its length.
fn described(header: &[u8]) -> u64 {
    let text = String::from_utf8_lossy(header);
    let ends = text.split("data_offsets").skip(1).filter_map(|rest| {
        let (_, rest) = rest.split_once(',')?;
        let digits = rest.trim_start();
        let end = digits.find(|c: char| !c.is_ascii_digit())?;
        digits[..end].parse::<u64>().ok()
    });
    ends.filter(|end| *end <= ROOM).max().unwrap_or(0)
}

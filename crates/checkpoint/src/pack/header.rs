//! The first bytes of a pack: what it is, and where index, checksums and data lie.

use std::path::Path;

use super::{Checksum, RECORD_ALIGN};
use crate::error::CheckpointError;
use crate::limits;
use crate::source::Source;

/// What a pack begins with. The line ends show a transfer that changes those.
pub const MAGIC: [u8; 8] = *b"SAKIA\r\n\x1a";
/// The version of the format that is read and written.
pub const VERSION: u32 = 1;
/// Bytes of the header.
pub const HEADER_BYTES: u64 = 96;

/// Bytes that the header's checksum covers: all before it.
const SUMMED: usize = HEADER_BYTES as usize - 8;

/// A run of bytes of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Run {
    pub(super) start: u64,
    pub(super) len: u64,
}

/// The header. Sections follow from two lengths; it has their places too, so that tools need no arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) file_bytes: u64,
    pub(super) index: Run,
    pub(super) index_sum: u64,
    pub(super) sums: Run,
    pub(super) sums_sum: u64,
    /// Where weights begin.
    pub(super) data: u64,
}

/// Where the index, the checksums and the data lie if the first two are so long; nothing if that is nowhere.
pub(super) fn places(index_bytes: u64, sums_bytes: u64) -> Option<(Run, Run, u64)> {
    let index = Run { start: HEADER_BYTES, len: index_bytes };
    let start = HEADER_BYTES.checked_add(index_bytes)?.checked_next_multiple_of(8)?;
    let end = start.checked_add(sums_bytes)?;
    let data = end.checked_next_multiple_of(RECORD_ALIGN)?;
    Some((index, Run { start, len: sums_bytes }, data))
}

impl Header {
    pub(super) fn bytes(&self) -> [u8; HEADER_BYTES as usize] {
        let mut bytes = [0; HEADER_BYTES as usize];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(HEADER_BYTES as u32).to_le_bytes());
        let numbers = [
            self.file_bytes,
            self.index.start,
            self.index.len,
            self.index_sum,
            self.sums.start,
            self.sums.len,
            self.sums_sum,
            self.data,
            0,
        ];
        for (bytes, number) in bytes[16..].chunks_exact_mut(8).zip(numbers) {
            bytes.copy_from_slice(&number.to_le_bytes());
        }
        let sum = Checksum::of(&bytes[..SUMMED]);
        bytes[SUMMED..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Reads and checks the header of a file of that size.
    pub(super) fn read(path: &Path, source: &dyn Source) -> Result<Self, CheckpointError> {
        let error = |what: &str, found: String, needed: String| CheckpointError::Format {
            file: path.to_owned(),
            what: what.to_owned(),
            found,
            needed,
        };
        let size = source.len();
        if size < HEADER_BYTES {
            let found = format!("the end of the file after {size} bytes");
            return Err(error("the header", found, format!("{HEADER_BYTES} bytes")));
        }
        let mut bytes = [0; HEADER_BYTES as usize];
        let outcome = source.read_at(0, &mut bytes);
        outcome.map_err(|source| CheckpointError::Io { file: path.to_owned(), source })?;
        if bytes[..8] != MAGIC {
            let found = format!("bytes {}", bytes[..8].escape_ascii());
            return Err(error("the magic number", found, MAGIC.escape_ascii().to_string()));
        }
        let word = |at: usize| u32::from_le_bytes(*bytes[at..].first_chunk().expect("inside"));
        let number = |at: usize| u64::from_le_bytes(*bytes[at..].first_chunk().expect("inside"));
        // Before the checksum, whose place another version may change.
        if word(8) != VERSION {
            return Err(CheckpointError::Unsupported {
                file: path.to_owned(),
                what: "the version of the pack".to_owned(),
                found: format!("version {}", word(8)),
                supported: format!("version {VERSION}; make it again with `sakia pack`"),
            });
        }
        let (found, needed) = (Checksum::of(&bytes[..SUMMED]), number(SUMMED));
        if found != needed {
            return Err(super::damaged(path, "the header", found, needed));
        }
        let run = |at| Run { start: number(at), len: number(at + 8) };
        let header = Self {
            file_bytes: number(16),
            index: run(24),
            index_sum: number(40),
            sums: run(48),
            sums_sum: number(64),
            data: number(72),
        };
        let fixed = (word(12), number(80));
        if fixed != (HEADER_BYTES as u32, 0) {
            let found = format!("{} bytes, reserved {}", fixed.0, fixed.1);
            return Err(error("the header", found, format!("{HEADER_BYTES} bytes, reserved 0")));
        }
        header.check(path, size)?;
        Ok(header)
    }

    /// Holds the sections against the size of the file, the limits, and each other.
    fn check(&self, path: &Path, size: u64) -> Result<(), CheckpointError> {
        let error = |what: &str, found: String, needed: String| CheckpointError::Format {
            file: path.to_owned(),
            what: what.to_owned(),
            found,
            needed,
        };
        let Self { file_bytes, index, sums, data, .. } = *self;
        if file_bytes != size {
            let found = format!("a file of {size} bytes");
            return Err(error("the file's size", found, format!("{file_bytes} bytes")));
        }
        for (what, run, limit) in [
            ("bytes of the index", index, limits::HEADER_BYTES),
            ("bytes of checksums", sums, limits::SUMS_BYTES),
        ] {
            if run.len > limit {
                let (file, what) = (path.to_owned(), what.to_owned());
                return Err(CheckpointError::Limit { file, what, found: run.len, limit });
            }
        }
        if places(index.len, sums.len) != Some((index, sums, data)) || data > size {
            let found = format!(
                "index at {} with {} bytes, checksums at {} with {}, data at {data}",
                index.start, index.len, sums.start, sums.len
            );
            let needed = format!("one behind the other inside the file's {size} bytes");
            return Err(error("the sections", found, needed));
        }
        Ok(())
    }
}

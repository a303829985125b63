//! One piece from a file into its window: alignment, short reads, retries.
//!
//! Three ways, best first: *direct in place*, where the window includes the slack up to multiples of 4096 on both
//! sides; *direct through staging*, when memory and file are not aligned alike; *buffered*, when the file cannot
//! be read directly. Nothing counts as read until every needed byte of it has been delivered.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use checkpoint::Piece;

use crate::destination::{ALIGN, Window};
use crate::error::ReadError;
use crate::file::OpenFile;
use crate::reader::Reader;
use crate::schedule::Outcome;

/// Size of a reader's staging buffer: large enough for the disk to be the limit, small enough for the budget.
pub(crate) const STAGING_BYTES: usize = 1 << 20;

/// Most bytes asked of the system at once; macOS refuses 2 GiB and more.
const MAX_READ_BYTES: usize = 1 << 30;

/// Most interrupted or postponed calls in a row.
const MAX_RETRIES: u32 = 100;

/// Pause before a call that the system postponed.
const RETRY_PAUSE: Duration = Duration::from_millis(1);

/// Memory on a multiple of [`ALIGN`].
pub(crate) struct Staging {
    /// With room to move the start up to the next multiple.
    memory: Vec<u8>,
    len: usize,
}

impl Staging {
    pub(crate) fn with_bytes(len: usize) -> Self {
        Self { memory: vec![0; len + ALIGN], len }
    }

    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        let start = self.memory.as_ptr().align_offset(ALIGN);
        &mut self.memory[start..start + self.len]
    }
}

/// What a reader thread reads with.
pub(crate) struct Transfer {
    pub(crate) files: Arc<[OpenFile]>,
    pub(crate) reader: Box<dyn Reader>,
}

#[derive(Debug, Default)]
struct Tally {
    reads: u64,
    device_bytes: u64,
    bounced: bool,
}

/// Why a span was not filled; places are relative to its start.
enum Failure {
    Short { found: usize },
    Io(io::Error),
}

/// A stretch of a file.
#[derive(Clone, Copy)]
struct Span {
    offset: u64,
    /// Bytes at its start that must arrive; a direct read may ask for more.
    needed: usize,
    /// Where a read may continue: multiples of this.
    granule: usize,
}

impl Transfer {
    /// Reads a piece. `staging` is made when it is first needed, and given up by the next piece that does not need
    /// it: resident tensors need it, experts do not.
    pub(crate) fn run(
        &self,
        piece: &Piece,
        window: &mut Window,
        staging: &mut Option<Staging>,
    ) -> Outcome {
        let since = Instant::now();
        let mut tally = Tally::default();
        let result = self.read(piece, window, staging, &mut tally);
        let Tally { reads, device_bytes, bounced } = tally;
        Outcome { result, reads, device_bytes, bounced, busy: since.elapsed() }
    }

    fn read(
        &self,
        piece: &Piece,
        window: &mut Window,
        staging: &mut Option<Staging>,
        tally: &mut Tally,
    ) -> Result<(), ReadError> {
        if piece.bytes == 0 {
            return Ok(());
        }
        let file = &self.files[piece.file.get()];
        if piece.offset.checked_add(piece.bytes).is_none_or(|end| end > i64::MAX as u64) {
            return Err(failed(file, piece, Failure::Short { found: 0 }, 0));
        }
        let head = window.head() as u64;
        let from = piece.offset - head;
        let in_place = window.takes_direct_reads() && from.is_multiple_of(ALIGN as u64);
        if file.direct() && !in_place {
            let staging = staging.get_or_insert_with(|| Staging::with_bytes(STAGING_BYTES));
            tally.bounced = true;
            self.through(staging.bytes(), piece, window, tally)?;
        } else {
            *staging = None;
            self.in_place(file, piece, window, tally)?;
        }
        file.check_unchanged()
    }

    fn in_place(
        &self,
        file: &OpenFile,
        piece: &Piece,
        window: &mut Window,
        tally: &mut Tally,
    ) -> Result<(), ReadError> {
        let (head, bytes) = (window.head(), piece.bytes as usize);
        if file.direct() {
            let offset = piece.offset - head as u64;
            let span = Span { offset, needed: head + bytes, granule: ALIGN };
            return self
                .fill(piece, span, window.bytes(), tally)
                .map_err(|failure| failed(file, piece, failure, -(head as i64)));
        }
        let span = Span { offset: piece.offset, needed: bytes, granule: 1 };
        let result = self.fill(piece, span, &mut window.bytes()[head..head + bytes], tally);
        file.drop_pages(piece.offset, piece.bytes);
        result.map_err(|failure| failed(file, piece, failure, 0))
    }

    fn through(
        &self,
        staging: &mut [u8],
        piece: &Piece,
        window: &mut Window,
        tally: &mut Tally,
    ) -> Result<(), ReadError> {
        let bytes = piece.bytes as usize;
        let start = window.head();
        let out = &mut window.bytes()[start..start + bytes];
        let mut done = 0;
        while done < bytes {
            let at = piece.offset + done as u64;
            let head = (at % ALIGN as u64) as usize;
            let part = (staging.len() - head).min(bytes - done);
            let needed = head + part;
            let span = Span { offset: at - head as u64, needed, granule: ALIGN };
            let aligned = &mut staging[..needed.next_multiple_of(ALIGN)];
            self.fill(piece, span, aligned, tally).map_err(|failure| {
                let file = &self.files[piece.file.get()];
                failed(file, piece, failure, done as i64 - head as i64)
            })?;
            out[done..done + part].copy_from_slice(&staging[head..needed]);
            done += part;
        }
        Ok(())
    }

    /// Reads until the needed bytes are there. A short read is continued at the last multiple of the granule that
    /// it reached; one that gets no further than those before means the end of the file.
    fn fill(
        &self,
        piece: &Piece,
        span: Span,
        out: &mut [u8],
        tally: &mut Tally,
    ) -> Result<(), Failure> {
        let mut found = 0;
        loop {
            let start = found - found % span.granule;
            let end = out.len().min(start + MAX_READ_BYTES);
            let target = &mut out[start..end];
            let read = self.read_once(piece, span.offset + start as u64, target, tally);
            let reached = start + read.map_err(Failure::Io)?;
            if reached >= span.needed {
                return Ok(());
            }
            if reached <= found {
                return Err(Failure::Short { found });
            }
            found = reached;
        }
    }

    fn read_once(
        &self,
        piece: &Piece,
        offset: u64,
        out: &mut [u8],
        tally: &mut Tally,
    ) -> io::Result<usize> {
        let mut retries = 0;
        loop {
            tally.reads += 1;
            let error = match self.reader.read_at(piece.file, offset, out) {
                Ok(n) => {
                    tally.device_bytes += n as u64;
                    return Ok(n.min(out.len()));
                }
                Err(error) => error,
            };
            retries += 1;
            match error.kind() {
                io::ErrorKind::Interrupted if retries < MAX_RETRIES => {}
                io::ErrorKind::WouldBlock if retries < MAX_RETRIES => thread::sleep(RETRY_PAUSE),
                _ => return Err(error),
            }
        }
    }
}

/// The error of a piece, from a failure in a span that starts `shift` bytes after the piece's start.
fn failed(file: &OpenFile, piece: &Piece, failure: Failure, shift: i64) -> ReadError {
    let path = file.path.clone();
    let (offset, needed) = (piece.offset, piece.bytes);
    match failure {
        Failure::Short { found } => ReadError::Short {
            path,
            offset,
            found: (found as i64 + shift).max(0) as u64,
            needed,
            size_at_open: file.bytes_at_open(),
        },
        Failure::Io(source) => ReadError::Io { path, offset, bytes: needed, source },
    }
}

//! One piece from a file into its window: alignment, short reads, retries.
//!
//! Three ways, best first: *direct in place*, where the window includes the slack up to multiples of 4096 on both
//! sides; *direct through staging*, when memory and file are not aligned alike; *buffered*, when the file cannot
//! be read directly. Rows whose scales lie elsewhere always go through staging, run by run, and are put together on the
//! way. Nothing counts as read until every needed byte of it has been delivered.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use checkpoint::{Blocks, FilePlace, Piece, Tiles};

use crate::destination::{ALIGN, Window};
use crate::disks::Disks;
use crate::error::ReadError;
use crate::file::OpenFile;
use crate::reader::Reader;
use crate::schedule::Outcome;
use crate::staging::Staging;

/// Size of a reader's staging buffer: large enough for the disk to be the limit, small enough for the budget.
pub(crate) const STAGING_BYTES: usize = 1 << 20;

/// Most bytes asked of the system at once; macOS refuses 2 GiB and more.
const MAX_READ_BYTES: usize = 1 << 30;

/// Most interrupted or postponed calls in a row.
const MAX_RETRIES: u32 = 100;

/// Pause before a call that the system postponed.
const RETRY_PAUSE: Duration = Duration::from_millis(1);

/// What a reader thread reads with.
pub(crate) struct Transfer {
    pub(crate) disks: Arc<Disks>,
    /// One for each disk.
    pub(crate) readers: Vec<Box<dyn Reader>>,
}

/// One of the copies of a file, and what reads it.
#[derive(Clone, Copy)]
struct Source<'a> {
    file: &'a OpenFile,
    reader: &'a dyn Reader,
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
    /// it: resident tensors need it, and experts of files that keep scales apart.
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
        self.check_end(piece)?;
        if let Some(blocks) = &piece.blocks {
            let staging = staging.get_or_insert_with(|| Staging::with_bytes(STAGING_BYTES));
            return self.put_together(staging.bytes(), piece, blocks, window, tally);
        }
        let start = piece.offset - window.head() as u64;
        let in_place = window.takes_direct_reads() && start.is_multiple_of(ALIGN as u64);
        self.disks.read(piece.file, piece.bytes, |disk, file| {
            let from = Source { file, reader: &*self.readers[disk] };
            if file.direct() && !in_place {
                let staging = staging.get_or_insert_with(|| Staging::with_bytes(STAGING_BYTES));
                tally.bounced = true;
                let (start, bytes) = (window.head(), piece.bytes as usize);
                let out = &mut window.bytes()[start..start + bytes];
                let mut sink = |done: usize, part: &[u8]| {
                    out[done..done + part.len()].copy_from_slice(part);
                };
                through(from, staging.bytes(), piece, tally, &mut sink)?;
            } else {
                *staging = None;
                read_in_place(from, piece, window, tally)?;
            }
            file.check_unchanged()
        })
    }

    /// Offsets that no file can have are the end of it; the system would call them senseless.
    fn check_end(&self, piece: &Piece) -> Result<(), ReadError> {
        if piece.offset.checked_add(piece.bytes).is_none_or(|end| end > i64::MAX as u64) {
            let file = self.disks.file(piece.file);
            return Err(failed(file, piece, Failure::Short { found: 0 }, 0));
        }
        Ok(())
    }

    /// Codes, scales and biases, each run of bytes for itself, to their places in the blocks.
    fn put_together(
        &self,
        staging: &mut [u8],
        piece: &Piece,
        blocks: &Blocks,
        window: &mut Window,
        tally: &mut Tally,
    ) -> Result<(), ReadError> {
        tally.bounced = true;
        let out = window.bytes();
        let scale = blocks.scale as usize;
        let (codes, stride) = (blocks.codes as usize, blocks.stride() as usize);
        let n_blocks = piece.bytes as usize / codes;
        let run = |place: FilePlace, bytes: usize| Piece {
            file: place.file,
            offset: place.offset,
            bytes: bytes as u64,
            ..Piece::default()
        };
        let lead = stride - codes;
        self.read_run(
            staging,
            &run(FilePlace { file: piece.file, offset: piece.offset }, n_blocks * codes),
            tally,
            |done, part| {
                scatter(part, done, codes, |i| i * stride + lead, out);
            },
        )?;
        if let Some(tiles) = blocks.tiles {
            let bytes = shared_scales(n_blocks, tiles) * scale;
            return self.read_run(staging, &run(blocks.scales, bytes), tally, |done, part| {
                spread(part, done, scale, tiles, (n_blocks, stride), out);
            });
        }
        self.read_run(staging, &run(blocks.scales, n_blocks * scale), tally, |done, part| {
            scatter(part, done, scale, |i| i * stride, out);
        })?;
        if let Some(biases) = blocks.biases {
            self.read_run(staging, &run(biases, n_blocks * scale), tally, |done, part| {
                scatter(part, done, scale, |i| i * stride + scale, out);
            })?;
        }
        Ok(())
    }

    /// One run of bytes through staging, whether its file is read directly or not.
    fn read_run(
        &self,
        staging: &mut [u8],
        run: &Piece,
        tally: &mut Tally,
        mut sink: impl FnMut(usize, &[u8]),
    ) -> Result<(), ReadError> {
        self.check_end(run)?;
        self.disks.read(run.file, run.bytes, |disk, file| {
            let from = Source { file, reader: &*self.readers[disk] };
            through(from, staging, run, tally, &mut sink)?;
            if !file.direct() {
                file.drop_pages(run.offset, run.bytes);
            }
            file.check_unchanged()
        })
    }
}

fn read_in_place(
    from: Source<'_>,
    piece: &Piece,
    window: &mut Window,
    tally: &mut Tally,
) -> Result<(), ReadError> {
    let file = from.file;
    let (head, bytes) = (window.head(), piece.bytes as usize);
    if file.direct() {
        let offset = piece.offset - head as u64;
        let span = Span { offset, needed: head + bytes, granule: ALIGN };
        return fill(from, span, window.bytes(), tally)
            .map_err(|failure| failed(file, piece, failure, -(head as i64)));
    }
    let span = Span { offset: piece.offset, needed: bytes, granule: 1 };
    let result = fill(from, span, &mut window.bytes()[head..head + bytes], tally);
    file.drop_pages(piece.offset, piece.bytes);
    result.map_err(|failure| failed(file, piece, failure, 0))
}

/// Reads a run of bytes part by part; `sink` gets where a part begins, and the part.
fn through(
    from: Source<'_>,
    staging: &mut [u8],
    piece: &Piece,
    tally: &mut Tally,
    sink: &mut impl FnMut(usize, &[u8]),
) -> Result<(), ReadError> {
    let bytes = piece.bytes as usize;
    let mut done = 0;
    while done < bytes {
        let at = piece.offset + done as u64;
        let head = (at % ALIGN as u64) as usize;
        let part = (staging.len() - head).min(bytes - done);
        let needed = head + part;
        let span = Span { offset: at - head as u64, needed, granule: ALIGN };
        let aligned = &mut staging[..needed.next_multiple_of(ALIGN)];
        fill(from, span, aligned, tally)
            .map_err(|failure| failed(from.file, piece, failure, done as i64 - head as i64))?;
        sink(done, &staging[head..needed]);
        done += part;
    }
    Ok(())
}

/// Reads until the needed bytes are there. A short read is continued at the last multiple of the granule that
/// it reached; one that gets no further than those before means the end of the file.
fn fill(from: Source<'_>, span: Span, out: &mut [u8], tally: &mut Tally) -> Result<(), Failure> {
    let mut found = 0;
    loop {
        let start = found - found % span.granule;
        let end = out.len().min(start + MAX_READ_BYTES);
        let target = &mut out[start..end];
        let read = read_once(from, span.offset + start as u64, target, tally);
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
    from: Source<'_>,
    offset: u64,
    out: &mut [u8],
    tally: &mut Tally,
) -> io::Result<usize> {
    let mut retries = 0;
    loop {
        tally.reads += 1;
        let error = match from.reader.read_at(from.file, offset, out) {
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

/// Puts bytes `done..` of a run of chunks to where `place` says chunk `i` begins.
fn scatter(
    mut part: &[u8],
    done: usize,
    chunk: usize,
    place: impl Fn(usize) -> usize,
    out: &mut [u8],
) {
    let (mut i, mut within) = (done / chunk, done % chunk);
    while !part.is_empty() {
        let (now, later) = part.split_at(part.len().min(chunk - within));
        let at = place(i) + within;
        out[at..at + now.len()].copy_from_slice(now);
        (part, i, within) = (later, i + 1, 0);
    }
}

/// Scales that serve `n_blocks` blocks.
fn shared_scales(n_blocks: usize, tiles: Tiles) -> usize {
    let (row, rows) = (tiles.blocks as usize, tiles.rows as usize);
    (tiles.before as usize + n_blocks / row).div_ceil(rows) * row
}

/// Puts bytes `done..` of a grid of scales to the front of every block that they serve.
fn spread(
    part: &[u8],
    done: usize,
    scale: usize,
    tiles: Tiles,
    (n_blocks, stride): (usize, usize),
    out: &mut [u8],
) {
    let (row, rows, before) = (tiles.blocks as usize, tiles.rows as usize, tiles.before as usize);
    let n_rows = n_blocks / row;
    for (at, byte) in (done..).zip(part) {
        let (i, within) = (at / scale, at % scale);
        let first = (i / row * rows).saturating_sub(before);
        let end = n_rows.min(((i / row + 1) * rows).saturating_sub(before));
        for r in first..end {
            out[(r * row + i % row) * stride + within] = *byte;
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

//! Reads that the caller waits for: resident tensors, at load time.
//!
//! They go through the same threads in chunks, a few at a time, so that a single large tensor keeps the disk busy.
#![allow(
    unsafe_code,
    reason = "a borrowed slice is lent to reader threads for the length of a call"
)]

use std::collections::VecDeque;

use checkpoint::{Piece, Pieces};
use units::{ExpertKey, FileIndex};

use crate::destination::Destination;
use crate::error::ReadError;
use crate::queue::Queue;
use crate::request::{Priority, ReadRequest, Ticket};
use crate::schedule::Reply;
use crate::store::Store;

/// Bytes of a tensor that are one request.
const CHUNK_BYTES: usize = 4 << 20;

/// Chunks in flight for each reader thread: one at work and one waiting.
const CHUNKS_PER_THREAD: usize = 2;

/// A stretch of a file and the memory that it goes to.
#[derive(Debug)]
pub struct ResidentRead {
    /// The file.
    pub file: FileIndex,
    /// Where in the file it begins, any byte.
    pub offset: u64,
    /// Filled to its end. Aligned or not.
    pub destination: Destination,
}

impl Store {
    /// Fills `out` from a file, starting at any byte, and returns when all of it is there.
    ///
    /// # Errors
    /// The first [`ReadError`] of a chunk; `out` then holds an unspecified mix.
    ///
    /// # Panics
    /// If the store has no such file.
    pub fn read_blocking(
        &self,
        file: FileIndex,
        offset: u64,
        out: &mut [u8],
    ) -> Result<(), ReadError> {
        // SAFETY: `out` is borrowed for the length of this call, and `read_many` has ended all reads when it
        // returns or unwinds (`Flight`).
        let destination = unsafe { Destination::lend(out) };
        self.read_many([ResidentRead { file, offset, destination }], &mut |_| {})
    }

    /// Fills `out` with a piece, whose `place` is not looked at, and returns when all of it is there.
    ///
    /// # Errors
    /// As [`Self::read_blocking`].
    ///
    /// # Panics
    /// If the store has no such file, or `out` is not as long as the piece is in memory.
    pub fn read_piece(&self, piece: Piece, out: &mut [u8]) -> Result<(), ReadError> {
        assert_eq!(piece.memory_bytes(), out.len() as u64, "room for exactly the piece");
        let most = CHUNKS_PER_THREAD * self.threads();
        let mut flight = Flight { queue: self.queue(), tickets: VecDeque::with_capacity(most) };
        let mut rest = out;
        for part in (Piece { place: 0, ..piece }).split(CHUNK_BYTES as u64) {
            self.assert_files(&part);
            if flight.tickets.len() == most {
                flight.land()?;
            }
            let (now, later) = rest.split_at_mut(part.memory_bytes() as usize);
            rest = later;
            // SAFETY: `out` is borrowed for the length of this call, and `flight` ends all reads when it is left.
            flight.launch(Piece { place: 0, ..part }, unsafe { Destination::lend(now) });
        }
        while !flight.tickets.is_empty() {
            flight.land()?;
        }
        Ok(())
    }

    /// Fills many destinations and returns when all bytes are there. `progress` is told the bytes of every chunk.
    ///
    /// # Errors
    /// The first [`ReadError`] of a chunk, after which no destination is touched any more; they then hold an
    /// unspecified mix.
    ///
    /// # Panics
    /// If the store has no such file.
    pub fn read_many(
        &self,
        reads: impl IntoIterator<Item = ResidentRead>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), ReadError> {
        let most = CHUNKS_PER_THREAD * self.threads();
        let mut flight = Flight { queue: self.queue(), tickets: VecDeque::with_capacity(most) };
        for ResidentRead { file, offset, destination } in reads {
            self.assert_file(file);
            let mut place = 0;
            for destination in destination.chunks(CHUNK_BYTES) {
                if flight.tickets.len() == most {
                    progress(flight.land()?);
                }
                let bytes = destination.len() as u64;
                let offset = offset.saturating_add(place);
                let piece = Piece { file, offset, bytes, ..Piece::default() };
                flight.launch(piece, destination);
                place += bytes;
            }
        }
        while !flight.tickets.is_empty() {
            progress(flight.land()?);
        }
        Ok(())
    }
}

/// Chunks that are being read. However it goes, none is when this is gone.
struct Flight<'a> {
    queue: &'a Queue,
    /// Oldest first.
    tickets: VecDeque<Ticket>,
}

impl Flight<'_> {
    fn launch(&mut self, piece: Piece, destination: Destination) {
        let mut pieces = Pieces::default();
        pieces.push(piece);
        let request = ReadRequest { key: ExpertKey::default(), pieces, destination };
        self.tickets.push_back(self.queue.submit(request, Priority::Demand, Reply::Ticket));
    }

    /// Waits for the oldest chunk.
    fn land(&mut self) -> Result<u64, ReadError> {
        self.tickets.pop_front().map_or(Ok(0), |ticket| self.queue.wait_for(ticket))
    }
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        for ticket in std::mem::take(&mut self.tickets) {
            if !self.queue.cancel(ticket) {
                // The first error was reported already.
                let _ = self.queue.wait_for(ticket);
            }
        }
    }
}

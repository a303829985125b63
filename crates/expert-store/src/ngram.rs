//! Rows of the n-gram table: small, scattered, and all known before a pass begins.
//!
//! A pass asks for all rows of its tokens at once ([`NgramStore::request`]), computes what does not need them, and
//! waits ([`NgramStore::wait`]). Each distinct row is read at most once a pass, in the order of the table; rows next to
//! each other are one read. Readers are this store's own, since small reads need more of them in flight than large
//! ones, and neither kind waits behind the other.
//!
//! What is shown is either all rows of the pass or none: after an error there is nothing to look at.
#![allow(unsafe_code, reason = "memory of the rows is lent to reader threads across calls")]

mod cache;

use std::path::PathBuf;
use std::time::Instant;

use checkpoint::{NgramTable, Piece, Pieces};
use units::ExpertKey;

use self::cache::RowCache;
use crate::counters::{Traffic, micros};
use crate::destination::Destination;
use crate::disks::{Mirror, Notice};
use crate::error::{ReadError, StoreError};
use crate::file::DirectMode;
use crate::reader::faulty::FaultPlan;
use crate::reader::simulated::SimulatedDisk;
use crate::request::{Priority, ReadRequest};
use crate::store::{Store, StoreOptions};

/// Reader threads for all disks together: reads of one page are over so soon that a disk idles with fewer.
const THREADS: usize = 8;

/// Requests in flight; each holds up to nine rows or runs of rows. More are submitted as these end.
const MOST_IN_FLIGHT: usize = 2048;

/// Rows next to each other that are one read: no run has more pieces than a request takes.
const LONGEST_RUN: u64 = 8;

/// Memory of one request in flight: its place in a queue that may have doubled.
const REQUEST_BYTES: u64 = 4096;

/// How an n-gram store reads and what it keeps.
#[derive(Debug, Clone)]
pub struct NgramOptions {
    /// Most tokens of a pass.
    pub max_tokens: usize,
    /// Rows of a token.
    pub heads: usize,
    /// Rows to keep after their pass.
    pub cache_rows: usize,
    /// Whether reads may go past the page cache.
    pub direct: DirectMode,
    /// Copies of files on other disks.
    pub mirrors: Vec<Mirror>,
    /// Whom to tell when a disk drops out.
    pub notice: Option<Notice>,
    /// Another disk, whose times reads take; nothing else shares it.
    pub simulate: Option<SimulatedDisk>,
    /// Reads that fail on purpose: for tests.
    pub faults: Option<FaultPlan>,
}

/// What was asked for and read so far; subtract two to get a phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NgramCounters {
    /// Rows that tokens needed, one for each head and token.
    pub rows: u64,
    /// Of those, found in the cache or needed by an earlier token of the same pass.
    pub hits: u64,
    /// Calls of the reader.
    pub reads: u64,
    /// Bytes of rows that were read.
    pub payload_bytes: u64,
    /// Bytes that the system delivered, also those around the rows that alignment adds.
    pub device_bytes: u64,
    /// Time in which nothing could be computed because rows were missing.
    pub wait_us: u64,
}

impl NgramCounters {
    /// What happened since `earlier`.
    #[must_use]
    pub const fn minus(&self, earlier: &Self) -> Self {
        Self {
            rows: self.rows - earlier.rows,
            hits: self.hits - earlier.hits,
            reads: self.reads - earlier.reads,
            payload_bytes: self.payload_bytes - earlier.payload_bytes,
            device_bytes: self.device_bytes - earlier.device_bytes,
            wait_us: self.wait_us - earlier.wait_us,
        }
    }

    /// Both together.
    #[must_use]
    pub const fn plus(&self, other: &Self) -> Self {
        Self {
            rows: self.rows + other.rows,
            hits: self.hits + other.hits,
            reads: self.reads + other.reads,
            payload_bytes: self.payload_bytes + other.payload_bytes,
            device_bytes: self.device_bytes + other.device_bytes,
            wait_us: self.wait_us + other.wait_us,
        }
    }
}

/// Where a pass stands.
#[derive(Debug)]
enum State {
    /// No pass, or one that failed.
    Nothing,
    /// Reads are in flight. `rest` is the memory of the missing rows from `submitted` on.
    Reading { submitted: usize, rest: Destination },
    /// All rows are in memory.
    Ready,
}

/// Reads rows of the n-gram table, a pass at a time.
pub struct NgramStore {
    // Dropped first: it joins its readers, who write to `bytes`.
    store: Store,
    state: State,
    table: NgramTable,
    cache: RowCache,
    /// The row of each token and head, `[tokens, heads]`.
    wanted: Vec<u64>,
    /// Distinct rows that are read, ascending; row `i` goes to place `i` of `bytes`.
    missing: Vec<u64>,
    /// Distinct rows that the cache had, ascending; they lie behind the missing ones.
    cached: Vec<u64>,
    /// `[places, row_bytes]`.
    bytes: Vec<u8>,
    heads: usize,
    rows: u64,
    hits: u64,
    wait_us: u64,
}

impl NgramStore {
    /// Opens the files of a checkpoint, in the order of [`units::FileIndex`], and starts reader threads.
    ///
    /// # Errors
    /// See [`Store::open`].
    pub fn open(
        files: &[PathBuf],
        table: NgramTable,
        options: NgramOptions,
    ) -> Result<Self, StoreError> {
        let NgramOptions {
            max_tokens,
            heads,
            cache_rows,
            direct,
            mirrors,
            notice,
            simulate,
            faults,
        } = options;
        // The plan counts their staging.
        let threads = (THREADS / (1 + mirrors.len())).max(1);
        let most = max_tokens * heads;
        let row_bytes = table.row_bytes();
        Ok(Self {
            store: Store::open(
                files,
                StoreOptions {
                    threads,
                    direct,
                    mirrors,
                    notice,
                    simulate,
                    faults,
                    ..StoreOptions::default()
                },
            )?,
            state: State::Nothing,
            cache: RowCache::new(cache_rows.min(table.rows() as usize), row_bytes),
            table,
            wanted: Vec::with_capacity(most),
            missing: Vec::with_capacity(most),
            cached: Vec::with_capacity(most),
            bytes: vec![0; most * row_bytes],
            heads,
            rows: 0,
            hits: 0,
            wait_us: 0,
        })
    }

    /// Memory of the rows that are kept.
    pub fn cache_bytes(table: &NgramTable, cache_rows: usize) -> u64 {
        RowCache::memory_bytes(cache_rows.min(table.rows() as usize), table.row_bytes())
    }

    /// Memory for passes of so many tokens: their rows, the reads in flight, the readers' staging.
    pub fn pass_bytes(row_bytes: usize, tokens: u64, heads: u64) -> u64 {
        let rows = tokens * heads;
        let in_flight = rows.div_ceil(LONGEST_RUN).min(MOST_IN_FLIGHT as u64);
        let rows = rows * (row_bytes + 3 * size_of::<u64>()) as u64;
        rows + in_flight * REQUEST_BYTES + Store::staging_bytes(THREADS)
    }

    /// The table that rows come from.
    pub const fn table(&self) -> &NgramTable {
        &self.table
    }

    /// Totals since the start; complete between passes.
    pub fn counters(&self) -> NgramCounters {
        let Traffic { reads, payload_bytes, device_bytes, .. } = self.store.counters().demand;
        let Self { rows, hits, wait_us, .. } = *self;
        NgramCounters { rows, hits, reads, payload_bytes, device_bytes, wait_us }
    }

    /// Puts the rows of a pass in flight, `wanted` being `[tokens, heads]`. An earlier pass is forgotten.
    ///
    /// # Panics
    /// If there are more tokens than were reserved, or the table has no such row.
    pub fn request(&mut self, wanted: impl IntoIterator<Item = u64>) {
        self.forget();
        self.wanted.extend(wanted);
        let (n, row_bytes) = (self.wanted.len(), self.table.row_bytes());
        assert!(n.is_multiple_of(self.heads) && n * row_bytes <= self.bytes.len(), "a pass");
        self.missing.extend_from_slice(&self.wanted);
        self.missing.sort_unstable();
        self.missing.dedup();
        assert!(self.missing.last().is_none_or(|last| *last < self.table.rows()), "rows exist");
        // Cached rows are copied now, since others will take their places; first to the end of the memory, as it is
        // not known yet how many are missing.
        let end = self.bytes.len();
        let Self { cache, cached, bytes, missing, .. } = self;
        missing.retain(|row| {
            let Some(found) = cache.get(*row) else { return true };
            cached.push(*row);
            let start = end - cached.len() * row_bytes;
            bytes[start..start + row_bytes].copy_from_slice(found);
            false
        });
        self.rows += n as u64;
        self.hits += (n - self.missing.len()) as u64;
        let rows = &mut self.bytes[..self.missing.len() * row_bytes];
        // SAFETY: until all reads have ended, `bytes` is neither touched (only `row` looks at it, in state `Ready`, and
        // only `request`, after `forget`, writes to it) nor moved nor freed (the store is dropped before it).
        let rest = unsafe { Destination::lend(rows) };
        self.state = State::Reading { submitted: 0, rest };
        self.submit();
    }

    /// Waits for all rows of the pass.
    ///
    /// # Errors
    /// The first [`ReadError`]; the pass is then forgotten.
    ///
    /// # Panics
    /// If no pass was requested.
    pub fn wait(&mut self) -> Result<(), ReadError> {
        assert!(matches!(self.state, State::Reading { .. }), "rows were requested");
        let since = Instant::now();
        while self.store.outstanding() > 0 {
            if let Err(error) = self.store.wait_any().result {
                self.forget();
                self.wait_us += micros(since.elapsed());
                return Err(error);
            }
            self.submit();
        }
        self.wait_us += micros(since.elapsed());
        self.state = State::Ready;
        let row_bytes = self.table.row_bytes();
        for (row, bytes) in self.missing.iter().zip(self.bytes.chunks_exact(row_bytes)) {
            self.cache.insert(*row, bytes);
        }
        Ok(())
    }

    /// The bytes of a token's row.
    ///
    /// # Panics
    /// If [`Self::wait`] did not succeed for this pass, or has no such token.
    pub fn row(&self, token: usize, head: usize) -> &[u8] {
        assert!(matches!(self.state, State::Ready) && head < self.heads, "rows that have arrived");
        let row = self.wanted[token * self.heads + head];
        let row_bytes = self.table.row_bytes();
        let start = if let Ok(place) = self.missing.binary_search(&row) {
            place * row_bytes
        } else {
            let place = self.cached.binary_search(&row).expect("every row is missing or cached");
            self.bytes.len() - (place + 1) * row_bytes
        };
        &self.bytes[start..start + row_bytes]
    }

    /// Waits for what is in flight and forgets the pass.
    fn forget(&mut self) {
        self.state = State::Nothing;
        while self.store.outstanding() > 0 {
            // Nobody is left to whom it matters how these end.
            drop(self.store.wait_any());
        }
        self.wanted.clear();
        self.missing.clear();
        self.cached.clear();
    }

    /// Puts in flight what may be.
    fn submit(&mut self) {
        while self.store.outstanding() < MOST_IN_FLIGHT {
            let State::Reading { submitted, rest } =
                std::mem::replace(&mut self.state, State::Nothing)
            else {
                unreachable!("rows are submitted while they are read");
            };
            let (pieces, rows) = next_request(&self.table, &self.missing[submitted..]);
            let (destination, rest) = rest.split_at(rows * self.table.row_bytes());
            self.state = State::Reading { submitted: submitted + rows, rest };
            if rows == 0 {
                return;
            }
            let request = ReadRequest { key: ExpertKey::default(), pieces, destination };
            self.store.submit(request, Priority::Demand);
        }
    }
}

/// Pieces of the first of `rows`, as many as a request takes; and how many rows they are.
fn next_request(table: &NgramTable, rows: &[u64]) -> (Pieces, usize) {
    let (mut pieces, mut taken) = (Pieces::default(), 0);
    while let Some(first) = rows.get(taken) {
        let following = rows[taken..].iter().zip(*first..first + LONGEST_RUN);
        let n = following.take_while(|(row, next)| *row == next).count();
        let (run, n) = table.pieces(*first, n as u64);
        if pieces.len() + run.len() > Pieces::MOST {
            break;
        }
        let place = (taken * table.row_bytes()) as u64;
        for piece in run.iter() {
            pieces.push(Piece { place: place + piece.place, ..*piece });
        }
        taken += n as usize;
    }
    (pieces, taken)
}

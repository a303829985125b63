//! The store: open files, reader threads, and the queue between them and the caller.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use checkpoint::Piece;
use units::FileIndex;

use crate::counters::StoreCounters;
use crate::destination::SlotMemory;
use crate::disks::{Disks, Mirror, Notice};
use crate::error::StoreError;
use crate::file::{DirectMode, FileStatus, OpenFile};
use crate::queue::Queue;
use crate::reader::faulty::{FaultPlan, FaultyReader};
use crate::reader::simulated::{Line, SimulatedDisk, SimulatedReader};
use crate::reader::{Reader, ReaderKind};
use crate::request::{Completion, Priority, ReadRequest, Ticket};
use crate::schedule::{Claim, Reply};
use crate::slots::{self, Slots};
use crate::staging::Staging;
use crate::transfer::{STAGING_BYTES, Transfer};

/// Reader threads unless asked otherwise: enough to keep a disk busy at the piece sizes of experts, few enough that
/// the first record of a layer arrives early (`examples/read_rate.rs` shows both for a disk).
pub const DEFAULT_THREADS: usize = 4;

/// Most reader threads.
pub const MAX_THREADS: usize = 64;

/// Most disks that a store reads from, mirrors included.
pub const MAX_DISKS: usize = 8;

/// Readers call the system and little else.
const STACK_BYTES: usize = 256 << 10;

/// How a store reads.
#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// Reader threads, 1 to [`MAX_THREADS`]: as many reads are at the disk at once.
    pub threads: usize,
    /// Pieces that are much longer are read in parts of about this many bytes, by several threads; none is by default.
    pub part_bytes: u64,
    /// Whether reads may go past the page cache.
    pub direct: DirectMode,
    /// Which calls of the system read.
    pub reader: ReaderKind,
    /// Copies of files on other disks, each of which gets as many threads.
    pub mirrors: Vec<Mirror>,
    /// Whom to tell when a disk drops out.
    pub notice: Option<Notice>,
    /// Another disk, whose times reads take: of the files, and of each mirror for itself.
    pub simulate: Option<SimulatedDisk>,
    /// Reads that fail on purpose: for tests.
    pub faults: Option<FaultPlan>,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            threads: DEFAULT_THREADS,
            part_bytes: u64::MAX,
            direct: DirectMode::Auto,
            reader: ReaderKind::default(),
            mirrors: Vec::new(),
            notice: None,
            simulate: None,
            faults: None,
        }
    }
}

impl StoreOptions {
    /// Threads for all disks together.
    pub fn all_threads(&self) -> usize {
        all_threads(self.threads, self.mirrors.len())
    }
}

/// Reader threads of a store with so many for each disk; no more than [`MAX_THREADS`].
pub fn all_threads(threads: usize, mirrors: usize) -> usize {
    threads.saturating_mul(1 + mirrors).min(MAX_THREADS)
}

/// Reads experts into slots and tensors into resident memory.
///
/// Dropping it waits for the reads that are at the disk and discards the others; afterwards no destination is
/// touched. So drop it before the memory that it reads into.
pub struct Store {
    disks: Arc<Disks>,
    slots: Arc<Slots>,
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
}

impl Store {
    /// Opens the files of a checkpoint, in the order of [`FileIndex`], and starts the reader threads.
    ///
    /// # Errors
    /// A path that is not a readable regular file, or threads that cannot be started; see [`StoreError`].
    pub fn open(files: &[PathBuf], options: StoreOptions) -> Result<Self, StoreError> {
        let StoreOptions { threads, part_bytes, direct, reader, mirrors, notice, simulate, faults } =
            options;
        if !(1..=MAX_THREADS).contains(&threads) {
            return Err(StoreError::ThreadCount { found: threads, most: MAX_THREADS });
        }
        if mirrors.len() >= MAX_DISKS {
            return Err(StoreError::MirrorCount { found: mirrors.len(), most: MAX_DISKS - 1 });
        }
        let disks = Arc::new(Disks::open(files, &mirrors, direct, notice)?);
        let threads = all_threads(threads, mirrors.len());
        let plans = std::iter::once(faults).chain(mirrors.into_iter().map(|mirror| mirror.faults));
        let way = |faults| {
            let simulated = simulate.map(|disk| (disk, Arc::default()));
            Way { kind: reader, simulated, faults }
        };
        let ways: Vec<Way> = plans.map(way).collect();
        // Threads are added to the store, so that an error on the way ends those that run.
        let queue = Arc::new(Queue::new(threads, part_bytes));
        let slots = Arc::default();
        let mut store = Self { disks, slots, queue, threads: Vec::with_capacity(threads) };
        for index in 0..threads {
            let readers = ways.iter().map(|way| way.reader(&store.slots));
            let readers = readers
                .collect::<io::Result<_>>()
                .map_err(|source| StoreError::Reader { kind: reader, source })?;
            let transfer = Transfer { disks: Arc::clone(&store.disks), readers };
            let queue = Arc::clone(&store.queue);
            let thread = thread::Builder::new()
                .name(format!("read-{index}"))
                .stack_size(STACK_BYTES)
                .spawn(move || serve(&queue, &transfer))
                .map_err(|source| StoreError::Thread { index, source })?;
            store.threads.push(thread);
        }
        Ok(store)
    }

    /// Puts a request in flight and returns at once.
    ///
    /// # Panics
    /// If a piece names a file that the store does not have, pieces overlap or do not fit in the destination, or
    /// more than 65536 requests are outstanding.
    pub fn submit(&self, request: ReadRequest, priority: Priority) -> Ticket {
        for piece in request.pieces.iter() {
            self.assert_files(piece);
        }
        self.queue.submit(request, priority, Reply::Channel)
    }

    /// Blocks until a request has ended, successfully or not. Completions come in the order of their ends.
    ///
    /// # Panics
    /// If nothing is outstanding: it would block forever.
    pub fn wait_any(&self) -> Completion {
        self.queue.wait_any()
    }

    /// A completion, if there is one.
    pub fn try_any(&self) -> Option<Completion> {
        self.queue.try_any()
    }

    /// Requests whose completions were not taken, and that were not cancelled.
    pub fn outstanding(&self) -> usize {
        self.queue.outstanding()
    }

    /// Takes a request back.
    ///
    /// True: its destination will never be touched again and there will be no completion. False: it is at the disk
    /// or has ended, and its completion will come or has come.
    pub fn cancel(&self, ticket: Ticket) -> bool {
        self.queue.cancel(ticket)
    }

    /// Raises a speculative request to [`Priority::Promoted`]. False if it is not speculative or has ended.
    pub fn adopt(&self, ticket: Ticket) -> bool {
        self.queue.adopt(ticket)
    }

    /// What was done since the store was opened.
    pub fn counters(&self) -> StoreCounters {
        self.queue.counters()
    }

    /// The files that it was opened with, and how each is read.
    pub fn files(&self) -> Vec<FileStatus> {
        self.disks.own().map(OpenFile::status).collect()
    }

    /// Whether every file and every copy of one is read past the page cache.
    pub fn direct(&self) -> bool {
        self.disks.all().all(OpenFile::direct)
    }

    /// Disks that have not dropped out.
    pub fn live_disks(&self) -> usize {
        self.disks.live()
    }

    /// Reader threads.
    pub const fn threads(&self) -> usize {
        self.threads.len()
    }

    /// Says where the slots are, once and before they are read into: `io_uring` then prepares the memory of each when it
    /// first reads into it, and not again for every read. Other readers have nothing to prepare.
    pub fn prepare_slots(&self, slots: Vec<SlotMemory>) {
        self.slots.set(slots);
    }

    /// Most memory that the system takes, apart from the process, to keep slots of so many bytes prepared.
    pub const fn pinning_bytes(reader: ReaderKind, slot_bytes: u64, threads: usize) -> u64 {
        match reader {
            ReaderKind::Pread => 0,
            ReaderKind::IoUring => slots::pinning_bytes(slot_bytes, threads),
        }
    }

    /// Most memory that a store holds for staging: one buffer a thread, while resident tensors are read, and for good
    /// when experts are put together from several runs of bytes.
    pub const fn staging_bytes(threads: usize) -> u64 {
        (threads * STAGING_BYTES) as u64
    }

    pub(crate) fn queue(&self) -> &Queue {
        &self.queue
    }

    pub(crate) fn assert_files(&self, piece: &Piece) {
        self.assert_file(piece.file);
        if let Some(blocks) = &piece.blocks {
            self.assert_file(blocks.scales.file);
            if let Some(biases) = blocks.biases {
                self.assert_file(biases.file);
            }
        }
    }

    pub(crate) fn assert_file(&self, file: FileIndex) {
        let n_files = self.disks.own().len();
        assert!(file.get() < n_files, "file {file} of {n_files}");
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.queue.close();
        for thread in self.threads.drain(..) {
            // A reader that panicked has said so on stderr, and whoever waited got an error.
            let _ = thread.join();
        }
    }
}

/// How one disk is read.
struct Way {
    kind: ReaderKind,
    simulated: Option<(SimulatedDisk, Arc<Line>)>,
    faults: Option<FaultPlan>,
}

impl Way {
    /// What reads it, for one thread.
    fn reader(&self, slots: &Arc<Slots>) -> io::Result<Box<dyn Reader>> {
        let mut inner = self.kind.reader(slots)?;
        if let Some((disk, line)) = &self.simulated {
            inner = Box::new(SimulatedReader { inner, disk: *disk, line: Arc::clone(line) });
        }
        Ok(match &self.faults {
            None => inner,
            Some(plan) => Box::new(FaultyReader { inner, plan: plan.clone() }),
        })
    }
}

/// The life of a reader thread.
fn serve(queue: &Queue, transfer: &Transfer) {
    let mut staging = None;
    loop {
        let Some(mut job) = queue.try_take().or_else(|| {
            // Resident tensors are done for now, and the plan may count on this memory.
            staging.take_if(|staging: &mut Staging| !staging.for_experts);
            queue.take()
        }) else {
            return;
        };
        let alarm = Alarm { queue, claim: job.claim };
        let outcome = transfer.run(&job.piece, &mut job.window, &mut staging);
        std::mem::forget(alarm);
        if let Some(staging) = &mut staging {
            staging.for_experts = !job.resident;
        }
        queue.finish(job, outcome);
    }
}

/// Dropped only if a read panics: tells everybody who waits for it.
struct Alarm<'a> {
    queue: &'a Queue,
    claim: Claim,
}

impl Drop for Alarm<'_> {
    fn drop(&mut self) {
        self.queue.stop(self.claim);
    }
}

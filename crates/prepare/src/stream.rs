//! Reading in order, with several reads at a time.
//!
//! A job is a piece of a file. Jobs are dealt to a few threads like cards, and what comes of them is taken from the
//! threads in the same order: so the disk is busy while the caller works, and few buffers exist.

use std::sync::mpsc::{self, Receiver, Sender, SyncSender};
use std::thread;

use checkpoint::Piece;
use expert_store::{ReadError, Store};

/// Bytes of a buffer, or a little more where blocks are put together row by row.
pub(crate) const CHUNK_BYTES: u64 = 1 << 20;

/// Threads, as many as a store has readers.
const LANES: usize = expert_store::DEFAULT_THREADS;

/// What is to be read, and what it belongs to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Job {
    /// A number that the caller gave.
    pub(crate) of: usize,
    /// At most [`CHUNK_BYTES`] in memory, or a row of blocks. Its place is the caller's.
    pub(crate) piece: Piece,
}

/// What came of a job, and its bytes.
type Done<T> = (Job, T, Vec<u8>);

/// What takes the results: the job, what `work` made of its bytes, and those.
pub(crate) type Take<'a, T, E> = &'a mut dyn FnMut(&Job, T, &[u8]) -> Result<(), E>;

/// Results of one thread, and the way back for its buffers.
type Lane<T> = (Receiver<Done<T>>, Sender<Vec<u8>>);

/// Does `work` on the bytes of all jobs, or on the error that came instead, several at a time; gives `take` what comes of
/// that in the order of the jobs.
///
/// # Errors
/// Those of `take`, after which no more is read.
pub(crate) fn stream<T: Send, E, I: Iterator<Item = Job>>(
    store: &Store,
    jobs: &(impl Fn() -> I + Sync),
    work: &(impl Fn(&Job, Result<&[u8], ReadError>) -> T + Sync),
    take: Take<'_, T, E>,
) -> Result<(), E> {
    thread::scope(|scope| {
        let mut lanes: Vec<Lane<T>> = Vec::with_capacity(LANES);
        for lane in 0..LANES {
            // One waits here while the next is read.
            let (done, results) = mpsc::sync_channel(1);
            let (free, buffers) = mpsc::channel();
            lanes.push((results, free));
            scope.spawn(move || {
                serve(store, jobs().skip(lane).step_by(LANES), work, (done, buffers));
            });
        }
        for lane in (0..LANES).cycle() {
            let (results, free) = &lanes[lane];
            // The first thread without a job is the one whose turn it is: there are no more.
            let Ok((job, value, bytes)) = results.recv() else { break };
            take(&job, value, &bytes)?;
            // A thread that has ended needs no buffer.
            let _ = free.send(bytes);
        }
        Ok(())
    })
}

/// The life of a thread: ends with its jobs, or when nobody takes what it has.
fn serve<T>(
    store: &Store,
    jobs: impl Iterator<Item = Job>,
    work: &impl Fn(&Job, Result<&[u8], ReadError>) -> T,
    (done, buffers): (SyncSender<Done<T>>, Receiver<Vec<u8>>),
) {
    for job in jobs {
        let mut bytes = buffers.try_recv().unwrap_or_default();
        bytes.resize(job.piece.memory_bytes() as usize, 0);
        let outcome = store.read_piece(job.piece, &mut bytes);
        let value = work(&job, outcome.map(|()| bytes.as_slice()));
        if done.send((job, value, bytes)).is_err() {
            return;
        }
    }
}

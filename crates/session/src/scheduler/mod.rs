//! Several people at once: jobs wait in a bounded queue and run side by side on one engine.
//!
//! The engine lives on a thread of its own. It runs *passes* of two kinds, and they take turns: one over the next parts
//! of the prompts that are being read, and one over the last token of every job that generates. The rows of a pass share
//! every read of weights and of experts, and a row's bits do not depend on who shares the pass: each answer is that of a
//! run alone. Between two layers the engine looks whether a pass is still wanted.
//!
//! What was read of a prompt is kept: the next one that begins the same goes on from there.
//!
//! Start at [`Scheduler::start`]; the order of passes is in `worker.rs`.

mod handle;
mod job;
mod pace;
mod prefix;
mod seat;
mod shared;
mod stats;
mod worker;

use std::time::Duration;

use expert_store::Notice;
use units::{Bytes, ExpertKey};

use crate::generate::PromptError;

pub use handle::Scheduler;
pub use job::{
    CancelToken, Choice, ChooseError, Chooser, EventSink, Job, JobError, JobEvent, JobId,
    JobReport, SamplerChooser,
};
pub use stats::{CancelCounters, PrefixCounters, SchedulerStats};

/// What an engine reserves to serve several jobs; part of its plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Serving {
    /// Jobs that run side by side, each with the whole context.
    pub sequences: u32,
    /// Jobs that may wait besides.
    pub queue: u32,
    /// Bytes of prefixes that are kept in memory, apart from those that sequences still hold.
    pub prefix: Bytes,
    /// Bytes of what whoever submits jobs keeps of requests besides: connections, bodies, grammars.
    pub requests: Bytes,
}

/// Most jobs side by side: each row of logits of a model with 150,000 words takes 0.6 MB.
pub const MOST_SEQUENCES: u32 = 64;

/// What is kept of a job besides tokens: its events, its chooser, its place in tables.
const JOB_BYTES: u64 = 4 << 10;

impl Serving {
    /// Recurrent states of each sequence: the running one and the one that the next turn starts from; with a cache also
    /// the one that is on its way there.
    pub(crate) fn states(&self) -> u64 {
        if self.prefix > Bytes::ZERO { 3 } else { 2 }
    }

    /// Bytes of requests, and of jobs, with their tokens twice (those of the prompt, and those that a sequence holds).
    pub(crate) fn overhead(&self, context: u32) -> u64 {
        let jobs = u64::from(self.sequences) + u64::from(self.queue);
        self.requests.0 + jobs * (JOB_BYTES + 8 * u64::from(context))
    }
}

impl Default for Serving {
    /// One sequence, as for a person at a terminal.
    fn default() -> Self {
        Self { sequences: 1, queue: 0, prefix: Bytes::ZERO, requests: Bytes::ZERO }
    }
}

/// How a scheduler works, as far as it costs no memory.
#[derive(Debug, Clone, Default)]
pub struct SchedulerOptions {
    /// Most rows of a pass over prompts while others generate, a multiple of 64; the engine's pass length when absent.
    /// With shorter ones others wait less for each, and prompts read more experts in all.
    pub piece_rows: Option<usize>,
    /// Keeps prefixes on disk too. What is written goes through the cache in memory.
    pub disk: Option<DiskOptions>,
    /// Experts to read in idle time, those first that matter most.
    pub preload: Vec<ExpertKey>,
    /// Whom to tell what a person should know, a line at a time.
    pub notice: Option<Notice>,
}

/// Prefixes on disk.
#[derive(Debug, Clone)]
pub struct DiskOptions {
    /// A folder of its own. It is made if it is not there.
    pub folder: std::path::PathBuf,
    /// Most bytes of all files in it.
    pub quota: Bytes,
}

/// Why an engine cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Guesses ahead are for one sequence.
    #[error(
        "guesses ahead (drafts, prompt lookup) are for one sequence at a time; start the server without them"
    )]
    Guesses,
    /// A length that is not on the grid.
    #[error(
        "pieces of {rows} rows: a multiple of 64 up to the pass length of {pass_rows} is needed"
    )]
    Piece {
        /// What was asked for.
        rows: usize,
        /// What the plan has.
        pass_rows: usize,
    },
    /// Memory for the sequences is not to be had.
    #[error(transparent)]
    Memory(#[from] model::ForwardError),
    /// The system gives no thread.
    #[error("no thread for the engine: {0}")]
    Thread(std::io::Error),
    /// The folder of prefixes cannot be used.
    #[error("{}: {source}; give another folder for prefixes, or none", folder.display())]
    Folder {
        /// As given.
        folder: std::path::PathBuf,
        /// What happened.
        source: std::io::Error,
    },
    /// What is written to disk goes through memory.
    #[error(
        "prefixes on disk need memory for prefixes of which there is none; reserve some, or keep none on disk"
    )]
    DiskWithoutMemory,
}

/// Why a job is not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// As many wait as may.
    #[error("{waiting} requests are waiting and no more may; try again in {} s", retry_after.as_secs())]
    QueueFull {
        /// Jobs in the queue.
        waiting: usize,
        /// When one of them will probably have begun: whole seconds, at least one.
        retry_after: Duration,
    },
    /// The prompt cannot be continued.
    #[error(transparent)]
    Prompt(#[from] PromptError),
    /// A token that the model does not have.
    #[error("token id {token} is outside of the model's vocabulary of {vocab}")]
    TokenOutOfRange {
        /// The id.
        token: u32,
        /// Words of the model.
        vocab: u32,
    },
    /// No job is taken any more.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// The engine panicked and is gone: no job is taken any more.
    #[error("the engine stopped: {message}; this is a bug")]
    EngineStopped {
        /// What it said.
        message: String,
    },
}

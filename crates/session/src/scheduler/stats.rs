//! What a scheduler counts, for whoever looks at it from outside.

use expert_store::NgramCounters;
use model::{ExpertCounters, LookaheadCounters};

/// A look at a scheduler: numbers since its start, unless they say otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SchedulerStats {
    /// Jobs that wait now.
    pub queued: usize,
    /// Jobs that run now.
    pub running: usize,
    /// Jobs that were taken.
    pub submitted: u64,
    /// Jobs that were not, since the queue was full.
    pub refused: u64,
    /// Jobs that ended with an answer.
    pub finished: u64,
    /// Jobs that failed, those that were cancelled not counted.
    pub failed: u64,
    /// Jobs that were taken back.
    pub cancelled: CancelCounters,
    /// Tokens of prompts that were read.
    pub prompt_rows: u64,
    /// Tokens of prompts that were not read again.
    pub cached_rows: u64,
    /// Tokens that were given out.
    pub generated_tokens: u64,
    /// Rows that ran to give them.
    pub generated_rows: u64,
    /// Passes over parts of prompts.
    pub prompt_passes: u64,
    /// Passes over generated rows, of however many jobs.
    pub decode_passes: u64,
    /// Layers that began. This one is up to date at any time, also in the middle of a pass.
    pub layers: u64,
    /// Experts: look-ups, reads, waits.
    pub experts: ExpertCounters,
    /// Rows of the n-gram table.
    pub ngrams: NgramCounters,
    /// Guesses of the next layer's experts.
    pub lookahead: LookaheadCounters,
    /// Prefixes that were kept.
    pub prefix: PrefixCounters,
}

/// Jobs that were taken back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CancelCounters {
    /// All of them, those that waited too.
    pub jobs: u64,
    /// Passes that ended before their last layer for it.
    pub cut_passes: u64,
    /// The layer that the last of these did not begin.
    pub last_layer: Option<u32>,
}

/// Prefixes of prompts that are kept, and what came of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrefixCounters {
    /// Prompts that were looked up.
    pub lookups: u64,
    /// Of those, that began with something kept.
    pub hits: u64,
    /// Rows that were not read again since a sequence still held them.
    pub held_rows: u64,
    /// The same from the cache in memory.
    pub memory_rows: u64,
    /// The same from disk.
    pub disk_rows: u64,
    /// Blocks of the grid in memory now.
    pub blocks: u64,
    /// Recurrent states in memory now.
    pub states: u64,
    /// Bytes of both.
    pub bytes: u64,
    /// Bytes of what left for something newer.
    pub evicted_bytes: u64,
    /// Bytes of files on disk now.
    pub disk_bytes: u64,
    /// Files on disk now.
    pub disk_files: u64,
    /// Bytes written to disk.
    pub disk_written_bytes: u64,
    /// Bytes read from disk.
    pub disk_read_bytes: u64,
    /// Files that were dropped, since they were damaged or of something else.
    pub disk_dropped: u64,
    /// Writes that failed.
    pub disk_failed: u64,
}

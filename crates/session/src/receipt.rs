//! What a run proves about itself: versioned JSON with one definition per counter.

use expert_store::{NgramCounters, SimulatedDisk};
use model::{AheadCounters, ExpertCounters, Lookahead, LookaheadCounters};
use serde::Serialize;

use crate::engine::Engine;
use crate::generate::ForcedOutcome;
use crate::reads::Reads;
use crate::sequence::Phase;
use crate::speculate::SpeculationCounters;

/// Version of the receipt's layout.
pub const RECEIPT_VERSION: u32 = 1;

/// The record of a run.
#[derive(Debug, Clone, Serialize)]
pub struct Receipt {
    /// [`RECEIPT_VERSION`].
    pub version: u32,
    /// Path of the model as given.
    pub model: String,
    /// `cpu`, `reference`, `deferred`.
    pub backend: String,
    /// Kernel threads.
    pub threads: usize,
    /// The budget and what was reserved under it.
    pub budget_bytes: u64,
    /// Sum of the plan.
    pub planned_bytes: u64,
    /// Highest resident set of the process.
    pub peak_rss_bytes: u64,
    /// Slots of the pool and experts of the model.
    pub slots: u64,
    /// Routed experts of the trunk, and of the draft head if it is loaded.
    pub experts: u64,
    /// Positions of the KV cache.
    pub context_tokens: u32,
    /// Memory of the draft head without its experts' slots, if it is loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub draft_bytes: Option<u64>,
    /// Rows of a prefill pass.
    pub pass_rows: usize,
    /// Whether reads bypassed the page cache.
    pub direct_reads: bool,
    /// How experts were read.
    pub reads: ReadsReceipt,
    /// The disk that was simulated, if one was: then no time here is that of this machine's disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub simulated_disk: Option<SimulatedReceipt>,
    /// Reading the prompt.
    pub prefill: PhaseReceipt,
    /// Generating: `tokens` counts the tokens after the first.
    pub decode: PhaseReceipt,
    /// Of `decode`: what came of guesses, where any were allowed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speculation: Option<SpeculationCounters>,
    /// Tokens that were generated.
    pub generated_tokens: u64,
    /// FNV-1a over the generated ids, to compare runs.
    pub output_hash: String,
    /// Bytes written to disk while running.
    pub written_bytes: u64,
    /// Reads of often used experts in idle time, since the model was loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hot_set: Option<AheadReceipt>,
    /// Reads of the next layer's experts in long passes, since the model was loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sweep: Option<AheadReceipt>,
    /// Guesses of the next layer's experts, since the model was loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lookahead: Option<LookaheadReceipt>,
    /// Wall time of each forced token.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub token_us: Vec<u64>,
}

/// One phase of a run.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct PhaseReceipt {
    /// Tokens run through the network.
    pub tokens: u64,
    /// Wall time.
    pub elapsed_us: u64,
    /// Tokens per second.
    pub tokens_per_second: f64,
    /// Time in which nothing could be computed because expert bytes were missing.
    pub wait_us: u64,
    /// Time in which any expert was on its way, whether something could be computed meanwhile or not.
    pub reading_us: u64,
    /// Expert look-ups: distinct experts per layer and pass.
    pub lookups: u64,
    /// Of those, found ready.
    pub hits: u64,
    /// Of those, read when they were needed.
    pub misses: u64,
    /// Of those, read ahead, and used for the first time.
    pub ahead: u64,
    /// Hits over look-ups.
    pub hit_rate: f64,
    /// Expert payload read.
    pub read_bytes: u64,
    /// The same per token.
    pub read_bytes_per_token: f64,
    /// Rows of the n-gram table, of a model that has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ngram: Option<NgramReceipt>,
}

/// How experts were read.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct ReadsReceipt {
    /// Reader threads: as many reads were at the disks at once.
    pub lanes: usize,
    /// `pread`, `io_uring`.
    pub reader: &'static str,
    /// Disks with copies of the files that took part to the end.
    pub disks: usize,
    /// Bytes of the parts in which long pieces were read, if they were.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part_bytes: Option<u64>,
    /// Bytes a second that the disk delivered when it was measured, if it was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub probed_bytes_per_second: Option<u64>,
}

impl ReadsReceipt {
    fn of(engine: &Engine) -> Self {
        let Reads { model, probed_bytes_per_second } = engine.options.reads.unwrap_or_default();
        Self {
            lanes: engine.network.experts().store().threads(),
            reader: engine.options.reader.name(),
            disks: engine.network.experts().store().live_disks(),
            part_bytes: (model.part_bytes != u64::MAX).then_some(model.part_bytes),
            probed_bytes_per_second,
        }
    }
}

/// A simulated disk.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct SimulatedReceipt {
    /// What every read took at least.
    pub latency_us: u64,
    /// Bytes a second of all reads together, if they were bounded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
}

impl From<SimulatedDisk> for SimulatedReceipt {
    fn from(disk: SimulatedDisk) -> Self {
        let SimulatedDisk { latency, bytes_per_second } = disk;
        let bytes_per_second = bytes_per_second.map(std::num::NonZero::get);
        Self { latency_us: latency.as_micros() as u64, bytes_per_second }
    }
}

/// Rows of the n-gram table in one phase.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct NgramReceipt {
    /// Rows that tokens needed.
    pub rows: u64,
    /// Of those, found in memory.
    pub hits: u64,
    /// Reads of the system.
    pub reads: u64,
    /// Bytes of rows read.
    pub read_bytes: u64,
    /// Bytes that the system delivered for them.
    pub device_bytes: u64,
    /// Time in which nothing could be computed because rows were missing; not part of the other.
    pub wait_us: u64,
}

impl NgramReceipt {
    fn of(counters: NgramCounters) -> Option<Self> {
        let NgramCounters { rows, hits, reads, payload_bytes, device_bytes, wait_us } = counters;
        let read_bytes = payload_bytes;
        (rows > 0).then_some(Self { rows, hits, reads, read_bytes, device_bytes, wait_us })
    }
}

impl From<&Phase> for PhaseReceipt {
    fn from(phase: &Phase) -> Self {
        let ExpertCounters { pool, store, wait_us, .. } = phase.experts;
        let per = |a: f64, b: u64| if b == 0 { 0.0 } else { a / b as f64 };
        Self {
            tokens: phase.tokens,
            elapsed_us: phase.elapsed.as_micros() as u64,
            tokens_per_second: phase.rate(),
            wait_us,
            reading_us: store.pending_us,
            lookups: pool.hits + pool.misses + pool.adopted,
            hits: pool.hits,
            misses: pool.misses,
            ahead: pool.adopted,
            hit_rate: per(pool.hits as f64, pool.hits + pool.misses + pool.adopted),
            read_bytes: store.payload_bytes,
            read_bytes_per_token: per(store.payload_bytes as f64, phase.tokens),
            ngram: NgramReceipt::of(phase.ngrams),
        }
    }
}

/// Reads of experts that no layer had asked for yet.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct AheadReceipt {
    /// Reads that were begun or waited to begin.
    pub issued: u64,
    /// Of those, whose expert was used while it was there or on its way.
    pub used: u64,
    /// Of those used, that were still on their way.
    pub late: u64,
    /// Of those issued, given up before they had ended.
    pub cancelled: u64,
    /// Of those issued, that failed before the expert was needed; it was read again then.
    pub failed: u64,
    /// Bytes of those used.
    pub used_bytes: u64,
    /// Bytes of experts that were read and left without any use.
    pub wasted_bytes: u64,
}

/// Guesses of the next layer's experts. The unit is one expert that one token chose in one layer.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct LookaheadReceipt {
    /// `tap`, `fitted` (the tap with its correction), `last-token`.
    pub kind: &'static str,
    /// Tokens that were decoded with guesses.
    pub tokens: u64,
    /// Trials that guesses lost, each of which turned them off for a while.
    pub losses: u64,
    /// Experts that were chosen in layers that had been guessed.
    pub chosen: u64,
    /// Share of those that the guess named, which names as many as are chosen.
    pub agreement: f64,
    /// Share of those that the token before had chosen in the same layer.
    pub repeated: f64,
    /// Experts that guesses named and that were neither there nor on their way.
    pub absent: u64,
    /// Share of those that were chosen.
    pub absent_precision: f64,
    /// What was read.
    pub reads: AheadReceipt,
}

impl LookaheadReceipt {
    fn of(engine: &Engine) -> Option<Self> {
        let kind = match engine.options.lookahead {
            Lookahead::Off => return None,
            Lookahead::Tap if engine.network.corrects_lookahead() => "fitted",
            Lookahead::Tap => "tap",
            Lookahead::LastToken => "last-token",
        };
        let counters = engine.network.lookahead_counters();
        let LookaheadCounters { tokens, losses, chosen, named, repeated, absent, absent_chosen } =
            counters;
        let share = |part: u64, all: u64| if all == 0 { 0.0 } else { part as f64 / all as f64 };
        Some(Self {
            kind,
            tokens,
            losses,
            chosen,
            agreement: share(named, chosen),
            repeated: share(repeated, chosen),
            absent,
            absent_precision: share(absent_chosen, absent),
            reads: engine.network.experts().counters().lookahead.into(),
        })
    }
}

impl From<AheadCounters> for AheadReceipt {
    fn from(counters: AheadCounters) -> Self {
        let AheadCounters { issued, used, late, cancelled, failed, used_bytes, wasted_bytes } =
            counters;
        Self { issued, used, late, cancelled, failed, used_bytes, wasted_bytes }
    }
}

impl PhaseReceipt {
    /// Time in which nothing could be computed, whatever was missing.
    fn all_waits_us(&self) -> u64 {
        self.wait_us + self.ngram.map_or(0, |ngram| ngram.wait_us)
    }

    /// Share of the wall time spent waiting for bytes.
    pub fn wait_share(&self) -> f64 {
        if self.elapsed_us == 0 { 0.0 } else { self.all_waits_us() as f64 / self.elapsed_us as f64 }
    }

    /// Milliseconds a token without the waits.
    pub fn compute_ms_per_token(&self) -> f64 {
        if self.tokens == 0 {
            0.0
        } else {
            self.elapsed_us.saturating_sub(self.all_waits_us()) as f64 / 1e3 / self.tokens as f64
        }
    }
}

impl Receipt {
    /// The record of one answer or run.
    pub fn new(engine: &Engine, prefill: &Phase, decode: &Phase, output: &[u32]) -> Self {
        Self {
            version: RECEIPT_VERSION,
            model: engine.path.display().to_string(),
            backend: engine.network.backend_name().to_owned(),
            threads: engine.options.threads,
            budget_bytes: engine.plan.budget.bytes.0,
            planned_bytes: engine.plan.total.0,
            peak_rss_bytes: memory_plan::peak_rss().0,
            slots: engine.plan.slots(),
            experts: engine.plan.experts(),
            context_tokens: engine.plan.context,
            draft_bytes: engine.draft_bytes().map(|bytes| bytes.0),
            pass_rows: engine.plan.pass_rows as usize,
            direct_reads: engine.network.experts().store().direct(),
            reads: ReadsReceipt::of(engine),
            simulated_disk: engine.options.simulate.map(Into::into),
            prefill: prefill.into(),
            decode: decode.into(),
            speculation: None,
            generated_tokens: output.len() as u64,
            output_hash: hash_tokens(output),
            written_bytes: written_bytes().saturating_sub(engine.written_before),
            sweep: engine
                .options
                .sweep
                .then(|| engine.network.experts().counters().sweep)
                .filter(|sweep| sweep.issued > 0)
                .map(Into::into),
            hot_set: engine
                .options
                .hot_set
                .then(|| engine.network.experts().counters().hot_set.into()),
            lookahead: LookaheadReceipt::of(engine),
            token_us: Vec::new(),
        }
    }
}

impl Receipt {
    /// The same with what came of guesses, if the engine makes any.
    #[must_use]
    pub fn with_speculation(self, engine: &Engine, counters: SpeculationCounters) -> Self {
        Self { speculation: engine.options.speculation.is_on().then_some(counters), ..self }
    }
}

/// The record of a forced run; the output is what the model would have said.
pub fn of_forced(engine: &Engine, outcome: &ForcedOutcome) -> Receipt {
    let receipt = Receipt::new(engine, &outcome.prefill, &outcome.decode, &outcome.likeliest);
    let receipt = receipt.with_speculation(engine, outcome.speculation);
    Receipt { token_us: outcome.token_us.clone(), ..receipt }
}

/// Bytes that this process caused to be written to storage; 0 where the system does not tell.
pub(crate) fn written_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/io").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("write_bytes:"));
    line.and_then(|number| number.trim().parse().ok()).unwrap_or(0)
}

/// FNV-1a (64 bit) over token ids, little-endian.
pub fn hash_tokens(tokens: &[u32]) -> String {
    fnv_1a(tokens.iter().flat_map(|t| t.to_le_bytes()))
}

/// FNV-1a (64 bit) in hexadecimal digits.
pub(crate) fn fnv_1a(bytes: impl Iterator<Item = u8>) -> String {
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{hash:016x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_fnv_1a() {
        // Published test values of FNV-1a 64: the empty string, and "a" followed by three zero bytes computed by hand.
        assert_eq!(hash_tokens(&[]), "cbf29ce484222325");
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        for byte in [b'a', 0, 0, 0] {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        assert_eq!(hash_tokens(&[u32::from(b'a')]), format!("{hash:016x}"));
    }
}

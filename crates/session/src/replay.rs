//! Replays a trace through a pool: what would have been read, with other slots and other policies.
//!
//! Online policies run in the engine's own pool, so their numbers are the engine's. Belady knows the future and is the
//! bound that no policy passes; it is computed here.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::{Duration, Instant};

use slot_pool::{PolicyKind, PoolError, PoolSpec, SlotPool};
use units::{Epoch, ExpertIndex, LayerIndex};

use crate::slots;
use crate::trace::Trace;

/// Who decides which expert leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplayPolicy {
    /// One of the pool's.
    Online(PolicyKind),
    /// Whoever is used again last leaves first.
    Belady,
}

/// What a part of a run needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tally {
    /// Tokens.
    pub tokens: u64,
    /// Distinct experts per layer and pass.
    pub lookups: u64,
    /// Of those, read.
    pub misses: u64,
    /// Bytes of those.
    pub bytes: u64,
}

/// What a replay needed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Replay {
    /// Tokens of prompts.
    pub prefill: Tally,
    /// Generated tokens.
    pub decode: Tally,
    /// Bytes that layers read for a generated token, and how many layers of how many tokens read so much.
    reads: BTreeMap<u64, u64>,
}

/// How fast a machine is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace {
    /// Of experts read from the disk.
    pub bytes_per_second: f64,
    /// Computing a layer for a token with everything there.
    pub layer_seconds: f64,
}

impl Replay {
    /// Seconds that a generated token would wait for the disk if a forecast named this share of the missing experts a
    /// layer ahead; 0 without a forecast.
    ///
    /// An estimate: a layer waits for what is missing when its router has spoken, at the disk's full rate, and nothing
    /// of a layer is computed meanwhile. What a forecast named is read while the layer before computes, as far as that
    /// takes long enough; wrong guesses cost nothing.
    pub fn stall_seconds(&self, pace: Pace, recall: f64) -> f64 {
        let stall = |(bytes, layers): (&u64, &u64)| {
            let seconds = *bytes as f64 / pace.bytes_per_second;
            let hidden = (recall * seconds).min(pace.layer_seconds);
            *layers as f64 * (seconds - hidden)
        };
        let total: f64 = self.reads.iter().map(stall).sum();
        if self.decode.tokens == 0 { 0.0 } else { total / self.decode.tokens as f64 }
    }
}

/// Why a trace cannot be replayed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    /// Slots that no token fits in.
    #[error(
        "{slots} slots are too few: one token needs {needed}; at most {most} make a difference"
    )]
    Slots {
        /// What was asked for.
        slots: u32,
        /// The fewest.
        needed: u32,
        /// As many as there are experts.
        most: u64,
    },
    /// The pool refuses.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

impl Tally {
    /// Share of look-ups that needed no read; 0 without look-ups.
    pub fn hit_rate(&self) -> f64 {
        if self.lookups == 0 {
            0.0
        } else {
            (self.lookups - self.misses) as f64 / self.lookups as f64
        }
    }

    /// Bytes read for a token; 0 without tokens.
    pub fn bytes_per_token(&self) -> f64 {
        if self.tokens == 0 { 0.0 } else { self.bytes as f64 / self.tokens as f64 }
    }
}

/// Runs a trace from an empty pool of so many slots, of the sizes that a plan with so many has.
///
/// # Errors
/// [`ReplayError`].
pub fn replay(trace: &Trace, slots: u32, policy: ReplayPolicy) -> Result<Replay, ReplayError> {
    let spec = spec_of(trace, slots)?;
    let mut runner: Box<dyn Runner> = match policy {
        ReplayPolicy::Online(kind) => Box::new(Online(SlotPool::new(spec, kind)?)),
        ReplayPolicy::Belady => Box::new(Belady::new(trace, &spec)),
    };
    let mut replay = Replay::default();
    let mut error = None;
    for_each_selection(trace, |selection| {
        let tally = if selection.decodes { &mut replay.decode } else { &mut replay.prefill };
        tally.tokens += selection.tokens;
        tally.lookups += selection.experts.len() as u64;
        match runner.misses(selection.layer, selection.experts) {
            Ok(misses) => {
                tally.misses += misses;
                // A file may name any size.
                let bytes = misses.saturating_mul(trace.record_bytes(selection.layer));
                tally.bytes = tally.bytes.saturating_add(bytes);
                if selection.decodes && bytes > 0 {
                    *replay.reads.entry(bytes).or_default() += 1;
                }
            }
            Err(problem) => error = error.take().or(Some(problem)),
        }
    });
    error.map_or(Ok(replay), |error| Err(error.into()))
}

/// How long a pool took to decide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolTime {
    /// Transactions: layers of passes.
    pub transactions: u64,
    /// Distinct experts of those.
    pub lookups: u64,
    /// Of those, read.
    pub misses: u64,
    /// For all of them. Nothing is read and nobody waits.
    pub elapsed: Duration,
}

/// Runs a trace through the engine's pool, as [`replay`] does, and times nothing but the pool.
///
/// # Errors
/// [`ReplayError`].
pub fn time_pool(trace: &Trace, slots: u32, policy: PolicyKind) -> Result<PoolTime, ReplayError> {
    let mut pool = Online(SlotPool::new(spec_of(trace, slots)?, policy)?);
    let mut time = PoolTime { transactions: 0, lookups: 0, misses: 0, elapsed: Duration::ZERO };
    let mut error = None;
    for_each_selection(trace, |selection| {
        let since = Instant::now();
        let misses = pool.misses(selection.layer, selection.experts);
        time.elapsed += since.elapsed();
        match misses {
            Ok(misses) => time.misses += misses,
            Err(problem) => error = error.take().or(Some(problem)),
        }
        time.transactions += 1;
        time.lookups += selection.experts.len() as u64;
    });
    error.map_or(Ok(time), |error| Err(error.into()))
}

/// A pool of so many slots for a trace.
fn spec_of(trace: &Trace, slots: u32) -> Result<PoolSpec, ReplayError> {
    let [n_layers, n_experts, top_k] = trace.shape();
    let most = u64::from(n_layers) * u64::from(n_experts);
    let too_few = || ReplayError::Slots { slots, needed: top_k + 1, most };
    if slots <= top_k || u64::from(slots) > most {
        return Err(too_few());
    }
    let needed = trace.slots_needed();
    let records = slots::record_classes(&needed, n_experts);
    let classes = memory_plan::deal_slots(&records, top_k, u64::from(slots)).ok_or_else(too_few)?;
    Ok(slots::pool_spec(&needed, (n_experts, top_k), &classes))
}

/// What one layer needs in one pass.
struct Selection<'a> {
    layer: LayerIndex,
    /// Distinct, ascending.
    experts: &'a [ExpertIndex],
    decodes: bool,
    /// Those of the pass, in its first layer.
    tokens: u64,
}

fn for_each_selection(trace: &Trace, mut see: impl FnMut(&Selection<'_>)) {
    let [n_layers, n_experts, top_k] = trace.shape().map(|n| n as usize);
    let mut chosen = vec![false; n_experts];
    let mut experts = Vec::new();
    for (pass, choices) in trace.passes() {
        for layer in 0..n_layers {
            for row in choices.chunks_exact(n_layers * top_k) {
                for expert in &row[layer * top_k..][..top_k] {
                    chosen[usize::from(*expert)] = true;
                }
            }
            experts.clear();
            let named = chosen.iter_mut().enumerate().filter(|(_, chosen)| **chosen);
            experts.extend(named.map(|(expert, chosen)| {
                *chosen = false;
                ExpertIndex(expert as u32)
            }));
            see(&Selection {
                layer: LayerIndex(layer as u32),
                experts: &experts,
                decodes: pass.decodes,
                tokens: if layer == 0 { u64::from(pass.rows) } else { 0 },
            });
        }
    }
}

trait Runner {
    /// How many of a selection are read.
    fn misses(&mut self, layer: LayerIndex, experts: &[ExpertIndex]) -> Result<u64, PoolError>;
}

struct Online(SlotPool);

impl Runner for Online {
    fn misses(&mut self, layer: LayerIndex, experts: &[ExpertIndex]) -> Result<u64, PoolError> {
        // Nothing runs ahead: a released slot is free to go at once.
        let now = Epoch(0);
        let mut misses = 0;
        let mut transaction = self.0.begin(layer, experts, now)?;
        loop {
            self.0.start(&mut transaction);
            misses += transaction.loads.len() as u64;
            for at in 0..transaction.loads.len() {
                let key = transaction.loads[at].key;
                self.0.publish(&mut transaction, key);
            }
            let deferred = transaction.deferred.clone();
            self.0.finish(transaction, now);
            if deferred.is_empty() {
                return Ok(misses);
            }
            transaction = self.0.begin_next(layer, &deferred, now)?;
        }
    }
}

/// A use that never comes.
const NEVER: u64 = u64::MAX;

/// Slots of one size under a policy that knows the future.
struct Future {
    slots: usize,
    n_resident: usize,
    /// Next uses of what is resident, by key; some are out of date.
    next: BinaryHeap<(u64, Reverse<usize>)>,
}

struct Belady {
    n_experts: usize,
    n_layers: usize,
    classes: Vec<Future>,
    class_of_layer: Vec<u32>,
    /// By key: when it is used, last first, so that the next use is at the end.
    uses: Vec<Vec<u64>>,
    resident: Vec<bool>,
    /// Selections so far.
    now: u64,
}

impl Belady {
    fn new(trace: &Trace, spec: &PoolSpec) -> Self {
        let [n_layers, n_experts, _] = trace.shape().map(|n| n as usize);
        let mut uses = vec![Vec::new(); n_layers * n_experts];
        let mut now = 0;
        for_each_selection(trace, |selection| {
            for expert in selection.experts {
                uses[selection.layer.get() * n_experts + expert.get()].push(now);
            }
            now += 1;
        });
        uses.iter_mut().for_each(|uses| uses.reverse());
        let class = |slots| Future { slots, n_resident: 0, next: BinaryHeap::new() };
        Self {
            n_experts,
            n_layers,
            classes: spec.classes.iter().map(|spec| class(spec.slots as usize)).collect(),
            class_of_layer: spec.class_of_layer.clone(),
            resident: vec![false; uses.len()],
            uses,
            now: 0,
        }
    }

    fn next_use(&self, key: usize) -> u64 {
        self.uses[key].last().copied().unwrap_or(NEVER)
    }

    /// Frees the slot of whoever is used again last, but of nobody of the layer at hand whose use is now. If there is
    /// none, the first of `next` is up to date.
    fn evict(&mut self, class: usize, in_use: &[bool]) -> bool {
        let layer = self.now as usize % self.n_layers;
        let mut kept = Vec::new();
        let mut found = false;
        while let Some((at, Reverse(key))) = self.classes[class].next.pop() {
            if !self.resident[key] || self.next_use(key) != at {
                continue;
            }
            if key / self.n_experts == layer && in_use[key % self.n_experts] {
                kept.push((at, Reverse(key)));
                continue;
            }
            self.resident[key] = false;
            self.classes[class].n_resident -= 1;
            found = true;
            break;
        }
        self.classes[class].next.extend(kept);
        found
    }

    /// Gives an expert that was read a slot, unless all hold what is used sooner.
    fn place(&mut self, class: usize, key: usize, in_use: &[bool]) {
        let full = self.classes[class].n_resident == self.classes[class].slots;
        let next_use = self.next_use(key);
        if full && !self.evict(class, in_use) {
            // Not even the selection fits. All of it that is there has served, so any of it may go.
            let last = self.classes[class].next.pop();
            let (at, Reverse(other)) = last.expect("slots hold something");
            if at <= next_use {
                self.classes[class].next.push((at, Reverse(other)));
                return;
            }
            self.resident[other] = false;
            self.classes[class].n_resident -= 1;
        }
        self.resident[key] = true;
        self.classes[class].n_resident += 1;
        self.classes[class].next.push((next_use, Reverse(key)));
    }
}

impl Runner for Belady {
    fn misses(&mut self, layer: LayerIndex, experts: &[ExpertIndex]) -> Result<u64, PoolError> {
        let class = self.class_of_layer[layer.get()] as usize;
        let mut in_use = vec![false; self.n_experts];
        // Hits come first, as in the pool.
        let mut missing = Vec::new();
        for expert in experts {
            let key = layer.get() * self.n_experts + expert.get();
            let used = self.uses[key].pop();
            assert_eq!(used, Some(self.now), "uses come in the order of the trace");
            in_use[expert.get()] = true;
            if self.resident[key] {
                let next_use = self.next_use(key);
                self.classes[class].next.push((next_use, Reverse(key)));
            } else {
                missing.push(key);
            }
        }
        for key in &missing {
            self.place(class, *key, &in_use);
        }
        self.now += 1;
        Ok(missing.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::tests::made;

    fn policies() -> Vec<ReplayPolicy> {
        let online = PolicyKind::ALL.map(ReplayPolicy::Online);
        online.into_iter().chain([ReplayPolicy::Belady]).collect()
    }

    #[test]
    fn nobody_reads_less_than_belady_and_all_read_everything_once() {
        let trace = made(3, 16, 3, 60);
        for slots in [4, 8, 12, 20, 30, 40, 47] {
            let belady = replay(&trace, slots, ReplayPolicy::Belady).unwrap();
            for policy in policies() {
                let other = replay(&trace, slots, policy).unwrap();
                let misses = |r: &Replay| r.prefill.misses + r.decode.misses;
                assert!(misses(&belady) <= misses(&other), "{slots} {policy:?}: {other:?}");
                assert_eq!(other.decode.lookups, 60 * 3 * 3);
            }
        }
        let all = policies().into_iter().map(|policy| replay(&trace, 48, policy).unwrap());
        let all: Vec<Replay> = all.collect();
        assert!(all.iter().all(|r| *r == all[0]), "where all fit, each is read once");
        assert!(all[0].prefill.misses + all[0].decode.misses <= 48);
    }

    #[test]
    fn a_timed_pool_does_what_a_replayed_one_does() {
        let trace = made(3, 16, 3, 60);
        let Replay { prefill, decode, .. } =
            replay(&trace, 20, ReplayPolicy::Online(PolicyKind::Lru)).unwrap();
        let timed = time_pool(&trace, 20, PolicyKind::Lru).unwrap();
        assert_eq!(timed.transactions, 3 * (2 + 60));
        assert_eq!(timed.lookups, prefill.lookups + decode.lookups);
        assert_eq!(timed.misses, prefill.misses + decode.misses);
        let few = time_pool(&trace, 3, PolicyKind::Lru).unwrap_err();
        assert_eq!(few, ReplayError::Slots { slots: 3, needed: 4, most: 48 });
    }

    #[test]
    fn belady_is_the_least_that_any_choice_of_victims_needs() {
        let trace = made(1, 5, 1, 8);
        let mut selections = Vec::new();
        for_each_selection(&trace, |s| {
            selections.push(s.experts.iter().map(|e| 1_u32 << e.0).sum::<u32>());
        });
        for slots in 2..5 {
            let replay = replay(&trace, slots, ReplayPolicy::Belady).unwrap();
            let least = least_misses(&selections, slots);
            assert_eq!(replay.prefill.misses + replay.decode.misses, least, "{slots} slots");
        }
    }

    /// By trying every set that may stay; of five experts, as bits.
    fn least_misses(selections: &[u32], slots: u32) -> u64 {
        // By what is there: the fewest misses so far.
        let mut fewest = [None; 32];
        fewest[0] = Some(0_u64);
        for now in selections {
            let mut next = [None; 32];
            for (there, misses) in (0_u32..).zip(fewest) {
                let Some(misses) = misses else { continue };
                let misses = misses + u64::from((now & !there).count_ones());
                let over = now.count_ones() > slots;
                let may_stay = |kept: &u32| {
                    kept & !(there | now) == 0
                        && kept.count_ones() <= slots
                        // What is used holds slots while it is, as far as there are any.
                        && if over { kept & !now == 0 } else { kept & now == *now }
                };
                for kept in (0..32_u32).filter(may_stay) {
                    let best: &mut Option<u64> = &mut next[kept as usize];
                    *best = Some(best.map_or(misses, |best| best.min(misses)));
                }
            }
            fewest = next;
        }
        fewest.into_iter().flatten().min().unwrap()
    }

    #[test]
    fn bytes_are_those_of_the_layers_that_miss() {
        let trace = made(2, 8, 2, 10);
        let all = replay(&trace, 16, policies()[0]).unwrap();
        let (misses, bytes) =
            (all.prefill.misses + all.decode.misses, all.prefill.bytes + all.decode.bytes);
        assert!(bytes >= 1000 * misses && bytes <= 1001 * misses);
        assert_eq!((all.prefill.tokens, all.decode.tokens), (10, 10));
    }

    #[test]
    fn what_a_forecast_hides_is_bounded_by_a_layers_time() {
        let reads = BTreeMap::from([(2000, 3), (500, 1)]);
        let decode = Tally { tokens: 2, ..Tally::default() };
        let replay = Replay { decode, reads, ..Replay::default() };
        let pace = Pace { bytes_per_second: 1000.0, layer_seconds: 0.5 };
        let stall = |recall| replay.stall_seconds(pace, recall);
        // Three layers of 2 s and one of 0.5 s, over two tokens.
        assert_eq!(stall(0.0), 3.25);
        assert_eq!(stall(0.2), 0.5 * (3.0 * 1.6 + 0.4));
        assert_eq!(stall(1.0), 3.0 * 1.5 / 2.0);
        assert_eq!(Replay::default().stall_seconds(pace, 0.0), 0.0);
    }

    #[test]
    fn slots_that_make_no_sense_are_refused() {
        let trace = made(2, 8, 2, 1);
        for slots in [0, 2, 17] {
            let error = ReplayError::Slots { slots, needed: 3, most: 16 };
            assert_eq!(replay(&trace, slots, policies()[0]), Err(error));
        }
    }
}

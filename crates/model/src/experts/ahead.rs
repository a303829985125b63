//! Reads that no layer has asked for yet.
//!
//! They change when bytes come, never what is computed. A read ahead holds its slot until it ends, is overtaken by
//! every demand, and what comes of it decides nothing: one that failed is forgotten, and the layer that wants the
//! expert reads it as if nobody had tried.

use std::time::Instant;

use compute::backend::Backend;
use expert_store::{Completion, Priority, Store, Ticket};
use slot_pool::{Load, Transaction};
use units::{ExpertIndex, ExpertKey, LayerIndex, SlotIndex};

use super::ExpertStream;

/// Most reads of a hot set that are in flight at a time.
const MOST_PRELOADS: usize = 2048;

/// Whole layers for which there must be slots before one is read ahead of its turn: that one, the one at hand, and one
/// that keeps what it has. With fewer, layers would take each other's slots.
const SWEPT_LAYERS: usize = 3;

/// Memory of one read in flight, here and in the store, all in all less than this.
pub(crate) const FLIGHT_BYTES: usize = 512;

/// Share of a new observation in an average.
const NEW: f32 = 1.0 / 16.0;

/// Why something is read ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    /// It was used often.
    HotSet,
    /// The next layer may need it.
    Lookahead,
    /// The pass is so long that the next layer needs about all experts.
    Sweep,
}

/// Reads of one reason since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AheadCounters {
    /// Reads put in flight.
    pub issued: u64,
    /// Of those, whose expert a layer used while it was there or on its way.
    pub used: u64,
    /// Of those used, that were still on their way when the layer asked.
    pub late: u64,
    /// Of those issued, taken back before they had ended.
    pub cancelled: u64,
    /// Of those issued, that failed before any layer asked for the expert.
    pub failed: u64,
    /// Bytes of those used.
    pub used_bytes: u64,
    /// Bytes of experts that were read and left without any use.
    pub wasted_bytes: u64,
}

impl AheadCounters {
    /// What happened since `earlier`.
    #[must_use]
    pub const fn minus(&self, earlier: &Self) -> Self {
        Self {
            issued: self.issued - earlier.issued,
            used: self.used - earlier.used,
            late: self.late - earlier.late,
            cancelled: self.cancelled - earlier.cancelled,
            failed: self.failed - earlier.failed,
            used_bytes: self.used_bytes - earlier.used_bytes,
            wasted_bytes: self.wasted_bytes - earlier.wasted_bytes,
        }
    }

    /// Both together.
    #[must_use]
    pub const fn plus(&self, other: &Self) -> Self {
        Self {
            issued: self.issued + other.issued,
            used: self.used + other.used,
            late: self.late + other.late,
            cancelled: self.cancelled + other.cancelled,
            failed: self.failed + other.failed,
            used_bytes: self.used_bytes + other.used_bytes,
            wasted_bytes: self.wasted_bytes + other.wasted_bytes,
        }
    }
}

/// A read in flight.
#[derive(Debug)]
struct Flight {
    key: ExpertKey,
    slot: SlotIndex,
    ticket: Ticket,
    reason: Reason,
}

/// Whose read has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Arrival {
    /// A layer's own.
    Asked,
    /// One that a layer adopted.
    Adopted,
    /// One that no layer has asked for.
    Ahead,
}

/// What is read ahead, and what became of it.
pub(super) struct Ahead {
    flights: Vec<Flight>,
    /// Reads that the open transaction adopted and that have not ended.
    adopted: Vec<Ticket>,
    /// `[n_layers * n_experts]`: why an expert was read, while no layer has used it.
    unused: Vec<Option<Reason>>,
    hot_set: AheadCounters,
    lookahead: AheadCounters,
    sweep: AheadCounters,
    pace: Pace,
    /// Whether a layer is shielded for its sweep.
    sweeping: bool,
    /// What is shielded; kept for its allocation.
    shielded: Vec<ExpertKey>,
}

impl Ahead {
    pub(super) fn new(n_keys: usize) -> Self {
        Self {
            flights: Vec::new(),
            adopted: Vec::new(),
            unused: vec![None; n_keys],
            hot_set: AheadCounters::default(),
            lookahead: AheadCounters::default(),
            sweep: AheadCounters::default(),
            pace: Pace::default(),
            sweeping: false,
            shielded: Vec::new(),
        }
    }

    pub(super) const fn hot_set(&self) -> AheadCounters {
        self.hot_set
    }

    pub(super) const fn lookahead(&self) -> AheadCounters {
        self.lookahead
    }

    pub(super) const fn sweep(&self) -> AheadCounters {
        self.sweep
    }

    /// A layer asks for experts.
    pub(super) fn asked(&mut self) {
        self.pace.asked();
    }

    /// No layer waits for the disk.
    pub(super) fn served(&mut self) {
        self.pace.free_since = Some(Instant::now());
    }

    const fn counters(&mut self, reason: Reason) -> &mut AheadCounters {
        match reason {
            Reason::HotSet => &mut self.hot_set,
            Reason::Lookahead => &mut self.lookahead,
            Reason::Sweep => &mut self.sweep,
        }
    }
}

/// How many reads fit into the time in which no layer waits for the disk.
#[derive(Debug, Default)]
struct Pace {
    /// From the last arrival that a layer waited for to the next layer's request.
    idle_us: Average,
    /// Of one expert, when all readers are busy.
    read_us: Average,
    free_since: Option<Instant>,
    /// The store's totals when they were last looked at: reads that ended, and time of readers.
    seen: Option<(u64, u64)>,
}

/// Of the last observations; nothing before the first.
#[derive(Debug, Default)]
struct Average(Option<f32>);

impl Average {
    fn add(&mut self, value: f32) {
        let before = self.0.unwrap_or(value);
        self.0 = Some(before + NEW * (value - before));
    }
}

impl Pace {
    fn asked(&mut self) {
        if let Some(since) = self.free_since.take() {
            self.idle_us.add(since.elapsed().as_micros() as f32);
        }
    }

    /// Reads that may be ahead of the next layer: at least one, since a whole one is not in the way for long.
    fn reads(&mut self, store: &Store) -> usize {
        let counters = store.counters();
        let ended = Priority::ALL.into_iter().map(|p| counters.of(p).requests).sum();
        let (requests, busy_us) = self.seen.unwrap_or((ended, counters.busy_us));
        if ended > requests {
            let busy_us = (counters.busy_us - busy_us) as f32;
            self.read_us.add(busy_us / (ended - requests) as f32 / store.threads() as f32);
        }
        if ended > requests || self.seen.is_none() {
            self.seen = Some((ended, counters.busy_us));
        }
        match (self.idle_us.0, self.read_us.0) {
            (Some(idle_us), Some(read_us)) => ((idle_us / read_us.max(1.0)).ceil() as usize).max(1),
            _ => 1,
        }
    }
}

/// Memory that reading a hot set takes, for a model of so many experts.
pub fn hot_set_bytes(n_keys: u64) -> u64 {
    let keys = n_keys * (size_of::<u32>() + size_of::<ExpertKey>()) as u64;
    keys + n_keys.min(MOST_PRELOADS as u64) * FLIGHT_BYTES as u64
}

/// Memory of the reads of a whole layer.
pub fn sweep_bytes(n_experts: u32) -> u64 {
    u64::from(n_experts) * (FLIGHT_BYTES + size_of::<ExpertKey>()) as u64
}

impl ExpertStream {
    /// Puts experts in flight in idle time, in this order, as long as slots are free. The next pass ends it.
    pub(crate) fn preload(&mut self, backend: &mut dyn Backend, order: &[ExpertKey]) {
        self.collect(backend);
        for key in order {
            if self.ahead.flights.len() >= MOST_PRELOADS {
                break;
            }
            if let Some(load) = self.pool.preload(*key) {
                self.read_ahead(backend, &load, Reason::HotSet);
            }
        }
    }

    /// Takes the ends of reads that nobody waits for. No transaction is open.
    pub(crate) fn collect(&mut self, backend: &mut dyn Backend) {
        while !self.ahead.flights.is_empty()
            && let Some(completion) = self.store.try_any()
        {
            self.ended_ahead(backend, completion);
        }
    }

    /// Whether reads ahead are in flight; waits for one of them. No transaction is open.
    pub(crate) fn await_ahead(&mut self, backend: &mut dyn Backend) -> bool {
        if self.ahead.flights.is_empty() {
            return false;
        }
        let completion = self.store.wait_any();
        self.ended_ahead(backend, completion);
        true
    }

    /// A pass begins, and with it idle time is over: what has not begun is given up, and what an earlier pass swept is
    /// spared no longer.
    pub(crate) fn end_idle(&mut self, backend: &mut dyn Backend) {
        if std::mem::take(&mut self.ahead.sweeping) {
            self.shield(std::iter::empty());
        }
        if !self.ahead.flights.is_empty() {
            self.collect(backend);
            self.give_up();
        }
    }

    /// Spares experts that may be needed soon, and nothing else.
    pub(crate) fn shield(&mut self, keys: impl Iterator<Item = ExpertKey>) {
        let mut shielded = std::mem::take(&mut self.ahead.shielded);
        shielded.clear();
        shielded.extend(keys);
        self.pool.shield(&shielded);
        self.ahead.shielded = shielded;
    }

    /// Whether an expert is neither there nor on its way.
    pub(crate) fn is_absent(&self, key: ExpertKey) -> bool {
        !self.pool.knows(key)
    }

    /// Puts the likeliest of these experts in flight, as many as the disk can read until the next layer asks. Guesses
    /// before them that nobody has adopted by now were wrong.
    pub(crate) fn look_ahead(
        &mut self,
        backend: &mut dyn Backend,
        keys: impl Iterator<Item = ExpertKey>,
    ) {
        self.give_up();
        let most = self.ahead.pace.reads(&self.store);
        for key in keys {
            if self.ahead.flights.len() >= most {
                break;
            }
            if let Some(load) = self.pool.reserve(key, backend.completed()) {
                if let Some(evicted) = load.evicted {
                    self.leaves(backend, evicted);
                }
                self.read_ahead(backend, &load, Reason::Lookahead);
            }
        }
    }

    /// Puts all experts of a layer in flight that are not there, in the order of the file, while the layer before it
    /// computes: the disk need not wait for a router that will choose about all of them.
    pub(crate) fn sweep(&mut self, backend: &mut dyn Backend, layer: LayerIndex) {
        self.give_up();
        if self.pool.slots_for(layer) < SWEPT_LAYERS * self.records.n_experts() as usize {
            return;
        }
        self.ahead.sweeping = true;
        let experts = (0..self.records.n_experts())
            .map(move |expert| ExpertKey { layer, expert: ExpertIndex(expert) });
        self.shield(experts.clone());
        for key in experts {
            if let Some(load) = self.pool.reserve_by_turn(key, backend.completed()) {
                if let Some(evicted) = load.evicted {
                    self.leaves(backend, evicted);
                }
                self.read_ahead(backend, &load, Reason::Sweep);
            }
        }
    }

    fn read_ahead(&mut self, backend: &mut dyn Backend, load: &Load, reason: Reason) {
        let Load { key, slot, .. } = *load;
        let ticket = self.submit(backend, key, slot, Priority::Speculative);
        self.ahead.flights.push(Flight { key, slot, ticket, reason });
        let at = self.at(key);
        self.ahead.unused[at] = Some(reason);
        self.ahead.counters(reason).issued += 1;
    }

    /// Takes back reads of which no reader holds a part.
    fn give_up(&mut self) {
        let mut next = 0;
        while let Some(flight) = self.ahead.flights.get(next) {
            if self.store.cancel(flight.ticket) {
                let Flight { key, .. } = self.ahead.flights.swap_remove(next);
                self.pool.cancel_speculative(key);
                self.forget(key).cancelled += 1;
            } else {
                next += 1;
            }
        }
    }

    /// Whose read this is that has ended.
    pub(super) fn arrival(&mut self, ticket: Ticket) -> Arrival {
        if let Some(at) = self.ahead.adopted.iter().position(|adopted| *adopted == ticket) {
            self.ahead.adopted.swap_remove(at);
            return Arrival::Adopted;
        }
        let ahead = self.ahead.flights.iter().any(|flight| flight.ticket == ticket);
        if ahead { Arrival::Ahead } else { Arrival::Asked }
    }

    /// A read that no transaction has adopted has ended.
    pub(super) fn ended_ahead(&mut self, backend: &mut dyn Backend, completion: Completion) {
        let Completion { ticket, key, result } = completion;
        let Some(at) = self.ahead.flights.iter().position(|flight| flight.ticket == ticket) else {
            unreachable!("{key} is awaited by a transaction or read ahead")
        };
        let Flight { slot, .. } = self.ahead.flights.swap_remove(at);
        if result.is_ok() {
            self.pool.publish_speculative(key);
            backend.publish(key, slot, &self.records.record(key).matrices());
        } else {
            self.pool.cancel_speculative(key);
            self.forget(key).failed += 1;
        }
    }

    /// A layer uses what a transaction holds: of that, what was read ahead has served.
    pub(super) fn used(&mut self, transaction: &Transaction) {
        for (key, _) in &transaction.adopted {
            let at = self.ahead.flights.iter().position(|flight| flight.key == *key);
            let flight = self.ahead.flights.swap_remove(at.expect("what is adopted is in flight"));
            // It may have ended: then its completion is waiting.
            self.store.adopt(flight.ticket);
            self.ahead.adopted.push(flight.ticket);
            self.ahead.counters(flight.reason).late += 1;
            self.used_ahead(*key);
        }
        for (key, _) in &transaction.hits {
            self.used_ahead(*key);
        }
    }

    /// A layer uses an expert.
    pub(super) fn used_ahead(&mut self, key: ExpertKey) {
        let at = self.at(key);
        let Some(reason) = self.ahead.unused[at].take() else { return };
        let bytes = self.record_bytes(key);
        let counters = self.ahead.counters(reason);
        counters.used += 1;
        counters.used_bytes += bytes;
    }

    /// An expert leaves its slot.
    pub(super) fn left(&mut self, key: ExpertKey) {
        let at = self.at(key);
        let Some(reason) = self.ahead.unused[at].take() else { return };
        let bytes = self.record_bytes(key);
        self.ahead.counters(reason).wasted_bytes += bytes;
    }

    fn forget(&mut self, key: ExpertKey) -> &mut AheadCounters {
        let at = self.at(key);
        let reason = self.ahead.unused[at].take().expect("a read ahead has a reason");
        self.ahead.counters(reason)
    }

    fn record_bytes(&self, key: ExpertKey) -> u64 {
        self.records.record(key).bytes
    }

    fn at(&self, key: ExpertKey) -> usize {
        key.layer.get() * self.records.n_experts() as usize + key.expert.get()
    }
}

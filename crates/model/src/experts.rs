//! Which expert bytes move when: the pool decides, the store reads, the backend is told.
//!
//! A layer's selection is one transaction of the pool. When it does not fit, it is served in waves; everything
//! works with `top_k + 1` slots. What is read before a layer asks is in `experts/ahead.rs`.

mod ahead;

use std::time::Instant;

use checkpoint::Records;
use compute::backend::{Backend, BufferId, Routed, RouterHandle};
use expert_store::{Completion, Priority, ReadRequest, Store, StoreCounters, Ticket};
use slot_pool::{PoolCounters, PoolError, SlotPool, Transaction};
use units::{Epoch, ExpertIndex, ExpertKey, LayerIndex, SlotIndex};

use crate::memory::slot_destination;
use crate::network::ForwardError;
pub(crate) use ahead::FLIGHT_BYTES;
use ahead::{Ahead, Arrival};
pub use ahead::{AheadCounters, hot_set_bytes, sweep_bytes};

/// Pool, store and the records that connect them.
pub struct ExpertStream {
    // Dropped in this order: readers end before anything that they write to.
    store: Store,
    pool: SlotPool,
    records: Records,
    ahead: Ahead,
    /// `[n_layers * n_experts]`: how many rows chose each expert, if that is counted.
    uses: Option<Vec<u32>>,
    /// Distinct experts of the current layer, those with the fewest rows first, else in the order of the file.
    selection: Vec<ExpertIndex>,
    /// `[n_experts]`, all 0 between calls: rows of the current layer that chose each expert.
    rows: Vec<u32>,
    wait_us: u64,
}

/// What moved since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ExpertCounters {
    /// The pool's hits and misses.
    pub pool: PoolCounters,
    /// The store's reads.
    pub store: StoreCounters,
    /// Time in which nothing could be computed because bytes were missing.
    pub wait_us: u64,
    /// Reads of the hot set in idle time.
    pub hot_set: AheadCounters,
    /// Reads of guesses.
    pub lookahead: AheadCounters,
    /// Reads of the next layer's experts in long passes.
    pub sweep: AheadCounters,
}

/// A transaction whose reads are in flight.
pub(crate) struct Wave {
    layer: LayerIndex,
    transaction: Transaction,
}

impl ExpertStream {
    /// A stream over an empty pool.
    pub fn new(pool: SlotPool, store: Store, records: Records) -> Self {
        let rows = vec![0; records.n_experts() as usize];
        let ahead = Ahead::new(n_keys(&records));
        Self { store, pool, records, ahead, uses: None, selection: Vec::new(), rows, wait_us: 0 }
    }

    /// From here on, counts how many rows choose each expert.
    pub fn count_uses(&mut self) {
        self.uses = Some(vec![0; n_keys(&self.records)]);
    }

    /// How many rows chose each expert, `[n_layers * n_experts]`, if that is counted.
    pub fn uses(&self) -> Option<&[u32]> {
        self.uses.as_deref()
    }

    /// Totals since the start; subtract two to get a phase.
    pub fn counters(&self) -> ExpertCounters {
        ExpertCounters {
            pool: self.pool.counters(),
            store: self.store.counters(),
            wait_us: self.wait_us,
            hot_set: self.ahead.hot_set(),
            lookahead: self.ahead.lookahead(),
            sweep: self.ahead.sweep(),
        }
    }

    /// Where every expert lies in the files.
    pub const fn records(&self) -> &Records {
        &self.records
    }

    /// The reader, also for resident tensors.
    pub const fn store(&self) -> &Store {
        &self.store
    }

    /// Takes the distinct experts of a layer's routes as the current selection.
    ///
    /// When a pass needs more of them than there are slots, those that come last are there when it ends: then these
    /// are the ones that most rows chose, which the next tokens need most likely.
    pub(crate) fn select(&mut self, layer: LayerIndex, routes: &[Routed]) {
        if let Some(uses) = &mut self.uses {
            let layer = &mut uses[layer.get() * self.records.n_experts() as usize..];
            for routed in routes {
                let uses = &mut layer[routed.expert.get()];
                *uses = uses.saturating_add(1);
            }
        }
        for routed in routes {
            self.rows[routed.expert.get()] += 1;
        }
        self.selection.clear();
        let experts = (0..).map(ExpertIndex).zip(&self.rows);
        self.selection.extend(experts.filter(|(_, rows)| **rows > 0).map(|(expert, _)| expert));
        self.selection.sort_unstable_by_key(|expert| (self.rows[expert.get()], *expert));
        for expert in &self.selection {
            self.rows[expert.get()] = 0;
        }
    }

    /// The whole selection was resident and used until `epoch`.
    pub(crate) fn touch(&mut self, layer: LayerIndex, epoch: Epoch) {
        self.ahead.asked();
        self.pool.touch(layer, &self.selection, epoch);
        for i in 0..self.selection.len() {
            self.used_ahead(ExpertKey { layer, expert: self.selection[i] });
        }
        self.ahead.served();
    }

    /// Reserves slots for the selection and puts its first wave of misses in flight.
    pub(crate) fn fetch(
        &mut self,
        backend: &mut dyn Backend,
        layer: LayerIndex,
    ) -> Result<Option<Wave>, ForwardError> {
        self.ahead.asked();
        let selection = std::mem::take(&mut self.selection);
        let transaction =
            retry_when_free(backend, |completed| self.pool.begin(layer, &selection, completed));
        self.selection = selection;
        Ok(Some(self.issue(backend, layer, transaction?)))
    }

    fn issue(
        &mut self,
        backend: &mut dyn Backend,
        layer: LayerIndex,
        mut transaction: Transaction,
    ) -> Wave {
        self.pool.start(&mut transaction);
        self.used(&transaction);
        for load in &transaction.loads {
            if let Some(evicted) = load.evicted {
                self.leaves(backend, evicted);
            }
            self.submit(backend, load.key, load.slot, Priority::Demand);
        }
        Wave { layer, transaction }
    }

    /// An expert is not resident any more.
    fn leaves(&mut self, backend: &mut dyn Backend, key: ExpertKey) {
        self.left(key);
        backend.unpublish(key);
    }

    /// Puts the read of an expert into its slot in flight.
    fn submit(
        &mut self,
        backend: &mut dyn Backend,
        key: ExpertKey,
        slot: SlotIndex,
        priority: Priority,
    ) -> Ticket {
        let destination = slot_destination(backend.slot_memory(slot));
        let pieces = self.records.record(key).pieces;
        self.store.submit(ReadRequest { key, pieces, destination }, priority)
    }

    /// Publishes and computes every expert of the wave as it lands; gives the next wave, if any, in flight.
    pub(crate) fn drain(
        &mut self,
        backend: &mut dyn Backend,
        mut wave: Wave,
        x: BufferId,
        router: RouterHandle,
    ) -> Result<Option<Wave>, ForwardError> {
        let layer = wave.layer;
        let mut failed = None;
        let mut awaited = wave.transaction.loads.len() + wave.transaction.adopted.len();
        while awaited > 0 {
            let waiting = Instant::now();
            let completion = self.store.wait_any();
            self.wait_us += waiting.elapsed().as_micros() as u64;
            let key = completion.key;
            let arrival = self.arrival(completion.ticket);
            if arrival == Arrival::Ahead {
                self.ended_ahead(backend, completion);
                continue;
            }
            match completion.result {
                Ok(_) if failed.is_none() => {
                    self.arrived(backend, &mut wave.transaction, key);
                    backend.moe_more(layer, x, router);
                    backend.submit();
                }
                // A guess that fails is no error: the layer asks itself.
                Err(_) if failed.is_none() && arrival == Arrival::Adopted => {
                    let slot = wave.transaction.slot_of(key).expect("it was adopted");
                    self.submit(backend, key, slot, Priority::Demand);
                    continue;
                }
                // After a failure the rest is only awaited, so that no reader writes into a freed slot.
                Ok(_) => {}
                Err(source) => failed = failed.or(Some((key, source))),
            }
            awaited -= 1;
        }
        if let Some((key, source)) = failed {
            let used_until = backend.submit();
            self.pool.abort_until(wave.transaction, used_until);
            return Err(ForwardError::Read { key, source });
        }
        let deferred = wave.transaction.deferred.clone();
        let used_until = backend.submit();
        self.pool.finish(wave.transaction, used_until);
        if deferred.is_empty() {
            self.ahead.served();
            return Ok(None);
        }
        let transaction = retry_when_free(backend, |completed| {
            self.pool.begin_next(layer, &deferred, completed)
        })?;
        Ok(Some(self.issue(backend, layer, transaction)))
    }

    /// Brings one expert into a slot, outside of any pass, and copies the slot.
    pub(crate) fn bring(
        &mut self,
        backend: &mut dyn Backend,
        key: ExpertKey,
    ) -> Result<Vec<u8>, ForwardError> {
        let begin = |completed| self.pool.begin(key.layer, &[key.expert], completed);
        let transaction = retry_when_free(backend, begin)?;
        let slot = transaction.slot_of(key).expect("a lone expert is served at once");
        let mut wave = self.issue(backend, key.layer, transaction);
        let mut awaited = wave.transaction.loads.len() + wave.transaction.adopted.len();
        while awaited > 0 {
            let completion = self.store.wait_any();
            match (self.arrival(completion.ticket), completion.result) {
                (Arrival::Ahead, result) => {
                    self.ended_ahead(backend, Completion { result, ..completion });
                    continue;
                }
                (_, Ok(_)) => self.arrived(backend, &mut wave.transaction, key),
                (Arrival::Adopted, Err(_)) => {
                    self.submit(backend, key, slot, Priority::Demand);
                    continue;
                }
                (Arrival::Asked, Err(source)) => {
                    self.pool.abort(wave.transaction);
                    return Err(ForwardError::Read { key, source });
                }
            }
            awaited -= 1;
        }
        let bytes = backend.slot_copy(key);
        self.pool.finish(wave.transaction, backend.completed());
        Ok(bytes)
    }

    fn arrived(
        &mut self,
        backend: &mut dyn Backend,
        transaction: &mut Transaction,
        key: ExpertKey,
    ) {
        let slot = transaction.slot_of(key).expect("only what this transaction awaits comes here");
        self.pool.publish(transaction, key);
        backend.publish(key, slot, &self.records.record(key).matrices());
    }
}

fn n_keys(records: &Records) -> usize {
    records.n_layers() * records.n_experts() as usize
}

/// Repeats a reservation that found every candidate still in use by the device.
fn retry_when_free<T>(
    backend: &mut dyn Backend,
    mut reserve: impl FnMut(Epoch) -> Result<T, PoolError>,
) -> Result<T, ForwardError> {
    loop {
        match reserve(backend.completed()) {
            Err(PoolError::Busy { until, .. }) => backend.wait(until),
            other => return other.map_err(ForwardError::Pool),
        }
    }
}

impl ExpertCounters {
    /// What happened since `earlier`.
    #[must_use]
    pub fn minus(&self, earlier: &Self) -> Self {
        Self {
            pool: self.pool.minus(&earlier.pool),
            store: self.store.minus(&earlier.store),
            wait_us: self.wait_us - earlier.wait_us,
            hot_set: self.hot_set.minus(&earlier.hot_set),
            lookahead: self.lookahead.minus(&earlier.lookahead),
            sweep: self.sweep.minus(&earlier.sweep),
        }
    }

    /// Both together.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        Self {
            pool: self.pool.plus(&other.pool),
            store: self.store.plus(&other.store),
            wait_us: self.wait_us + other.wait_us,
            hot_set: self.hot_set.plus(&other.hot_set),
            lookahead: self.lookahead.plus(&other.lookahead),
            sweep: self.sweep.plus(&other.sweep),
        }
    }
}

//! Which expert bytes move when: the pool decides, the store reads, the backend is told.
//!
//! A layer's selection is one transaction of the pool. When it does not fit, it is served in waves; everything
//! works with `top_k + 1` slots.

use std::time::Instant;

use checkpoint::Records;
use compute::backend::{Backend, BufferId, Routed, RouterHandle};
use expert_store::{Priority, ReadRequest, Store, StoreCounters};
use slot_pool::{PoolCounters, PoolError, SlotPool, Transaction};
use units::{Epoch, ExpertIndex, ExpertKey, LayerIndex};

use crate::memory::{copy_of_slot, slot_destination};
use crate::network::ForwardError;

/// Pool, store and the records that connect them.
pub struct ExpertStream {
    // Dropped in this order: readers end before anything that they write to.
    store: Store,
    pool: SlotPool,
    records: Records,
    /// Distinct experts of the current layer, ascending: the order of the file.
    selection: Vec<ExpertIndex>,
    chosen: Vec<bool>,
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
}

/// A transaction whose reads are in flight.
pub(crate) struct Wave {
    layer: LayerIndex,
    transaction: Transaction,
}

impl ExpertStream {
    /// A stream over an empty pool.
    pub fn new(pool: SlotPool, store: Store, records: Records) -> Self {
        let chosen = vec![false; records.n_experts() as usize];
        Self { store, pool, records, selection: Vec::new(), chosen, wait_us: 0 }
    }

    /// Totals since the start; subtract two to get a phase.
    pub fn counters(&self) -> ExpertCounters {
        ExpertCounters {
            pool: self.pool.counters(),
            store: self.store.counters(),
            wait_us: self.wait_us,
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
    pub(crate) fn select(&mut self, routes: &[Routed]) {
        for routed in routes {
            self.chosen[routed.expert.get()] = true;
        }
        self.selection.clear();
        for (expert, chosen) in self.chosen.iter_mut().enumerate() {
            if std::mem::take(chosen) {
                self.selection.push(ExpertIndex(expert as u32));
            }
        }
    }

    /// The whole selection was resident and used until `epoch`.
    pub(crate) fn touch(&mut self, layer: LayerIndex, epoch: Epoch) {
        self.pool.touch(layer, &self.selection, epoch);
    }

    /// Reserves slots for the selection and puts its first wave of misses in flight.
    pub(crate) fn fetch(
        &mut self,
        backend: &mut dyn Backend,
        layer: LayerIndex,
    ) -> Result<Option<Wave>, ForwardError> {
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
        for load in &transaction.loads {
            if let Some(evicted) = load.evicted {
                backend.unpublish(evicted);
            }
            let record = self.records.record(load.key);
            let destination = slot_destination(backend.slot_memory(load.slot));
            let request = ReadRequest { key: load.key, pieces: record.pieces, destination };
            self.store.submit(request, Priority::Demand);
        }
        Wave { layer, transaction }
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
        for _ in 0..wave.transaction.loads.len() {
            let waiting = Instant::now();
            let completion = self.store.wait_any();
            self.wait_us += waiting.elapsed().as_micros() as u64;
            match completion.result {
                Ok(_) if failed.is_none() => {
                    self.arrived(backend, &mut wave.transaction, completion.key);
                    backend.moe_more(layer, x, router);
                    backend.submit();
                }
                // After a failure the rest is only awaited, so that no reader writes into a freed slot.
                Ok(_) => {}
                Err(source) => failed = failed.or(Some((completion.key, source))),
            }
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
        let Wave { mut transaction, .. } = self.issue(backend, key.layer, transaction);
        if !transaction.loads.is_empty() {
            let completion = self.store.wait_any();
            if let Err(source) = completion.result {
                self.pool.abort(transaction);
                return Err(ForwardError::Read { key, source });
            }
            self.arrived(backend, &mut transaction, key);
        }
        let bytes = copy_of_slot(backend.slot_memory(slot));
        self.pool.finish(transaction, backend.completed());
        Ok(bytes)
    }

    fn arrived(
        &mut self,
        backend: &mut dyn Backend,
        transaction: &mut Transaction,
        key: ExpertKey,
    ) {
        let slot = transaction
            .loads
            .iter()
            .find(|load| load.key == key)
            .expect("the store completes only what this transaction submitted")
            .slot;
        self.pool.publish(transaction, key);
        backend.publish(key, slot, &self.records.record(key).matrices());
    }
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
        }
    }

    /// Both together.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        Self {
            pool: self.pool.plus(&other.pool),
            store: self.store.plus(&other.store),
            wait_us: self.wait_us + other.wait_us,
        }
    }
}

//! The pool: slots, the index of keys, and a transaction's way through them.

use std::collections::VecDeque;
use std::ops::Range;

use units::{Epoch, ExpertIndex, ExpertKey, LayerIndex, SlotIndex};

use crate::counters::PoolCounters;
use crate::forecast::Shields;
use crate::policy::{BuiltIn, Policy, PolicyKind, Shape};
use crate::spec::{PoolError, PoolSpec};
use crate::transaction::{Load, Phase, Transaction};

/// What a slot holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Slot {
    Free,
    /// Bytes are on their way, or will be.
    Reading {
        key: ExpertKey,
        reader: Reader,
        /// What the slot still holds while the reservation is open.
        before: Option<Stay>,
    },
    Ready {
        stay: Stay,
        pins: u32,
    },
}

/// An expert in a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Stay {
    pub(crate) key: ExpertKey,
    /// The last epoch whose work reads it.
    pub(crate) used_until: Epoch,
    /// Whether a forecast read it and nobody has used it yet.
    pub(crate) unused_forecast: bool,
}

impl Stay {
    fn new(key: ExpertKey) -> Self {
        Self { key, used_until: Epoch(0), unused_forecast: false }
    }
}

/// For whom a slot is being read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Reader {
    Forecast,
    /// The place among what the transaction awaits.
    Transaction(u32),
}

/// Slots of one size.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone, PartialEq, Eq, Hash))]
pub(crate) struct Class {
    pub(crate) slots: Range<u32>,
    /// Given out from the back: last in, first out. Reads in idle time take from the front, so that those that began
    /// first, the hottest, are last where a policy goes by slots.
    pub(crate) free: VecDeque<SlotIndex>,
    /// Layers whose experts live here.
    pub(crate) layers: usize,
    /// Slots being read for forecasts that nobody has adopted.
    pub(crate) forecasts: usize,
}

/// Which expert sits in which slot.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone, PartialEq, Eq, Hash))]
pub struct SlotPool<P = BuiltIn> {
    pub(crate) n_experts: u32,
    pub(crate) slots: Vec<Slot>,
    /// `[n_layers * n_experts]`: the slot that holds the key or is being read for it.
    pub(crate) index: Vec<Option<SlotIndex>>,
    pub(crate) classes: Vec<Class>,
    pub(crate) class_of_layer: Vec<u32>,
    /// By layer: slots that hold its experts or are being read for them.
    pub(crate) resident: Vec<u32>,
    pub(crate) shields: Shields,
    pub(crate) policy: P,
    pub(crate) counters: PoolCounters,
    /// Whether a transaction has begun and neither started nor aborted.
    pub(crate) reserving: bool,
    /// `[n_experts]`, all false between calls: what a selection has named so far.
    named: Vec<bool>,
    spares: Spares,
}

/// Ended transactions, whose vectors serve the next ones. No part of the pool's state.
#[derive(Debug, Default)]
struct Spares(Vec<Transaction>);

impl SlotPool {
    /// An empty pool with one of the policies of this crate.
    ///
    /// # Errors
    /// [`PoolError::Spec`] if a layer has no size class or a size class has no slots.
    pub fn new(spec: PoolSpec, policy: PolicyKind) -> Result<Self, PoolError> {
        let (class_of_layer, n_experts) = (spec.class_of_layer.clone(), spec.n_experts as usize);
        let usual_selection = spec.usual_selection as usize;
        Self::with_policy(spec, |classes| {
            let class_of_layer = &class_of_layer[..];
            BuiltIn::new(policy, &Shape { classes, class_of_layer, n_experts, usual_selection })
        })
    }
}

impl<P: Policy> SlotPool<P> {
    /// An empty pool whose policy is made from the slots of each size class.
    ///
    /// # Errors
    /// As [`SlotPool::new`].
    pub fn with_policy(
        spec: PoolSpec,
        policy: impl FnOnce(&[Range<u32>]) -> P,
    ) -> Result<Self, PoolError> {
        let classes = spec.class_slots()?;
        let policy = policy(&classes);
        let n_slots = classes.last().map_or(0, |class| class.end) as usize;
        let n_keys = spec.n_layers as usize * spec.n_experts as usize;
        let class = |(number, slots): (usize, Range<u32>)| Class {
            // Reversed, so that slots are given out in order.
            free: slots.clone().rev().map(SlotIndex).collect(),
            layers: spec.class_of_layer.iter().filter(|class| **class as usize == number).count(),
            slots,
            forecasts: 0,
        };
        Ok(Self {
            n_experts: spec.n_experts,
            slots: vec![Slot::Free; n_slots],
            index: vec![None; n_keys],
            classes: classes.into_iter().enumerate().map(class).collect(),
            resident: vec![0; spec.n_layers as usize],
            class_of_layer: spec.class_of_layer,
            shields: Shields::new(n_keys),
            policy,
            counters: PoolCounters::default(),
            reserving: false,
            named: vec![false; spec.n_experts as usize],
            spares: Spares::default(),
        })
    }

    /// Totals since the start.
    pub const fn counters(&self) -> PoolCounters {
        self.counters
    }

    /// Slots in which experts of a layer may sit; it shares them with layers of the same record size.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn slots_for(&self, layer: LayerIndex) -> usize {
        self.class(layer).slots.len()
    }

    /// The slot of a ready expert.
    ///
    /// # Panics
    /// If there is no such expert.
    pub fn lookup(&self, key: ExpertKey) -> Option<SlotIndex> {
        let slot = self.index[self.at(key)]?;
        matches!(self.slots[slot.get()], Slot::Ready { .. }).then_some(slot)
    }

    /// Whether an expert is ready or on its way.
    ///
    /// # Panics
    /// If there is no such expert.
    pub fn knows(&self, key: ExpertKey) -> bool {
        self.index[self.at(key)].is_some()
    }

    /// Reserves a layer's selection for a pass: pins what is ready, then chooses victims outside of the selection
    /// for as many of the others as fit; the rest is `deferred` to [`Self::begin_next`].
    ///
    /// `completed` is the newest epoch whose work is over: slots used until then may be victims. Until the
    /// transaction starts or is aborted, the pool takes no other change.
    ///
    /// # Errors
    /// [`PoolError::Busy`], [`PoolError::TooSmall`] or [`PoolError::InFlight`] if nothing at all can be served; the
    /// pool is unchanged.
    ///
    /// # Panics
    /// If an expert occurs twice or does not exist.
    pub fn begin(
        &mut self,
        layer: LayerIndex,
        selection: &[ExpertIndex],
        completed: Epoch,
    ) -> Result<Transaction, PoolError> {
        self.reserve_selection(layer, selection, completed, false)
    }

    /// The next wave of a pass: `selection` is what its last transaction deferred. Look-ups are not counted again.
    ///
    /// # Errors
    /// As [`Self::begin`].
    ///
    /// # Panics
    /// As [`Self::begin`].
    pub fn begin_next(
        &mut self,
        layer: LayerIndex,
        selection: &[ExpertIndex],
        completed: Epoch,
    ) -> Result<Transaction, PoolError> {
        self.reserve_selection(layer, selection, completed, true)
    }

    fn reserve_selection(
        &mut self,
        layer: LayerIndex,
        selection: &[ExpertIndex],
        completed: Epoch,
        later_wave: bool,
    ) -> Result<Transaction, PoolError> {
        self.assert_settled();
        self.assert_distinct(layer, selection);
        let spare = self.spares.0.pop();
        let mut tx = spare.unwrap_or_else(|| Transaction::for_layer_of(self.n_experts as usize));
        (tx.layer, tx.later_wave, tx.phase) = (layer, later_wave, Phase::Reserved);
        self.lease_present(&mut tx, selection);
        self.claim_missing(&mut tx, selection, completed);
        if tx.serves_nothing() && !selection.is_empty() {
            self.policy.undo();
            self.recycle(tx);
            return Err(self.why_nothing(layer, selection, completed));
        }
        tx.awaiting = tx.adopted.len() + tx.loads.len();
        self.reserving = true;
        Ok(tx)
    }

    /// Pins what is ready and adopts what a forecast is reading, before any victim is chosen.
    fn lease_present(&mut self, tx: &mut Transaction, selection: &[ExpertIndex]) {
        for expert in selection {
            let key = ExpertKey { layer: tx.layer, expert: *expert };
            let Some(slot) = self.index[self.at(key)] else { continue };
            match &mut self.slots[slot.get()] {
                Slot::Ready { pins, .. } => {
                    *pins += 1;
                    tx.hits.push((key, slot));
                    tx.found.push(slot);
                }
                Slot::Reading { reader: reader @ Reader::Forecast, .. } => {
                    *reader = Reader::Transaction(tx.adopted.len() as u32);
                    tx.adopted.push((key, slot));
                    tx.found.push(slot);
                    self.class_mut(tx.layer).forecasts -= 1;
                }
                // Another transaction's read is left to it.
                Slot::Reading { .. } => {}
                Slot::Free => unreachable!("the index names slots that hold or await a key"),
            }
        }
    }

    fn claim_missing(&mut self, tx: &mut Transaction, selection: &[ExpertIndex], completed: Epoch) {
        let mut search = self.search(tx.layer, selection.len());
        let mut full = false;
        for expert in selection {
            let key = ExpertKey { layer: tx.layer, expert: *expert };
            if let Some(slot) = self.index[self.at(key)] {
                if let Slot::Reading { reader: Reader::Transaction(place), .. } =
                    self.slots[slot.get()]
                    && tx.awaited_at(place) != Some((key, slot))
                {
                    tx.deferred.push(*expert);
                }
                continue;
            }
            // Nothing becomes a candidate during a reservation: once there is none, there is none.
            let slot = if full { None } else { self.find_slot(key, completed, &mut search) };
            let Some(slot) = slot else {
                full = true;
                tx.deferred.push(*expert);
                continue;
            };
            let place = tx.adopted.len() + tx.loads.len();
            let evicted = self.claim(slot, key, Reader::Transaction(place as u32));
            tx.loads.push(Load { key, slot, evicted });
        }
    }

    /// Makes a reservation final: its victims are gone (the caller unpublishes them), its reads may be issued.
    ///
    /// The policy takes what is there or on its way as used in the order of the selection, the last most recently, so
    /// that it does not matter what has arrived.
    ///
    /// # Panics
    /// If it has started before.
    pub fn start(&mut self, tx: &mut Transaction) {
        assert!(tx.phase == Phase::Reserved && self.reserving, "a transaction starts once");
        (tx.phase, self.reserving) = (Phase::Started, false);
        self.policy.commit();
        if !tx.later_wave {
            let found = tx.hits.len() + tx.adopted.len() + tx.loads.len();
            self.counters.lookups += (found + tx.deferred.len()) as u64;
        }
        for slot in &tx.found {
            self.count_use(*slot);
        }
        self.counters.misses += tx.loads.len() as u64;
        for load in &tx.loads {
            self.evict(load.slot);
        }
    }

    /// The bytes of `key` are in its slot: it is ready, and pinned by the transaction.
    ///
    /// # Panics
    /// If the transaction has not started or does not await `key`.
    pub fn publish(&mut self, tx: &mut Transaction, key: ExpertKey) {
        assert!(tx.phase == Phase::Started, "reads are issued after the start");
        self.assert_settled();
        let slot = self.index[self.at(key)].expect("an awaited expert has a slot");
        let Slot::Reading { reader: Reader::Transaction(place), .. } = self.slots[slot.get()]
        else {
            panic!("{key} is not being read for a transaction");
        };
        assert_eq!(
            tx.awaited_at(place),
            Some((key, slot)),
            "{key} is read for another transaction"
        );
        self.slots[slot.get()] = Slot::Ready { stay: Stay::new(key), pins: 1 };
        tx.awaiting -= 1;
    }

    /// Gives everything back. Before `start` the pool is as it was before `begin`; afterwards, experts that arrived
    /// stay, and slots whose bytes did not arrive are free.
    ///
    /// The caller has made sure that no read is still running and that no submitted work uses the leased slots; if
    /// work may still run, [`Self::abort_until`] says how long.
    pub fn abort(&mut self, tx: Transaction) {
        self.abort_until(tx, Epoch(0));
    }

    /// [`Self::abort`] while work that was submitted until `used_until` may still use what had arrived.
    pub fn abort_until(&mut self, tx: Transaction, used_until: Epoch) {
        let reserved = tx.phase == Phase::Reserved;
        // Work is submitted after the start only.
        let used_until = if reserved { Epoch(0) } else { used_until };
        if reserved {
            self.policy.undo();
            self.reserving = false;
        }
        self.assert_settled();
        for (_, slot) in &tx.hits {
            self.unpin(*slot, used_until);
        }
        // Backwards, so that free slots go back in the order in which they lay.
        for load in tx.loads.iter().rev() {
            match self.slots[load.slot.get()] {
                Slot::Ready { .. } => self.unpin(load.slot, used_until),
                Slot::Reading { before: Some(stay), .. } => self.restore(load, stay),
                _ => self.free(load.key, load.slot, !reserved),
            }
        }
        for (key, slot) in &tx.adopted {
            match &mut self.slots[slot.get()] {
                Slot::Reading { reader, .. } if reserved => {
                    *reader = Reader::Forecast;
                    self.class_mut(tx.layer).forecasts += 1;
                }
                Slot::Reading { .. } => self.free(*key, *slot, true),
                _ => self.unpin(*slot, used_until),
            }
        }
        self.recycle(tx);
    }

    /// Releases every lease: the slots may be victims once `used_until` has completed.
    ///
    /// # Panics
    /// If an expert has not arrived.
    pub fn finish(&mut self, tx: Transaction, used_until: Epoch) {
        assert!(tx.phase == Phase::Started && tx.awaiting == 0, "every expert has arrived");
        self.assert_settled();
        for (_, slot) in tx.hits.iter().copied().chain(tx.awaited()) {
            self.unpin(slot, used_until);
        }
        self.recycle(tx);
    }

    /// Reports a pass in which a device found all of `experts` by itself; its work ends with `used_until`.
    ///
    /// Until the report the pool knows nothing of that use, so the caller begins no transaction in between.
    ///
    /// # Panics
    /// If an expert occurs twice, or is not ready: then the device's residency table is wrong.
    pub fn touch(&mut self, layer: LayerIndex, experts: &[ExpertIndex], used_until: Epoch) {
        self.assert_settled();
        self.assert_distinct(layer, experts);
        self.counters.lookups += experts.len() as u64;
        for expert in experts {
            let key = ExpertKey { layer, expert: *expert };
            let slot = self.lookup(key).expect("a device uses ready experts only");
            if let Slot::Ready { stay, .. } = &mut self.slots[slot.get()] {
                stay.used_until = used_until.max(stay.used_until);
            }
            self.count_use(slot);
        }
    }

    /// The use of an expert that is there or on its way: a hit, unless it is the first after a forecast's read.
    fn count_use(&mut self, slot: SlotIndex) {
        let (key, forecast) = match &mut self.slots[slot.get()] {
            Slot::Ready { stay, .. } => (stay.key, std::mem::take(&mut stay.unused_forecast)),
            Slot::Reading { key, .. } => (*key, true),
            Slot::Free => unreachable!("leased slots hold or await an expert"),
        };
        if forecast {
            self.counters.adopted += 1;
        } else {
            self.counters.hits += 1;
        }
        self.policy.used(slot, key);
    }

    /// Marks a slot as being read for `key`; the expert that it still holds, if any.
    pub(crate) fn claim(
        &mut self,
        slot: SlotIndex,
        key: ExpertKey,
        reader: Reader,
    ) -> Option<ExpertKey> {
        let before = match self.slots[slot.get()] {
            Slot::Ready { stay, .. } => Some(stay),
            _ => None,
        };
        if let Some(stay) = before {
            self.set_slot_of(stay.key, None);
        }
        self.slots[slot.get()] = Slot::Reading { key, reader, before };
        self.set_slot_of(key, Some(slot));
        before.map(|stay| stay.key)
    }

    /// A claimed slot loses what it held, and the policy hears of both experts.
    pub(crate) fn evict(&mut self, slot: SlotIndex) {
        let Slot::Reading { key, before, .. } = &mut self.slots[slot.get()] else {
            unreachable!("claimed slots are being read")
        };
        if let Some(stay) = before.take() {
            self.counters.evictions += 1;
            self.counters.wasted += u64::from(stay.unused_forecast);
            self.policy.removed(slot, stay.key);
        }
        self.policy.inserted(slot, *key);
    }

    /// Undoes [`Self::claim`] of a victim.
    fn restore(&mut self, load: &Load, stay: Stay) {
        self.set_slot_of(load.key, None);
        self.set_slot_of(stay.key, Some(load.slot));
        self.slots[load.slot.get()] = Slot::Ready { stay, pins: 0 };
    }

    /// Frees a slot whose bytes never came.
    pub(crate) fn free(&mut self, key: ExpertKey, slot: SlotIndex, inserted: bool) {
        self.set_slot_of(key, None);
        self.slots[slot.get()] = Slot::Free;
        self.class_mut(key.layer).free.push_back(slot);
        if inserted {
            self.policy.removed(slot, key);
        }
    }

    fn unpin(&mut self, slot: SlotIndex, until: Epoch) {
        let Slot::Ready { stay, pins } = &mut self.slots[slot.get()] else {
            unreachable!("leased slots are ready")
        };
        *pins = pins.checked_sub(1).expect("a lease is released once");
        stay.used_until = until.max(stay.used_until);
    }

    fn recycle(&mut self, mut tx: Transaction) {
        tx.end();
        self.spares.0.push(tx);
    }

    fn set_slot_of(&mut self, key: ExpertKey, slot: Option<SlotIndex>) {
        let at = self.at(key);
        self.index[at] = slot;
        let resident = &mut self.resident[key.layer.get()];
        if slot.is_some() { *resident += 1 } else { *resident -= 1 }
    }

    pub(crate) fn class(&self, layer: LayerIndex) -> &Class {
        &self.classes[self.class_of_layer[layer.get()] as usize]
    }

    pub(crate) fn class_mut(&mut self, layer: LayerIndex) -> &mut Class {
        &mut self.classes[self.class_of_layer[layer.get()] as usize]
    }

    /// Place of a key in `index`.
    pub(crate) fn at(&self, key: ExpertKey) -> usize {
        let exists = key.layer.get() < self.class_of_layer.len() && key.expert.0 < self.n_experts;
        assert!(exists, "{key} does not exist");
        key.layer.get() * self.n_experts as usize + key.expert.get()
    }

    pub(crate) fn assert_settled(&self) {
        assert!(!self.reserving, "a reservation is open: start or abort it first");
    }

    fn assert_distinct(&mut self, layer: LayerIndex, selection: &[ExpertIndex]) {
        for expert in selection {
            let key = ExpertKey { layer, expert: *expert };
            self.at(key);
            let before = std::mem::replace(&mut self.named[expert.get()], true);
            assert!(!before, "{key} occurs twice in a selection");
        }
        for expert in selection {
            self.named[expert.get()] = false;
        }
    }
}

#[cfg(test)]
mod state {
    //! A recycled allocation is no state, so pools that differ in it only are equal.

    use std::hash::{Hash, Hasher};

    use super::Spares;

    impl Clone for Spares {
        fn clone(&self) -> Self {
            Self::default()
        }
    }

    impl PartialEq for Spares {
        fn eq(&self, _: &Self) -> bool {
            true
        }
    }

    impl Eq for Spares {}

    impl Hash for Spares {
        fn hash<H: Hasher>(&self, _: &mut H) {}
    }
}

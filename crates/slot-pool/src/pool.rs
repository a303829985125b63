//! The pool: slots, the index of keys, and the moves between states.

use std::ops::Range;

use units::{Epoch, ExpertIndex, ExpertKey, LayerIndex, SlotIndex};

use crate::policy::{AnyPolicy, PolicyKind};
use crate::transaction::{Load, Transaction};

/// Slots of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClassSpec {
    /// How many.
    pub slots: u32,
    /// Bytes of one.
    pub slot_bytes: u64,
}

/// What a pool is made for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolSpec {
    /// Layers with experts.
    pub n_layers: u32,
    /// Experts of a layer.
    pub n_experts: u32,
    /// Size classes; slots are numbered class after class.
    pub classes: Vec<ClassSpec>,
    /// The class of each layer's records.
    pub class_of_layer: Vec<u32>,
}

/// Why a request cannot be served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    /// Every candidate is in use by work that has not completed.
    #[error("every slot for {layer} is in use until epoch {}", until.0)]
    Busy {
        /// The layer that asked.
        layer: LayerIndex,
        /// The first epoch at which a slot becomes free.
        until: Epoch,
    },
    /// No slot for this layer can ever become free.
    #[error(
        "layer {layer} has {slots} slots and all of them are pinned or being read; give the pool more memory"
    )]
    TooSmall {
        /// The layer that asked.
        layer: LayerIndex,
        /// Slots of its class.
        slots: u32,
    },
    /// The specification contradicts itself.
    #[error("{what}: found {found}, needed {needed}")]
    Spec {
        /// The thing.
        what: &'static str,
        /// What was found.
        found: u64,
        /// What was needed.
        needed: u64,
    },
}

/// What happened, one definition each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct PoolCounters {
    /// Distinct experts per layer and pass.
    pub lookups: u64,
    /// Of those, found ready.
    pub hits: u64,
    /// Of those, read on demand.
    pub misses: u64,
    /// Of those, found in a forecast's read: neither hit nor miss.
    pub adopted: u64,
    /// Experts that left for another.
    pub evictions: u64,
    /// Slots reserved by forecasts.
    pub speculative: u64,
}

impl PoolCounters {
    /// What happened since `earlier`.
    #[must_use]
    pub const fn minus(&self, earlier: &Self) -> Self {
        Self {
            lookups: self.lookups - earlier.lookups,
            hits: self.hits - earlier.hits,
            misses: self.misses - earlier.misses,
            adopted: self.adopted - earlier.adopted,
            evictions: self.evictions - earlier.evictions,
            speculative: self.speculative - earlier.speculative,
        }
    }

    /// Both together.
    #[must_use]
    pub const fn plus(&self, other: &Self) -> Self {
        Self {
            lookups: self.lookups + other.lookups,
            hits: self.hits + other.hits,
            misses: self.misses + other.misses,
            adopted: self.adopted + other.adopted,
            evictions: self.evictions + other.evictions,
            speculative: self.speculative + other.speculative,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Slot {
    Free,
    /// Reserved: bytes are on their way, or will be.
    Reading {
        key: ExpertKey,
        speculative: bool,
        /// What the slot held, until the read starts.
        before: Option<(ExpertKey, Epoch)>,
    },
    Ready {
        key: ExpertKey,
        pins: u32,
        used_until: Epoch,
    },
}

/// Which expert sits in which slot.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone, PartialEq, Eq, Hash))]
pub struct SlotPool {
    n_experts: u32,
    pub(crate) slots: Vec<Slot>,
    /// By layer and expert: the slot that holds the key or is being read for it.
    pub(crate) index: Vec<Option<SlotIndex>>,
    classes: Vec<Range<u32>>,
    class_of_layer: Vec<u32>,
    /// Free slots of each class, last out first.
    pub(crate) free: Vec<Vec<SlotIndex>>,
    shielded: Vec<bool>,
    policy: AnyPolicy,
    pub(crate) counters: PoolCounters,
    #[cfg(not(test))]
    spare: Option<Transaction>,
}

impl SlotPool {
    /// An empty pool.
    ///
    /// # Errors
    /// [`PoolError::Spec`] if a layer has no class or there are no slots.
    pub fn new(spec: PoolSpec, policy: PolicyKind) -> Result<Self, PoolError> {
        let error = |what, found: usize, needed: usize| {
            Err(PoolError::Spec { what, found: found as u64, needed: needed as u64 })
        };
        if spec.class_of_layer.len() != spec.n_layers as usize {
            return error(
                "layers with a size class",
                spec.class_of_layer.len(),
                spec.n_layers as usize,
            );
        }
        if let Some(class) =
            spec.class_of_layer.iter().find(|class| **class as usize >= spec.classes.len())
        {
            return error(
                "size class of a layer",
                *class as usize,
                spec.classes.len().saturating_sub(1),
            );
        }
        let mut classes: Vec<Range<u32>> = Vec::new();
        for class in &spec.classes {
            let start = classes.last().map_or(0, |before| before.end);
            match start.checked_add(class.slots) {
                Some(end) if class.slots > 0 => classes.push(start..end),
                _ => return error("slots of a class", class.slots as usize, 1),
            }
        }
        let n_slots = classes.last().map_or(0, |class| class.end) as usize;
        Ok(Self {
            n_experts: spec.n_experts,
            slots: vec![Slot::Free; n_slots],
            index: vec![None; spec.n_layers as usize * spec.n_experts as usize],
            // Reversed, so that slots are given out in order.
            free: classes
                .iter()
                .map(|class| class.clone().rev().map(SlotIndex).collect())
                .collect(),
            policy: AnyPolicy::new(policy, &classes),
            classes,
            class_of_layer: spec.class_of_layer,
            shielded: vec![false; n_slots],
            counters: PoolCounters::default(),
            #[cfg(not(test))]
            spare: None,
        })
    }

    /// Totals since the start.
    pub const fn counters(&self) -> PoolCounters {
        self.counters
    }

    /// The slot of a ready expert.
    pub fn lookup(&self, key: ExpertKey) -> Option<SlotIndex> {
        let slot = self.index[self.at(key)]?;
        matches!(self.slots[slot.get()], Slot::Ready { .. }).then_some(slot)
    }

    /// Reserves a layer's selection for a pass: pins what is ready, then chooses victims outside of the selection for
    /// as many of the others as fit; the rest is `deferred`.
    ///
    /// `completed` is the newest epoch whose work is over: slots used until then may be victims.
    ///
    /// # Errors
    /// [`PoolError::Busy`] or [`PoolError::TooSmall`] if nothing at all can be served; the pool is unchanged.
    ///
    /// # Panics
    /// If a key occurs twice or is already being read by another transaction.
    pub fn begin(
        &mut self,
        layer: LayerIndex,
        selection: &[ExpertIndex],
        completed: Epoch,
    ) -> Result<Transaction, PoolError> {
        self.reserve_all(layer, selection, completed, false)
    }

    /// The next wave of a pass: `selection` is what an earlier transaction deferred. Look-ups are not counted again.
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub fn begin_next(
        &mut self,
        layer: LayerIndex,
        selection: &[ExpertIndex],
        completed: Epoch,
    ) -> Result<Transaction, PoolError> {
        self.reserve_all(layer, selection, completed, true)
    }

    fn reserve_all(
        &mut self,
        layer: LayerIndex,
        selection: &[ExpertIndex],
        completed: Epoch,
        later_wave: bool,
    ) -> Result<Transaction, PoolError> {
        let mut tx = self.take_spare();
        (tx.layer, tx.later_wave) = (layer, later_wave);
        for expert in selection {
            let key = ExpertKey { layer, expert: *expert };
            let Some(slot) = self.index[self.at(key)] else { continue };
            match &mut self.slots[slot.get()] {
                Slot::Ready { pins, .. } => {
                    assert!(
                        tx.hits.iter().all(|(k, _)| *k != key),
                        "{key} occurs twice in a selection"
                    );
                    *pins += 1;
                    tx.hits.push((key, slot));
                }
                Slot::Reading { speculative, .. } => {
                    assert!(*speculative, "{key} is already being read for a transaction");
                    *speculative = false;
                    tx.adopted.push((key, slot));
                }
                Slot::Free => unreachable!("the index names slots that hold or read a key"),
            }
        }
        let small = self.is_small(layer, selection.len());
        for expert in selection {
            let key = ExpertKey { layer, expert: *expert };
            if self.index[self.at(key)].is_some() {
                continue;
            }
            match self.reserve_slot(key, completed, small, false) {
                Some(load) => tx.loads.push(load),
                None => tx.deferred.push(*expert),
            }
        }
        if tx.hits.is_empty()
            && tx.adopted.is_empty()
            && tx.loads.is_empty()
            && !selection.is_empty()
        {
            self.policy.get().undo();
            self.put_spare(tx);
            return Err(self.why_nothing(layer, completed));
        }
        tx.arrived.resize(tx.loads.len() + tx.adopted.len(), false);
        Ok(tx)
    }

    /// Makes a reservation final: its victims are gone (the caller unpublishes them), its reads may be issued.
    pub fn start(&mut self, tx: &mut Transaction) {
        assert!(!tx.started, "a transaction starts once");
        tx.started = true;
        self.policy.get().commit();
        for load in &tx.loads {
            let Slot::Reading { before, .. } = &mut self.slots[load.slot.get()] else {
                unreachable!("reserved in begin")
            };
            if before.take().is_some() {
                self.counters.evictions += 1;
                self.policy.get().removed(load.slot);
            }
        }
        for (_, slot) in &tx.hits {
            self.policy.get().used(*slot);
        }
        let (hits, adopted, misses) =
            (tx.hits.len() as u64, tx.adopted.len() as u64, tx.loads.len() as u64);
        if tx.later_wave {
            // What a later wave finds ready was forecast since the first.
            self.counters.adopted += hits + adopted;
        } else {
            self.counters.lookups += hits + adopted + misses + tx.deferred.len() as u64;
            self.counters.hits += hits;
            self.counters.adopted += adopted;
        }
        self.counters.misses += misses;
    }

    /// The bytes of `key` are in its slot: it is ready, and pinned by the transaction.
    pub fn publish(&mut self, tx: &mut Transaction, key: ExpertKey) {
        assert!(tx.started, "reads are issued after start");
        let awaited = tx.awaited(key).expect("the transaction waits for this expert");
        assert!(!std::mem::replace(&mut tx.arrived[awaited], true), "{key} arrived twice");
        let slot = tx.slot_of(key).expect("awaited experts have a slot");
        self.slots[slot.get()] = Slot::Ready { key, pins: 1, used_until: Epoch(0) };
        self.policy.get().inserted(slot);
    }

    /// Gives everything back. Before `start` the pool is as it was before `begin`; afterwards, experts that arrived
    /// stay, and slots whose bytes did not arrive are free. The caller has made sure that no read is still running.
    pub fn abort(&mut self, mut tx: Transaction) {
        if !tx.started {
            self.policy.get().undo();
        }
        for (_, slot) in &tx.hits {
            self.unpin(*slot, Epoch(0));
        }
        for (i, load) in tx.loads.iter().enumerate().rev() {
            match self.slots[load.slot.get()] {
                Slot::Ready { .. } => self.unpin(load.slot, Epoch(0)),
                Slot::Reading { before: Some((key, used_until)), .. } => {
                    let (loading, held) = (self.at(load.key), self.at(key));
                    self.index[loading] = None;
                    self.index[held] = Some(load.slot);
                    self.slots[load.slot.get()] = Slot::Ready { key, pins: 0, used_until };
                }
                _ => {
                    debug_assert!(!tx.arrived[i]);
                    self.release(load.key, load.slot);
                }
            }
        }
        for (i, (key, slot)) in tx.adopted.iter().enumerate() {
            if tx.arrived[tx.loads.len() + i] {
                self.unpin(*slot, Epoch(0));
            } else if tx.started {
                self.release(*key, *slot);
            } else if let Slot::Reading { speculative, .. } = &mut self.slots[slot.get()] {
                *speculative = true;
            }
        }
        tx.ended = true;
        self.put_spare(tx);
    }

    /// Releases every lease: the slots may be victims once `used_until` has completed.
    ///
    /// # Panics
    /// If an expert has not arrived.
    pub fn finish(&mut self, mut tx: Transaction, used_until: Epoch) {
        assert!(
            tx.started && tx.arrived.iter().all(|arrived| *arrived),
            "every expert has arrived"
        );
        for (_, slot) in tx.places() {
            self.unpin(slot, used_until);
        }
        tx.ended = true;
        self.put_spare(tx);
    }

    /// A device found all of `experts` by itself and uses them until `used_until`.
    ///
    /// # Panics
    /// If one of them is not ready: then the device's residency table is wrong.
    pub fn touch(&mut self, layer: LayerIndex, experts: &[ExpertIndex], used_until: Epoch) {
        for expert in experts {
            let key = ExpertKey { layer, expert: *expert };
            let slot = self.lookup(key).expect("a device uses ready experts only");
            if let Slot::Ready { used_until: until, .. } = &mut self.slots[slot.get()] {
                *until = used_until.max(*until);
            }
            self.policy.get().used(slot);
        }
        self.counters.lookups += experts.len() as u64;
        self.counters.hits += experts.len() as u64;
    }

    /// Reserves a slot for a forecast; nothing if the expert is there already, or if no slot may go.
    pub fn reserve(&mut self, key: ExpertKey, completed: Epoch) -> Option<Load> {
        if self.index[self.at(key)].is_some() {
            return None;
        }
        let load = self.reserve_slot(key, completed, false, true);
        if load.is_none() {
            self.policy.get().undo();
            return None;
        }
        self.policy.get().commit();
        let load = load?;
        if let Slot::Reading { before, .. } = &mut self.slots[load.slot.get()]
            && before.take().is_some()
        {
            self.counters.evictions += 1;
            self.policy.get().removed(load.slot);
        }
        self.counters.speculative += 1;
        Some(load)
    }

    /// A forecast's bytes are there, and no transaction has adopted them.
    pub fn publish_speculative(&mut self, key: ExpertKey) {
        let slot = self.speculative_slot(key);
        self.slots[slot.get()] = Slot::Ready { key, pins: 0, used_until: Epoch(0) };
        self.policy.get().inserted(slot);
    }

    /// A forecast's read was given up or failed.
    pub fn cancel_speculative(&mut self, key: ExpertKey) {
        let slot = self.speculative_slot(key);
        self.release(key, slot);
    }

    /// Experts that a forecast expects soon: spared while another victim is left. Replaces the last forecast.
    pub fn shield(&mut self, keys: &[ExpertKey]) {
        self.shielded.fill(false);
        for key in keys {
            if let Some(slot) = self.lookup(*key) {
                self.shielded[slot.get()] = true;
            }
        }
    }

    fn speculative_slot(&self, key: ExpertKey) -> SlotIndex {
        let slot = self.index[self.at(key)].expect("the forecast reserved a slot");
        let reading = matches!(self.slots[slot.get()], Slot::Reading { speculative: true, .. });
        assert!(reading, "{key} is not being read by a forecast");
        slot
    }

    /// A free slot, else a victim, marked as being read for `key`.
    fn reserve_slot(
        &mut self,
        key: ExpertKey,
        completed: Epoch,
        small: bool,
        speculative: bool,
    ) -> Option<Load> {
        let class = self.class_of_layer[key.layer.get()] as usize;
        let free = self.free[class].pop();
        let slot =
            free.or_else(|| self.choose_victim(class, key.layer, completed, small, speculative))?;
        let before = match self.slots[slot.get()] {
            Slot::Ready { key, used_until, .. } => Some((key, used_until)),
            _ => None,
        };
        if let Some((evicted, _)) = before {
            let at = self.at(evicted);
            self.index[at] = None;
        }
        self.slots[slot.get()] = Slot::Reading { key, speculative, before };
        let at = self.at(key);
        self.index[at] = Some(slot);
        Some(Load { key, slot, evicted: before.map(|(evicted, _)| evicted) })
    }

    /// In a pool that holds less than two selections of every layer, the layer's own unselected experts go first:
    /// they are the ones whose next use is furthest away, a whole round of layers.
    fn choose_victim(
        &mut self,
        class: usize,
        layer: LayerIndex,
        completed: Epoch,
        small: bool,
        speculative: bool,
    ) -> Option<SlotIndex> {
        let (slots, shielded) = (&self.slots, &self.shielded);
        let candidate = |slot: SlotIndex| match slots[slot.get()] {
            Slot::Ready { key, pins: 0, used_until } if used_until <= completed => Some(key),
            _ => None,
        };
        let spared = |slot: SlotIndex| candidate(slot).is_some() && !shielded[slot.get()];
        let own =
            |slot: SlotIndex| spared(slot) && candidate(slot).is_some_and(|key| key.layer == layer);
        let class = self.classes[class].clone();
        let policy = self.policy.get();
        let first = if small { policy.victim(class.clone(), &own) } else { None };
        first.or_else(|| policy.victim(class.clone(), &spared)).or_else(|| {
            if speculative { None } else { policy.victim(class, &|slot| candidate(slot).is_some()) }
        })
    }

    fn is_small(&self, layer: LayerIndex, selected: usize) -> bool {
        let class = self.class_of_layer[layer.get()];
        let layers = self.class_of_layer.iter().filter(|c| **c == class).count();
        self.classes[class as usize].len() < 2 * layers * selected
    }

    fn why_nothing(&self, layer: LayerIndex, completed: Epoch) -> PoolError {
        let class = self.classes[self.class_of_layer[layer.get()] as usize].clone();
        let slots = class.len() as u32;
        let until = class.filter_map(|slot| match self.slots[slot as usize] {
            Slot::Ready { pins: 0, used_until, .. } if used_until > completed => Some(used_until),
            _ => None,
        });
        until
            .min()
            .map_or(PoolError::TooSmall { layer, slots }, |until| PoolError::Busy { layer, until })
    }

    fn unpin(&mut self, slot: SlotIndex, until: Epoch) {
        let Slot::Ready { pins, used_until, .. } = &mut self.slots[slot.get()] else {
            unreachable!("only ready slots are pinned")
        };
        *pins = pins.checked_sub(1).expect("a lease is released once");
        *used_until = until.max(*used_until);
    }

    /// Frees a slot whose bytes never came.
    fn release(&mut self, key: ExpertKey, slot: SlotIndex) {
        let at = self.at(key);
        self.index[at] = None;
        self.slots[slot.get()] = Slot::Free;
        let class = self
            .classes
            .iter()
            .position(|class| class.contains(&slot.0))
            .expect("every slot has a class");
        self.free[class].push(slot);
    }

    pub(crate) fn at(&self, key: ExpertKey) -> usize {
        assert!(key.expert.0 < self.n_experts, "{key} does not exist");
        key.layer.get() * self.n_experts as usize + key.expert.get()
    }

    #[cfg(not(test))]
    fn take_spare(&mut self) -> Transaction {
        self.spare.take().unwrap_or_default()
    }

    #[cfg(not(test))]
    fn put_spare(&mut self, mut tx: Transaction) {
        tx.clear();
        self.spare = Some(tx);
    }

    // Tests compare whole pools; a recycled allocation is no state.
    #[cfg(test)]
    #[allow(clippy::unused_self, reason = "the same signature as outside of tests")]
    fn take_spare(&mut self) -> Transaction {
        Transaction::default()
    }

    #[cfg(test)]
    #[allow(clippy::unused_self, reason = "the same signature as outside of tests")]
    fn put_spare(&mut self, mut tx: Transaction) {
        tx.clear();
    }

    /// Checks what must hold between any two calls.
    ///
    /// # Panics
    /// If index, slots and free lists contradict each other.
    pub fn check_invariants(&self) {
        let mut named = 0;
        for (at, slot) in self.index.iter().enumerate() {
            let Some(slot) = slot else { continue };
            named += 1;
            match self.slots[slot.get()] {
                Slot::Reading { key, .. } | Slot::Ready { key, .. } => {
                    assert_eq!(self.at(key), at, "the index names the slot that holds the key");
                    let class = &self.classes[self.class_of_layer[key.layer.get()] as usize];
                    assert!(class.contains(&slot.0), "{key} sits in a slot of its layer's class");
                }
                Slot::Free => panic!("the index names free slot {slot}"),
            }
        }
        let taken = self.slots.iter().filter(|slot| !matches!(slot, Slot::Free)).count();
        assert_eq!(named, taken, "every taken slot is in the index once");
        let mut free: Vec<SlotIndex> = self.free.iter().flatten().copied().collect();
        free.sort_unstable();
        let expected = (0..self.slots.len() as u32).map(SlotIndex);
        let expected: Vec<_> =
            expected.filter(|slot| matches!(self.slots[slot.get()], Slot::Free)).collect();
        assert_eq!(free, expected, "free lists hold exactly the free slots");
    }
}

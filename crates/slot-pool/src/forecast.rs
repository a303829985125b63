//! What a guess may do: read ahead into slots that nobody needs, and ask for mercy.

use units::{Epoch, ExpertKey, SlotIndex};

use crate::choose::VictimSearch;
use crate::policy::Policy;
use crate::pool::{Reader, Slot, SlotPool, Stay};
use crate::transaction::Load;

/// Reads of forecasts hold at most one part in this many of a size class, so that demand always finds slots.
const FORECAST_SHARE: usize = 2;

/// Reads in idle time leave this many slots of a size class free, or one part in [`SPARE_SHARE`] where that is more.
const SPARE_SLOTS: usize = 4;
/// See [`SPARE_SLOTS`].
const SPARE_SHARE: usize = 16;

/// Layers whose experts a pass may hold at once: one that computes, one that is read.
const LAYERS_IN_FLIGHT: usize = 2;

/// Experts that a forecast expects soon.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone, PartialEq, Eq, Hash))]
pub(crate) struct Shields {
    /// By key.
    shielded: Vec<bool>,
    /// Those that are set.
    keys: Vec<usize>,
}

impl Shields {
    pub(crate) fn new(n_keys: usize) -> Self {
        Self { shielded: vec![false; n_keys], keys: Vec::new() }
    }

    pub(crate) fn contains(&self, key: usize) -> bool {
        self.shielded[key]
    }

    fn clear(&mut self) {
        for key in self.keys.drain(..) {
            self.shielded[key] = false;
        }
    }

    fn add(&mut self, key: usize) {
        if !std::mem::replace(&mut self.shielded[key], true) {
            self.keys.push(key);
        }
    }
}

impl<P: Policy> SlotPool<P> {
    /// Reserves a slot for a forecast, which may be read at once; its victim is gone (the caller unpublishes it).
    ///
    /// Nothing if the expert is there or on its way already, if no unpinned, unshielded slot may go, or if forecasts
    /// hold their share of the size class. A transaction that wants `key` adopts the read.
    ///
    /// # Panics
    /// If there is no such expert or a reservation is open.
    pub fn reserve(&mut self, key: ExpertKey, completed: Epoch) -> Option<Load> {
        self.reserve_from(key, |pool| pool.find_victim(key, completed, |_, shielded| !shielded))
    }

    /// The same for a pass that needs about all experts of layer after layer: its victim is of the layer whose turn is
    /// furthest away, that of `key` counted as the first of all. So what a layer has just used makes room for the next.
    ///
    /// What two layers need aside, every layer keeps its share of the slots, so that no layer is empty when the pass
    /// ends and the next tokens come.
    ///
    /// # Panics
    /// As [`Self::reserve`].
    pub fn reserve_by_turn(&mut self, key: ExpertKey, completed: Epoch) -> Option<Load> {
        let mut search = VictimSearch::FROM_THE_LAYER;
        let class = self.class(key.layer);
        let aside = LAYERS_IN_FLIGHT * self.n_experts as usize;
        let keep = (class.slots.len().saturating_sub(aside) / class.layers) as u32;
        self.reserve_from(key, |pool| pool.find_by_turn(key, completed, &mut search, keep))
    }

    fn reserve_from(
        &mut self,
        key: ExpertKey,
        victim: impl FnOnce(&mut Self) -> Option<SlotIndex>,
    ) -> Option<Load> {
        self.assert_settled();
        let class = self.class(key.layer);
        let allowed = class.slots.len() / FORECAST_SHARE;
        if self.index[self.at(key)].is_some() || class.forecasts >= allowed {
            return None;
        }
        let free = self.class_mut(key.layer).free.pop_back();
        let slot = free.or_else(|| victim(self));
        let Some(slot) = slot else {
            self.policy.undo();
            return None;
        };
        self.policy.commit();
        let evicted = self.claim(slot, key, Reader::Forecast);
        self.evict(slot);
        self.class_mut(key.layer).forecasts += 1;
        self.counters.speculative += 1;
        Some(Load { key, slot, evicted })
    }

    /// Reserves a free slot for a read in idle time: no expert has to go for it. From here on it is a forecast's.
    ///
    /// Nothing if the expert is there or on its way already, or if few slots of its size class are free. The share of
    /// forecasts does not bind it: whoever reads in idle time gives up what has not begun when that ends.
    ///
    /// # Panics
    /// If there is no such expert or a reservation is open.
    pub fn preload(&mut self, key: ExpertKey) -> Option<Load> {
        self.assert_settled();
        let class = self.class(key.layer);
        let spare = SPARE_SLOTS.max(class.slots.len() / SPARE_SHARE);
        if self.index[self.at(key)].is_some() || class.free.len() <= spare {
            return None;
        }
        let slot = self.class_mut(key.layer).free.pop_front()?;
        self.claim(slot, key, Reader::Forecast);
        self.evict(slot);
        self.class_mut(key.layer).forecasts += 1;
        self.counters.speculative += 1;
        Some(Load { key, slot, evicted: None })
    }

    /// A forecast's bytes are there, and no transaction has adopted them.
    ///
    /// # Panics
    /// If `key` is not being read for a forecast.
    pub fn publish_speculative(&mut self, key: ExpertKey) {
        let slot = self.end_forecast(key);
        let stay = Stay { key, used_until: Epoch(0), unused_forecast: true };
        self.slots[slot.get()] = Slot::Ready { stay, pins: 0 };
    }

    /// A forecast's read was given up or failed; no reader touches its slot any more.
    ///
    /// # Panics
    /// If `key` is not being read for a forecast.
    pub fn cancel_speculative(&mut self, key: ExpertKey) {
        let slot = self.end_forecast(key);
        self.free(key, slot, true);
        self.counters.wasted += 1;
    }

    /// Experts that forecasts expect soon, ready or not: spared while a demand finds another victim, and always by
    /// forecasts. Replaces what was shielded before.
    ///
    /// # Panics
    /// If there is no such expert or a reservation is open.
    pub fn shield(&mut self, keys: &[ExpertKey]) {
        self.assert_settled();
        self.shields.clear();
        for key in keys {
            let at = self.at(*key);
            self.shields.add(at);
        }
    }

    fn end_forecast(&mut self, key: ExpertKey) -> SlotIndex {
        self.assert_settled();
        let slot = self.index[self.at(key)].expect("the forecast reserved a slot");
        let reading = Slot::Reading { key, reader: Reader::Forecast, before: None };
        assert_eq!(self.slots[slot.get()], reading, "{key} is not being read for a forecast");
        self.class_mut(key.layer).forecasts -= 1;
        slot
    }
}

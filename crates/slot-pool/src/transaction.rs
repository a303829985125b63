//! A layer's selection, from reservation to release.

use units::{ExpertIndex, ExpertKey, LayerIndex, SlotIndex};

/// A read to make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// The expert to read.
    pub key: ExpertKey,
    /// Where to.
    pub slot: SlotIndex,
    /// The expert that leaves the slot.
    pub evicted: Option<ExpertKey>,
}

/// Leases on a layer's experts. Ended by `SlotPool::finish` or `SlotPool::abort`.
#[derive(Debug, Default)]
#[must_use = "a transaction holds pins until it is finished or aborted"]
pub struct Transaction {
    /// The layer.
    pub layer: LayerIndex,
    /// Found ready, pinned.
    pub hits: Vec<(ExpertKey, SlotIndex)>,
    /// To be read.
    pub loads: Vec<Load>,
    /// Being read already, by a forecast.
    pub adopted: Vec<(ExpertKey, SlotIndex)>,
    /// For the next wave: no slot is left.
    pub deferred: Vec<ExpertIndex>,
    /// Which of `loads`, then of `adopted`, have arrived.
    pub(crate) arrived: Vec<bool>,
    pub(crate) started: bool,
    pub(crate) later_wave: bool,
    pub(crate) ended: bool,
}

impl Transaction {
    /// Slots of everything that is pinned or being read.
    pub(crate) fn places(&self) -> impl Iterator<Item = (ExpertKey, SlotIndex)> {
        self.hits
            .iter()
            .copied()
            .chain(self.loads.iter().map(|load| (load.key, load.slot)))
            .chain(self.adopted.iter().copied())
    }

    /// Place of a key in `arrived`.
    pub(crate) fn awaited(&self, key: ExpertKey) -> Option<usize> {
        let load = self.loads.iter().position(|load| load.key == key);
        load.or_else(|| {
            self.adopted.iter().position(|(k, _)| *k == key).map(|i| self.loads.len() + i)
        })
    }

    /// The slot of an expert that is to arrive.
    pub fn slot_of(&self, key: ExpertKey) -> Option<SlotIndex> {
        self.places().find(|(k, _)| *k == key).map(|(_, slot)| slot)
    }

    /// Empties it for another use, keeping its allocations.
    pub(crate) fn clear(&mut self) {
        self.hits.clear();
        self.loads.clear();
        self.adopted.clear();
        self.deferred.clear();
        self.arrived.clear();
        (self.started, self.later_wave, self.ended) = (false, false, false);
    }
}

impl Drop for Transaction {
    fn drop(&mut self) {
        let holds = !self.hits.is_empty() || !self.loads.is_empty() || !self.adopted.is_empty();
        debug_assert!(
            self.ended || !holds || std::thread::panicking(),
            "a transaction was neither finished nor aborted"
        );
    }
}

//! A layer's selection, from reservation to release.

use units::{ExpertIndex, ExpertKey, LayerIndex, SlotIndex};

/// A read to make.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Load {
    /// The expert to read.
    pub key: ExpertKey,
    /// Where to.
    pub slot: SlotIndex,
    /// The expert that leaves the slot.
    pub evicted: Option<ExpertKey>,
}

/// Leases on a layer's experts.
///
/// No slot named here can become a victim until [`SlotPool::finish`](crate::SlotPool::finish) or
/// [`SlotPool::abort`](crate::SlotPool::abort) takes the transaction back. The lists are to be read, not changed.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone, PartialEq, Eq, Hash))]
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
    /// For the next wave: no slot is left, or another transaction is reading it.
    pub deferred: Vec<ExpertIndex>,
    /// Slots of `hits` and `adopted` in the order of the selection, in which the policy hears of them.
    pub(crate) found: Vec<SlotIndex>,
    pub(crate) phase: Phase,
    /// Whether an earlier transaction of the same pass deferred this selection.
    pub(crate) later_wave: bool,
    /// Of `adopted` and `loads`, how many have not arrived.
    pub(crate) awaiting: usize,
}

/// How far a transaction has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) enum Phase {
    #[default]
    Reserved,
    Started,
    Ended,
}

impl Transaction {
    /// With room for any selection of a layer with `n_experts`, so that no later use allocates.
    pub(crate) fn for_layer_of(n_experts: usize) -> Self {
        Self {
            hits: Vec::with_capacity(n_experts),
            loads: Vec::with_capacity(n_experts),
            adopted: Vec::with_capacity(n_experts),
            deferred: Vec::with_capacity(n_experts),
            found: Vec::with_capacity(n_experts),
            phase: Phase::Ended,
            ..Self::default()
        }
    }

    /// The slot of an expert that this transaction holds.
    pub fn slot_of(&self, key: ExpertKey) -> Option<SlotIndex> {
        let held = self.hits.iter().copied().chain(self.awaited());
        held.into_iter().find(|(k, _)| *k == key).map(|(_, slot)| slot)
    }

    /// What has arrived or is to arrive: `adopted`, then `loads`.
    pub(crate) fn awaited(&self) -> impl Iterator<Item = (ExpertKey, SlotIndex)> {
        let loads = self.loads.iter().map(|load| (load.key, load.slot));
        self.adopted.iter().copied().chain(loads)
    }

    /// The n-th of [`Self::awaited`].
    pub(crate) fn awaited_at(&self, place: u32) -> Option<(ExpertKey, SlotIndex)> {
        let place = place as usize;
        self.adopted.get(place).copied().or_else(|| {
            let load = self.loads.get(place.checked_sub(self.adopted.len())?)?;
            Some((load.key, load.slot))
        })
    }

    /// Whether it has nothing to compute.
    pub(crate) fn serves_nothing(&self) -> bool {
        self.hits.is_empty() && self.adopted.is_empty() && self.loads.is_empty()
    }

    /// Empties it, keeping its allocations.
    pub(crate) fn end(&mut self) {
        self.hits.clear();
        self.loads.clear();
        self.adopted.clear();
        self.deferred.clear();
        self.found.clear();
        self.phase = Phase::Ended;
    }
}

impl Drop for Transaction {
    fn drop(&mut self) {
        // A second panic while one unwinds would abort the process and hide the first.
        let forgotten = self.phase != Phase::Ended && !self.serves_nothing();
        debug_assert!(
            !forgotten || std::thread::panicking(),
            "a transaction was neither finished nor aborted"
        );
    }
}

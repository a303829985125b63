//! Decayed frequency: uses count, old ones for less, also those of earlier stays; the least counted leaves, the least
//! recent among equals.
//!
//! A count halves with every period of as many uses as the pool has slots. Source of the idea: Robinson and Devarakonda
//! 1990, "Data Cache Management Using Frequency-Based Replacement".

use std::ops::Range;

use units::{ExpertKey, SlotIndex};

use super::{Numbering, Policy, Shape};

/// What a use adds: counts have this many parts, so that halves of small ones still differ.
const ONE: u32 = 1 << 8;

/// Uses of an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Uses {
    /// As of `at`.
    count: u32,
    /// When it was last used.
    at: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Frequency {
    classes: Vec<Range<u32>>,
    numbering: Numbering,
    /// `[n_layers * n_experts]`.
    uses: Vec<Uses>,
    /// By slot: the key there.
    key_of_slot: Vec<usize>,
    /// Uses so far.
    now: u64,
    period: u64,
}

impl Frequency {
    pub(crate) fn new(shape: &Shape<'_>) -> Self {
        Self {
            classes: shape.classes.to_vec(),
            numbering: shape.numbering(),
            uses: vec![Uses::default(); shape.keys()],
            key_of_slot: vec![0; shape.slots()],
            now: 0,
            period: shape.slots().max(1) as u64,
        }
    }

    /// The count of a key as of now.
    fn count(&self, key: usize) -> u32 {
        let Uses { count, at } = self.uses[key];
        let periods = self.now / self.period - at / self.period;
        count.checked_shr(u32::try_from(periods).unwrap_or(u32::MAX)).unwrap_or(0)
    }

    fn count_use(&mut self, slot: SlotIndex, key: ExpertKey) {
        let key = self.numbering.key(key) as usize;
        let count = self.count(key).saturating_add(ONE);
        self.uses[key] = Uses { count, at: self.now };
        self.key_of_slot[slot.get()] = key;
        self.now += 1;
    }
}

impl Policy for Frequency {
    fn inserted(&mut self, slot: SlotIndex, key: ExpertKey) {
        self.count_use(slot, key);
    }

    fn used(&mut self, slot: SlotIndex, key: ExpertKey) {
        self.count_use(slot, key);
    }

    fn removed(&mut self, _slot: SlotIndex, _key: ExpertKey) {}

    fn victim(
        &mut self,
        class: usize,
        _incoming: ExpertKey,
        may_go: impl Fn(SlotIndex) -> bool,
    ) -> Option<SlotIndex> {
        let least = |slot: &SlotIndex| {
            let key = self.key_of_slot[slot.get()];
            (self.count(key), self.uses[key].at)
        };
        let candidates = self.classes[class].clone().map(SlotIndex);
        candidates.filter(|slot| may_go(*slot)).min_by_key(least)
    }
}

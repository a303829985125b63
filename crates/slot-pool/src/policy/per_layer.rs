//! A pool in parts: every layer has the same share of the slots, and least recently used within it.
//!
//! A layer that holds its share gives up one of its own; before that it takes from those that hold more than theirs.

use units::{ExpertKey, SlotIndex};

use super::lru::Lru;
use super::{Policy, Shape};

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct PerLayer {
    lru: Lru,
    /// By slot: the layer of the expert there.
    layer_of_slot: Vec<u32>,
    /// By layer: slots that hold its experts.
    held: Vec<u32>,
    /// By layer: as many as it may hold.
    share: Vec<u32>,
}

impl PerLayer {
    pub(crate) fn new(shape: &Shape<'_>) -> Self {
        let share = |class: &u32| {
            let class = *class as usize;
            (shape.classes[class].len() / shape.layers_of(class)) as u32
        };
        Self {
            lru: Lru::new(shape),
            layer_of_slot: vec![0; shape.slots()],
            held: vec![0; shape.class_of_layer.len()],
            share: shape.class_of_layer.iter().map(share).collect(),
        }
    }
}

impl Policy for PerLayer {
    fn inserted(&mut self, slot: SlotIndex, key: ExpertKey) {
        self.layer_of_slot[slot.get()] = key.layer.0;
        self.held[key.layer.get()] += 1;
        self.lru.inserted(slot, key);
    }

    fn used(&mut self, slot: SlotIndex, key: ExpertKey) {
        self.lru.used(slot, key);
    }

    fn removed(&mut self, slot: SlotIndex, key: ExpertKey) {
        self.held[key.layer.get()] -= 1;
        self.lru.removed(slot, key);
    }

    fn victim(
        &mut self,
        class: usize,
        incoming: ExpertKey,
        may_go: impl Fn(SlotIndex) -> bool,
    ) -> Option<SlotIndex> {
        let own = self.held[incoming.layer.get()] >= self.share[incoming.layer.get()];
        let gives = |slot: SlotIndex| {
            let layer = self.layer_of_slot[slot.get()] as usize;
            if own { layer == incoming.layer.get() } else { self.held[layer] > self.share[layer] }
        };
        let first = self.lru.victim(class, incoming, |slot| gives(slot) && may_go(slot));
        first.or_else(|| self.lru.victim(class, incoming, may_go))
    }
}

//! Least recently used: a list over the slots of each size class.

use units::{ExpertKey, SlotIndex};

use super::list::Lists;
use super::{Policy, Shape};

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Lru {
    /// One for each size class.
    lists: Lists,
    class_of_slot: Vec<u32>,
}

impl Lru {
    pub(crate) fn new(shape: &Shape<'_>) -> Self {
        let lists = Lists::new(shape.classes.len(), shape.slots());
        Self { lists, class_of_slot: shape.class_of_slot() }
    }
}

impl Policy for Lru {
    fn inserted(&mut self, slot: SlotIndex, _key: ExpertKey) {
        self.lists.push_newest(self.class_of_slot[slot.get()] as usize, slot.0);
    }

    fn used(&mut self, slot: SlotIndex, _key: ExpertKey) {
        let (list, _) = self.lists.unlink(slot.0);
        self.lists.push_newest(list, slot.0);
    }

    fn removed(&mut self, slot: SlotIndex, _key: ExpertKey) {
        self.lists.unlink(slot.0);
    }

    fn victim(
        &mut self,
        class: usize,
        _incoming: ExpertKey,
        may_go: impl Fn(SlotIndex) -> bool,
    ) -> Option<SlotIndex> {
        self.lists.oldest_first(class).map(SlotIndex).find(|slot| may_go(*slot))
    }

    // Choosing changes nothing: a victim leaves the list when its slot loses its expert.
    fn commit(&mut self) {}

    fn undo(&mut self) {}
}

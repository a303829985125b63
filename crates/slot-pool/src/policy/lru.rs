//! Least recently used: a list over the slots of each size class.

use units::{ExpertKey, SlotIndex};

use super::list::Lists;
use super::{Numbering, Policy, Shape};

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Lru {
    /// One for each size class.
    lists: Lists,
    numbering: Numbering,
}

impl Lru {
    pub(crate) fn new(shape: &Shape<'_>) -> Self {
        let lists = Lists::new(shape.classes.len(), shape.slots());
        Self { lists, numbering: shape.numbering() }
    }
}

impl Policy for Lru {
    fn inserted(&mut self, slot: SlotIndex, _key: ExpertKey) {
        self.lists.push_newest(self.numbering.class_of(slot), slot.0);
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
}

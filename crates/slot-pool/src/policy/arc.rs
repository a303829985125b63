//! ARC: what was used once and what was used again share the slots; who comes back after having left says which of the
//! two should have had more.
//!
//! Source: Megiddo and Modha 2003, "ARC: A Self-Tuning, Low Overhead Replacement Cache".

use units::{ExpertKey, SlotIndex};

use super::list::Lists;
use super::{Numbering, Policy, Shape};

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Arc {
    /// Two for each size class: used once, used again.
    lists: Lists,
    /// The same of keys that have left.
    ghosts: Lists,
    numbering: Numbering,
    classes: Vec<Target>,
}

/// Slots of a size class.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Target {
    slots: usize,
    /// How many of them are for what was used once.
    once: usize,
}

const fn once(class: usize) -> usize {
    2 * class
}

const fn again(class: usize) -> usize {
    2 * class + 1
}

impl Arc {
    pub(crate) fn new(shape: &Shape<'_>) -> Self {
        let target = |slots: usize| Target { slots, once: 0 };
        Self {
            lists: Lists::new(2 * shape.classes.len(), shape.slots()),
            ghosts: Lists::new(2 * shape.classes.len(), shape.keys()),
            numbering: shape.numbering(),
            classes: shape.classes.iter().map(|slots| target(slots.len())).collect(),
        }
    }

    /// A key that had left comes back: the list that it left should have been longer. The list that it now joins.
    fn welcome(&mut self, class: usize, key: u32) -> usize {
        let Some(left) = self.ghosts.list_of(key) else { return once(class) };
        let lengths = [self.ghosts.len(once(class)), self.ghosts.len(again(class))];
        let Target { slots, once: target } = &mut self.classes[class];
        *target = if left == once(class) {
            (*slots).min(*target + (lengths[1] / lengths[0]).max(1))
        } else {
            target.saturating_sub((lengths[0] / lengths[1]).max(1))
        };
        self.ghosts.unlink(key);
        again(class)
    }

    /// Forgets the oldest of those that left, where they and those that are there are too many.
    fn forget(&mut self, class: usize) {
        let Target { slots, .. } = self.classes[class];
        let len = |list| self.lists.len(list) + self.ghosts.len(list);
        let list = if len(once(class)) > slots {
            once(class)
        } else if len(once(class)) + len(again(class)) > 2 * slots {
            again(class)
        } else {
            return;
        };
        let oldest = self.ghosts.oldest_first(list).next();
        if let Some(oldest) = oldest {
            self.ghosts.unlink(oldest);
        }
    }
}

impl Policy for Arc {
    fn inserted(&mut self, slot: SlotIndex, key: ExpertKey) {
        let (class, key) = (self.numbering.class_of(slot), self.numbering.key(key));
        let list = self.welcome(class, key);
        self.lists.push_newest(list, slot.0);
        self.forget(class);
    }

    fn used(&mut self, slot: SlotIndex, _key: ExpertKey) {
        let class = self.numbering.class_of(slot);
        self.lists.unlink(slot.0);
        self.lists.push_newest(again(class), slot.0);
        self.forget(class);
    }

    fn removed(&mut self, slot: SlotIndex, key: ExpertKey) {
        let (list, _) = self.lists.unlink(slot.0);
        self.ghosts.push_newest(list, self.numbering.key(key));
        self.forget(self.numbering.class_of(slot));
    }

    fn victim(
        &mut self,
        class: usize,
        incoming: ExpertKey,
        may_go: impl Fn(SlotIndex) -> bool,
    ) -> Option<SlotIndex> {
        let (len, target) = (self.lists.len(once(class)), self.classes[class].once);
        let back = self.ghosts.list_of(self.numbering.key(incoming)) == Some(again(class));
        let first_once = len > target || (back && len == target && len > 0);
        let [first, second] = if first_once { [once, again] } else { [again, once] };
        let both = self.lists.oldest_first(first(class));
        let both = both.chain(self.lists.oldest_first(second(class)));
        both.map(SlotIndex).find(|slot| may_go(*slot))
    }
}

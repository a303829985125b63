//! Least recently used: one intrusive list over the slots of each size class, oldest first. Every change is O(1).

use std::ops::Range;

use units::{ExpertKey, SlotIndex};

use super::{Policy, slots_of};

/// The end of a list.
const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Link {
    older: u32,
    newer: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct List {
    slots: Range<u32>,
    oldest: u32,
    newest: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Lru {
    /// By slot; nothing if the slot is in no list.
    links: Vec<Option<Link>>,
    lists: Vec<List>,
}

impl Lru {
    pub(crate) fn new(classes: &[Range<u32>]) -> Self {
        let list = |slots: &Range<u32>| List { slots: slots.clone(), oldest: NONE, newest: NONE };
        Self { links: vec![None; slots_of(classes)], lists: classes.iter().map(list).collect() }
    }

    fn list_of(&mut self, slot: u32) -> &mut List {
        let mut lists = self.lists.iter_mut();
        lists.find(|list| list.slots.contains(&slot)).expect("classes cover all slots")
    }

    fn push_newest(&mut self, slot: u32) {
        let list = self.list_of(slot);
        let older = std::mem::replace(&mut list.newest, slot);
        if older == NONE {
            list.oldest = slot;
        } else {
            self.link(older).newer = slot;
        }
        self.links[slot as usize] = Some(Link { older, newer: NONE });
    }

    fn unlink(&mut self, slot: u32) {
        let Link { older, newer } =
            self.links[slot as usize].take().expect("inserted before it is used or removed");
        if older == NONE {
            self.list_of(slot).oldest = newer;
        } else {
            self.link(older).newer = newer;
        }
        if newer == NONE {
            self.list_of(slot).newest = older;
        } else {
            self.link(newer).older = older;
        }
    }

    fn link(&mut self, slot: u32) -> &mut Link {
        self.links[slot as usize].as_mut().expect("neighbours are in the list")
    }
}

impl Policy for Lru {
    fn inserted(&mut self, slot: SlotIndex, _key: ExpertKey) {
        self.push_newest(slot.0);
    }

    fn used(&mut self, slot: SlotIndex, _key: ExpertKey) {
        self.unlink(slot.0);
        self.push_newest(slot.0);
    }

    fn removed(&mut self, slot: SlotIndex, _key: ExpertKey) {
        self.unlink(slot.0);
    }

    fn victim(
        &mut self,
        class: usize,
        _incoming: ExpertKey,
        may_go: impl Fn(SlotIndex) -> bool,
    ) -> Option<SlotIndex> {
        let mut slot = self.lists[class].oldest;
        while slot != NONE && !may_go(SlotIndex(slot)) {
            slot = self.link(slot).newer;
        }
        (slot != NONE).then_some(SlotIndex(slot))
    }

    // Choosing changes nothing: a victim leaves the list when its slot loses its expert.
    fn commit(&mut self) {}

    fn undo(&mut self) {}
}

//! Least recently used: one intrusive list per class, oldest first.

use std::ops::Range;

use units::SlotIndex;

use super::Policy;

const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Link {
    older: u32,
    newer: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct List {
    class: Range<u32>,
    oldest: u32,
    newest: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Lru {
    /// Per slot; nothing if the slot is in no list.
    links: Vec<Option<Link>>,
    lists: Vec<List>,
}

impl Lru {
    pub(crate) fn new(classes: &[Range<u32>]) -> Self {
        let slots = classes.iter().map(|class| class.end).max().unwrap_or(0);
        let list = |class: &Range<u32>| List { class: class.clone(), oldest: NONE, newest: NONE };
        Self { links: vec![None; slots as usize], lists: classes.iter().map(list).collect() }
    }

    fn list(&self, slot: u32) -> usize {
        self.lists
            .iter()
            .position(|list| list.class.contains(&slot))
            .expect("every slot has a class")
    }

    fn push_newest(&mut self, slot: u32) {
        let list = self.list(slot);
        let before = std::mem::replace(&mut self.lists[list].newest, slot);
        self.links[slot as usize] = Some(Link { older: before, newer: NONE });
        match before {
            NONE => self.lists[list].oldest = slot,
            before => self.link(before).newer = slot,
        }
    }

    fn unlink(&mut self, slot: u32) {
        let Some(Link { older, newer }) = self.links[slot as usize].take() else { return };
        let list = self.list(slot);
        match older {
            NONE => self.lists[list].oldest = newer,
            older => self.link(older).newer = newer,
        }
        match newer {
            NONE => self.lists[list].newest = older,
            newer => self.link(newer).older = older,
        }
    }

    fn link(&mut self, slot: u32) -> &mut Link {
        self.links[slot as usize].as_mut().expect("neighbours are in the list")
    }
}

impl Policy for Lru {
    fn inserted(&mut self, slot: SlotIndex) {
        self.push_newest(slot.0);
    }

    fn used(&mut self, slot: SlotIndex) {
        self.unlink(slot.0);
        self.push_newest(slot.0);
    }

    fn removed(&mut self, slot: SlotIndex) {
        self.unlink(slot.0);
    }

    fn victim(
        &mut self,
        class: Range<u32>,
        may_go: &dyn Fn(SlotIndex) -> bool,
    ) -> Option<SlotIndex> {
        let list =
            self.lists.iter().find(|list| list.class == class).expect("a class of this pool");
        let mut slot = list.oldest;
        while slot != NONE && !may_go(SlotIndex(slot)) {
            slot = self.links[slot as usize].expect("the list holds linked slots").newer;
        }
        (slot != NONE).then_some(SlotIndex(slot))
    }

    // Choosing changes nothing: a victim leaves the list when its slot loses its expert.
    fn commit(&mut self) {}

    fn undo(&mut self) {}
}

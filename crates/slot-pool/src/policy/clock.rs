//! CLOCK: a hand goes round; a slot that was used since the hand last came by gets a second chance.
//!
//! Slots that may not go are passed over as they are. Source: Corbató 1968, "A Paging Experiment with the Multics
//! System".

use std::ops::Range;

use units::{ExpertKey, SlotIndex};

use super::{Policy, Shape};

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Clock {
    /// By slot: used since the hand last came by.
    referenced: Vec<bool>,
    dials: Vec<Dial>,
    /// Bits that tentative choices cleared.
    cleared: Vec<SlotIndex>,
}

/// The hand of a size class.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Dial {
    slots: Range<u32>,
    hand: u32,
    /// Where the hand was at the last commit.
    committed: u32,
}

impl Clock {
    pub(crate) fn new(shape: &Shape<'_>) -> Self {
        let dial = |slots: &Range<u32>| Dial {
            slots: slots.clone(),
            hand: slots.start,
            committed: slots.start,
        };
        Self {
            referenced: vec![false; shape.slots()],
            dials: shape.classes.iter().map(dial).collect(),
            // A bit that was cleared is not set again before the commit, so this is enough.
            cleared: Vec::with_capacity(shape.slots()),
        }
    }
}

impl Policy for Clock {
    fn inserted(&mut self, slot: SlotIndex, _key: ExpertKey) {
        self.referenced[slot.get()] = true;
    }

    fn used(&mut self, slot: SlotIndex, _key: ExpertKey) {
        self.referenced[slot.get()] = true;
    }

    fn removed(&mut self, slot: SlotIndex, _key: ExpertKey) {
        self.referenced[slot.get()] = false;
    }

    fn victim(
        &mut self,
        class: usize,
        _incoming: ExpertKey,
        may_go: impl Fn(SlotIndex) -> bool,
    ) -> Option<SlotIndex> {
        let Dial { slots, hand, .. } = &mut self.dials[class];
        let start = *hand;
        // The first round clears the bits of all candidates, so the second finds one if there is any.
        for _ in 0..2 * slots.len() {
            let slot = SlotIndex(*hand);
            *hand = if *hand + 1 == slots.end { slots.start } else { *hand + 1 };
            if !may_go(slot) {
                continue;
            }
            if !self.referenced[slot.get()] {
                return Some(slot);
            }
            self.referenced[slot.get()] = false;
            self.cleared.push(slot);
        }
        debug_assert_eq!(*hand, start, "two whole rounds");
        None
    }

    fn commit(&mut self) {
        self.cleared.clear();
        for dial in &mut self.dials {
            dial.committed = dial.hand;
        }
    }

    fn undo(&mut self) {
        for slot in self.cleared.drain(..) {
            self.referenced[slot.get()] = true;
        }
        for dial in &mut self.dials {
            dial.hand = dial.committed;
        }
    }
}

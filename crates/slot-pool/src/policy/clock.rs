//! CLOCK: a hand goes round; a slot that was used since its last visit gets a second chance.
//!
//! Source: Corbató 1968, "A Paging Experiment with the Multics System".

use std::ops::Range;

use units::SlotIndex;

use super::Policy;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Clock {
    referenced: Vec<bool>,
    /// Per class: its slots, and where the hand stands.
    hands: Vec<(Range<u32>, u32)>,
    /// Bits that tentative choices cleared, and hands as they were.
    cleared: Vec<u32>,
    moved: Vec<(usize, u32)>,
}

impl Clock {
    pub(crate) fn new(classes: &[Range<u32>]) -> Self {
        let slots = classes.iter().map(|class| class.end).max().unwrap_or(0);
        Self {
            referenced: vec![false; slots as usize],
            hands: classes.iter().map(|class| (class.clone(), class.start)).collect(),
            cleared: Vec::new(),
            moved: Vec::new(),
        }
    }
}

impl Policy for Clock {
    fn inserted(&mut self, slot: SlotIndex) {
        self.referenced[slot.get()] = true;
    }

    fn used(&mut self, slot: SlotIndex) {
        self.referenced[slot.get()] = true;
    }

    fn removed(&mut self, slot: SlotIndex) {
        self.referenced[slot.get()] = false;
    }

    fn victim(
        &mut self,
        class: Range<u32>,
        may_go: &dyn Fn(SlotIndex) -> bool,
    ) -> Option<SlotIndex> {
        let index =
            self.hands.iter().position(|(slots, _)| *slots == class).expect("a class of this pool");
        let start = self.hands[index].1;
        let mut hand = start;
        // The first round clears the bits of all candidates, so the second finds one if there is any.
        for _ in 0..2 * class.len() {
            let slot = SlotIndex(hand);
            hand = if hand + 1 == class.end { class.start } else { hand + 1 };
            if !may_go(slot) {
                continue;
            }
            if !self.referenced[slot.get()] {
                self.moved.push((index, start));
                self.hands[index].1 = hand;
                return Some(slot);
            }
            self.referenced[slot.get()] = false;
            self.cleared.push(slot.0);
        }
        None
    }

    fn commit(&mut self) {
        self.cleared.clear();
        self.moved.clear();
    }

    fn undo(&mut self) {
        for slot in self.cleared.drain(..) {
            self.referenced[slot as usize] = true;
        }
        while let Some((class, hand)) = self.moved.pop() {
            self.hands[class].1 = hand;
        }
    }
}

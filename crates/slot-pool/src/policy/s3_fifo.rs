//! S3-FIFO: a small queue that what comes once soon leaves, a main queue that goes round for what comes again, and a
//! memory of who left the small one.
//!
//! Source: Yang et al. 2023, "FIFO Queues are All You Need for Cache Eviction".

use units::{ExpertKey, SlotIndex};

use super::list::{Lists, NONE};
use super::{Numbering, Policy, Shape};

/// Tenths of a size class that the small queue has.
const SMALL: usize = 1;
/// Most uses that are counted.
const MOST_USES: u8 = 3;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct S3Fifo {
    /// Two for each size class: small, main.
    queues: Lists,
    /// By slot: uses since it came or went round.
    uses: Vec<u8>,
    numbering: Numbering,
    /// By size class: length of the small queue.
    small_len: Vec<usize>,
    /// One for each size class, of keys: those that left the small queue, as many as the class has slots.
    ghosts: Lists,
    class_len: Vec<usize>,
    /// Moves of tentative choices.
    moved: Vec<Move>,
}

/// What a slot was before a tentative choice moved it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Move {
    slot: u32,
    queue: usize,
    older: u32,
    uses: u8,
}

const fn small(class: usize) -> usize {
    2 * class
}

const fn main(class: usize) -> usize {
    2 * class + 1
}

impl S3Fifo {
    pub(crate) fn new(shape: &Shape<'_>) -> Self {
        let n_slots = shape.slots();
        let class_len: Vec<usize> = shape.classes.iter().map(ExactSizeIterator::len).collect();
        Self {
            queues: Lists::new(2 * shape.classes.len(), n_slots),
            uses: vec![0; n_slots],
            numbering: shape.numbering(),
            small_len: class_len.iter().map(|len| (len * SMALL / 10).max(1)).collect(),
            ghosts: Lists::new(shape.classes.len(), shape.keys()),
            class_len,
            // A slot leaves the small queue once and goes round as often as its uses count down.
            moved: Vec::with_capacity(n_slots * (usize::from(MOST_USES) + 1)),
        }
    }

    /// Puts a slot at the new end of the main queue; `uses` from there on.
    fn requeue(&mut self, class: usize, slot: u32, uses: u8) {
        let before = self.uses[slot as usize];
        let (queue, older) = self.queues.unlink(slot);
        self.moved.push(Move { slot, queue, older, uses: before });
        self.queues.push_newest(main(class), slot);
        self.uses[slot as usize] = uses;
    }

    /// The oldest of the small queue that was not used again; those that were move on.
    fn leaver_of_small(
        &mut self,
        class: usize,
        may_go: &impl Fn(SlotIndex) -> bool,
    ) -> Option<SlotIndex> {
        let mut slot = self.queues.oldest(small(class));
        while slot != NONE {
            let newer = self.queues.newer(slot);
            if may_go(SlotIndex(slot)) {
                if self.uses[slot as usize] == 0 {
                    return Some(SlotIndex(slot));
                }
                self.requeue(class, slot, 0);
            }
            slot = newer;
        }
        None
    }

    /// The oldest of the main queue without uses; the others go round with one less.
    fn leaver_of_main(
        &mut self,
        class: usize,
        may_go: &impl Fn(SlotIndex) -> bool,
    ) -> Option<SlotIndex> {
        for _ in 0..=MOST_USES {
            let mut slot = self.queues.oldest(main(class));
            for _ in 0..self.queues.len(main(class)) {
                let newer = self.queues.newer(slot);
                if may_go(SlotIndex(slot)) {
                    match self.uses[slot as usize] {
                        0 => return Some(SlotIndex(slot)),
                        uses => self.requeue(class, slot, uses - 1),
                    }
                }
                slot = newer;
            }
        }
        None
    }
}

impl Policy for S3Fifo {
    fn inserted(&mut self, slot: SlotIndex, key: ExpertKey) {
        let (class, key) = (self.numbering.class_of(slot), self.numbering.key(key));
        let known = self.ghosts.list_of(key).is_some();
        if known {
            self.ghosts.unlink(key);
        }
        self.uses[slot.get()] = 0;
        self.queues.push_newest(if known { main(class) } else { small(class) }, slot.0);
    }

    fn used(&mut self, slot: SlotIndex, _key: ExpertKey) {
        let uses = &mut self.uses[slot.get()];
        *uses = MOST_USES.min(*uses + 1);
    }

    fn removed(&mut self, slot: SlotIndex, key: ExpertKey) {
        let (class, key) = (self.numbering.class_of(slot), self.numbering.key(key));
        let (queue, _) = self.queues.unlink(slot.0);
        if queue != small(class) {
            return;
        }
        if self.ghosts.len(class) == self.class_len[class] {
            self.ghosts.unlink(self.ghosts.oldest(class));
        }
        self.ghosts.push_newest(class, key);
    }

    fn victim(
        &mut self,
        class: usize,
        _incoming: ExpertKey,
        may_go: impl Fn(SlotIndex) -> bool,
    ) -> Option<SlotIndex> {
        if self.queues.len(small(class)) >= self.small_len[class] {
            let slot = self.leaver_of_small(class, &may_go);
            slot.or_else(|| self.leaver_of_main(class, &may_go))
        } else {
            let slot = self.leaver_of_main(class, &may_go);
            slot.or_else(|| self.leaver_of_small(class, &may_go))
                .or_else(|| self.leaver_of_main(class, &may_go))
        }
    }

    fn commit(&mut self) {
        self.moved.clear();
    }

    fn undo(&mut self) {
        while let Some(Move { slot, queue, older, uses }) = self.moved.pop() {
            self.queues.unlink(slot);
            self.queues.insert_after(queue, older, slot);
            self.uses[slot as usize] = uses;
        }
    }
}

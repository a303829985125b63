//! Segmented LRU: what was used once is on probation, what was used again is protected from what never will be.
//!
//! Layers take turns, so an expert can be used again only after a whole round: if fewer are on probation than a round
//! reads, all of them leave before that and none is ever protected. Probation therefore has room for one round.
//!
//! Source: Karedla, Love and Wherry 1994, "Caching Strategies to Improve Disk System Performance".

use units::{ExpertKey, SlotIndex};

use super::list::Lists;
use super::{Numbering, Policy, Shape};

/// Tenths of a size class that may be protected, if the rest holds a round.
const PROTECTED: usize = 8;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Segmented {
    /// Two for each size class: on probation, protected.
    lists: Lists,
    numbering: Numbering,
    /// By size class: most slots that are protected.
    most: Vec<usize>,
}

const fn probation(class: usize) -> usize {
    2 * class
}

const fn protected(class: usize) -> usize {
    2 * class + 1
}

impl Segmented {
    pub(crate) fn new(shape: &Shape<'_>) -> Self {
        Self {
            lists: Lists::new(2 * shape.classes.len(), shape.slots()),
            numbering: shape.numbering(),
            most: shape
                .classes
                .iter()
                .enumerate()
                .map(|(class, slots)| {
                    let round = shape.layers_of(class) * shape.usual_selection;
                    (slots.len() * PROTECTED / 10).min(slots.len().saturating_sub(round))
                })
                .collect(),
        }
    }
}

impl Policy for Segmented {
    fn inserted(&mut self, slot: SlotIndex, _key: ExpertKey) {
        self.lists.push_newest(probation(self.numbering.class_of(slot)), slot.0);
    }

    fn used(&mut self, slot: SlotIndex, _key: ExpertKey) {
        let class = self.numbering.class_of(slot);
        self.lists.unlink(slot.0);
        self.lists.push_newest(protected(class), slot.0);
        if self.lists.len(protected(class)) > self.most[class] {
            let oldest = self.lists.oldest(protected(class));
            self.lists.unlink(oldest);
            self.lists.push_newest(probation(class), oldest);
        }
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
        let probation = self.lists.oldest_first(probation(class));
        let both = probation.chain(self.lists.oldest_first(protected(class)));
        both.map(SlotIndex).find(|slot| may_go(*slot))
    }
}

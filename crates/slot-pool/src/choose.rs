//! Which slot a missing expert gets, and what to say when there is none.

use units::{Epoch, ExpertIndex, ExpertKey, LayerIndex, SlotIndex};

use crate::policy::Policy;
use crate::pool::{Slot, SlotPool};
use crate::spec::PoolError;

/// A pool is small if it holds fewer than this many selections of every layer.
const SMALL: usize = 2;

impl<P: Policy> SlotPool<P> {
    /// Whether the layer's own experts go first.
    ///
    /// Layers take turns, so in a pool that holds hardly more than one selection of each, the expert that was used
    /// least recently is the one that is needed soonest, and any recency order evicts what the next layers are about
    /// to use. The experts of the layer at hand are needed again only after a whole round.
    pub(crate) fn is_small(&self, layer: LayerIndex, selected: usize) -> bool {
        let class = self.class(layer);
        class.slots.len() < SMALL * class.layers * selected
    }

    /// A free slot for demanded `key`, else a victim. `own_first` is cleared once the layer has none left to give.
    pub(crate) fn find_slot(
        &mut self,
        key: ExpertKey,
        completed: Epoch,
        own_first: &mut bool,
    ) -> Option<SlotIndex> {
        if let Some(slot) = self.class_mut(key.layer).free.pop() {
            return Some(slot);
        }
        // Its pinned hits are among the resident ones, so a search may still be in vain, but only once.
        if *own_first && self.resident[key.layer.get()] > 0 {
            let own =
                |key_there: ExpertKey, shielded: bool| !shielded && key_there.layer == key.layer;
            if let Some(slot) = self.find_victim(key, completed, own) {
                return Some(slot);
            }
            *own_first = false;
        }
        self.find_victim(key, completed, |_, shielded| !shielded)
            // A forecast is a hint: what is needed now outranks it.
            .or_else(|| self.find_victim(key, completed, |_, _| true))
    }

    /// A slot of the class of `key` whose expert nobody uses and which `may_go(key there, whether shielded)`.
    pub(crate) fn find_victim(
        &mut self,
        key: ExpertKey,
        completed: Epoch,
        may_go: impl Fn(ExpertKey, bool) -> bool,
    ) -> Option<SlotIndex> {
        let class = self.class_of_layer[key.layer.get()] as usize;
        let (slots, shields, n_experts) = (&self.slots, &self.shields, self.n_experts as usize);
        let candidate = |slot: SlotIndex| match slots[slot.get()] {
            Slot::Ready { stay, pins: 0 } if stay.used_until <= completed => {
                let at = stay.key.layer.get() * n_experts + stay.key.expert.get();
                may_go(stay.key, shields.contains(at))
            }
            _ => false,
        };
        self.policy.victim(class, key, candidate)
    }

    /// Nothing of a selection can be served. What would help?
    pub(crate) fn why_nothing(
        &self,
        layer: LayerIndex,
        selection: &[ExpertIndex],
        completed: Epoch,
    ) -> PoolError {
        let class = self.class(layer);
        let in_class = || class.slots.clone().map(|slot| self.slots[slot as usize]);
        let until = in_class().filter_map(|slot| match slot {
            Slot::Ready { stay, pins: 0 } if stay.used_until > completed => Some(stay.used_until),
            _ => None,
        });
        let key = |expert: &ExpertIndex| ExpertKey { layer, expert: *expert };
        if selection.iter().all(|expert| self.index[self.at(key(expert))].is_some()) {
            return PoolError::InFlight { key: key(&selection[0]) };
        }
        until.min().map_or_else(
            || PoolError::TooSmall {
                layer,
                slots: class.slots.len() as u32,
                reading: in_class().filter(|s| matches!(s, Slot::Reading { .. })).count() as u32,
            },
            |until| PoolError::Busy { layer, until },
        )
    }
}

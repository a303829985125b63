//! Which slot a missing expert gets, and what to say when there is none.

use units::{Epoch, ExpertIndex, ExpertKey, LayerIndex, SlotIndex};

use crate::policy::Policy;
use crate::pool::{Slot, SlotPool};
use crate::spec::PoolError;

/// A pool is small if it holds fewer than this many selections of every layer.
const SMALL: usize = 2;

/// How far a transaction's search for victims has come.
pub(crate) struct VictimSearch {
    /// Layers that have none left to give, counted backwards from the one that asks.
    layers_back: usize,
}

impl VictimSearch {
    /// All layers, beginning with the one that asks.
    pub(crate) const FROM_THE_LAYER: Self = Self { layers_back: 0 };
}

impl<P: Policy> SlotPool<P> {
    /// Where the search for victims begins: at the layer itself in a small pool, else past all layers.
    ///
    /// Layers take turns, so in a pool that holds hardly more than one selection of each, what was used least
    /// recently is needed soonest: any recency order evicts what the next layers are about to use. Known for sure is
    /// whose turn is furthest away: the layer at hand, then the one before it, and so on round the clock. Below one
    /// selection a layer this is the difference between some hits and none.
    pub(crate) fn search(&self, layer: LayerIndex, selected: usize) -> VictimSearch {
        let class = self.class(layer);
        let small = class.slots.len() < SMALL * class.layers * selected;
        VictimSearch { layers_back: if small { 0 } else { self.resident.len() } }
    }

    /// A free slot for demanded `key`, else a victim.
    ///
    /// `search` is that of the transaction: what it has exhausted stays so, because nothing becomes a candidate
    /// during a reservation.
    pub(crate) fn find_slot(
        &mut self,
        key: ExpertKey,
        completed: Epoch,
        search: &mut VictimSearch,
    ) -> Option<SlotIndex> {
        if let Some(slot) = self.class_mut(key.layer).free.pop_back() {
            return Some(slot);
        }
        self.find_by_turn(key, completed, search, 0)
            .or_else(|| self.find_victim(key, completed, |_, shielded| !shielded))
            // A forecast is a hint: what is needed now outranks it.
            .or_else(|| self.find_victim(key, completed, |_, _| true))
    }

    /// An unshielded victim of the layer whose turn is furthest away among those that hold more than `keep`, as far as
    /// `search` has layers left.
    pub(crate) fn find_by_turn(
        &mut self,
        key: ExpertKey,
        completed: Epoch,
        search: &mut VictimSearch,
        keep: u32,
    ) -> Option<SlotIndex> {
        let n_layers = self.resident.len();
        while search.layers_back < n_layers {
            let layer = (key.layer.get() + n_layers - search.layers_back) % n_layers;
            let same_class = self.class_of_layer[layer] == self.class_of_layer[key.layer.get()];
            if same_class && self.resident[layer] > keep {
                let of_layer =
                    |there: ExpertKey, shielded: bool| !shielded && there.layer.get() == layer;
                if let Some(slot) = self.find_victim(key, completed, of_layer) {
                    return Some(slot);
                }
            }
            search.layers_back += 1;
        }
        None
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

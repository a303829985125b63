//! Where every published expert is.

use quant::slot::ExpertMatrices;
use units::{ExpertIndex, ExpertKey, LayerIndex, SlotIndex};

/// A published expert.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Resident {
    pub(crate) slot: SlotIndex,
    pub(crate) matrices: ExpertMatrices,
    /// Operations that used it.
    pub(crate) uses: u8,
    /// Whether its rows are interleaved, as far as the kernels want that.
    pub(crate) interleaved: bool,
}

impl Resident {
    /// As it was read.
    pub(crate) const fn new(slot: SlotIndex, matrices: ExpertMatrices) -> Self {
        Self { slot, matrices, uses: 0, interleaved: false }
    }
}

/// `[layer][expert]`, as far as anything was published.
#[derive(Debug, Default)]
pub(crate) struct Residency(Vec<Vec<Option<Resident>>>);

impl Residency {
    /// Whether nothing was ever published.
    pub(crate) const fn is_untouched(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn get(&self, layer: LayerIndex, expert: ExpertIndex) -> Option<Resident> {
        *self.0.get(layer.get())?.get(expert.get())?
    }

    /// # Panics
    /// If the expert is not published.
    pub(crate) fn get_mut(&mut self, layer: LayerIndex, expert: ExpertIndex) -> &mut Resident {
        let resident = &mut self.0[layer.get()][expert.get()];
        resident.as_mut().expect("the expert is published")
    }

    pub(crate) fn publish(&mut self, key: ExpertKey, resident: Resident) {
        let (layer, expert) = (key.layer.get(), key.expert.get());
        if self.0.len() <= layer {
            self.0.resize_with(layer + 1, Vec::new);
        }
        let experts = &mut self.0[layer];
        if experts.len() <= expert {
            experts.resize(expert + 1, None);
        }
        experts[expert] = Some(resident);
    }

    /// # Panics
    /// If the expert is not published.
    pub(crate) fn unpublish(&mut self, key: ExpertKey) {
        let place =
            self.0.get_mut(key.layer.get()).and_then(|layer| layer.get_mut(key.expert.get()));
        let resident = place.and_then(Option::take);
        assert!(resident.is_some(), "{key} is not published");
    }
}

#[cfg(test)]
mod tests {
    use quant::{BlockType, SlotMatrix};

    use super::*;

    #[test]
    fn an_expert_is_found_from_publish_to_unpublish() {
        let matrix = SlotMatrix { place: 0, block_type: BlockType::F32, n_in: 1, n_out: 1 };
        let matrices = ExpertMatrices { gate: matrix, up: matrix, down: matrix };
        let mut residency = Residency::default();
        let found = |r: &Residency, layer, expert| {
            r.get(LayerIndex(layer), ExpertIndex(expert)).map(|resident| resident.slot.0)
        };
        assert_eq!(found(&residency, 0, 0), None);
        residency.publish(ExpertKey::new(2, 3), Resident::new(SlotIndex(7), matrices));
        residency.publish(ExpertKey::new(2, 1), Resident::new(SlotIndex(4), matrices));
        assert_eq!([1, 2, 3, 4].map(|e| found(&residency, 2, e)), [Some(4), None, Some(7), None]);
        residency.unpublish(ExpertKey::new(2, 3));
        assert_eq!((found(&residency, 2, 3), found(&residency, 2, 1)), (None, Some(4)));
    }

    #[test]
    #[should_panic(expected = "layer 1 expert 0 is not published")]
    fn unpublishing_what_was_not_published_is_a_bug() {
        Residency::default().unpublish(ExpertKey::new(1, 0));
    }
}

//! What a pool is made for, and why it can say no.

use std::ops::Range;

use units::{Epoch, ExpertKey, LayerIndex};

/// Slots of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClassSpec {
    /// How many.
    pub slots: u32,
    /// Bytes of one.
    pub slot_bytes: u64,
}

/// What a pool is made for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolSpec {
    /// Layers with experts.
    pub n_layers: u32,
    /// Experts of a layer.
    pub n_experts: u32,
    /// Experts that a layer needs for a pass of the usual kind: those of one token, or more where several tokens are
    /// usual. A policy may measure by it; nothing else does.
    pub usual_selection: u32,
    /// Size classes; slots are numbered class after class.
    pub classes: Vec<ClassSpec>,
    /// The class of each layer's records, `[n_layers]`.
    pub class_of_layer: Vec<u32>,
}

/// Why a request cannot be served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    /// Every candidate is in use by work that has not completed.
    #[error("every slot for layer {layer} is in use until epoch {}", until.0)]
    Busy {
        /// The layer that asked.
        layer: LayerIndex,
        /// The first epoch at which a slot becomes free.
        until: Epoch,
    },
    /// Every slot is leased or being read: no epoch frees one, only the end of a transaction or of a forecast.
    #[error(
        "all {slots} slots for layer {layer} are taken, {reading} of them by reads in flight: \
         end a transaction or give the pool more memory"
    )]
    TooSmall {
        /// The layer that asked.
        layer: LayerIndex,
        /// Slots of its class.
        slots: u32,
        /// Of those, being read.
        reading: u32,
    },
    /// All that is left of the selection is being read by other transactions.
    #[error("{key} is being read by another transaction: end that one first")]
    InFlight {
        /// The first such expert of the selection.
        key: ExpertKey,
    },
    /// The specification contradicts itself.
    #[error("{what}: found {found}, needed {needed}")]
    Spec {
        /// The thing.
        what: &'static str,
        /// What was found.
        found: u64,
        /// What was needed.
        needed: u64,
    },
}

impl PoolSpec {
    /// The slots of each class; the specification is sound if there is an answer.
    pub(crate) fn class_slots(&self) -> Result<Vec<Range<u32>>, PoolError> {
        let error = |what, found, needed| Err(PoolError::Spec { what, found, needed });
        let layers = self.class_of_layer.len() as u64;
        if layers != u64::from(self.n_layers) {
            return error("layers with a size class", layers, u64::from(self.n_layers));
        }
        let keys = u64::from(self.n_layers) * u64::from(self.n_experts);
        if keys > u64::from(u32::MAX) {
            return error("experts of the whole model", keys, u64::from(u32::MAX));
        }
        let known = self.classes.len();
        if let Some(class) = self.class_of_layer.iter().find(|class| **class as usize >= known) {
            return error("size classes", known as u64, u64::from(*class) + 1);
        }
        let mut ranges = Vec::with_capacity(known);
        let mut start = 0_u32;
        for class in &self.classes {
            if class.slots == 0 {
                return error("slots of a size class", 0, 1);
            }
            let Some(end) = start.checked_add(class.slots) else {
                let slots = self.classes.iter().map(|class| u64::from(class.slots)).sum();
                return error("slots of all size classes", slots, u64::from(u32::MAX));
            };
            ranges.push(start..end);
            start = end;
        }
        Ok(ranges)
    }
}

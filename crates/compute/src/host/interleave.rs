//! When resident rows are interleaved: weights at their first product, experts when they have proved to stay.
#![allow(unsafe_code, reason = "published slots are rewritten between operations")]

use quant::SlotMatrix;
use units::LayerIndex;

use super::residency::Resident;
use super::{HostBackend, Weight};
use crate::backend::{RouterHandle, WeightId};
use crate::interleave::{ROWS, row_of};
use crate::kernels::Kernels;

/// Operations that use an expert before its rows are interleaved. That takes as long as it saves in about as many, and
/// most experts of a small pool leave sooner.
const USES: u8 = 4;

impl<K: Kernels> HostBackend<K> {
    /// Before the first product with a weight.
    pub(super) fn interleave_weight(&mut self, weight: WeightId) {
        let Weight { shape, bytes, region, interleaved } = &mut self.weights[weight.0 as usize];
        if *interleaved || !self.kernels.interleaves(shape.block_type, shape.n_out) {
            return;
        }
        let rows = region.bytes_mut(*bytes);
        self.kernels.interleave(shape.block_type, rows.len() / shape.n_out, rows);
        *interleaved = true;
    }

    /// Counts a use of every expert of the pairs at hand, and interleaves those that have had enough.
    pub(super) fn interleave_experts(&mut self, layer: LayerIndex, router: RouterHandle) {
        let routes = &self.routers[router.0 as usize].routes;
        let expert = |output: usize| routes[output].expert;
        for pairs in self.pairs.chunk_by(|a, b| expert(a.output) == expert(b.output)) {
            let resident = self.residency.get_mut(layer, expert(pairs[0].output));
            resident.uses = resident.uses.saturating_add(1);
            if resident.interleaved || resident.uses < USES {
                continue;
            }
            resident.interleaved = true;
            // SAFETY: the expert is published, and stays so during this operation, which is the only one that runs.
            let slot = unsafe { self.slots.published_mut(resident.slot.get()) };
            for matrix in resident.matrices.all() {
                if self.kernels.interleaves(matrix.block_type, matrix.n_out as usize) {
                    let rows = &mut slot[matrix.range()];
                    self.kernels.interleave(matrix.block_type, matrix.row_bytes(), rows);
                }
            }
        }
    }

    /// The bytes of a published expert's slot in the order in which they were read.
    pub(super) fn as_read(&self, resident: &Resident) -> Vec<u8> {
        // SAFETY: the expert is published, and nothing runs meanwhile.
        let slot = unsafe { self.slots.published(resident.slot.get()) };
        let mut bytes = slot.to_vec();
        let mixed = |matrix: &SlotMatrix| {
            let n_out = matrix.n_out as usize;
            resident.interleaved && self.kernels.interleaves(matrix.block_type, n_out)
        };
        for matrix in resident.matrices.all().into_iter().filter(mixed) {
            let (row, range) = (matrix.row_bytes(), matrix.range());
            let groups = slot[range.clone()].chunks_exact(ROWS * row);
            for (group, out) in groups.zip(bytes[range].chunks_exact_mut(ROWS * row)) {
                for (r, out) in out.chunks_exact_mut(row).enumerate() {
                    row_of(matrix.block_type, group, r, out);
                }
            }
        }
        bytes
    }
}

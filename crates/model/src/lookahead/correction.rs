//! What is added to the tap's logits, where that was fitted to what routers chose: `up · (down · x) + bias`, of low rank.
//!
//! The tap misses the output of one layer's experts and the attention of the next. A part of what they change follows
//! from the state that the tap sees; a correction is that part, as a linear map of few dimensions.

use compute::backend::{Backend, BufferId, ComputeError, MatrixShape, Op, WeightId};
use quant::BlockType;

use crate::network::Geometry;

/// The correction of one layer's tap. Matrices are IEEE halves, row by row, little-endian.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerCorrection {
    /// Inner width, at least 1.
    pub rank: usize,
    /// `[rank, hidden]`.
    pub down: Vec<u8>,
    /// `[n_experts, rank]`.
    pub up: Vec<u8>,
    /// `[n_experts]`.
    pub bias: Vec<f32>,
}

/// Corrections by layer that is guessed; none where none has helped, and never of the first layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Correction {
    /// One for each layer of the model.
    pub layers: Vec<Option<LayerCorrection>>,
}

/// A value of a matrix takes so many bytes.
const HALF_BYTES: usize = 2;

impl LayerCorrection {
    /// Bytes of the two matrices for this rank.
    pub const fn matrix_bytes(rank: usize, hidden: usize, n_experts: usize) -> [usize; 2] {
        [HALF_BYTES * rank * hidden, HALF_BYTES * n_experts * rank]
    }
}

/// A correction where the backend computes.
struct Placed {
    down: WeightId,
    up: WeightId,
    bias: BufferId,
    /// `[1, rank]`; layers of the same rank share it.
    low: BufferId,
}

/// Corrections by layer, and where they compute.
pub(super) struct Corrections {
    layers: Vec<Option<Placed>>,
    /// `[1, n_experts]`.
    sum: BufferId,
}

/// Memory that corrections take.
pub(super) fn bytes(correction: &Correction, geometry: &Geometry) -> u64 {
    let pages = |bytes: usize| bytes.next_multiple_of(4096) as u64;
    let (hidden, n_experts) = (geometry.hidden, geometry.router.n_experts);
    let layer = |layer: &LayerCorrection| {
        let [down, up] = LayerCorrection::matrix_bytes(layer.rank, hidden, n_experts);
        pages(down) + pages(up) + pages(4 * n_experts) + pages(4 * layer.rank)
    };
    let layers: u64 = correction.layers.iter().flatten().map(layer).sum();
    // The sum, and a bias on its way to the backend.
    layers
        + 3 * pages(4 * n_experts)
        + (size_of::<Option<Placed>>() * correction.layers.len()) as u64
}

impl Corrections {
    /// # Panics
    /// If the correction is of another shape of model.
    pub(super) fn place(
        backend: &mut dyn Backend,
        geometry: &Geometry,
        correction: &Correction,
    ) -> Result<Self, ComputeError> {
        let (hidden, n_experts) = (geometry.hidden, geometry.router.n_experts);
        let sum = backend.alloc_buffer(1, n_experts)?;
        let mut lows: Vec<(usize, BufferId)> = Vec::new();
        let mut layers = Vec::with_capacity(correction.layers.len());
        for layer in &correction.layers {
            let Some(LayerCorrection { rank, down, up, bias }) = layer else {
                layers.push(None);
                continue;
            };
            let low = if let Some((_, low)) = lows.iter().find(|(known, _)| known == rank) {
                *low
            } else {
                let low = backend.alloc_buffer(1, *rank)?;
                lows.push((*rank, low));
                low
            };
            let placed = Placed {
                down: matrix(backend, (*rank, hidden), down)?,
                up: matrix(backend, (n_experts, *rank), up)?,
                bias: backend.alloc_buffer(1, n_experts)?,
                low,
            };
            backend.upload(placed.bias, 0, bias);
            backend.submit();
            layers.push(Some(placed));
        }
        Ok(Self { layers, sum })
    }

    /// Records the correction of what was tapped for a layer: `x` is the tap's input, `logits` its output.
    pub(super) fn record(
        &self,
        backend: &mut dyn Backend,
        layer: usize,
        x: BufferId,
        logits: BufferId,
    ) {
        let Some(Some(Placed { down, up, bias, low })) = self.layers.get(layer) else { return };
        let (low, sum) = (*low, self.sum);
        backend.record(Op::MatMul { weight: *down, x, out: low, rows: 0..1 });
        backend.record(Op::MatMul { weight: *up, x: low, out: sum, rows: 0..1 });
        backend.record(Op::Add { x: sum, to: logits });
        backend.record(Op::Add { x: *bias, to: logits });
    }
}

fn matrix(
    backend: &mut dyn Backend,
    (n_out, n_in): (usize, usize),
    halves: &[u8],
) -> Result<WeightId, ComputeError> {
    assert_eq!(halves.len(), HALF_BYTES * n_out * n_in, "a correction of this model");
    let weight = backend.alloc_weight(MatrixShape { n_out, n_in, block_type: BlockType::F16 })?;
    crate::memory::fill_weight(backend, weight, 0, halves);
    Ok(weight)
}

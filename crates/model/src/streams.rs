//! What blocks take from the residual and give back to it.
//!
//! With one stream it is a norm, and a sum. With several (hyper-connections), every stream is normed, weights that
//! depend on all of them mix them into one input, and other such weights inject the block's output into each stream.

use std::ops::Range;

use compute::backend::{Backend, BufferId, ComputeError, Op};

use crate::layer::{self, Pass};
use crate::load::{InputWeights, StreamWeights};
use crate::network::Geometry;

/// Streams of a model.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) count: usize,
    /// Inner width of the mixing weights.
    pub(crate) rank: usize,
}

#[derive(Clone, Copy)]
pub(crate) struct Buffers {
    /// Normed streams, `[streams·hidden]`; free between inputs.
    pub(crate) normed: BufferId,
    /// Mixing weights, `[streams·hidden]`; free between inputs.
    pub(crate) mix: BufferId,
    /// `[rank]`.
    low: BufferId,
    /// Injection weights of the block that runs, `[streams]`.
    logits: BufferId,
}

impl Shape {
    /// Widths of [`Buffers`].
    pub(crate) const fn widths(&self, hidden: usize) -> [usize; 4] {
        [self.count * hidden, self.count * hidden, self.rank, self.count]
    }
}

impl Buffers {
    pub(crate) fn alloc(
        backend: &mut dyn Backend,
        rows: usize,
        shape: Shape,
        hidden: usize,
    ) -> Result<Self, ComputeError> {
        let [normed, mix, low, logits] = shape.widths(hidden);
        Ok(Self {
            normed: backend.alloc_buffer(rows, normed)?,
            mix: backend.alloc_buffer(rows, mix)?,
            low: backend.alloc_buffer(rows, low)?,
            logits: backend.alloc_buffer(rows, logits)?,
        })
    }
}

/// The input of a block, or of the head, from `rows` of the residual into `x` from row 0.
pub(crate) fn record_input(
    backend: &mut dyn Backend,
    geometry: &Geometry,
    buffers: &layer::Buffers,
    weights: &InputWeights,
    rows: Range<usize>,
) {
    let (h, out, eps) = (buffers.h, buffers.x, geometry.rms_eps);
    let weights = match weights {
        InputWeights::Norm(weight) => {
            return backend.record(Op::RmsNorm { x: h, weight: *weight, eps, out, rows });
        }
        InputWeights::Streams(weights) => weights,
    };
    let groups = geometry.streams.expect("the model has several streams").count;
    let Buffers { normed: n, mix, low, .. } =
        buffers.streams.expect("the model has several streams");
    let front = 0..rows.len();
    backend.record(Op::GroupNorm { x: h, weight: weights.norm, groups, eps, out: n, rows });
    let mat_mul = |weight, x, out| Op::MatMul { weight, x, out, rows: front.clone() };
    backend.record(mat_mul(weights.down, n, low));
    let scale = 1.0 / groups as f32;
    backend.record(Op::ScaledSilu { x: low, scale, rows: front.clone() });
    backend.record(mat_mul(weights.up, low, mix));
    backend.record(Op::StreamMix { mix, n, out, rows: front });
}

/// How much of the block's output each stream will get, while the normed streams are at hand.
pub(crate) fn record_logits(pass: &mut Pass<'_>, weights: &StreamWeights) {
    let buffers = pass.buffers.streams.expect("the model has several streams");
    let inject = weights.inject.expect("blocks give their output back");
    pass.mat_mul(inject, buffers.normed, buffers.logits);
}

/// The block's output `y` into all streams.
pub(crate) fn inject(pass: &mut Pass<'_>) {
    let logits = pass.buffers.streams.expect("the model has several streams").logits;
    pass.backend.record(Op::Inject { logits, y: pass.buffers.y, to: pass.buffers.h });
}

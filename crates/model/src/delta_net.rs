//! Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464): a short convolution, then a recurrent state per value head.

use compute::backend::{Backend, BufferId, ComputeError, ConvState, Gate, Op, RecurrentShape};

use crate::layer::Pass;
use crate::load::DeltaNetWeights;

#[derive(Clone, Copy)]
pub(crate) struct Buffers {
    qkv: BufferId,
    conv: BufferId,
    z: BufferId,
    ba: BufferId,
    mixed: BufferId,
}

/// Widths of `qkv`, its convolution, `z`, `[b | a]` and the mixed heads.
pub(crate) const fn widths(shape: &RecurrentShape) -> [usize; 5] {
    let values = shape.value_heads * shape.value_dim;
    [shape.conv_channels(), shape.conv_channels(), values, 2 * shape.value_heads, values]
}

impl Buffers {
    pub(crate) fn alloc(
        backend: &mut dyn Backend,
        rows: usize,
        shape: &RecurrentShape,
    ) -> Result<Self, ComputeError> {
        let [qkv, conv, z, ba, mixed] = widths(shape);
        Ok(Self {
            qkv: backend.alloc_buffer(rows, qkv)?,
            conv: backend.alloc_buffer(rows, conv)?,
            z: backend.alloc_buffer(rows, z)?,
            ba: backend.alloc_buffer(rows, ba)?,
            mixed: backend.alloc_buffer(rows, mixed)?,
        })
    }

    /// The same with other places for what the recurrent updates take.
    pub(crate) const fn with(self, [qkv, ba]: [BufferId; 2]) -> Self {
        Self { qkv, ba, ..self }
    }
}

/// `y = Wo · delta_rule(conv(qkv), z, b, a)` of the normalised input; `layer` counts recurrent layers only.
pub(crate) fn record(pass: &mut Pass<'_>, layer: usize, weights: &DeltaNetWeights) {
    let buffers = pass.buffers.delta_net.as_ref().expect("the model has DeltaNet layers");
    let buffers = match pass.verify {
        Some(inputs) => buffers.with(inputs.delta_net(layer)),
        None => *buffers,
    };
    let (x, y) = (pass.buffers.x, pass.buffers.y);
    pass.mat_mul(weights.qkv, x, buffers.qkv);
    pass.mat_mul(weights.gate, x, buffers.z);
    pass.mat_mul(weights.ba, x, buffers.ba);
    record_update(pass.backend, &buffers, layer, weights, pass.geometry.gate);
    pass.mat_mul(weights.output, buffers.mixed, y);
}

/// What changes the recurrent state of a layer, and the mixed heads that it gives.
pub(crate) fn record_update(
    backend: &mut dyn Backend,
    buffers: &Buffers,
    layer: usize,
    weights: &DeltaNetWeights,
    gate: Gate,
) {
    let Buffers { qkv, conv, z, ba, mixed } = *buffers;
    let (state, weight) = (ConvState::Recurrent(layer), weights.conv);
    backend.record(Op::ShortConv { state, x: qkv, weight, out: conv });
    let (params, out) = (weights.params, mixed);
    backend.record(Op::DeltaRule { layer, conv, z, ba, params, gate, out });
}

//! Grouped causal attention, with (Qwen3-Next, Qwen3.5) or without (Qwen3) an output gate.
//!
//! A gated query row is `[head 0 query | head 0 gate | head 1 query | …]`: the gate sits between the heads, so a
//! head's stride is twice its width.

use compute::backend::{Backend, BufferId, ComputeError, Heads, Op};

use crate::layer::Pass;
use crate::load::AttentionWeights;
use crate::network::Geometry;

#[derive(Clone, Copy)]
pub(crate) struct Buffers {
    q: BufferId,
    k: BufferId,
    v: BufferId,
    mixed: BufferId,
}

/// Head layouts of one model.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) query: Heads,
    pub(crate) key: Heads,
    pub(crate) gated: bool,
}

impl Shape {
    pub(crate) fn of(config: &checkpoint::ModelConfig) -> Self {
        let dim = config.head_dim as usize;
        let stride = if config.gated_attention { 2 * dim } else { dim };
        Self {
            query: Heads { count: config.heads as usize, dim, stride },
            key: Heads { count: config.kv_heads as usize, dim, stride: dim },
            gated: config.gated_attention,
        }
    }

    /// Widths of `q`, `k`, `v` and the mixed heads.
    pub(crate) const fn widths(&self) -> [usize; 4] {
        let kv = self.key.count * self.key.dim;
        [self.query.count * self.query.stride, kv, kv, self.query.count * self.query.dim]
    }
}

impl Buffers {
    pub(crate) fn alloc(
        backend: &mut dyn Backend,
        rows: usize,
        geometry: &Geometry,
    ) -> Result<Self, ComputeError> {
        let [q, k, v, mixed] = geometry.attention.widths();
        Ok(Self {
            q: backend.alloc_buffer(rows, q)?,
            k: backend.alloc_buffer(rows, k)?,
            v: backend.alloc_buffer(rows, v)?,
            mixed: backend.alloc_buffer(rows, mixed)?,
        })
    }
}

/// `y = Wo · (softmax(q·k) v ∘ sigmoid(gate))` of the normalised input; `layer` counts attention layers only.
pub(crate) fn record(pass: &mut Pass<'_>, layer: usize, weights: &AttentionWeights) {
    let buffers = pass.buffers.attention.as_ref().expect("the model has attention layers");
    let (Buffers { q, k, v, mixed }, x, y) = (*buffers, pass.buffers.x, pass.buffers.y);
    let Shape { query, key, gated } = pass.geometry.attention;
    let (eps, rope) = (pass.geometry.rms_eps, pass.rope);
    pass.mat_mul(weights.q, x, q);
    pass.mat_mul(weights.k, x, k);
    pass.mat_mul(weights.v, x, v);
    pass.backend.record(Op::HeadNormRope { x: q, heads: query, weight: weights.q_norm, eps, rope });
    pass.backend.record(Op::HeadNormRope { x: k, heads: key, weight: weights.k_norm, eps, rope });
    pass.backend.record(Op::KvAppend { layer, k, v });
    pass.backend.record(Op::Attend { layer, q, heads: query, gated, out: mixed });
    pass.mat_mul(weights.output, mixed, y);
}

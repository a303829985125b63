//! Grouped causal attention, with (Qwen3-Next, Qwen3.5) or without (Qwen3) an output gate.
//!
//! A gated query row is `[head 0 query | head 0 gate | head 1 query | …]`: the gate sits between the heads, so a
//! head's stride is twice its width.
//!
//! Selected attention (Qwen3.8-Flash-Next) is the same, restricted to tokens that an indexer chooses: small queries
//! against one small key for every few positions.

use compute::backend::{Backend, BufferId, ComputeError, Heads, IndexShape, Op, Selector};

use crate::layer::Pass;
use crate::load::{AttentionWeights, IndexerWeights};
use crate::network::Geometry;

#[derive(Clone, Copy)]
pub(crate) struct Buffers {
    q: BufferId,
    k: BufferId,
    v: BufferId,
    mixed: BufferId,
    index: Option<IndexBuffers>,
}

#[derive(Clone, Copy)]
struct IndexBuffers {
    q: BufferId,
    k: BufferId,
}

/// Head layouts of one model.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) query: Heads,
    pub(crate) key: Heads,
    pub(crate) gated: bool,
    pub(crate) index: Option<Index>,
}

/// What chooses the tokens that are seen.
#[derive(Clone, Copy)]
pub(crate) struct Index {
    pub(crate) query: Heads,
    /// Positions that share a key.
    pub(crate) ratio: usize,
    /// Complete blocks of so many positions that a query sees at most.
    pub(crate) blocks: usize,
}

impl Index {
    /// Widths of the queries and of the key.
    pub(crate) const fn widths(&self) -> [usize; 2] {
        [self.query.count * self.query.dim, self.query.dim]
    }

    /// What a sequence remembers for `layers` layers.
    pub(crate) const fn cache(&self, layers: usize) -> IndexShape {
        IndexShape { layers, dim: self.query.dim, ratio: self.ratio }
    }
}

impl Shape {
    pub(crate) fn of(config: &checkpoint::ModelConfig) -> Self {
        let index = config.indexer.map(|shape| {
            let dim = shape.dim as usize;
            Index {
                query: Heads { count: shape.heads as usize, dim, stride: dim },
                ratio: shape.ratio as usize,
                blocks: shape.blocks() as usize,
            }
        });
        let dim = config.head_dim as usize;
        let stride = if config.gated_attention { 2 * dim } else { dim };
        Self {
            query: Heads { count: config.heads as usize, dim, stride },
            key: Heads { count: config.kv_heads as usize, dim, stride: dim },
            gated: config.gated_attention,
            index,
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
        let index = match geometry.attention.index.map(|index| index.widths()) {
            Some([q, k]) => Some(IndexBuffers {
                q: backend.alloc_buffer(rows, q)?,
                k: backend.alloc_buffer(rows, k)?,
            }),
            None => None,
        };
        Ok(Self {
            index,
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
    let (Buffers { q, k, v, mixed, index }, x, y) = (*buffers, pass.buffers.x, pass.buffers.y);
    let Shape { query, key, gated, index: shape } = pass.geometry.attention;
    let (eps, rope) = (pass.geometry.rms_eps, pass.rope);
    pass.mat_mul(weights.q, x, q);
    pass.mat_mul(weights.k, x, k);
    pass.mat_mul(weights.v, x, v);
    pass.backend.record(Op::HeadNormRope { x: q, heads: query, weight: weights.q_norm, eps, rope });
    pass.backend.record(Op::HeadNormRope { x: k, heads: key, weight: weights.k_norm, eps, rope });
    pass.backend.record(Op::KvAppend { layer, k, v });
    let (heads, out) = (query, mixed);
    match (shape, index, &weights.indexer) {
        (Some(shape), Some(buffers), Some(weights)) => {
            let selector = select(pass, layer, shape, buffers, weights);
            pass.backend.record(Op::AttendSelected { layer, q, heads, gated, selector, out });
        }
        _ => pass.backend.record(Op::Attend { layer, q, heads, gated, out }),
    }
    pass.mat_mul(weights.output, mixed, y);
}

/// Queries and keys of the indexer, in the attention's own layer of the index.
fn select(
    pass: &mut Pass<'_>,
    layer: usize,
    shape: Index,
    buffers: IndexBuffers,
    weights: &IndexerWeights,
) -> Selector {
    let IndexBuffers { q, k } = buffers;
    let (x, eps, rope) = (pass.buffers.x, pass.geometry.rms_eps, pass.rope);
    pass.mat_mul(weights.q, x, q);
    pass.mat_mul(weights.k, x, k);
    let heads = shape.query;
    pass.backend.record(Op::HeadNormRope { x: q, heads, weight: weights.q_norm, eps, rope });
    pass.backend.record(Op::IndexAppend { layer, k, k_norm: weights.k_norm, eps, rope });
    Selector { layer, q, heads, blocks: shape.blocks }
}

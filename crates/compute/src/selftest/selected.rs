//! Attention to the best blocks.

use super::{Bench, Outcome, rows_of};
use crate::backend::{Backend, Heads, IndexShape, Op, Role, RopeSpec, Selector, SequenceShape};

/// A text in passes of `n_rows`; from its 29th position on rows see a part of it.
pub(super) fn attention(backend: &mut dyn Backend, n_rows: usize) -> Outcome {
    let (dim, count, kv_heads, context) = (32, 4, 2, 160_u32);
    let index = IndexShape { layers: 1, dim: 48, ratio: 4 };
    let mut bench = Bench { backend, seed: 700 };
    let sequence = bench.backend.open_sequence(SequenceShape {
        context_tokens: context as usize,
        kv_layers: 1,
        kv_heads,
        head_dim: dim,
        recurrent: None,
        extra_conv: None,
        index: Some(index),
    })?;
    let heads = Heads { count, dim, stride: 2 * dim };
    let index_heads = Heads { count: 4, dim: index.dim, stride: index.dim };
    let k_norm = bench.vector(index.dim, 0.3, 1.0)?;
    let rope = bench.backend.alloc_rope(RopeSpec { rotary_dim: 16, theta: 1e6, yarn: None });
    let widths = [2 * count * dim, kv_heads * dim, kv_heads * dim, 4 * index.dim, index.dim];
    let mut buffers = Vec::new();
    for width in widths {
        buffers.push(bench.backend.alloc_buffer(n_rows, width)?);
    }
    let [q, k, v, index_q, index_k] = buffers[..] else { unreachable!("as many as widths") };
    let out = bench.backend.alloc_buffer(n_rows, count * dim)?;
    let mut all = Vec::new();
    for first in (0..context).step_by(n_rows) {
        let rows = rows_of(first..first + n_rows as u32, sequence, Role::Generated);
        bench.backend.begin_pass(&rows);
        for (buffer, width) in buffers.iter().zip(widths) {
            bench.upload(*buffer, n_rows, width);
        }
        bench.backend.record(Op::KvAppend { layer: 0, k, v });
        bench.backend.record(Op::IndexAppend { layer: 0, k: index_k, k_norm, eps: 1e-6, rope });
        let selector = Selector { layer: 0, q: index_q, heads: index_heads, blocks: 6 };
        bench.backend.record(Op::AttendSelected { layer: 0, q, heads, gated: true, selector, out });
        all.extend(bench.read(out, n_rows, count * dim));
        bench.backend.submit();
    }
    Ok(all)
}

//! Index keys and the attention that they select.

use super::execute::take;
use super::{Buffer, HostBackend, Run};
use crate::backend::{BufferId, Heads, RopeId, Selector, WeightId};
use crate::kernels::{Attend, AttendSelected, Kernels, PoolKeys};

/// Queries of an attention and where its output goes.
pub(super) struct Selected {
    pub(super) layer: usize,
    pub(super) q: BufferId,
    pub(super) heads: Heads,
    pub(super) gated: bool,
    pub(super) out: BufferId,
}

/// Work space of the keys of blocks.
#[derive(Default)]
pub(super) struct Scratch {
    /// `[blocks, rotary_dim]`.
    angles: Vec<f32>,
    /// `[blocks, dim]`.
    keys: Vec<f32>,
}

impl Scratch {
    pub(super) const fn bytes(&self) -> u64 {
        4 * (self.angles.capacity() + self.keys.capacity()) as u64
    }
}

impl<K: Kernels> HostBackend<K> {
    /// Raw keys into the cache, then the keys of the blocks that they complete: those before are complete already,
    /// whatever the sequence held after them.
    pub(super) fn index_append(
        &mut self,
        layer: usize,
        k: BufferId,
        (k_norm, eps): (WeightId, f32),
        rope: RopeId,
    ) {
        let Buffer { width: dim, data } = &self.buffers[k.0 as usize];
        let rope = &self.ropes[rope.0 as usize];
        let rotary_dim = rope.rotary_dim();
        let Scratch { angles, keys } = &mut self.index;
        for Run { sequence, rows, first_position, .. } in &self.runs {
            let sequence =
                self.sequences[sequence.0 as usize].as_mut().expect("the sequence is open");
            let ratio = sequence.index_shape().ratio;
            sequence.append_index(layer, *first_position, &data[rows.start * dim..rows.end * dim]);
            let blocks = first_position / ratio..(first_position + rows.len()) / ratio;
            if blocks.is_empty() {
                continue;
            }
            angles.clear();
            for block in blocks.clone() {
                match (block * ratio).checked_sub(*first_position) {
                    // The block begins in an earlier pass.
                    None => rope.push_angles((block * ratio) as u32, angles),
                    Some(row) => {
                        let start = (rows.start + row) * rotary_dim;
                        angles.extend_from_slice(&rope.angles()[start..start + rotary_dim]);
                    }
                }
            }
            keys.clear();
            keys.resize(blocks.len() * dim, 0.0);
            self.kernels.pool_keys(PoolKeys {
                raw: sequence.index_raw(layer),
                first_block: blocks.start,
                ratio,
                weight: self.weights[k_norm.0 as usize].vector(),
                eps,
                angles,
                rotary_dim,
                out: keys,
            });
            sequence.append_blocks(layer, blocks.start, keys);
        }
    }

    pub(super) fn attend_selected(&mut self, selected: &Selected, selector: Selector) {
        let Selected { layer, q, heads, gated, out } = *selected;
        assert!(selector.blocks > 0, "a row chooses at least one block");
        let mut data = take(&mut self.buffers, out);
        let out_width = self.buffers[out.0 as usize].width;
        let part = |buffer: BufferId, run: &Run| {
            let Buffer { width, data } = &self.buffers[buffer.0 as usize];
            (&data[run.rows.start * width..run.rows.end * width], *width)
        };
        for run in &self.runs {
            let sequence =
                self.sequences[run.sequence.0 as usize].as_ref().expect("the sequence is open");
            let (q, q_width) = part(q, run);
            let (index_q, index_width) = part(selector.q, run);
            let index = sequence.index_shape();
            assert_eq!(selector.heads.dim, index.dim, "queries and keys of one width");
            self.kernels.attend_selected(AttendSelected {
                attend: Attend {
                    q,
                    q_width,
                    heads,
                    gated,
                    kv_heads: sequence.shape.kv_heads,
                    keys: sequence.keys(layer),
                    values: sequence.values(layer),
                    first_position: run.first_position,
                    out: &mut data[run.rows.start * out_width..run.rows.end * out_width],
                },
                index_q,
                index_width,
                index_heads: selector.heads,
                index_keys: sequence.index_blocks(selector.layer),
                ratio: index.ratio,
                blocks: selector.blocks,
            });
        }
        self.buffers[out.0 as usize].data = data;
    }
}

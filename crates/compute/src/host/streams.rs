//! Operations on parallel residual streams.

use std::ops::Range;

use super::{Buffer, HostBackend};
use crate::backend::{BufferId, Columns, WeightId};
use crate::kernels::{GatedValue, GroupNorm, Kernels};

impl<K: Kernels> HostBackend<K> {
    pub(super) fn repeat(&mut self, x: BufferId, out: BufferId) {
        let n_rows = self.rows.len();
        self.write(out, n_rows, |this, out, width| {
            let Buffer { width: narrow, data } = &this.buffers[x.0 as usize];
            assert!(width.is_multiple_of(*narrow), "a whole number of copies");
            for (x, out) in data.chunks_exact(*narrow).zip(out.chunks_exact_mut(width)) {
                out.chunks_exact_mut(*narrow).for_each(|part| part.copy_from_slice(x));
            }
        });
    }

    pub(super) fn copy(
        &mut self,
        x: BufferId,
        out: BufferId,
        columns: Columns,
        rows: Range<usize>,
    ) {
        assert!(x != out, "values are copied between buffers");
        let Columns { from, to, width } = columns;
        self.write(out, rows.len(), |this, out, out_width| {
            let Buffer { width: x_width, data } = &this.buffers[x.0 as usize];
            assert!(from + width <= *x_width && to + width <= out_width, "columns of both");
            let x = &data[rows.start * x_width..rows.end * x_width];
            for (x, out) in x.chunks_exact(*x_width).zip(out.chunks_exact_mut(out_width)) {
                out[to..to + width].copy_from_slice(&x[from..from + width]);
            }
        });
    }

    pub(super) fn group_norm(
        &mut self,
        x: BufferId,
        weight: WeightId,
        norm: GroupNorm,
        out: BufferId,
        rows: Range<usize>,
    ) {
        self.write(out, rows.len(), |this, out, width| {
            assert!(width.is_multiple_of(norm.groups), "equal groups");
            let x = &this.buffers[x.0 as usize].data[rows.start * width..rows.end * width];
            let weight = this.weights[weight.0 as usize].vector();
            assert_eq!(weight.len(), width, "a weight for each value of a row");
            this.kernels.group_norm(x, weight, norm, out);
        });
    }

    pub(super) fn scaled_silu(&mut self, x: BufferId, scale: f32, rows: Range<usize>) {
        self.write(x, rows.end, |this, x, width| {
            this.kernels.scaled_silu(&mut x[rows.start * width..], scale);
        });
    }

    pub(super) fn stream_mix(
        &mut self,
        mix: BufferId,
        n: BufferId,
        out: BufferId,
        rows: Range<usize>,
    ) {
        self.write(out, rows.len(), |this, out, hidden| {
            let [mix, n] = [mix, n].map(|id| {
                let Buffer { width, data } = &this.buffers[id.0 as usize];
                &data[rows.start * width..rows.end * width]
            });
            assert!(mix.len() == n.len() && n.len().is_multiple_of(out.len()), "whole streams");
            this.kernels.stream_mix(mix, n, hidden, out);
        });
    }

    pub(super) fn inject(&mut self, logits: BufferId, y: BufferId, to: BufferId) {
        let n_rows = self.rows.len();
        self.write(to, n_rows, |this, to, width| {
            let [(logits, streams), (y, hidden)] = [logits, y].map(|id| {
                let Buffer { width, data } = &this.buffers[id.0 as usize];
                (&data[..n_rows * width], *width)
            });
            assert_eq!(width, streams * hidden, "a logit for each stream");
            this.kernels.inject(logits, y, hidden, to);
        });
    }

    pub(super) fn gated_value(&mut self, [k, q, v]: [BufferId; 3], out: BufferId) {
        let n_rows = self.rows.len();
        self.write(out, n_rows, |this, out, width| {
            let [(k, k_width), (q, q_width), (v, hidden)] = [k, q, v].map(|id| {
                let Buffer { width, data } = &this.buffers[id.0 as usize];
                (&data[..n_rows * width], *width)
            });
            assert!(k_width == width && q_width == width, "keys and queries of all streams");
            assert!(width.is_multiple_of(hidden), "whole streams");
            this.kernels.gated_value(GatedValue { k, q, v, hidden, out });
        });
    }
}

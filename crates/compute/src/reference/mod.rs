//! The scalar definition of every kernel, and a backend that runs just that.
//!
//! The functions in the files beside this one are generic over nothing and marked `#[inline(always)]`: written as
//! loops over 16-lane arrays and rows, with explicit fused multiply-adds. The `cpu` backend instantiates the same
//! functions inside `#[target_feature]` functions, where the compiler turns the lanes into vector registers without
//! changing a bit, since Rust never reorders float arithmetic. Only products of quantised blocks have hand-written
//! SIMD; they are exact integers, and are compared with `quant::dot_q8` bit for bit.
#![allow(
    clippy::inline_always,
    reason = "a definition must be compiled inside the function of the instruction set that calls it"
)]

pub(crate) mod attention;
pub(crate) mod combine;
pub(crate) mod delta_rule;
pub(crate) mod math;
pub(crate) mod norm;
pub(crate) mod router;
pub(crate) mod short_conv;

use quant::Q8Row;

use crate::backend::{Activations, Routed};
use crate::kernels::{
    Attend, BadLogit, Combine, DeltaRule, Experts, HeadNormRope, Kernels, Matrix, ShortConv,
};
use attention::KvHead;
use math::silu;

/// Kernels without SIMD and threads.
pub(crate) struct ReferenceKernels {
    activations: Activations,
    q8: Q8Row,
    delta: delta_rule::Scratch,
    /// A row of whatever the kernel at hand needs.
    row: Vec<f32>,
    /// `gate · x` and `up · x` of one expert.
    inner: [Vec<f32>; 2],
}

impl ReferenceKernels {
    pub(crate) fn new(activations: Activations) -> Self {
        Self {
            activations,
            q8: Q8Row::new(),
            delta: delta_rule::Scratch::default(),
            row: Vec::new(),
            inner: [Vec::new(), Vec::new()],
        }
    }

    /// `out = w · x` for one row.
    fn mat_vec(&mut self, w: Matrix<'_>, x: &[f32], out: &mut [f32]) {
        let rows = w.bytes.chunks_exact(w.row_bytes());
        if w.block_type.is_float() || self.activations == Activations::F32 {
            for (y, row) in out.iter_mut().zip(rows) {
                *y = quant::dot_f32(w.block_type, row, x);
            }
        } else {
            self.q8.quantize(x, w.block_type.activation_block());
            for (y, row) in out.iter_mut().zip(rows) {
                *y = quant::dot_q8(w.block_type, row, self.q8.view());
            }
        }
    }
}

/// `gate = silu(gate) ∘ up`.
#[inline(always)]
pub(crate) fn silu_mul(gate: &mut [f32], up: &[f32]) {
    for (g, u) in gate.iter_mut().zip(up) {
        *g = silu(*g) * u;
    }
}

/// `out = out ∘ sigmoid(gate)`.
#[inline(always)]
pub(crate) fn gate(out: &mut [f32], gate: &[f32]) {
    for (y, g) in out.iter_mut().zip(gate) {
        *y *= math::sigmoid(*g);
    }
}

impl Kernels for ReferenceKernels {
    fn name(&self) -> &'static str {
        "reference"
    }

    fn rms_norm(&mut self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        for (x, out) in x.chunks_exact(weight.len()).zip(out.chunks_exact_mut(weight.len())) {
            norm::rms_norm(x, weight, eps, out);
        }
    }

    fn mat_mul(&mut self, w: Matrix<'_>, x: &[f32], out: &mut [f32]) {
        for (x, out) in x.chunks_exact(w.n_in).zip(out.chunks_exact_mut(w.n_out)) {
            self.mat_vec(w, x, out);
        }
    }

    fn head_norm_rope(&mut self, job: HeadNormRope<'_>) {
        for (row, angles) in
            job.x.chunks_exact_mut(job.width).zip(job.angles.chunks_exact(job.rotary_dim))
        {
            for h in 0..job.heads.count {
                let head = &mut row[h * job.heads.stride..][..job.heads.dim];
                norm::rms_norm_in_place(head, job.weight, job.eps);
                norm::rotate(head, angles);
            }
        }
    }

    fn attend(&mut self, job: Attend<'_>) {
        let (count, dim) = (job.heads.count, job.heads.dim);
        let width = job.kv_heads * dim;
        let rows = job.q.chunks_exact(job.q_width).zip(job.out.chunks_exact_mut(count * dim));
        for (r, (q, out)) in rows.enumerate() {
            for (h, out) in out.chunks_exact_mut(dim).enumerate() {
                let start = h / (count / job.kv_heads) * dim;
                let query = &q[h * job.heads.stride..];
                let head = KvHead { keys: job.keys, values: job.values, width, start };
                attention::attend(&query[..dim], head, job.first_position + r + 1, out);
                if job.gated {
                    gate(out, &query[dim..2 * dim]);
                }
            }
        }
    }

    fn short_conv(&mut self, job: ShortConv<'_>) {
        self.row.resize(job.channels, 0.0);
        let ShortConv { x, channels, out, .. } = job;
        let job = ShortConv { out: &mut [], ..job };
        short_conv::channels(&job, 0..channels, &mut self.row, |row, values| {
            out[row * channels..(row + 1) * channels].copy_from_slice(values);
        });
        short_conv::advance(x, job.state);
    }

    fn delta_rule(&mut self, job: DeltaRule<'_>) {
        let (dk, dv, nv) = (job.shape.key_dim, job.shape.value_dim, job.shape.value_heads);
        let DeltaRule { state, out, .. } = job;
        let n_rows = out.len() / (nv * dv);
        let job = DeltaRule { state: &mut [], out: &mut [], ..job };
        for (head, state) in state.chunks_exact_mut(dk * dv).enumerate() {
            delta_rule::head(&job, n_rows, head, state, &mut self.delta, |row, o| {
                out[(row * nv + head) * dv..][..dv].copy_from_slice(o);
            });
        }
    }

    fn route(
        &mut self,
        logits: &[f32],
        n_experts: usize,
        normalize: bool,
        out: &mut [Routed],
    ) -> Result<(), BadLogit> {
        self.row.resize(n_experts, 0.0);
        let top_k = out.len() / (logits.len() / n_experts);
        let rows = logits.chunks_exact(n_experts).zip(out.chunks_exact_mut(top_k));
        for (row, (logits, out)) in rows.enumerate() {
            router::route(logits, normalize, &mut self.row, out).map_err(|expert| BadLogit {
                row,
                expert,
                value: logits[expert],
            })?;
        }
        Ok(())
    }

    fn silu_mul_in_place(&mut self, gate: &mut [f32], up: &[f32]) {
        silu_mul(gate, up);
    }

    fn experts(&mut self, job: Experts<'_>) {
        let [mut gate, mut up] = std::mem::take(&mut self.inner);
        gate.resize(job.width, 0.0);
        up.resize(job.width, 0.0);
        for group in job.groups {
            let matrices = &group.matrices;
            for pair in &job.pairs[group.first_pair..group.first_pair + group.n_pairs] {
                let x = &job.x[pair.row * job.hidden..(pair.row + 1) * job.hidden];
                self.mat_vec(Matrix::in_slot(group.slot, &matrices.gate), x, &mut gate);
                self.mat_vec(Matrix::in_slot(group.slot, &matrices.up), x, &mut up);
                silu_mul(&mut gate, &up);
                let out =
                    &mut job.outputs[pair.output * job.hidden..(pair.output + 1) * job.hidden];
                self.mat_vec(Matrix::in_slot(group.slot, &matrices.down), &gate, out);
            }
        }
        self.inner = [gate, up];
    }

    fn combine(&mut self, job: Combine<'_>) {
        self.row.resize(job.hidden, 0.0);
        let rows = job
            .routes
            .chunks_exact(job.top_k)
            .zip(job.outputs.chunks_exact(job.top_k * job.hidden));
        for (r, ((routes, outputs), to)) in
            rows.zip(job.to.chunks_exact_mut(job.hidden)).enumerate()
        {
            let shared =
                job.shared.map(|(y, gates)| (&y[r * job.hidden..(r + 1) * job.hidden], gates[r]));
            combine::combine(routes, outputs, shared, &mut self.row, to);
        }
    }

    fn allocated_bytes(&self) -> u64 {
        let rows = self.inner.iter().chain([&self.row]).map(Vec::capacity).sum::<usize>();
        let q8 = self.q8.quants().len() + 4 * self.q8.scales().len() + 2 * self.q8.sums().len();
        (4 * rows + q8) as u64 + self.delta.bytes()
    }
}

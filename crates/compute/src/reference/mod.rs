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
pub(crate) mod index;
pub(crate) mod math;
pub(crate) mod norm;
pub(crate) mod router;
pub(crate) mod short_conv;
pub(crate) mod streams;

use quant::{BlockType, Q8Row};

use crate::backend::{Activations, Routed};
use crate::kernels::{
    Attend, AttendSelected, BadLogit, Combine, DeltaRule, Experts, GatedValue, GroupNorm,
    HeadNormRope, Kernels, Matrix, PoolKeys, ShortConv,
};
use attention::{KvHead, Seen};
use index::IndexQueries;
use math::silu;

/// Kernels without SIMD and threads.
pub(crate) struct ReferenceKernels {
    activations: Activations,
    q8: Q8Row,
    delta: delta_rule::Scratch,
    /// A row of whatever the kernel at hand needs.
    row: Vec<f32>,
    /// `gate · x` and `up · x` of one expert; scores of blocks and their order.
    inner: [Vec<f32>; 2],
    /// Blocks that a row sees.
    chosen: Vec<u32>,
}

impl ReferenceKernels {
    pub(crate) fn new(activations: Activations) -> Self {
        Self {
            activations,
            q8: Q8Row::new(),
            delta: delta_rule::Scratch::default(),
            row: Vec::new(),
            inner: [Vec::new(), Vec::new()],
            chosen: Vec::new(),
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

/// Row `r` of [`Attend`], which sees `seen`; `job.out` is not looked at.
fn attend_row(job: &Attend<'_>, r: usize, seen: Seen<'_>, out: &mut [f32]) {
    let (count, dim) = (job.heads.count, job.heads.dim);
    let q = &job.q[r * job.q_width..(r + 1) * job.q_width];
    for (h, out) in out.chunks_exact_mut(dim).enumerate() {
        let start = h / (count / job.kv_heads) * dim;
        let query = &q[h * job.heads.stride..];
        let (keys, values, width) = (job.keys, job.values, job.kv_heads * dim);
        attention::attend(&query[..dim], KvHead { keys, values, width, start }, seen, out);
        if job.gated {
            gate(out, &query[dim..2 * dim]);
        }
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

    fn interleaves(&self, _ty: BlockType, _n_out: usize) -> bool {
        false
    }

    fn interleave(&mut self, ty: BlockType, _row_bytes: usize, _rows: &mut [u8]) {
        unreachable!("rows of {ty} are multiplied as they are")
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
        let Attend { out, .. } = job;
        let job = Attend { out: &mut [], ..job };
        for (r, out) in out.chunks_exact_mut(job.heads.count * job.heads.dim).enumerate() {
            attend_row(&job, r, Seen::All(job.first_position + r + 1), out);
        }
    }

    fn attend_selected(&mut self, job: AttendSelected<'_>) {
        let AttendSelected { attend, index_keys, index_heads: heads, ratio, blocks, .. } = job;
        let Attend { out, .. } = attend;
        let attend = Attend { out: &mut [], ..attend };
        let [scores, order] = &mut self.inner;
        // A sequence grows; room for its whole context is taken at once.
        let context_blocks = index_keys.len() / heads.dim;
        for scratch in [&mut *scores, &mut *order] {
            scratch.reserve(context_blocks.saturating_sub(scratch.len()));
        }
        self.chosen.resize(blocks + 1, 0);
        let outs = out.chunks_exact_mut(attend.heads.count * attend.heads.dim);
        for (r, (q, out)) in job.index_q.chunks_exact(job.index_width).zip(outs).enumerate() {
            let position = attend.first_position + r;
            let complete = (position + 1) / ratio;
            if complete > blocks {
                scores.resize(complete, 0.0);
                index::scores(IndexQueries { q, heads }, index_keys, 0, scores);
                index::select(scores, order, &mut self.chosen);
            }
            attend_row(&attend, r, index::seen(position, ratio, &self.chosen), out);
        }
    }

    fn pool_keys(&mut self, job: PoolKeys<'_>) {
        let PoolKeys { out, .. } = job;
        let job = PoolKeys { out: &mut [], ..job };
        for (i, out) in out.chunks_exact_mut(job.weight.len()).enumerate() {
            index::pool(&job, i, out);
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
            combine::combine(routes, outputs, shared, &mut self.row, (to, job.set));
        }
    }

    fn group_norm(&mut self, x: &[f32], weight: &[f32], norm: GroupNorm, out: &mut [f32]) {
        let width = weight.len() / norm.groups;
        let groups = x.chunks_exact(width).zip(out.chunks_exact_mut(width));
        for ((x, out), weight) in groups.zip(weight.chunks_exact(width).cycle()) {
            norm::rms_norm(x, weight, norm.eps, out);
        }
    }

    fn scaled_silu(&mut self, x: &mut [f32], scale: f32) {
        streams::scaled_silu(x, scale);
    }

    fn stream_mix(&mut self, mix: &[f32], n: &[f32], hidden: usize, out: &mut [f32]) {
        let width = mix.len() / (out.len() / hidden);
        let rows = mix.chunks_exact(width).zip(n.chunks_exact(width));
        for ((mix, n), out) in rows.zip(out.chunks_exact_mut(hidden)) {
            streams::mix(mix, n, (hidden, 0), out);
        }
    }

    fn inject(&mut self, logits: &[f32], y: &[f32], hidden: usize, to: &mut [f32]) {
        let n = to.len() / y.len();
        let rows = logits.chunks_exact(n).zip(y.chunks_exact(hidden));
        for ((logits, y), to) in rows.zip(to.chunks_exact_mut(n * hidden)) {
            streams::inject(logits, y, to);
        }
    }

    fn gated_value(&mut self, job: GatedValue<'_>) {
        let width = job.k.len() / (job.v.len() / job.hidden);
        let rows = job.k.chunks_exact(width).zip(job.q.chunks_exact(width));
        let outs = job.v.chunks_exact(job.hidden).zip(job.out.chunks_exact_mut(width));
        for ((k, q), (v, out)) in rows.zip(outs) {
            streams::gated_value(k, q, v, out);
        }
    }

    fn allocated_bytes(&self) -> u64 {
        let rows = self.inner.iter().chain([&self.row]).map(Vec::capacity).sum::<usize>()
            + self.chosen.capacity();
        let q8 = self.q8.quants().len() + 4 * self.q8.scales().len() + 2 * self.q8.sums().len();
        (4 * rows + q8) as u64 + self.delta.bytes()
    }
}

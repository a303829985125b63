//! Gated delta rule of one value head: one step at a time, or a chunk of up to 64 rows.
//!
//! Source: Yang et al. 2024, "Gated Delta Networks" (arXiv:2412.06464); chunked form after Yang et al. 2024
//! (arXiv:2406.06484).
//!
//! With state `S` `[dk, dv]`, decay `exp(g)` and write strength `beta`:
//! `S = exp(g)·S; d = beta·(v - kᵀS); S = S + k dᵀ; o = qᵀS`.
//!
//! A chunk starts on the absolute 64-token grid. Row `t` of a chunk depends on rows `<= t` and on the state at the
//! chunk's start, so its bits do not depend on how many rows follow.

use quant::lanes;

use crate::backend::{Gate, HeadOrder, Role};
use crate::kernels::DeltaRule;
use crate::reference::math::{exp, sigmoid, silu, softplus};
use crate::reference::norm;

/// Rows of a chunk.
pub(crate) const CHUNK: usize = 64;

/// Added to the sum of squares of a query or key.
const L2_EPS: f32 = 1e-6;

/// Working memory of one head.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// `[CHUNK, dk]`.
    q: Vec<f32>,
    k: Vec<f32>,
    /// `[CHUNK, dv]`: what each row writes.
    n: Vec<f32>,
    /// `[dv]`.
    o: Vec<f32>,
    /// Decay since the chunk's start (a logarithm) and write strength of each row.
    log_decay: Vec<f32>,
    beta: Vec<f32>,
}

impl Scratch {
    fn fit(&mut self, dk: usize, dv: usize) {
        self.q.resize(CHUNK * dk, 0.0);
        self.k.resize(CHUNK * dk, 0.0);
        self.n.resize(CHUNK * dv, 0.0);
        self.o.resize(dv, 0.0);
        self.log_decay.resize(CHUNK, 0.0);
        self.beta.resize(CHUNK, 0.0);
    }

    /// Its allocations.
    pub(crate) fn buffers(&mut self) -> [&mut Vec<f32>; 6] {
        let Self { q, k, n, o, log_decay, beta } = self;
        [q, k, n, o, log_decay, beta]
    }

    /// Bytes that it holds.
    pub(crate) fn bytes(&self) -> u64 {
        let floats = [&self.q, &self.k, &self.n, &self.o, &self.log_decay, &self.beta];
        4 * floats.iter().map(|v| v.capacity() as u64).sum::<u64>()
    }
}

/// All rows of value head `head`, whose state is `state`; `put` gets `(row, output [dv])`. `job.state` and `job.out`
/// are not looked at.
#[inline(always)]
pub(crate) fn head(
    job: &DeltaRule<'_>,
    n_rows: usize,
    head: usize,
    state: &mut [f32],
    scratch: &mut Scratch,
    mut put: impl FnMut(usize, &[f32]),
) {
    let (dk, dv) = (job.shape.key_dim, job.shape.value_dim);
    scratch.fit(dk, dv);
    match job.role {
        Role::Generated => {
            for row in 0..n_rows {
                load_row(job, head, row, 0, scratch);
                step(job, head, row, state, scratch);
                finish(job, head, row, &mut scratch.o);
                put(row, &scratch.o);
            }
        }
        Role::Prompt => {
            assert!(
                job.first_position.is_multiple_of(CHUNK),
                "prompt rows start on the 64-token grid"
            );
            for start in (0..n_rows).step_by(CHUNK) {
                chunk(job, head, start..n_rows.min(start + CHUNK), state, scratch, &mut put);
            }
        }
    }
}

/// Query, key, decay and write strength of `row` into place `at` of the scratch.
#[inline(always)]
fn load_row(job: &DeltaRule<'_>, head: usize, row: usize, at: usize, scratch: &mut Scratch) {
    let shape = &job.shape;
    let dk = shape.key_dim;
    let key_head = match shape.order {
        HeadOrder::Grouped => head / (shape.value_heads / shape.key_heads),
        HeadOrder::Tiled => head % shape.key_heads,
    };
    let conv = &job.conv[row * shape.conv_channels()..];
    let (q, k) = (&conv[key_head * dk..][..dk], &conv[(shape.key_heads + key_head) * dk..][..dk]);
    let q_scale = 1.0 / (lanes::dot(q, q) + L2_EPS).sqrt() * (1.0 / (dk as f32).sqrt());
    let k_scale = 1.0 / (lanes::dot(k, k) + L2_EPS).sqrt();
    for (y, x) in scratch.q[at * dk..][..dk].iter_mut().zip(q) {
        *y = x * q_scale;
    }
    for (y, x) in scratch.k[at * dk..][..dk].iter_mut().zip(k) {
        *y = x * k_scale;
    }
    let ba = &job.ba[row * 2 * shape.value_heads..][..2 * shape.value_heads];
    scratch.beta[at] = sigmoid(ba[head]);
    scratch.log_decay[at] =
        job.a[head] * softplus(ba[shape.value_heads + head] + job.dt_bias[head]);
}

#[inline(always)]
fn value<'a>(job: &'a DeltaRule<'_>, head: usize, row: usize) -> &'a [f32] {
    let shape = &job.shape;
    let start =
        row * shape.conv_channels() + 2 * shape.key_heads * shape.key_dim + head * shape.value_dim;
    &job.conv[start..start + shape.value_dim]
}

/// The one-step form.
#[inline(always)]
fn step(job: &DeltaRule<'_>, head: usize, row: usize, state: &mut [f32], scratch: &mut Scratch) {
    let (dk, dv) = (job.shape.key_dim, job.shape.value_dim);
    let Scratch { q, k, n, o, log_decay, beta } = scratch;
    let decay = exp(log_decay[0]);
    let d = &mut n[..dv];
    d.fill(0.0);
    for (s, k) in state.chunks_exact_mut(dv).zip(&k[..dk]) {
        for (s, d) in s.iter_mut().zip(d.iter_mut()) {
            *s *= decay;
            *d = k.mul_add(*s, *d);
        }
    }
    for (d, v) in d.iter_mut().zip(value(job, head, row)) {
        *d = beta[0] * (v - *d);
    }
    o.fill(0.0);
    for ((s, k), q) in state.chunks_exact_mut(dv).zip(&k[..dk]).zip(&q[..dk]) {
        for ((s, d), o) in s.iter_mut().zip(d.iter()).zip(o.iter_mut()) {
            *s = k.mul_add(*d, *s);
            *o = q.mul_add(*s, *o);
        }
    }
}

/// The chunked form for `rows` that start on the grid.
///
/// With `L_t` the sum of log decays up to row `t` and `D(t,s) = exp(L_t - L_s)`:
/// `n_t = beta_t·(v_t - exp(L_t)·k_tᵀS - Σ_{s<t} (k_t·k_s)·D(t,s)·n_s)`, by forward substitution;
/// `o_t = exp(L_t)·q_tᵀS + Σ_{s<=t} (q_t·k_s)·D(t,s)·n_s`; `S' = exp(L_n)·S + Σ_s D(n,s)·k_s n_sᵀ`.
#[inline(always)]
fn chunk(
    job: &DeltaRule<'_>,
    head: usize,
    rows: std::ops::Range<usize>,
    state: &mut [f32],
    scratch: &mut Scratch,
    put: &mut impl FnMut(usize, &[f32]),
) {
    let (dk, dv) = (job.shape.key_dim, job.shape.value_dim);
    let mut sum = 0.0;
    for (t, row) in rows.clone().enumerate() {
        load_row(job, head, row, t, scratch);
        sum += scratch.log_decay[t];
        scratch.log_decay[t] = sum;
    }
    for (t, row) in rows.clone().enumerate() {
        let Scratch { q, k, n, o, log_decay, beta } = scratch;
        let (before, n_t) = n.split_at_mut(t * dv);
        let n_t = &mut n_t[..dv];
        let (q_t, k_t) = (&q[t * dk..][..dk], &k[t * dk..][..dk]);
        let decay = exp(log_decay[t]);
        o.fill(0.0);
        n_t.fill(0.0);
        for ((s, k), q) in state.chunks_exact(dv).zip(k_t).zip(q_t) {
            for ((s, n), o) in s.iter().zip(n_t.iter_mut()).zip(o.iter_mut()) {
                *n = k.mul_add(*s, *n);
                *o = q.mul_add(*s, *o);
            }
        }
        for ((n, o), v) in n_t.iter_mut().zip(o.iter_mut()).zip(value(job, head, row)) {
            *n = v - decay * *n;
            *o *= decay;
        }
        for (s, n_s) in before.chunks_exact(dv).enumerate() {
            let decay = exp(log_decay[t] - log_decay[s]);
            let k_s = &k[s * dk..][..dk];
            let (kk, qk) = (-lanes::dot(k_t, k_s) * decay, lanes::dot(q_t, k_s) * decay);
            for ((n, o), x) in n_t.iter_mut().zip(o.iter_mut()).zip(n_s) {
                *n = kk.mul_add(*x, *n);
                *o = qk.mul_add(*x, *o);
            }
        }
        let qk = lanes::dot(q_t, k_t);
        for (n, o) in n_t.iter_mut().zip(o.iter_mut()) {
            *n *= beta[t];
            *o = qk.mul_add(*n, *o);
        }
        finish(job, head, row, o);
        put(row, o);
    }
    carry(rows.len(), state, scratch, dk, dv);
}

/// The state after `n` rows of a chunk.
#[inline(always)]
fn carry(n_rows: usize, state: &mut [f32], scratch: &mut Scratch, dk: usize, dv: usize) {
    let last = scratch.log_decay[n_rows - 1];
    let decay = exp(last);
    // `beta` has done its work; it takes the decay from each row to the last.
    for (weight, log_decay) in scratch.beta[..n_rows].iter_mut().zip(&scratch.log_decay) {
        *weight = exp(last - log_decay);
    }
    for (i, s) in state.chunks_exact_mut(dv).enumerate() {
        for s in s.iter_mut() {
            *s *= decay;
        }
        for t in 0..n_rows {
            let k = scratch.k[t * dk + i] * scratch.beta[t];
            for (s, n) in s.iter_mut().zip(&scratch.n[t * dv..][..dv]) {
                *s = k.mul_add(*n, *s);
            }
        }
    }
}

/// Norm of the head's output, times its gate.
#[inline(always)]
fn finish(job: &DeltaRule<'_>, head: usize, row: usize, o: &mut [f32]) {
    let dv = job.shape.value_dim;
    norm::rms_norm_in_place(o, job.norm, job.eps);
    let z = &job.z[(row * job.shape.value_heads + head) * dv..][..dv];
    match job.gate {
        Gate::Silu => {
            for (o, z) in o.iter_mut().zip(z) {
                *o *= silu(*z);
            }
        }
        Gate::Sigmoid => {
            for (o, z) in o.iter_mut().zip(z) {
                *o *= sigmoid(*z);
            }
        }
    }
}

#[cfg(test)]
mod tests;

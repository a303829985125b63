//! Parallel residual streams: how rows, groups and columns are cut into tasks.
#![allow(unsafe_code, reason = "tasks write interleaved parts of the outputs")]

use crate::kernels::{GatedValue, GroupNorm};

use super::Machine;
use super::instances;
use super::rows::{TASK_VALUES, for_each_row};
use super::scatter::Scatter;

/// Columns of a mixing task: each takes an exponential per stream.
const MIX_COLUMNS: usize = 1_024;

/// Each of `groups` equal parts of a row by itself; rows are as wide as `weight`.
pub(super) fn group_norm(
    machine: &Machine,
    x: &[f32],
    weight: &[f32],
    norm: GroupNorm,
    out: &mut [f32],
) {
    let width = weight.len() / norm.groups;
    let out = Scatter::new(out);
    for_each_row(machine, x.len() / width, width, |i| {
        let group = i % norm.groups;
        let weight = &weight[group * width..(group + 1) * width];
        let range = i * width..(i + 1) * width;
        // SAFETY: groups differ, so their parts do not overlap.
        let out = unsafe { out.part(range.clone()) };
        instances::rms_norm(machine.isa, &x[range], weight, norm.eps, out);
    });
}

/// `x = silu(scale · x)`.
pub(super) fn scaled_silu(machine: &Machine, x: &mut [f32], scale: f32) {
    let n = x.len();
    let x = Scatter::new(x);
    for_each_row(machine, n.div_ceil(TASK_VALUES), TASK_VALUES, |r| {
        let range = r * TASK_VALUES..n.min((r + 1) * TASK_VALUES);
        // SAFETY: ranges differ by whole tasks, so parts do not overlap.
        instances::scaled_silu(machine.isa, unsafe { x.part(range) }, scale);
    });
}

/// `out[r] = (Σ_s sigmoid(mix_s) ∘ n_s) / streams`: rows and columns in parallel.
pub(super) fn mix(machine: &Machine, mix: &[f32], n: &[f32], hidden: usize, out: &mut [f32]) {
    let n_rows = out.len() / hidden;
    let width = mix.len() / n_rows;
    let parts = hidden.div_ceil(MIX_COLUMNS);
    let out = Scatter::new(out);
    machine.pool.run(n_rows * parts, |task| {
        let (row, first) = (task / parts, task % parts * MIX_COLUMNS);
        let columns = first..hidden.min(first + MIX_COLUMNS);
        let range = row * width..(row + 1) * width;
        // SAFETY: tasks differ in row or in columns, so parts do not overlap.
        let out = unsafe { out.part(row * hidden + columns.start..row * hidden + columns.end) };
        instances::mix(machine.isa, &mix[range.clone()], &n[range], (hidden, first), out);
    });
}

/// `to_s += 2·sigmoid(logits_s / streams) · y`.
pub(super) fn inject(machine: &Machine, logits: &[f32], y: &[f32], hidden: usize, to: &mut [f32]) {
    let n_rows = y.len() / hidden;
    let streams = logits.len() / n_rows;
    let width = streams * hidden;
    let to = Scatter::new(to);
    for_each_row(machine, n_rows, width, |r| {
        // SAFETY: rows differ, so their parts do not overlap.
        let to = unsafe { to.part(r * width..(r + 1) * width) };
        let logits = &logits[r * streams..(r + 1) * streams];
        instances::inject(machine.isa, logits, &y[r * hidden..(r + 1) * hidden], to);
    });
}

/// See [`GatedValue`].
pub(super) fn gated_value(machine: &Machine, job: GatedValue<'_>) {
    let GatedValue { k, q, v, hidden, out } = job;
    let n_rows = v.len() / hidden;
    let width = k.len() / n_rows;
    let out = Scatter::new(out);
    for_each_row(machine, n_rows, width, |r| {
        let range = r * width..(r + 1) * width;
        // SAFETY: rows differ, so their parts do not overlap.
        let out = unsafe { out.part(range.clone()) };
        let v = &v[r * hidden..(r + 1) * hidden];
        instances::gated_value(machine.isa, &k[range.clone()], &q[range], v, out);
    });
}

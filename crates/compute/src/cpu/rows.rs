//! The small kernels: how their rows, heads and channels are cut into tasks.
#![allow(unsafe_code, reason = "tasks write interleaved parts of the outputs")]

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::backend::Routed;
use crate::kernels::{BadLogit, Combine, DeltaRule, HeadNormRope, ShortConv};
use crate::reference::short_conv::advance;

use super::Machine;
use super::instances;
use super::q8_rows::grow;
use super::scatter::Scatter;

/// Values that one task should have at least: a few microseconds of work.
pub(super) const TASK_VALUES: usize = 8_192;

/// Runs `task` for `0..n_rows`, several rows of `width` values at a time; alone where that is little work.
pub(super) fn for_each_row(
    machine: &Machine,
    n_rows: usize,
    width: usize,
    row: impl Fn(usize) + Sync,
) {
    let rows = (TASK_VALUES / width.max(1)).max(1);
    let tasks = n_rows.div_ceil(rows);
    if tasks == 1 {
        (0..n_rows).for_each(row);
    } else {
        machine.pool.run(tasks, |t| (t * rows..n_rows.min((t + 1) * rows)).for_each(&row));
    }
}

/// `out[r] = norm of x[r]`; rows are as wide as `weight`.
pub(super) fn rms_norm(machine: &Machine, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let n = weight.len();
    let out = Scatter::new(out);
    for_each_row(machine, x.len() / n, n, |r| {
        // SAFETY: rows differ, so their parts do not overlap.
        let out = unsafe { out.part(r * n..(r + 1) * n) };
        instances::rms_norm(machine.isa, &x[r * n..(r + 1) * n], weight, eps, out);
    });
}

/// See [`HeadNormRope`].
pub(super) fn head_norm_rope(machine: &Machine, job: HeadNormRope<'_>) {
    let HeadNormRope { x, width, heads, weight, eps, angles, rotary_dim } = job;
    let n_rows = x.len() / width;
    let x = Scatter::new(x);
    for_each_row(machine, n_rows, heads.count * heads.dim, |r| {
        let angles = &angles[r * rotary_dim..(r + 1) * rotary_dim];
        for h in 0..heads.count {
            let start = r * width + h * heads.stride;
            // SAFETY: rows differ, and one head is taken at a time.
            let head = unsafe { x.part(start..start + heads.dim) };
            instances::norm_rope(machine.isa, head, weight, eps, angles);
        }
    });
}

/// `gate = silu(gate) ∘ up`.
pub(super) fn silu_mul(machine: &Machine, gate: &mut [f32], up: &[f32]) {
    let n = gate.len();
    assert_eq!(n, up.len(), "gate and up are of one shape");
    let gate = Scatter::new(gate);
    for_each_row(machine, n.div_ceil(TASK_VALUES), TASK_VALUES, |r| {
        let range = r * TASK_VALUES..n.min((r + 1) * TASK_VALUES);
        // SAFETY: ranges differ by whole tasks, so parts do not overlap.
        instances::silu_mul(machine.isa, unsafe { gate.part(range.clone()) }, &up[range]);
    });
}

/// See [`ShortConv`]: channels in parallel.
pub(super) fn short_conv(machine: &mut Machine, job: ShortConv<'_>) {
    let ShortConv { x, channels, taps, out, .. } = job;
    let n_rows = x.len() / channels;
    // Enough work for a task, but whole cache lines of each row.
    let per_task = (TASK_VALUES / (n_rows * taps)).next_multiple_of(64);
    let (isa, scatter) = (machine.isa, Scatter::new(out));
    let job = ShortConv { out: &mut [], ..job };
    machine.run(channels.div_ceil(per_task), |local, t| {
        let range = t * per_task..channels.min((t + 1) * per_task);
        grow(&mut local.row, range.len());
        instances::conv_channels(isa, &job, range.clone(), &mut local.row, |row, values| {
            let start = row * channels + range.start;
            // SAFETY: tasks differ in channels, and one row is written at a time.
            unsafe { scatter.part(start..start + values.len()) }.copy_from_slice(values);
        });
    });
    advance(x, job.state);
}

/// See [`DeltaRule`]: value heads in parallel.
pub(super) fn delta_rule(machine: &mut Machine, job: DeltaRule<'_>) {
    let (dk, dv, nv) = (job.shape.key_dim, job.shape.value_dim, job.shape.value_heads);
    let DeltaRule { state, out, .. } = job;
    let job = DeltaRule { state: &mut [], out: &mut [], ..job };
    let (isa, state, out) = (machine.isa, Scatter::new(state), Scatter::new(out));
    machine.run(nv, |local, head| {
        // SAFETY: tasks differ in head, so neither the states nor the outputs below overlap.
        let state = unsafe { state.part(head * dk * dv..(head + 1) * dk * dv) };
        instances::delta_head(isa, &job, head, state, &mut local.delta, |row, o| {
            let start = (row * nv + head) * dv;
            // SAFETY: as above, and one row is written at a time.
            unsafe { out.part(start..start + dv) }.copy_from_slice(o);
        });
    });
}

/// Rows of logits `[rows, n_experts]` to choices `[rows, top_k]`.
///
/// # Errors
/// The first logit that is not finite.
pub(super) fn route(
    machine: &mut Machine,
    logits: &[f32],
    n_experts: usize,
    normalize: bool,
    out: &mut [Routed],
) -> Result<(), BadLogit> {
    let n_rows = logits.len() / n_experts;
    let top_k = out.len() / n_rows;
    let first_bad = AtomicUsize::new(usize::MAX);
    let (isa, out) = (machine.isa, Scatter::new(out));
    let rows = (TASK_VALUES / (n_experts * top_k)).max(1);
    machine.run(n_rows.div_ceil(rows), |local, t| {
        grow(&mut local.row, n_experts);
        for r in t * rows..n_rows.min((t + 1) * rows) {
            // SAFETY: rows differ, so their parts do not overlap.
            let out = unsafe { out.part(r * top_k..(r + 1) * top_k) };
            let logits = &logits[r * n_experts..(r + 1) * n_experts];
            if instances::route(isa, logits, normalize, &mut local.row, out).is_err() {
                first_bad.fetch_min(r, Ordering::Relaxed);
            }
        }
    });
    let row = first_bad.into_inner();
    if row == usize::MAX {
        return Ok(());
    }
    let logits = &logits[row * n_experts..(row + 1) * n_experts];
    let expert = logits.iter().position(|l| !l.is_finite()).expect("the row has a bad logit");
    Err(BadLogit { row, expert, value: logits[expert] })
}

/// See [`Combine`].
pub(super) fn combine(machine: &mut Machine, job: Combine<'_>) {
    let Combine { routes, top_k, outputs, shared, hidden, set, to } = job;
    let n_rows = to.len() / hidden;
    let (isa, to) = (machine.isa, Scatter::new(to));
    machine.run(n_rows, |local, r| {
        grow(&mut local.row, hidden);
        let acc = &mut local.row[..hidden];
        let shared = shared.map(|(y, gates)| (&y[r * hidden..(r + 1) * hidden], gates[r]));
        let outputs = &outputs[r * top_k * hidden..(r + 1) * top_k * hidden];
        // SAFETY: rows differ, so their parts do not overlap.
        let to = unsafe { to.part(r * hidden..(r + 1) * hidden) };
        let routes = &routes[r * top_k..(r + 1) * top_k];
        instances::combine(isa, routes, outputs, shared, acc, (to, set));
    });
}

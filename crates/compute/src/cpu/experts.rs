//! SwiGLU experts in slots: all experts of a call at once.
//!
//! Two parallel steps, gate with up and down, each over panels of every expert's weights, so that one row with
//! eight experts keeps all threads busy and reads each weight once. Between them the inner activations, one row per
//! pair, are quantised.
#![allow(unsafe_code, reason = "panels write interleaved parts of the outputs")]

use quant::{BlockType, SlotMatrix};

use crate::backend::Activations;
use crate::kernels::{ExpertGroup, Experts, Matrix, Pair};

use super::Machine;
use super::instances::silu_mul;
use super::panel::{Column, Inputs, PANEL_COLUMNS, Panel, panel_rows};
use super::q8_rows::{Q8Rows, grow};
use super::scatter::Scatter;

/// Buffers that live from call to call.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    x: Quantized,
    inner_q8: Quantized,
    /// `[pairs, width]`.
    inner: Vec<f32>,
    /// Rows of `x` that some pair uses.
    used: Vec<bool>,
    tasks: Vec<Task>,
}

/// Rows for both sizes of activation blocks, filled as the weights need them.
#[derive(Debug, Default)]
struct Quantized {
    by_32: Q8Rows,
    by_256: Q8Rows,
}

impl Quantized {
    /// The rows as weights of type `ty` take them.
    const fn inputs<'a>(
        &'a self,
        floats: &'a [f32],
        ty: BlockType,
        form: Activations,
    ) -> Inputs<'a> {
        match form {
            Activations::Q8 if !ty.is_float() => match ty.activation_block() {
                256 => Inputs::Q8(&self.by_256),
                _ => Inputs::Q8(&self.by_32),
            },
            _ => Inputs::F32(floats),
        }
    }

    const fn bytes(&self) -> u64 {
        self.by_32.bytes() + self.by_256.bytes()
    }
}

impl Scratch {
    /// Bytes that it holds.
    pub(super) const fn bytes(&self) -> u64 {
        let tasks = self.tasks.capacity() * size_of::<Task>();
        let rest = 4 * self.inner.capacity() + self.used.capacity() + tasks;
        self.x.bytes() + self.inner_q8.bytes() + rest as u64
    }
}

/// One panel of one expert.
#[derive(Debug, Clone, Copy)]
struct Task {
    group: usize,
    /// First weight row.
    first: usize,
    n_rows: usize,
    first_pair: usize,
    n_pairs: usize,
}

/// Runs every pair of every group.
pub(super) fn experts(
    machine: &mut Machine,
    scratch: &mut Scratch,
    form: Activations,
    job: Experts<'_>,
) {
    let Scratch { x: x_q8, inner_q8, inner, used, tasks } = scratch;
    let Experts { x, hidden, width, groups, pairs, outputs } = job;
    used.clear();
    used.resize(x.len() / hidden, false);
    for pair in pairs {
        used[pair.row] = true;
    }
    for matrix in [|g: &ExpertGroup<'_>| g.matrices.gate, |g: &ExpertGroup<'_>| g.matrices.up] {
        quantize(machine, x_q8, (x, hidden), form, groups.iter().map(matrix), |r| used[r]);
    }
    split(tasks, groups, |g| g.matrices.gate);
    grow(inner, pairs.len() * width);
    let inner = &mut inner[..pairs.len() * width];
    let step = Step { groups, pairs, tasks, floats: x, quantized: x_q8, form };
    step.gate_up(machine, width, inner);

    let down = groups.iter().map(|g| g.matrices.down);
    quantize(machine, inner_q8, (inner, width), form, down, |_| true);
    split(tasks, groups, |g| g.matrices.down);
    let step = Step { groups, pairs, tasks, floats: inner, quantized: inner_q8, form };
    step.down(machine, hidden, outputs);
}

/// Quantises rows `which` of `x` `[rows, n]` for every block size that the matrices need and that is not there yet.
fn quantize(
    machine: &Machine,
    rows: &mut Quantized,
    (x, n): (&[f32], usize),
    form: Activations,
    matrices: impl Iterator<Item = SlotMatrix>,
    which: impl Fn(usize) -> bool + Sync,
) {
    let (mut need_32, mut need_256) = (false, false);
    for matrix in matrices {
        let quantized = form == Activations::Q8 && !matrix.block_type.is_float();
        let wide = matrix.block_type.activation_block() == 256;
        need_32 |= quantized && !wide;
        need_256 |= quantized && wide;
    }
    if need_32 {
        rows.by_32.quantize(machine, x, (n, 32), &which);
    }
    if need_256 {
        rows.by_256.quantize(machine, x, (n, 256), &which);
    }
}

/// Cuts one matrix of every expert into panels.
fn split(
    tasks: &mut Vec<Task>,
    groups: &[ExpertGroup<'_>],
    matrix: impl Fn(&ExpertGroup<'_>) -> SlotMatrix,
) {
    tasks.clear();
    for (group, g) in groups.iter().enumerate() {
        let matrix = matrix(g);
        let n_out = matrix.n_out as usize;
        let rows = panel_rows(matrix.row_bytes(), g.n_pairs);
        for first in (0..n_out).step_by(rows) {
            for pair in (0..g.n_pairs).step_by(PANEL_COLUMNS) {
                tasks.push(Task {
                    group,
                    first,
                    n_rows: rows.min(n_out - first),
                    first_pair: g.first_pair + pair,
                    n_pairs: PANEL_COLUMNS.min(g.n_pairs - pair),
                });
            }
        }
    }
}

/// One of the two parallel steps.
struct Step<'a> {
    groups: &'a [ExpertGroup<'a>],
    pairs: &'a [Pair],
    tasks: &'a [Task],
    /// Activations, as floats and quantised.
    floats: &'a [f32],
    quantized: &'a Quantized,
    form: Activations,
}

impl Step<'_> {
    /// `inner = silu(gate · x) ∘ (up · x)`, `[pairs, width]`.
    fn gate_up(&self, machine: &mut Machine, width: usize, inner: &mut [f32]) {
        let (isa, inner) = (machine.isa, Scatter::new(inner));
        machine.run(self.tasks.len(), |local, t| {
            let task = self.tasks[t];
            let matrices = &self.groups[task.group].matrices;
            // SAFETY: tasks differ in weight rows or in pairs, so parts of different tasks do not overlap, and
            // within a task `c` differs for all parts that live at the same time.
            let gate = |c: usize| unsafe {
                let start = (task.first_pair + c) * width + task.first;
                inner.part(start..start + task.n_rows)
            };
            let row = |c: usize| self.pairs[task.first_pair + c].row;
            let panel = self.panel(isa, task, &matrices.gate);
            let inputs = self.inputs(&matrices.gate);
            let place = |c: usize| Column { row: row(c), out: gate(c) };
            panel.multiply(inputs, task.n_pairs, place, &mut local.decoded);

            grow(&mut local.up, task.n_pairs * task.n_rows);
            let up = Scatter::new(&mut local.up);
            // SAFETY: columns differ, so their parts do not overlap.
            let up = |c: usize| unsafe { up.part(c * task.n_rows..(c + 1) * task.n_rows) };
            let panel = self.panel(isa, task, &matrices.up);
            let inputs = self.inputs(&matrices.up);
            let place = |c: usize| Column { row: row(c), out: up(c) };
            panel.multiply(inputs, task.n_pairs, place, &mut local.decoded);
            for c in 0..task.n_pairs {
                silu_mul(isa, gate(c), up(c));
            }
        });
    }

    /// `outputs[output of the pair] = down · inner`, `[rows · top_k, hidden]`.
    fn down(&self, machine: &mut Machine, hidden: usize, outputs: &mut [f32]) {
        let (isa, outputs) = (machine.isa, Scatter::new(outputs));
        machine.run(self.tasks.len(), |local, t| {
            let task = self.tasks[t];
            let matrix = &self.groups[task.group].matrices.down;
            let place = |c: usize| {
                let row = task.first_pair + c;
                let start = self.pairs[row].output * hidden + task.first;
                // SAFETY: tasks differ in weight rows or in pairs, and each `output` occurs in one pair.
                Column { row, out: unsafe { outputs.part(start..start + task.n_rows) } }
            };
            let panel = self.panel(isa, task, matrix);
            panel.multiply(self.inputs(matrix), task.n_pairs, place, &mut local.decoded);
        });
    }

    fn inputs(&self, matrix: &SlotMatrix) -> Inputs<'_> {
        self.quantized.inputs(self.floats, matrix.block_type, self.form)
    }

    fn panel(&self, isa: super::isa::Isa, task: Task, matrix: &SlotMatrix) -> Panel<'_> {
        let w = Matrix::in_slot(self.groups[task.group].slot, matrix);
        let bytes = w.row_bytes();
        Panel {
            isa,
            block_type: w.block_type,
            n_in: w.n_in,
            bytes: &w.bytes[task.first * bytes..(task.first + task.n_rows) * bytes],
        }
    }
}

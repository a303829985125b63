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
use super::interleaved;
use super::isa::Isa;
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

/// Rows for every size of activation block that the weights of a call need.
#[derive(Debug, Default)]
struct Quantized {
    /// One for each size that exists: 32, 64, 128 and 256. A size has no fixed place, so that layers with different
    /// ones share memory.
    rows: [Q8Rows; 4],
    /// How many are filled.
    used: usize,
}

impl Quantized {
    /// The rows as weights of type `ty` take them.
    fn inputs<'a>(&'a self, floats: &'a [f32], ty: BlockType, form: Activations) -> Inputs<'a> {
        if form == Activations::F32 || ty.is_float() {
            return Inputs::F32(floats);
        }
        let filled = &self.rows[..self.used];
        let rows = filled.iter().find(|rows| rows.block() == ty.activation_block());
        Inputs::Q8(rows.expect("rows were quantised for every matrix of the call"))
    }

    fn bytes(&self) -> u64 {
        self.rows.iter().map(Q8Rows::bytes).sum()
    }
}

impl Scratch {
    /// Bytes that it holds.
    pub(super) fn bytes(&self) -> u64 {
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
    let gate_up = groups.iter().flat_map(|g| [g.matrices.gate, g.matrices.up]);
    quantize(machine, x_q8, (x, hidden), form, gate_up, |r| used[r]);
    let isa = machine.isa;
    split(tasks, groups, |g| matrix(isa, g, &g.matrices.gate));
    grow(inner, pairs.len() * width);
    let inner = &mut inner[..pairs.len() * width];
    let step = Step { groups, pairs, tasks, floats: x, quantized: x_q8, form };
    step.gate_up(machine, width, inner);

    let down = groups.iter().map(|g| g.matrices.down);
    quantize(machine, inner_q8, (inner, width), form, down, |_| true);
    split(tasks, groups, |g| matrix(isa, g, &g.matrices.down));
    let step = Step { groups, pairs, tasks, floats: inner, quantized: inner_q8, form };
    step.down(machine, hidden, outputs);
}

/// Quantises rows `which` of `x` `[rows, n]` for every block size that the matrices need.
fn quantize(
    machine: &Machine,
    quantized: &mut Quantized,
    (x, n): (&[f32], usize),
    form: Activations,
    matrices: impl Iterator<Item = SlotMatrix>,
    which: impl Fn(usize) -> bool + Sync,
) {
    let Quantized { rows, used } = quantized;
    *used = 0;
    for matrix in matrices {
        let (ty, block) = (matrix.block_type, matrix.block_type.activation_block());
        let there = rows[..*used].iter().any(|rows| rows.block() == block);
        if form == Activations::Q8 && !ty.is_float() && !there {
            rows[*used].quantize(machine, x, (n, block), &which);
            *used += 1;
        }
    }
}

/// One of the matrices of an expert.
fn matrix<'a>(isa: Isa, group: &ExpertGroup<'a>, matrix: &SlotMatrix) -> Matrix<'a> {
    let w = Matrix::in_slot(group.slot, matrix);
    let interleaved = group.interleaved && interleaved::is_for(isa, w.block_type, w.n_out);
    Matrix { interleaved, ..w }
}

/// Cuts one matrix of every expert into panels.
fn split<'a>(
    tasks: &mut Vec<Task>,
    groups: &[ExpertGroup<'a>],
    matrix: impl Fn(&ExpertGroup<'a>) -> Matrix<'a>,
) {
    tasks.clear();
    for (group, g) in groups.iter().enumerate() {
        let matrix = matrix(g);
        let n_out = matrix.n_out;
        let rows = panel_rows(&matrix, g.n_pairs);
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
            panel.multiply(inputs, task.n_pairs, place, &mut local.panel);

            grow(&mut local.up, task.n_pairs * task.n_rows);
            let up = Scatter::new(&mut local.up);
            // SAFETY: columns differ, so their parts do not overlap.
            let up = |c: usize| unsafe { up.part(c * task.n_rows..(c + 1) * task.n_rows) };
            let panel = self.panel(isa, task, &matrices.up);
            let inputs = self.inputs(&matrices.up);
            let place = |c: usize| Column { row: row(c), out: up(c) };
            panel.multiply(inputs, task.n_pairs, place, &mut local.panel);
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
            panel.multiply(self.inputs(matrix), task.n_pairs, place, &mut local.panel);
        });
    }

    fn inputs(&self, matrix: &SlotMatrix) -> Inputs<'_> {
        self.quantized.inputs(self.floats, matrix.block_type, self.form)
    }

    fn panel(&self, isa: Isa, task: Task, matrix: &SlotMatrix) -> Panel<'_> {
        let w = self::matrix(isa, &self.groups[task.group], matrix);
        Panel::of(isa, &w, task.first, task.n_rows)
    }
}

//! Matrix products: panels of weight rows, spread over threads.
#![allow(unsafe_code, reason = "panels write interleaved parts of the output")]

use crate::kernels::Matrix;

use super::panel::{Column, Inputs, PANEL_COLUMNS, Panel, panel_rows};
use super::scatter::Scatter;
use super::{Local, Machine};

/// `out[r] = w · x[r]`: `inputs` are `n_rows` rows, `out` is `[n_rows, n_out]`.
///
/// A weight row is read once for each [`PANEL_COLUMNS`] activation rows; no sum is split over threads.
pub(super) fn matmul(
    machine: &mut Machine,
    w: Matrix<'_>,
    inputs: Inputs<'_>,
    n_rows: usize,
    out: &mut [f32],
) {
    let (n_out, row_bytes) = (w.n_out, w.row_bytes());
    assert!(out.len() == n_rows * n_out && w.bytes.len() == n_out * row_bytes, "whole matrices");
    let rows = panel_rows(&w, n_rows);
    let column_groups = n_rows.div_ceil(PANEL_COLUMNS);
    let out = Scatter::new(out);
    let isa = machine.isa;
    let n_tasks = n_out.div_ceil(rows) * column_groups;
    machine.run(n_tasks, |local: &mut Local, task| {
        // Neighbouring tasks share weights.
        let first = task / column_groups * rows;
        let n = rows.min(n_out - first);
        let column = task % column_groups * PANEL_COLUMNS;
        let panel = Panel::of(isa, &w, first, n);
        let place = |c: usize| {
            let row = column + c;
            // SAFETY: tasks differ in rows of `w` or in activation rows, so no two parts overlap.
            let out = unsafe { out.part(row * n_out + first..row * n_out + first + n) };
            Column { row, out }
        };
        panel.multiply(inputs, PANEL_COLUMNS.min(n_rows - column), place, &mut local.panel);
    });
}

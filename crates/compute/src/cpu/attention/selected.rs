//! Attention to the best blocks of each row: all scores, then the choice, then the attention.
//!
//! A score is cheap and there may be a hundred thousand of them for one row, so threads share out the blocks; a task
//! takes its blocks through all rows of a batch, while their keys are in the cache.
#![allow(
    unsafe_code,
    reason = "tasks write interleaved parts, and call functions for detected instruction sets"
)]

use crate::kernels::{Attend, AttendSelected, KvRows, PoolKeys};
use crate::reference::attention::Seen;
use crate::reference::index::{self, IndexQueries};

#[cfg(target_arch = "x86_64")]
use super::{Queries, TILE, avx2};
#[cfg(target_arch = "x86_64")]
use crate::backend::Heads;
use crate::cpu::isa::Isa;
use crate::cpu::q8_rows::grow;
use crate::cpu::rows::for_each_row;
use crate::cpu::scatter::Scatter;
use crate::cpu::{Machine, instances};

/// Rows whose scores exist at the same time.
const BATCH: usize = 16;

/// Blocks that a task scores.
const TASK_BLOCKS: usize = 256;

/// Scores and choices.
#[derive(Debug, Default)]
pub(in crate::cpu) struct Scratch {
    /// `[BATCH, blocks]`.
    scores: Vec<f32>,
    /// `[rows, blocks + 1]`, see [`index::select`].
    lists: Vec<u32>,
}

impl Scratch {
    /// Bytes that it holds.
    pub(in crate::cpu) const fn bytes(&self) -> u64 {
        4 * (self.scores.capacity() + self.lists.capacity()) as u64
    }
}

/// See [`AttendSelected`].
pub(in crate::cpu) fn attend_selected(
    machine: &mut Machine,
    scratch: &mut Scratch,
    job: AttendSelected<'_>,
) {
    let n_rows = job.index_q.len() / job.index_width;
    reserve(machine, scratch, n_rows, &job);
    for first in (0..n_rows).step_by(BATCH) {
        choose(machine, scratch, first..n_rows.min(first + BATCH), &job);
    }
    let (lists, len, ratio) = (&scratch.lists, job.blocks + 1, job.ratio);
    let Attend { first_position, .. } = job.attend;
    super::attend_seen(machine, job.attend, |row| -> Seen<'_> {
        index::seen(first_position + row, ratio, &lists[row * len..(row + 1) * len])
    });
}

/// Room for rows that see the whole context: a sequence that grows meets no allocation.
fn reserve(machine: &mut Machine, scratch: &mut Scratch, n_rows: usize, job: &AttendSelected<'_>) {
    let context_blocks = job.index_keys.len() / job.index_heads.dim;
    let scores = context_blocks * n_rows.min(BATCH);
    scratch.scores.reserve_exact(scores.saturating_sub(scratch.scores.len()));
    grow(&mut scratch.lists, n_rows * (job.blocks + 1));
    for local in &mut machine.locals {
        local.row.reserve_exact(context_blocks.saturating_sub(local.row.len()));
    }
}

/// Fills the lists of `rows` that do not see everything.
fn choose(
    machine: &mut Machine,
    scratch: &mut Scratch,
    rows: std::ops::Range<usize>,
    job: &AttendSelected<'_>,
) {
    let AttendSelected {
        index_q, index_width, index_heads: heads, index_keys, ratio, blocks, ..
    } = *job;
    let complete = |row: usize| (job.attend.first_position + row + 1) / ratio;
    let most = complete(rows.end - 1);
    if most <= blocks {
        return;
    }
    let Scratch { scores, lists } = scratch;
    grow(scores, rows.len() * most);
    let (isa, first_row) = (machine.isa, rows.start);
    let selecting = || rows.clone().filter(|row| complete(*row) > blocks);
    let all_scores = Scatter::new(&mut scores[..]);
    machine.pool.run(most.div_ceil(TASK_BLOCKS), |task| {
        let first = task * TASK_BLOCKS;
        for row in selecting() {
            let end = complete(row).min(first + TASK_BLOCKS);
            if first < end {
                let start = (row - first_row) * most;
                // SAFETY: tasks differ in blocks, and one row is taken at a time.
                let scores = unsafe { all_scores.part(start + first..start + end) };
                let q = &index_q[row * index_width..(row + 1) * index_width];
                score_blocks(isa, IndexQueries { q, heads }, index_keys, first, scores);
            }
        }
    });
    let lists = Scatter::new(&mut lists[..]);
    machine.run(rows.len(), |local, i| {
        let row = first_row + i;
        if complete(row) > blocks {
            // SAFETY: rows differ, so their parts do not overlap.
            let list = unsafe { lists.part(row * (blocks + 1)..(row + 1) * (blocks + 1)) };
            index::select(&scores[i * most..][..complete(row)], &mut local.row, list);
        }
    });
}

/// See [`index::scores`].
fn score_blocks(
    isa: Isa,
    queries: IndexQueries<'_>,
    keys: KvRows<'_>,
    first: usize,
    scores: &mut [f32],
) {
    #[cfg(target_arch = "x86_64")]
    if let Isa::Avx2(_) = isa {
        let Heads { count, dim, stride } = queries.heads;
        if dim.is_multiple_of(quant::lanes::LANES) && count.is_multiple_of(TILE) {
            let tile = |h: usize| Queries { q: &queries.q[h * stride..], stride, dim };
            let tiles = (0..count).step_by(TILE).map(tile);
            // SAFETY: `Isa::Avx2` is made only after AVX2, FMA and F16C were detected on this CPU.
            unsafe { avx2::index_scores(tiles, keys, first, scores) };
            return;
        }
    }
    instances::index_scores(isa, queries, keys, first, scores);
}

/// See [`PoolKeys`].
pub(in crate::cpu) fn pool_keys(machine: &Machine, job: PoolKeys<'_>) {
    let PoolKeys { out, .. } = job;
    let dim = job.weight.len();
    let n = out.len() / dim;
    let job = PoolKeys { out: &mut [], ..job };
    let (isa, out) = (machine.isa, Scatter::new(out));
    for_each_row(machine, n, job.ratio * dim, |i| {
        // SAFETY: blocks differ, so their parts do not overlap.
        instances::pool_key(isa, &job, i, unsafe { out.part(i * dim..(i + 1) * dim) });
    });
}

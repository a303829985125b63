//! Which blocks a row attends to: keys of blocks, scores of rows, the best few.
//!
//! Source: the indexer of Qwen3.8-Flash-Next; a block's key is the mean of its tokens' keys, normed and rotated.

use crate::backend::Heads;
use crate::kernels::{KvRows, PoolKeys};
use crate::reference::attention::{Seen, add_scaled, dot};
use crate::reference::norm;

/// Index queries of one row.
#[derive(Clone, Copy)]
pub(crate) struct IndexQueries<'a> {
    pub(crate) q: &'a [f32],
    pub(crate) heads: Heads,
}

/// Key of the `i`-th block of the job.
///
/// - `out`: `[dim]`
#[inline(always)]
pub(crate) fn pool(job: &PoolKeys<'_>, i: usize, out: &mut [f32]) {
    let dim = out.len();
    let first = (job.first_block + i) * job.ratio;
    out.fill(0.0);
    for position in first..first + job.ratio {
        // A product with 1 is exact: this is a sum in order of position.
        add_scaled(1.0, job.raw, position * dim, out);
    }
    for y in out.iter_mut() {
        *y /= job.ratio as f32;
    }
    norm::rms_norm_in_place(out, job.weight, job.eps);
    norm::rotate(out, &job.angles[i * job.rotary_dim..(i + 1) * job.rotary_dim]);
}

/// Scores of blocks `first..first + scores.len()`: `Σ_h max(0, q_h · key)`, in order of heads. None is negative or NaN.
#[inline(always)]
pub(crate) fn scores(
    queries: IndexQueries<'_>,
    keys: KvRows<'_>,
    first: usize,
    scores: &mut [f32],
) {
    let Heads { count, dim, stride } = queries.heads;
    for (i, score) in scores.iter_mut().enumerate() {
        *score = 0.0;
        for h in 0..count {
            let q = &queries.q[h * stride..h * stride + dim];
            *score += positive(dot(q, keys, (first + i) * dim));
        }
    }
}

/// `max(0, x)`; NaN gives 0.
#[inline(always)]
pub(crate) const fn positive(x: f32) -> f32 {
    if x > 0.0 { x } else { 0.0 }
}

/// Fills `list` with the blocks of the highest scores, ascending, all but its last place; a tie goes to the lower block.
/// The last place gets the block after the scored ones, whose tokens are always seen.
///
/// - `scores`: as many as there are complete blocks, at least `list.len()`; none is NaN
/// - `order`: scratch
#[inline(always)]
pub(crate) fn select(scores: &[f32], order: &mut Vec<f32>, list: &mut [u32]) {
    let (open, chosen) =
        list.split_last_mut().expect("a place for the block after the scored ones");
    *open = scores.len() as u32;
    order.clear();
    order.extend_from_slice(scores);
    let (better, least, _) = order.select_nth_unstable_by(chosen.len() - 1, |a, b| b.total_cmp(a));
    let least = *least;
    // Of the blocks with the least score that is chosen, as many of the first as there is room for.
    let mut ties = 1 + better.iter().filter(|score| **score <= least).count();
    let mut places = chosen.iter_mut();
    for (block, score) in scores.iter().enumerate() {
        let tied = *score == least;
        if *score > least || tied && ties > 0 {
            ties -= usize::from(tied);
            *places.next().expect("as many scores are chosen as there are places") = block as u32;
        }
    }
}

/// What a row at `position` sees; `list` as from [`select`], looked at only if it has more complete blocks than it may
/// choose.
#[inline(always)]
pub(crate) const fn seen(position: usize, ratio: usize, list: &[u32]) -> Seen<'_> {
    let complete = (position + 1) / ratio;
    if complete < list.len() {
        return Seen::All(position + 1);
    }
    let n = (list.len() - 1) * ratio + position + 1 - complete * ratio;
    Seen::Blocks { blocks: list, ratio, n }
}

#[cfg(test)]
mod tests;

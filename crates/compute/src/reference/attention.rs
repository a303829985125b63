//! Causal attention of one row and head, in blocks of 64 positions on the absolute grid.
//!
//! Source: online softmax, Milakov and Gimelshein 2018 (arXiv:1805.02867), as in Dao et al. 2022
//! (arXiv:2205.14135).

use quant::{f16_to_f32, lanes};

use crate::kernels::KvRows;
use crate::reference::math::exp;

/// Positions of a block.
pub(crate) const BLOCK: usize = 64;

/// Widest head.
pub(crate) const MAX_HEAD_DIM: usize = 512;

/// Where one key-value head lies in a row of the cache.
#[derive(Clone, Copy)]
pub(crate) struct KvHead<'a> {
    pub(crate) keys: KvRows<'a>,
    pub(crate) values: KvRows<'a>,
    /// Values of a cache row, `kv_heads · dim`.
    pub(crate) width: usize,
    /// Start of the head in a row.
    pub(crate) start: usize,
}

/// `out = softmax(q · k_p / sqrt(dim)) · v_p` over positions `p < n_positions`.
///
/// Per block: scores, their maximum, the accumulator rescaled to it, then values added in position order. A row's
/// bits depend on `q` and on the positions that it sees, on nothing else.
#[inline(always)]
pub(crate) fn attend(q: &[f32], head: KvHead<'_>, n_positions: usize, out: &mut [f32]) {
    let dim = q.len();
    let scale = 1.0 / (dim as f32).sqrt();
    let mut row = [0.0; MAX_HEAD_DIM];
    let row = &mut row[..dim];
    let mut scores = [0.0; BLOCK];
    let (mut max, mut total) = (f32::NEG_INFINITY, 0.0_f32);
    out.fill(0.0);
    for start in (0..n_positions).step_by(BLOCK) {
        let n = BLOCK.min(n_positions - start);
        let scores = &mut scores[..n];
        let before = max;
        for (i, score) in scores.iter_mut().enumerate() {
            load(head.keys, (start + i) * head.width + head.start, row);
            *score = lanes::dot(q, row) * scale;
            max = if *score > max { *score } else { max };
        }
        let correction = exp(before - max);
        for score in scores.iter_mut() {
            *score = exp(*score - max);
        }
        total = total.mul_add(correction, lanes::sum(scores));
        for y in out.iter_mut() {
            *y *= correction;
        }
        for (i, p) in scores.iter().enumerate() {
            load(head.values, (start + i) * head.width + head.start, row);
            for (y, v) in out.iter_mut().zip(row.iter()) {
                *y = p.mul_add(*v, *y);
            }
        }
    }
    for y in out.iter_mut() {
        *y /= total;
    }
}

#[inline(always)]
fn load(rows: KvRows<'_>, at: usize, out: &mut [f32]) {
    let range = at..at + out.len();
    match rows {
        KvRows::F32(values) => out.copy_from_slice(&values[range]),
        KvRows::F16(values) => {
            for (y, v) in out.iter_mut().zip(&values[range]) {
                *y = f16_to_f32(*v);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(n: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..n).map(|_| next()).collect()
    }

    #[test]
    fn blocks_give_the_plain_softmax() {
        let (dim, width, start) = (32, 64, 32);
        for n in [1, 5, 63, 64, 65, 200] {
            let (keys, values) = (noise(n * width, 1), noise(n * width, 2));
            let q: Vec<f32> = noise(dim, 3).iter().map(|v| v * 9.0).collect();
            let mut out = vec![0.0; dim];
            let head =
                KvHead { keys: KvRows::F32(&keys), values: KvRows::F32(&values), width, start };
            attend(&q, head, n, &mut out);
            let score = |p: usize| -> f64 {
                let key = &keys[p * width + start..p * width + start + dim];
                key.iter().zip(&q).map(|(k, q)| f64::from(*k) * f64::from(*q)).sum::<f64>()
                    / (dim as f64).sqrt()
            };
            let weights: Vec<f64> = (0..n).map(|p| score(p).exp()).collect();
            let total: f64 = weights.iter().sum();
            for (j, y) in out.iter().enumerate() {
                let exact: f64 =
                    (0..n).map(|p| weights[p] * f64::from(values[p * width + start + j])).sum();
                assert!((f64::from(*y) - exact / total).abs() < 2e-6, "{n} positions, value {j}");
            }
        }
    }
}

//! Causal attention of one row and head, in blocks of 64 positions on the absolute grid.
//!
//! Source: online softmax, Milakov and Gimelshein 2018 (arXiv:1805.02867), as in Dao et al. 2022
//! (arXiv:2205.14135).

use quant::f16_to_f32;
use quant::lanes::{self, LANES};

use crate::kernels::KvRows;
use crate::reference::math::exp;

/// Positions of a block.
pub(crate) const BLOCK: usize = 64;

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

/// Positions that a row sees, ascending.
#[derive(Clone, Copy)]
pub(crate) enum Seen<'a> {
    /// The first so many.
    All(usize),
    /// The first `n` tokens of these blocks of `ratio` positions each, which ascend.
    Blocks { blocks: &'a [u32], ratio: usize, n: usize },
}

impl Seen<'_> {
    /// Fills in those of one block of the grid, beginning with the one that `before` others precede; how many.
    #[inline(always)]
    pub(crate) fn block(self, before: usize, positions: &mut [usize; BLOCK]) -> usize {
        match self {
            Self::All(n) => {
                let n = BLOCK.min(n - before);
                for (i, position) in positions[..n].iter_mut().enumerate() {
                    *position = before + i;
                }
                n
            }
            Self::Blocks { blocks, ratio, n } => {
                let (mut block, mut token) = (before / ratio, before % ratio);
                let mut found = 0;
                while before + found < n {
                    let position = blocks[block] as usize * ratio + token;
                    if found > 0 && position / BLOCK != positions[0] / BLOCK {
                        break;
                    }
                    positions[found] = position;
                    found += 1;
                    token += 1;
                    if token == ratio {
                        (block, token) = (block + 1, 0);
                    }
                }
                found
            }
        }
    }
}

/// `out = softmax(q · k_p / sqrt(dim)) · v_p` over the positions `p` that are seen.
///
/// Per block of the absolute grid that has any: scores, their maximum, the accumulator rescaled to it, then values
/// added in position order. A row's bits depend on `q` and on the positions that it sees, on nothing else.
#[inline(always)]
pub(crate) fn attend(q: &[f32], head: KvHead<'_>, seen: Seen<'_>, out: &mut [f32]) {
    let dim = q.len();
    let scale = 1.0 / (dim as f32).sqrt();
    let (mut scores, mut positions) = ([0.0; BLOCK], [0; BLOCK]);
    let (mut max, mut total) = (f32::NEG_INFINITY, 0.0_f32);
    out.fill(0.0);
    let mut done = 0;
    loop {
        let n = seen.block(done, &mut positions);
        if n == 0 {
            break;
        }
        done += n;
        let scores = &mut scores[..n];
        let before = max;
        for (score, position) in scores.iter_mut().zip(positions) {
            *score = dot(q, head.keys, position * head.width + head.start) * scale;
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
        for (p, position) in scores.iter().zip(positions) {
            add_scaled(*p, head.values, position * head.width + head.start, out);
        }
    }
    for y in out.iter_mut() {
        *y /= total;
    }
}

/// [`lanes::dot`] with the values at `at`.
#[inline(always)]
pub(crate) fn dot(q: &[f32], rows: KvRows<'_>, at: usize) -> f32 {
    let mut sums = [0.0; LANES];
    for (i, q) in q.chunks(LANES).enumerate() {
        let mut x = [0.0; LANES];
        let x = &mut x[..q.len()];
        load(rows, at + i * LANES, x);
        lanes::accumulate(&mut sums, q, x);
    }
    lanes::tree(sums)
}

/// `out += p · v`, `v` being the values at `at`.
#[inline(always)]
pub(crate) fn add_scaled(p: f32, rows: KvRows<'_>, at: usize, out: &mut [f32]) {
    for (i, out) in out.chunks_mut(LANES).enumerate() {
        let mut x = [0.0; LANES];
        let x = &mut x[..out.len()];
        load(rows, at + i * LANES, x);
        for (y, v) in out.iter_mut().zip(x.iter()) {
            *y = p.mul_add(*v, *y);
        }
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

    /// Softmax over all positions at once, in double precision, and `Σ p·|v|`, which errors are relative to.
    fn exact(
        q: &[f32],
        keys: &[f32],
        values: &[f32],
        (width, start): (usize, usize),
    ) -> Vec<(f64, f64)> {
        let dim = q.len();
        let part = |row: &[f32]| row[start..start + dim].to_vec();
        let score = |key: &[f32]| {
            let dot: f64 =
                part(key).iter().zip(q).map(|(k, q)| f64::from(*k) * f64::from(*q)).sum();
            dot / (dim as f64).sqrt()
        };
        let scores: Vec<f64> = keys.chunks(width).map(score).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
        let total: f64 = weights.iter().sum();
        let value = |j: usize| {
            let terms =
                values.chunks(width).zip(&weights).map(|(v, w)| f64::from(part(v)[j]) * w / total);
            terms.fold((0.0, 0.0), |(sum, size), t| (sum + t, size + t.abs()))
        };
        (0..dim).map(value).collect()
    }

    /// Relative error of a weight: of its score `s` absolutely (a dot product of `dim / 16 + 4` roundings of terms
    /// that sum to `Σ|q·k| / sqrt(dim) <= 9·sqrt(dim)`), of exp, of the rescaling in each block, and of the sums of
    /// `n` terms; all in units of 2^-24.
    fn tolerance(dim: usize, n: usize) -> f64 {
        let score = 9.0 * (dim as f64).sqrt() * (dim as f64 / 16.0 + 6.0);
        (2.0 * score + 8.0 + n as f64 / 64.0 * 4.0 + n as f64) / f64::from(1 << 24)
    }

    #[test]
    fn blocks_give_the_plain_softmax() {
        for (dim, width, start) in [(32, 64, 32), (40, 40, 0), (5, 12, 3), (600, 600, 0)] {
            for n in [1, 5, 63, 64, 65, 200] {
                let (keys, values) = (noise(n * width, 1), noise(n * width, 2));
                let q: Vec<f32> = noise(dim, 3).iter().map(|v| v * 9.0).collect();
                let mut out = vec![f32::NAN; dim];
                let rows = (KvRows::F32(&keys), KvRows::F32(&values));
                attend(
                    &q,
                    KvHead { keys: rows.0, values: rows.1, width, start },
                    Seen::All(n),
                    &mut out,
                );
                let exact = exact(&q, &keys, &values, (width, start));
                for (j, (y, (exact, size))) in out.iter().zip(exact).enumerate() {
                    let error = (f64::from(*y) - exact).abs();
                    assert!(error <= tolerance(dim, n) * size, "{n} positions, value {j}: {error}");
                }
            }
        }
    }

    #[test]
    fn a_half_cache_is_the_single_cache_of_the_rounded_values() {
        let (dim, n) = (24, 70);
        let half = |v: Vec<f32>| v.into_iter().map(quant::f32_to_f16).collect::<Vec<_>>();
        let (keys, values) = (half(noise(n * dim, 4)), half(noise(n * dim, 5)));
        let single = |v: &[u16]| v.iter().map(|v| f16_to_f32(*v)).collect::<Vec<_>>();
        let (keys_f32, values_f32) = (single(&keys), single(&values));
        let q = noise(dim, 6);
        let run = |keys, values| {
            let mut out = vec![0.0; dim];
            attend(&q, KvHead { keys, values, width: dim, start: 0 }, Seen::All(n), &mut out);
            out.iter().map(|y| y.to_bits()).collect::<Vec<_>>()
        };
        assert_eq!(
            run(KvRows::F16(&keys), KvRows::F16(&values)),
            run(KvRows::F32(&keys_f32), KvRows::F32(&values_f32))
        );
    }

    #[test]
    fn scores_that_dwarf_each_other_do_not_overflow() {
        let (dim, n) = (16, 130);
        let mut keys = vec![0.0; n * dim];
        keys[70 * dim] = 1e18;
        keys[129 * dim] = -1e18;
        let values: Vec<f32> = (0..n * dim).map(|i| (i / dim) as f32).collect();
        let mut q = vec![0.0; dim];
        q[0] = 1e18;
        let mut out = vec![0.0; dim];
        let (keys, values) = (KvRows::F32(&keys), KvRows::F32(&values));
        attend(&q, KvHead { keys, values, width: dim, start: 0 }, Seen::All(n), &mut out);
        assert!(out.iter().all(|y| y.to_bits() == 70.0_f32.to_bits()), "{out:?}");
    }
}

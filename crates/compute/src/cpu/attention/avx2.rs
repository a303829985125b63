//! Attention for AVX2 with FMA and F16C: heads whose width is a multiple of 16.
#![allow(unsafe_code, reason = "vector loads and stores take pointers")]
#![allow(clippy::wildcard_imports, reason = "a page of intrinsics says nothing")]
#![allow(clippy::needless_range_loop, reason = "heads and registers index several arrays at once")]

use std::arch::x86_64::*;

use quant::lanes;

use crate::kernels::KvRows;
use crate::reference::attention::{BLOCK, KvHead, Seen};
use crate::reference::index::positive;
use crate::reference::math::exp;

use super::{Queries, TILE};

/// One head, or a tile of them.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn heads(queries: &Queries<'_>, kv: KvHead<'_>, seen: Seen<'_>, out: &mut [f32]) {
    match (kv.keys, kv.values) {
        (KvRows::F16(keys), KvRows::F16(values)) => {
            let key = |at: usize| load_f16(keys, at);
            let value = |at: usize| load_f16(values, at);
            any_tile(queries, &Cache { key, value, kv }, seen, out);
        }
        (KvRows::F32(keys), KvRows::F32(values)) => {
            let key = |at: usize| load_f32(keys, at);
            let value = |at: usize| load_f32(values, at);
            any_tile(queries, &Cache { key, value, kv }, seen, out);
        }
        _ => unreachable!("keys and values are of one type"),
    }
}

/// A key-value head, and how eight of its keys or values load.
struct Cache<'a, K, V> {
    key: K,
    value: V,
    kv: KvHead<'a>,
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn any_tile(
    queries: &Queries<'_>,
    cache: &Cache<'_, impl Fn(usize) -> __m256, impl Fn(usize) -> __m256>,
    seen: Seen<'_>,
    out: &mut [f32],
) {
    if out.len() == TILE * queries.dim {
        tile::<TILE>(queries, cache, seen, out);
    } else {
        tile::<1>(queries, cache, seen, out);
    }
}

/// `H` heads, as the definition goes: block by block of 64 positions.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn tile<const H: usize>(
    queries: &Queries<'_>,
    cache: &Cache<'_, impl Fn(usize) -> __m256, impl Fn(usize) -> __m256>,
    seen: Seen<'_>,
    out: &mut [f32],
) {
    let dim = queries.dim;
    assert_eq!(out.len(), H * dim, "one output per head");
    let scale = 1.0 / (dim as f32).sqrt();
    let (mut scores, mut positions) = ([[0.0; BLOCK]; H], [0; BLOCK]);
    let (mut max, mut total) = ([f32::NEG_INFINITY; H], [0.0_f32; H]);
    out.fill(0.0);
    let mut seen_before = 0;
    loop {
        let n = seen.block(seen_before, &mut positions);
        if n == 0 {
            break;
        }
        seen_before += n;
        // Where they begin in the cache.
        let rows = &mut positions[..n];
        rows.iter_mut().for_each(|row| *row = *row * cache.kv.width + cache.kv.start);
        score::<H>(queries, &cache.key, rows, &mut scores);
        for h in 0..H {
            let before = max[h];
            let scores = &mut scores[h][..n];
            for score in scores.iter_mut() {
                *score *= scale;
                max[h] = if *score > max[h] { *score } else { max[h] };
            }
            let correction = exp(before - max[h]);
            for score in scores.iter_mut() {
                *score = exp(*score - max[h]);
            }
            total[h] = total[h].mul_add(correction, lanes::sum(scores));
            out[h * dim..(h + 1) * dim].iter_mut().for_each(|y| *y *= correction);
        }
        let mut done = 0;
        if H == 1 {
            // A lone head has too few sums in flight otherwise.
            while dim - done >= 64 {
                add_values::<H, 8>(&scores, &cache.value, rows, done, out);
                done += 64;
            }
        }
        while done < dim {
            add_values::<H, 2>(&scores, &cache.value, rows, done, out);
            done += 16;
        }
    }
    for h in 0..H {
        out[h * dim..(h + 1) * dim].iter_mut().for_each(|y| *y /= total[h]);
    }
}

/// `scores[h][i] = q_h · k_i` of the keys that begin at `rows`, unscaled; four sums at a time: four heads, or four positions of one head.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn score<const H: usize>(
    queries: &Queries<'_>,
    key: &impl Fn(usize) -> __m256,
    rows: &[usize],
    scores: &mut [[f32; BLOCK]; H],
) {
    let n = rows.len();
    let step = TILE / H;
    for i in (0..n).step_by(step) {
        let mut low = [_mm256_setzero_ps(); TILE];
        let mut high = low;
        // Past the end of the block a position is computed twice.
        let places: [usize; TILE] = std::array::from_fn(|j| rows[(i + j / H).min(n - 1)]);
        for d in (0..queries.dim).step_by(16) {
            for j in 0..TILE {
                let q = queries.stride * (j % H) + d;
                let at = places[j] + d;
                low[j] = _mm256_fmadd_ps(load_f32(queries.q, q), key(at), low[j]);
                high[j] = _mm256_fmadd_ps(load_f32(queries.q, q + 8), key(at + 8), high[j]);
            }
        }
        let sums = trees(low, high);
        for j in 0..TILE {
            if i + j / H < n {
                scores[j % H][i + j / H] = sums[j];
            }
        }
    }
}

/// `8·R` values of each head from `done` on: `out = fma(score, value, out)` in order of position.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn add_values<const H: usize, const R: usize>(
    scores: &[[f32; BLOCK]; H],
    value: &impl Fn(usize) -> __m256,
    rows: &[usize],
    done: usize,
    out: &mut [f32],
) {
    let dim = out.len() / H;
    let mut acc = [[_mm256_setzero_ps(); R]; H];
    for h in 0..H {
        for r in 0..R {
            acc[h][r] = load_f32(out, h * dim + done + 8 * r);
        }
    }
    for (i, row) in rows.iter().enumerate() {
        for r in 0..R {
            let value = value(row + done + 8 * r);
            for h in 0..H {
                acc[h][r] = _mm256_fmadd_ps(_mm256_set1_ps(scores[h][i]), value, acc[h][r]);
            }
        }
    }
    for h in 0..H {
        for r in 0..R {
            store_f32(out, h * dim + done + 8 * r, acc[h][r]);
        }
    }
}

/// Scores of index blocks from `first` on: tiles of heads in order, see [`positive`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn index_scores<'a>(
    tiles: impl Iterator<Item = Queries<'a>>,
    keys: KvRows<'_>,
    first: usize,
    scores: &mut [f32],
) {
    scores.fill(0.0);
    for queries in tiles {
        match keys {
            KvRows::F16(keys) => add_index(&queries, &|at| load_f16(keys, at), first, scores),
            KvRows::F32(keys) => add_index(&queries, &|at| load_f32(keys, at), first, scores),
        }
    }
}

/// Adds what the heads of a tile give.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn add_index(
    queries: &Queries<'_>,
    key: &impl Fn(usize) -> __m256,
    first: usize,
    scores: &mut [f32],
) {
    let (mut products, mut rows) = ([[0.0; BLOCK]; TILE], [0; BLOCK]);
    for (part, scores) in scores.chunks_mut(BLOCK).enumerate() {
        let rows = &mut rows[..scores.len()];
        for (i, row) in rows.iter_mut().enumerate() {
            *row = (first + part * BLOCK + i) * queries.dim;
        }
        score::<TILE>(queries, key, rows, &mut products);
        for products in &products {
            for (score, product) in scores.iter_mut().zip(products) {
                *score += positive(*product);
            }
        }
    }
}

/// [`lanes::tree`] of four sums.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn trees(low: [__m256; TILE], high: [__m256; TILE]) -> [f32; TILE] {
    let mut four = [_mm_setzero_ps(); TILE];
    for j in 0..TILE {
        let eight = _mm256_add_ps(low[j], high[j]);
        four[j] = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
    }
    // Lanes 0 and 1 of two sums beside each other, plus lanes 2 and 3.
    let ab = _mm_add_ps(_mm_movelh_ps(four[0], four[1]), _mm_movehl_ps(four[1], four[0]));
    let cd = _mm_add_ps(_mm_movelh_ps(four[2], four[3]), _mm_movehl_ps(four[3], four[2]));
    let even = _mm_shuffle_ps::<0b10_00_10_00>(ab, cd);
    let odd = _mm_shuffle_ps::<0b11_01_11_01>(ab, cd);
    let mut sums = [0.0; TILE];
    // SAFETY: 16 bytes; the store may be unaligned.
    unsafe { _mm_storeu_ps(sums.as_mut_ptr(), _mm_add_ps(even, odd)) };
    sums
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn load_f32(values: &[f32], at: usize) -> __m256 {
    let eight = &values[at..at + 8];
    // SAFETY: 32 bytes; the load may be unaligned.
    unsafe { _mm256_loadu_ps(eight.as_ptr()) }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn load_f16(values: &[u16], at: usize) -> __m256 {
    let eight = &values[at..at + 8];
    // SAFETY: 16 bytes; the load may be unaligned.
    _mm256_cvtph_ps(unsafe { _mm_loadu_si128(eight.as_ptr().cast()) })
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn store_f32(values: &mut [f32], at: usize, v: __m256) {
    let eight = &mut values[at..at + 8];
    // SAFETY: 32 bytes; the store may be unaligned.
    unsafe { _mm256_storeu_ps(eight.as_mut_ptr(), v) }
}

//! Packed rows with AVX2.
//!
//! `maddubs` multiplies four codes of each row with four quants that all lanes share, and adds pairs in 16 bits. As
//! codes are small, several such sums fit 16 bits together; one `madd` with the sub-scales then widens them.
#![allow(unsafe_code, reason = "vector loads and stores take pointers")]
#![allow(clippy::wildcard_imports, reason = "a page of intrinsics says nothing")]
#![allow(clippy::needless_range_loop, reason = "columns index several arrays at once")]

use std::arch::x86_64::*;

use quant::{GROUP, Q8View, Unpacked};

use super::{Layout, Packed, Place, ROWS, Rows, TILE};
use crate::cpu::dot::avx2::{
    four_to_all, load_f32x8, load_i8x16, load_i8x32, load_i16x16, load_u8x32, store_f32x8,
    two_to_all,
};

/// See [`Rows::multiply`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn multiply<'x>(
    rows: &Rows<'_>,
    layout: Layout,
    packed: &mut Packed,
    n: usize,
    x: impl Fn(usize) -> Q8View<'x>,
    store: impl FnMut(usize, &[f32; ROWS]),
) {
    rows.unpack(|b, rows| lay_out(layout, rows, packed.block(layout, b)));
    let packed = &*packed;
    let block = rows.block_type.block_len();
    let tile = |xs| {
        let Layout { run, minima, halves, .. } = layout;
        let products = match (run, layout.steps(), minima, halves) {
            (32, 8, true, false) => tile::<8, 8, true, 1>(packed, block, xs),
            (32, 8, false, false) => tile::<8, 8, false, 1>(packed, block, xs),
            (32, 8, true, true) => tile::<8, 8, true, 2>(packed, block, xs),
            (32, 8, false, true) => tile::<8, 8, false, 2>(packed, block, xs),
            (32, 4, true, false) => tile::<8, 4, true, 1>(packed, block, xs),
            (32, 4, false, false) => tile::<8, 4, false, 1>(packed, block, xs),
            (32, 2, true, false) => tile::<8, 2, true, 1>(packed, block, xs),
            (32, 1, false, false) => tile::<8, 1, false, 1>(packed, block, xs),
            (16, 4, true, false) => tile::<4, 4, true, 1>(packed, block, xs),
            (16, 4, false, false) => tile::<4, 4, false, 1>(packed, block, xs),
            (16, 2, false, false) => tile::<4, 2, false, 1>(packed, block, xs),
            (16, 1, false, false) => tile::<4, 1, false, 1>(packed, block, xs),
            _ => unreachable!("{layout:?} is no type's layout"),
        };
        let mut values = [[0.0; ROWS]; TILE];
        for (values, y) in values.iter_mut().zip(products) {
            store_f32x8(values, y);
        }
        values
    };
    rows.tiles(n, x, tile, store);
}

/// What [`Place::fill`] does, scales by columns of bytes.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn lay_out(layout: Layout, rows: &[Unpacked; ROWS], mut to: Place<'_>) {
    let Layout { run, zero, minima, .. } = layout;
    let planes = layout.planes();
    for (r, row) in rows.iter().enumerate() {
        to.head.scale[r] = row.scale;
        to.head.min_scale[r] = row.min_scale;
    }
    let scales = by_group(rows, |row| &row.scales);
    for (run_scales, at) in to.scales.chunks_exact_mut(planes).zip((0..).step_by(run / GROUP)) {
        let pair = scales[at / 2];
        let group = if at % 2 == 0 { pair } else { _mm_srli_si128::<8>(pair) };
        let twice = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(group, group));
        store_i16x16(&mut run_scales[0], twice);
        if let [_, high] = run_scales {
            store_i16x16(high, _mm256_slli_epi16::<4>(twice));
        }
    }
    let factors = if minima { by_group(rows, |row| &row.mins) } else { scales };
    let by = _mm256_set1_epi16(if minima { 1 } else { i16::from(zero) });
    for (sums, pair) in to.sums.iter_mut().zip(factors) {
        let pairs = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(pair, _mm_srli_si128::<8>(pair)));
        store_i16x16(sums, _mm256_mullo_epi16(pairs, by));
    }
    to.codes(layout, |first, codes| transpose(rows, first, zero, codes));
}

/// A byte of each row for each group, two groups to a vector: `[ROWS, 16]` to `[8, 2, ROWS]`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn by_group(rows: &[Unpacked; ROWS], of: impl Fn(&Unpacked) -> &[i8; 16]) -> [__m128i; 8] {
    let row = |r: usize| load_i8x16(of(&rows[r]));
    let halves = |a, b| [_mm_unpacklo_epi8(a, b), _mm_unpackhi_epi8(a, b)];
    // Of rows two by two, then four by four, then all.
    let two = [
        halves(row(0), row(1)),
        halves(row(2), row(3)),
        halves(row(4), row(5)),
        halves(row(6), row(7)),
    ];
    let quarters = |a: [__m128i; 2], b: [__m128i; 2]| {
        [
            _mm_unpacklo_epi16(a[0], b[0]),
            _mm_unpackhi_epi16(a[0], b[0]),
            _mm_unpacklo_epi16(a[1], b[1]),
            _mm_unpackhi_epi16(a[1], b[1]),
        ]
    };
    let (low, high) = (quarters(two[0], two[1]), quarters(two[2], two[3]));
    let mut all = [_mm_setzero_si128(); 8];
    for i in 0..4 {
        all[2 * i] = _mm_unpacklo_epi32(low[i], high[i]);
        all[2 * i + 1] = _mm_unpackhi_epi32(low[i], high[i]);
    }
    all
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn store_i16x16(values: &mut [i16; 16], v: __m256i) {
    // SAFETY: 32 bytes; the store may be unaligned.
    unsafe { _mm256_storeu_si256(values.as_mut_ptr().cast(), v) }
}

/// 32 codes of each row from value `first` on, raised by `zero`: `[ROWS, 8, 4]` to `[8, ROWS, 4]`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn transpose(rows: &[Unpacked; ROWS], first: usize, zero: u8, codes: &mut [u8; 32 * ROWS]) {
    let mut a = [_mm256_setzero_si256(); ROWS];
    for (a, row) in a.iter_mut().zip(rows) {
        let row: &[i8; 32] = row.codes[first..].first_chunk().expect("32 codes");
        *a = _mm256_add_epi8(load_i8x32(row), _mm256_set1_epi8(zero.cast_signed()));
    }
    let mut b = a;
    for i in 0..4 {
        b[2 * i] = _mm256_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm256_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
    }
    // Each half of `c[4·j + i]` has word `4·half + i` of rows `4·j ..`.
    let mut c = b;
    for j in 0..2 {
        c[4 * j] = _mm256_unpacklo_epi64(b[4 * j], b[4 * j + 2]);
        c[4 * j + 1] = _mm256_unpackhi_epi64(b[4 * j], b[4 * j + 2]);
        c[4 * j + 2] = _mm256_unpacklo_epi64(b[4 * j + 1], b[4 * j + 3]);
        c[4 * j + 3] = _mm256_unpackhi_epi64(b[4 * j + 1], b[4 * j + 3]);
    }
    let words = codes.as_chunks_mut::<{ 4 * ROWS }>().0;
    for i in 0..4 {
        let low = _mm256_permute2x128_si256::<0x20>(c[i], c[4 + i]);
        let high = _mm256_permute2x128_si256::<0x31>(c[i], c[4 + i]);
        // SAFETY: 32 bytes each; the stores may be unaligned.
        unsafe {
            _mm256_storeu_si256(words[i].as_mut_ptr().cast(), low);
            _mm256_storeu_si256(words[4 + i].as_mut_ptr().cast(), high);
        }
    }
}

/// All rows times a tile of columns. `WORDS` steps of four values share a sub-scale, `STEPS` of them fit 16 bits, and a
/// value has `PLANES` codes.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn tile<const WORDS: usize, const STEPS: usize, const MINIMA: bool, const PLANES: usize>(
    packed: &Packed,
    block: usize,
    xs: [Q8View<'_>; TILE],
) -> [__m256; TILE] {
    let (runs, pairs) = (block / (4 * WORDS), block / 32);
    let codes = packed.codes.as_chunks::<{ 4 * ROWS }>().0.as_chunks::<WORDS>().0;
    let codes = codes.as_chunks::<PLANES>().0.chunks_exact(runs);
    let scales = packed.scales.as_chunks::<{ 2 * ROWS }>().0.as_chunks::<PLANES>().0;
    let scales = scales.chunks_exact(runs);
    let sums = packed.sums.as_chunks::<{ 2 * ROWS }>().0.chunks_exact(pairs);
    // Loops and not `map`, here and below: its closures are no part of this function, and so calls.
    let mut quants: [&[[[i8; 4]; WORDS]]; TILE] = [&[]; TILE];
    let mut group_sums: [&[[i16; 2]]; TILE] = [&[]; TILE];
    for c in 0..TILE {
        quants[c] = xs[c].quants.as_chunks().0.as_chunks().0;
        group_sums[c] = xs[c].sums.as_chunks().0;
    }
    let mut acc = [_mm256_setzero_ps(); TILE];
    let blocks = packed.heads.iter().zip(codes).zip(scales.zip(sums));
    for (b, ((head, codes), (scales, sums))) in blocks.enumerate() {
        let mut isum = [_mm256_setzero_si256(); TILE];
        for run in 0..runs {
            let at = b * runs + run;
            let quants = [&quants[0][at], &quants[1][at], &quants[2][at], &quants[3][at]];
            for plane in 0..PLANES {
                let scale = load_i16x16(&scales[run][plane]);
                add_run::<WORDS, STEPS>(&codes[run][plane], quants, scale, &mut isum);
            }
        }
        let mut msum = [_mm256_setzero_si256(); TILE];
        for (pair, factors) in sums.iter().enumerate() {
            let factors = load_i16x16(factors);
            for c in 0..TILE {
                let products =
                    _mm256_madd_epi16(factors, two_to_all(&group_sums[c][b * pairs + pair]));
                msum[c] = _mm256_add_epi32(msum[c], products);
            }
        }
        let (scale, min_scale) = (load_f32x8(&head.scale), load_f32x8(&head.min_scale));
        for c in 0..TILE {
            let dx = _mm256_set1_ps(xs[c].scales[b]);
            let isum = if MINIMA { isum[c] } else { _mm256_sub_epi32(isum[c], msum[c]) };
            acc[c] = _mm256_fmadd_ps(_mm256_mul_ps(scale, dx), _mm256_cvtepi32_ps(isum), acc[c]);
            if MINIMA {
                let msum = _mm256_cvtepi32_ps(msum[c]);
                acc[c] = _mm256_fmadd_ps(_mm256_mul_ps(min_scale, dx), msum, acc[c]);
            }
        }
    }
    acc
}

/// Adds the products of a run of codes that share a sub-scale.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn add_run<const WORDS: usize, const STEPS: usize>(
    codes: &[[u8; 4 * ROWS]; WORDS],
    quants: [&[[i8; 4]; WORDS]; TILE],
    scale: __m256i,
    isum: &mut [__m256i; TILE],
) {
    const { assert!(WORDS.is_multiple_of(STEPS)) };
    for first in (0..WORDS).step_by(STEPS) {
        let mut sum = [_mm256_setzero_si256(); TILE];
        for k in first..first + STEPS {
            let w = load_u8x32(&codes[k]);
            for c in 0..TILE {
                let products = _mm256_maddubs_epi16(w, four_to_all(&quants[c][k]));
                sum[c] = if k == first { products } else { _mm256_add_epi16(sum[c], products) };
            }
        }
        for c in 0..TILE {
            isum[c] = _mm256_add_epi32(isum[c], _mm256_madd_epi16(sum[c], scale));
        }
    }
}

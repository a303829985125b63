//! Packed rows with `sdot`, which takes what the layout has: four codes of each row with four quants that all lanes
//! share, summed in 32 bits.
#![allow(unsafe_code, reason = "vector loads and stores take pointers")]
#![allow(clippy::wildcard_imports, reason = "a page of intrinsics says nothing")]
#![allow(clippy::needless_range_loop, reason = "columns index several arrays at once")]

use std::arch::aarch64::*;

use quant::{GROUP, Q8View, Unpacked};

use super::{Layout, Packed, ROWS, Rows, TILE};
use crate::cpu::sdot::{load_f32x4, load_i8x16, load_i16x8, sdot_part};

/// A value for each row.
type Lanes = [int32x4_t; 2];

/// See [`Rows::multiply`].
#[target_feature(enable = "neon,dotprod")]
pub(super) fn multiply<'x>(
    rows: &Rows<'_>,
    layout: Layout,
    packed: &mut Packed,
    n: usize,
    x: impl Fn(usize) -> Q8View<'x>,
    store: impl FnMut(usize, &[f32; ROWS]),
) {
    rows.unpack(|b, rows| {
        packed.block(layout, b).fill(layout, rows, |rows, first, zero, codes| {
            transpose(rows, first, zero, codes);
        });
    });
    let packed = &*packed;
    let block = rows.block_type.block_len();
    let tile = |xs| {
        let Layout { run, minima, halves, .. } = layout;
        match (run, minima, halves) {
            (32, true, false) => tile::<32, true, 1>(packed, block, xs),
            (32, false, false) => tile::<32, false, 1>(packed, block, xs),
            (32, true, true) => tile::<32, true, 2>(packed, block, xs),
            (32, false, true) => tile::<32, false, 2>(packed, block, xs),
            (16, true, false) => tile::<16, true, 1>(packed, block, xs),
            (16, false, false) => tile::<16, false, 1>(packed, block, xs),
            _ => unreachable!("{layout:?} is no type's layout"),
        }
    };
    rows.tiles(n, x, tile, store);
}

/// 32 codes of each row from value `first` on, raised by `zero`: `[ROWS, 8, 4]` to `[8, ROWS, 4]`.
#[target_feature(enable = "neon,dotprod")]
#[inline]
fn transpose(rows: &[Unpacked; ROWS], first: usize, zero: u8, codes: &mut [u8; 32 * ROWS]) {
    let words = codes.as_chunks_mut::<16>().0;
    let zero = vdupq_n_s8(zero.cast_signed());
    for (quarter, rows) in rows.as_chunks::<4>().0.iter().enumerate() {
        for half in 0..2 {
            let load = |row: &Unpacked| {
                let codes = row.codes[first + 16 * half..].first_chunk().expect("16 codes");
                vreinterpretq_s32_s8(vaddq_s8(load_i8x16(codes), zero))
            };
            let [a, b, c, d] = [load(&rows[0]), load(&rows[1]), load(&rows[2]), load(&rows[3])];
            let pairs = |a, b| {
                let (even, odd) = (vtrn1q_s32(a, b), vtrn2q_s32(a, b));
                (vreinterpretq_s64_s32(even), vreinterpretq_s64_s32(odd))
            };
            let ((even_ab, odd_ab), (even_cd, odd_cd)) = (pairs(a, b), pairs(c, d));
            let columns = [
                vtrn1q_s64(even_ab, even_cd),
                vtrn1q_s64(odd_ab, odd_cd),
                vtrn2q_s64(even_ab, even_cd),
                vtrn2q_s64(odd_ab, odd_cd),
            ];
            for (i, column) in columns.into_iter().enumerate() {
                let word = &mut words[2 * (4 * half + i) + quarter];
                // SAFETY: 16 bytes; the store may be unaligned.
                unsafe { vst1q_u8(word.as_mut_ptr(), vreinterpretq_u8_s64(column)) };
            }
        }
    }
}

/// All rows times a tile of columns. `RUN` values share a sub-scale, and a value has `PLANES` codes.
#[target_feature(enable = "neon,dotprod")]
#[inline]
fn tile<const RUN: usize, const MINIMA: bool, const PLANES: usize>(
    packed: &Packed,
    block: usize,
    xs: [Q8View<'_>; TILE],
) -> [[f32; ROWS]; TILE] {
    let runs = block / RUN * PLANES;
    let codes = packed.codes.as_chunks::<{ 4 * ROWS }>().0.chunks_exact(runs * RUN / 4);
    let scales = packed.scales.as_chunks::<{ 2 * ROWS }>().0.chunks_exact(runs);
    let sums = packed.sums.as_chunks::<{ 2 * ROWS }>().0.chunks_exact(block / 32);
    let mut acc = [[vdupq_n_f32(0.0); 2]; TILE];
    let blocks = packed.heads.iter().zip(codes).zip(scales.zip(sums));
    for (b, ((head, codes), (scales, sums))) in blocks.enumerate() {
        let mut isum = [[vdupq_n_s32(0); 2]; TILE];
        for (plane, (codes, scale)) in codes.chunks_exact(RUN / 4).zip(scales).enumerate() {
            let first = b * block + plane / PLANES * RUN;
            let sum = run_products(codes, xs.map(|x| &x.quants[first..first + RUN]));
            // Each scale is there twice, in halves of 32 bits.
            let scale = halves(scale)
                .map(|scale| vshrq_n_s32::<16>(vreinterpretq_s32_s16(load_i16x8(scale))));
            for c in 0..TILE {
                for h in 0..2 {
                    isum[c][h] = vmlaq_s32(isum[c][h], sum[c][h], scale[h]);
                }
            }
        }
        for c in 0..TILE {
            let group_sums = &xs[c].sums[b * block / GROUP..(b + 1) * block / GROUP];
            let msum = factor_sums(sums, group_sums.as_chunks().0);
            let dx = vdupq_n_f32(xs[c].scales[b]);
            for h in 0..2 {
                let isum = if MINIMA { isum[c][h] } else { vsubq_s32(isum[c][h], msum[h]) };
                let scale = vmulq_f32(load_f32x4(&head.scale.as_chunks().0[h]), dx);
                acc[c][h] = vfmaq_f32(acc[c][h], scale, vcvtq_f32_s32(isum));
                if MINIMA {
                    let scale = vmulq_f32(load_f32x4(&head.min_scale.as_chunks().0[h]), dx);
                    acc[c][h] = vfmaq_f32(acc[c][h], scale, vcvtq_f32_s32(msum[h]));
                }
            }
        }
    }
    let mut out = [[0.0; ROWS]; TILE];
    for (out, acc) in out.iter_mut().zip(acc) {
        for (out, acc) in out.as_chunks_mut::<4>().0.iter_mut().zip(acc) {
            // SAFETY: 16 bytes; the store may be unaligned.
            unsafe { vst1q_f32(out.as_mut_ptr(), acc) };
        }
    }
    out
}

/// Codes times quants of one run, for each column and row.
#[target_feature(enable = "neon,dotprod")]
#[inline]
fn run_products(codes: &[[u8; 4 * ROWS]], quants: [&[i8]; TILE]) -> [Lanes; TILE] {
    let mut sum = [[vdupq_n_s32(0); 2]; TILE];
    for (k, codes) in codes.as_chunks::<4>().0.iter().enumerate() {
        let mut x = [vdupq_n_s8(0); TILE];
        for c in 0..TILE {
            x[c] = load_i8x16(quants[c][16 * k..].first_chunk().expect("16 quants"));
        }
        for h in 0..2 {
            let w =
                [load(&codes[0], h), load(&codes[1], h), load(&codes[2], h), load(&codes[3], h)];
            for c in 0..TILE {
                sum[c][h] = sdot_part::<0>(sum[c][h], w[0], x[c]);
                sum[c][h] = sdot_part::<1>(sum[c][h], w[1], x[c]);
                sum[c][h] = sdot_part::<2>(sum[c][h], w[2], x[c]);
                sum[c][h] = sdot_part::<3>(sum[c][h], w[3], x[c]);
            }
        }
    }
    sum
}

/// Codes of half the rows. None has more than 7 bits, so signed bytes hold them.
#[target_feature(enable = "neon,dotprod")]
#[inline]
fn load(codes: &[u8; 4 * ROWS], half: usize) -> int8x16_t {
    load_i8x16(&codes.as_chunks::<16>().0[half].map(u8::cast_signed))
}

/// `Σ factor · sum` over pairs of groups, for each row.
#[target_feature(enable = "neon,dotprod")]
#[inline]
fn factor_sums(factors: &[[i16; 2 * ROWS]], sums: &[[i16; 2]]) -> Lanes {
    let mut acc = [vdupq_n_s32(0); 2];
    for (factors, [first, second]) in factors.iter().zip(sums) {
        let pair = i32::from(*first) & 0xffff | i32::from(*second) << 16;
        let pair = vreinterpretq_s16_s32(vdupq_n_s32(pair));
        for (acc, factors) in acc.iter_mut().zip(halves(factors)) {
            let factors = load_i16x8(factors);
            let low = vmull_s16(vget_low_s16(factors), vget_low_s16(pair));
            *acc = vaddq_s32(*acc, vpaddq_s32(low, vmull_high_s16(factors, pair)));
        }
    }
    acc
}

/// Those of the first rows, and of the others.
fn halves(values: &[i16; 2 * ROWS]) -> [&[i16; 8]; 2] {
    let [first, second] = values.as_chunks().0 else { unreachable!("two of eight") };
    [first, second]
}

//! MLX's affine formats: groups of 32, 64 or 128 unsigned codes of 2 to 8 bits, with a scale and a bias.
//!
//! Sums over lanes are taken for four products at a time: one weight row and up to four activation rows, or four weight
//! rows and one activation row. The latter also runs four of the chains that each row's sum is, side by side; one such
//! chain alone has two dependent steps a group and would be slower than memory.

use std::arch::x86_64::*;

use quant::{Affine, Q8View, ScaleType};

use super::{
    load_i8x16, load_i8x32, load_i16x4, load_i16x8, load_i16x16, load_u8x8, load_u8x16, load_u8x32,
    part, sum_lanes, to_array,
};

/// `out[c][o] = row o · xs[c]`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn rows<const N: usize>(
    affine: Affine,
    rows: &[u8],
    xs: [Q8View<'_>; N],
    out: [&mut [f32]; N],
) {
    // 32 codes take four bytes for each of their bits.
    match affine.bits() {
        2 => of_groups::<8, N>(affine, rows, xs, out),
        3 => of_groups::<12, N>(affine, rows, xs, out),
        4 => of_groups::<16, N>(affine, rows, xs, out),
        5 => of_groups::<20, N>(affine, rows, xs, out),
        6 => of_groups::<24, N>(affine, rows, xs, out),
        8 => of_groups::<32, N>(affine, rows, xs, out),
        bits => unreachable!("no format has codes of {bits} bits"),
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn of_groups<const RUN: usize, const N: usize>(
    affine: Affine,
    rows: &[u8],
    xs: [Q8View<'_>; N],
    out: [&mut [f32]; N],
) {
    let scales = affine.scales();
    match affine.group() {
        32 => Form::<RUN, 1, 2> { scales }.rows(rows, xs, out),
        64 => Form::<RUN, 2, 4> { scales }.rows(rows, xs, out),
        128 => Form::<RUN, 4, 8> { scales }.rows(rows, xs, out),
        group => unreachable!("no format has groups of {group}"),
    }
}

/// A format whose groups are `RUNS` runs of 32 codes, `RUN` bytes each, and have `SUMS` group sums of activations.
#[derive(Clone, Copy)]
struct Form<const RUN: usize, const RUNS: usize, const SUMS: usize> {
    scales: ScaleType,
}

/// An activation row: per block, its scale, quants and group sums.
#[derive(Clone, Copy)]
struct Activations<'a, const RUNS: usize, const SUMS: usize> {
    scales: &'a [f32],
    quants: &'a [[[i8; 32]; RUNS]],
    sums: &'a [[i16; SUMS]],
}

impl<'a, const RUNS: usize, const SUMS: usize> Activations<'a, RUNS, SUMS> {
    fn of(x: Q8View<'a>, blocks: usize) -> Self {
        Self {
            scales: &x.scales[..blocks],
            quants: &x.quants.as_chunks().0.as_chunks().0[..blocks],
            sums: &x.sums.as_chunks().0[..blocks],
        }
    }
}

impl<const RUN: usize, const RUNS: usize, const SUMS: usize> Form<RUN, RUNS, SUMS> {
    const fn block_bytes(self) -> usize {
        2 * self.scales.bytes() + RUN * RUNS
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    fn rows<const N: usize>(self, rows: &[u8], xs: [Q8View<'_>; N], mut out: [&mut [f32]; N]) {
        let row_bytes = xs[0].scales.len() * self.block_bytes();
        let mut done = 0;
        if N == 1 {
            for four in rows.chunks_exact(4 * row_bytes) {
                let mut rows = [four; 4];
                for i in 0..4 {
                    rows[i] = &four[i * row_bytes..(i + 1) * row_bytes];
                }
                out[0][done..done + 4].copy_from_slice(&self.dot_four(rows, xs[0]));
                done += 4;
            }
        }
        for row in rows.chunks_exact(row_bytes).skip(done) {
            for (out, y) in out.iter_mut().zip(self.dot(row, xs)) {
                out[done] = y;
            }
            done += 1;
        }
    }

    /// Four weight rows times one activation row.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    fn dot_four(self, rows: [&[u8]; 4], x: Q8View<'_>) -> [f32; 4] {
        let bytes = self.block_bytes();
        let x = Activations::<RUNS, SUMS>::of(x, x.scales.len());
        let first = rows[0].chunks_exact(bytes).zip(rows[1].chunks_exact(bytes));
        let second = rows[2].chunks_exact(bytes).zip(rows[3].chunks_exact(bytes));
        let activations = x.scales.iter().zip(x.quants).zip(x.sums);
        let mut acc = _mm_setzero_ps();
        for (((a, b), (c, d)), ((dx, quants), sums)) in first.zip(second).zip(activations) {
            let four = [a, b, c, d];
            let mut products = [_mm256_setzero_si256(); 4];
            for i in 0..4 {
                [products[i]] = Self::multiply(four[i], [quants]);
            }
            let isum = _mm_cvtepi32_ps(sum_lanes(products));
            let msum = _mm_cvtepi32_ps(sum_groups([sums; 4]));
            let (scales, biases) = self.heads(four);
            let dx = _mm_set1_ps(*dx);
            acc = _mm_fmadd_ps(_mm_mul_ps(scales, dx), isum, acc);
            acc = _mm_fmadd_ps(_mm_mul_ps(biases, dx), msum, acc);
        }
        to_array(acc)
    }

    /// One weight row times one to four activation rows.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    fn dot<const N: usize>(self, row: &[u8], xs: [Q8View<'_>; N]) -> [f32; N] {
        const { assert!(N <= 4) };
        let blocks = xs[0].scales.len();
        let xs = xs.map(|x| Activations::<RUNS, SUMS>::of(x, blocks));
        let mut acc = _mm_setzero_ps();
        for (b, block) in row.chunks_exact(self.block_bytes()).enumerate().take(blocks) {
            let mut quants = [&xs[0].quants[b]; N];
            let mut sums = [&xs[0].sums[b]; 4];
            let mut dx = [0.0; 4];
            for c in 0..N {
                quants[c] = &xs[c].quants[b];
                sums[c] = &xs[c].sums[b];
                dx[c] = xs[c].scales[b];
            }
            let mut products = [_mm256_setzero_si256(); 4];
            products[..N].copy_from_slice(&Self::multiply(block, quants));
            let isum = _mm_cvtepi32_ps(sum_lanes(products));
            let msum = _mm_cvtepi32_ps(sum_groups(sums));
            let (scale, bias) = self.heads([block; 4]);
            let dx = _mm_setr_ps(dx[0], dx[1], dx[2], dx[3]);
            acc = _mm_fmadd_ps(_mm_mul_ps(scale, dx), isum, acc);
            acc = _mm_fmadd_ps(_mm_mul_ps(bias, dx), msum, acc);
        }
        *to_array(acc).first_chunk().expect("at most four columns")
    }

    /// Scales and biases of four blocks.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    fn heads(self, blocks: [&[u8]; 4]) -> (__m128, __m128) {
        let pairs = words(blocks, 0);
        if self.scales == ScaleType::F32 {
            return (_mm_castsi128_ps(pairs), _mm_castsi128_ps(words(blocks, 4)));
        }
        if self.scales == ScaleType::F16 {
            let order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
            let singles = _mm256_cvtph_ps(_mm_shuffle_epi8(pairs, order));
            return (_mm256_castps256_ps128(singles), _mm256_extractf128_ps::<1>(singles));
        }
        let upper = _mm_set1_epi32(0xffff_0000_u32.cast_signed());
        let scales = _mm_slli_epi32::<16>(pairs);
        (_mm_castsi128_ps(scales), _mm_castsi128_ps(_mm_and_si128(pairs, upper)))
    }

    /// Products of a block's codes and quants, summed to eight lanes.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    fn multiply<const N: usize>(block: &[u8], quants: [&[[i8; 32]; RUNS]; N]) -> [__m256i; N] {
        let runs: &[[u8; RUN]; RUNS] = part(block[block.len() - RUN * RUNS..].as_chunks().0, 0);
        let mut sums = [_mm256_setzero_si256(); N];
        if RUN == 32 {
            // Products of whole bytes do not fit into 16 bits.
            for (r, run) in runs.iter().enumerate() {
                let low = _mm256_cvtepu8_epi16(load_u8x16(part(run, 0)));
                let high = _mm256_cvtepu8_epi16(load_u8x16(part(run, 16)));
                for c in 0..N {
                    let (x_low, x_high) = quants[c][r].split_at(16);
                    let x_low = _mm256_cvtepi8_epi16(load_i8x16(part(x_low, 0)));
                    let x_high = _mm256_cvtepi8_epi16(load_i8x16(part(x_high, 0)));
                    let products = _mm256_add_epi32(
                        _mm256_madd_epi16(low, x_low),
                        _mm256_madd_epi16(high, x_high),
                    );
                    sums[c] = _mm256_add_epi32(sums[c], products);
                }
            }
            return sums;
        }
        // Sums in 16 bits of two products each: four of them with codes of up to 5 bits (8 · 31 · 128 = 31,744), two
        // with 6 bits (4 · 63 · 128 = 32,256).
        let together = if RUN == 24 { 2 } else { 4 };
        for first in (0..RUNS).step_by(together) {
            let mut narrow = [_mm256_setzero_si256(); N];
            for r in first..RUNS.min(first + together) {
                let codes = unpack(&runs[r]);
                for c in 0..N {
                    let products = _mm256_maddubs_epi16(codes, load_i8x32(&quants[c][r]));
                    narrow[c] = _mm256_add_epi16(narrow[c], products);
                }
            }
            for c in 0..N {
                let wide = _mm256_madd_epi16(narrow[c], _mm256_set1_epi16(1));
                sums[c] = _mm256_add_epi32(sums[c], wide);
            }
        }
        sums
    }
}

/// The 32 bits at byte `at` of four blocks.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn words(blocks: [&[u8]; 4], at: usize) -> __m128i {
    // No closures here and below: where they go through `array::map`, they stay calls, since that is compiled without
    // these instructions.
    let mut words = [0; 4];
    for i in 0..4 {
        words[i] = i32::from_le_bytes(*part(blocks[i], at));
    }
    _mm_setr_epi32(words[0], words[1], words[2], words[3])
}

/// Sums of the group sums of four blocks.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn sum_groups<const SUMS: usize>(blocks: [&[i16; SUMS]; 4]) -> __m128i {
    let one = _mm_set1_epi16(1);
    let mut sums = [_mm_setzero_si128(); 4];
    match SUMS {
        2 => {
            let mut pairs = [0; 4];
            for i in 0..4 {
                pairs[i] = i32::from(blocks[i][0]) & 0xffff | i32::from(blocks[i][1]) << 16;
            }
            return _mm_madd_epi16(_mm_setr_epi32(pairs[0], pairs[1], pairs[2], pairs[3]), one);
        }
        4 => {
            for i in 0..4 {
                sums[i] = load_i16x4(part(blocks[i], 0));
            }
            let first = _mm_madd_epi16(_mm_unpacklo_epi64(sums[0], sums[1]), one);
            let second = _mm_madd_epi16(_mm_unpacklo_epi64(sums[2], sums[3]), one);
            return _mm_hadd_epi32(first, second);
        }
        _ => {}
    }
    for i in 0..4 {
        sums[i] = _mm_madd_epi16(load_i16x8(part(blocks[i], 0)), one);
    }
    _mm_hadd_epi32(_mm_hadd_epi32(sums[0], sums[1]), _mm_hadd_epi32(sums[2], sums[3]))
}

/// 32 codes of up to 6 bits, in order.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn unpack<const RUN: usize>(run: &[u8; RUN]) -> __m256i {
    if RUN == 16 {
        // Each byte to 16 bits, its upper half to the next byte.
        let bytes = _mm256_cvtepu8_epi16(load_u8x16(part(run, 0)));
        let spread = _mm256_or_si256(bytes, _mm256_slli_epi16::<4>(bytes));
        return _mm256_and_si256(spread, _mm256_set1_epi8(15));
    }
    let (low, high) = match RUN {
        8 => {
            let all = load_u8x8(*part(run, 0));
            (all, all)
        }
        12 => {
            let rest = i32::from_le_bytes(*part(run, 8));
            let all = _mm_insert_epi32::<2>(load_u8x8(*part(run, 0)), rest);
            (all, all)
        }
        _ => (load_u8x16(part(run, 0)), load_u8x16(part(run, RUN - 16))),
    };
    let bytes = _mm256_set_m128i(high, low);
    // A code lies in two neighbouring bytes: these to 16 bits, the code to the top of them, and down.
    let top = load_i16x16(const { &to_top(RUN / 4) });
    let down = _mm_cvtsi32_si128(16 - RUN as i32 / 4);
    let first = _mm256_shuffle_epi8(bytes, load_u8x32(const { &byte_pairs(RUN, 0) }));
    let second = _mm256_shuffle_epi8(bytes, load_u8x32(const { &byte_pairs(RUN, 8) }));
    _mm256_packus_epi16(
        _mm256_srl_epi16(_mm256_mullo_epi16(first, top), down),
        _mm256_srl_epi16(_mm256_mullo_epi16(second, top), down),
    )
}

/// Where the bytes of codes `first ..` lie in the lower lane, and those of `first + 16 ..` in the upper lane, which
/// holds the last 16 bytes of a run, or all if there are fewer. Bytes that no code needs are zero.
const fn byte_pairs(run: usize, first: usize) -> [u8; 32] {
    let bits = run / 4;
    let upper_starts = run.saturating_sub(16);
    let mut pairs = [0x80; 32];
    let mut i = 0;
    while i < 16 {
        let (code, lane_starts) =
            if i < 8 { (first + i, 0) } else { (first + 8 + i, upper_starts) };
        let byte = code * bits / 8 - lane_starts;
        pairs[2 * i] = byte as u8;
        if code * bits % 8 + bits > 8 {
            pairs[2 * i + 1] = byte as u8 + 1;
        }
        i += 1;
    }
    pairs
}

/// Factors that move codes, which start at bit `bits · i % 8`, to the top of 16 bits.
const fn to_top(bits: usize) -> [i16; 16] {
    let mut factors = [0; 16];
    let mut i = 0;
    while i < 16 {
        factors[i] = (1_u16 << (16 - bits - bits * i % 8)).cast_signed();
        i += 1;
    }
    factors
}

//! Formats with blocks of 256 whose codes name levels or short vectors: the "IQ" family.
//!
//! Grid values, signs applied, lie between -62 and 62. With 64 added they are unsigned and below 128, and so fit the
//! walk of [`super_blocks`](super::super_blocks): 2 · 126 · 128 = 32,256 does not saturate. Sub-scales are the odd
//! numbers `2t + 1`.

use std::arch::x86_64::*;

use quant::codebook::{self, even_signs};
use quant::{Q8View, f16_to_f32};

use super::super_blocks::{Head, OFFSETS, dot, dot_with, split_runs};
use super::{bit_mask, half, levels, load_u8x16, nibbles_32, part};

/// Added to every code.
const OFFSET_LOG2: i32 = 6;

/// [`even_signs`] of every index.
static EVEN_SIGNS: [u8; 128] = {
    let mut signs = [0; 128];
    let mut i = 0;
    while i < 128 {
        signs[i] = even_signs(i as u8);
        i += 1;
    }
    signs
};

/// A head with sub-scales `2t + 1`, `t` for each run of 16.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn head(d: f32, t: &[u8; 16]) -> Head {
    let t = load_u8x16(t);
    let scales = _mm_add_epi8(_mm_add_epi8(t, t), _mm_set1_epi8(1));
    Head {
        d,
        min: 0.0,
        scales: split_runs(scales),
        sums: _mm256_slli_epi16::<OFFSET_LOG2>(_mm256_cvtepi8_epi16(scales)),
    }
}

/// `t` of 16 runs from eight bytes at `at`, two nibbles each.
#[inline]
fn nibbles_of_16(block: &[u8], at: usize) -> [u8; 16] {
    let packed: &[u8; 8] = part(block, at);
    let mut t = [0; 16];
    for (pair, byte) in t.as_chunks_mut::<2>().0.iter_mut().zip(packed) {
        *pair = [byte & 15, byte >> 4];
    }
    t
}

/// `t` of 16 runs where two share it.
#[inline]
fn shared_by_two(t: impl Fn(usize) -> u8) -> [u8; 16] {
    let mut all = [0; 16];
    for (run, pair) in all.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        pair.fill(t(run));
    }
    all
}

/// Four entries of eight values.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn eights<const M: usize>(grid: &[[i8; 8]; M], index: impl Fn(usize) -> usize) -> __m256i {
    let entry = |l: usize| i64::from_le_bytes(grid[index(l) % M].map(i8::cast_unsigned));
    _mm256_setr_epi64x(entry(0), entry(1), entry(2), entry(3))
}

/// Eight entries of four values.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn fours<const M: usize>(grid: &[[i8; 4]; M], index: impl Fn(usize) -> usize) -> __m256i {
    let entry = |l: usize| i32::from_le_bytes(grid[index(l) % M].map(i8::cast_unsigned));
    let (a, b, c, d) = (entry(0), entry(1), entry(2), entry(3));
    _mm256_setr_epi32(a, b, c, d, entry(4), entry(5), entry(6), entry(7))
}

/// Negates the values whose sign bit is set, and adds the offset.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn signed(values: __m256i, signs: u32) -> __m256i {
    let negative = bit_mask(signs);
    let signed = _mm256_sub_epi8(_mm256_xor_si256(values, negative), negative);
    _mm256_add_epi8(signed, _mm256_set1_epi8(1 << OFFSET_LOG2))
}

/// Four sign bytes from four 7-bit indices.
#[inline]
fn signs_of(index: impl Fn(usize) -> usize) -> u32 {
    u32::from_le_bytes([0, 1, 2, 3].map(|l| EVEN_SIGNS[index(l) & 127]))
}

/// Four sign bytes from a word's low 28 bits.
#[inline]
fn signs_of_word(word: u32) -> u32 {
    signs_of(|l| (word >> (7 * l)) as usize)
}

#[inline]
fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(*part(block, at))
}

#[inline]
fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(*part(block, at))
}

/// Runs `4·n ..` of a block.
macro_rules! runs {
    ($n:ident, $run:expr) => {
        [$run(4 * $n), $run(4 * $n + 1), $run(4 * $n + 2), $run(4 * $n + 3)]
    };
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn iq2_xxs<const N: usize>(row: &[u8], xs: [Q8View<'_>; N]) -> [f32; N] {
    let head = |block: &[u8; 66]| {
        let t = shared_by_two(|run| (u32_at(block, 6 + 8 * run) >> 28) as u8);
        head(half(block, 0) * 0.125, &t)
    };
    let codes = |block: &[u8; 66], n: usize| {
        let run = |run: usize| {
            let index = |l: usize| usize::from(block[2 + 8 * run + l]);
            let values = eights(&codebook::IQ2_XXS, index);
            signed(values, signs_of_word(u32_at(block, 6 + 8 * run)))
        };
        runs!(n, run)
    };
    dot::<66, OFFSETS, N>(row, xs, head, codes)
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn iq2_xs<const N: usize>(row: &[u8], xs: [Q8View<'_>; N]) -> [f32; N] {
    let head = |block: &[u8; 74]| head(half(block, 0) * 0.125, &nibbles_of_16(block, 66));
    let codes = |block: &[u8; 74], n: usize| {
        let run = |run: usize| {
            let code = |l: usize| usize::from(u16_at(block, 2 + 2 * (4 * run + l)));
            let values = eights(&codebook::IQ2_XS, |l| code(l) & 511);
            signed(values, signs_of(|l| code(l) >> 9))
        };
        runs!(n, run)
    };
    dot::<74, OFFSETS, N>(row, xs, head, codes)
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn iq2_s<const N: usize>(row: &[u8], xs: [Q8View<'_>; N]) -> [f32; N] {
    let head = |block: &[u8; 82]| head(half(block, 0) * 0.125, &nibbles_of_16(block, 74));
    let codes = |block: &[u8; 82], n: usize| {
        let run = |run: usize| {
            let high = usize::from(block[66 + run]);
            let index =
                |l: usize| usize::from(block[2 + 4 * run + l]) | ((high >> (2 * l)) & 3) << 8;
            signed(eights(&codebook::IQ2_S, index), u32_at(block, 34 + 4 * run))
        };
        runs!(n, run)
    };
    dot::<82, OFFSETS, N>(row, xs, head, codes)
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn iq3_xxs<const N: usize>(row: &[u8], xs: [Q8View<'_>; N]) -> [f32; N] {
    let head = |block: &[u8; 98]| {
        let t = shared_by_two(|run| (u32_at(block, 66 + 4 * run) >> 28) as u8);
        head(half(block, 0) * 0.25, &t)
    };
    let codes = |block: &[u8; 98], n: usize| {
        let run = |run: usize| {
            let index = |l: usize| usize::from(block[2 + 8 * run + l]);
            let values = fours(&codebook::IQ3_XXS, index);
            signed(values, signs_of_word(u32_at(block, 66 + 4 * run)))
        };
        runs!(n, run)
    };
    dot::<98, OFFSETS, N>(row, xs, head, codes)
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn iq3_s<const N: usize>(row: &[u8], xs: [Q8View<'_>; N]) -> [f32; N] {
    let head = |block: &[u8; 110]| {
        let t = shared_by_two(|run| (block[106 + run / 2] >> (4 * (run & 1))) & 15);
        head(half(block, 0), &t)
    };
    let codes = |block: &[u8; 110], n: usize| {
        let run = |run: usize| {
            let high = usize::from(block[66 + run]);
            let index = |l: usize| usize::from(block[2 + 8 * run + l]) | ((high >> l) & 1) << 8;
            signed(fours(&codebook::IQ3_S, index), u32_at(block, 74 + 4 * run))
        };
        runs!(n, run)
    };
    dot::<110, OFFSETS, N>(row, xs, head, codes)
}

/// Eight times the grid's -1, 0 or 1, plus 1 or, where `minus` is all ones, -1; plus the offset.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn shifted(grid: __m256i, minus: __m256i) -> __m256i {
    let two = _mm256_add_epi8(grid, grid);
    let four = _mm256_add_epi8(two, two);
    let eight = _mm256_add_epi8(four, four);
    // 1 becomes -1 under two's complement: -1 | 1 = -1, 0 | 1 = 1.
    let shift = _mm256_or_si256(minus, _mm256_set1_epi8(1));
    _mm256_add_epi8(_mm256_add_epi8(eight, shift), _mm256_set1_epi8(1 << OFFSET_LOG2))
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn iq1_s<const N: usize>(row: &[u8], xs: [Q8View<'_>; N]) -> [f32; N] {
    let head = |block: &[u8; 50]| {
        let t = shared_by_two(|run| (u16_at(block, 34 + 2 * run) >> 12) as u8 & 7);
        head(half(block, 0) * 0.125, &t)
    };
    let codes = |block: &[u8; 50], n: usize| {
        let run = |run: usize| {
            let h = usize::from(u16_at(block, 34 + 2 * run));
            let index = |l: usize| usize::from(block[2 + 4 * run + l]) | ((h >> (3 * l)) & 7) << 8;
            let minus = _mm256_set1_epi8(-i8::from(h & 0x8000 != 0));
            shifted(eights(&codebook::IQ1, index), minus)
        };
        runs!(n, run)
    };
    dot::<50, OFFSETS, N>(row, xs, head, codes)
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn iq1_m<const N: usize>(row: &[u8], xs: [Q8View<'_>; N]) -> [f32; N] {
    let head = |block: &[u8; 56]| {
        let c = [0, 1, 2, 3].map(|j| u16_at(block, 48 + 2 * j));
        let d = (c[0] >> 12) | ((c[1] >> 8) & 0xf0) | ((c[2] >> 4) & 0xf00) | (c[3] & 0xf000);
        let mut t = [0; 16];
        for (g, t) in t.iter_mut().enumerate() {
            *t = (c[g / 4] >> (3 * (g % 4))) as u8 & 7;
        }
        head(f16_to_f32(d) * 0.125, &t)
    };
    let codes = |block: &[u8; 56], n: usize| {
        let run = |run: usize| {
            let h = usize::from(u16_at(block, 32 + 2 * run));
            let index = |l: usize| usize::from(block[4 * run + l]) | ((h >> (4 * l)) & 7) << 8;
            let minus = |l: usize| -i64::from((h >> (4 * l)) & 8 != 0);
            let minus = _mm256_setr_epi64x(minus(0), minus(1), minus(2), minus(3));
            shifted(eights(&codebook::IQ1, index), minus)
        };
        runs!(n, run)
    };
    dot::<56, OFFSETS, N>(row, xs, head, codes)
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn iq4_xs<const N: usize>(row: &[u8], xs: [Q8View<'_>; N]) -> [f32; N] {
    let head = |block: &[u8; 136]| {
        let high = u16_at(block, 2);
        let scale = |run: usize| {
            let low = (block[4 + run / 2] >> (4 * (run & 1))) & 15;
            (low | ((high >> (2 * run)) as u8 & 3) << 4).wrapping_sub(32)
        };
        let scales = split_runs(load_u8x16(&shared_by_two(scale)));
        Head { d: half(block, 0), min: 0.0, scales, sums: _mm256_setzero_si256() }
    };
    let codes = |block: &[u8; 136], n: usize| {
        let run = |run: usize| levels(&codebook::IQ4, nibbles_32(block, 8 + 16 * run));
        runs!(n, run)
    };
    // Levels reach -127, too large for `maddubs`, but not for 16 bits when multiplied by a scale of at most 32. Both
    // runs of 16 have the same scale, so any element of it will do.
    let multiply = |codes: __m256i, x: &[i8; 32], scale: __m256i| {
        let low = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(codes));
        let high = _mm256_cvtepi8_epi16(_mm256_extracti128_si256::<1>(codes));
        let x_low = _mm256_cvtepi8_epi16(super::load_i8x16(part(x, 0)));
        let x_high = _mm256_cvtepi8_epi16(super::load_i8x16(part(x, 16)));
        _mm256_add_epi32(
            _mm256_madd_epi16(_mm256_mullo_epi16(low, scale), x_low),
            _mm256_madd_epi16(_mm256_mullo_epi16(high, scale), x_high),
        )
    };
    dot_with::<136, OFFSETS, N>(row, xs, head, codes, multiply)
}

//! Interleaved rows with AVX2: a lane of a vector is a weight row, as in [`crate::cpu::packed`], but codes stay as small
//! as they are in the file and are taken apart in registers.
//!
//! `maddubs` multiplies four codes of each row with four quants that all lanes share, and adds pairs in 16 bits, where
//! several such sums fit. One `madd` with the sub-scales widens them.
#![allow(clippy::wildcard_imports, reason = "a page of intrinsics says nothing")]
#![allow(clippy::needless_range_loop, reason = "columns index several arrays at once")]

use std::arch::x86_64::*;

use quant::{BlockType, Q8View};

use crate::cpu::dot::avx2::{four_to_all, load_u8x16, load_u8x32, store_f32x8, two_to_all};
use crate::interleave::ROWS;

/// A word of each row.
type Words = [u8; 4 * ROWS];

/// `out[c][o] = row o · xs[c]`; `groups` is `[out[c].len() / ROWS]` groups.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn rows_q8<const N: usize>(
    ty: BlockType,
    groups: &[u8],
    xs: [Q8View<'_>; N],
    mut out: [&mut [f32]; N],
) {
    let count = out[0].len() / ROWS;
    for (g, group) in groups.chunks_exact(groups.len() / count.max(1)).enumerate() {
        let products = match ty {
            BlockType::Q4K => q4_k(group, xs),
            BlockType::Q6K => q6_k(group, xs),
            _ => unreachable!("{ty} rows are not interleaved"),
        };
        for (out, y) in out.iter_mut().zip(products) {
            store_f32x8(&mut out.as_chunks_mut::<ROWS>().0[g], y);
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn q4_k<const N: usize>(group: &[u8], xs: [Q8View<'_>; N]) -> [__m256; N] {
    let blocks = group.as_chunks::<{ 4 * ROWS }>().0.as_chunks::<36>().0;
    let x = columns(xs, blocks.len());
    let mut acc = [_mm256_setzero_ps(); N];
    for (b, block) in blocks.iter().enumerate() {
        let [d, d_min] = two_halves(&block[0]);
        let (scales, minima) = scales_k4([&block[1], &block[2], &block[3]]);
        let codes: &[[Words; 8]; 4] = block[4..].as_chunks().0.first_chunk().expect("32 words");
        let mut isum = [_mm256_setzero_si256(); N];
        for half in 0..2 {
            let of_runs = scales[half];
            let first = [unsigned(of_runs, 0), unsigned(of_runs, 1)];
            add_nibbles(&codes[2 * half], &x, (b, 4 * half), first, &mut isum);
            let second = [unsigned(of_runs, 2), unsigned(of_runs, 3)];
            add_nibbles(&codes[2 * half + 1], &x, (b, 4 * half + 2), second, &mut isum);
        }
        let mut msum = [_mm256_setzero_si256(); N];
        for half in 0..2 {
            for run in 0..4 {
                let factors = unsigned(minima[half], run);
                for c in 0..N {
                    let sums = two_to_all(&x[c].sums[b][4 * half + run]);
                    msum[c] = _mm256_add_epi32(msum[c], _mm256_madd_epi16(factors, sums));
                }
            }
        }
        for c in 0..N {
            let dx = _mm256_set1_ps(x[c].scales[b]);
            acc[c] = _mm256_fmadd_ps(_mm256_mul_ps(d, dx), _mm256_cvtepi32_ps(isum[c]), acc[c]);
            let min = _mm256_mul_ps(d_min, dx);
            acc[c] = _mm256_fnmadd_ps(min, _mm256_cvtepi32_ps(msum[c]), acc[c]);
        }
    }
    acc
}

/// Adds runs `first` and `first + 1` of block `b`: low nibbles and high ones. Eight sums of two products of at most 15 · 128 fit 16 bits.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn add_nibbles<const N: usize>(
    codes: &[Words; 8],
    x: &[Columns<'_>; N],
    (b, first): (usize, usize),
    scales: [__m256i; 2],
    isum: &mut [__m256i; N],
) {
    let mut sums = [[_mm256_setzero_si256(); 2]; N];
    for w in 0..8 {
        let codes = nibbles(load_u8x32(&codes[w]));
        for c in 0..N {
            for k in 0..2 {
                let products =
                    _mm256_maddubs_epi16(codes[k], four_to_all(&x[c].quants[b][first + k][w]));
                sums[c][k] = if w == 0 { products } else { _mm256_add_epi16(sums[c][k], products) };
            }
        }
    }
    for c in 0..N {
        for k in 0..2 {
            isum[c] = _mm256_add_epi32(isum[c], _mm256_madd_epi16(sums[c][k], scales[k]));
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn q6_k<const N: usize>(group: &[u8], xs: [Q8View<'_>; N]) -> [__m256; N] {
    let blocks = group.as_chunks::<{ 210 * ROWS }>().0;
    let x = columns(xs, blocks.len());
    let mut acc = [_mm256_setzero_ps(); N];
    for (b, block) in blocks.iter().enumerate() {
        let words: &[Words; 52] = block.as_chunks().0.first_chunk().expect("52 words");
        let codes: &[[[Words; 3]; 8]; 2] =
            words[4..].as_chunks().0.as_chunks().0.first_chunk().expect("48 words");
        let d = _mm256_cvtph_ps(load_u8x16(block[208 * ROWS..].first_chunk().expect("halves")));
        let mut isum = [_mm256_setzero_si256(); N];
        let mut msum = [_mm256_setzero_si256(); N];
        for n in 0..2 {
            let scales = [load_u8x32(&words[2 * n]), load_u8x32(&words[2 * n + 1])];
            add_sixes::<0, N>(&codes[n], &x, (b, 4 * n), scales, &mut isum);
            add_sixes::<1, N>(&codes[n], &x, (b, 4 * n), scales, &mut isum);
            for pair in 0..4 {
                let factors = signed_pair(scales[pair / 2], pair % 2);
                for c in 0..N {
                    let sums = two_to_all(&x[c].sums[b][4 * n + pair]);
                    msum[c] = _mm256_add_epi32(msum[c], _mm256_madd_epi16(factors, sums));
                }
            }
        }
        for c in 0..N {
            let isum = _mm256_sub_epi32(isum[c], _mm256_slli_epi32::<5>(msum[c]));
            let dx = _mm256_set1_ps(x[c].scales[b]);
            acc[c] = _mm256_fmadd_ps(_mm256_mul_ps(d, dx), _mm256_cvtepi32_ps(isum), acc[c]);
        }
    }
    acc
}

/// Adds four runs of 16, the first or second `HALF` of each 32 from `first` on in block `b`. Two sums of two products of at
/// most 63 · 128 fit 16 bits.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn add_sixes<const HALF: usize, const N: usize>(
    codes: &[[Words; 3]; 8],
    x: &[Columns<'_>; N],
    (b, first): (usize, usize),
    scales: [__m256i; 2],
    isum: &mut [__m256i; N],
) {
    let [low, high] = scales;
    let at = [HALF, 2 + HALF];
    let low = [signed(low, at[0]), signed(low, at[1])];
    let scale = [low[0], low[1], signed(high, at[0]), signed(high, at[1])];
    for w in [4 * HALF, 4 * HALF + 2] {
        let codes = [sixes(&codes[w]), sixes(&codes[w + 1])];
        for k in 0..4 {
            for c in 0..N {
                let x = &x[c].quants[b][first + k];
                let one = _mm256_maddubs_epi16(codes[0][k], four_to_all(&x[w]));
                let two = _mm256_maddubs_epi16(codes[1][k], four_to_all(&x[w + 1]));
                let products = _mm256_madd_epi16(_mm256_add_epi16(one, two), scale[k]);
                isum[c] = _mm256_add_epi32(isum[c], products);
            }
        }
    }
}

/// An activation row by blocks.
#[derive(Clone, Copy)]
struct Columns<'a> {
    /// Runs of 32, four to a word.
    quants: &'a [[[[i8; 4]; 8]; 8]],
    /// Of two groups each.
    sums: &'a [[[i16; 2]; 8]],
    scales: &'a [f32],
}

/// Loops and not `map`, here and above: its closures would be no part of these functions, and so calls.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn columns<const N: usize>(xs: [Q8View<'_>; N], blocks: usize) -> [Columns<'_>; N] {
    let mut columns = [Columns { quants: &[], sums: &[], scales: &[] }; N];
    for (column, x) in columns.iter_mut().zip(xs) {
        column.quants = &x.quants.as_chunks().0.as_chunks().0.as_chunks().0[..blocks];
        column.sums = &x.sums.as_chunks().0.as_chunks().0[..blocks];
        column.scales = &x.scales[..blocks];
    }
    columns
}

/// Low and high nibbles.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn nibbles(v: __m256i) -> [__m256i; 2] {
    let mask = _mm256_set1_epi8(15);
    [_mm256_and_si256(v, mask), _mm256_and_si256(_mm256_srli_epi16::<4>(v), mask)]
}

/// Codes of `Q6_K` that are 32 values apart.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn sixes(words: &[Words; 3]) -> [__m256i; 4] {
    let [a, c] = nibbles(load_u8x32(&words[0]));
    let [b, d] = nibbles(load_u8x32(&words[1]));
    let high = load_u8x32(&words[2]);
    let mask = _mm256_set1_epi8(0x30);
    [
        _mm256_or_si256(a, _mm256_and_si256(_mm256_slli_epi16::<4>(high), mask)),
        _mm256_or_si256(b, _mm256_and_si256(_mm256_slli_epi16::<2>(high), mask)),
        _mm256_or_si256(c, _mm256_and_si256(high, mask)),
        _mm256_or_si256(d, _mm256_and_si256(_mm256_srli_epi16::<2>(high), mask)),
    ]
}

/// The 6-bit sub-scales and minima of `Q4_K` and `Q5_K`: of runs 0 to 3, then 4 to 7, one in each byte of a row's word.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn scales_k4(words: [&Words; 3]) -> ([__m256i; 2], [__m256i; 2]) {
    let (a, b, c) = (load_u8x32(words[0]), load_u8x32(words[1]), load_u8x32(words[2]));
    let six = _mm256_set1_epi8(0x3f);
    let (four, top) = (_mm256_set1_epi8(0x0f), _mm256_set1_epi8(0x30));
    let high = |low4: __m256i, top2: __m256i| {
        let top = _mm256_and_si256(_mm256_srli_epi16::<2>(top2), top);
        _mm256_or_si256(_mm256_and_si256(low4, four), top)
    };
    let scales = [_mm256_and_si256(a, six), high(c, a)];
    let minima = [_mm256_and_si256(b, six), high(_mm256_srli_epi16::<4>(c), b)];
    (scales, minima)
}

/// Byte `at` of each word, twice, as 16 bits.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn unsigned(words: __m256i, at: usize) -> __m256i {
    let pick = 0x8000_8000_u32 | (at as u32) << 16 | at as u32;
    _mm256_shuffle_epi8(words, each_word(pick))
}

/// The same of signed bytes.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn signed(words: __m256i, at: usize) -> __m256i {
    let pick = 0x0080_0080_u32 | (at as u32) << 24 | (at as u32) << 8;
    _mm256_srai_epi16::<8>(_mm256_shuffle_epi8(words, each_word(pick)))
}

/// Bytes `2·at` and `2·at + 1` of each word, as signed 16 bits.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn signed_pair(words: __m256i, at: usize) -> __m256i {
    let at = 2 * at as u32;
    let pick = 0x0080_0080_u32 | (at + 1) << 24 | at << 8;
    _mm256_srai_epi16::<8>(_mm256_shuffle_epi8(words, each_word(pick)))
}

/// What `pick` names in the first word of four, named in each.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn each_word(pick: u32) -> __m256i {
    let word = |i: u32| {
        let mut bytes = pick.to_le_bytes();
        for byte in &mut bytes {
            if *byte < 0x80 {
                *byte += 4 * i as u8;
            }
        }
        i32::from_le_bytes(bytes)
    };
    let four = _mm_setr_epi32(word(0), word(1), word(2), word(3));
    _mm256_broadcastsi128_si256(four)
}

/// Two halves of each word, as floats.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn two_halves(words: &Words) -> [__m256; 2] {
    let v = load_u8x32(words);
    let low = _mm256_and_si256(v, _mm256_set1_epi32(0xffff));
    let both = _mm256_packus_epi32(low, _mm256_srli_epi32::<16>(v));
    let both = _mm256_permute4x64_epi64::<0b11_01_10_00>(both);
    let high = _mm256_extracti128_si256::<1>(both);
    [_mm256_cvtph_ps(_mm256_castsi256_si128(both)), _mm256_cvtph_ps(high)]
}

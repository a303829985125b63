//! Float products: 16 virtual lanes in two registers, then the fixed tree.

use std::arch::x86_64::*;

use quant::ScaleType;
use quant::lanes::{LANES, tree};

use super::{half, load_f32x8, load_u8x16, load_u8x32, part, store_f32x8};

/// A float storage type: how 8 values load, and one.
struct Values<V, O> {
    /// Values `8·i ..` of a row.
    eight: V,
    /// Value `i` of a row.
    one: O,
}

/// `Σ w·x` for `N` activation rows, equal to [`quant::lanes::dot`] on the converted weights.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn dot<const N: usize>(
    xs: [&[f32]; N],
    weights: &Values<impl Fn(usize) -> __m256, impl Fn(usize) -> f32>,
) -> [f32; N] {
    let n = xs.first().map_or(0, |x| x.len());
    let chunks = xs.map(|x| &x.as_chunks::<LANES>().0[..n / LANES]);
    let mut low = [_mm256_setzero_ps(); N];
    let mut high = [_mm256_setzero_ps(); N];
    for i in 0..n / LANES {
        let (w_low, w_high) = ((weights.eight)(2 * i), (weights.eight)(2 * i + 1));
        for c in 0..N {
            let x = &chunks[c][i];
            low[c] = _mm256_fmadd_ps(w_low, load_f32x8(part(x, 0)), low[c]);
            high[c] = _mm256_fmadd_ps(w_high, load_f32x8(part(x, 8)), high[c]);
        }
    }
    let mut sums = [0.0; N];
    for c in 0..N {
        let mut lanes = to_lanes(low[c], high[c]);
        let done = n - n % LANES;
        for (i, (lane, x)) in lanes.iter_mut().zip(&xs[c][done..]).enumerate() {
            *lane = (weights.one)(done + i).mul_add(*x, *lane);
        }
        sums[c] = tree(lanes);
    }
    sums
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn to_lanes(low: __m256, high: __m256) -> [f32; LANES] {
    let mut lanes = [0.0; LANES];
    let halves = lanes.as_chunks_mut::<8>().0;
    store_f32x8(&mut halves[0], low);
    store_f32x8(&mut halves[1], high);
    lanes
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn decoded<const N: usize>(row: &[f32], xs: [&[f32]; N]) -> [f32; N] {
    let eight = |i: usize| load_f32x8(&row.as_chunks().0[i]);
    dot(xs, &Values { eight, one: |i: usize| row[i] })
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn f32<const N: usize>(row: &[u8], xs: [&[f32]; N]) -> [f32; N] {
    let eight = |i: usize| _mm256_castsi256_ps(load_u8x32(&row.as_chunks().0[i]));
    dot(xs, &Values { eight, one: |i: usize| f32::from_le_bytes(row.as_chunks().0[i]) })
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn f16<const N: usize>(row: &[u8], xs: [&[f32]; N]) -> [f32; N] {
    let eight = |i: usize| _mm256_cvtph_ps(load_u8x16(&row.as_chunks().0[i]));
    dot(xs, &Values { eight, one: |i: usize| half(row, 2 * i) })
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn bf16<const N: usize>(row: &[u8], xs: [&[f32]; N]) -> [f32; N] {
    let eight = |i: usize| {
        let bits = _mm256_cvtepu16_epi32(load_u8x16(&row.as_chunks().0[i]));
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
    };
    let one = |i: usize| quant::bf16_to_f32(u16::from_le_bytes(row.as_chunks().0[i]));
    dot(xs, &Values { eight, one })
}

/// E4M3 floats without scales: no matrix of a model is stored like that, so the definition's conversion is fast enough.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn e4m3<const N: usize>(row: &[u8], xs: [&[f32]; N]) -> [f32; N] {
    let eight = |i: usize| load_f32x8(&row.as_chunks::<8>().0[i].map(quant::f8_to_f32));
    dot(xs, &Values { eight, one: |i: usize| quant::f8_to_f32(row[i]) })
}

/// Blocks of 128 E4M3 floats behind a scale.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn fp8<const N: usize>(scales: ScaleType, row: &[u8], xs: [&[f32]; N]) -> [f32; N] {
    let width = scales.bytes();
    let blocks = row.len() / (width + 128);
    let xs = xs.map(|x| &x.as_chunks::<LANES>().0.as_chunks::<8>().0[..blocks]);
    let mut low = [_mm256_setzero_ps(); N];
    let mut high = [_mm256_setzero_ps(); N];
    for (b, block) in row.chunks_exact(width + 128).enumerate() {
        let scale = _mm256_set1_ps(match scales {
            ScaleType::Bf16 => quant::bf16_to_f32(u16::from_le_bytes(*part(block, 0))),
            ScaleType::F16 => half(block, 0),
            ScaleType::F32 => f32::from_le_bytes(*part(block, 0)),
        });
        let codes: &[u8; 128] = part(block, width);
        for (i, codes) in codes.as_chunks::<32>().0.iter().enumerate() {
            let eights = e4m3x32(codes);
            for (j, pair) in eights.as_chunks::<2>().0.iter().enumerate() {
                let (w_low, w_high) =
                    (_mm256_mul_ps(scale, pair[0]), _mm256_mul_ps(scale, pair[1]));
                for c in 0..N {
                    let x = &xs[c][b][2 * i + j];
                    low[c] = _mm256_fmadd_ps(w_low, load_f32x8(part(x, 0)), low[c]);
                    high[c] = _mm256_fmadd_ps(w_high, load_f32x8(part(x, 8)), high[c]);
                }
            }
        }
    }
    let mut sums = [0.0; N];
    for c in 0..N {
        sums[c] = tree(to_lanes(low[c], high[c]));
    }
    sums
}

/// [`quant::f8_to_f32`] of 32 bytes, except for the bits of NaN.
///
/// These floats are BF16 too, whose bytes are looked up by the two halves of a code: `seee` and `emmm`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn e4m3x32(codes: &[u8; 32]) -> [__m256; 4] {
    // Interleaving below works within 128-bit halves; this makes its results come in order.
    let order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    let codes = _mm256_permutevar8x32_epi32(load_u8x32(codes), order);
    let nibble = _mm256_set1_epi8(15);
    let lower = _mm256_and_si256(codes, nibble);
    let upper = _mm256_and_si256(_mm256_srli_epi16::<4>(codes), nibble);
    let table = |bytes: [u8; 16]| _mm256_broadcastsi128_si256(load_u8x16(&bytes));
    // Sign, and the upper seven bits of an exponent that is 120 larger than the code's.
    let high = _mm256_shuffle_epi8(
        table([60, 61, 62, 63, 64, 65, 66, 67, 188, 189, 190, 191, 192, 193, 194, 195]),
        upper,
    );
    // Last bit of the exponent, mantissa.
    let low = _mm256_slli_epi16::<4>(lower);
    // Subnormal codes are 0 to 7 units of 2^-9.
    let small_high = table([0, 59, 59, 59, 60, 60, 60, 60, 0, 0, 0, 0, 0, 0, 0, 0]);
    let small_low = table([0, 0, 0x80, 0xc0, 0, 0x20, 0x40, 0x60, 0, 0, 0, 0, 0, 0, 0, 0]);
    let sign = _mm256_and_si256(codes, _mm256_set1_epi8(-128));
    let small_high = _mm256_or_si256(_mm256_shuffle_epi8(small_high, lower), sign);
    let small_low = _mm256_shuffle_epi8(small_low, lower);
    let exponent = _mm256_and_si256(codes, _mm256_set1_epi8(0x78));
    let small = _mm256_cmpeq_epi8(exponent, _mm256_setzero_si256());
    let high = _mm256_blendv_epi8(high, small_high, small);
    let low = _mm256_blendv_epi8(low, small_low, small);
    // A full exponent and some mantissa.
    let nan =
        _mm256_cmpeq_epi8(_mm256_or_si256(codes, _mm256_set1_epi8(-128)), _mm256_set1_epi8(-1));
    let high = _mm256_or_si256(high, nan);
    let (first, second) = (_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high));
    let zero = _mm256_setzero_si256();
    [
        _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, first)),
        _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, first)),
        _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, second)),
        _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, second)),
    ]
}

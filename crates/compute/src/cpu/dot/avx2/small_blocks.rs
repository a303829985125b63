//! Formats with blocks of 32: one scale, sometimes a minimum.
//!
//! A sum over lanes for each block would cost more than its products, so lanes are summed for four sums at a time:
//! four blocks of one row, or one block for up to four activation rows.

use std::arch::x86_64::*;

use quant::{Q8View, codebook};

use super::{
    bit_mask, half, levels, load_i8x16, load_i8x32, load_i16x8, load_u8x32, nibbles_32, part,
    sum_lanes, to_array,
};

/// How codes are multiplied, and what acts on the activations' sums.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Form {
    /// Codes are signed bytes; otherwise unsigned and below 64.
    signed: bool,
    /// Subtracted from every code.
    offset: i16,
    /// A block has a minimum.
    minimum: bool,
}

impl Form {
    const SIGNED: Self = Self { signed: true, offset: 0, minimum: false };
    const MINIMUM: Self = Self { signed: false, offset: 0, minimum: true };

    const fn offset(offset: i16) -> Self {
        Self { signed: false, offset, minimum: false }
    }
}

/// A format, as the functions that read a block.
struct Format<S, C> {
    form: Form,
    /// Scale and minimum.
    scales: S,
    /// 32 codes in order.
    codes: C,
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn dot<const BYTES: usize, const N: usize>(
    row: &[u8],
    xs: [Q8View<'_>; N],
    format: &Format<impl Fn(&[u8; BYTES]) -> (f32, f32), impl Fn(&[u8; BYTES]) -> __m256i>,
) -> [f32; N] {
    let blocks = row.as_chunks::<BYTES>().0;
    if N == 1 { [dot_row(blocks, &xs[0], format); N] } else { dot_tile(blocks, &xs, format) }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn dot_row<const BYTES: usize>(
    blocks: &[[u8; BYTES]],
    x: &Q8View<'_>,
    format: &Format<impl Fn(&[u8; BYTES]) -> (f32, f32), impl Fn(&[u8; BYTES]) -> __m256i>,
) -> f32 {
    let form = format.form;
    let quants = x.quants.as_chunks::<32>().0;
    let mut acc = 0.0;
    let (fours, rest) = blocks.as_chunks::<4>();
    for (i, four) in fours.iter().enumerate() {
        let quants: &[_; 4] = part(quants, 4 * i);
        let mut products = [_mm256_setzero_si256(); 4];
        for j in 0..4 {
            products[j] = multiply(form, (format.codes)(&four[j]), &quants[j]);
        }
        let sums = load_i16x8(part(x.sums, 8 * i));
        let (isum, msum) = sum_four(form, products, sums);
        let (isum, msum) = (to_array(isum), to_array(msum));
        let dx: &[f32; 4] = part(x.scales, 4 * i);
        for j in 0..4 {
            let (d, m) = (format.scales)(&four[j]);
            acc = (d * dx[j]).mul_add(isum[j], acc);
            if form.minimum {
                acc = (m * dx[j]).mul_add(msum[j], acc);
            }
        }
    }
    for (i, block) in rest.iter().enumerate() {
        let i = 4 * fours.len() + i;
        let products = multiply(form, (format.codes)(block), &quants[i]);
        let zero = _mm256_setzero_si256();
        let sums: &[i16; 2] = part(x.sums, 2 * i);
        let sums = _mm_setr_epi16(sums[0], sums[1], 0, 0, 0, 0, 0, 0);
        let (isum, msum) = sum_four(form, [products, zero, zero, zero], sums);
        let (isum, msum) = (to_array(isum), to_array(msum));
        let (d, m) = (format.scales)(block);
        acc = (d * x.scales[i]).mul_add(isum[0], acc);
        if form.minimum {
            acc = (m * x.scales[i]).mul_add(msum[0], acc);
        }
    }
    acc
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn dot_tile<const BYTES: usize, const N: usize>(
    blocks: &[[u8; BYTES]],
    xs: &[Q8View<'_>; N],
    format: &Format<impl Fn(&[u8; BYTES]) -> (f32, f32), impl Fn(&[u8; BYTES]) -> __m256i>,
) -> [f32; N] {
    const { assert!(N <= 4) };
    let form = format.form;
    let quants = xs.map(|x| &x.quants.as_chunks::<32>().0[..blocks.len()]);
    let sums = xs.map(|x| &x.sums.as_chunks::<2>().0[..blocks.len()]);
    let scales = xs.map(|x| &x.scales[..blocks.len()]);
    let mut acc = _mm_setzero_ps();
    for (b, block) in blocks.iter().enumerate() {
        let codes = (format.codes)(block);
        let mut products = [_mm256_setzero_si256(); 4];
        let (mut pairs, mut dx) = ([0; 4], [0.0; 4]);
        for c in 0..N {
            products[c] = multiply(form, codes, &quants[c][b]);
            pairs[c] = i32::from(sums[c][b][0]) & 0xffff | i32::from(sums[c][b][1]) << 16;
            dx[c] = scales[c][b];
        }
        let sums = _mm_setr_epi32(pairs[0], pairs[1], pairs[2], pairs[3]);
        let dx = _mm_setr_ps(dx[0], dx[1], dx[2], dx[3]);
        let (isum, msum) = sum_four(form, products, sums);
        let (d, m) = (format.scales)(block);
        acc = _mm_fmadd_ps(_mm_mul_ps(_mm_set1_ps(d), dx), isum, acc);
        if form.minimum {
            acc = _mm_fmadd_ps(_mm_mul_ps(_mm_set1_ps(m), dx), msum, acc);
        }
    }
    *to_array(acc).first_chunk().expect("at most four columns")
}

/// 32 products, summed to eight lanes.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn multiply(form: Form, codes: __m256i, x: &[i8; 32]) -> __m256i {
    if form.signed {
        // Two signed bytes may sum to more than 16 bits hold, so products are taken from widened ones.
        let low = _mm256_madd_epi16(
            _mm256_cvtepi8_epi16(_mm256_castsi256_si128(codes)),
            _mm256_cvtepi8_epi16(load_i8x16(part(x, 0))),
        );
        let high = _mm256_madd_epi16(
            _mm256_cvtepi8_epi16(_mm256_extracti128_si256::<1>(codes)),
            _mm256_cvtepi8_epi16(load_i8x16(part(x, 16))),
        );
        _mm256_add_epi32(low, high)
    } else {
        _mm256_madd_epi16(_mm256_maddubs_epi16(codes, load_i8x32(x)), _mm256_set1_epi16(1))
    }
}

/// Four sums of products less the offset, and four sums of quants; `sums` holds the latter as pairs.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn sum_four(form: Form, products: [__m256i; 4], sums: __m128i) -> (__m128, __m128) {
    let mut isum = sum_lanes(products);
    if form.offset != 0 {
        isum = _mm_sub_epi32(isum, _mm_madd_epi16(sums, _mm_set1_epi16(form.offset)));
    }
    let mut msum = _mm_setzero_si128();
    if form.minimum {
        msum = _mm_madd_epi16(sums, _mm_set1_epi16(1));
    }
    (_mm_cvtepi32_ps(isum), _mm_cvtepi32_ps(msum))
}

/// 16 for each set bit of the four bytes at `at`, 0 for the others.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn fifth_bits(block: &[u8], at: usize) -> __m256i {
    let bits = u32::from_le_bytes(*part(block, at));
    _mm256_and_si256(bit_mask(bits), _mm256_set1_epi8(16))
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn q8_0<const N: usize>(row: &[u8], xs: [Q8View<'_>; N]) -> [f32; N] {
    let scales = |block: &[u8; 34]| (half(block, 0), 0.0);
    let codes = |block: &[u8; 34]| load_u8x32(part(block, 2));
    dot(row, xs, &Format { form: Form::SIGNED, scales, codes })
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn q4_0<const N: usize>(row: &[u8], xs: [Q8View<'_>; N]) -> [f32; N] {
    let scales = |block: &[u8; 18]| (half(block, 0), 0.0);
    let codes = |block: &[u8; 18]| nibbles_32(block, 2);
    dot(row, xs, &Format { form: Form::offset(8), scales, codes })
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn q4_1<const N: usize>(row: &[u8], xs: [Q8View<'_>; N]) -> [f32; N] {
    let scales = |block: &[u8; 20]| (half(block, 0), half(block, 2));
    let codes = |block: &[u8; 20]| nibbles_32(block, 4);
    dot(row, xs, &Format { form: Form::MINIMUM, scales, codes })
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn q5_0<const N: usize>(row: &[u8], xs: [Q8View<'_>; N]) -> [f32; N] {
    let scales = |block: &[u8; 22]| (half(block, 0), 0.0);
    let codes = |block: &[u8; 22]| _mm256_or_si256(nibbles_32(block, 6), fifth_bits(block, 2));
    dot(row, xs, &Format { form: Form::offset(16), scales, codes })
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn q5_1<const N: usize>(row: &[u8], xs: [Q8View<'_>; N]) -> [f32; N] {
    let scales = |block: &[u8; 24]| (half(block, 0), half(block, 2));
    let codes = |block: &[u8; 24]| _mm256_or_si256(nibbles_32(block, 8), fifth_bits(block, 4));
    dot(row, xs, &Format { form: Form::MINIMUM, scales, codes })
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn iq4_nl<const N: usize>(row: &[u8], xs: [Q8View<'_>; N]) -> [f32; N] {
    let scales = |block: &[u8; 18]| (half(block, 0), 0.0);
    let codes = |block: &[u8; 18]| levels(&codebook::IQ4, nibbles_32(block, 2));
    dot(row, xs, &Format { form: Form::SIGNED, scales, codes })
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn mxfp4<const N: usize>(row: &[u8], xs: [Q8View<'_>; N]) -> [f32; N] {
    // 2^(e - 128): the levels are doubled.  The two smallest scales are subnormal.
    let scale = |e: u8| match e {
        0 => 0x0020_0000,
        1 => 0x0040_0000,
        e => (u32::from(e) - 1) << 23,
    };
    let scales = |block: &[u8; 17]| (f32::from_bits(scale(block[0])), 0.0);
    let codes = |block: &[u8; 17]| levels(&codebook::FP4, nibbles_32(block, 1));
    dot(row, xs, &Format { form: Form::SIGNED, scales, codes })
}

//! Formats with blocks of 32: one scale, sometimes a minimum.
//!
//! A sum over lanes for each block would cost more than its products, so lanes are summed for four sums at a time:
//! four blocks of one row, or one block for up to four activation rows.

use std::arch::x86_64::*;

use quant::{Q8View, codebook};

use super::{
    half, load_i8x16, load_i8x32, load_i16x8, load_u8x16, load_u8x32, part, sum_lanes, to_f32x4,
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
    format: Format<impl Fn(&[u8; BYTES]) -> (f32, f32), impl Fn(&[u8; BYTES]) -> __m256i>,
) -> [f32; N] {
    let blocks = row.as_chunks::<BYTES>().0;
    if N == 1 { [dot_row(blocks, &xs[0], &format); N] } else { dot_tile(blocks, &xs, &format) }
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
    let mut acc = [0.0_f32; N];
    for (b, block) in blocks.iter().enumerate() {
        let codes = (format.codes)(block);
        let mut products = [_mm256_setzero_si256(); 4];
        let mut pairs = [0; 4];
        for c in 0..N {
            products[c] = multiply(form, codes, &quants[c][b]);
            pairs[c] = i32::from(sums[c][b][0]) & 0xffff | i32::from(sums[c][b][1]) << 16;
        }
        let sums = _mm_setr_epi32(pairs[0], pairs[1], pairs[2], pairs[3]);
        let (isum, msum) = sum_four(form, products, sums);
        let (d, m) = (format.scales)(block);
        for c in 0..N {
            acc[c] = (d * scales[c][b]).mul_add(isum[c], acc[c]);
            if form.minimum {
                acc[c] = (m * scales[c][b]).mul_add(msum[c], acc[c]);
            }
        }
    }
    acc
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
fn sum_four(form: Form, products: [__m256i; 4], sums: __m128i) -> ([f32; 4], [f32; 4]) {
    let mut isum = sum_lanes(products);
    if form.offset != 0 {
        isum = _mm_sub_epi32(isum, _mm_madd_epi16(sums, _mm_set1_epi16(form.offset)));
    }
    let msum =
        if form.minimum { to_f32x4(_mm_madd_epi16(sums, _mm_set1_epi16(1))) } else { [0.0; 4] };
    (to_f32x4(isum), msum)
}

/// 32 nibbles of 16 bytes at `at`: low ones first.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn nibbles(block: &[u8], at: usize) -> __m256i {
    let v = load_u8x16(part(block, at));
    let both = _mm256_set_m128i(_mm_srli_epi16::<4>(v), v);
    _mm256_and_si256(both, _mm256_set1_epi8(15))
}

/// 16 for each set bit of the four bytes at `at`, 0 for the others.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn fifth_bits(block: &[u8], at: usize) -> __m256i {
    let bits = _mm256_set1_epi32(u32::from_le_bytes(*part(block, at)).cast_signed());
    let spread =
        _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
    let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64.cast_signed());
    let bytes = _mm256_shuffle_epi8(bits, spread);
    let set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit);
    _mm256_and_si256(set, _mm256_set1_epi8(16))
}

/// The level that each of 32 nibbles names.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn levels(table: &[i8; 16], nibbles: __m256i) -> __m256i {
    _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load_i8x16(table)), nibbles)
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn q8_0<const N: usize>(row: &[u8], xs: [Q8View<'_>; N]) -> [f32; N] {
    let scales = |block: &[u8; 34]| (half(block, 0), 0.0);
    let codes = |block: &[u8; 34]| load_u8x32(part(block, 2));
    dot(row, xs, Format { form: Form::SIGNED, scales, codes })
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn q4_0<const N: usize>(row: &[u8], xs: [Q8View<'_>; N]) -> [f32; N] {
    let scales = |block: &[u8; 18]| (half(block, 0), 0.0);
    let codes = |block: &[u8; 18]| nibbles(block, 2);
    dot(row, xs, Format { form: Form::offset(8), scales, codes })
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn q4_1<const N: usize>(row: &[u8], xs: [Q8View<'_>; N]) -> [f32; N] {
    let scales = |block: &[u8; 20]| (half(block, 0), half(block, 2));
    let codes = |block: &[u8; 20]| nibbles(block, 4);
    dot(row, xs, Format { form: Form::MINIMUM, scales, codes })
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn q5_0<const N: usize>(row: &[u8], xs: [Q8View<'_>; N]) -> [f32; N] {
    let scales = |block: &[u8; 22]| (half(block, 0), 0.0);
    let codes = |block: &[u8; 22]| _mm256_or_si256(nibbles(block, 6), fifth_bits(block, 2));
    dot(row, xs, Format { form: Form::offset(16), scales, codes })
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn q5_1<const N: usize>(row: &[u8], xs: [Q8View<'_>; N]) -> [f32; N] {
    let scales = |block: &[u8; 24]| (half(block, 0), half(block, 2));
    let codes = |block: &[u8; 24]| _mm256_or_si256(nibbles(block, 8), fifth_bits(block, 4));
    dot(row, xs, Format { form: Form::MINIMUM, scales, codes })
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn iq4_nl<const N: usize>(row: &[u8], xs: [Q8View<'_>; N]) -> [f32; N] {
    let scales = |block: &[u8; 18]| (half(block, 0), 0.0);
    let codes = |block: &[u8; 18]| levels(&codebook::IQ4, nibbles(block, 2));
    dot(row, xs, Format { form: Form::SIGNED, scales, codes })
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
    let codes = |block: &[u8; 17]| levels(&codebook::FP4, nibbles(block, 1));
    dot(row, xs, Format { form: Form::SIGNED, scales, codes })
}

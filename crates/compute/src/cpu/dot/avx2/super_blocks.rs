//! Formats with blocks of 256: codes of a few bits, a sub-scale for each run of 16 or 32.
//!
//! With unsigned codes `c` below 128, `maddubs` sums two products of `c` and a quant without saturation
//! (2 · 127 · 128 = 32,512). One `madd` then multiplies by the sub-scale and widens to 32 bits. What a format
//! subtracts from its codes, and its minima, act on the activations' group sums instead.

use std::arch::x86_64::*;

use quant::Q8View;

use super::{half, load_i8x32, load_i16x16, load_u8x16, load_u8x32, part, sum_lanes, to_array};

/// What a block says about its codes.
pub(super) struct Head {
    /// Scale of the codes.
    pub(super) d: f32,
    /// Scale of the minima with its sign; unused without minima.
    pub(super) min: f32,
    /// 16-bit sub-scales: run `k` of 32 values has element `k` of the low lane in its first half and element `k` of
    /// the high lane in its second.
    pub(super) scales: __m256i,
    /// 16-bit factors of the 16 group sums: minima, or sub-scale times the codes' offset.
    pub(super) sums: __m256i,
}

/// Where the products with group sums go.
pub(super) const MINIMA: bool = true;
pub(super) const OFFSETS: bool = false;

/// One row times `N` activation rows. `codes(block, n)` gives values `128·n + 32·k ..` in element `k`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn dot<const BYTES: usize, const SUMS: bool, const N: usize>(
    row: &[u8],
    xs: [Q8View<'_>; N],
    head: impl Fn(&[u8; BYTES]) -> Head,
    codes: impl Fn(&[u8; BYTES], usize) -> [__m256i; 4],
) -> [f32; N] {
    let multiply = |codes: __m256i, x: &[i8; 32], scale: __m256i| {
        _mm256_madd_epi16(_mm256_maddubs_epi16(codes, load_i8x32(x)), scale)
    };
    dot_with::<BYTES, SUMS, N>(row, xs, head, codes, multiply)
}

/// The same with another way to multiply 32 codes, 32 quants and a sub-scale.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn dot_with<const BYTES: usize, const SUMS: bool, const N: usize>(
    row: &[u8],
    xs: [Q8View<'_>; N],
    head: impl Fn(&[u8; BYTES]) -> Head,
    codes: impl Fn(&[u8; BYTES], usize) -> [__m256i; 4],
    multiply: impl Fn(__m256i, &[i8; 32], __m256i) -> __m256i,
) -> [f32; N] {
    let blocks = row.as_chunks::<BYTES>().0;
    let quants = xs.map(|x| &x.quants.as_chunks::<256>().0[..blocks.len()]);
    let sums = xs.map(|x| &x.sums.as_chunks::<16>().0[..blocks.len()]);
    let scales = xs.map(|x| &x.scales[..blocks.len()]);
    let mut acc = [0.0_f32; N];
    for (b, block) in blocks.iter().enumerate() {
        let head = head(block);
        let mut isum = [_mm256_setzero_si256(); N];
        for n in 0..2 {
            for (k, codes) in codes(block, n).into_iter().enumerate() {
                let run = (4 * n + k) as i16;
                let pick = _mm256_set1_epi16(((2 * run + 1) << 8) | (2 * run));
                let scale = _mm256_shuffle_epi8(head.scales, pick);
                for c in 0..N {
                    let x = part(&quants[c][b], 128 * n + 32 * k);
                    isum[c] = _mm256_add_epi32(isum[c], multiply(codes, x, scale));
                }
            }
        }
        let mut msum = [_mm256_setzero_si256(); N];
        for c in 0..N {
            msum[c] = _mm256_madd_epi16(head.sums, load_i16x16(&sums[c][b]));
        }
        if SUMS == OFFSETS {
            for c in 0..N {
                isum[c] = _mm256_sub_epi32(isum[c], msum[c]);
            }
        }
        let (isum, msum) = sum_columns::<SUMS, N>(isum, msum);
        for c in 0..N {
            acc[c] = (head.d * scales[c][b]).mul_add(isum[c], acc[c]);
            if SUMS == MINIMA {
                acc[c] = (head.min * scales[c][b]).mul_add(msum[c], acc[c]);
            }
        }
    }
    acc
}

/// Sums over lanes, as floats, of up to four columns.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn sum_columns<const SUMS: bool, const N: usize>(
    isum: [__m256i; N],
    msum: [__m256i; N],
) -> ([f32; N], [f32; N]) {
    const { assert!(N <= 4) };
    let mut first = [_mm256_setzero_si256(); 4];
    let mut second = first;
    for c in 0..N {
        first[c] = isum[c];
        if N <= 2 {
            first[2 + c] = msum[c];
        }
        second[c] = msum[c];
    }
    let first = to_array(_mm_cvtepi32_ps(sum_lanes(first)));
    let mut second_sums = [0.0; 4];
    if SUMS == MINIMA && N > 2 {
        second_sums = to_array(_mm_cvtepi32_ps(sum_lanes(second)));
    }
    let (mut isums, mut msums) = ([0.0; N], [0.0; N]);
    for c in 0..N {
        isums[c] = first[c];
        msums[c] = if N <= 2 { first[2 + c] } else { second_sums[c] };
    }
    (isums, msums)
}

/// 8-bit sub-scales of 16 runs of 16, evens to the low lane and odds to the high one.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn split_runs(scales: __m128i) -> __m256i {
    let order = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    _mm256_cvtepi8_epi16(_mm_shuffle_epi8(scales, order))
}

/// The 6-bit scales and minima of `Q4_K` and `Q5_K`: eight each.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn head_k4(block: &[u8]) -> Head {
    let word = |j: usize| u32::from_le_bytes(*part(block, 4 + 4 * j));
    let (a, b, c) = (word(0), word(1), word(2));
    let (six, four, two) = (0x3f3f_3f3f, 0x0f0f_0f0f, 0x0303_0303);
    let scales = pack_u32(a & six, (c & four) | ((a >> 6) & two) << 4);
    let minima = pack_u32(b & six, ((c >> 4) & four) | ((b >> 6) & two) << 4);
    Head {
        d: half(block, 0),
        min: -half(block, 2),
        scales: _mm256_cvtepu8_epi16(_mm_unpacklo_epi64(scales, scales)),
        sums: _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(minima, minima)),
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn pack_u32(low: u32, high: u32) -> __m128i {
    _mm_cvtsi64_si128((u64::from(high) << 32 | u64::from(low)).cast_signed())
}

/// Nibbles of 64 bytes at `at`, as runs of 32: low then high of each 32 bytes.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn nibbles(block: &[u8], at: usize) -> [__m256i; 4] {
    let mask = _mm256_set1_epi8(15);
    let (a, b) = (load_u8x32(part(block, at)), load_u8x32(part(block, at + 32)));
    [
        _mm256_and_si256(a, mask),
        _mm256_and_si256(_mm256_srli_epi16::<4>(a), mask),
        _mm256_and_si256(b, mask),
        _mm256_and_si256(_mm256_srli_epi16::<4>(b), mask),
    ]
}

/// Two-bit codes of 32 bytes at `at`, as four runs of 32.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn crumbs(block: &[u8], at: usize) -> [__m256i; 4] {
    let mask = _mm256_set1_epi8(3);
    let v = load_u8x32(part(block, at));
    [
        _mm256_and_si256(v, mask),
        _mm256_and_si256(_mm256_srli_epi16::<2>(v), mask),
        _mm256_and_si256(_mm256_srli_epi16::<4>(v), mask),
        _mm256_and_si256(_mm256_srli_epi16::<6>(v), mask),
    ]
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn q4_k<const N: usize>(row: &[u8], xs: [Q8View<'_>; N]) -> [f32; N] {
    dot::<144, MINIMA, N>(row, xs, |block| head_k4(block), |block, n| nibbles(block, 16 + 64 * n))
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn q5_k<const N: usize>(row: &[u8], xs: [Q8View<'_>; N]) -> [f32; N] {
    let codes = |block: &[u8; 176], n: usize| {
        let low = nibbles(block, 48 + 64 * n);
        // Bit `4·n + k` of byte `e` belongs to value `32·k + e` of half `n`.
        let high = load_u8x32(part(block, 16));
        let high = if n == 0 { high } else { _mm256_srli_epi16::<4>(high) };
        let mask = _mm256_set1_epi8(16);
        [
            _mm256_or_si256(low[0], _mm256_and_si256(_mm256_slli_epi16::<4>(high), mask)),
            _mm256_or_si256(low[1], _mm256_and_si256(_mm256_slli_epi16::<3>(high), mask)),
            _mm256_or_si256(low[2], _mm256_and_si256(_mm256_slli_epi16::<2>(high), mask)),
            _mm256_or_si256(low[3], _mm256_and_si256(_mm256_slli_epi16::<1>(high), mask)),
        ]
    };
    dot::<176, MINIMA, N>(row, xs, |block| head_k4(block), codes)
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn q6_k<const N: usize>(row: &[u8], xs: [Q8View<'_>; N]) -> [f32; N] {
    let head = |block: &[u8; 210]| {
        let scales = load_u8x16(part(block, 192));
        Head {
            d: half(block, 208),
            min: 0.0,
            scales: split_runs(scales),
            sums: _mm256_slli_epi16::<5>(_mm256_cvtepi8_epi16(scales)),
        }
    };
    let codes = |block: &[u8; 210], n: usize| {
        // Low nibbles are the first two runs, high nibbles the last two.
        let [a, c, b, d] = nibbles(block, 64 * n);
        let high = load_u8x32(part(block, 128 + 32 * n));
        let mask = _mm256_set1_epi8(0x30);
        [
            _mm256_or_si256(a, _mm256_and_si256(_mm256_slli_epi16::<4>(high), mask)),
            _mm256_or_si256(b, _mm256_and_si256(_mm256_slli_epi16::<2>(high), mask)),
            _mm256_or_si256(c, _mm256_and_si256(high, mask)),
            _mm256_or_si256(d, _mm256_and_si256(_mm256_srli_epi16::<2>(high), mask)),
        ]
    };
    dot::<210, OFFSETS, N>(row, xs, head, codes)
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn q2_k<const N: usize>(row: &[u8], xs: [Q8View<'_>; N]) -> [f32; N] {
    let head = |block: &[u8; 84]| {
        let mask = _mm_set1_epi8(15);
        let packed = load_u8x16(part(block, 0));
        let minima = _mm_and_si128(_mm_srli_epi16::<4>(packed), mask);
        Head {
            d: half(block, 80),
            min: -half(block, 82),
            scales: split_runs(_mm_and_si128(packed, mask)),
            sums: _mm256_cvtepu8_epi16(minima),
        }
    };
    dot::<84, MINIMA, N>(row, xs, head, |block, n| crumbs(block, 16 + 32 * n))
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn q3_k<const N: usize>(row: &[u8], xs: [Q8View<'_>; N]) -> [f32; N] {
    let head = |block: &[u8; 110]| {
        let word = |j: usize| u32::from_le_bytes(*part(block, 96 + 4 * j));
        let (a, b, high) = (word(0), word(1), word(2));
        let (four, two) = (0x0f0f_0f0f, 0x0303_0303);
        let low = pack_u32((a & four) | (high & two) << 4, (b & four) | ((high >> 2) & two) << 4);
        let high = pack_u32(
            ((a >> 4) & four) | ((high >> 4) & two) << 4,
            ((b >> 4) & four) | ((high >> 6) & two) << 4,
        );
        let scales = _mm_sub_epi8(_mm_unpacklo_epi64(low, high), _mm_set1_epi8(32));
        Head {
            d: half(block, 108),
            min: 0.0,
            scales: split_runs(scales),
            sums: _mm256_slli_epi16::<2>(_mm256_cvtepi8_epi16(scales)),
        }
    };
    let codes = |block: &[u8; 110], n: usize| {
        let low = crumbs(block, 32 + 32 * n);
        // Bit `4·n + k` of byte `e` set: the code is not lowered by 4.
        let high = load_u8x32(part(block, 0));
        let high = if n == 0 { high } else { _mm256_srli_epi16::<4>(high) };
        let mask = _mm256_set1_epi8(4);
        [
            _mm256_or_si256(low[0], _mm256_and_si256(_mm256_slli_epi16::<2>(high), mask)),
            _mm256_or_si256(low[1], _mm256_and_si256(_mm256_slli_epi16::<1>(high), mask)),
            _mm256_or_si256(low[2], _mm256_and_si256(high, mask)),
            _mm256_or_si256(low[3], _mm256_and_si256(_mm256_srli_epi16::<1>(high), mask)),
        ]
    };
    dot::<110, OFFSETS, N>(row, xs, head, codes)
}

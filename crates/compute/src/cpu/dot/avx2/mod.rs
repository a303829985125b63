//! Products for AVX2 with FMA and F16C.
//!
//! Everything here is a `#[target_feature]` function, so bodies are safe code; the loads below are the exception.
#![allow(unsafe_code, reason = "vector loads and stores take pointers")]
#![allow(clippy::wildcard_imports, reason = "a page of intrinsics says nothing")]
#![allow(clippy::needless_range_loop, reason = "columns index several arrays at once")]

mod affine;
mod codebooks;
mod float;
mod quantize;
mod rows;
mod small_blocks;
mod super_blocks;

pub(super) use quantize::quantize;
pub(super) use rows::{decode_row, rows_decoded, rows_float, rows_q8};

use std::arch::x86_64::*;

/// `N` bytes (or whatever `T` is) from `at`.
#[inline]
fn part<T, const N: usize>(slice: &[T], at: usize) -> &[T; N] {
    slice[at..].first_chunk().expect("the part lies inside its block")
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn load_u8x8(bytes: [u8; 8]) -> __m128i {
    _mm_cvtsi64_si128(i64::from_le_bytes(bytes))
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(in crate::cpu) fn load_u8x16(bytes: &[u8; 16]) -> __m128i {
    // SAFETY: 16 bytes; the load may be unaligned.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(in crate::cpu) fn load_u8x32(bytes: &[u8; 32]) -> __m256i {
    // SAFETY: 32 bytes; the load may be unaligned.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(in crate::cpu) fn load_i8x32(quants: &[i8; 32]) -> __m256i {
    // SAFETY: 32 bytes; the load may be unaligned.
    unsafe { _mm256_loadu_si256(quants.as_ptr().cast()) }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(in crate::cpu) fn load_i8x16(quants: &[i8; 16]) -> __m128i {
    // SAFETY: 16 bytes; the load may be unaligned.
    unsafe { _mm_loadu_si128(quants.as_ptr().cast()) }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn load_i16x4(sums: &[i16; 4]) -> __m128i {
    // SAFETY: 8 bytes; the load may be unaligned.
    unsafe { _mm_loadl_epi64(sums.as_ptr().cast()) }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn load_i16x8(sums: &[i16; 8]) -> __m128i {
    // SAFETY: 16 bytes; the load may be unaligned.
    unsafe { _mm_loadu_si128(sums.as_ptr().cast()) }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(in crate::cpu) fn load_i16x16(sums: &[i16; 16]) -> __m256i {
    // SAFETY: 32 bytes; the load may be unaligned.
    unsafe { _mm256_loadu_si256(sums.as_ptr().cast()) }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(in crate::cpu) fn load_f32x8(values: &[f32; 8]) -> __m256 {
    // SAFETY: 32 bytes; the load may be unaligned.
    unsafe { _mm256_loadu_ps(values.as_ptr()) }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(in crate::cpu) fn store_f32x8(values: &mut [f32; 8], v: __m256) {
    // SAFETY: 32 bytes; the store may be unaligned.
    unsafe { _mm256_storeu_ps(values.as_mut_ptr(), v) }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn store_i8x32(quants: &mut [i8; 32], v: __m256i) {
    // SAFETY: 32 bytes; the store may be unaligned.
    unsafe { _mm256_storeu_si256(quants.as_mut_ptr().cast(), v) }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn to_array(v: __m128) -> [f32; 4] {
    let mut values = [0.0; 4];
    // SAFETY: 16 bytes; the store may be unaligned.
    unsafe { _mm_storeu_ps(values.as_mut_ptr(), v) };
    values
}

/// A half at byte `at`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn half(block: &[u8], at: usize) -> f32 {
    let bits = u16::from_le_bytes(*part(block, at));
    _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits))))
}

/// The sums of four vectors' eight lanes each.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn sum_lanes(v: [__m256i; 4]) -> __m128i {
    let pairs = _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
    _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256::<1>(pairs))
}

/// 32 nibbles of 16 bytes at `at`: low ones first.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn nibbles_32(block: &[u8], at: usize) -> __m256i {
    let v = load_u8x16(part(block, at));
    let both = _mm256_set_m128i(_mm_srli_epi16::<4>(v), v);
    _mm256_and_si256(both, _mm256_set1_epi8(15))
}

/// All ones in byte `i` where bit `i` is set.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn bit_mask(bits: u32) -> __m256i {
    let ones = 0x0101_0101_0101_0101;
    let spread = _mm256_setr_epi64x(0, ones, 2 * ones, 3 * ones);
    let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64.cast_signed());
    let bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(bits.cast_signed()), spread);
    _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit)
}

/// The level that each of 32 nibbles names.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn levels(table: &[i8; 16], nibbles: __m256i) -> __m256i {
    _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load_i8x16(table)), nibbles)
}

/// Four quants, to every lane.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(in crate::cpu) fn four_to_all(quants: &[i8; 4]) -> __m256i {
    // SAFETY: 4 bytes, read as such.
    _mm256_set1_epi32(unsafe { quants.as_ptr().cast::<i32>().read_unaligned() })
}

/// Two group sums, to every lane.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(in crate::cpu) fn two_to_all(sums: &[i16; 2]) -> __m256i {
    // SAFETY: 4 bytes, read as such.
    _mm256_set1_epi32(unsafe { sums.as_ptr().cast::<i32>().read_unaligned() })
}

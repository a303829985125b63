//! Activations to 8 bit.

use std::arch::x86_64::*;

use super::{load_f32x8, part, store_i8x32};

/// [`quant::quantize_into`], same bits.
#[target_feature(enable = "avx2,fma,f16c")]
pub(in super::super) fn quantize(
    x: &[f32],
    block: usize,
    scales: &mut [f32],
    quants: &mut [i8],
    sums: &mut [i16],
) {
    assert!(x.len().is_multiple_of(block) && block.is_multiple_of(32), "rows of whole blocks");
    assert!(scales.len() == x.len() / block && quants.len() == x.len(), "lengths belong together");
    assert_eq!(sums.len(), x.len() / quant::GROUP, "one sum per group");
    for ((x, quants), scale) in
        x.chunks_exact(block).zip(quants.chunks_exact_mut(block)).zip(scales)
    {
        let amax = largest(x);
        *scale = if amax.is_finite() { amax / 127.0 } else { f32::NAN };
        if *scale > 0.0 {
            round(x, *scale, quants);
        } else {
            quants.fill(0);
        }
    }
    for (sum, group) in sums.iter_mut().zip(quants.as_chunks::<{ quant::GROUP }>().0) {
        *sum = group.iter().map(|q| i16::from(*q)).sum();
    }
}

/// The largest magnitude. Without signs floats order like integers, and NaN is above infinity.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn largest(x: &[f32]) -> f32 {
    let magnitude = _mm256_set1_epi32(0x7fff_ffff);
    let mut max = _mm256_setzero_si256();
    for x in x.as_chunks::<8>().0 {
        let v = _mm256_and_si256(_mm256_castps_si256(load_f32x8(x)), magnitude);
        max = _mm256_max_epu32(max, v);
    }
    let max = _mm_max_epu32(_mm256_castsi256_si128(max), _mm256_extracti128_si256::<1>(max));
    let max = _mm_max_epu32(max, _mm_shuffle_epi32::<0b_01_00_11_10>(max));
    let max = _mm_max_epu32(max, _mm_shuffle_epi32::<0b_10_11_00_01>(max));
    f32::from_bits(_mm_cvtsi128_si32(max).cast_unsigned())
}

/// `x / scale`, rounded to nearest even; packing saturates as the conversion of floats to bytes does.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn round(x: &[f32], scale: f32, quants: &mut [i8]) {
    let scale = _mm256_set1_ps(scale);
    for (x, quants) in x.as_chunks::<32>().0.iter().zip(quants.as_chunks_mut::<32>().0) {
        let eight = |i: usize| _mm256_cvtps_epi32(_mm256_div_ps(load_f32x8(part(x, 8 * i)), scale));
        let low = _mm256_packs_epi32(eight(0), eight(1));
        let high = _mm256_packs_epi32(eight(2), eight(3));
        // Packing works within 128-bit halves and leaves groups of four in the order 0 2 4 6 1 3 5 7.
        let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        let packed = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
        store_i8x32(quants, packed);
    }
}

//! Products with `sdot`.
//!
//! A weight row is taken apart by its format's own definition, which compilers turn into NEON instructions; a group of
//! 16 codes is then one load and one `sdot` for each activation row. So a format needs no code of its own here.
#![allow(unsafe_code, reason = "vector stores take pointers")]
#![allow(clippy::wildcard_imports, reason = "a page of intrinsics says nothing")]

use std::arch::aarch64::*;

use quant::{BlockType, GROUP, Q8View, Unpacked, unpack_rows};

use crate::cpu::sdot::{load_f32x4, load_i8x16, load_i16x8, sdot};

/// `out[c][o] = row o · xs[c]`, for at most four columns.
#[target_feature(enable = "neon,dotprod")]
pub(super) fn rows_q8(ty: BlockType, rows: &[u8], xs: &[Q8View<'_>], out: &mut [&mut [f32]]) {
    let n_in = xs[0].quants.len();
    let bytes = ty.row_bytes(n_in).expect("rows are made of whole blocks");
    let weight = Weight {
        block: ty.block_len(),
        offset: i32::from(quant::code_offset(ty)),
        minima: quant::has_minima(ty),
    };
    let mut unpacked = [Unpacked::default()];
    for (o, row) in rows.chunks_exact(bytes).enumerate() {
        let mut acc = [0.0_f32; 4];
        unpack_rows(ty, row, n_in, &mut unpacked, |b, [block]| {
            for (acc, x) in acc.iter_mut().zip(xs) {
                *acc = weight.add(block, b, x, *acc);
            }
        });
        for (out, y) in out.iter_mut().zip(acc) {
            out[o] = y;
        }
    }
}

/// What the blocks of a type have.
#[derive(Clone, Copy)]
struct Weight {
    block: usize,
    offset: i32,
    minima: bool,
}

impl Weight {
    /// Adds the products of one block; see [`quant::dot_q8`].
    #[target_feature(enable = "neon,dotprod")]
    #[inline]
    fn add(self, w: &Unpacked, b: usize, x: &Q8View<'_>, acc: f32) -> f32 {
        let quants = &x.quants[b * self.block..(b + 1) * self.block];
        let sums = &x.sums[b * self.block / GROUP..(b + 1) * self.block / GROUP];
        let mut isum = sum_products(w, quants);
        if self.offset != 0 {
            isum += self.offset * sums.iter().map(|sum| i32::from(*sum)).sum::<i32>();
        }
        let dx = x.scales[b];
        let acc = (w.scale * dx).mul_add(isum as f32, acc);
        if self.minima {
            return (w.min_scale * dx).mul_add(sum_minima(w, sums) as f32, acc);
        }
        acc
    }
}

/// `Σ sc · c · q`.
#[target_feature(enable = "neon,dotprod")]
#[inline]
fn sum_products(w: &Unpacked, quants: &[i8]) -> i32 {
    let zero = vdupq_n_s32(0);
    // Two sums, so that one addition need not wait for the other.
    let mut sums = [zero; 2];
    let scales = w.scales.as_chunks::<2>().0;
    let codes = w.codes.as_chunks::<GROUP>().0.as_chunks::<2>().0;
    let quants = quants.as_chunks::<GROUP>().0.as_chunks::<2>().0;
    for ((quants, codes), scales) in quants.iter().zip(codes).zip(scales) {
        for i in 0..2 {
            let products = sdot(zero, load_i8x16(&codes[i]), load_i8x16(&quants[i]));
            sums[i] = vmlaq_n_s32(sums[i], products, i32::from(scales[i]));
        }
    }
    vaddvq_s32(vaddq_s32(sums[0], sums[1]))
}

/// `Σ mn · Σ q`.
#[target_feature(enable = "neon,dotprod")]
#[inline]
fn sum_minima(w: &Unpacked, sums: &[i16]) -> i32 {
    let (eights, rest) = sums.as_chunks::<8>();
    let (mins, last) = (w.mins.as_chunks::<8>().0, &w.mins[8 * eights.len()..]);
    let mut acc = vdupq_n_s32(0);
    for (sums, mins) in eights.iter().zip(mins) {
        let (sums, mins) = (load_i16x8(sums), load_i16x8(&mins.map(i16::from)));
        acc = vmlal_s16(acc, vget_low_s16(sums), vget_low_s16(mins));
        acc = vmlal_high_s16(acc, sums, mins);
    }
    let rest = rest.iter().zip(last).map(|(sum, min)| i32::from(*sum) * i32::from(*min));
    vaddvq_s32(acc) + rest.sum::<i32>()
}

/// [`quant::quantize_into`], same bits.
#[target_feature(enable = "neon,dotprod")]
pub(super) fn quantize(
    x: &[f32],
    block: usize,
    scales: &mut [f32],
    quants: &mut [i8],
    sums: &mut [i16],
) {
    assert!(x.len().is_multiple_of(block) && block.is_multiple_of(32), "rows of whole blocks");
    assert!(scales.len() == x.len() / block && quants.len() == x.len(), "lengths belong together");
    assert_eq!(sums.len(), x.len() / GROUP, "one sum per group");
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
    for (sum, group) in sums.iter_mut().zip(quants.as_chunks::<GROUP>().0) {
        *sum = vaddlvq_s8(load_i8x16(group));
    }
}

/// The largest magnitude. Without signs floats order like integers, and NaN is above infinity.
#[target_feature(enable = "neon,dotprod")]
#[inline]
fn largest(x: &[f32]) -> f32 {
    let mut max = vdupq_n_u32(0);
    for x in x.as_chunks::<4>().0 {
        let bits = vreinterpretq_u32_f32(load_f32x4(x));
        max = vmaxq_u32(max, vandq_u32(bits, vdupq_n_u32(0x7fff_ffff)));
    }
    f32::from_bits(vmaxvq_u32(max))
}

/// `x / scale`, rounded to nearest even; narrowing saturates as the conversion of floats to bytes does.
#[target_feature(enable = "neon,dotprod")]
#[inline]
fn round(x: &[f32], scale: f32, quants: &mut [i8]) {
    let scale = vdupq_n_f32(scale);
    let fours = x.as_chunks::<4>().0.as_chunks::<4>().0;
    for (x, quants) in fours.iter().zip(quants.as_chunks_mut::<16>().0) {
        let four = |i: usize| vcvtnq_s32_f32(vdivq_f32(load_f32x4(&x[i]), scale));
        let low = vqmovn_high_s32(vqmovn_s32(four(0)), four(1));
        let high = vqmovn_high_s32(vqmovn_s32(four(2)), four(3));
        let packed = vqmovn_high_s16(vqmovn_s16(low), high);
        // SAFETY: 16 bytes; the store may be unaligned.
        unsafe { vst1q_s8(quants.as_mut_ptr(), packed) };
    }
}

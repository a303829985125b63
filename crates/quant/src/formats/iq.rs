//! Formats whose codes name levels or short vectors: the "IQ" family and MXFP4.
//!
//! The codebook formats share the shape `d · c · (2t + 1) · v` with a constant `c`, a `t` of 3 or 4 bits and a small
//! integer `v`: `2t + 1` is the sub-scale and `v` the code.

use super::{Format, Unpacked, f16_at, nibbles, part, u16_at, u32_at};
use crate::codebook::{self, even_signs};
use crate::float::f16_to_f32;

/// `2t + 1` of the 4 bits `i` of `packed`.
#[inline(always)]
fn odd_nibble(packed: &[u8], i: usize) -> i8 {
    let t = packed[i / 2] >> (4 * (i % 2)) & 15;
    2 * t as i8 + 1
}

/// `entry`, negated where bit `first + j` of `signs` is set.
#[inline(always)]
fn signed<const N: usize>(entry: &[i8; N], signs: u8, first: usize, out: &mut [i8; N]) {
    for (j, (code, g)) in out.iter_mut().zip(entry).enumerate() {
        *code = if signs >> (first + j) & 1 == 1 { -g } else { *g };
    }
}

/// Bytes: `d` f16; for each run of 32, four indices and a u32 of four 7-bit signs and `t`.
/// Value: `d · (0.5 + t) / 4 · v`.
#[derive(Clone, Copy)]
pub(crate) struct Iq2Xxs;

impl Format for Iq2Xxs {
    const LARGEST: i32 = 31 * 43;

    #[inline(always)]
    fn unpack(self, block: &[u8], out: &mut Unpacked) {
        out.scale = f16_at(block, 0) * 0.125;
        let word = |k: usize| u32_at(block, 6 + 8 * k);
        out.scales_of_32(|k| 2 * (word(k) >> 28) as i8 + 1);
        for (g, codes) in out.codes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let (k, l) = (g / 4, g % 4);
            let entry = &codebook::IQ2_XXS[usize::from(block[2 + 8 * k + l])];
            signed(entry, even_signs((word(k) >> (7 * l)) as u8 & 127), 0, codes);
        }
    }
}

/// Bytes: `d` f16, 32 u16 of a 9-bit index and 7-bit signs, 16 nibbles `t`. Value: `d · (0.5 + t) / 4 · v`.
#[derive(Clone, Copy)]
pub(crate) struct Iq2Xs;

impl Format for Iq2Xs {
    const LARGEST: i32 = 31 * 43;

    #[inline(always)]
    fn unpack(self, block: &[u8], out: &mut Unpacked) {
        out.scale = f16_at(block, 0) * 0.125;
        out.scales = std::array::from_fn(|k| odd_nibble(&block[66..], k));
        for (g, codes) in out.codes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let q = u16_at(block, 2 + 2 * g);
            let entry = &codebook::IQ2_XS[usize::from(q & 511)];
            signed(entry, even_signs((q >> 9) as u8), 0, codes);
        }
    }
}

/// Bytes: `d` f16, 32 low indices, 32 of signs, 8 of high index bits, 16 nibbles `t`.
/// Value: `d · (0.5 + t) / 4 · v`.
#[derive(Clone, Copy)]
pub(crate) struct Iq2S;

impl Format for Iq2S {
    const LARGEST: i32 = 31 * 43;

    #[inline(always)]
    fn unpack(self, block: &[u8], out: &mut Unpacked) {
        out.scale = f16_at(block, 0) * 0.125;
        out.scales = std::array::from_fn(|k| odd_nibble(&block[74..], k));
        for (g, codes) in out.codes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let high = block[66 + g / 4] >> (2 * (g % 4)) & 3;
            let entry = &codebook::IQ2_S[usize::from(block[2 + g]) | usize::from(high) << 8];
            signed(entry, block[34 + g], 0, codes);
        }
    }
}

/// Bytes: `d` f16, 64 indices, 8 u32 of four 7-bit signs and `t`. Value: `d · (0.5 + t) / 2 · v`.
#[derive(Clone, Copy)]
pub(crate) struct Iq3Xxs;

impl Format for Iq3Xxs {
    const LARGEST: i32 = 31 * 62;

    #[inline(always)]
    fn unpack(self, block: &[u8], out: &mut Unpacked) {
        out.scale = f16_at(block, 0) * 0.25;
        let word = |k: usize| u32_at(block, 66 + 4 * k);
        out.scales_of_32(|k| 2 * (word(k) >> 28) as i8 + 1);
        for (g, codes) in out.codes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let signs = even_signs((word(g / 8) >> (7 * (g % 8 / 2))) as u8 & 127);
            let entry = &codebook::IQ3_XXS[usize::from(block[2 + g])];
            signed(entry, signs, 4 * (g % 2), codes);
        }
    }
}

/// Bytes: `d` f16, 64 low indices, 8 of high index bits, 32 of signs, 8 nibbles `t`. Value: `d · (1 + 2t) · v`.
#[derive(Clone, Copy)]
pub(crate) struct Iq3S;

impl Format for Iq3S {
    const LARGEST: i32 = 31 * 15;

    #[inline(always)]
    fn unpack(self, block: &[u8], out: &mut Unpacked) {
        out.scale = f16_at(block, 0);
        out.scales_of_32(|k| odd_nibble(&block[106..], k));
        for (g, codes) in out.codes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let high = block[66 + g / 8] >> (g % 8) & 1;
            let entry = &codebook::IQ3_S[usize::from(block[2 + g]) | usize::from(high) << 8];
            signed(entry, block[74 + g / 2], 4 * (g % 2), codes);
        }
    }
}

/// The ternary grid's values are shifted by an eighth up or down: `8g ± 1` in units of an eighth.
#[inline(always)]
fn shifted(entry: &[i8; 8], down: bool) -> [i8; 8] {
    let shift = if down { -1 } else { 1 };
    entry.map(|g| 8 * g + shift)
}

/// Bytes: `d` f16, 32 low indices, 8 u16 of four times 3 high index bits, `t` of 3 bits and the shift's sign.
/// Value: `d · (2t + 1) · (g ± 0.125)`.
#[derive(Clone, Copy)]
pub(crate) struct Iq1S;

impl Format for Iq1S {
    const LARGEST: i32 = 15 * 9;

    #[inline(always)]
    fn unpack(self, block: &[u8], out: &mut Unpacked) {
        out.scale = f16_at(block, 0) * 0.125;
        let word = |k: usize| u16_at(block, 34 + 2 * k);
        out.scales_of_32(|k| 2 * (word(k) >> 12 & 7) as i8 + 1);
        for (g, codes) in out.codes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let h = word(g / 4);
            let index = usize::from(block[2 + g]) | usize::from(h >> (3 * (g % 4)) & 7) << 8;
            *codes = shifted(&codebook::IQ1[index], h & 0x8000 != 0);
        }
    }
}

/// Bytes: 32 low indices; 32 nibbles of 3 high index bits and the shift's sign; four u16, each four times 3 bits `t`
/// and 4 bits of `d`. Value: `d · (2t + 1) · (g ± 0.125)`.
#[derive(Clone, Copy)]
pub(crate) struct Iq1M;

impl Format for Iq1M {
    const LARGEST: i32 = 15 * 9;

    #[inline(always)]
    fn unpack(self, block: &[u8], out: &mut Unpacked) {
        let c: [u16; 4] = std::array::from_fn(|j| u16_at(block, 48 + 2 * j));
        let d = c[0] >> 12 | c[1] >> 8 & 0xf0 | c[2] >> 4 & 0xf00 | c[3] & 0xf000;
        out.scale = f16_to_f32(d) * 0.125;
        out.scales = std::array::from_fn(|k| 2 * (c[k / 4] >> (3 * (k % 4)) & 7) as i8 + 1);
        for (g, codes) in out.codes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let h = block[32 + g / 2] >> (4 * (g % 2));
            let index = usize::from(block[g]) | usize::from(h & 7) << 8;
            *codes = shifted(&codebook::IQ1[index], h & 8 != 0);
        }
    }
}

/// Nibbles as levels.
#[inline(always)]
fn levels(table: &[i8; 16], packed: &[u8; 16]) -> [i8; 32] {
    nibbles(packed).map(|n| table[usize::from(n)])
}

/// Bytes: `d` f16, 16 nibble pairs. Value: `d · level`.
#[derive(Clone, Copy)]
pub(crate) struct Iq4Nl;

impl Format for Iq4Nl {
    const LARGEST: i32 = 127;

    #[inline(always)]
    fn unpack(self, block: &[u8], out: &mut Unpacked) {
        *out.one_scale(f16_at(block, 0), 0.0) = levels(&codebook::IQ4, part(block, 2));
    }
}

/// Bytes: `d` f16, u16 of high and 4 bytes of low sub-scale bits, 128 of nibble pairs.
/// Value: `d · (sc - 32) · level`.
#[derive(Clone, Copy)]
pub(crate) struct Iq4Xs;

impl Format for Iq4Xs {
    const LARGEST: i32 = 32 * 127;

    #[inline(always)]
    fn unpack(self, block: &[u8], out: &mut Unpacked) {
        out.scale = f16_at(block, 0);
        out.scales_of_32(|j| {
            let low = block[4 + j / 2] >> (4 * (j % 2)) & 15;
            let high = u16_at(block, 2) >> (2 * j) & 3;
            (low | (high as u8) << 4) as i8 - 32
        });
        for (j, run) in out.runs_of_32().enumerate() {
            *run = levels(&codebook::IQ4, part(block, 8 + 16 * j));
        }
    }
}

/// Bytes: exponent `e`, 16 nibble pairs. Value: `2^(e - 128) · level`, the levels being doubled E2M1.
///
/// `e = 255` is a number here as in GGML, although the OCP standard makes it NaN.
#[derive(Clone, Copy)]
pub(crate) struct Mxfp4;

impl Format for Mxfp4 {
    const LARGEST: i32 = 12;

    #[inline(always)]
    fn unpack(self, block: &[u8], out: &mut Unpacked) {
        let scale = match block[0] {
            // Below the normal range of f32: 2^-128 and 2^-127.
            0 => 0x0020_0000,
            1 => 0x0040_0000,
            e => (u32::from(e) - 1) << 23,
        };
        *out.one_scale(f32::from_bits(scale), 0.0) = levels(&codebook::FP4, part(block, 1));
    }
}

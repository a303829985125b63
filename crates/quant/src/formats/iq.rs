//! Formats whose codes name levels or short vectors: the "IQ" family and MXFP4.

use super::legacy::nibble;
use super::{Format, Integers, f16_at, u16_at, u32_at};
use crate::codebook::{self, even_signs, sign};
use crate::float::f16_to_f32;

/// A run of values that share a sub-scale: `odd · value` in units of the block's scale.
///
/// All codebook formats have the shape `d · c · (2t + 1) · v` with a constant `c`, a 3- or 4-bit `t`, and a small
/// integer `v`, so one walk over a block serves decoding and products.
trait Runs {
    /// Values in a run.
    const RUN: usize;
    /// The constant `c`.
    const UNIT: f32;

    fn d(block: &[u8]) -> f32;

    /// `t` of run `k`.
    fn t(block: &[u8], k: usize) -> i32;

    /// Values of run `k`.
    fn values(block: &[u8], k: usize, out: &mut [i32]);
}

#[inline(always)]
fn integers_of_runs<R: Runs>(block: &[u8], out: &mut Integers) {
    out.scale = R::d(block) * R::UNIT;
    for (k, run) in out.weights.chunks_exact_mut(R::RUN).enumerate() {
        R::values(block, k, run);
        let odd = 2 * R::t(block, k) + 1;
        run.iter_mut().for_each(|w| *w *= odd);
    }
}

/// Decodes with the sub-scale that `scale(d, t)` gives, rounded as the reference does.
#[inline(always)]
fn decode_runs<R: Runs>(block: &[u8], out: &mut [f32], scale: impl Fn(f32, f32) -> f32) {
    let d = R::d(block);
    let mut values = [0; 32];
    for (k, run) in out.chunks_exact_mut(R::RUN).enumerate() {
        let s = scale(d, R::t(block, k) as f32);
        let values = &mut values[..R::RUN];
        R::values(block, k, values);
        for (y, v) in run.iter_mut().zip(values) {
            *y = s * *v as f32;
        }
    }
}

#[inline(always)]
fn signed<const N: usize>(entry: &[i8; N], signs: u8, out: &mut [i32]) {
    for (j, (w, g)) in out.iter_mut().zip(entry).enumerate() {
        *w = i32::from(*g) * sign(signs, j);
    }
}

macro_rules! runs_format {
    ($name:ident, $bytes:literal, |$d:ident, $t:ident| $scale:expr) => {
        impl Format for $name {
            const LEN: usize = 256;
            const BYTES: usize = $bytes;

            fn decode(block: &[u8], out: &mut [f32]) {
                decode_runs::<Self>(block, out, |$d, $t| $scale);
            }

            fn integers(block: &[u8], out: &mut Integers) {
                integers_of_runs::<Self>(block, out);
            }
        }
    };
}

pub(crate) struct Iq2Xxs;

impl Runs for Iq2Xxs {
    const RUN: usize = 32;
    const UNIT: f32 = 0.125;

    fn d(block: &[u8]) -> f32 {
        f16_at(block, 0)
    }

    fn t(block: &[u8], k: usize) -> i32 {
        (u32_at(block, 6 + 8 * k) >> 28) as i32
    }

    fn values(block: &[u8], k: usize, out: &mut [i32]) {
        let signs = u32_at(block, 6 + 8 * k);
        for (l, group) in out.chunks_exact_mut(8).enumerate() {
            let entry = &codebook::IQ2_XXS[usize::from(block[2 + 8 * k + l])];
            signed(entry, even_signs((signs >> (7 * l)) as u8 & 127), group);
        }
    }
}

runs_format!(Iq2Xxs, 66, |d, t| d * (0.5 + t) * 0.25);

pub(crate) struct Iq2Xs;

impl Runs for Iq2Xs {
    const RUN: usize = 16;
    const UNIT: f32 = 0.125;

    fn d(block: &[u8]) -> f32 {
        f16_at(block, 0)
    }

    fn t(block: &[u8], k: usize) -> i32 {
        i32::from((block[66 + k / 2] >> (4 * (k & 1))) & 15)
    }

    fn values(block: &[u8], k: usize, out: &mut [i32]) {
        for (l, group) in out.chunks_exact_mut(8).enumerate() {
            let q = u16_at(block, 2 + 2 * (2 * k + l));
            signed(&codebook::IQ2_XS[usize::from(q & 511)], even_signs((q >> 9) as u8), group);
        }
    }
}

runs_format!(Iq2Xs, 74, |d, t| d * (0.5 + t) * 0.25);

pub(crate) struct Iq2S;

impl Runs for Iq2S {
    const RUN: usize = 16;
    const UNIT: f32 = 0.125;

    fn d(block: &[u8]) -> f32 {
        f16_at(block, 0)
    }

    fn t(block: &[u8], k: usize) -> i32 {
        i32::from((block[74 + k / 2] >> (4 * (k & 1))) & 15)
    }

    fn values(block: &[u8], k: usize, out: &mut [i32]) {
        for (l, group) in out.chunks_exact_mut(8).enumerate() {
            let g = 2 * k + l;
            let high = (block[66 + g / 4] >> (2 * (g % 4))) & 3;
            let index = usize::from(block[2 + g]) | usize::from(high) << 8;
            signed(&codebook::IQ2_S[index], block[34 + g], group);
        }
    }
}

runs_format!(Iq2S, 82, |d, t| d * (0.5 + t) * 0.25);

pub(crate) struct Iq3Xxs;

impl Runs for Iq3Xxs {
    const RUN: usize = 32;
    const UNIT: f32 = 0.25;

    fn d(block: &[u8]) -> f32 {
        f16_at(block, 0)
    }

    fn t(block: &[u8], k: usize) -> i32 {
        (u32_at(block, 66 + 4 * k) >> 28) as i32
    }

    fn values(block: &[u8], k: usize, out: &mut [i32]) {
        let word = u32_at(block, 66 + 4 * k);
        for (l, group) in out.chunks_exact_mut(8).enumerate() {
            let signs = even_signs((word >> (7 * l)) as u8 & 127);
            let index = 2 + 8 * k + 2 * l;
            signed(&codebook::IQ3_XXS[usize::from(block[index])], signs, &mut group[..4]);
            signed(&codebook::IQ3_XXS[usize::from(block[index + 1])], signs >> 4, &mut group[4..]);
        }
    }
}

runs_format!(Iq3Xxs, 98, |d, t| d * (0.5 + t) * 0.5);

pub(crate) struct Iq3S;

impl Runs for Iq3S {
    const RUN: usize = 32;
    const UNIT: f32 = 1.0;

    fn d(block: &[u8]) -> f32 {
        f16_at(block, 0)
    }

    fn t(block: &[u8], k: usize) -> i32 {
        i32::from((block[106 + k / 2] >> (4 * (k & 1))) & 15)
    }

    fn values(block: &[u8], k: usize, out: &mut [i32]) {
        for (l, group) in out.chunks_exact_mut(4).enumerate() {
            let g = 8 * k + l;
            let index = usize::from(block[2 + g]) | usize::from((block[66 + k] >> l) & 1) << 8;
            signed(&codebook::IQ3_S[index], block[74 + g / 2] >> (4 * (g & 1)), group);
        }
    }
}

runs_format!(Iq3S, 110, |d, t| d * (1.0 + 2.0 * t));

/// The ternary grids shift every value by an eighth: `8·g ± 1` in units of an eighth.
#[inline(always)]
fn shifted(entry: &[i8; 8], minus: bool, out: &mut [i32]) {
    let shift = if minus { -1 } else { 1 };
    for (w, g) in out.iter_mut().zip(entry) {
        *w = 8 * i32::from(*g) + shift;
    }
}

pub(crate) struct Iq1S;

impl Runs for Iq1S {
    const RUN: usize = 32;
    const UNIT: f32 = 0.125;

    fn d(block: &[u8]) -> f32 {
        f16_at(block, 0)
    }

    fn t(block: &[u8], k: usize) -> i32 {
        i32::from((u16_at(block, 34 + 2 * k) >> 12) & 7)
    }

    fn values(block: &[u8], k: usize, out: &mut [i32]) {
        let h = u16_at(block, 34 + 2 * k);
        for (l, group) in out.chunks_exact_mut(8).enumerate() {
            let index = usize::from(block[2 + 4 * k + l]) | usize::from((h >> (3 * l)) & 7) << 8;
            shifted(&codebook::IQ1[index], h & 0x8000 != 0, group);
        }
    }
}

// An eighth is exact, so scaling by it before or after the product gives the same bits.
runs_format!(Iq1S, 50, |d, t| d * (2.0 * t + 1.0) * 0.125);

pub(crate) struct Iq1M;

impl Runs for Iq1M {
    const RUN: usize = 8;
    const UNIT: f32 = 0.125;

    fn d(block: &[u8]) -> f32 {
        let c = |j: usize| u16_at(block, 48 + 2 * j);
        f16_to_f32((c(0) >> 12) | ((c(1) >> 8) & 0xf0) | ((c(2) >> 4) & 0xf00) | (c(3) & 0xf000))
    }

    fn t(block: &[u8], k: usize) -> i32 {
        let ib = k / 4;
        let shift = 6 * (ib & 1) + 3 * ((k % 4) / 2);
        i32::from((u16_at(block, 48 + 2 * (ib / 2)) >> shift) & 7)
    }

    fn values(block: &[u8], k: usize, out: &mut [i32]) {
        let h = block[32 + k / 2] >> (4 * (k & 1));
        let index = usize::from(block[k]) | usize::from(h & 7) << 8;
        shifted(&codebook::IQ1[index], h & 8 != 0, out);
    }
}

runs_format!(Iq1M, 56, |d, t| d * (2.0 * t + 1.0) * 0.125);

pub(crate) struct Iq4Nl;

impl Format for Iq4Nl {
    const LEN: usize = 32;
    const BYTES: usize = 18;

    fn decode(block: &[u8], out: &mut [f32]) {
        let d = f16_at(block, 0);
        for (i, y) in out.iter_mut().enumerate() {
            *y = d * f32::from(codebook::IQ4[nibble(&block[2..], i) as usize]);
        }
    }

    fn integers(block: &[u8], out: &mut Integers) {
        out.scale = f16_at(block, 0);
        for (i, w) in out.weights[..32].iter_mut().enumerate() {
            *w = i32::from(codebook::IQ4[nibble(&block[2..], i) as usize]);
        }
    }
}

pub(crate) struct Iq4Xs;

impl Iq4Xs {
    #[inline(always)]
    fn scale(block: &[u8], j: usize) -> i32 {
        let low = (block[4 + j / 2] >> (4 * (j & 1))) & 15;
        let high = (u16_at(block, 2) >> (2 * j)) as u8 & 3;
        i32::from(low | (high << 4)) - 32
    }

    #[inline(always)]
    fn level(block: &[u8], i: usize) -> i32 {
        let (j, i) = (i / 32, i % 32);
        i32::from(codebook::IQ4[nibble(&block[8 + 16 * j..], i) as usize])
    }
}

impl Format for Iq4Xs {
    const LEN: usize = 256;
    const BYTES: usize = 136;

    fn decode(block: &[u8], out: &mut [f32]) {
        let d = f16_at(block, 0);
        for (i, y) in out.iter_mut().enumerate() {
            *y = d * Self::scale(block, i / 32) as f32 * Self::level(block, i) as f32;
        }
    }

    fn integers(block: &[u8], out: &mut Integers) {
        out.scale = f16_at(block, 0);
        for (i, w) in out.weights.iter_mut().enumerate() {
            *w = Self::scale(block, i / 32) * Self::level(block, i);
        }
    }
}

pub(crate) struct Mxfp4;

impl Mxfp4 {
    /// `2^(e - 128)`: E8M0 with the bias of doubled E2M1 values; the two smallest are subnormal.
    #[inline(always)]
    const fn scale(e: u8) -> f32 {
        f32::from_bits(match e {
            0 => 0x0020_0000,
            1 => 0x0040_0000,
            e => (e as u32 - 1) << 23,
        })
    }
}

impl Format for Mxfp4 {
    const LEN: usize = 32;
    const BYTES: usize = 17;

    fn decode(block: &[u8], out: &mut [f32]) {
        let d = Self::scale(block[0]);
        for (i, y) in out.iter_mut().enumerate() {
            *y = d * f32::from(codebook::FP4[nibble(&block[1..], i) as usize]);
        }
    }

    fn integers(block: &[u8], out: &mut Integers) {
        out.scale = Self::scale(block[0]);
        for (i, w) in out.weights[..32].iter_mut().enumerate() {
            *w = i32::from(codebook::FP4[nibble(&block[1..], i) as usize]);
        }
    }
}

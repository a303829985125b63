//! One type per block format: how a block decodes, and which exact integers it multiplies activations with.

mod iq;
mod kquants;
mod legacy;

pub(crate) use iq::{Iq1M, Iq1S, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs, Iq4Nl, Iq4Xs, Mxfp4};
pub use kquants::scale_min_k4;
pub(crate) use kquants::{Q2K, Q3K, Q4K, Q5K, Q6K};
pub(crate) use legacy::{Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};

use crate::float::f16_to_f32;
use crate::q8::GROUP;

/// Most values in a block.
pub(crate) const MAX_BLOCK: usize = 256;

/// A block as exact integers times one scale, plus group minima times another.
pub(crate) struct Integers {
    /// Sub-scale times code, `LEN` of them.
    pub(crate) weights: [i32; MAX_BLOCK],
    /// Minimum of each group of 16, in units of `min_scale`.
    pub(crate) mins: [i32; MAX_BLOCK / GROUP],
    /// Scale of the weights.
    pub(crate) scale: f32,
    /// Scale of the minima, with its sign: what is added is `min_scale · min · Σ x`.
    pub(crate) min_scale: f32,
}

/// A block format.
pub(crate) trait Format {
    /// Values in a block.
    const LEN: usize;
    /// Bytes of a block.
    const BYTES: usize;
    /// Whether a block has minima.
    const HAS_MIN: bool = false;

    /// The values of a block, rounded as the formula is written, left to right.
    fn decode(block: &[u8], out: &mut [f32]);

    /// The integers of a block; fields that the format lacks keep what they hold.
    fn integers(block: &[u8], out: &mut Integers);
}

#[inline(always)]
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

#[inline(always)]
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

#[inline(always)]
pub(crate) fn f16_at(bytes: &[u8], at: usize) -> f32 {
    f16_to_f32(u16_at(bytes, at))
}

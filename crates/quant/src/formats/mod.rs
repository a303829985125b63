//! One type per block format: where its scales and codes lie. Everything else follows from [`Format::unpack`].

mod affine;
mod iq;
mod kquants;
mod plain;

pub(crate) use affine::{Affine, split_scale};
pub(crate) use iq::{Iq1M, Iq1S, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs, Iq4Nl, Iq4Xs, Mxfp4};
pub(crate) use kquants::{Q2K, Q3K, Q4K, Q5K, Q6K};
pub(crate) use plain::{Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};

use crate::float::f16_to_f32;
use crate::q8::GROUP;

/// Most values in a block.
pub(crate) const MAX_BLOCK: usize = 256;
/// Most groups in a block.
pub(crate) const MAX_GROUPS: usize = MAX_BLOCK / GROUP;

/// A block taken apart: value `i` of group `g` is `scale · scales[g] · codes[i] + min_scale · mins[g]`, where a format
/// may add a constant to every code.
///
/// Blocks of 32 have two groups of 16, blocks of 256 have sixteen; what lies behind them is left over.
#[derive(Debug, Clone)]
pub struct Unpacked {
    /// Scale of the codes.
    pub scale: f32,
    /// Scale of the minima with its sign; without meaning unless the format has minima.
    pub min_scale: f32,
    /// Integer sub-scale of each group.
    pub scales: [i8; MAX_GROUPS],
    /// Integer minimum of each group.
    pub mins: [i8; MAX_GROUPS],
    /// Integer codes.
    pub codes: [i8; MAX_BLOCK],
}

impl Unpacked {
    pub(crate) const fn new() -> Self {
        Self {
            scale: 0.0,
            min_scale: 0.0,
            scales: [1; MAX_GROUPS],
            mins: [1; MAX_GROUPS],
            codes: [0; MAX_BLOCK],
        }
    }

    /// A block of 32 with one scale for all.
    #[inline(always)]
    fn one_scale(&mut self, scale: f32, min_scale: f32) -> &mut [i8; 32] {
        (self.scale, self.min_scale) = (scale, min_scale);
        self.scales[..2].fill(1);
        self.mins[..2].fill(1);
        self.codes.first_chunk_mut().expect("32 is below 256")
    }

    /// Sub-scales of runs of 32 values: two groups each.
    #[inline(always)]
    fn scales_of_32(&mut self, scale: impl Fn(usize) -> i8) {
        for (j, pair) in self.scales.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            pair.fill(scale(j));
        }
    }

    /// The eight runs of 32 codes.
    #[inline(always)]
    fn runs_of_32(&mut self) -> impl Iterator<Item = &mut [i8; 32]> {
        self.codes.as_chunks_mut().0.iter_mut()
    }
}

impl Default for Unpacked {
    /// A block of zeros.
    fn default() -> Self {
        Self::new()
    }
}

/// A block format.
///
/// A 16-bit float has 11 significant bits and the product of a sub-scale and a code has at most 13, so
/// `scale · sub-scale · code` is exact in f32 in any order (also times a power of two). That is why one description
/// serves [`crate::decode_row`], which must round as other software does, and [`crate::dot_q8`]. Scales of 32 bits
/// come only where every sub-scale is 1.
pub(crate) trait Format: Copy {
    /// Largest `|sub-scale · code|`.
    const LARGEST: i32;
    /// Largest minimum of a group; 0 if the format has none.
    const LARGEST_MIN: i32 = 0;

    /// Added to every code: 8-bit codes without a sign do not fit into the signed bytes of [`Unpacked`].
    const OFFSET: i16 = 0;

    /// Takes a whole block apart. Its length and bytes are those of the [`crate::BlockType`].
    fn unpack(self, block: &[u8], out: &mut Unpacked);
}

/// `N` bytes from `at`.
#[inline(always)]
fn part<const N: usize>(block: &[u8], at: usize) -> &[u8; N] {
    block[at..].first_chunk().expect("the part lies inside its block")
}

#[inline(always)]
fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(*part(block, at))
}

#[inline(always)]
fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(*part(block, at))
}

#[inline(always)]
fn f16_at(block: &[u8], at: usize) -> f32 {
    f16_to_f32(u16_at(block, at))
}

/// The 32 nibbles of 16 bytes: the low ones, then the high ones.
#[inline(always)]
fn nibbles(packed: &[u8; 16]) -> [u8; 32] {
    let mut nibbles = [0; 32];
    for (i, byte) in packed.iter().enumerate() {
        nibbles[i] = byte & 15;
        nibbles[16 + i] = byte >> 4;
    }
    nibbles
}

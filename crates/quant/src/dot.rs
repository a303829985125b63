//! Decoding and products of whole rows: the definitions that every faster kernel must equal bit for bit.

use crate::BlockType;
use crate::float::{bf16_to_f32, f16_to_f32};
use crate::formats::{self, Format, Integers, MAX_BLOCK};
use crate::lanes::{self, LANES};
use crate::q8::{GROUP, Q8View};

/// Runs `$body` with `$f` bound to the format of a quantised type; `$float` for the others.
macro_rules! with_format {
    ($ty:expr, $f:ident => $body:expr, $float:expr) => {{
        macro_rules! with {
            ($format:ident) => {{
                type $f = formats::$format;
                $body
            }};
        }
        match $ty {
            BlockType::F32 | BlockType::F16 | BlockType::Bf16 => $float,
            BlockType::Q4_0 => with!(Q4_0),
            BlockType::Q4_1 => with!(Q4_1),
            BlockType::Q5_0 => with!(Q5_0),
            BlockType::Q5_1 => with!(Q5_1),
            BlockType::Q8_0 => with!(Q8_0),
            BlockType::Q2K => with!(Q2K),
            BlockType::Q3K => with!(Q3K),
            BlockType::Q4K => with!(Q4K),
            BlockType::Q5K => with!(Q5K),
            BlockType::Q6K => with!(Q6K),
            BlockType::Iq1S => with!(Iq1S),
            BlockType::Iq1M => with!(Iq1M),
            BlockType::Iq2Xxs => with!(Iq2Xxs),
            BlockType::Iq2Xs => with!(Iq2Xs),
            BlockType::Iq2S => with!(Iq2S),
            BlockType::Iq3Xxs => with!(Iq3Xxs),
            BlockType::Iq3S => with!(Iq3S),
            BlockType::Iq4Nl => with!(Iq4Nl),
            BlockType::Iq4Xs => with!(Iq4Xs),
            BlockType::Mxfp4 => with!(Mxfp4),
        }
    }};
}

/// Decodes a row of `out.len()` values.
///
/// # Panics
/// If `row` is not exactly that row's bytes.
#[inline(always)]
pub fn decode_row(ty: BlockType, row: &[u8], out: &mut [f32]) {
    assert_eq!(ty.row_bytes(out.len()), Some(row.len()), "the bytes of a {ty} row of {} values", out.len());
    with_format!(ty, F => decode_blocks::<F>(row, out), decode_floats(ty, row, out));
}

#[inline(always)]
fn decode_blocks<F: Format>(row: &[u8], out: &mut [f32]) {
    for (block, out) in row.chunks_exact(F::BYTES).zip(out.chunks_exact_mut(F::LEN)) {
        F::decode(block, out);
    }
}

#[inline(always)]
fn decode_floats(ty: BlockType, row: &[u8], out: &mut [f32]) {
    match ty {
        BlockType::F32 => {
            for (y, b) in out.iter_mut().zip(row.as_chunks::<4>().0) {
                *y = f32::from_le_bytes(*b);
            }
        }
        BlockType::F16 => {
            for (y, b) in out.iter_mut().zip(row.as_chunks::<2>().0) {
                *y = f16_to_f32(u16::from_le_bytes(*b));
            }
        }
        BlockType::Bf16 => {
            for (y, b) in out.iter_mut().zip(row.as_chunks::<2>().0) {
                *y = bf16_to_f32(u16::from_le_bytes(*b));
            }
        }
        _ => unreachable!("{ty} has blocks"),
    }
}

/// `Σ w·x` with float activations: values decoded as by [`decode_row`], summed as by [`lanes::dot`].
///
/// # Panics
/// If `row` is not exactly the bytes of a row of `x.len()` values.
#[inline(always)]
pub fn dot_f32(ty: BlockType, row: &[u8], x: &[f32]) -> f32 {
    assert_eq!(ty.row_bytes(x.len()), Some(row.len()), "the bytes of a {ty} row of {} values", x.len());
    let mut sums = [0.0; LANES];
    let mut values = [0.0; MAX_BLOCK];
    // Blocks are a multiple of the lanes, and floats are taken 256 at a time, so pieces start at lane 0.
    let len = if ty.is_float() { MAX_BLOCK } else { ty.block_len() };
    let bytes = len / ty.block_len() * ty.block_bytes();
    for (piece, x) in row.chunks(bytes).zip(x.chunks(len)) {
        let values = &mut values[..x.len()];
        decode_row(ty, piece, values);
        lanes::accumulate(&mut sums, values, x);
    }
    lanes::tree(sums)
}

/// `Σ w·x` with 8-bit activations: the definition.
///
/// Inside a block everything is an exact i32: `isum = Σ weight·quant`, where a weight is its sub-scale times its
/// code, and `msum = Σ_group min·Σ quant`. The largest `|isum|` is 2^27.0 (`Q6_K`: 256 · 128 · 32 · 127). Then, block
/// after block, `acc = fma(d·dx, isum, acc)` and, for formats with minima, `acc = fma(m·dx, msum, acc)`, where `dx`
/// is the activation scale, `d` the block scale (times the format's constant) and `m` is `-dmin` (or `m` of `Q4_1`
/// and `Q5_1`); integers are converted with rounding to nearest even.
///
/// F32, F16 and BF16 have no integers and are never multiplied with 8-bit activations.
///
/// # Panics
/// If `ty` is a float type, or lengths or blocks do not belong together.
#[inline(always)]
pub fn dot_q8(ty: BlockType, row: &[u8], x: Q8View<'_>) -> f32 {
    assert_eq!(ty.row_bytes(x.quants.len()), Some(row.len()), "the bytes of a {ty} row");
    assert_eq!(x.block, ty.activation_block(), "activations in blocks of the weight");
    with_format!(ty, F => dot_blocks::<F>(row, x), panic!("{ty} weights are multiplied in float"))
}

#[inline(always)]
fn dot_blocks<F: Format>(row: &[u8], x: Q8View<'_>) -> f32 {
    let mut integers =
        Integers { weights: [0; MAX_BLOCK], mins: [0; MAX_BLOCK / GROUP], scale: 0.0, min_scale: 0.0 };
    let mut acc = 0.0_f32;
    let blocks = row.chunks_exact(F::BYTES).zip(x.quants.chunks_exact(F::LEN));
    for ((block, quants), (sums, dx)) in blocks.zip(x.sums.chunks_exact(F::LEN / GROUP).zip(x.scales)) {
        F::integers(block, &mut integers);
        let isum: i32 = integers.weights.iter().zip(quants).map(|(w, q)| w * i32::from(*q)).sum();
        acc = (integers.scale * dx).mul_add(isum as f32, acc);
        if F::HAS_MIN {
            let msum: i32 = integers.mins.iter().zip(sums).map(|(m, s)| m * i32::from(*s)).sum();
            acc = (integers.min_scale * dx).mul_add(msum as f32, acc);
        }
    }
    acc
}

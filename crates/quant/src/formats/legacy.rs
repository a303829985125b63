//! Blocks of 32: a scale, sometimes a minimum, 4, 5 or 8 bits a value.
//!
//! The low nibbles hold the first half of a block, the high nibbles the second.

use super::{Format, Integers, f16_at, u32_at};

/// Nibble `i` of 16 bytes that hold 32.
#[inline(always)]
pub(super) fn nibble(packed: &[u8], i: usize) -> i32 {
    i32::from((packed[i % 16] >> (4 * (i / 16))) & 15)
}

pub(crate) struct Q4_0;

impl Format for Q4_0 {
    const LEN: usize = 32;
    const BYTES: usize = 18;

    fn decode(block: &[u8], out: &mut [f32]) {
        let d = f16_at(block, 0);
        for (i, y) in out.iter_mut().enumerate() {
            *y = d * (nibble(&block[2..], i) - 8) as f32;
        }
    }

    fn integers(block: &[u8], out: &mut Integers) {
        out.scale = f16_at(block, 0);
        for (i, w) in out.weights[..32].iter_mut().enumerate() {
            *w = nibble(&block[2..], i) - 8;
        }
    }
}

pub(crate) struct Q4_1;

impl Format for Q4_1 {
    const LEN: usize = 32;
    const BYTES: usize = 20;
    const HAS_MIN: bool = true;

    fn decode(block: &[u8], out: &mut [f32]) {
        let (d, m) = (f16_at(block, 0), f16_at(block, 2));
        for (i, y) in out.iter_mut().enumerate() {
            *y = d * nibble(&block[4..], i) as f32 + m;
        }
    }

    fn integers(block: &[u8], out: &mut Integers) {
        (out.scale, out.min_scale) = (f16_at(block, 0), f16_at(block, 2));
        out.mins[..2].fill(1);
        for (i, w) in out.weights[..32].iter_mut().enumerate() {
            *w = nibble(&block[4..], i);
        }
    }
}

/// Code `i` of a 5-bit block whose high bits start at `at` and whose nibbles follow.
#[inline(always)]
fn five_bits(block: &[u8], at: usize, i: usize) -> i32 {
    let high = (u32_at(block, at) >> i) & 1;
    nibble(&block[at + 4..], i) | (high << 4) as i32
}

pub(crate) struct Q5_0;

impl Format for Q5_0 {
    const LEN: usize = 32;
    const BYTES: usize = 22;

    fn decode(block: &[u8], out: &mut [f32]) {
        let d = f16_at(block, 0);
        for (i, y) in out.iter_mut().enumerate() {
            *y = d * (five_bits(block, 2, i) - 16) as f32;
        }
    }

    fn integers(block: &[u8], out: &mut Integers) {
        out.scale = f16_at(block, 0);
        for (i, w) in out.weights[..32].iter_mut().enumerate() {
            *w = five_bits(block, 2, i) - 16;
        }
    }
}

pub(crate) struct Q5_1;

impl Format for Q5_1 {
    const LEN: usize = 32;
    const BYTES: usize = 24;
    const HAS_MIN: bool = true;

    fn decode(block: &[u8], out: &mut [f32]) {
        let (d, m) = (f16_at(block, 0), f16_at(block, 2));
        for (i, y) in out.iter_mut().enumerate() {
            *y = d * five_bits(block, 4, i) as f32 + m;
        }
    }

    fn integers(block: &[u8], out: &mut Integers) {
        (out.scale, out.min_scale) = (f16_at(block, 0), f16_at(block, 2));
        out.mins[..2].fill(1);
        for (i, w) in out.weights[..32].iter_mut().enumerate() {
            *w = five_bits(block, 4, i);
        }
    }
}

pub(crate) struct Q8_0;

impl Format for Q8_0 {
    const LEN: usize = 32;
    const BYTES: usize = 34;

    fn decode(block: &[u8], out: &mut [f32]) {
        let d = f16_at(block, 0);
        for (y, q) in out.iter_mut().zip(&block[2..]) {
            *y = d * f32::from(q.cast_signed());
        }
    }

    fn integers(block: &[u8], out: &mut Integers) {
        out.scale = f16_at(block, 0);
        for (w, q) in out.weights[..32].iter_mut().zip(&block[2..]) {
            *w = i32::from(q.cast_signed());
        }
    }
}

//! Blocks of 256 with integer sub-scales: the "K" formats.

use super::{Format, Integers, f16_at};

/// Two-bit code `i` of 64 bytes: 32 bytes hold four runs of 32 values.
#[inline(always)]
fn crumb(packed: &[u8], i: usize) -> i32 {
    i32::from((packed[32 * (i / 128) + i % 32] >> (2 * ((i % 128) / 32))) & 3)
}

pub(crate) struct Q2K;

impl Format for Q2K {
    const LEN: usize = 256;
    const BYTES: usize = 84;
    const HAS_MIN: bool = true;

    fn decode(block: &[u8], out: &mut [f32]) {
        let (d, dmin) = (f16_at(block, 80), f16_at(block, 82));
        for (i, y) in out.iter_mut().enumerate() {
            let sc = block[i / 16];
            let code = crumb(&block[16..80], i) as f32;
            *y = d * f32::from(sc & 15) * code - dmin * f32::from(sc >> 4);
        }
    }

    fn integers(block: &[u8], out: &mut Integers) {
        (out.scale, out.min_scale) = (f16_at(block, 80), -f16_at(block, 82));
        for (min, sc) in out.mins.iter_mut().zip(block) {
            *min = i32::from(sc >> 4);
        }
        for (i, w) in out.weights.iter_mut().enumerate() {
            *w = i32::from(block[i / 16] & 15) * crumb(&block[16..80], i);
        }
    }
}

pub(crate) struct Q3K;

impl Q3K {
    #[inline(always)]
    fn scale(block: &[u8], j: usize) -> i32 {
        let s = &block[96..108];
        let low = (s[j % 8] >> (4 * (j / 8))) & 15;
        let high = (s[8 + j % 4] >> (2 * (j / 4))) & 3;
        i32::from(low | (high << 4)) - 32
    }

    #[inline(always)]
    fn code(block: &[u8], i: usize) -> i32 {
        let high = (block[i % 32] >> (i / 32)) & 1;
        crumb(&block[32..96], i) - if high == 1 { 0 } else { 4 }
    }
}

impl Format for Q3K {
    const LEN: usize = 256;
    const BYTES: usize = 110;

    fn decode(block: &[u8], out: &mut [f32]) {
        let d = f16_at(block, 108);
        for (i, y) in out.iter_mut().enumerate() {
            *y = d * Self::scale(block, i / 16) as f32 * Self::code(block, i) as f32;
        }
    }

    fn integers(block: &[u8], out: &mut Integers) {
        out.scale = f16_at(block, 108);
        for (i, w) in out.weights.iter_mut().enumerate() {
            *w = Self::scale(block, i / 16) * Self::code(block, i);
        }
    }
}

/// Scale and minimum `j` of the 12 bytes that `Q4_K` and `Q5_K` share, 6 bits each.
#[inline(always)]
pub const fn scale_min_k4(s: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        (s[j] & 63, s[j + 4] & 63)
    } else {
        ((s[j + 4] & 15) | ((s[j - 4] >> 6) << 4), (s[j + 4] >> 4) | ((s[j] >> 6) << 4))
    }
}

/// Nibble `i` of 128 bytes: 32 bytes hold two runs of 32 values.
#[inline(always)]
fn run_nibble(packed: &[u8], i: usize) -> i32 {
    i32::from((packed[32 * (i / 64) + i % 32] >> (4 * ((i / 32) & 1))) & 15)
}

/// Decodes a block of eight runs of 32 with 6-bit scales and minima; `code` gives the code of value `i`.
#[inline(always)]
fn decode_k4(block: &[u8], out: &mut [f32], code: impl Fn(usize) -> i32) {
    let (d, dmin) = (f16_at(block, 0), f16_at(block, 2));
    for (j, run) in out.chunks_exact_mut(32).enumerate() {
        let (sc, mn) = scale_min_k4(&block[4..16], j);
        for (i, y) in run.iter_mut().enumerate() {
            *y = d * f32::from(sc) * code(32 * j + i) as f32 - dmin * f32::from(mn);
        }
    }
}

#[inline(always)]
fn integers_k4(block: &[u8], out: &mut Integers, code: impl Fn(usize) -> i32) {
    (out.scale, out.min_scale) = (f16_at(block, 0), -f16_at(block, 2));
    for j in 0..8 {
        let (sc, mn) = scale_min_k4(&block[4..16], j);
        out.mins[2 * j..2 * j + 2].fill(i32::from(mn));
        for i in 32 * j..32 * j + 32 {
            out.weights[i] = i32::from(sc) * code(i);
        }
    }
}

pub(crate) struct Q4K;

impl Format for Q4K {
    const LEN: usize = 256;
    const BYTES: usize = 144;
    const HAS_MIN: bool = true;

    fn decode(block: &[u8], out: &mut [f32]) {
        decode_k4(block, out, |i| run_nibble(&block[16..144], i));
    }

    fn integers(block: &[u8], out: &mut Integers) {
        integers_k4(block, out, |i| run_nibble(&block[16..144], i));
    }
}

pub(crate) struct Q5K;

impl Q5K {
    #[inline(always)]
    fn code(block: &[u8], i: usize) -> i32 {
        let high = (block[16 + i % 32] >> (i / 32)) & 1;
        run_nibble(&block[48..176], i) | i32::from(high) << 4
    }
}

impl Format for Q5K {
    const LEN: usize = 256;
    const BYTES: usize = 176;
    const HAS_MIN: bool = true;

    fn decode(block: &[u8], out: &mut [f32]) {
        decode_k4(block, out, |i| Self::code(block, i));
    }

    fn integers(block: &[u8], out: &mut Integers) {
        integers_k4(block, out, |i| Self::code(block, i));
    }
}

pub(crate) struct Q6K;

impl Q6K {
    #[inline(always)]
    fn code(block: &[u8], i: usize) -> i32 {
        let (n, c, e) = (i / 128, (i % 128) / 32, i % 32);
        let low = (block[64 * n + 32 * (c & 1) + e] >> (4 * (c >> 1))) & 15;
        let high = (block[128 + 32 * n + e] >> (2 * c)) & 3;
        i32::from(low | (high << 4)) - 32
    }
}

impl Format for Q6K {
    const LEN: usize = 256;
    const BYTES: usize = 210;

    fn decode(block: &[u8], out: &mut [f32]) {
        let d = f16_at(block, 208);
        for (i, y) in out.iter_mut().enumerate() {
            *y = d * f32::from(block[192 + i / 16].cast_signed()) * Self::code(block, i) as f32;
        }
    }

    fn integers(block: &[u8], out: &mut Integers) {
        out.scale = f16_at(block, 208);
        for (i, w) in out.weights.iter_mut().enumerate() {
            *w = i32::from(block[192 + i / 16].cast_signed()) * Self::code(block, i);
        }
    }
}

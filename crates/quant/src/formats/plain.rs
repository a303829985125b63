//! Blocks of 32 with a scale, sometimes a minimum, and codes of 4, 5 or 8 bits.
//!
//! Low nibbles hold the first half of a block, high nibbles the second.

use super::{Format, Unpacked, f16_at, nibbles, part, u32_at};

/// Bytes: `d` f16, 16 nibble pairs. Value: `d · (q - 8)`.
#[derive(Clone, Copy)]
pub(crate) struct Q4_0;

impl Format for Q4_0 {
    const LARGEST: i32 = 8;

    #[inline(always)]
    fn unpack(self, block: &[u8], out: &mut Unpacked) {
        let codes = out.one_scale(f16_at(block, 0), 0.0);
        *codes = nibbles(part(block, 2)).map(|q| q as i8 - 8);
    }
}

/// Bytes: `d` f16, `m` f16, 16 nibble pairs. Value: `d · q + m`.
#[derive(Clone, Copy)]
pub(crate) struct Q4_1;

impl Format for Q4_1 {
    const LARGEST: i32 = 15;
    const LARGEST_MIN: i32 = 1;

    #[inline(always)]
    fn unpack(self, block: &[u8], out: &mut Unpacked) {
        let codes = out.one_scale(f16_at(block, 0), f16_at(block, 2));
        *codes = nibbles(part(block, 4)).map(|q| q as i8);
    }
}

/// 5-bit codes: bit 4 of code `i` is bit `i` of the u32 at `at`, the nibbles follow it.
#[inline(always)]
fn five_bits(block: &[u8], at: usize) -> [i8; 32] {
    let high = u32_at(block, at);
    let mut codes = nibbles(part(block, at + 4));
    for (i, code) in codes.iter_mut().enumerate() {
        *code |= ((high >> i) as u8 & 1) << 4;
    }
    codes.map(|q| q as i8)
}

/// Bytes: `d` f16, 32 high bits, 16 nibble pairs. Value: `d · (q - 16)`.
#[derive(Clone, Copy)]
pub(crate) struct Q5_0;

impl Format for Q5_0 {
    const LARGEST: i32 = 16;

    #[inline(always)]
    fn unpack(self, block: &[u8], out: &mut Unpacked) {
        *out.one_scale(f16_at(block, 0), 0.0) = five_bits(block, 2).map(|q| q - 16);
    }
}

/// Bytes: `d` f16, `m` f16, 32 high bits, 16 nibble pairs. Value: `d · q + m`.
#[derive(Clone, Copy)]
pub(crate) struct Q5_1;

impl Format for Q5_1 {
    const LARGEST: i32 = 31;
    const LARGEST_MIN: i32 = 1;

    #[inline(always)]
    fn unpack(self, block: &[u8], out: &mut Unpacked) {
        *out.one_scale(f16_at(block, 0), f16_at(block, 2)) = five_bits(block, 4);
    }
}

/// Bytes: `d` f16, 32 signed codes. Value: `d · q`.
#[derive(Clone, Copy)]
pub(crate) struct Q8_0;

impl Format for Q8_0 {
    const LARGEST: i32 = 128;

    #[inline(always)]
    fn unpack(self, block: &[u8], out: &mut Unpacked) {
        *out.one_scale(f16_at(block, 0), 0.0) = part(block, 2).map(u8::cast_signed);
    }
}

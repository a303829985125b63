//! The functions under test, compiled once: all formats are inlined into every caller of the real ones.
#![allow(dead_code, reason = "not every test calls all of them")]

use quant::{BlockType, Q8View};

#[inline(never)]
pub(crate) fn decode_row(ty: BlockType, row: &[u8], out: &mut [f32]) {
    quant::decode_row(ty, row, out);
}

#[inline(never)]
pub(crate) fn dot_f32(ty: BlockType, row: &[u8], x: &[f32]) -> f32 {
    quant::dot_f32(ty, row, x)
}

#[inline(never)]
pub(crate) fn dot_q8(ty: BlockType, row: &[u8], x: Q8View<'_>) -> f32 {
    quant::dot_q8(ty, row, x)
}

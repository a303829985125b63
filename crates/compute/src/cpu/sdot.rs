//! `sdot`: four lanes of 32 bits, to each of which four products of signed bytes are added.
//!
//! The intrinsics for it are not stable; the instructions are written out.
#![allow(unsafe_code, reason = "assembly, and vector loads that take pointers")]

use std::arch::aarch64::{
    float32x4_t, int8x16_t, int16x8_t, int32x4_t, vld1q_f32, vld1q_s8, vld1q_s16,
};
use std::arch::asm;

/// `acc[i] + Σ a[4·i + k] · b[4·i + k]`.
#[target_feature(enable = "neon,dotprod")]
#[inline]
pub(super) fn sdot(acc: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    let mut out = acc;
    // SAFETY: it computes on registers alone, and callers are compiled for processors that have it.
    unsafe {
        asm!(
            "sdot {out:v}.4s, {a:v}.16b, {b:v}.16b",
            out = inlateout(vreg) out, a = in(vreg) a, b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    out
}

/// `acc[i] + Σ a[4·i + k] · b[4·PART + k]`: all lanes share four bytes of `b`.
#[target_feature(enable = "neon,dotprod")]
#[inline]
pub(super) fn sdot_part<const PART: u8>(acc: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    let mut out = acc;
    // SAFETY: it computes on registers alone, and callers are compiled for processors that have it.
    unsafe {
        asm!(
            "sdot {out:v}.4s, {a:v}.16b, {b:v}.4b[{part}]",
            out = inlateout(vreg) out, a = in(vreg) a, b = in(vreg) b, part = const PART,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    out
}

#[target_feature(enable = "neon,dotprod")]
#[inline]
pub(super) fn load_i8x16(values: &[i8; 16]) -> int8x16_t {
    // SAFETY: 16 bytes; the load may be unaligned.
    unsafe { vld1q_s8(values.as_ptr()) }
}

#[target_feature(enable = "neon,dotprod")]
#[inline]
pub(super) fn load_i16x8(values: &[i16; 8]) -> int16x8_t {
    // SAFETY: 16 bytes; the load may be unaligned.
    unsafe { vld1q_s16(values.as_ptr()) }
}

#[target_feature(enable = "neon,dotprod")]
#[inline]
pub(super) fn load_f32x4(values: &[f32; 4]) -> float32x4_t {
    // SAFETY: 16 bytes; the load may be unaligned.
    unsafe { vld1q_f32(values.as_ptr()) }
}

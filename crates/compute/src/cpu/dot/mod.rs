//! Products of weight rows with activation rows, per instruction set.
//!
//! The definitions are [`quant::dot_q8`], [`quant::dot_f32`] and [`quant::quantize_into`]; every path gives their
//! bits. Four activation rows share the work of unpacking a weight row.
#![allow(unsafe_code, reason = "one call per path into functions for detected instruction sets")]

#[cfg(target_arch = "x86_64")]
pub(super) mod avx2;
#[cfg(target_arch = "aarch64")]
pub(super) mod dotprod;
#[cfg(test)]
mod tests;

use quant::{BlockType, Q8View};

use super::isa::Isa;

/// `out[c][o] = row o · xs[c]` with 8-bit activations. `rows` is `[out[c].len(), n_in]`.
///
/// # Panics
/// If `ty` is a float type, or lengths or blocks do not belong together.
pub fn rows_q8<const N: usize>(
    isa: Isa,
    ty: BlockType,
    rows: &[u8],
    xs: [Q8View<'_>; N],
    mut out: [&mut [f32]; N],
) {
    for (x, out) in xs.iter().zip(&out) {
        check(ty, rows, *x, out.len());
    }
    match isa {
        Isa::Scalar => {
            for (x, out) in xs.iter().zip(&mut out) {
                each_row(rows, out, |row| scalar_q8(ty, row, *x));
            }
        }
        // SAFETY: `Isa::Avx2` is made only after AVX2, FMA and F16C were detected on this CPU.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2(_) => unsafe { avx2::rows_q8(ty, rows, xs, out) },
        // SAFETY: `Isa::Dotprod` is made only after its instructions were detected on this CPU.
        #[cfg(target_arch = "aarch64")]
        Isa::Dotprod(_) => unsafe { dotprod::rows_q8(ty, rows, &xs, &mut out) },
    }
}

/// `out[c][o] = row o · xs[c]` with weights stored as F32, F16 or BF16.
///
/// # Panics
/// If `ty` is not a float type, or lengths do not belong together.
pub fn rows_float<const N: usize>(
    isa: Isa,
    ty: BlockType,
    rows: &[u8],
    xs: [&[f32]; N],
    mut out: [&mut [f32]; N],
) {
    assert!(ty.is_float(), "{ty} weights are decoded first");
    for (x, out) in xs.iter().zip(&out) {
        check_rows(ty, rows, x.len(), out.len());
    }
    match isa {
        // SAFETY: `Isa::Avx2` is made only after AVX2, FMA and F16C were detected on this CPU.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2(_) => unsafe { avx2::rows_float(ty, rows, xs, out) },
        _ => {
            for (x, out) in xs.iter().zip(&mut out) {
                each_row(rows, out, |row| scalar_float(ty, row, x));
            }
        }
    }
}

/// `out[c][o] = row o · xs[c]` with weights decoded by [`decode_row`], `[out[c].len(), n_in]`.
///
/// # Panics
/// If lengths do not belong together.
pub fn rows_decoded<const N: usize>(
    isa: Isa,
    rows: &[f32],
    xs: [&[f32]; N],
    mut out: [&mut [f32]; N],
) {
    for (x, out) in xs.iter().zip(&out) {
        assert_eq!(rows.len(), x.len() * out.len(), "rows of as many values as activations");
    }
    match isa {
        // SAFETY: `Isa::Avx2` is made only after AVX2, FMA and F16C were detected on this CPU.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2(_) => unsafe { avx2::rows_decoded(rows, xs, out) },
        _ => {
            for (x, out) in xs.iter().zip(&mut out) {
                for (y, row) in out.iter_mut().zip(rows.chunks_exact(x.len().max(1))) {
                    *y = quant::lanes::dot(row, x);
                }
            }
        }
    }
}

/// [`quant::decode_row`].
///
/// # Panics
/// If `row` is not exactly a row's bytes.
pub fn decode_row(isa: Isa, ty: BlockType, row: &[u8], out: &mut [f32]) {
    match isa {
        // SAFETY: `Isa::Avx2` is made only after AVX2, FMA and F16C were detected on this CPU.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2(_) => unsafe { avx2::decode_row(ty, row, out) },
        _ => quant::decode_row(ty, row, out),
    }
}

/// `out[o] = dot(row o)`.
fn each_row(rows: &[u8], out: &mut [f32], dot: impl Fn(&[u8]) -> f32) {
    let bytes = rows.len() / out.len().max(1);
    for (y, row) in out.iter_mut().zip(rows.chunks_exact(bytes.max(1))) {
        *y = dot(row);
    }
}

/// [`quant::dot_q8`], compiled once: it holds the code of every format.
#[inline(never)]
fn scalar_q8(ty: BlockType, row: &[u8], x: Q8View<'_>) -> f32 {
    quant::dot_q8(ty, row, x)
}

/// [`quant::dot_f32`], likewise.
#[inline(never)]
fn scalar_float(ty: BlockType, row: &[u8], x: &[f32]) -> f32 {
    quant::dot_f32(ty, row, x)
}

/// Asserts that `n_out` rows and an activation row belong together.
pub(super) fn check(ty: BlockType, rows: &[u8], x: Q8View<'_>, n_out: usize) {
    let n_in = x.quants.len();
    assert_eq!(x.block, ty.activation_block(), "activations in blocks of the weight");
    assert!(x.scales.len() * x.block == n_in && x.sums.len() * quant::GROUP == n_in);
    check_rows(ty, rows, n_in, n_out);
}

fn check_rows(ty: BlockType, rows: &[u8], n_in: usize, n_out: usize) {
    let bytes = ty.row_bytes(n_in).and_then(|bytes| bytes.checked_mul(n_out));
    assert_eq!(bytes, Some(rows.len()), "the bytes of {n_out} {ty} rows of {n_in} values");
}

/// 8-bit activations: [`quant::quantize_into`].
///
/// # Panics
/// If the lengths do not belong together.
pub fn quantize(
    isa: Isa,
    x: &[f32],
    block: usize,
    scales: &mut [f32],
    quants: &mut [i8],
    sums: &mut [i16],
) {
    match isa {
        Isa::Scalar => quant::quantize_into(x, block, scales, quants, sums),
        // SAFETY: `Isa::Avx2` is made only after AVX2, FMA and F16C were detected on this CPU.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2(_) => unsafe { avx2::quantize(x, block, scales, quants, sums) },
        // SAFETY: `Isa::Dotprod` is made only after its instructions were detected on this CPU.
        #[cfg(target_arch = "aarch64")]
        Isa::Dotprod(_) => unsafe { dotprod::quantize(x, block, scales, quants, sums) },
    }
}

//! Products with rows that are interleaved by eight, see [`crate::interleave`].
//!
//! A row alone ends each block with sums over the lanes of a vector and takes its sub-scales apart for itself. Eight
//! rows side by side need no sum over lanes and share the rest, and their codes are read as one stream. Sums inside a
//! block are exact and each row's blocks are added in order, so bits are those of [`quant::dot_q8`].
#![allow(
    unsafe_code,
    reason = "one call into a function for a detected instruction set; tasks rewrite parts of a matrix"
)]

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(test)]
mod tests;

use quant::{BlockType, Q8View};

use super::Machine;
use super::isa::Isa;
use super::scatter::Scatter;
use crate::interleave::{self, ROWS, has_order};

/// Whether there are kernels for interleaved rows of this type, and a matrix of `n_out` such rows is made of groups.
pub(super) const fn is_for(isa: Isa, ty: BlockType, n_out: usize) -> bool {
    let has_kernels = cfg!(target_arch = "x86_64") && !matches!(isa, Isa::Scalar);
    has_kernels && has_order(ty) && n_out.is_multiple_of(ROWS)
}

/// Interleaves the rows, of `row_bytes` each, of a matrix.
pub(super) fn interleave(machine: &mut Machine, ty: BlockType, row_bytes: usize, rows: &mut [u8]) {
    let bytes = ROWS * row_bytes;
    let (groups, rows) = (rows.len() / bytes, Scatter::new(rows));
    machine.run(groups, |local, g| {
        // SAFETY: groups differ, so their parts do not overlap.
        let group = unsafe { rows.part(g * bytes..(g + 1) * bytes) };
        interleave::interleave(ty, group, local.panel.bytes_of_rows());
    });
}

/// `out[c][o] = row o · xs[c]` with 8-bit activations. `groups` are `[out[c].len(), n_in]`, interleaved.
///
/// # Panics
/// If there are no kernels, or lengths or blocks do not belong together.
#[cfg_attr(
    not(target_arch = "x86_64"),
    expect(clippy::needless_pass_by_value, reason = "there are no kernels to pass them to")
)]
pub(super) fn rows_q8<const N: usize>(
    isa: Isa,
    ty: BlockType,
    groups: &[u8],
    xs: [Q8View<'_>; N],
    out: [&mut [f32]; N],
) {
    for (x, out) in xs.iter().zip(&out) {
        assert!(is_for(isa, ty, out.len()), "groups of {ty}");
        super::dot::check(ty, groups, *x, out.len());
    }
    match isa {
        // SAFETY: `Isa::Avx2` is made only after AVX2, FMA and F16C were detected on this CPU.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2(_) => unsafe { avx2::rows_q8(ty, groups, xs, out) },
        _ => unreachable!("asserted above"),
    }
}

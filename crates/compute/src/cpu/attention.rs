//! Causal attention, spread over rows and heads.
//!
//! Query heads that share a key-value head go in tiles of four, so that a key is loaded and converted once for all of
//! them. The definition is [`reference::attention`](crate::reference::attention).
#![allow(unsafe_code, reason = "one call per path into functions for detected instruction sets")]

#[cfg(target_arch = "x86_64")]
mod avx2;
pub(super) mod selected;

use crate::kernels::Attend;
use crate::reference::attention::{KvHead, Seen};

use super::Machine;
use super::instances;
use super::isa::Isa;
use super::scatter::Scatter;

/// Query heads of a tile.
const TILE: usize = 4;

/// Query heads of one row that share a key-value head.
pub(super) struct Queries<'a> {
    /// Head `h` is `stride·h .. stride·h + dim`.
    pub(super) q: &'a [f32],
    pub(super) stride: usize,
    pub(super) dim: usize,
}

impl<'a> Queries<'a> {
    fn head(&self, h: usize) -> &'a [f32] {
        &self.q[h * self.stride..h * self.stride + self.dim]
    }
}

/// See [`Attend`].
pub(super) fn attend(machine: &Machine, job: Attend<'_>) {
    let first_position = job.first_position;
    attend_seen(machine, job, |row| Seen::All(first_position + row + 1));
}

/// [`Attend`], where row `r` sees `seen(r)`.
fn attend_seen<'a>(machine: &Machine, job: Attend<'_>, seen: impl Fn(usize) -> Seen<'a> + Sync) {
    let Attend { q: rows, q_width, heads, gated, kv_heads, keys, values, out, .. } = job;
    let (count, dim, stride) = (heads.count, heads.dim, heads.stride);
    let n_rows = rows.len() / q_width;
    let shared_by = count / kv_heads;
    // Tiles only where enough tasks remain for all threads.
    let tiled = shared_by.is_multiple_of(TILE) && n_rows * count >= TILE * machine.pool.threads();
    let tile = if tiled { TILE } else { 1 };
    let (isa, out) = (machine.isa, Scatter::new(out));
    // Neighbouring tasks share a key-value head.
    machine.pool.run(n_rows * count / tile, |task| {
        let (row, first) = (task % n_rows, task / n_rows * tile);
        let q = &rows[row * q_width..(row + 1) * q_width][first * stride..];
        let start = (row * count + first) * dim;
        // SAFETY: tasks differ in row or in heads, so parts do not overlap.
        let out = unsafe { out.part(start..start + tile * dim) };
        let start = first / shared_by * dim;
        let kv = KvHead { keys, values, width: kv_heads * dim, start };
        attend_heads(isa, &Queries { q, stride, dim }, kv, seen(row), out);
        if gated {
            for (h, out) in out.chunks_exact_mut(dim).enumerate() {
                instances::gate(isa, out, &q[h * stride + dim..h * stride + 2 * dim]);
            }
        }
    });
}

/// `out.len() / dim` heads of one row.
fn attend_heads(isa: Isa, queries: &Queries<'_>, kv: KvHead<'_>, seen: Seen<'_>, out: &mut [f32]) {
    match isa {
        // SAFETY: `Isa::Avx2` is made only after AVX2, FMA and F16C were detected on this CPU.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2(_) if queries.dim.is_multiple_of(quant::lanes::LANES) => unsafe {
            avx2::heads(queries, kv, seen, out);
        },
        _ => {
            for (h, out) in out.chunks_exact_mut(queries.dim).enumerate() {
                instances::attend_head(isa, queries.head(h), kv, seen, out);
            }
        }
    }
}

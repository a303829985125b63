//! Activation rows in 8 bit, in one allocation that is filled again and again.
#![allow(unsafe_code, reason = "threads quantise different rows of one buffer")]

use quant::{GROUP, Q8View};

use super::Machine;
use super::dot;
use super::scatter::Scatter;

/// Below this many values the caller quantises alone: waking threads would take longer.
const ALONE: usize = 16_384;

/// Rows `[n_rows, n]`; see [`quant::quantize_into`].
#[derive(Debug, Default)]
pub(super) struct Q8Rows {
    block: usize,
    n: usize,
    scales: Vec<f32>,
    quants: Vec<i8>,
    sums: Vec<i16>,
}

impl Q8Rows {
    /// Quantises rows `which` of `x` `[rows, n]`; the others hold anything.
    pub(super) fn quantize(
        &mut self,
        machine: &Machine,
        x: &[f32],
        (n, block): (usize, usize),
        which: impl Fn(usize) -> bool + Sync,
    ) {
        (self.n, self.block) = (n, block);
        grow(&mut self.scales, x.len() / block);
        grow(&mut self.quants, x.len());
        grow(&mut self.sums, x.len() / GROUP);
        let scales = Scatter::new(&mut self.scales);
        let quants = Scatter::new(&mut self.quants);
        let sums = Scatter::new(&mut self.sums);
        let row = |r: usize| {
            if !which(r) {
                return;
            }
            // SAFETY: each row is quantised once, so parts of different calls do not overlap.
            let (scales, quants, sums) = unsafe {
                (
                    scales.part(r * n / block..(r + 1) * n / block),
                    quants.part(r * n..(r + 1) * n),
                    sums.part(r * n / GROUP..(r + 1) * n / GROUP),
                )
            };
            dot::quantize(machine.isa, &x[r * n..(r + 1) * n], block, scales, quants, sums);
        };
        let rows = x.len() / n;
        if x.len() <= ALONE {
            (0..rows).for_each(row);
        } else {
            machine.pool.run(rows, row);
        }
    }

    /// Values per scale.
    pub(super) const fn block(&self) -> usize {
        self.block
    }

    /// Row `r`.
    #[inline]
    pub(super) fn row(&self, r: usize) -> Q8View<'_> {
        let (n, block) = (self.n, self.block);
        Q8View {
            block,
            scales: &self.scales[r * n / block..(r + 1) * n / block],
            quants: &self.quants[r * n..(r + 1) * n],
            sums: &self.sums[r * n / GROUP..(r + 1) * n / GROUP],
        }
    }

    /// Bytes that it holds.
    pub(super) const fn bytes(&self) -> u64 {
        (4 * self.scales.capacity() + self.quants.capacity() + 2 * self.sums.capacity()) as u64
    }
}

/// Makes `buffer` at least `len` long. What it holds is about to be overwritten.
pub(super) fn grow<T: Copy + Default>(buffer: &mut Vec<T>, len: usize) {
    if buffer.len() < len {
        // No more than that: the plan counts these bytes.
        buffer.reserve_exact(len - buffer.len());
        buffer.resize(len, T::default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Options;
    use crate::backend::{Activations, KvType};
    use crate::cpu::CpuKernels;

    #[test]
    fn a_value_takes_five_quarters_of_a_byte_at_most_whatever_blocks_come() {
        let options = Options { threads: 2, activations: Activations::Q8, kv: KvType::F16 };
        let machine = CpuKernels::new(options).machine;
        let x = vec![1.0; 48 * 768];
        for blocks in [[256, 128, 64, 32], [32, 64, 128, 256]] {
            let mut rows = Q8Rows::default();
            for block in blocks {
                // The longest rows come last.
                for n in [256, 768] {
                    for n_rows in [1, 32, 48] {
                        rows.quantize(&machine, &x[..n_rows * n], (n, block), |_| true);
                        assert_eq!(rows.row(n_rows - 1).scales.len(), n / block);
                    }
                }
                let most = x.len() as u64 * 5 / 4;
                assert!(rows.bytes() <= most, "{blocks:?}, {block}: {} bytes", rows.bytes());
                assert_eq!(rows.bytes() == most, block == 32 || blocks[0] == 32);
            }
        }
    }
}

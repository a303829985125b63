//! Kernels for CPUs: portable code and AVX2, on a pool of threads.
//!
//! The definitions are in `reference` and in `quant`; everything here gives their bits, for every
//! instruction set and number of threads. [`dot`] and [`attention`] are written by hand, [`instances`] are the
//! definitions compiled anew, and the rest says how work is cut into tasks. No sum is ever split over tasks.

mod attention;
pub mod dot;
mod experts;
mod instances;
mod interleaved;
pub mod isa;
mod matmul;
mod packed;
mod panel;
pub mod pool;
mod q8_rows;
mod rows;
mod scatter;
#[cfg(target_arch = "aarch64")]
mod sdot;
mod streams;
#[cfg(test)]
mod test_data;
#[cfg(test)]
mod tests;

use std::num::NonZeroUsize;

use quant::BlockType;

use crate::Options;
use crate::backend::{Activations, Routed};
use crate::kernels::{
    Attend, AttendSelected, BadLogit, Combine, DeltaRule, Experts, GatedValue, GroupNorm,
    HeadNormRope, Kernels, Matrix, PoolKeys, ShortConv,
};
use crate::reference::delta_rule;

use isa::Isa;
pub(crate) use packed::most_bytes as panel_bytes;
use panel::Inputs;
use pool::Pool;
use q8_rows::Q8Rows;

/// Threads, what they can do, and what each owns.
struct Machine {
    isa: Isa,
    pool: Pool,
    /// One per thread.
    locals: Vec<Local>,
}

/// Scratch of one thread.
#[derive(Debug, Default)]
struct Local {
    panel: panel::Scratch,
    /// `up · x` of a panel.
    up: Vec<f32>,
    /// A row of whatever the kernel at hand needs.
    row: Vec<f32>,
    delta: delta_rule::Scratch,
}

impl Local {
    fn buffers(&mut self) -> impl Iterator<Item = &mut Vec<f32>> {
        [&mut self.panel.decoded, &mut self.up, &mut self.row]
            .into_iter()
            .chain(self.delta.buffers())
    }
}

impl Machine {
    /// [`Pool::run_with`] the threads' scratch.
    ///
    /// Which thread gets which task is chance, so a thread may meet a kernel long after the others. Giving every
    /// thread the room that the roomiest has needed keeps that from allocating in the middle of decoding.
    fn run(&mut self, n_tasks: usize, task: impl Fn(&mut Local, usize) + Sync) {
        for buffer in 0..self.locals[0].buffers().count() {
            let room = |local: &mut Local| local.buffers().nth(buffer).map_or(0, |b| b.capacity());
            let most = self.locals.iter_mut().map(room).max().unwrap_or(0);
            for place in self.locals.iter_mut().filter_map(|local| local.buffers().nth(buffer)) {
                place.reserve_exact(most - place.len());
            }
        }
        self.pool.run_with(&mut self.locals, n_tasks, task);
    }
}

/// [`Kernels`] with SIMD and threads.
pub(crate) struct CpuKernels {
    machine: Machine,
    activations: Activations,
    quantized: Q8Rows,
    experts: experts::Scratch,
    selected: attention::selected::Scratch,
}

impl CpuKernels {
    /// With the fastest instruction set of this CPU. Where the system gives fewer threads than asked for, fewer work.
    pub(crate) fn new(options: Options) -> Self {
        Self::with_isa(Isa::best(), options)
    }

    pub(crate) fn with_isa(isa: Isa, options: Options) -> Self {
        let pool = Pool::new(NonZeroUsize::new(options.threads).unwrap_or(NonZeroUsize::MIN));
        let locals = (0..pool.threads()).map(|_| Local::default()).collect();
        Self {
            machine: Machine { isa, pool, locals },
            activations: options.activations,
            quantized: Q8Rows::default(),
            experts: experts::Scratch::default(),
            selected: attention::selected::Scratch::default(),
        }
    }
}

impl Kernels for CpuKernels {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn rms_norm(&mut self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        rows::rms_norm(&self.machine, x, weight, eps, out);
    }

    fn interleaves(&self, ty: BlockType, n_out: usize) -> bool {
        self.activations == Activations::Q8 && interleaved::is_for(self.machine.isa, ty, n_out)
    }

    fn interleave(&mut self, ty: BlockType, row_bytes: usize, rows: &mut [u8]) {
        interleaved::interleave(&mut self.machine, ty, row_bytes, rows);
    }

    fn mat_mul(&mut self, w: Matrix<'_>, x: &[f32], out: &mut [f32]) {
        let inputs = if w.block_type.is_float() || self.activations == Activations::F32 {
            Inputs::F32(x)
        } else {
            let shape = (w.n_in, w.block_type.activation_block());
            self.quantized.quantize(&self.machine, x, shape, |_| true);
            Inputs::Q8(&self.quantized)
        };
        matmul::matmul(&mut self.machine, w, inputs, x.len() / w.n_in, out);
    }

    fn head_norm_rope(&mut self, job: HeadNormRope<'_>) {
        rows::head_norm_rope(&self.machine, job);
    }

    fn attend(&mut self, job: Attend<'_>) {
        attention::attend(&self.machine, job);
    }

    fn attend_selected(&mut self, job: AttendSelected<'_>) {
        attention::selected::attend_selected(&mut self.machine, &mut self.selected, job);
    }

    fn pool_keys(&mut self, job: PoolKeys<'_>) {
        attention::selected::pool_keys(&self.machine, job);
    }

    fn short_conv(&mut self, job: ShortConv<'_>) {
        rows::short_conv(&mut self.machine, job);
    }

    fn delta_rule(&mut self, job: DeltaRule<'_>) {
        rows::delta_rule(&mut self.machine, job);
    }

    fn route(
        &mut self,
        logits: &[f32],
        n_experts: usize,
        normalize: bool,
        out: &mut [Routed],
    ) -> Result<(), BadLogit> {
        rows::route(&mut self.machine, logits, n_experts, normalize, out)
    }

    fn silu_mul_in_place(&mut self, gate: &mut [f32], up: &[f32]) {
        rows::silu_mul(&self.machine, gate, up);
    }

    fn experts(&mut self, job: Experts<'_>) {
        experts::experts(&mut self.machine, &mut self.experts, self.activations, job);
    }

    fn combine(&mut self, job: Combine<'_>) {
        rows::combine(&mut self.machine, job);
    }

    fn group_norm(&mut self, x: &[f32], weight: &[f32], norm: GroupNorm, out: &mut [f32]) {
        streams::group_norm(&self.machine, x, weight, norm, out);
    }

    fn scaled_silu(&mut self, x: &mut [f32], scale: f32) {
        streams::scaled_silu(&self.machine, x, scale);
    }

    fn stream_mix(&mut self, mix: &[f32], n: &[f32], hidden: usize, out: &mut [f32]) {
        streams::mix(&self.machine, mix, n, hidden, out);
    }

    fn inject(&mut self, logits: &[f32], y: &[f32], hidden: usize, to: &mut [f32]) {
        streams::inject(&self.machine, logits, y, hidden, to);
    }

    fn gated_value(&mut self, job: GatedValue<'_>) {
        streams::gated_value(&self.machine, job);
    }

    fn allocated_bytes(&self) -> u64 {
        let local = |l: &Local| {
            4 * (l.up.capacity() + l.row.capacity()) as u64 + l.panel.bytes() + l.delta.bytes()
        };
        let locals: u64 = self.machine.locals.iter().map(local).sum();
        locals + self.quantized.bytes() + self.experts.bytes() + self.selected.bytes()
    }
}

//! Arithmetic, and the memory that it works on.
//!
//! [`backend`] says what can be computed and by which rules. [`host`] is what backends on the host share: memory,
//! residency, order of operations. `reference/` holds the scalar definition of every kernel, `cpu/` the same with
//! SIMD and threads, [`deferred()`] runs another backend late on purpose.
//!
//! Bits are the contract: a row's result depends on its own inputs, its position and its role, never on who else is
//! in the call, on threads, or on the instruction set.

pub mod backend;
mod bandwidth;
pub mod cpu;
mod deferred;
mod host;
mod interleave;
mod kernels;
mod reference;
pub mod selftest;

use backend::{Activations, Backend, KvType};
pub use bandwidth::{Bandwidth, read_bandwidth};

/// Version of the numerics contract: another number whenever any operation gives any row other bits than before. What is
/// kept of a computation is of use only as long as this stays the same.
pub const CONTRACT: u32 = 1;

/// How a host-side backend computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Kernel threads, at least 1; the calling thread is one of them.
    pub threads: usize,
    /// How activations meet quantised weights.
    pub activations: Activations,
    /// Element type of the KV cache.
    pub kv: KvType,
}

/// The scalar definitions, one after the other.
pub fn reference(options: Options) -> Box<dyn Backend> {
    let kernels = reference::ReferenceKernels::new(options.activations);
    Box::new(host::HostBackend::new(kernels, options.kv))
}

/// SIMD and threads; the same bits as [`reference()`]. Where the system refuses threads, fewer do the work.
pub fn cpu(options: Options) -> Box<dyn Backend> {
    Box::new(host::HostBackend::new(cpu::CpuKernels::new(options), options.kv))
}

/// Memory in which a thread of [`cpu()`] lays out quantised weights whose rows have at most `n_in` values.
pub const fn panel_bytes(n_in: usize) -> u64 {
    cpu::panel_bytes(n_in)
}

/// `inner`, run late on another thread, with everything that the host could peek at poisoned: for tests.
pub fn deferred(inner: Box<dyn Backend>, seed: u64) -> Box<dyn Backend> {
    Box::new(deferred::Deferred::new(inner, seed))
}

//! Which expert sits in which slot.
//!
//! Pure bookkeeping: no bytes, files, threads or clocks, so a recorded trace replays to the same hits and misses
//! every time. A slot is `Free`, `Reading`, or `Ready` with a pin count; only an unpinned `Ready` slot whose last
//! user has completed can become a victim. Start at [`SlotPool::begin`].
//!
//! A layer's whole selection is one [`Transaction`]: hits are pinned before victims are chosen, so an expert that the
//! layer needs is never evicted by the same layer. What does not fit comes in later waves.
#![forbid(unsafe_code)]

mod policy;
mod pool;
#[cfg(test)]
mod tests;
mod transaction;

pub use policy::{Policy, PolicyKind};
pub use pool::{ClassSpec, PoolCounters, PoolError, PoolSpec, SlotPool};
pub use transaction::{Load, Transaction};

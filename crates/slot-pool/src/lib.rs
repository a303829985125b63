//! Which expert sits in which slot.
//!
//! Pure bookkeeping: no bytes, files, threads or clocks, so a recorded trace replays to the same hits and misses
//! every time. A slot is `Free`, `Reading`, or `Ready` with a pin count; only an unpinned `Ready` slot whose last
//! user has completed can become a victim. Start at [`SlotPool::begin`].
//!
//! A layer's whole selection is one [`Transaction`]: hits are pinned before victims are chosen, so an expert that
//! the layer needs is never evicted by the same layer. What does not fit comes in later waves.
//!
//! What the policy learns, it learns in the order of selections, never in the order in which reads happen to end.
//! Nothing is allocated once the pool is warm: an ended transaction leaves its vectors to the next one.
#![forbid(unsafe_code)]

mod arena;
mod choose;
mod counters;
mod forecast;
mod invariants;
mod policy;
mod pool;
mod spec;
#[cfg(test)]
mod tests;
mod transaction;

pub use arena::SlotArena;
pub use counters::PoolCounters;
pub use policy::{BuiltIn, Policy, PolicyKind};
pub use pool::SlotPool;
pub use spec::{ClassSpec, PoolError, PoolSpec};
pub use transaction::{Load, Transaction};

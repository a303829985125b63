//! A byte budget to slots, KV cache and scratch: one ledger, printed and then enforced by construction.
//!
//! [`limits`] asks the machine, [`Budget`] decides how much may be used, [`plan()`] spends it. Every term has a name,
//! and the terms never sum to more than the budget. Nothing is allocated here: the caller reserves exactly what the
//! plan says, after the process itself was measured.

mod budget;
mod cgroup;
mod classes;
mod hint;
mod ledger;
pub mod limits;
mod plan;

pub use budget::Budget;
pub use classes::{RecordClass, deal_slots};
pub use ledger::{Plan, PlannedClass, Term};
pub use limits::{Limit, current_rss, give_large_blocks_back, peak_rss, release_free_memory};
pub use plan::{PlanError, PlanInput, plan};

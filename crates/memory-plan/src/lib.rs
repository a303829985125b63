//! A byte budget to slots, KV cache and scratch: one ledger, printed and then enforced by construction.
//!
//! [`limits`] asks the machine, [`Budget`] decides how much may be used, [`plan`] spends it. Every term has a name.

mod budget;
mod ledger;
pub mod limits;
mod plan;

pub use budget::Budget;
pub use ledger::{Plan, PlannedClass, Term};
pub use limits::{current_rss, peak_rss, release_free_memory};
pub use plan::{PlanError, PlanInput, RecordClass, plan};

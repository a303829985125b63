//! The lock and the condition variable of the queue.
//!
//! Unit tests of this crate take them from `shuttle`, which explores thread schedules; they therefore never start
//! a real [`Store`](crate::Store). Tests that do live in `tests/` and run on the real ones.

#[cfg(test)]
pub(crate) use shuttle::sync::{Condvar, Mutex, MutexGuard};
#[cfg(not(test))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};

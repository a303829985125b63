//! Bytes from SSD into slots.
//!
//! The store moves bytes and decides nothing: it is told which pieces of which files go where, and says when they
//! have arrived. Reads are explicit and positional, past the page cache where the system allows it, and land in
//! the memory of the slot itself. It never maps files and never keeps a copy.
//!
//! The idea to know first is who may touch a destination. [`Store::submit`] takes it over; it comes back with the
//! [`Completion`], with a [`Store::cancel`] that returned true, or when the store is dropped. In between, reader
//! threads write to it, and nobody else may look.
//!
//! Data path: [`Store`] (threads) → `queue` (one lock) → `schedule` (who reads what next; pure) → `transfer`
//! (short reads, retries, alignment) → `reader` (one positional read) → `destination` (the raw memory).
//!
//! [`NgramStore`] is a small store of its own: many small rows of one table, all of a pass known before it begins.

mod counters;
mod destination;
mod disks;
mod error;
mod file;
mod measure;
mod ngram;
mod probe;
mod queue;
mod reader;
mod request;
mod resident;
mod schedule;
#[cfg_attr(
    not(all(target_os = "linux", feature = "io-uring")),
    allow(dead_code, reason = "only rings prepare slots")
)]
mod slots;
mod staging;
mod store;
mod sync;
mod sys;
mod transfer;

pub use counters::{StoreCounters, Traffic};
pub use destination::{Destination, SlotMemory};
pub use disks::{Mirror, Notice};
pub use error::{ReadError, StoreError};
pub use file::{DirectMode, FileStatus};
pub use measure::{DiskFile, MAX_LANES, MAX_READ_BYTES, MeasureError, Measured, Spot};
pub use ngram::{NgramCounters, NgramOptions, NgramStore};
pub use probe::{ProbeError, Probed, ReadModel, probe, sustained_rate};
pub use reader::ReaderKind;
pub use reader::faulty::{Fault, FaultKind, FaultPlan};
pub use reader::simulated::SimulatedDisk;
pub use request::{Completion, Priority, ReadRequest, Ticket};
pub use resident::ResidentRead;
pub use store::{DEFAULT_THREADS, MAX_DISKS, MAX_THREADS, Store, StoreOptions, all_threads};

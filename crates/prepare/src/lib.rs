//! Makes model files ready, and never runs one: packs any checkpoint, and checks any checkpoint or pack.
//!
//! Both read everything once, in the order of the output, through a few MiB of buffers. What a pack is, byte by byte,
//! is `checkpoint`'s business ([`checkpoint::pack`]); here bytes are moved and checked. A source is never written to.
//!
//! Start at [`Packing`] and [`verify()`].
#![forbid(unsafe_code)]

mod error;
mod journal;
mod pack;
mod stream;
mod target;
mod verify;

pub use error::PrepareError;
pub use pack::{Packed, Packing};
pub use verify::{Fault, Verdict, verify, verify_deep};

/// How far a long job is, and whether to go on.
pub trait Watch: Sync {
    /// So many bytes are done, of those that [`Packing::bytes`] or the files have.
    fn at(&self, bytes: u64);

    /// Whether to stop at the next chance.
    fn stopped(&self) -> bool;
}

//! What callers ask for and what they get back.

use checkpoint::Pieces;
use units::ExpertKey;

use crate::destination::Destination;
use crate::error::ReadError;

/// How urgent a read is. A more urgent one overtakes everything less urgent that has not begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// A layer waits for it.
    Demand,
    /// It began as a guess and the guess was right.
    Promoted,
    /// A guess.
    Speculative,
}

impl Priority {
    /// Most urgent first.
    pub const ALL: [Self; 3] = [Self::Demand, Self::Promoted, Self::Speculative];
}

/// One expert on its way from disk to a slot.
#[derive(Debug)]
pub struct ReadRequest {
    /// Handed back with the completion; the store does not look at it.
    pub key: ExpertKey,
    /// Where the bytes are and where in the destination they go.
    pub pieces: Pieces,
    /// The memory of the slot.
    pub destination: Destination,
}

/// Names a submitted request. Unique for the life of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ticket {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

/// The end of a request: from here on the destination belongs to the caller again.
#[derive(Debug)]
#[must_use = "the destination may only be used if the result is `Ok`"]
pub struct Completion {
    /// Which request.
    pub ticket: Ticket,
    /// Its key.
    pub key: ExpertKey,
    /// Payload bytes that arrived, all of them; or the first error.
    pub result: Result<u64, ReadError>,
}

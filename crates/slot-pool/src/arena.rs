//! Where the bytes of slots are. The pool never looks.

use std::ptr::NonNull;

use units::SlotIndex;

/// Memory for slots, owned by whoever computes on it.
pub trait SlotArena {
    /// Base address and length in bytes of a slot. Stays valid and at the same place while the arena lives.
    fn slot_memory(&self, slot: SlotIndex) -> (NonNull<u8>, usize);
}

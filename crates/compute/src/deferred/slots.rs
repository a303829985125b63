//! Which slots are still in use, and what happens to their bytes afterwards.
#![allow(unsafe_code, reason = "overwrites slots that nothing uses any more")]

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

use units::{Epoch, ExpertKey, SlotIndex};

/// What an unpublished slot is filled with: codes at their ends, scales that are NaN.
pub(super) const POISON: u8 = 0xff;

/// Memory of one slot.
#[derive(Debug, Clone, Copy)]
struct SlotMemory {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: only the address is carried; `poison` has the proof for its use.
unsafe impl Send for SlotMemory {}

impl SlotMemory {
    /// # Safety
    /// The slot is allocated and nothing reads or writes it meanwhile.
    unsafe fn poison(self) {
        // SAFETY: in bounds: `base` and `len` are one slot of the backend, which lives as long as its worker; the
        // rest is the caller's promise.
        unsafe { self.base.as_ptr().write_bytes(POISON, self.len) };
    }
}

/// How far the worker is, and slots that become poison on the way.
#[derive(Debug, Default)]
pub(super) struct Progress(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    completed: Epoch,
    /// Slots that were unpublished while work up to the epoch could use them.
    doomed: Vec<(Epoch, SlotMemory)>,
}

impl Progress {
    fn state(&self) -> MutexGuard<'_, State> {
        // Both threads leave the state whole at every point where they could panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn completed(&self) -> Epoch {
        self.state().completed
    }

    /// Everything up to `epoch` has been done.
    pub(super) fn complete(&self, epoch: Epoch) {
        let mut state = self.state();
        state.doomed.retain(|(until, slot)| {
            if *until <= epoch {
                // SAFETY: the work that uses the slot is done, and the host reuses it only after it has seen that in
                // `completed`, which advances below.
                unsafe { slot.poison() };
            }
            *until > epoch
        });
        state.completed = epoch;
    }
}

/// One slot as the host sees it.
#[derive(Debug)]
struct Slot {
    memory: SlotMemory,
    /// Recorded work uses it up to this epoch.
    used_until: Epoch,
}

/// All slots, and the experts in them.
#[derive(Debug, Default)]
pub(super) struct Slots {
    slots: Vec<Slot>,
    published: HashMap<ExpertKey, SlotIndex>,
}

impl Slots {
    pub(super) fn new(memory: impl Iterator<Item = (NonNull<u8>, usize)>) -> Self {
        let slot =
            |(base, len)| Slot { memory: SlotMemory { base, len }, used_until: Epoch::default() };
        Self { slots: memory.map(slot).collect(), published: HashMap::new() }
    }

    pub(super) fn memory(&self, slot: SlotIndex) -> (NonNull<u8>, usize) {
        let SlotMemory { base, len } = self.slots[slot.get()].memory;
        (base, len)
    }

    /// Work that was recorded now uses the expert up to `until`. Whether it is published at all.
    pub(super) fn mark_used(&mut self, key: ExpertKey, until: Epoch) -> bool {
        let Some(slot) = self.published.get(&key) else { return false };
        self.slots[slot.get()].used_until = until;
        true
    }

    /// # Panics
    /// If the slot is in use: then it was filled while work could still read it.
    pub(super) fn publish(&mut self, key: ExpertKey, slot: SlotIndex, progress: &Progress) {
        let Slot { used_until, .. } = &self.slots[slot.get()];
        assert!(
            *used_until <= progress.completed(),
            "slot {slot} was filled with {key} while epoch {used_until:?} could use it"
        );
        let elsewhere = self.published.insert(key, slot);
        assert_eq!(elsewhere, None, "{key} is published once");
    }

    /// # Panics
    /// If the expert is not published.
    pub(super) fn unpublish(&mut self, key: ExpertKey, progress: &Progress) {
        let slot = self.published.remove(&key).expect("only what was published is unpublished");
        let Slot { memory, used_until } = self.slots[slot.get()];
        let mut state = progress.state();
        if used_until <= state.completed {
            // SAFETY: no work uses the slot, and the host gives it to a reader only after this call.
            unsafe { memory.poison() };
        } else {
            state.doomed.push((used_until, memory));
        }
    }
}

//! Where the slots are, for readers that prepare memory once instead of for every read.

use std::sync::OnceLock;

use crate::destination::SlotMemory;

/// What one page of a slot costs the system while it is kept ready for reads.
const BYTES_A_PAGE: u64 = 16;

const PAGE: u64 = 4096;

/// The slots of a pool; none until they are told.
#[derive(Debug, Default)]
pub(crate) struct Slots(OnceLock<Vec<SlotMemory>>);

impl Slots {
    /// Takes the slots, once; a second pool stays unprepared.
    pub(crate) fn set(&self, mut slots: Vec<SlotMemory>) {
        slots.sort_unstable_by_key(SlotMemory::address);
        let _ = self.0.set(slots);
    }

    /// All of them, by address.
    pub(crate) fn all(&self) -> &[SlotMemory] {
        self.0.get().map_or(&[], Vec::as_slice)
    }

    /// Which slot holds all of these bytes.
    pub(crate) fn find(&self, out: &[u8]) -> Option<usize> {
        let start = out.as_ptr().addr();
        let slots = self.all();
        let at = slots.partition_point(|slot| slot.address() <= start).checked_sub(1)?;
        (start + out.len() <= slots[at].address() + slots[at].len()).then_some(at)
    }
}

/// Most memory that the system takes to keep slots of so many bytes ready, once for each thread.
pub(crate) const fn pinning_bytes(slot_bytes: u64, threads: usize) -> u64 {
    slot_bytes.div_ceil(PAGE) * BYTES_A_PAGE * threads as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_belong_to_the_slot_that_holds_all_of_them() {
        let memory = vec![0u8; 1000];
        let slot = |start: usize, len| SlotMemory::of(&memory[start..start + len]);
        let slots = Slots::default();
        assert_eq!(slots.find(&memory[..10]), None, "none were told");
        slots.set(vec![slot(600, 100), slot(100, 200), slot(300, 200)]);
        for (range, expected) in [
            (100..300, Some(0)),
            (100..101, Some(0)),
            (299..300, Some(0)),
            (300..500, Some(1)),
            (650..700, Some(2)),
            (0..100, None),
            (90..110, None),
            (290..310, None),
            (500..600, None),
            (650..701, None),
            (999..1000, None),
        ] {
            assert_eq!(slots.find(&memory[range.clone()]), expected, "{range:?}");
        }
    }

    #[test]
    fn keeping_slots_ready_takes_a_256th_for_each_thread() {
        assert_eq!(pinning_bytes(1 << 30, 1), 4 << 20);
        assert_eq!(pinning_bytes(1 << 30, 4), 16 << 20);
        assert_eq!(pinning_bytes(1, 2), 32);
    }
}

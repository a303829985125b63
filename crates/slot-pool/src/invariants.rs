//! What holds between any two calls.

use units::SlotIndex;

use crate::policy::Policy;
use crate::pool::{Reader, Slot, SlotPool};

impl<P: Policy> SlotPool<P> {
    /// Checks what must hold between any two calls. Slow: for tests.
    ///
    /// # Panics
    /// If index, slots, free lists and counts contradict each other.
    pub fn check_invariants(&self) {
        let mut resident = vec![0; self.resident.len()];
        for (at, slot) in self.index.iter().enumerate() {
            let Some(slot) = slot else { continue };
            let key = match self.slots[slot.get()] {
                Slot::Reading { key, .. } => key,
                Slot::Ready { stay, .. } => stay.key,
                Slot::Free => panic!("the index names slot {slot}, which is free"),
            };
            assert_eq!(self.at(key), at, "the index names the slot that holds the key");
            assert!(self.class(key.layer).slots.contains(&slot.0), "{key} sits in its size class");
            resident[key.layer.get()] += 1;
        }
        assert_eq!(resident, self.resident, "resident experts by layer");
        let taken = self.slots.iter().filter(|slot| !matches!(slot, Slot::Free)).count();
        assert_eq!(taken, resident.iter().sum::<u32>() as usize, "every taken slot is named once");
        self.check_classes();
        self.check_reservation();
    }

    fn check_classes(&self) {
        for class in &self.classes {
            let mut free = class.free.clone();
            free.make_contiguous().sort_unstable();
            let slots = || class.slots.clone().map(SlotIndex);
            let expected = slots().filter(|slot| self.slots[slot.get()] == Slot::Free);
            assert!(expected.eq(free), "the free list holds exactly the free slots");
            let forecast = |slot: &SlotIndex| {
                matches!(self.slots[slot.get()], Slot::Reading { reader: Reader::Forecast, .. })
            };
            assert_eq!(slots().filter(forecast).count(), class.forecasts, "forecasts of a class");
        }
    }

    fn check_reservation(&self) {
        for slot in &self.slots {
            let Slot::Reading { before: Some(stay), reader, .. } = slot else { continue };
            assert!(
                self.reserving && *reader != Reader::Forecast,
                "a read began over a live expert"
            );
            assert_eq!(self.index[self.at(stay.key)], None, "{} is about to leave", stay.key);
        }
    }
}

//! How many slots of which size.
//!
//! Slots are dealt one by one: first every size class gets its floor, then each next slot goes to the class that
//! holds the smallest share of its records, until one does not fit or nobody needs more. More bytes only make the
//! deal longer, so no class ever loses a slot to a larger budget, and what is left over is less than one record.

use units::Bytes;

use crate::ledger::PlannedClass;

/// Records of different sizes share one class while padding stays below this many percent.
const PADDING_PERCENT: u128 = 3;

/// Expert records of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordClass {
    /// What a slot for them needs.
    pub slot_bytes: u64,
    /// How many there are.
    pub records: u64,
}

/// The records of a model, and the slots that they cannot do without.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    /// By size.
    classes: Vec<RecordClass>,
    /// The fewest slots of a class.
    floor: u64,
}

impl Layout {
    /// `top_k`: experts of a token and layer. One more slot lets a read begin while those are in use.
    ///
    /// # Panics
    /// If there are no records.
    pub(crate) fn of(records: &[RecordClass], top_k: u32) -> Self {
        let mut classes: Vec<RecordClass> = Vec::new();
        for class in records.iter().filter(|class| class.records > 0) {
            match classes.iter_mut().find(|known| known.slot_bytes == class.slot_bytes) {
                Some(known) => known.records += class.records,
                None => classes.push(*class),
            }
        }
        assert!(!classes.is_empty(), "a model without experts needs no slots");
        classes.sort_unstable_by_key(|class| class.slot_bytes);
        let layout = Self { classes, floor: u64::from(top_k) + 1 };
        let merged = layout.merged();
        let bytes = |layout: &Self| -> u128 {
            let bytes =
                |class: &RecordClass| u128::from(class.slot_bytes) * u128::from(class.records);
            layout.classes.iter().map(bytes).sum()
        };
        let padding = bytes(&merged) - bytes(&layout);
        if padding * 100 < bytes(&layout) * PADDING_PERCENT { merged } else { layout }
    }

    /// All records in slots of the largest size.
    fn merged(&self) -> Self {
        let slot_bytes = self.classes.last().expect("there are records").slot_bytes;
        let records = self.classes.iter().map(|class| class.records).sum();
        Self { classes: vec![RecordClass { slot_bytes, records }], floor: self.floor }
    }

    /// The fewest bytes: one class may need less than the floors of many.
    pub(crate) fn floor(&self) -> Vec<PlannedClass> {
        let (separate, merged) = (self.floors(), self.merged().floors());
        if slot_bytes(&merged) < slot_bytes(&separate) { merged } else { separate }
    }

    fn floors(&self) -> Vec<PlannedClass> {
        let class = |class: &RecordClass| PlannedClass {
            slots: self.floor.min(class.records),
            slot_bytes: class.slot_bytes,
            records: class.records,
        };
        self.classes.iter().map(class).collect()
    }

    /// As many slots as fit into `available`, which is at least [`Self::floor`].
    pub(crate) fn fill(&self, available: Bytes) -> Vec<PlannedClass> {
        if slot_bytes(&self.floors()) > available {
            // A class would fall below its floor.
            return self.merged().deal(available, u64::MAX);
        }
        self.deal(available, u64::MAX)
    }

    /// Exactly `slots` if there are that many experts; nothing if that is below the floor.
    pub(crate) fn exactly(&self, slots: u64) -> Option<Vec<PlannedClass>> {
        let floors = self.floors().iter().map(|class| class.slots).sum();
        let layout = if slots < floors { &self.merged() } else { self };
        (slots >= self.fewest()).then(|| layout.deal(Bytes(u64::MAX), slots))
    }

    /// The fewest slots that [`Self::exactly`] gives.
    pub(crate) fn fewest(&self) -> u64 {
        self.merged().floors().iter().map(|class| class.slots).sum()
    }

    /// The floors, then slot after slot while there are bytes and slots.
    fn deal(&self, available: Bytes, most: u64) -> Vec<PlannedClass> {
        let mut classes = self.floors();
        let mut left = available.saturating_sub(slot_bytes(&classes));
        let mut slots: u64 = classes.iter().map(|class| class.slots).sum();
        while slots < most {
            let open = classes.iter_mut().filter(|class| class.slots < class.records);
            // The smallest share slots / records; a tie goes to the smaller size.
            let next = open.min_by(|a, b| {
                let share = |x: &PlannedClass, y: &PlannedClass| {
                    u128::from(x.slots) * u128::from(y.records)
                };
                share(a, b).cmp(&share(b, a))
            });
            let Some(next) = next.filter(|next| Bytes(next.slot_bytes) <= left) else { break };
            next.slots += 1;
            left = left.saturating_sub(Bytes(next.slot_bytes));
            slots += 1;
        }
        classes
    }
}

/// Exactly `slots` for records of these sizes, as a plan with so many has them, or one for every record where those are
/// fewer; nothing if one token needs more.
///
/// # Panics
/// If there are no records.
pub fn deal_slots(records: &[RecordClass], top_k: u32, slots: u64) -> Option<Vec<PlannedClass>> {
    Layout::of(records, top_k).exactly(slots)
}

/// Bytes of all slots.
pub(crate) fn slot_bytes(classes: &[PlannedClass]) -> Bytes {
    let bytes = |class: &PlannedClass| class.slots.saturating_mul(class.slot_bytes);
    Bytes(classes.iter().map(bytes).fold(0, u64::saturating_add))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn layout(records: &[(u64, u64)], top_k: u32) -> Layout {
        let class = |(slot_bytes, records): &(u64, u64)| RecordClass {
            slot_bytes: *slot_bytes,
            records: *records,
        };
        Layout::of(&records.iter().map(class).collect::<Vec<_>>(), top_k)
    }

    fn slots(classes: &[PlannedClass]) -> Vec<(u64, u64)> {
        classes.iter().map(|class| (class.slot_bytes, class.slots)).collect()
    }

    #[test]
    fn records_of_nearly_one_size_share_a_class() {
        // Padding: 100 of 200 records are 20 short of 1020: 2000 of 202 000 bytes, 0.99 %.
        let nearly = layout(&[(1000, 100), (1020, 100)], 7);
        assert_eq!(slots(&nearly.fill(Bytes(20_400))), [(1020, 20)]);
        // 6000 of 206 000 bytes, 2.9 %; 6400 of 206 400 bytes, 3.1 %.
        assert_eq!(layout(&[(1000, 100), (1060, 100)], 7).fill(Bytes(100_000)).len(), 1);
        assert_eq!(layout(&[(1000, 100), (1064, 100)], 7).fill(Bytes(100_000)).len(), 2);
    }

    #[test]
    fn slots_are_in_proportion_to_the_records() {
        let layout = layout(&[(1000, 300), (2000, 100)], 1);
        // 3 : 1 of 5000 bytes a round.
        assert_eq!(slots(&layout.fill(Bytes(50_000))), [(1000, 30), (2000, 10)]);
        assert_eq!(slots(&layout.fill(Bytes(u64::MAX))), [(1000, 300), (2000, 100)]);
    }

    #[test]
    fn a_class_below_its_floor_is_merged() {
        let layout = layout(&[(1000, 100), (4000, 100)], 2);
        // Floors: three of each size are 15 000 bytes; three of the larger are 12 000.
        assert_eq!(slots(&layout.floor()), [(4000, 3)]);
        assert_eq!(slots(&layout.fill(Bytes(14_999))), [(4000, 3)]);
        assert_eq!(slots(&layout.fill(Bytes(15_000))), [(1000, 3), (4000, 3)]);
    }

    #[test]
    fn a_floor_is_never_more_than_the_records() {
        assert_eq!(slots(&layout(&[(1000, 4)], 8).floor()), [(1000, 4)]);
    }

    #[test]
    fn as_many_slots_as_asked_for_are_dealt() {
        let layout = layout(&[(1000, 100), (4000, 100)], 2);
        assert_eq!(layout.exactly(2), None);
        assert_eq!(slots(&layout.exactly(5).unwrap()), [(4000, 5)]);
        assert_eq!(slots(&layout.exactly(7).unwrap()), [(1000, 4), (4000, 3)]);
        assert_eq!(slots(&layout.exactly(1000).unwrap()), [(1000, 100), (4000, 100)]);
    }

    proptest! {
        #[test]
        fn more_bytes_are_never_fewer_slots_and_less_than_a_record_is_left(
            sizes in prop::collection::vec((1_u64..5000, 1..300_u64), 1..5),
            top_k in 1..12_u32,
            bytes in 0..2_000_000_u64,
            more in 0..10_000_u64,
        ) {
            let layout = layout(&sizes, top_k);
            let floor = slot_bytes(&layout.floor());
            let available = Bytes(bytes) + floor;
            let (few, many) = (layout.fill(available), layout.fill(available + Bytes(more)));
            let count = |classes: &[PlannedClass]| classes.iter().map(|c| c.slots).sum::<u64>();
            prop_assert!(count(&many) >= count(&few));
            prop_assert!(slot_bytes(&few) <= available);
            let left = available.saturating_sub(slot_bytes(&few));
            let largest = few.iter().map(|class| class.slot_bytes).max().unwrap();
            let full = few.iter().all(|class| class.slots == class.records);
            prop_assert!(full || left < Bytes(largest), "{left} left, {few:?}");
            for class in &few {
                prop_assert!(class.slots >= u64::from(top_k + 1).min(class.records));
            }
        }
    }
}

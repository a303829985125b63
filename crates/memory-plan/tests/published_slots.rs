//! Slot counts that others published for a mixed 2-bit file, from a file of the same shape whose data is holes.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use checkpoint::Vocabulary;
use memory_plan::{Budget, Limit, Plan, PlanInput, RecordClass, Term};
use units::{Bytes, ExpertKey};
use xtask::synth;

const IQ2_XS_RECORD: u64 = 909_312;
const IQ1_M_RECORD: u64 = 688_128;

/// The slots that `bytes` give when they are for nothing else.
fn slots_for(classes: &[RecordClass], bytes: u64) -> Plan {
    // What the planner keeps as its margin comes on top: 4 MiB, and one byte for 256 of the slots.
    let budget = bytes + bytes.div_ceil(256) + (4 << 20);
    let unlimited = Limit { name: "a test".to_owned(), bytes: Bytes(u64::MAX) };
    memory_plan::plan(&PlanInput {
        model: "synthetic".to_owned(),
        budget: Budget::of(Some(Bytes(budget)), &[unlimited]),
        process_base: Bytes::ZERO,
        resident: Vec::new(),
        kv_bytes_per_token: Bytes::ZERO,
        state: Bytes::ZERO,
        context: 1,
        sequences: 1,
        prefix: Bytes::ZERO,
        context_is_default: false,
        scratch: &|_| vec![Term::new("nothing", Bytes::ZERO)],
        passes: &[64],
        records: classes.to_vec(),
        top_k: 10,
        slots: None,
    })
    .unwrap()
}

/// Record sizes as they are planned for, smallest first, with how many experts have them.
fn record_classes(alignment: u64) -> Vec<RecordClass> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("next.gguf");
    synth::write_sparse_gguf(&path, &synth::iq2_layout(alignment)).unwrap();
    let checkpoint = checkpoint::open_with(&path, Vocabulary::Skip).unwrap();
    let model = checkpoint::bind(&checkpoint).unwrap();
    let mut classes: Vec<RecordClass> = Vec::new();
    for key in (0..48).flat_map(|layer| (0..512).map(move |expert| ExpertKey::new(layer, expert))) {
        let slot_bytes = model.records.slot_bytes(key);
        match classes.iter_mut().find(|class| class.slot_bytes == slot_bytes) {
            Some(class) => class.records += 1,
            None => classes.push(RecordClass { slot_bytes, records: 1 }),
        }
    }
    classes.sort_unstable_by_key(|class| class.slot_bytes);
    classes
}

#[test]
fn aligned_records_give_the_published_slot_counts() {
    let classes = record_classes(4096);
    let sizes: Vec<(u64, u64)> = classes.iter().map(|c| (c.slot_bytes, c.records)).collect();
    assert_eq!(sizes, [(IQ1_M_RECORD, 37 * 512), (IQ2_XS_RECORD, 11 * 512)]);
    let uniform = [RecordClass { slot_bytes: IQ2_XS_RECORD, records: 48 * 512 }];
    let quarter = 1_u64 << 28;
    for (quarters, published) in [(1, 295), (2, 590), (4, 1180), (8, 2361), (16, 4723), (32, 9446)]
    {
        assert_eq!(
            slots_for(&uniform, quarters * quarter).slots(),
            published,
            "{quarters} / 4 GiB"
        );
    }
    // Everything resident: 21,312 MiB in uniform slots, 17,316 MiB by size.
    for (classes, mib) in [(&uniform[..], 21_312_u64), (&classes, 17_316)] {
        assert_eq!(slots_for(classes, mib << 20).slots(), 24_576);
        assert_eq!(slots_for(classes, (mib << 20) - 1).slots(), 24_575);
    }
}

#[test]
fn size_classes_give_as_many_slots_as_published_and_what_was_left_over() {
    let classes = record_classes(4096);
    let slots = |bytes: u64| {
        let plan = slots_for(&classes, bytes);
        let slots: Vec<u64> = plan.classes.iter().map(|class| class.slots).collect();
        assert_eq!(slots.len(), 2, "one class for each size");
        slots
    };
    // Published: 121 slots for each of 37 and of 11 layers, 5808 in all and 1331 of the smaller class. Equal shares
    // leave 3.7 MiB over, which slot after slot uses up.
    let [small, large] = slots(4 << 30)[..] else { panic!("two classes") };
    assert_eq!((small, large), (4477 + 4, 1331 + 1));
    let left = (4 << 30) - (small * IQ1_M_RECORD + large * IQ2_XS_RECORD);
    assert!(left < IQ2_XS_RECORD, "{left} bytes are left over");
    // Published: at 2 GiB classes are switched off, since 660 slots of the larger are fewer than 2 x 512 + 64.
    // Here a class needs no more than one token's choice, so both stay: 60 for each layer, and the rest.
    let [small, large] = slots(2 << 30)[..] else { panic!("two classes") };
    assert!(large >= 660 && small >= 37 * 60, "{small} and {large}");
    assert!(small + large > 2361, "more than uniform slots");
}

#[test]
fn tensors_that_begin_between_pages_cost_a_page_for_each_piece() {
    let classes = record_classes(32);
    let sizes: Vec<(u64, u64)> = classes.iter().map(|c| (c.slot_bytes, c.records)).collect();
    let page = 4096;
    assert_eq!(sizes, [(IQ1_M_RECORD + 3 * page, 37 * 512), (IQ2_XS_RECORD + 3 * page, 11 * 512)]);
}

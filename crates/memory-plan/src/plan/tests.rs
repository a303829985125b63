use proptest::prelude::*;

use super::*;
use crate::limits::Limit;

fn budget(bytes: Bytes) -> Budget {
    Budget::of(Some(bytes), &[Limit { name: "physical memory".to_owned(), bytes: Bytes::gib(1 << 20) }])
}

fn scratch(rows: u32) -> Vec<Term> {
    vec![Term::new("expert outputs", Bytes(u64::from(rows) * 65_536))]
}

fn input(bytes: Bytes, records: Vec<RecordClass>) -> PlanInput<'static> {
    PlanInput {
        model: "test.gguf".to_owned(),
        budget: budget(bytes),
        process_base: Bytes::mib(20),
        resident: vec![Term::new("attention", Bytes::mib(500)), Term::new("norms", Bytes::mib(1))],
        kv_bytes_per_token: Bytes(98_304),
        state: Bytes::ZERO,
        context: 4096,
        context_is_default: true,
        scratch: &scratch,
        passes: &[1024, 512, 256, 64],
        records,
        top_k: 8,
        slots: None,
    }
}

/// The shape of a model of 48 layers of 128 experts, half of them larger.
fn records() -> Vec<RecordClass> {
    vec![
        RecordClass { slot_bytes: 2_670_592, records: 3072 },
        RecordClass { slot_bytes: 3_076_096, records: 3072 },
    ]
}

#[test]
fn the_terms_sum_to_the_total_and_stay_under_the_budget() {
    let plan = plan(&input(Bytes::gib(8), records())).unwrap();
    assert_eq!(plan.terms.iter().map(|term| term.bytes).sum::<Bytes>(), plan.total);
    assert!(plan.total <= Bytes::gib(8));
    let unused = Bytes::gib(8).saturating_sub(plan.total);
    assert!(unused < Bytes(2 * 3_076_096), "{unused} are left over");
    assert_eq!(plan.classes.len(), 2);
    let [small, large] = [plan.classes[0].slots, plan.classes[1].slots];
    assert!(small.abs_diff(large) <= 1, "in proportion to the records: {small} and {large}");
}

#[test]
fn nearly_equal_records_share_a_class() {
    let records = vec![
        RecordClass { slot_bytes: 1_000_000, records: 100 },
        RecordClass { slot_bytes: 1_020_000, records: 100 },
    ];
    let plan = plan(&input(Bytes::gib(2), records)).unwrap();
    assert_eq!(plan.classes.len(), 1);
    assert_eq!(plan.classes[0].slot_bytes, 1_020_000);
    assert_eq!(plan.slots(), 200, "never more slots than experts");
}

#[test]
fn a_refusal_shows_the_arithmetic_and_hints_that_work() {
    let too_little = input(Bytes::mib(800), records());
    let error = plan(&too_little).unwrap_err();
    let text = error.to_string();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "800.0 MiB is too little memory for test.gguf");
    for name in ["process", "resident weights", "KV cache", "scratch", "margin", "slots", "total"] {
        assert!(lines.iter().any(|line| line.trim_start().starts_with(name)), "{name} in {text}");
    }
    let PlanError::TooSmall { hint, .. } = error else { panic!("{text}") };
    let number = |flag: &str| -> Option<u64> {
        let rest = hint.split(flag).nth(1)?;
        rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    };
    let memory = number("--memory ").unwrap();
    assert!(plan(&input(Bytes::mib(memory), records())).is_ok(), "{hint}");
    let context = number("--context ").unwrap();
    assert!(plan(&PlanInput { context: context as u32, ..too_little }).is_ok(), "{hint}");
}

#[test]
fn too_few_slots_are_refused_and_as_many_as_asked_for_are_given() {
    let with = |slots| plan(&PlanInput { slots: Some(slots), ..input(Bytes::gib(8), records()) });
    assert_eq!(with(8).unwrap_err(), PlanError::TooFewSlots { slots: 8, needed: 9 });
    assert_eq!(with(9).unwrap().slots(), 9);
    assert!(matches!(with(6000), Err(PlanError::TooSmall { .. })));
}

proptest! {
    #[test]
    fn a_plan_stays_under_its_budget_and_more_memory_is_never_fewer_slots(
        mib in 600..40_000_u64,
        more in 0..4_000_u64,
        sizes in prop::collection::vec((1_u64..2000, 1..2000_u64), 1..4),
    ) {
        let records: Vec<_> = sizes.iter().map(|(pages, n)| RecordClass { slot_bytes: pages * 4096, records: *n }).collect();
        let small = plan(&input(Bytes::mib(mib), records.clone()));
        let large = plan(&input(Bytes::mib(mib + more), records));
        if let Ok(small) = &small {
            prop_assert!(small.total <= Bytes::mib(mib));
            let large = large.unwrap();
            let bytes = |plan: &Plan| plan.classes.iter().map(|c| c.slots * c.slot_bytes).sum::<u64>();
            // A longer pass may take a tenth of what was added.
            prop_assert!(bytes(&large) + (bytes(&large) / 9) + (1 << 24) >= bytes(small), "{small:?} {large:?}");
        }
    }
}

use proptest::prelude::*;

use super::*;
use crate::limits::Limit;

fn budget(bytes: Bytes) -> Budget {
    let limit = Limit { name: "physical memory".to_owned(), bytes: Bytes::gib(1 << 20) };
    Budget::of(Some(bytes), &[limit])
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
        sequences: 1,
        prefix: Bytes::ZERO,
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

fn bytes_of<'a>(terms: &'a [Term], name: &str) -> &'a Term {
    terms.iter().find(|term| term.name == name).unwrap()
}

#[test]
fn the_terms_sum_to_the_total_and_stay_under_the_budget() {
    let plan = plan(&input(Bytes::gib(8), records())).unwrap();
    assert_eq!(plan.terms.iter().map(|term| term.bytes).sum::<Bytes>(), plan.total);
    assert!(plan.total <= Bytes::gib(8));
    let unused = Bytes::gib(8).saturating_sub(plan.total);
    assert!(unused < Bytes(3_076_096), "{unused} are left over");
    assert_eq!(plan.classes.len(), 2);
    let [small, large] = [plan.classes[0].slots, plan.classes[1].slots];
    assert!(small.abs_diff(large) <= 1, "in proportion to the records: {small} and {large}");
}

#[test]
fn the_ledger_of_a_small_example_is_what_it_is_by_hand() {
    // One class of 100 experts of 1 MiB, 8 of them a token.
    let records = vec![RecordClass { slot_bytes: 1 << 20, records: 100 }];
    let resident = vec![Term::new("all", Bytes::mib(32))];
    let example = PlanInput {
        process_base: Bytes::mib(16),
        resident,
        kv_bytes_per_token: Bytes::kib(4),
        context: 4096,
        ..input(Bytes::mib(128), records)
    };
    let plan = plan(&example).unwrap();
    // Fixed: 16 + 32 + 16 MiB. Their margin: 4 MiB and 1/256 of 64 MiB, 0.25 MiB. That leaves 59.75 MiB.
    // A tenth, 5.975 MiB, is no pass longer than 64 rows of 64 KiB: 4 MiB and 16 KiB of margin. 256 rows are 16 MiB.
    assert_eq!((plan.pass_rows, bytes_of(&plan.terms, "scratch").bytes), (64, Bytes::mib(4)));
    // 59.75 - 5.975 = 53.775 MiB hold 53 slots with 1/256 on top (53.207), not 54 (54.211).
    assert_eq!(plan.slots(), 53);
    assert_eq!(bytes_of(&plan.terms, "margin").bytes, Bytes::kib(4096 + 256 + 16 + 212));
    // The least: 64 rows and nine slots.
    assert_eq!(plan.floor, Bytes::mib(16 + 32 + 16 + 4 + 9) + Bytes::kib(4096 + 256 + 16 + 36));
    assert!((plan.share - 0.53).abs() < 1e-12);
}

#[test]
fn net_is_the_most_whose_gross_fits() {
    for bytes in (0..3000).chain([1 << 20, (1 << 40) + 12_345, u64::MAX]).map(Bytes) {
        let net = net(bytes);
        assert!(gross(net) <= bytes, "{}", bytes.0);
        assert!(bytes < gross(net + Bytes(1)) || bytes.0 == u64::MAX, "{}", bytes.0);
    }
}

#[test]
fn the_floor_is_exact_to_the_byte() {
    let odd = |rows: u32| vec![Term::new("odd", Bytes(u64::from(rows) * 65_537 + 1))];
    for slot_bytes in [4097, 1_000_003, 3_076_097] {
        let records = vec![RecordClass { slot_bytes, records: 5000 }];
        let with = |bytes| PlanInput { scratch: &odd, ..input(bytes, records.clone()) };
        let PlanError::TooSmall { total, .. } = plan(&with(Bytes::ZERO)).unwrap_err() else {
            panic!()
        };
        assert!(plan(&with(Bytes(total.0 - 1))).is_err());
        for bytes in 0..600 {
            let plan = plan(&with(total + Bytes(bytes * 77))).unwrap();
            assert!(plan.total <= plan.budget.bytes && plan.floor == total);
        }
    }
}

#[test]
fn when_every_expert_fits_the_pass_gets_the_rest() {
    let records = vec![RecordClass { slot_bytes: 1 << 20, records: 100 }];
    // Fixed terms are 905 MiB with their margin of 1/256, the slots 100.4, 1024 rows 64.25.
    let with = |mib| plan(&input(Bytes::mib(mib), records.clone())).unwrap();
    let all = |mib| with(mib).slots() == 100;
    let first = (700..2000).find(|mib| plan(&input(Bytes::mib(*mib), records.clone())).is_ok());
    let first = (first.unwrap()..2000).find(|mib| all(*mib)).unwrap();
    assert!(with(first).pass_rows < 1024);
    assert_eq!(with(first + 60).pass_rows, 1024);
}

#[test]
fn a_refusal_shows_the_arithmetic_and_hints_that_work() {
    let too_little = input(Bytes::mib(800), records());
    let error = plan(&too_little).unwrap_err();
    let expected = "\
800.0 MiB is too little memory for test.gguf
  process             20.0 MiB   measured before anything is reserved
  resident weights   501.0 MiB
  KV cache           384.0 MiB   4096 tokens, the default
  scratch              4.0 MiB   passes of 64 tokens
  margin               7.7 MiB   allocator slack, stacks, page tables
  slots, smallest     26.4 MiB   9 of 2.9 MiB
  total              943.1 MiB

hint: use `--context 2048` (750.3 MiB in total) or `--memory 946MiB`";
    // Nine slots of 3 076 096 bytes are 26.40 MiB, so the margin is 4 + (905 + 4 + 26.40) / 256 = 7.65 MiB and the
    // total 943.06 MiB; 2 MiB of drift make that 946. Of 1024 tokens, 96.4 MiB with margin, two fewer fit.
    assert_eq!(error.to_string(), expected);
}

#[test]
fn a_hint_that_this_machine_does_not_allow_is_not_given() {
    let limit = Limit { name: "physical memory".to_owned(), bytes: Bytes::mib(520) };
    let budget = Budget::of(Some(Bytes::mib(500)), &[limit]);
    let error = plan(&PlanInput { budget, ..input(Bytes::ZERO, records()) }).unwrap_err();
    let PlanError::TooSmall { hint, .. } = error else { panic!("{error}") };
    assert_eq!(hint, "use a smaller model, or a machine that allows 946MiB");
}

#[test]
fn too_few_slots_are_refused_and_as_many_as_asked_for_are_given() {
    let with = |slots| plan(&PlanInput { slots: Some(slots), ..input(Bytes::gib(8), records()) });
    assert_eq!(with(8).unwrap_err(), PlanError::TooFewSlots { slots: 8, needed: 9 });
    assert_eq!(with(9).unwrap().slots(), 9);
    assert_eq!(with(1000).unwrap().slots(), 1000);
    let PlanError::TooSmall { hint, terms, .. } = with(6000).unwrap_err() else { panic!() };
    assert!(terms.iter().any(|term| term.name == "slots"));
    let slots = number(&hint, "--slots ").unwrap();
    assert!(with(slots as u32).is_ok(), "{hint}");
    assert!(with(slots as u32 + 1).is_err(), "the most that fit: {hint}");
}

#[test]
fn absurd_sizes_are_refused_without_overflow() {
    let records = vec![RecordClass { slot_bytes: u64::MAX / 2, records: 1000 }];
    let absurd = PlanInput {
        kv_bytes_per_token: Bytes(u64::MAX),
        context: u32::MAX,
        process_base: Bytes(u64::MAX),
        resident: vec![Term::new("all", Bytes(u64::MAX)); 2],
        ..input(Bytes::gib(8), records)
    };
    let PlanError::TooSmall { total, .. } = plan(&absurd).unwrap_err() else { panic!() };
    assert_eq!(total, Bytes(u64::MAX));
}

#[test]
fn a_plan_prints_as_a_table_and_as_plain_numbers() {
    let plan = plan(&input(Bytes::gib(2), records())).unwrap();
    let text = plan.to_string();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "test.gguf in 2.00 GiB (--memory)");
    let column = |line: &str| line.find("iB").unwrap();
    let table = &lines[1..=plan.terms.len() + 1];
    assert!(table.iter().all(|line| column(line) == column(table[0])), "aligned: {text}");
    assert!(lines.last().unwrap().contains("of 6144 experts fit"));
}

fn number(hint: &str, flag: &str) -> Option<u64> {
    let rest = hint.split(flag).nth(1)?;
    rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

proptest! {
    #[test]
    fn a_plan_stays_under_its_budget_and_more_memory_is_never_fewer_slots(
        mib in 600..40_000_u64,
        more in prop::sample::select(vec![1, 100, 5000, 4 << 20, 1 << 30, 1 << 34_u64]),
        sizes in prop::collection::vec((1_u64..2000, 1..2000_u64), 1..4),
    ) {
        let class = |(pages, n): &(u64, u64)| RecordClass { slot_bytes: pages * 4096, records: *n };
        let records: Vec<_> = sizes.iter().map(class).collect();
        let small = plan(&input(Bytes::mib(mib), records.clone()));
        let large = plan(&input(Bytes::mib(mib) + Bytes(more), records));
        if let Ok(small) = &small {
            prop_assert!(small.total <= Bytes::mib(mib));
            prop_assert!(small.floor <= small.total);
            let large = large.unwrap();
            prop_assert!(large.slots() >= small.slots());
            prop_assert!(large.pass_rows >= small.pass_rows);
        }
    }

    #[test]
    fn every_hint_works(
        mib in 30..1500_u64,
        context in 1..20_000_u32,
        sizes in prop::collection::vec((1_u64..2000, 1..2000_u64), 1..4),
    ) {
        let class = |(pages, n): &(u64, u64)| RecordClass { slot_bytes: pages * 4096, records: *n };
        let records: Vec<_> = sizes.iter().map(class).collect();
        let asked = PlanInput { context, ..input(Bytes::mib(mib), records.clone()) };
        if let Err(error) = plan(&asked) {
            let PlanError::TooSmall { hint, .. } = error else { panic!("{error}") };
            let typed = hint.split("--memory ").nth(1).unwrap().trim_end_matches('`');
            // The process may have grown by then.
            let process_base = asked.process_base + Bytes::mib(1);
            let given = input(typed.parse().unwrap(), records.clone());
            let enough = PlanInput { process_base, context, ..given };
            prop_assert!(plan(&enough).is_ok(), "{hint}");
            if let Some(shorter) = number(&hint, "--context ") {
                prop_assert!(shorter > 0 && shorter < u64::from(context));
                let shorter = PlanInput { process_base, context: shorter as u32, ..asked };
                prop_assert!(plan(&shorter).is_ok(), "{hint}");
            }
        }
    }
}

//! Spending a budget.
//!
//! Fixed terms come first (process, resident weights, KV cache, state). Of what is left, a prefill pass may take up to
//! a tenth for its scratch, at least the shortest pass; the rest becomes slots, minus a margin for what cannot be
//! counted: allocator slack, thread stacks, page tables.

use units::Bytes;

use crate::budget::Budget;
use crate::ledger::{Plan, PlannedClass, Term, table};

/// Allocator slack, stacks and buffers of the reader threads, terminal, growth of the process after it was measured.
const MARGIN: Bytes = Bytes::mib(4);
/// Page tables and kernel structures grow with what is mapped: 1 in 256.
const MARGIN_SHARE: u64 = 256;
/// Scratch of a pass may take one part in this many of what the fixed terms leave.
const SCRATCH_SHARE: u64 = 10;
/// Records of different sizes share one class while padding stays below one part in this many.
const PADDING_SHARE: u64 = 33;

/// Expert records of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordClass {
    /// What a slot for them needs.
    pub slot_bytes: u64,
    /// How many there are.
    pub records: u64,
}

/// What is to be planned.
pub struct PlanInput<'a> {
    /// Name of the model, for messages.
    pub model: String,
    /// What the process may use.
    pub budget: Budget,
    /// What it uses already, measured.
    pub process_base: Bytes,
    /// Weights that stay in memory.
    pub resident: Vec<Term>,
    /// KV cache of one position.
    pub kv_bytes_per_token: Bytes,
    /// Recurrent state, snapshots included.
    pub state: Bytes,
    /// Positions to reserve.
    pub context: u32,
    /// Whether the user did not ask for that many, so that fewer may be suggested.
    pub context_is_default: bool,
    /// Scratch of a pass of so many rows.
    pub scratch: &'a dyn Fn(u32) -> Vec<Term>,
    /// Pass lengths to choose from, longest first.
    pub passes: &'a [u32],
    /// Routed experts by record size.
    pub records: Vec<RecordClass>,
    /// Experts of a token and layer.
    pub top_k: u32,
    /// Slots instead of as many as fit.
    pub slots: Option<u32>,
}

/// Why a budget does not do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// Even the smallest plan needs more.
    #[error("{} is too little memory for {model}\n{}\nhint: use {hint}", budget, table(terms, *total))]
    TooSmall {
        /// Name of the model.
        model: String,
        /// What was given.
        budget: Bytes,
        /// The smallest plan's terms.
        terms: Vec<Term>,
        /// Their sum.
        total: Bytes,
        /// What would do.
        hint: String,
    },
    /// So few slots cannot serve one token.
    #[error("{slots} slots are too few: a layer needs {needed} of its size; leave `--slots` out or raise it")]
    TooFewSlots {
        /// What was asked for.
        slots: u64,
        /// The floor.
        needed: u64,
    },
}

/// Spends the budget.
///
/// # Errors
/// [`PlanError`], with the arithmetic.
///
/// # Panics
/// If there are no pass lengths or no records.
pub fn plan(input: &PlanInput<'_>) -> Result<Plan, PlanError> {
    let shortest = *input.passes.iter().min().expect("at least one pass length");
    let floor_slots = floor_classes(input);
    let floor = terms(input, input.context, shortest, &floor_slots);
    let floor_total = sum(&floor);
    if floor_total > input.budget.bytes {
        return Err(too_small(input, floor, shortest, &floor_slots));
    }
    let fixed = sum(&fixed_terms(input, input.context));
    let left = input.budget.bytes.saturating_sub(fixed);
    let scratch_cap = Bytes(left.0 / SCRATCH_SHARE);
    let fits = |rows: &&u32| {
        let with_floor = sum(&terms(input, input.context, **rows, &floor_slots));
        sum(&(input.scratch)(**rows)) <= scratch_cap && with_floor <= input.budget.bytes
    };
    let pass_rows = input.passes.iter().find(fits).copied().unwrap_or(shortest);
    let classes = match input.slots {
        Some(slots) => exact_slots(input, u64::from(slots))?,
        None => {
            let other = sum(&terms(input, input.context, pass_rows, &[]));
            spread(input, input.budget.bytes.saturating_sub(other), &floor_slots)
        }
    };
    let terms = terms(input, input.context, pass_rows, &classes);
    let total = sum(&terms);
    if total > input.budget.bytes {
        return Err(too_small(input, terms, pass_rows, &classes));
    }
    Ok(Plan {
        model: input.model.clone(),
        budget: input.budget.clone(),
        context: input.context,
        pass_rows,
        classes,
        details: input.resident.iter().cloned().chain((input.scratch)(pass_rows)).collect(),
        total,
        terms,
        floor: floor_total,
    })
}

fn sum(terms: &[Term]) -> Bytes {
    terms.iter().map(|term| term.bytes).sum()
}

fn fixed_terms(input: &PlanInput<'_>, context: u32) -> Vec<Term> {
    let mut terms = vec![
        Term::new("process", input.process_base).with_note("measured before anything is reserved"),
        Term::new("resident weights", sum(&input.resident)),
    ];
    if input.kv_bytes_per_token > Bytes::ZERO {
        let bytes = input.kv_bytes_per_token * u64::from(context);
        terms.push(Term::new("KV cache", bytes).with_note(format!("{context} tokens")));
    }
    if input.state > Bytes::ZERO {
        terms.push(Term::new("recurrent state", input.state).with_note("running, and where the next turn begins"));
    }
    terms
}

fn terms(input: &PlanInput<'_>, context: u32, pass_rows: u32, classes: &[PlannedClass]) -> Vec<Term> {
    let mut terms = fixed_terms(input, context);
    let scratch = sum(&(input.scratch)(pass_rows));
    terms.push(Term::new("scratch", scratch).with_note(format!("passes of {pass_rows} tokens")));
    let slots: Bytes = classes.iter().map(|class| Bytes(class.slot_bytes) * class.slots).sum();
    let margin = MARGIN + Bytes((sum(&terms) + slots).0 / MARGIN_SHARE);
    terms.push(Term::new("margin", margin).with_note("allocator slack, stacks, page tables"));
    let of = |class: &PlannedClass| format!("{} of {}", class.slots, Bytes(class.slot_bytes));
    let note = classes.iter().map(of).collect::<Vec<_>>().join(", ");
    terms.push(Term::new("slots", slots).with_note(note));
    terms
}

/// One class for all records while that wastes little, else a class per size.
fn classes_of(input: &PlanInput<'_>) -> Vec<RecordClass> {
    let largest = input.records.iter().map(|class| class.slot_bytes).max().expect("a model has experts");
    let records: u64 = input.records.iter().map(|class| class.records).sum();
    let exact: u64 = input.records.iter().map(|class| class.slot_bytes * class.records).sum();
    if (largest * records - exact) * PADDING_SHARE < exact {
        return vec![RecordClass { slot_bytes: largest, records }];
    }
    let mut classes = input.records.clone();
    classes.sort_by_key(|class| class.slot_bytes);
    classes
}

/// The fewest slots: one token's experts and one more, in every class.
fn floor_classes(input: &PlanInput<'_>) -> Vec<PlannedClass> {
    let floor = u64::from(input.top_k) + 1;
    let class = |class: RecordClass| PlannedClass {
        slots: floor.min(class.records),
        slot_bytes: class.slot_bytes,
        records: class.records,
    };
    let separate: Vec<_> = classes_of(input).into_iter().map(class).collect();
    // One class of the largest size may need less than the floors of many.
    let largest = separate.iter().map(|class| class.slot_bytes).max().expect("a model has experts");
    let records = separate.iter().map(|class| class.records).sum();
    let merged = vec![PlannedClass { slots: floor.min(records), slot_bytes: largest, records }];
    let bytes = |classes: &[PlannedClass]| classes.iter().map(|c| c.slots * c.slot_bytes).sum::<u64>();
    if bytes(&merged) < bytes(&separate) { merged } else { separate }
}

/// Slots for `available` bytes and their share of the margin, in proportion to the records of each class.
fn spread(input: &PlanInput<'_>, available: Bytes, floor: &[PlannedClass]) -> Vec<PlannedClass> {
    let usable = available.0 / (MARGIN_SHARE + 1) * MARGIN_SHARE;
    let classes = classes_of(input);
    let records: u64 = classes.iter().map(|class| class.records).sum();
    let payload: u64 = classes.iter().map(|class| class.records * class.slot_bytes).sum();
    let minimum = u64::from(input.top_k) + 1;
    let share = |class: &RecordClass| {
        let slots = (u128::from(usable) * u128::from(class.records) / u128::from(payload)) as u64;
        PlannedClass { slots: slots.min(class.records), slot_bytes: class.slot_bytes, records: class.records }
    };
    let mut planned: Vec<PlannedClass> = classes.iter().map(share).collect();
    if planned.iter().any(|class| class.slots < minimum.min(class.records)) {
        // A class would fall below its floor: all records share the largest size, or the floor itself.
        let slot_bytes = classes.iter().map(|class| class.slot_bytes).max().expect("a model has experts");
        let slots = (usable / slot_bytes).min(records);
        return if slots >= minimum.min(records) { vec![PlannedClass { slots, slot_bytes, records }] } else { floor.to_vec() };
    }
    // What rounding left goes to the classes in order, a slot at a time.
    let mut left = usable - planned.iter().map(|class| class.slots * class.slot_bytes).sum::<u64>();
    for class in planned.iter_mut().rev() {
        while class.slots < class.records && class.slot_bytes <= left {
            class.slots += 1;
            left -= class.slot_bytes;
        }
    }
    planned
}

/// As many slots as asked for.
fn exact_slots(input: &PlanInput<'_>, slots: u64) -> Result<Vec<PlannedClass>, PlanError> {
    let classes = classes_of(input);
    let slot_bytes = classes.iter().map(|class| class.slot_bytes).max().expect("a model has experts");
    let records: u64 = classes.iter().map(|class| class.records).sum();
    let needed = (u64::from(input.top_k) + 1).min(records);
    if slots < needed {
        return Err(PlanError::TooFewSlots { slots, needed });
    }
    Ok(vec![PlannedClass { slots: slots.min(records), slot_bytes, records }])
}

fn too_small(input: &PlanInput<'_>, terms_found: Vec<Term>, pass_rows: u32, classes: &[PlannedClass]) -> PlanError {
    let total = sum(&terms_found);
    let mut hints = Vec::new();
    // Halve the context until it fits, but not below one pass.
    let mut context = input.context / 2;
    while context >= 64 {
        let total = sum(&terms(input, context, pass_rows.min(context.next_multiple_of(64)), classes));
        if total <= input.budget.bytes {
            hints.push(format!("`--context {context}` ({total} in total)"));
            break;
        }
        context /= 2;
    }
    hints.push(format!("`--memory {}MiB`", total.0.div_ceil(1 << 20)));
    PlanError::TooSmall {
        model: input.model.clone(),
        budget: input.budget.bytes,
        terms: terms_found,
        total,
        hint: hints.join(" or "),
    }
}

#[cfg(test)]
mod tests;

//! Spending a budget.
//!
//! Fixed terms come first: the process, resident weights, KV cache, state. Of what they leave, a tenth is set aside
//! for the scratch of a prefill pass (no less than the shortest pass needs, no more than the longest), and the longest
//! pass that fits is taken. All the rest becomes slots; when every expert has one, the pass may have what is left.
//!
//! What is set aside grows slower than the budget and depends on nothing else, so a larger budget never means fewer
//! slots or a shorter pass. The price is that up to the step between two pass lengths stays unused.

use units::Bytes;

use crate::budget::Budget;
use crate::classes::{Layout, RecordClass, slot_bytes};
use crate::hint::{self, Floor};
use crate::ledger::{Plan, PlannedClass, Term, sum, table};

/// What cannot be counted ahead and does not grow with the model: touched pages of thread stacks and of the
/// allocator's per-thread arenas (tens of KiB for each of some dozen threads), code that is first run after the
/// process was measured, terminal and file buffers.
const MARGIN: Bytes = Bytes::mib(4);
/// What grows with what is allocated: page tables (8 bytes a page of 4 KiB are 1 in 512) and rounding to pages, so
/// 1 in 256 of every other term.
const MARGIN_SHARE: u64 = 256;
/// Scratch of a pass may take one part in this many of what the fixed terms leave.
const SCRATCH_SHARE: u64 = 10;

/// What is to be planned.
pub struct PlanInput<'a> {
    /// Name of the model, for messages.
    pub model: String,
    /// What the process may use.
    pub budget: Budget,
    /// What it uses already, measured before anything is reserved.
    pub process_base: Bytes,
    /// Weights that stay in memory.
    pub resident: Vec<Term>,
    /// KV cache of one position of a sequence.
    pub kv_bytes_per_token: Bytes,
    /// Recurrent state of a sequence, snapshots included.
    pub state: Bytes,
    /// Positions to reserve for each sequence.
    pub context: u32,
    /// Sequences that run side by side.
    pub sequences: u32,
    /// Prefixes of prompts that are kept besides.
    pub prefix: Bytes,
    /// Whether that is a default and not what the user asked for.
    pub context_is_default: bool,
    /// Scratch of a pass of so many rows; more rows need no less.
    pub scratch: &'a dyn Fn(u32) -> Vec<Term>,
    /// Pass lengths to choose from, in any order. The closer together, the less stays unused.
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
    #[error("{budget} is too little memory for {model}\n{}\nhint: {hint}", table(terms, *total, ""))]
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
    #[error(
        "{slots} slots are too few: one token needs {needed}\n\nhint: use `--slots {needed}`, or leave it out"
    )]
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
    let layout = Layout::of(&input.records, input.top_k);
    let shortest = *input.passes.iter().min().expect("there is a pass length");
    let least = match input.slots {
        Some(slots) => exactly(&layout, u64::from(slots))?,
        None => layout.floor(),
    };
    let floor = Floor { pass_rows: shortest, classes: least };
    let floor_total = floor.total(input, input.context);
    let Some(left) = left_by_fixed(input).filter(|_| floor_total <= input.budget.bytes) else {
        return Err(too_small(input, &layout, &floor));
    };
    let passes = Passes::of(input);
    let least_slots = gross(slot_bytes(&floor.classes));
    let set_aside = Bytes(left.0 / SCRATCH_SHARE)
        .clamp(passes.shortest(), passes.longest())
        .min(left.saturating_sub(least_slots));
    let classes = match input.slots {
        Some(_) => floor.classes,
        None => layout.fill(net(left.saturating_sub(set_aside))),
    };
    let full = classes.iter().all(|class| class.slots == class.records);
    let for_scratch =
        if full { left.saturating_sub(gross(slot_bytes(&classes))) } else { set_aside };
    let pass_rows = passes.within(for_scratch);
    Ok(finish(input, pass_rows, classes, floor_total))
}

fn finish(input: &PlanInput<'_>, pass_rows: u32, classes: Vec<PlannedClass>, floor: Bytes) -> Plan {
    let terms = terms(input, input.context, pass_rows, &classes);
    let total = sum(&terms);
    assert!(total <= input.budget.bytes, "the terms were chosen to fit");
    let count = |of: fn(&PlannedClass) -> u64| classes.iter().map(of).sum::<u64>() as f64;
    Plan {
        model: input.model.clone(),
        budget: input.budget.clone(),
        context: input.context,
        pass_rows,
        details: input.resident.iter().cloned().chain((input.scratch)(pass_rows)).collect(),
        total,
        terms,
        floor,
        share: count(|class| class.slots) / count(|class| class.records),
        classes,
    }
}

/// Bytes together with their share of the margin.
fn gross(bytes: Bytes) -> Bytes {
    Bytes(bytes.0.saturating_add(bytes.0.div_ceil(MARGIN_SHARE)))
}

/// The most bytes whose [`gross`] is no more than `gross`.
fn net(gross: Bytes) -> Bytes {
    let share = u128::from(MARGIN_SHARE);
    Bytes((u128::from(gross.0) * share / (share + 1)) as u64)
}

/// What is left for scratch and slots, their share of the margin included.
fn left_by_fixed(input: &PlanInput<'_>) -> Option<Bytes> {
    let fixed = gross(sum(&fixed_terms(input, input.context))).0.checked_add(MARGIN.0)?;
    input.budget.bytes.0.checked_sub(fixed).map(Bytes)
}

/// Pass lengths and what they cost, shortest first.
struct Passes(Vec<(u32, Bytes)>);

impl Passes {
    fn of(input: &PlanInput<'_>) -> Self {
        let cost = |rows: &u32| (*rows, gross(sum(&(input.scratch)(*rows))));
        let mut passes: Vec<_> = input.passes.iter().map(cost).collect();
        passes.sort_unstable();
        Self(passes)
    }

    fn shortest(&self) -> Bytes {
        self.0.first().expect("there is a pass length").1
    }

    /// At least [`Self::shortest`], should scratch not grow with the pass.
    fn longest(&self) -> Bytes {
        self.0.iter().map(|(_, cost)| *cost).max().expect("there is a pass length")
    }

    /// The longest that costs no more.
    fn within(&self, bytes: Bytes) -> u32 {
        let fits = self.0.iter().rfind(|(_, cost)| *cost <= bytes);
        fits.unwrap_or(&self.0[0]).0
    }
}

/// How a note says that a term is of several sequences.
fn times(sequences: u32) -> String {
    if sequences > 1 { format!("{sequences} × ") } else { String::new() }
}

fn fixed_terms(input: &PlanInput<'_>, context: u32) -> Vec<Term> {
    let all = |one: u64| Bytes(one.saturating_mul(u64::from(input.sequences)));
    let mut terms = vec![
        Term::new("process", input.process_base).with_note("measured before anything is reserved"),
        Term::new("resident weights", sum(&input.resident)),
    ];
    if input.kv_bytes_per_token > Bytes::ZERO {
        let bytes = input.kv_bytes_per_token.0.saturating_mul(u64::from(context));
        let default = input.context_is_default && context == input.context;
        let why = if default { ", the default" } else { "" };
        let note = format!("{}{context} tokens{why}", times(input.sequences));
        terms.push(Term::new("KV cache", all(bytes)).with_note(note));
    }
    if input.state > Bytes::ZERO {
        let note = format!("{}running, and where the next turn begins", times(input.sequences));
        terms.push(Term::new("recurrent state", all(input.state.0)).with_note(note));
    }
    if input.prefix > Bytes::ZERO {
        let note = "beginnings of prompts that may come again";
        terms.push(Term::new("prefix cache", input.prefix).with_note(note));
    }
    terms
}

/// The whole ledger.
pub(crate) fn terms(
    input: &PlanInput<'_>,
    context: u32,
    pass_rows: u32,
    classes: &[PlannedClass],
) -> Vec<Term> {
    let mut terms = fixed_terms(input, context);
    let scratch = sum(&(input.scratch)(pass_rows));
    let slots = slot_bytes(classes);
    let shares = [sum(&terms), scratch, slots].map(|part| part.0.div_ceil(MARGIN_SHARE));
    let margin = shares.into_iter().fold(MARGIN.0, u64::saturating_add);
    let of = |class: &PlannedClass| format!("{} of {}", class.slots, Bytes(class.slot_bytes));
    let sizes: Vec<String> = classes.iter().map(of).collect();
    terms.extend([
        Term::new("scratch", scratch).with_note(format!("passes of {pass_rows} tokens")),
        Term::new("margin", Bytes(margin)).with_note("allocator slack, stacks, page tables"),
        Term::new("slots", slots).with_note(sizes.join(", ")),
    ]);
    terms
}

fn exactly(layout: &Layout, slots: u64) -> Result<Vec<PlannedClass>, PlanError> {
    layout.exactly(slots).ok_or_else(|| PlanError::TooFewSlots { slots, needed: layout.fewest() })
}

fn too_small(input: &PlanInput<'_>, layout: &Layout, floor: &Floor) -> PlanError {
    let mut terms = terms(input, input.context, floor.pass_rows, &floor.classes);
    if input.slots.is_none() {
        let slots = terms.last_mut().expect("slots are the last term");
        "slots, smallest".clone_into(&mut slots.name);
    }
    let mut hints = hint::context(input, floor).into_iter().collect::<Vec<_>>();
    if input.slots.is_some() {
        let fewest = Floor { classes: layout.floor(), ..floor.clone() };
        let left = left_by_fixed(input);
        let scratch = gross(sum(&(input.scratch)(floor.pass_rows)));
        if let (Some(left), true) = (left, fewest.fits(input)) {
            let fitting = layout.fill(net(left.saturating_sub(scratch)));
            let slots: u64 = fitting.iter().map(|class| class.slots).sum();
            hints.push(format!("`--slots {slots}`"));
        }
    }
    let total = sum(&terms);
    PlanError::TooSmall {
        model: input.model.clone(),
        budget: input.budget.bytes,
        hint: hint::text(hints, total, &input.budget),
        terms,
        total,
    }
}

#[cfg(test)]
mod tests;

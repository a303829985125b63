//! The ledger: named terms that sum to no more than the budget.

use std::fmt;

use serde::{Serialize, Serializer};
use units::Bytes;

use crate::budget::Budget;

/// Bytes as a plain number.
pub(crate) fn bytes<S: Serializer>(bytes: &Bytes, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(bytes.0)
}

/// A named amount of memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Term {
    /// What it is for.
    pub name: String,
    /// How much.
    #[serde(serialize_with = "bytes")]
    pub bytes: Bytes,
    /// How it comes about, if that is worth saying.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub note: String,
}

impl Term {
    /// A term without a note.
    pub fn new(name: impl Into<String>, bytes: Bytes) -> Self {
        Self { name: name.into(), bytes, note: String::new() }
    }

    /// The same with a note.
    #[must_use]
    pub fn with_note(mut self, note: impl Into<String>) -> Self {
        self.note = note.into();
        self
    }
}

/// Slots of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct PlannedClass {
    /// How many.
    pub slots: u64,
    /// Bytes of one.
    pub slot_bytes: u64,
    /// Experts that compete for them.
    pub records: u64,
}

/// How a budget is spent.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
    /// Name of the model.
    pub model: String,
    /// The promise.
    pub budget: Budget,
    /// Positions of the KV cache.
    pub context: u32,
    /// Rows of a prefill pass.
    pub pass_rows: u32,
    /// Slots by size.
    pub classes: Vec<PlannedClass>,
    /// Every term, slots included.
    pub terms: Vec<Term>,
    /// Terms that belong to `resident` and `scratch` above, one by one.
    pub details: Vec<Term>,
    /// Sum of the terms.
    #[serde(serialize_with = "bytes")]
    pub total: Bytes,
    /// Smallest total that would work, with one row of the grid a pass and the fewest slots.
    #[serde(serialize_with = "bytes")]
    pub floor: Bytes,
}

impl Plan {
    /// Slots of all classes.
    pub fn slots(&self) -> u64 {
        self.classes.iter().map(|class| class.slots).sum()
    }

    /// Routed experts.
    pub fn experts(&self) -> u64 {
        self.classes.iter().map(|class| class.records).sum()
    }
}

/// Aligned lines of terms.
pub(crate) fn table(terms: &[Term], total: Bytes) -> String {
    let total = Term::new("total", total);
    let width = terms.iter().map(|term| term.name.chars().count()).max().unwrap_or(0).max(5);
    let mut text = String::new();
    for term in terms.iter().chain([&total]) {
        let line = format!("  {:<width$}  {:>10}   {}", term.name, term.bytes, term.note);
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} in {} ({})", self.model, self.budget.bytes, self.budget.source)?;
        write!(f, "{}", table(&self.terms, self.total))?;
        writeln!(f)?;
        for term in &self.details {
            writeln!(f, "    {:<28}  {:>10}", term.name, term.bytes)?;
        }
        let share = 100.0 * self.slots() as f64 / self.experts() as f64;
        write!(
            f,
            "\n{} of {} experts fit ({share:.0} %); passes of {} tokens; smallest budget {}",
            self.slots().min(self.experts()),
            self.experts(),
            self.pass_rows,
            self.floor
        )
    }
}

//! The ledger: named terms that sum to no more than the budget.

use std::fmt;

use serde::{Serialize, Serializer};
use units::Bytes;

use crate::budget::Budget;

/// Bytes as a plain number.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference to the field")]
pub(crate) fn bytes<S: Serializer>(bytes: &Bytes, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(bytes.0)
}

/// The same, or null.
#[expect(clippy::ref_option, reason = "serde passes a reference to the field")]
pub(crate) fn optional_bytes<S: Serializer>(
    bytes: &Option<Bytes>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    bytes.map(|bytes| bytes.0).serialize(serializer)
}

/// A sum that stops at the largest number instead of wrapping: sizes come from files.
pub(crate) fn sum(terms: &[Term]) -> Bytes {
    Bytes(terms.iter().map(|term| term.bytes.0).fold(0, u64::saturating_add))
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
    /// What `resident weights` and `scratch` consist of, and other shares of terms that are worth a name.
    pub details: Vec<Term>,
    /// Sum of the terms.
    #[serde(serialize_with = "bytes")]
    pub total: Bytes,
    /// The smallest total that would work: the shortest pass and the fewest slots.
    #[serde(serialize_with = "bytes")]
    pub floor: Bytes,
    /// Share of the routed experts that fit into the slots, 0 to 1.
    pub share: f64,
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

/// Aligned lines of terms, with `total` as the last; `note` says something about the total.
pub(crate) fn table(terms: &[Term], total: Bytes, note: &str) -> String {
    let total = Term::new("total", total).with_note(note);
    let width = terms.iter().map(|term| term.name.chars().count()).max().unwrap_or(0);
    let width = width.max(total.name.len());
    let mut text = String::new();
    for term in terms.iter().chain([&total]) {
        // Room for `1023.9 MiB`.
        let line = format!("  {:<width$}  {:>10}   {}", term.name, term.bytes, term.note);
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} in {} ({})", self.model, self.budget.bytes, self.budget.source)?;
        let unused = self.budget.bytes.saturating_sub(self.total);
        writeln!(f, "{}", table(&self.terms, self.total, &format!("{unused} not used")))?;
        let width = self.details.iter().map(|term| term.name.chars().count()).max().unwrap_or(0);
        for term in &self.details {
            let line = format!("    {:<width$}  {:>10}   {}", term.name, term.bytes, term.note);
            writeln!(f, "{}", line.trim_end())?;
        }
        write!(
            f,
            "\n{} of {} experts fit ({:.0} %); passes of {} tokens; smallest budget {}",
            self.slots(),
            self.experts(),
            100.0 * self.share,
            self.pass_rows,
            self.floor
        )
    }
}

//! How much memory the process may use.

use std::io;

use serde::Serialize;
use units::Bytes;

use crate::limits::{self, Limit};

/// Share of the smallest limit that is taken when nothing is asked for, in percent.
const DEFAULT_PERCENT: u64 = 70;

/// What the whole process may use, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Budget {
    /// The promise.
    #[serde(serialize_with = "crate::ledger::bytes")]
    pub bytes: Bytes,
    /// What it was taken from.
    pub source: String,
    notes: Vec<String>,
}

impl Budget {
    /// The wanted size, or a share of the smallest limit of this machine.
    ///
    /// # Errors
    /// The machine does not tell how much memory it has, and nothing was asked for.
    pub fn detect(wanted: Option<Bytes>) -> io::Result<Self> {
        let limits = limits::of_this_machine();
        match (wanted, limits) {
            (wanted, Ok(limits)) => Ok(Self::of(wanted, &limits)),
            (Some(bytes), Err(error)) => {
                let notes = vec![format!("this machine's limits are not known: {error}")];
                Ok(Self { bytes, source: "--memory".to_owned(), notes })
            }
            (None, Err(error)) => Err(error),
        }
    }

    /// The smallest of the wanted size and all limits; without a wanted size, a share of the smallest limit.
    ///
    /// # Panics
    /// If there is no limit at all; the physical memory is one.
    pub fn of(wanted: Option<Bytes>, limits: &[Limit]) -> Self {
        let smallest = limits.iter().min_by_key(|limit| limit.bytes).expect("the physical memory is a limit");
        match wanted {
            None => Self {
                bytes: Bytes(smallest.bytes.0 / 100 * DEFAULT_PERCENT),
                source: format!("{DEFAULT_PERCENT} % of {} ({})", smallest.bytes, smallest.name),
                notes: Vec::new(),
            },
            Some(bytes) if bytes <= smallest.bytes => {
                Self { bytes, source: "--memory".to_owned(), notes: Vec::new() }
            }
            Some(bytes) => Self {
                bytes: smallest.bytes,
                source: smallest.name.clone(),
                notes: vec![format!(
                    "--memory {bytes} is more than {} has; the budget is {}",
                    smallest.name, smallest.bytes
                )],
            },
        }
    }

    /// What the user should know about how the budget came about.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> Vec<Limit> {
        vec![
            Limit { name: "physical memory".to_owned(), bytes: Bytes::gib(32) },
            Limit { name: "the cgroup".to_owned(), bytes: Bytes::gib(10) },
        ]
    }

    #[test]
    fn the_default_is_a_share_of_the_smallest_limit() {
        let budget = Budget::of(None, &limits());
        assert_eq!(budget.bytes, Bytes(Bytes::gib(10).0 / 100 * 70));
        assert!(budget.source.contains("the cgroup"));
    }

    #[test]
    fn the_smallest_of_wish_and_limits_wins() {
        assert_eq!(Budget::of(Some(Bytes::gib(4)), &limits()).bytes, Bytes::gib(4));
        let capped = Budget::of(Some(Bytes::gib(40)), &limits());
        assert_eq!((capped.bytes, capped.notes().len()), (Bytes::gib(10), 1));
    }
}

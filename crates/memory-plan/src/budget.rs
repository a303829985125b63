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
    /// More than this no budget can be; absent if the machine does not tell.
    #[serde(serialize_with = "crate::ledger::optional_bytes")]
    limit: Option<Bytes>,
    notes: Vec<String>,
}

impl Budget {
    /// The wanted size, or a share of the smallest limit of this machine.
    ///
    /// # Errors
    /// The machine does not tell how much memory it has, and nothing was asked for.
    pub fn detect(wanted: Option<Bytes>) -> io::Result<Self> {
        match (limits::of_this_machine(), wanted) {
            (Ok(limits), wanted) => Ok(Self::of(wanted, &limits)),
            (Err(error), Some(bytes)) => {
                let notes = vec![format!("this machine's limits are not known: {error}")];
                Ok(Self { bytes, source: "--memory".to_owned(), limit: None, notes })
            }
            (Err(error), None) => Err(error),
        }
    }

    /// The smallest of the wanted size and all limits; without a wanted size, a share of the smallest limit.
    ///
    /// # Panics
    /// If there is no limit at all; the physical memory is one.
    pub fn of(wanted: Option<Bytes>, limits: &[Limit]) -> Self {
        let smallest = limits.iter().min_by_key(|limit| limit.bytes);
        let Limit { name, bytes: limit } = smallest.expect("the physical memory is a limit");
        let mut notes = Vec::new();
        let (bytes, source) = match wanted {
            None => {
                let share = u128::from(limit.0) * u128::from(DEFAULT_PERCENT) / 100;
                (Bytes(share as u64), format!("{DEFAULT_PERCENT} % of {limit}, {name}"))
            }
            Some(wanted) if wanted <= *limit => (wanted, "--memory".to_owned()),
            Some(wanted) => {
                notes
                    .push(format!("--memory {wanted} is more than {limit}, {name}: using {limit}"));
                (*limit, name.clone())
            }
        };
        Self { bytes, source, limit: Some(*limit), notes }
    }

    /// The most that `--memory` could be on this machine, if that is known.
    pub const fn limit(&self) -> Option<Bytes> {
        self.limit
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
        assert_eq!(budget.bytes, Bytes::gib(7));
        assert_eq!(budget.source, "70 % of 10.00 GiB, the cgroup");
        assert!(budget.notes().is_empty());
    }

    #[test]
    fn the_smallest_of_wish_and_limits_wins() {
        let modest = Budget::of(Some(Bytes::gib(4)), &limits());
        assert_eq!((modest.bytes, modest.notes()), (Bytes::gib(4), &[][..]));
        let capped = Budget::of(Some(Bytes::gib(40)), &limits());
        assert_eq!((capped.bytes, capped.limit()), (Bytes::gib(10), Some(Bytes::gib(10))));
        assert_eq!(
            capped.notes(),
            ["--memory 40.00 GiB is more than 10.00 GiB, the cgroup: using 10.00 GiB"]
        );
    }

    #[test]
    fn this_machine_has_a_budget() {
        let budget = Budget::detect(None).unwrap();
        assert!(budget.bytes > Bytes::ZERO && Some(budget.bytes) < budget.limit());
    }
}

//! What to type when a budget does not do.

use units::Bytes;

use crate::budget::Budget;
use crate::ledger::{PlannedClass, sum};
use crate::plan::{PlanInput, terms};

/// Contexts are suggested in steps of this many tokens, or of the smaller one below it.
const CONTEXT_STEPS: [u32; 2] = [1024, 64];
/// A process is not the same size twice: it may be this much larger when the hint is typed.
const DRIFT: Bytes = Bytes::mib(2);

/// The smallest plan.
#[derive(Debug, Clone)]
pub(crate) struct Floor {
    pub(crate) pass_rows: u32,
    pub(crate) classes: Vec<PlannedClass>,
}

impl Floor {
    /// Its bytes with a context of so many tokens.
    pub(crate) fn total(&self, input: &PlanInput<'_>, context: u32) -> Bytes {
        sum(&terms(input, context, self.pass_rows, &self.classes))
    }

    pub(crate) fn fits(&self, input: &PlanInput<'_>) -> bool {
        self.total(input, input.context) <= input.budget.bytes
    }
}

/// The longest round context that would fit, if one does.
pub(crate) fn context(input: &PlanInput<'_>, floor: &Floor) -> Option<String> {
    CONTEXT_STEPS.into_iter().find_map(|step| {
        let total = |steps: u32| floor.total(input, steps * step);
        let fits = |steps: u32| total(steps).0.saturating_add(DRIFT.0) <= input.budget.bytes.0;
        // Totals grow with the context, so the answer is where fitting ends.
        let (mut fitting, mut too_long) = (0, input.context.div_ceil(step));
        while fitting + 1 < too_long {
            let middle = fitting + (too_long - fitting) / 2;
            if fits(middle) { fitting = middle } else { too_long = middle }
        }
        let hint = || format!("`--context {}` ({} in total)", fitting * step, total(fitting));
        (fitting > 0).then(hint)
    })
}

/// One sentence of alternatives; `total` is what the plan as it is would need.
pub(crate) fn text(mut alternatives: Vec<String>, total: Bytes, budget: &Budget) -> String {
    let needed = Bytes(total.0.saturating_add(DRIFT.0));
    let allowed = budget.limit().is_none_or(|limit| needed <= limit);
    let (typed, value) = rounded_up(needed);
    if allowed && budget.limit().is_none_or(|limit| value <= limit) {
        alternatives.push(format!("`--memory {typed}`"));
    } else if allowed {
        alternatives.push(format!("`--memory {}`", needed.0));
    }
    if alternatives.is_empty() {
        return format!("use a smaller model, or a machine that allows {typed}");
    }
    format!("use {}", alternatives.join(" or "))
}

/// A size that is easy to type, no less than `bytes`: tenths of GiB, or whole MiB.
fn rounded_up(bytes: Bytes) -> (String, Bytes) {
    const MIB: u64 = 1 << 20;
    const GIB: u128 = 1 << 30;
    if bytes < Bytes::gib(1) {
        let mib = bytes.0.div_ceil(MIB);
        return (format!("{mib}MiB"), Bytes::mib(mib));
    }
    let tenths = (u128::from(bytes.0) * 10).div_ceil(GIB);
    let value = u64::try_from((tenths * GIB).div_ceil(10)).unwrap_or(u64::MAX);
    (format!("{}.{}GiB", tenths / 10, tenths % 10), Bytes(value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::Limit;

    #[test]
    fn sizes_are_rounded_up_to_what_one_types() {
        let check = |bytes: u64, text: &str| {
            let (typed, value) = rounded_up(Bytes(bytes));
            assert_eq!(typed, text);
            let parsed: Bytes = typed.parse().unwrap();
            // The parser truncates a fraction of a byte.
            assert!(parsed + Bytes(1) >= value && value >= Bytes(bytes));
        };
        check(5 << 20, "5MiB");
        check((5 << 20) + 1, "6MiB");
        check(1 << 30, "1.0GiB");
        check((1 << 30) + 1, "1.1GiB");
        check(15 << 29, "7.5GiB");
    }

    #[test]
    fn a_size_is_not_rounded_beyond_what_the_machine_allows() {
        let allows = |bytes| {
            let limit = Limit { name: "physical memory".to_owned(), bytes: Bytes(bytes) };
            Budget::of(None, &[limit])
        };
        let total = Bytes::mib(1040);
        // With 2 MiB of drift 1042 MiB, which is 1.02 GiB.
        assert_eq!(text(Vec::new(), total, &allows(1100 << 20)), "use `--memory 1092616192`");
        assert_eq!(text(Vec::new(), total, &allows(1200 << 20)), "use `--memory 1.1GiB`");
        let context = vec!["`--context 64`".to_owned()];
        assert_eq!(text(context, total, &allows(1041 << 20)), "use `--context 64`");
    }
}

//! Whose turn it is: prompts or answers.
//!
//! A pass over prompts is long, one over answers short. So answers are owed time: after a pass over prompts, passes over
//! answers follow until they took as long. A long prompt then makes what others are told at most about twice as slow,
//! and never stops it for longer than one pass. Nothing but the order of passes follows from this.

use std::time::Duration;

/// Time that is owed to answers.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Pace {
    owed: Duration,
}

impl Pace {
    /// Whether the next pass is over prompts, if there are jobs of both kinds.
    pub(super) fn reads_prompts(self, any_reads: bool, any_generates: bool) -> bool {
        any_reads && (!any_generates || self.owed.is_zero())
    }

    /// A pass over prompts took so long, while others generated or not.
    pub(super) fn read(&mut self, took: Duration, others_wait: bool) {
        // At least something, so that a pass over answers follows whatever the clock says.
        self.owed = if others_wait { took.max(Duration::from_nanos(1)) } else { Duration::ZERO };
    }

    /// A pass over answers took so long.
    pub(super) fn generated(&mut self, took: Duration) {
        self.owed = self.owed.saturating_sub(took.max(Duration::from_nanos(1)));
    }
}

/// Deals the rows of a pass to those who read prompts: a grid's width to each in turn, from `first` on, as far as
/// `most` rows go. `needs` are the rows that each has yet to read; where a prompt ends, less than a grid's width is
/// dealt. How many each gets.
pub(super) fn deal(needs: &[usize], first: usize, most: usize, grid: usize) -> Vec<usize> {
    let mut dealt = vec![0; needs.len()];
    let mut left = most;
    loop {
        let before = left;
        for i in (0..needs.len()).map(|i| (first + i) % needs.len()) {
            let rows = grid.min(needs[i] - dealt[i]);
            if rows <= left {
                dealt[i] += rows;
                left -= rows;
            }
        }
        if left == before {
            return dealt;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn answers_get_as_much_time_as_a_pass_over_prompts_took() {
        let mut pace = Pace::default();
        assert!(pace.reads_prompts(true, true) && !pace.reads_prompts(false, true));
        pace.read(3 * SECOND, true);
        for _ in 0..3 {
            assert!(!pace.reads_prompts(true, true));
            assert!(pace.reads_prompts(true, false), "nobody else is there");
            pace.generated(SECOND);
        }
        assert!(pace.reads_prompts(true, true));
    }

    #[test]
    fn turns_change_even_if_no_time_passes() {
        let mut pace = Pace::default();
        pace.read(Duration::ZERO, true);
        assert!(!pace.reads_prompts(true, true));
        pace.generated(Duration::ZERO);
        assert!(pace.reads_prompts(true, true));
        pace.read(SECOND, false);
        assert!(pace.reads_prompts(true, true), "nobody waited, so nothing is owed");
    }

    #[test]
    fn rows_are_dealt_in_turn_on_the_grid() {
        assert_eq!(deal(&[1000], 0, 256, 64), [256]);
        assert_eq!(deal(&[1000, 1000, 1000], 1, 256, 64), [64, 128, 64]);
        assert_eq!(
            deal(&[10, 1000], 0, 256, 64),
            [10, 192],
            "the rest is less than a grid's width"
        );
        assert_eq!(deal(&[10, 100, 20], 2, 256, 64), [10, 100, 20], "prompts that end");
        assert_eq!(deal(&[64, 1], 0, 64, 64), [64, 0]);
        assert_eq!(deal(&[64, 1], 1, 64, 64), [0, 1]);
        assert_eq!(deal(&[], 0, 64, 64), [0; 0]);
    }

    #[test]
    fn whoever_reads_gets_rows_in_some_turn() {
        let needs = [5000; 5];
        let got: Vec<usize> = (0..5).map(|first| deal(&needs, first, 64, 64)[first]).collect();
        assert_eq!(got, [64; 5]);
    }
}

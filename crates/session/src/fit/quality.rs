//! How good guesses of a layer's experts are.

use serde::Serialize;

/// Guesses of one layer, or of all, on text that was not fitted to.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Quality {
    /// Of the experts that a token chose, the share that the guess names, which names as many: also the share of the
    /// named that are chosen.
    pub recall: f64,
    /// The same of a guess that names twice as many.
    pub recall_of_twice: f64,
    /// Of the likelier half of the named, the share that is chosen.
    pub precision_of_half: f64,
}

/// Counts behind a [`Quality`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Tally {
    chosen: u64,
    named: u64,
    named_of_twice: u64,
    half: u64,
    half_chosen: u64,
}

impl Tally {
    /// One token: what it chose, and the guess's logits, of which work space is filled.
    pub(super) fn add(&mut self, chosen: &[u32], logits: &[f32], order: &mut Vec<u32>) {
        let k = chosen.len();
        top(logits, (2 * k).min(logits.len()), order);
        let right = |named: &[u32]| named.iter().filter(|expert| chosen.contains(expert)).count();
        let half = k.div_ceil(2);
        self.chosen += k as u64;
        self.named += right(&order[..k]) as u64;
        self.named_of_twice += right(order) as u64;
        self.half += half as u64;
        self.half_chosen += right(&order[..half]) as u64;
    }

    pub(super) const fn plus(self, other: Self) -> Self {
        Self {
            chosen: self.chosen + other.chosen,
            named: self.named + other.named,
            named_of_twice: self.named_of_twice + other.named_of_twice,
            half: self.half + other.half,
            half_chosen: self.half_chosen + other.half_chosen,
        }
    }

    pub(super) fn quality(self) -> Quality {
        Quality {
            recall: share(self.named, self.chosen),
            recall_of_twice: share(self.named_of_twice, self.chosen),
            precision_of_half: share(self.half_chosen, self.half),
        }
    }
}

/// Nothing of nothing is 0.
pub(super) fn share(part: u64, all: u64) -> f64 {
    if all == 0 { 0.0 } else { part as f64 / all as f64 }
}

/// The `k` largest, largest first, as a router takes them: a tie goes to the lower index.
pub(super) fn top(logits: &[f32], k: usize, order: &mut Vec<u32>) {
    order.clear();
    order.extend(0..logits.len() as u32);
    let before =
        |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    if k < order.len() {
        order.select_nth_unstable_by(k, before);
        order.truncate(k);
    }
    order.sort_unstable_by(before);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_come_first_and_ties_go_to_the_lower_index() {
        let mut order = Vec::new();
        top(&[1.0, 3.0, 3.0, 0.0, 3.0], 4, &mut order);
        assert_eq!(order, [1, 2, 4, 0]);
        top(&[0.5, -0.5], 2, &mut order);
        assert_eq!(order, [0, 1]);
    }

    #[test]
    fn shares_are_those_of_the_counts() {
        let mut tally = Tally::default();
        // Named: 3, 2, then 1, 0.
        tally.add(&[3, 0], &[1.0, 2.0, 3.0, 4.0, 0.0], &mut Vec::new());
        tally.add(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 0.0], &mut Vec::new());
        let expected = Quality { recall: 0.75, recall_of_twice: 1.0, precision_of_half: 1.0 };
        assert_eq!(tally.quality(), expected);
        assert_eq!(tally.plus(tally).quality(), expected);
        assert_eq!(Tally::default().quality().recall, 0.0);
    }
}

//! How many guesses are worth their time: a function of numbers that are fed to it.
//!
//! Of every depth it keeps running means of two things: what a pass with so many guesses costs, and how often a guess
//! was chosen when all before it were. A pass with `d` guesses gives `1 + a1 + a1·a2 + … + a1·…·ad` tokens; the depth
//! with the most tokens a second wins, and 0 is plain decoding. Neighbours of that depth are tried again now and then:
//! a text, a cache, a machine may change. Where no guess pays that is done ever more rarely.

/// The first passes that are not counted: they meet what a prompt has left.
const COLD: u32 = 1;
/// Plain passes before the first guess.
const PLAIN_FIRST: u32 = 2;
/// Newer values count at least one part in this many.
const WINDOW: u32 = 16;
/// How often a guess is chosen, before anything is known.
const HOPE: f64 = 0.8;
/// Passes after which a neighbour is tried again.
const TRY_AFTER: u32 = 64;
/// The same at most, where nothing pays.
const TRY_AFTER_MOST: u32 = 512;
/// What was not met for [`TRY_AFTER`] passes counts as so many values.
const FADED: u32 = 2;

/// A running mean.
#[derive(Debug, Clone, Copy, Default)]
struct Mean {
    value: f64,
    count: u32,
    /// Passes since the last value.
    age: u32,
}

impl Mean {
    fn add(&mut self, value: f64) {
        if self.age >= TRY_AFTER {
            self.count = self.count.min(FADED);
        }
        self.count = (self.count + 1).min(WINDOW);
        self.value += (value - self.value) / f64::from(self.count);
        self.age = 0;
    }

    const fn known(&self) -> Option<f64> {
        if self.count > 0 { Some(self.value) } else { None }
    }
}

/// What is known of one drafter.
#[derive(Debug, Clone)]
struct Record {
    /// By guesses of a pass, from one on: seconds.
    costs: Vec<Mean>,
    /// By place of a guess: 1 if it was chosen.
    chosen: Vec<Mean>,
    try_after: u32,
}

/// What is known of all drafters.
#[derive(Debug, Clone)]
pub(super) struct Pace {
    cold: u32,
    plain: Mean,
    drafters: Vec<Record>,
}

impl Pace {
    pub(super) fn new(drafters: usize, most: usize) -> Self {
        let record = Record {
            costs: vec![Mean::default(); most],
            chosen: vec![Mean::default(); most],
            try_after: TRY_AFTER,
        };
        Self { cold: COLD, plain: Mean::default(), drafters: vec![record; drafters] }
    }

    /// Guesses to ask a drafter for.
    pub(super) fn depth(&self, drafter: usize) -> usize {
        if self.plain.count < PLAIN_FIRST {
            return 0;
        }
        let record = &self.drafters[drafter];
        let best = record.best(self.plain.value, 0);
        let neighbours = match best {
            // The least loss.
            0 => [record.best(self.plain.value, 1), 0, 0],
            best => [0, best - 1, (best + 1).min(record.costs.len())],
        };
        let age = |depth: usize| match depth.checked_sub(1) {
            None => self.plain.age,
            Some(place) => record.costs[place].age,
        };
        let oldest = neighbours.into_iter().max_by_key(|depth| age(*depth));
        oldest.filter(|depth| age(*depth) >= record.try_after).unwrap_or(best)
    }

    /// A pass took `seconds` with `drafted` guesses of a drafter, of which the first `accepted` were chosen.
    pub(super) fn record(&mut self, drafter: usize, drafted: usize, accepted: usize, seconds: f64) {
        if self.cold > 0 {
            self.cold -= 1;
            return;
        }
        self.plain.age += 1;
        for record in &mut self.drafters {
            record.costs.iter_mut().chain(&mut record.chosen).for_each(|mean| mean.age += 1);
        }
        let Some(place) = drafted.checked_sub(1) else {
            self.plain.add(seconds);
            return;
        };
        let record = &mut self.drafters[drafter];
        record.costs[place].add(seconds);
        for (place, chosen) in record.chosen[..drafted.min(accepted + 1)].iter_mut().enumerate() {
            chosen.add(if place < accepted { 1.0 } else { 0.0 });
        }
        let paid = (accepted + 1) as f64 * self.plain.value > seconds;
        record.try_after = match record.best(self.plain.value, 0) {
            0 if !paid => (2 * record.try_after).min(TRY_AFTER_MOST),
            _ => TRY_AFTER,
        };
    }
}

impl Record {
    /// The depth with the most tokens a second, no less than `least`; of equals the lower.
    fn best(&self, plain: f64, least: usize) -> usize {
        let (mut best, mut most) = (least, 0.0);
        let (mut tokens, mut chance, mut hope) = (1.0, 1.0, HOPE);
        for depth in 0..=self.costs.len() {
            if let Some(place) = depth.checked_sub(1) {
                hope = self.chosen[place].known().unwrap_or(hope);
                chance *= hope;
                tokens += chance;
            }
            let rate = tokens / self.cost(plain, depth);
            if depth >= least && rate > most {
                (best, most) = (depth, rate);
            }
        }
        best
    }

    /// Seconds of a pass with so many guesses. What was never measured lies on a line through what was; with nothing
    /// to go by it costs no more than a plain pass, so that it is tried.
    fn cost(&self, plain: f64, depth: usize) -> f64 {
        let known = |depth: usize| match depth.checked_sub(1) {
            None => Some((0.0, plain)),
            Some(place) => self.costs[place].known().map(|cost| (depth as f64, cost)),
        };
        if let Some((_, cost)) = known(depth) {
            return cost;
        }
        let below = (0..depth).rev().find_map(known).unwrap_or((0.0, plain));
        let above = (depth + 1..=self.costs.len()).find_map(known);
        let other = above.unwrap_or((0.0, plain));
        if other.0 == below.0 {
            return plain;
        }
        let slope = (other.1 - below.1) / (other.0 - below.0);
        slope.max(0.0).mul_add(depth as f64 - below.0, below.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Passes on a machine where one with `d` guesses takes `cost(d)` and the guess at each place is chosen as
    /// often as `chances` says: how many passes had which depth.
    fn run(passes: usize, cost: impl Fn(usize) -> f64, chances: &[f64]) -> Vec<usize> {
        let mut pace = Pace::new(1, chances.len());
        let mut depths = vec![0; chances.len() + 1];
        run_on(&mut pace, passes, &cost, chances, &mut depths);
        depths
    }

    fn run_on(
        pace: &mut Pace,
        passes: usize,
        cost: &dyn Fn(usize) -> f64,
        chances: &[f64],
        depths: &mut [usize],
    ) {
        let mut random = 1_u64;
        for _ in 0..passes {
            let depth = pace.depth(0);
            let accepted = (0..depth).take_while(|place| {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                ((random >> 33) as f64 / (1_u64 << 31) as f64) < chances[*place]
            });
            let accepted = accepted.count();
            pace.record(0, depth, accepted, cost(depth));
            depths[depth] += 1;
        }
    }

    /// A share of the passes, rounded down to per cent.
    fn share(depths: &[usize], depth: usize) -> usize {
        100 * depths[depth] / depths.iter().sum::<usize>()
    }

    #[test]
    fn guesses_that_never_come_true_end_soon() {
        let depths = run(2000, |d| 1.0 + 0.1 * d as f64, &[0.0; 4]);
        assert!(share(&depths, 0) >= 98, "{depths:?}");
        assert!(depths[1..].iter().sum::<usize>() > 0, "they are tried");
    }

    #[test]
    fn guesses_that_cost_as_much_as_they_bring_are_not_made() {
        // Every row as dear as a plain pass, as where experts of no two tokens are the same.
        let depths = run(2000, |d| 1.05 + d as f64, &[0.9, 0.9, 0.9]);
        assert!(share(&depths, 0) >= 97, "{depths:?}");
    }

    #[test]
    fn sure_guesses_at_little_cost_are_made_as_deep_as_allowed() {
        let depths = run(2000, |d| 1.0 + 0.1 * d as f64, &[1.0; 4]);
        assert!(share(&depths, 4) >= 90, "{depths:?}");
    }

    #[test]
    fn the_depth_is_where_the_next_guess_no_longer_pays() {
        // Two are nearly sure, the third comes true in one of ten.
        let depths = run(4000, |d| 1.0 + 0.3 * d as f64, &[0.95, 0.95, 0.1, 0.1]);
        assert!(share(&depths, 2) >= 75, "{depths:?}");
    }

    #[test]
    fn it_notices_that_guesses_begin_to_pay_and_that_they_cease_to() {
        let mut pace = Pace::new(1, 3);
        let cost = |d: usize| 1.0 + 0.2 * d as f64;
        let mut phase = |chance: f64| {
            let mut depths = vec![0; 4];
            run_on(&mut pace, 1500, &cost, &[chance; 3], &mut depths);
            depths
        };
        let (first, second, third) = (phase(0.02), phase(0.95), phase(0.02));
        assert!(share(&first, 0) >= 95, "{first:?}");
        assert!(share(&second, 3) >= 30, "{second:?}");
        assert!(share(&third, 0) >= 85, "{third:?}");
    }

    #[test]
    fn nothing_is_guessed_before_a_plain_pass_was_measured() {
        let mut pace = Pace::new(2, 4);
        let passes = COLD + PLAIN_FIRST;
        for _ in 0..passes {
            assert_eq!((pace.depth(0), pace.depth(1)), (0, 0));
            pace.record(0, 0, 0, 1.0);
        }
        assert_eq!((pace.depth(0), pace.depth(1)), (4, 4), "hope");
        pace.record(1, 4, 0, 4.0);
        assert_eq!((pace.depth(0), pace.depth(1)), (4, 0), "drafters are judged apart");
    }

    #[test]
    fn costs_between_what_was_measured_lie_on_a_line() {
        let mut pace = Pace::new(1, 4);
        for (drafted, seconds) in [(0, 9.0), (0, 1.0), (2, 2.0)] {
            pace.record(0, drafted, 0, seconds);
        }
        let costs = [0, 1, 2, 3, 4].map(|depth| pace.drafters[0].cost(1.0, depth));
        assert_eq!(costs, [1.0, 1.5, 2.0, 2.5, 3.0]);
    }
}

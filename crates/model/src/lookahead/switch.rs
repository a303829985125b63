//! Whether guesses pay: decided by time, again and again.
//!
//! A trial runs some tokens with guesses, some without, and some with again, so that what drifts (a pool that fills, a
//! disk that others use) meets both sides. The faster side wins for a while; a loss is tried again later and later.

/// Tokens of one window of a trial.
const WINDOW: u32 = 8;
/// Windows of a trial: whether guesses are on.
const TRIAL: [bool; 4] = [true, false, false, true];
/// Tokens until a gain is tried again, and a first loss.
const HOLD: u32 = 128;
/// Tokens after which a loss is tried again at the latest.
const LONGEST_HOLD: u32 = 2048;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Switch {
    phase: Phase,
    /// Tokens of the window or of the hold that have run.
    run: u32,
    /// Time of the trial's tokens, without and with guesses.
    spent_us: [u64; 2],
    /// Tokens that the next loss holds.
    hold: u32,
    losses: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Trial(usize),
    Held { on: bool, tokens: u32 },
}

impl Switch {
    pub(super) const fn new() -> Self {
        Self { phase: Phase::Trial(0), run: 0, spent_us: [0; 2], hold: HOLD, losses: 0 }
    }

    /// Whether the next token is run with guesses.
    pub(super) const fn is_on(&self) -> bool {
        match self.phase {
            Phase::Trial(window) => TRIAL[window],
            Phase::Held { on, .. } => on,
        }
    }

    /// Trials that guesses lost.
    pub(super) const fn losses(&self) -> u64 {
        self.losses
    }

    /// A token took so long.
    pub(super) fn observe(&mut self, elapsed_us: u64) {
        self.run += 1;
        match self.phase {
            Phase::Trial(window) => {
                self.spent_us[usize::from(TRIAL[window])] += elapsed_us;
                if self.run == WINDOW {
                    self.run = 0;
                    self.end_window(window);
                }
            }
            Phase::Held { tokens, .. } if self.run >= tokens => {
                (self.run, self.spent_us) = (0, [0; 2]);
                self.phase = Phase::Trial(0);
            }
            Phase::Held { .. } => {}
        }
    }

    fn end_window(&mut self, window: usize) {
        if window + 1 < TRIAL.len() {
            self.phase = Phase::Trial(window + 1);
            return;
        }
        let [without, with] = self.spent_us;
        let on = with <= without;
        let tokens = if on { HOLD } else { self.hold };
        self.phase = Phase::Held { on, tokens };
        if on {
            self.hold = HOLD;
        } else {
            self.losses += 1;
            self.hold = (2 * self.hold).min(LONGEST_HOLD);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens with guesses of the next `tokens`, which take `with_us` and `without_us`.
    fn run(switch: &mut Switch, tokens: u32, with_us: u64, without_us: u64) -> u32 {
        let mut on = 0;
        for _ in 0..tokens {
            on += u32::from(switch.is_on());
            switch.observe(if switch.is_on() { with_us } else { without_us });
        }
        on
    }

    const TRIAL_TOKENS: u32 = 4 * WINDOW;

    #[test]
    fn guesses_that_gain_stay_on_until_they_are_tried_again() {
        let mut switch = Switch::new();
        for _ in 0..3 {
            assert_eq!(run(&mut switch, TRIAL_TOKENS, 90, 100), TRIAL_TOKENS / 2);
            assert_eq!(run(&mut switch, HOLD, 90, 100), HOLD);
        }
        assert_eq!(switch.losses(), 0);
    }

    #[test]
    fn guesses_that_lose_are_off_longer_and_longer() {
        let mut switch = Switch::new();
        let mut hold = HOLD;
        for losses in 1..8 {
            assert_eq!(run(&mut switch, TRIAL_TOKENS, 101, 100), TRIAL_TOKENS / 2);
            assert_eq!(switch.losses(), losses);
            assert_eq!(run(&mut switch, hold, 101, 100), 0, "{hold} tokens without");
            assert!(switch.is_on(), "and then they are tried again");
            hold = (2 * hold).min(LONGEST_HOLD);
        }
        assert_eq!(hold, LONGEST_HOLD);
    }

    #[test]
    fn a_gain_after_losses_makes_the_next_loss_short_again() {
        let mut switch = Switch::new();
        run(&mut switch, TRIAL_TOKENS + HOLD, 101, 100);
        run(&mut switch, TRIAL_TOKENS + HOLD, 99, 100);
        run(&mut switch, TRIAL_TOKENS, 101, 100);
        assert_eq!(run(&mut switch, HOLD, 101, 100), 0);
        assert!(switch.is_on());
    }

    #[test]
    fn what_gets_steadily_slower_or_faster_decides_nothing() {
        for step in [-3_i64, 3] {
            let mut switch = Switch::new();
            for token in 0..i64::from(TRIAL_TOKENS) {
                switch.observe((1000 + step * token) as u64);
            }
            assert!(switch.is_on(), "both sides took the same");
        }
    }
}

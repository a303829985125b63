//! One of the engine's sequences: what it holds, and the job that runs in it.

use std::time::{Duration, Instant};

use std::ops::Range;

use compute::backend::{SequenceId, SnapshotId};
use model::{ForwardError, Network};

use super::job::{Choice, Job, JobError};
use super::prefix::Prefixes;
use super::shared::Waiting;
use crate::sequence::{GRID, Phase};

/// A sequence, opened once and used by one job after the other.
pub(super) struct Seat {
    pub(super) id: SequenceId,
    pub(super) running: Option<Running>,
    /// Tokens whose rows its caches hold, all read as prompt.
    held: Vec<u32>,
    /// Where a state of it is kept, of a model that has such.
    states: Option<States>,
    /// When a job last ended here, in jobs.
    used: u64,
}

/// States that are kept of a sequence.
struct States {
    /// Where its next turn can begin.
    snapshot: SnapshotId,
    /// The position that it is of, while it is of any.
    point: Option<usize>,
    /// One on its way to the cache of prefixes, if there is a cache.
    branch: Option<SnapshotId>,
}

/// Points of a prompt at which it is worth keeping what was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Points {
    /// Where others may go on differently; kept in the cache.
    pub(super) branch: Option<usize>,
    /// The prompt's last: where the next turn can begin.
    pub(super) last: Option<usize>,
}

impl Points {
    /// Points behind `at`, where reading begins. `branches` are where others began the same, as far as that is known.
    fn of(prompt: usize, at: usize, branches: [usize; 2]) -> Self {
        let last = Some(last_point(prompt)).filter(|last| *last > at);
        let between = |branch: &usize| *branch > at && last.is_some_and(|last| *branch < last);
        Self { branch: branches.map(last_point).into_iter().find(between), last }
    }

    /// Those that are behind one of these rows.
    const fn within(self, rows: &Range<usize>) -> Self {
        const fn of(point: Option<usize>, rows: &Range<usize>) -> Option<usize> {
            match point {
                Some(point) if rows.start < point && point <= rows.end => Some(point),
                _ => None,
            }
        }
        Self { branch: of(self.branch, rows), last: of(self.last, rows) }
    }
}

/// A job that runs.
pub(super) struct Running {
    pub(super) job: Job,
    pub(super) queued: Duration,
    pub(super) started: Instant,
    /// When the last row of it was read or given.
    pub(super) progress: Instant,
    /// Tokens of the prompt that were not read again.
    pub(super) cached: usize,
    /// Tokens of the prompt that are read.
    pub(super) read: usize,
    points: Points,
    /// Rows behind the prompt.
    pub(super) decoded: usize,
    /// The token to run next, once the prompt is read.
    pub(super) next: Option<u32>,
    /// Tokens given out.
    pub(super) generated: usize,
    pub(super) prefill: Phase,
    pub(super) decode: Phase,
    /// When the first token was chosen.
    pub(super) first: Option<Instant>,
}

/// The prompt's last point of the grid: where the next turn can begin.
pub(super) const fn last_point(tokens: usize) -> usize {
    tokens / GRID * GRID
}

/// Tokens at the beginning of both, in whole steps of the grid, and fewer than `prompt` has: a row is left to give
/// logits.
pub(super) fn common(held: &[u32], prompt: &[u32]) -> usize {
    let agree = held.iter().zip(prompt).take_while(|(a, b)| a == b).count();
    last_point(agree.min(prompt.len().saturating_sub(1)))
}

impl Seat {
    /// `caches`: whether there is a cache of prefixes.
    pub(super) fn open(network: &mut Network, caches: bool) -> Result<Self, ForwardError> {
        let id = network.open_sequence()?;
        let states = if network.has_state() {
            let snapshot = network.snapshot(id)?;
            let branch = if caches { Some(network.snapshot(id)?) } else { None };
            Some(States { snapshot, point: None, branch })
        } else {
            None
        };
        let held = Vec::with_capacity(network.options().context_tokens);
        Ok(Self { id, running: None, held, states, used: 0 })
    }

    /// Tokens of a prompt that need not be read again here.
    pub(super) fn reusable(&self, prompt: &[u32]) -> usize {
        let common = common(&self.held, prompt);
        match &self.states {
            Some(states) => states.point.filter(|point| *point <= common).unwrap_or(0),
            None => common,
        }
    }

    /// What it costs that a prompt goes on from `at` here, the best first: rows that are lost with what it holds, whether
    /// rows have to be copied, how long ago it was used.
    pub(super) fn cost(&self, prompt: &[u32], at: usize) -> (usize, bool, u64) {
        let lost = last_point(self.held.len().saturating_sub(at));
        (lost, self.reusable(prompt) < at, self.used)
    }

    /// Cuts the sequence to its first `at` tokens, at a point that [`Self::reusable`] gave.
    pub(super) fn go_back(&mut self, network: &mut Network, at: usize) {
        match &mut self.states {
            Some(states) if at > 0 => network.rollback(self.id, states.snapshot),
            states => {
                network.reset(self.id);
                if let Some(states) = states {
                    states.point = None;
                }
            }
        }
        self.held.truncate(at);
    }

    /// Gives the sequence the first `at` tokens of a prompt from the cache, which has them.
    pub(super) fn restore(
        &mut self,
        network: &mut Network,
        prefixes: &mut Prefixes,
        prompt: &[u32],
        at: usize,
    ) {
        // The rows that it has need not be copied.
        let held = common(&self.held, prompt).min(at);
        prefixes.restore(network, self.id, prompt, (held, at));
        if let Some(states) = &mut self.states {
            network.renew(self.id, states.snapshot);
            states.point = Some(at);
        }
        self.held.truncate(held);
        self.held.extend_from_slice(&prompt[held..at]);
    }

    /// The network has lost the sequence.
    pub(super) fn lose(&mut self, network: &mut Network) {
        self.go_back(network, 0);
    }

    /// Rows of a prompt are about to be read: keeps the state at points behind them.
    pub(super) fn mark(&mut self, network: &mut Network, rows: &Range<usize>) {
        let (Some(states), Some(running)) = (&mut self.states, &self.running) else { return };
        let points = running.points.within(rows);
        if let (Some(branch), Some(point)) = (states.branch, points.branch) {
            network.mark(self.id, branch, point);
        }
        if let Some(point) = points.last {
            network.mark(self.id, states.snapshot, point);
            // Not before the pass has ended.
            states.point = None;
        }
    }

    /// Rows of the prompt were read, up to `end`: points of it go to the cache.
    pub(super) fn read(&mut self, network: &mut Network, prefixes: &mut Prefixes, end: usize) {
        let running = self.running.as_mut().expect("a job has read");
        let start = std::mem::replace(&mut running.read, end);
        let prompt = &running.job.prompt;
        self.held.extend_from_slice(&prompt[start..end]);
        let points = running.points.within(&(start..end));
        if let Some(states) = &mut self.states {
            states.point = points.last.or(states.point);
            // Without a state there is nothing to go on from.
            if let (Some(branch), Some(point)) = (states.branch, points.branch) {
                prefixes.keep(network, self.id, &prompt[..point], Some(branch));
            }
        }
        if let Some(point) = points.last {
            let snapshot = self.states.as_ref().map(|states| states.snapshot);
            prefixes.keep(network, self.id, &prompt[..point], snapshot);
        }
    }

    /// The job is over.
    pub(super) fn leave(&mut self, now: u64) -> Running {
        self.used = now;
        self.running.take().expect("a job runs here")
    }
}

impl Running {
    /// A job whose prompt goes on at `cached`. `known` tokens of it were known, even if it could not go on there.
    pub(super) fn new(waiting: Waiting, cached: usize, known: usize) -> Self {
        let Waiting { job, since } = waiting;
        let now = Instant::now();
        let points = Points::of(job.prompt.len(), cached, [known, job.shared]);
        Self {
            points,
            job,
            queued: now.duration_since(since),
            started: now,
            progress: now,
            cached,
            read: cached,
            decoded: 0,
            next: None,
            generated: 0,
            prefill: Phase::default(),
            decode: Phase::default(),
            first: None,
        }
    }

    /// Rows of the prompt that are left, of a job that reads it.
    pub(super) fn to_read(&self) -> usize {
        self.job.prompt.len() - self.read
    }

    /// The position of its next row.
    pub(super) fn position(&self) -> usize {
        self.read + self.decoded
    }

    /// Whether it wants the logits behind its prompt.
    pub(super) fn wants_tokens(&self) -> bool {
        self.job.max_tokens > 0
    }

    /// Lets the job choose. Its chooser is somebody else's code.
    pub(super) fn choose(&mut self, logits: &[f32]) -> Result<Choice, JobError> {
        let (is_first, Job { prompt, chooser, .. }) = (self.first.is_none(), &mut self.job);
        let choose = || {
            if is_first {
                chooser.begin(prompt);
            }
            chooser.choose(logits)
        };
        // Whatever a panic leaves behind is the chooser's own, and it is not asked again.
        let chosen = std::panic::catch_unwind(std::panic::AssertUnwindSafe(choose));
        match chosen {
            Ok(chosen) => Ok(chosen?),
            Err(panic) => Err(JobError::ChooserPanicked { message: panic_text(&*panic) }),
        }
    }
}

/// What a panic said.
pub(super) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_are_behind_what_is_known() {
        let points = |prompt, at, branches| {
            let Points { branch, last } = Points::of(prompt, at, branches);
            (branch, last)
        };
        assert_eq!(points(200, 0, [0, 0]), (None, Some(192)));
        assert_eq!(points(200, 0, [70, 130]), (Some(64), Some(192)));
        assert_eq!(points(200, 64, [70, 130]), (Some(128), Some(192)));
        assert_eq!(points(200, 64, [200, 500]), (None, Some(192)));
        assert_eq!(points(200, 192, [64, 64]), (None, None));
        assert_eq!(points(63, 0, [60, 60]), (None, None));
        let all = Points { branch: Some(64), last: Some(192) };
        assert_eq!(all.within(&(0..64)), Points { branch: Some(64), last: None });
        assert_eq!(all.within(&(64..192)), Points { branch: None, last: Some(192) });
        assert_eq!(all.within(&(192..256)), Points::default());
    }

    #[test]
    fn what_is_common_ends_on_the_grid_and_leaves_a_row() {
        let tokens: Vec<u32> = (0..200).collect();
        let other = |at: usize| {
            let mut other = tokens.clone();
            other[at] = 1000;
            other
        };
        let cases = [
            (&tokens[..], &tokens[..], 192),
            (&tokens[..192], &tokens[..192], 128),
            (&tokens[..192], &tokens[..193], 192),
            (&tokens[..63], &tokens[..], 0),
            (&tokens[..], &other(64), 64),
            (&tokens[..], &other(63), 0),
            (&tokens[..], &[], 0),
        ];
        for (held, prompt, expected) in cases {
            assert_eq!(common(held, prompt), expected);
        }
    }
}

//! What the engine's thread and everybody else look at.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::job::{Job, JobError, JobEvent, JobId};
use super::stats::SchedulerStats;
use super::{Serving, SubmitError};

/// A share of a new observation in the mean time of a job.
const NEW: f64 = 0.125;

/// A job in the queue.
pub(super) struct Waiting {
    pub(super) job: Job,
    pub(super) since: Instant,
}

/// The queue and the numbers.
#[derive(Default)]
pub(super) struct State {
    pub(super) queue: VecDeque<Waiting>,
    /// Set when no job is taken any more: when those that run are cut.
    pub(super) closing: Option<Instant>,
    /// What the engine's thread said when it panicked.
    stopped: Option<String>,
    pub(super) stats: SchedulerStats,
    next: u64,
    /// Seconds that a job takes from its start to its end, on average.
    job_seconds: Option<f64>,
}

/// Both, and how to wake the engine's thread.
pub(super) struct Shared {
    state: Mutex<State>,
    wake: Condvar,
    layers: AtomicU64,
    serving: Serving,
}

impl State {
    /// A job has run to its end.
    pub(super) fn took(&mut self, elapsed: Duration) {
        let new = elapsed.as_secs_f64();
        let mean = self.job_seconds.get_or_insert(new);
        *mean += NEW * (new - *mean);
    }

    /// Takes jobs out of the queue that nobody wants any more.
    fn drop_cancelled(&mut self) {
        let Self { queue, stats, .. } = self;
        queue.retain_mut(|waiting| {
            let keep = !waiting.job.cancel.is_cancelled();
            if !keep {
                stats.cancelled.jobs += 1;
                fail(&mut waiting.job, JobError::Cancelled { layer: None });
            }
            keep
        });
    }

    /// Fails all jobs that wait: none is begun any more.
    fn refuse_waiting(&mut self) {
        let Self { queue, stats, stopped, .. } = self;
        for mut waiting in queue.drain(..) {
            stats.failed += 1;
            let error = match stopped.clone() {
                Some(message) => JobError::EngineStopped { message },
                None => JobError::ShuttingDown,
            };
            fail(&mut waiting.job, error);
        }
    }

    /// When a job that does not fit into the queue may try again.
    fn retry_after(&self, serving: Serving) -> Duration {
        let turns = self.queue.len().div_ceil(serving.sequences as usize).max(1);
        let seconds = self.job_seconds.unwrap_or(1.0) * turns as f64;
        Duration::from_secs(seconds.ceil().clamp(1.0, 3600.0) as u64)
    }
}

/// Tells a job that it has failed; whether anybody listens makes no difference.
pub(super) fn fail(job: &mut Job, error: JobError) {
    let _ = job.tell(JobEvent::Failed(error));
}

impl Shared {
    pub(super) fn new(serving: Serving) -> Self {
        let (state, layers) = (Mutex::default(), AtomicU64::new(0));
        Self { state, wake: Condvar::new(), layers, serving }
    }

    /// The state; every change of it is complete, so a panic elsewhere has not damaged it.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A layer begins.
    pub(super) fn layer_begins(&self) {
        self.layers.fetch_add(1, Ordering::Release);
    }

    pub(super) fn submit(&self, mut job: Job) -> Result<JobId, SubmitError> {
        let mut state = self.lock();
        if let Some(message) = state.stopped.clone() {
            return Err(SubmitError::EngineStopped { message });
        }
        if state.closing.is_some() {
            return Err(SubmitError::ShuttingDown);
        }
        state.drop_cancelled();
        // Those that can begin at once do not wait: `running` is what the engine's thread said last.
        let free = (self.serving.sequences as usize).saturating_sub(state.stats.running);
        let waiting = state.queue.len();
        if waiting >= free + self.serving.queue as usize {
            state.stats.refused += 1;
            let retry_after = state.retry_after(self.serving);
            return Err(SubmitError::QueueFull { waiting, retry_after });
        }
        let id = JobId(state.next);
        state.next += 1;
        state.stats.submitted += 1;
        if !job.tell(JobEvent::Queued { ahead: waiting }) {
            job.cancel.cancel();
        }
        state.queue.push_back(Waiting { job, since: Instant::now() });
        state.stats.queued = state.queue.len();
        drop(state);
        self.wake.notify_all();
        Ok(id)
    }

    pub(super) fn stats(&self) -> SchedulerStats {
        let stats = self.lock().stats;
        SchedulerStats { layers: self.layers.load(Ordering::Acquire), ..stats }
    }

    /// Takes no more jobs; those that wait fail, those that run are cut when `grace` is over.
    pub(super) fn close(&self, grace: Duration) {
        let mut state = self.lock();
        let now = Instant::now();
        let until = now.checked_add(grace).unwrap_or(now);
        state.closing = Some(state.closing.map_or(until, |earlier| earlier.min(until)));
        drop(state);
        self.wake.notify_all();
    }

    /// The engine's thread has panicked: from now on that is why no job is taken.
    pub(super) fn stop(&self, message: &str) {
        self.lock().stopped = Some(message.to_owned());
        self.close(Duration::ZERO);
    }

    /// What the engine's thread said when it panicked, if it did.
    pub(super) fn stopped(&self) -> Option<String> {
        self.lock().stopped.clone()
    }

    /// When those that run are cut, if the engine is shutting down.
    pub(super) fn closing(&self) -> Option<Instant> {
        self.lock().closing
    }

    /// Whether no job waits, nor the end of a grace that is over.
    pub(super) fn is_idle(&self) -> bool {
        let state = self.lock();
        state.queue.is_empty() && state.closing.is_none_or(|until| Instant::now() < until)
    }

    /// The next jobs, at most `free`, with the number that run besides. Waits for one while none runs; nothing at all
    /// when the engine is shutting down and no job runs.
    pub(super) fn next(&self, free: usize, running: usize) -> Option<Vec<Waiting>> {
        let mut state = self.lock();
        loop {
            state.drop_cancelled();
            if state.closing.is_some() {
                state.refuse_waiting();
            }
            let n = free.min(state.queue.len());
            let next: Vec<Waiting> = state.queue.drain(..n).collect();
            state.stats.queued = state.queue.len();
            state.stats.running = running + n;
            if running + n > 0 {
                return Some(next);
            }
            if state.closing.is_some() {
                return None;
            }
            state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

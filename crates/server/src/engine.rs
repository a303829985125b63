//! What runs jobs: the scheduler, and a script in tests.

use std::time::Duration;

use session::scheduler::{Job, Scheduler, SchedulerStats, SubmitError};

/// Something that runs jobs.
pub(crate) trait Runner: Send + Sync {
    /// Takes a job, or says why not; does not wait.
    fn submit(&self, job: Job) -> Result<(), SubmitError>;

    /// Counters, without waiting for anything.
    fn stats(&self) -> SchedulerStats;

    /// What it said when it panicked, if it did: no job will ever be taken again.
    fn stopped(&self) -> Option<String>;

    /// Takes nothing more, and cuts what still runs after `grace`.
    fn shutdown(&self, grace: Duration);
}

impl Runner for Scheduler {
    fn submit(&self, job: Job) -> Result<(), SubmitError> {
        Self::submit(self, job).map(drop)
    }

    fn stats(&self) -> SchedulerStats {
        Self::stats(self)
    }

    fn stopped(&self) -> Option<String> {
        Self::stopped(self)
    }

    fn shutdown(&self, grace: Duration) {
        drop(Self::shutdown(self, grace));
    }
}

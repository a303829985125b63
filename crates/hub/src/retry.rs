//! When to try again, and when to give up.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::client::Failure;
use crate::error::HubError;

/// Most failures in a row without progress, inside of a transfer.
pub(crate) const TRANSFER_TRIES: u32 = 8;
/// The same before anything came: a name that does not resolve is more often a slip than a passing fault.
pub(crate) const LISTING_TRIES: u32 = 4;
/// Longest pause that is our own choice.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Longest pause that a server may ask for.
const LONGEST_WAIT: Duration = Duration::from_mins(10);
/// How soon a pause notices that it is to end.
const STEP: Duration = Duration::from_millis(20);

/// Says that the work is to end. Shared by all threads of a pull.
#[derive(Clone)]
pub struct Stop {
    asked: Arc<dyn Fn() -> bool + Send + Sync>,
    /// Set by a thread that met an error, for the others.
    failed: Arc<AtomicBool>,
}

impl Stop {
    /// `asked` is called often and from several threads.
    pub fn new(asked: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self { asked: Arc::new(asked), failed: Arc::default() }
    }

    /// The same wish from outside, without what failed before.
    pub(crate) fn afresh(&self) -> Self {
        Self { asked: Arc::clone(&self.asked), failed: Arc::default() }
    }

    /// Whether somebody outside wants an end.
    pub(crate) fn asked(&self) -> bool {
        (self.asked)()
    }

    pub(crate) fn fail(&self) {
        self.failed.store(true, Ordering::Release);
    }

    /// Whether to end, for whatever reason.
    pub(crate) fn is_set(&self) -> bool {
        self.failed.load(Ordering::Acquire) || self.asked()
    }

    /// Sleeps, or returns `false` as soon as the work is to end.
    pub(crate) fn pause(&self, time: Duration) -> bool {
        let end = Instant::now() + time;
        while !self.is_set() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            std::thread::sleep(left.min(STEP));
        }
        false
    }
}

/// Failures in a row at one piece of work.
pub(crate) struct Patience {
    first_pause: Duration,
    most: u32,
    failures: u32,
}

impl Patience {
    /// The first pause is about `first_pause` long, each further one twice that of the one before.
    pub(crate) const fn new(first_pause: Duration, most: u32) -> Self {
        Self { first_pause, most, failures: 0 }
    }

    /// There was progress worth the name.
    pub(crate) const fn renew(&mut self) {
        self.failures = 0;
    }

    /// How long to wait before the next try.
    ///
    /// # Errors
    ///
    /// The failure itself if it is final; [`HubError::Unreachable`] after too many; [`HubError::Busy`] if the server
    /// asks for too long a wait.
    pub(crate) fn after(
        &mut self,
        failure: Failure,
        host: &str,
        what: &str,
    ) -> Result<Duration, HubError> {
        let (last, wait) = match failure {
            Failure::Final(error) => return Err(error),
            Failure::Passing(last, wait) => (last, wait),
        };
        self.failures += 1;
        if self.failures >= self.most {
            let (host, what) = (host.to_owned(), what.to_owned());
            return Err(HubError::Unreachable { host, what, tries: self.failures, last });
        }
        if let Some(wait) = wait.filter(|wait| *wait > LONGEST_WAIT) {
            return Err(HubError::Busy { host: host.to_owned(), wait, most: LONGEST_WAIT });
        }
        let pause = self.first_pause.saturating_mul(1 << (self.failures - 1)).min(LONGEST_PAUSE);
        // Up to half more, so that connections that failed together do not come back together.
        let random = RandomState::new().hash_one(self.failures) as u32;
        let pause = pause + pause.mul_f64(0.5 * f64::from(random) / f64::from(u32::MAX));
        Ok(pause.max(wait.unwrap_or_default()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passing(wait: Option<u64>) -> Failure {
        Failure::Passing("dropped".to_owned(), wait.map(Duration::from_secs))
    }

    #[test]
    fn pauses_grow_and_end() {
        let mut patience = Patience::new(Duration::from_secs(1), TRANSFER_TRIES);
        let mut least = Duration::from_secs(1);
        for _ in 1..TRANSFER_TRIES {
            let pause = patience.after(passing(None), "h", "w").unwrap();
            assert!(pause >= least.min(LONGEST_PAUSE) && pause <= LONGEST_PAUSE.mul_f64(1.5));
            least *= 2;
        }
        let error = patience.after(passing(None), "h", "w").unwrap_err();
        assert!(matches!(error, HubError::Unreachable { tries: TRANSFER_TRIES, .. }));
        patience.renew();
        assert!(patience.after(passing(None), "h", "w").is_ok());
    }

    #[test]
    fn a_servers_wish_is_met_up_to_a_limit() {
        let mut patience = Patience::new(Duration::from_millis(1), TRANSFER_TRIES);
        let pause = patience.after(passing(Some(7)), "h", "w").unwrap();
        assert_eq!(pause, Duration::from_secs(7));
        let error = patience.after(passing(Some(100_000)), "h", "w").unwrap_err();
        assert!(matches!(error, HubError::Busy { .. }));
    }

    #[test]
    fn a_pause_ends_when_the_work_does() {
        let stop = Stop::new(|| false);
        assert!(stop.pause(Duration::from_millis(1)));
        stop.fail();
        let start = Instant::now();
        assert!(!stop.pause(Duration::from_mins(1)));
        assert!(start.elapsed() < Duration::from_secs(10));
    }
}

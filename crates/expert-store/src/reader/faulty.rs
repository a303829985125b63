//! A reader that fails on purpose: for tests of everything above it.
//!
//! Reads are numbered in the order in which they reach the reader. With one thread that order is the same in every
//! run; with several, the n-th read may be another one, but there is always exactly one n-th.

use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::Reader;
use crate::file::OpenFile;

/// Longest time that [`FaultKind::Hold`] holds a read back, so that no plan can hang a run.
const HOLD_LIMIT: Duration = Duration::from_millis(200);

/// What happens to a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// At most this many bytes arrive. 0 looks like the end of the file.
    Short(usize),
    /// The system reports this error number (`EIO` is 5) and nothing arrives; the memory may have been written.
    Error(i32),
    /// The read takes this much longer.
    Delay(Duration),
    /// The read comes back after this many later ones have, or after 200 ms.
    Hold(u64),
}

/// One fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// Which read it hits, from 0.
    pub read: u64,
    /// What happens to it.
    pub kind: FaultKind,
}

/// Which reads fail and how. Clones share their progress, so that a test can ask what happened.
#[derive(Debug, Clone, Default)]
pub struct FaultPlan(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    faults: Vec<Fault>,
    /// What happens to every other read.
    every: Option<FaultKind>,
    progress: Mutex<Progress>,
    passed: Condvar,
}

#[derive(Debug, Default)]
struct Progress {
    begun: u64,
    ended: u64,
    fired: u64,
}

impl FaultPlan {
    /// A plan of several faults.
    pub fn new(faults: Vec<Fault>) -> Self {
        Self(Arc::new(Shared { faults, ..Shared::default() }))
    }

    /// A plan of one fault on read `read`, from 0.
    pub fn nth(read: u64, kind: FaultKind) -> Self {
        Self::new(vec![Fault { read, kind }])
    }

    /// The same on every read: a slow disk.
    pub fn every(kind: FaultKind) -> Self {
        Self(Arc::new(Shared { every: Some(kind), ..Shared::default() }))
    }

    /// How many faults have hit a read.
    pub fn fired(&self) -> u64 {
        self.0.progress.lock().unwrap_or_else(PoisonError::into_inner).fired
    }

    /// How many reads have begun.
    pub fn reads(&self) -> u64 {
        self.0.progress.lock().unwrap_or_else(PoisonError::into_inner).begun
    }
}

pub(crate) struct FaultyReader {
    pub(crate) inner: Box<dyn Reader>,
    pub(crate) plan: FaultPlan,
}

impl Reader for FaultyReader {
    fn read_at(&self, file: &OpenFile, offset: u64, out: &mut [u8]) -> io::Result<usize> {
        let shared = &*self.plan.0;
        let mut progress = shared.progress.lock().unwrap_or_else(PoisonError::into_inner);
        let this = progress.begun;
        progress.begun += 1;
        let fault = shared.faults.iter().find(|fault| fault.read == this);
        let fault = fault.map(|fault| fault.kind).or(shared.every);
        progress.fired += u64::from(fault.is_some());
        drop(progress);

        let result = self.inner.read_at(file, offset, out);
        let result = match fault {
            None => result,
            Some(FaultKind::Short(most)) => {
                let n = result?.min(most);
                // A real short read writes nothing behind its end.
                out[n..].fill(0xDB);
                Ok(n)
            }
            Some(FaultKind::Error(number)) => {
                out.fill(0xDB);
                Err(io::Error::from_raw_os_error(number))
            }
            Some(FaultKind::Delay(time)) => {
                std::thread::sleep(time);
                result
            }
            Some(FaultKind::Hold(others)) => {
                shared.hold(others);
                result
            }
        };
        shared.progress.lock().unwrap_or_else(PoisonError::into_inner).ended += 1;
        shared.passed.notify_all();
        result
    }
}

impl Shared {
    /// Waits until `others` more reads have ended.
    fn hold(&self, others: u64) {
        let until = Instant::now() + HOLD_LIMIT;
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        let goal = progress.ended + others;
        while progress.ended < goal {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let waited = self.passed.wait_timeout(progress, left);
            progress = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

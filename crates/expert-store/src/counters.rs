//! What the store has done so far. Plain numbers, one definition each.

use std::time::Duration;

use crate::request::Priority;

/// Work of one class of requests.
///
/// A request is counted once, when it ends, under the priority that it has then: a guess that was adopted in time
/// counts as promoted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Traffic {
    /// Requests that ended, whatever their result; cancelled ones are not among them.
    pub requests: u64,
    /// Bytes that were asked for by requests that succeeded.
    pub payload_bytes: u64,
    /// Bytes that the system delivered, also those around the payload that alignment adds, those of failed and
    /// cancelled requests, and those read twice after a short read.
    pub device_bytes: u64,
    /// Calls of the reader, each at most one call of the system.
    pub reads: u64,
    /// Pieces that could not land in place and went through a staging buffer.
    pub bounced: u64,
    /// Requests that failed.
    pub errors: u64,
}

/// Totals of a store; subtract two to get a phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StoreCounters {
    /// Expert bytes asked for by requests that succeeded: the sum over the three priorities.
    pub payload_bytes: u64,
    /// Expert bytes that the system delivered: the sum over the three priorities.
    pub device_bytes: u64,
    /// Experts that a layer waited for.
    pub demand: Traffic,
    /// Guesses that were adopted before they ended.
    pub promoted: Traffic,
    /// Guesses that were not (or not yet) adopted when they ended.
    pub speculative: Traffic,
    /// Resident tensors: [`Store::read_blocking`](crate::Store::read_blocking). One request per chunk.
    pub resident: Traffic,
    /// Requests taken back before they ended.
    pub cancelled: u64,
    /// Time that reader threads spent reading, summed over threads.
    pub busy_us: u64,
    /// Time that callers spent in [`Store::wait_any`](crate::Store::wait_any).
    pub wait_us: u64,
    /// Time in which an expert was on its way, whether anybody waited for it or not.
    pub pending_us: u64,
}

impl Traffic {
    pub(crate) fn add(&mut self, other: &Self) {
        *self = self.zip(other, |a, b| a + b);
    }

    fn zip(&self, other: &Self, f: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            requests: f(self.requests, other.requests),
            payload_bytes: f(self.payload_bytes, other.payload_bytes),
            device_bytes: f(self.device_bytes, other.device_bytes),
            reads: f(self.reads, other.reads),
            bounced: f(self.bounced, other.bounced),
            errors: f(self.errors, other.errors),
        }
    }
}

impl StoreCounters {
    /// The traffic of one priority.
    pub const fn of(&self, priority: Priority) -> &Traffic {
        match priority {
            Priority::Demand => &self.demand,
            Priority::Promoted => &self.promoted,
            Priority::Speculative => &self.speculative,
        }
    }

    /// What happened since `earlier`, a snapshot of the same store.
    #[must_use]
    pub fn minus(&self, earlier: &Self) -> Self {
        self.zip(earlier, |a, b| a - b)
    }

    /// Both together.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        self.zip(other, |a, b| a + b)
    }

    pub(crate) fn of_mut(&mut self, priority: Priority) -> &mut Traffic {
        match priority {
            Priority::Demand => &mut self.demand,
            Priority::Promoted => &mut self.promoted,
            Priority::Speculative => &mut self.speculative,
        }
    }

    /// Adds the traffic of an expert request that ended.
    pub(crate) fn add_expert(&mut self, priority: Priority, traffic: &Traffic) {
        self.payload_bytes += traffic.payload_bytes;
        self.device_bytes += traffic.device_bytes;
        self.of_mut(priority).add(traffic);
    }

    fn zip(&self, other: &Self, f: impl Fn(u64, u64) -> u64 + Copy) -> Self {
        Self {
            payload_bytes: f(self.payload_bytes, other.payload_bytes),
            device_bytes: f(self.device_bytes, other.device_bytes),
            demand: self.demand.zip(&other.demand, f),
            promoted: self.promoted.zip(&other.promoted, f),
            speculative: self.speculative.zip(&other.speculative, f),
            resident: self.resident.zip(&other.resident, f),
            cancelled: f(self.cancelled, other.cancelled),
            busy_us: f(self.busy_us, other.busy_us),
            wait_us: f(self.wait_us, other.wait_us),
            pending_us: f(self.pending_us, other.pending_us),
        }
    }
}

/// Whole microseconds; half a million years fit.
pub(crate) const fn micros(time: Duration) -> u64 {
    time.as_micros() as u64
}

//! The schedule behind one lock, with someone to wake on either side of it.
//!
//! Every hand-over of a destination goes through this lock, which orders the reader's writes before the caller's
//! reads. Nothing is read while it is held.

use std::sync::PoisonError;
use std::time::Instant;

use crate::counters::StoreCounters;
use crate::error::ReadError;
use crate::request::{Completion, Priority, ReadRequest, Ticket};
use crate::schedule::{Claim, Job, Outcome, Reply, Schedule, Wake};
use crate::sync::{Condvar, Mutex, MutexGuard};

pub(crate) struct Queue {
    state: Mutex<State>,
    /// Readers wait for pieces.
    work: Condvar,
    /// Callers wait for any completion.
    arrived: Condvar,
    /// Callers wait for the end of a ticket.
    ended: Condvar,
}

struct State {
    schedule: Schedule,
    closed: bool,
    /// Readers that wait for work.
    idle: usize,
    /// Since when experts have been on their way, if any is.
    pending_since: Option<Instant>,
}

impl State {
    /// Keeps the time in which experts are on their way; to be called after every change of that.
    fn watch(&mut self) {
        let pending = self.schedule.on_their_way() > 0;
        if pending {
            self.pending_since.get_or_insert_with(Instant::now);
        } else if let Some(since) = self.pending_since.take() {
            self.schedule.count_pending(since.elapsed());
        }
    }
}

impl Queue {
    pub(crate) fn new(readers: usize, part_bytes: u64) -> Self {
        let schedule = Schedule::new(readers, part_bytes);
        Self {
            state: Mutex::new(State { schedule, closed: false, idle: 0, pending_since: None }),
            work: Condvar::new(),
            arrived: Condvar::new(),
            ended: Condvar::new(),
        }
    }

    pub(crate) fn submit(&self, request: ReadRequest, priority: Priority, reply: Reply) -> Ticket {
        let mut state = self.lock();
        let (ticket, n_pieces, wake) = state.schedule.submit(request, priority, reply);
        let readers = n_pieces.min(state.idle);
        state.watch();
        drop(state);
        for _ in 0..readers {
            self.work.notify_one();
        }
        self.wake(wake);
        ticket
    }

    /// A piece to read, if there is one now.
    pub(crate) fn try_take(&self) -> Option<Job> {
        let mut state = self.lock();
        if state.closed { None } else { state.schedule.take() }
    }

    /// Blocks until there is a piece to read. None: the queue is closed.
    pub(crate) fn take(&self) -> Option<Job> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            if let Some(job) = state.schedule.take() {
                return Some(job);
            }
            state.idle += 1;
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
        }
    }

    pub(crate) fn finish(&self, job: Job, outcome: Outcome) {
        let mut state = self.lock();
        let wake = state.schedule.finish(job, outcome);
        state.watch();
        drop(state);
        self.wake(wake);
    }

    /// The reader of this piece died.
    pub(crate) fn stop(&self, claim: Claim) {
        let mut state = self.lock();
        state.schedule.stop(claim);
        state.watch();
        drop(state);
        self.arrived.notify_all();
        self.ended.notify_all();
    }

    pub(crate) fn cancel(&self, ticket: Ticket) -> bool {
        let mut state = self.lock();
        let cancelled = state.schedule.cancel(ticket);
        state.watch();
        cancelled
    }

    pub(crate) fn adopt(&self, ticket: Ticket) -> bool {
        let mut state = self.lock();
        let adopted = state.schedule.adopt(ticket);
        let idle = state.idle > 0;
        drop(state);
        if adopted && idle {
            // The limit on speculative reads no longer holds for it.
            self.work.notify_all();
        }
        adopted
    }

    /// Blocks until a request with [`Reply::Channel`] has ended.
    pub(crate) fn wait_any(&self) -> Completion {
        let mut state = self.lock();
        if let Some(completion) = state.schedule.pop() {
            return completion;
        }
        let since = Instant::now();
        loop {
            assert!(
                state.schedule.outstanding() > 0,
                "waiting for a completion, but nothing is outstanding"
            );
            state = self.arrived.wait(state).unwrap_or_else(PoisonError::into_inner);
            if let Some(completion) = state.schedule.pop() {
                state.schedule.count_wait(since.elapsed());
                return completion;
            }
        }
    }

    pub(crate) fn try_any(&self) -> Option<Completion> {
        self.lock().schedule.pop()
    }

    /// Blocks until a request with [`Reply::Ticket`] has ended. Once per ticket.
    pub(crate) fn wait_for(&self, ticket: Ticket) -> Result<u64, ReadError> {
        let mut state = self.lock();
        loop {
            if let Some(result) = state.schedule.collect(ticket) {
                return result;
            }
            state = self.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Hands out nothing more. Readers leave when they have finished what they hold.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.schedule.discard_waiting();
        drop(state);
        self.work.notify_all();
    }

    pub(crate) fn outstanding(&self) -> usize {
        self.lock().schedule.outstanding()
    }

    pub(crate) fn counters(&self) -> StoreCounters {
        self.lock().schedule.counters()
    }

    fn wake(&self, wake: Wake) {
        match wake {
            Wake::Nobody => {}
            Wake::Channel => self.arrived.notify_all(),
            Wake::Ticket => self.ended.notify_all(),
        }
    }

    /// A panic under the lock is one of our asserts, made before anything was changed.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;

//! The thread that does the work, some time.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use units::Epoch;

use super::slots::Progress;
use crate::backend::Backend;

/// Something to do with the backend.
pub(super) type Work = Box<dyn FnOnce(&mut dyn Backend) + Send>;

/// What the host sends.
pub(super) enum Message {
    /// Any time, in order.
    Run(Work),
    /// Now, after everything before it: somebody waits.
    Ask(Work),
    /// Everything before this belongs to the epoch.
    Epoch(Epoch),
}

/// Longest time that work lies around when nobody waits for it, so that a host that polls sees progress.
const IDLE: Duration = Duration::from_micros(300);

/// Runs messages until the sender is gone.
pub(super) fn run(
    mut inner: Box<dyn Backend>,
    receiver: &Receiver<Message>,
    progress: &Progress,
    seed: u64,
) {
    let all = || run_all(&mut *inner, receiver, progress, seed);
    if let Err(panic) = catch_unwind(AssertUnwindSafe(all)) {
        // The host may have readers that still write into slots: their memory stays.
        std::mem::forget(inner);
        resume_unwind(panic);
    }
}

fn run_all(inner: &mut dyn Backend, receiver: &Receiver<Message>, progress: &Progress, seed: u64) {
    let mut chance = Chance(seed);
    let mut backlog = VecDeque::new();
    let mut open = true;
    while open || !backlog.is_empty() {
        let portion = match receiver.recv_timeout(IDLE) {
            Ok(message) => {
                let urgent = matches!(message, Message::Ask(_));
                backlog.push_back(message);
                if urgent { backlog.len() } else { chance.portion(backlog.len()) }
            }
            Err(RecvTimeoutError::Timeout) => chance.portion(backlog.len()).max(1),
            Err(RecvTimeoutError::Disconnected) => {
                open = false;
                backlog.len()
            }
        };
        for message in backlog.drain(..portion.min(backlog.len())) {
            match message {
                Message::Run(work) | Message::Ask(work) => work(inner),
                Message::Epoch(epoch) => {
                    let done = inner.submit();
                    inner.wait(done);
                    chance.pause();
                    progress.complete(epoch);
                }
            }
        }
    }
}

/// A linear congruential generator; its upper bits decide.
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    /// How many of `n` messages to run: mostly none.
    fn portion(&mut self, n: usize) -> usize {
        if self.next().is_multiple_of(8) { self.next() as usize % (n + 1) } else { 0 }
    }

    fn pause(&mut self) {
        match self.next() % 8 {
            0 => std::thread::sleep(Duration::from_micros(self.next() % 128)),
            1 | 2 => std::thread::yield_now(),
            _ => {}
        }
    }
}

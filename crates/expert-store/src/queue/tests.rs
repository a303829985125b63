//! The hand-over of memory between callers and readers, under many thread schedules.
//!
//! `shuttle` runs each model with schedules that it chooses. Readers write every window twice with a switch in
//! between, so memory that changes hands too early shows a torn value or loses what its owner put there.
#![allow(unsafe_code, reason = "the memory under test is raw, as slots are")]

use std::ptr::NonNull;
use std::time::Duration;

use checkpoint::{Piece, Pieces};
use shuttle::sync::Arc;
use shuttle::thread::{self, JoinHandle};
use units::{ExpertKey, FileIndex};

use super::*;
use crate::destination::Destination;

/// Schedules tried for each model. A planted race is found within the first hundred.
const SCHEDULES: usize = 5000;

const TORN: u8 = 0xEE;
const OURS: u8 = 0x11;
const READ: u8 = 0x77;

/// Offset of a piece whose read fails.
const BAD: u64 = 1000;

/// Offset of a piece that a gated reader holds back.
const GATED: u64 = 2000;

/// Two bytes: one for each piece of a request.
struct Memory(NonNull<[u8; 2]>);

// SAFETY: as a `Box`. (All threads of a model run on one thread of the system, one at a time.)
unsafe impl Send for Memory {}

impl Memory {
    fn new() -> Self {
        Self(NonNull::from(Box::leak(Box::new([OURS; 2]))))
    }

    fn request(&self, expert: u32, offsets: [u64; 2]) -> ReadRequest {
        let mut pieces = Pieces::default();
        for (place, offset) in offsets.into_iter().enumerate() {
            pieces.push(Piece {
                file: FileIndex(0),
                offset,
                bytes: 1,
                place: place as u64,
                blocks: None,
            });
        }
        // SAFETY: alive until `drop`, which no model calls before its readers have left.
        let destination = unsafe { Destination::new(self.0.cast(), 2) };
        ReadRequest { key: ExpertKey::new(0, expert), pieces, destination }
    }

    fn get(&self) -> [u8; 2] {
        // SAFETY: alive; threads of a model take turns.
        unsafe { self.0.read() }
    }

    /// The caller has it back: nobody may write to it now.
    fn assert_ours(&self) {
        assert!(!self.get().contains(&TORN), "handed back in the middle of a read");
        // SAFETY: as in `get`.
        unsafe { self.0.write([OURS; 2]) };
        thread::yield_now();
        thread::yield_now();
        self.assert_still_ours();
    }

    fn assert_still_ours(&self) {
        assert_eq!(self.get(), [OURS; 2], "touched after it was handed back");
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: made from a box in `new`.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

fn readers(queue: &Arc<Queue>, count: usize) -> Vec<JoinHandle<()>> {
    let serve = |queue: Arc<Queue>| {
        // As readers do: what is there first, then what comes.
        while let Some(mut job) = queue.try_take().or_else(|| queue.take()) {
            job.window.bytes().fill(TORN);
            thread::yield_now();
            job.window.bytes().fill(READ);
            let result = if job.piece.offset == BAD { Err(ReadError::Stopped) } else { Ok(()) };
            let (reads, device_bytes, busy) = (1, 1, Duration::ZERO);
            queue.finish(job, Outcome { result, reads, device_bytes, bounced: false, busy });
        }
    };
    let spawn = |_| {
        let queue = Arc::clone(queue);
        thread::spawn(move || serve(queue))
    };
    (0..count).map(spawn).collect()
}

/// Runs `body` beside `count` readers, under many schedules; a deadlock fails.
fn model(count: usize, body: impl Fn(&Arc<Queue>) + Send + Sync + 'static) {
    let run = move || {
        let queue = Arc::new(Queue::new(count, u64::MAX));
        let readers = readers(&queue, count);
        body(&queue);
        queue.close();
        for reader in readers {
            reader.join().unwrap();
        }
    };
    let run = Arc::new(run);
    let again = Arc::clone(&run);
    shuttle::check_random(move || run(), SCHEDULES);
    shuttle::check_pct(move || again(), SCHEDULES, 3);
}

#[test]
fn every_request_completes_once_with_all_of_its_bytes() {
    model(2, |queue| {
        let memories = [(); 3].map(|()| Memory::new());
        for (i, memory) in memories.iter().enumerate() {
            let request = memory.request(i as u32, [0, 1]);
            queue.submit(request, Priority::ALL[i], Reply::Channel);
        }
        let mut seen = [false; 3];
        for _ in 0..3 {
            let completion = queue.wait_any();
            let expert = completion.key.expert.get();
            assert!(!std::mem::replace(&mut seen[expert], true), "completed twice");
            assert_eq!(completion.result.unwrap(), 2);
            assert_eq!(memories[expert].get(), [READ; 2], "completed before the last byte");
            memories[expert].assert_ours();
        }
        assert!(queue.try_any().is_none());
        memories.iter().for_each(Memory::assert_still_ours);
    });
}

#[test]
fn after_a_true_cancel_nobody_touches_the_memory() {
    model(2, |queue| {
        let (first, second) = (Memory::new(), Memory::new());
        queue.submit(first.request(0, [0, 1]), Priority::Demand, Reply::Channel);
        let ticket = queue.submit(second.request(1, [0, 1]), Priority::Speculative, Reply::Channel);
        let mut left = 2;
        if queue.cancel(ticket) {
            second.assert_ours();
            left = 1;
        }
        assert_eq!(queue.outstanding(), left);
        for _ in 0..left {
            let completion = queue.wait_any();
            completion.result.unwrap();
            [&first, &second][completion.key.expert.get()].assert_ours();
        }
        first.assert_still_ours();
        second.assert_still_ours();
    });
}

#[test]
#[should_panic(expected = "touched after it was handed back")]
fn the_model_finds_a_caller_who_does_not_heed_the_answer_of_cancel() {
    model(2, |queue| {
        let memory = Memory::new();
        let ticket = queue.submit(memory.request(0, [0, 1]), Priority::Speculative, Reply::Channel);
        queue.cancel(ticket);
        if memory.get().contains(&TORN) {
            // The other symptom; this test wants the later one.
            return std::mem::forget(memory);
        }
        memory.assert_ours();
        std::mem::forget(memory);
    });
}

#[test]
#[should_panic(expected = "deadlock")]
fn the_model_finds_a_wake_up_that_is_lost() {
    model(1, |queue| {
        let memory = Memory::new();
        // A submit that forgets the idle reader.
        let request = memory.request(0, [0, 1]);
        let _ = queue.lock().schedule.submit(request, Priority::Demand, Reply::Channel);
        let completion = queue.wait_any();
        completion.result.unwrap();
    });
}

#[test]
fn cancel_and_adopt_may_race_and_the_request_still_ends_once() {
    model(2, |queue| {
        let memory = Memory::new();
        let ticket = queue.submit(memory.request(0, [0, 1]), Priority::Speculative, Reply::Channel);
        let other = Arc::clone(queue);
        let adopter = thread::spawn(move || other.adopt(ticket));
        let cancelled = queue.cancel(ticket);
        if cancelled {
            memory.assert_ours();
        } else {
            let completion = queue.wait_any();
            assert_eq!((completion.ticket, completion.result.unwrap()), (ticket, 2));
            memory.assert_ours();
        }
        let adopted = adopter.join().unwrap();
        assert_eq!(queue.outstanding(), 0);
        let counters = queue.counters();
        assert_eq!(counters.cancelled, u64::from(cancelled));
        assert_eq!(counters.promoted.requests, u64::from(adopted && !cancelled));
        memory.assert_still_ours();
    });
}

/// Holds readers back until a condition on what all of them have taken holds.
#[derive(Default)]
struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Default)]
struct GateState {
    taken: usize,
    open: bool,
}

impl Gate {
    fn change(&self, change: impl FnOnce(&mut GateState)) {
        change(&mut self.state.lock().unwrap());
        self.changed.notify_all();
    }

    fn wait(&self, passes: fn(&GateState) -> bool) {
        let mut state = self.state.lock().unwrap();
        while !passes(&state) {
            state = self.changed.wait(state).unwrap();
        }
    }
}

/// Runs `body` beside two readers that finish a piece only when `passes` holds. Stuck readers are a deadlock.
fn gated(passes: fn(&GateState) -> bool, body: fn(&Queue, &Gate)) {
    let run = move || {
        let (queue, gate) = (Arc::new(Queue::new(2, u64::MAX)), Arc::new(Gate::default()));
        let readers = [(); 2].map(|()| {
            let (queue, gate) = (Arc::clone(&queue), Arc::clone(&gate));
            thread::spawn(move || {
                while let Some(job) = queue.take() {
                    gate.change(|state| state.taken += 1);
                    if job.piece.offset == GATED {
                        gate.wait(passes);
                    }
                    let (result, busy) = (Ok(()), Duration::ZERO);
                    let (reads, device_bytes, bounced) = (1, 1, false);
                    queue.finish(job, Outcome { result, reads, device_bytes, bounced, busy });
                }
            })
        });
        body(&queue, &gate);
        queue.close();
        for reader in readers {
            reader.join().unwrap();
        }
    };
    shuttle::check_random(run, SCHEDULES);
}

#[test]
fn an_adopted_guess_wakes_the_reader_that_guesses_may_not_have() {
    gated(
        |state| state.open,
        |queue, gate| {
            let memories = [Memory::new(), Memory::new()];
            let stuck = memories[0].request(0, [GATED, GATED]);
            queue.submit(stuck, Priority::Speculative, Reply::Channel);
            let guess = memories[1].request(1, [0, 1]);
            let guess = queue.submit(guess, Priority::Speculative, Reply::Channel);
            assert!(queue.adopt(guess));
            // The other reader has to do it: the first is stuck with the first guess.
            assert_eq!(queue.wait_any().ticket, guess);
            gate.change(|state| state.open = true);
            queue.wait_any().result.unwrap();
        },
    );
}

#[test]
fn the_pieces_of_a_request_wake_as_many_readers() {
    gated(
        |state| state.taken == 2,
        |queue, _| {
            let memory = Memory::new();
            queue.submit(memory.request(0, [GATED, GATED]), Priority::Demand, Reply::Channel);
            queue.wait_any().result.unwrap();
        },
    );
}

#[test]
fn a_failed_request_is_handed_back_only_when_its_other_piece_is_too() {
    model(2, |queue| {
        let memory = Memory::new();
        for offsets in [[BAD, 0], [0, BAD], [BAD, BAD]] {
            queue.submit(memory.request(0, offsets), Priority::Demand, Reply::Channel);
            let completion = queue.wait_any();
            assert!(completion.result.is_err());
            memory.assert_ours();
        }
    });
}

#[test]
fn callers_of_tickets_and_of_completions_do_not_take_from_each_other() {
    model(2, |queue| {
        let (expert, tensor) = (Memory::new(), Memory::new());
        let other = Arc::clone(queue);
        let loader = thread::spawn(move || {
            let request = tensor.request(9, [0, 1]);
            let ticket = other.submit(request, Priority::Demand, Reply::Ticket);
            assert_eq!(other.wait_for(ticket).unwrap(), 2);
            tensor.assert_ours();
            tensor
        });
        queue.submit(expert.request(0, [0, 1]), Priority::Demand, Reply::Channel);
        let completion = queue.wait_any();
        assert_eq!((completion.key.expert.0, completion.result.unwrap()), (0, 2));
        expert.assert_ours();
        loader.join().unwrap().assert_still_ours();
        assert_eq!(queue.counters().resident.payload_bytes, 2);
    });
}

#[test]
fn closing_with_reads_under_way_ends_all_readers() {
    let run = || {
        let queue = Arc::new(Queue::new(2, u64::MAX));
        let readers = readers(&queue, 2);
        let memories = [(); 3].map(|()| Memory::new());
        for (i, memory) in memories.iter().enumerate() {
            queue.submit(memory.request(i as u32, [0, 1]), Priority::ALL[i], Reply::Channel);
        }
        queue.close();
        for reader in readers {
            reader.join().unwrap();
        }
        memories.iter().for_each(Memory::assert_ours);
    };
    shuttle::check_random(run, SCHEDULES);
}

#[test]
fn a_reader_that_dies_leaves_nobody_waiting() {
    let run = || {
        let queue = Arc::new(Queue::new(2, u64::MAX));
        let other = Arc::clone(&queue);
        let dying = thread::spawn(move || {
            if let Some(job) = other.take() {
                thread::yield_now();
                other.stop(job.claim);
            }
        });
        let readers = readers(&queue, 1);
        let memory = [Memory::new(), Memory::new()];
        for (i, memory) in memory.iter().enumerate() {
            queue.submit(memory.request(i as u32, [0, 1]), Priority::Demand, Reply::Channel);
        }
        for _ in 0..2 {
            let completion = queue.wait_any();
            memory[completion.key.expert.get()].assert_ours();
        }
        queue.close();
        dying.join().unwrap();
        for reader in readers {
            reader.join().unwrap();
        }
    };
    shuttle::check_random(run, SCHEDULES);
}

//! The state machine on its own: no threads, so every order is chosen here.

use std::collections::HashMap;

use checkpoint::Pieces;
use units::FileIndex;

use super::*;
use crate::destination::Destination;

/// A request of `n_pieces` pieces; a piece's offset is its number.
fn request(expert: u32, n_pieces: u64) -> ReadRequest {
    let mut pieces = Pieces::default();
    for i in 0..n_pieces {
        pieces.push(Piece { file: FileIndex(0), offset: i, bytes: 1, place: i, blocks: None });
    }
    let destination = Destination::leaked(n_pieces as usize);
    ReadRequest { key: ExpertKey::new(0, expert), pieces, destination }
}

fn schedule(readers: usize) -> Schedule {
    Schedule::new(readers, u64::MAX)
}

fn submit(schedule: &mut Schedule, expert: u32, n_pieces: u64, priority: Priority) -> Ticket {
    schedule.submit(request(expert, n_pieces), priority, Reply::Channel).0
}

fn outcome(result: Result<(), ReadError>) -> Outcome {
    Outcome { result, reads: 1, device_bytes: 10, bounced: false, busy: Duration::from_micros(3) }
}

fn failure() -> Outcome {
    outcome(Err(ReadError::Changed { path: "file".into(), what: "test".into() }))
}

/// `(expert, piece)` of every piece, each finished before the next is taken.
fn drain(schedule: &mut Schedule) -> Vec<(u32, u64)> {
    let mut order = Vec::new();
    while let Some(job) = schedule.take() {
        let key = schedule.request(job.claim.ticket).unwrap().key;
        order.push((key.expert.0, job.piece.offset));
        let _ = schedule.finish(job, outcome(Ok(())));
    }
    order
}

#[test]
fn urgent_before_old_and_old_before_young() {
    let mut schedule = schedule(1);
    submit(&mut schedule, 0, 1, Priority::Speculative);
    submit(&mut schedule, 1, 1, Priority::Speculative);
    submit(&mut schedule, 2, 1, Priority::Promoted);
    submit(&mut schedule, 3, 1, Priority::Demand);
    submit(&mut schedule, 4, 1, Priority::Demand);
    assert_eq!(drain(&mut schedule), [(3, 0), (4, 0), (2, 0), (0, 0), (1, 0)]);
    let completed: Vec<u32> =
        std::iter::from_fn(|| schedule.pop()).map(|c| c.key.expert.0).collect();
    assert_eq!(completed, [3, 4, 2, 0, 1]);
    assert_eq!(schedule.outstanding(), 0);
}

#[test]
fn the_pieces_of_one_request_go_to_several_readers() {
    let mut schedule = schedule(4);
    let first = submit(&mut schedule, 0, 3, Priority::Demand);
    let second = submit(&mut schedule, 1, 3, Priority::Demand);
    let jobs: Vec<Job> = (0..4).map(|_| schedule.take().unwrap()).collect();
    let taken: Vec<_> = jobs.iter().map(|job| (job.claim.ticket, job.piece.offset)).collect();
    assert_eq!(taken, [(first, 0), (first, 1), (first, 2), (second, 0)]);
}

#[test]
fn a_demand_read_overtakes_the_rest_of_a_guess_that_has_begun() {
    let mut schedule = schedule(1);
    submit(&mut schedule, 0, 3, Priority::Speculative);
    let job = schedule.take().unwrap();
    let _ = schedule.finish(job, outcome(Ok(())));
    submit(&mut schedule, 1, 2, Priority::Demand);
    assert_eq!(drain(&mut schedule), [(1, 0), (1, 1), (0, 1), (0, 2)]);
}

#[test]
fn one_reader_stays_free_of_guesses() {
    for (readers, limit) in [(1, 1), (2, 1), (4, 3)] {
        let mut schedule = schedule(readers);
        submit(&mut schedule, 0, 9, Priority::Speculative);
        let jobs: Vec<Job> = std::iter::from_fn(|| schedule.take()).collect();
        assert_eq!(jobs.len(), limit, "{readers} readers");
        submit(&mut schedule, 1, 1, Priority::Demand);
        assert_eq!(schedule.take().unwrap().claim.ticket.index, 1);
        for job in jobs {
            let _ = schedule.finish(job, outcome(Ok(())));
            assert!(schedule.take().is_some(), "a finished guess makes room for the next");
        }
    }
}

#[test]
fn a_request_ends_when_its_last_piece_does_whatever_the_order() {
    let mut schedule = schedule(3);
    submit(&mut schedule, 0, 3, Priority::Demand);
    let mut jobs: Vec<Job> = std::iter::from_fn(|| schedule.take()).collect();
    jobs.rotate_left(1);
    for (i, job) in jobs.into_iter().enumerate() {
        assert!(schedule.pop().is_none());
        let wake = schedule.finish(job, outcome(Ok(())));
        assert_eq!(wake, if i == 2 { Wake::Channel } else { Wake::Nobody });
    }
    assert_eq!(schedule.pop().unwrap().result.unwrap(), 3);
}

#[test]
fn after_an_error_the_rest_is_skipped_and_running_pieces_are_awaited() {
    let mut schedule = schedule(4);
    let ticket = submit(&mut schedule, 0, 9, Priority::Demand);
    submit(&mut schedule, 1, 1, Priority::Demand);
    let (a, b, c) = (schedule.take().unwrap(), schedule.take().unwrap(), schedule.take().unwrap());
    assert_eq!(schedule.finish(b, failure()), Wake::Nobody);
    assert_eq!(schedule.take().unwrap().claim.ticket.index, 1, "six pieces were skipped");
    assert!(!schedule.cancel(ticket), "two pieces are at readers");
    assert_eq!(schedule.finish(a, outcome(Ok(()))), Wake::Nobody);
    assert!(schedule.pop().is_none());
    assert_eq!(schedule.finish(c, outcome(Err(ReadError::Stopped))), Wake::Channel);
    let result = schedule.pop().unwrap().result;
    assert!(matches!(result, Err(ReadError::Changed { .. })), "the first error wins: {result:?}");
    let demand = schedule.counters().demand;
    assert_eq!((demand.requests, demand.errors, demand.payload_bytes), (1, 1, 0));
    assert_eq!((demand.reads, demand.device_bytes), (3, 30));
}

#[test]
fn cancel_is_true_exactly_while_no_piece_is_out_and_some_are_left() {
    let mut schedule = schedule(4);
    let ticket = submit(&mut schedule, 0, 2, Priority::Demand);
    let job = schedule.take().unwrap();
    assert!(!schedule.cancel(ticket), "running");
    let _ = schedule.finish(job, outcome(Ok(())));
    assert!(schedule.cancel(ticket), "half read, nobody at it");
    assert!(!schedule.cancel(ticket), "gone");
    assert!(schedule.take().is_none());
    assert!(schedule.pop().is_none());
    assert_eq!(schedule.outstanding(), 0);

    let next = submit(&mut schedule, 1, 1, Priority::Demand);
    assert_eq!(next.index, ticket.index, "the place is used again");
    assert!(!schedule.cancel(ticket), "an old ticket does not cancel the new request");
    let job = schedule.take().unwrap();
    let _ = schedule.finish(job, outcome(Ok(())));
    assert!(!schedule.cancel(next), "ended but not delivered");
    assert_eq!(schedule.pop().unwrap().ticket, next);
    let counters = schedule.counters();
    assert_eq!((counters.cancelled, counters.payload_bytes), (1, 1));
    assert_eq!(counters.device_bytes, 20, "what a cancelled request has read was read");
}

#[test]
fn an_adopted_guess_is_read_and_counted_as_promoted() {
    let mut schedule = schedule(2);
    submit(&mut schedule, 0, 1, Priority::Speculative);
    let adopted = submit(&mut schedule, 1, 2, Priority::Speculative);
    assert!(schedule.adopt(adopted));
    assert!(!schedule.adopt(adopted), "it is no guess any more");
    assert_eq!(drain(&mut schedule), [(1, 0), (1, 1), (0, 0)]);
    assert!(!schedule.adopt(adopted), "it has ended");
    let counters = schedule.counters();
    assert_eq!((counters.promoted.requests, counters.promoted.payload_bytes), (1, 2));
    assert_eq!((counters.speculative.requests, counters.speculative.payload_bytes), (1, 1));
    assert_eq!((counters.payload_bytes, counters.busy_us), (3, 9));
}

#[test]
fn adopting_a_guess_whose_pieces_are_all_out_changes_only_its_name() {
    let mut schedule = schedule(2);
    let ticket = submit(&mut schedule, 0, 1, Priority::Speculative);
    let job = schedule.take().unwrap();
    assert!(schedule.adopt(ticket));
    submit(&mut schedule, 1, 1, Priority::Speculative);
    assert!(schedule.take().is_none(), "it still occupies the one place for guesses");
    let _ = schedule.finish(job, outcome(Ok(())));
    assert!(schedule.take().is_some());
    assert_eq!(schedule.counters().promoted.requests, 1);
}

#[test]
fn a_dead_reader_fails_what_waits_and_what_comes() {
    let mut schedule = schedule(3);
    submit(&mut schedule, 0, 2, Priority::Demand);
    submit(&mut schedule, 1, 2, Priority::Speculative);
    let (dies, lives) = (schedule.take().unwrap(), schedule.take().unwrap());
    schedule.stop(dies.claim);
    assert_eq!(schedule.pop().unwrap().key.expert.0, 1, "nobody was at it");
    assert!(schedule.pop().is_none(), "a living reader still has a piece of the other");
    assert_eq!(schedule.finish(lives, outcome(Ok(()))), Wake::Channel);
    submit(&mut schedule, 2, 1, Priority::Demand);
    assert!(schedule.take().is_none());
    for expert in [0, 2] {
        let completion = schedule.pop().unwrap();
        assert_eq!(completion.key.expert.0, expert);
        assert!(matches!(completion.result, Err(ReadError::Stopped)));
    }
    assert_eq!(schedule.outstanding(), 0);
}

/// What a naive model knows of a request.
#[derive(Default)]
struct Naive {
    n_pieces: u64,
    out: u64,
    done: u64,
    failed: bool,
}

/// Any sequence of actions: every request ends exactly once, by completion or by a true cancel, never while a piece
/// of it is out.
#[test]
fn random_plans_agree_with_a_naive_model() {
    for seed in 0..500u64 {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut below = |n: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) % n
        };
        let mut schedule = schedule(3);
        let mut naive: HashMap<Ticket, Naive> = HashMap::new();
        let mut tickets = Vec::new();
        let mut jobs: Vec<Job> = Vec::new();
        for _ in 0..300 {
            match below(9) {
                0 | 1 => {
                    let (n_pieces, priority) = (1 + below(4), Priority::ALL[below(3) as usize]);
                    let ticket = submit(&mut schedule, 0, n_pieces, priority);
                    let earlier = naive.insert(ticket, Naive { n_pieces, ..Naive::default() });
                    assert!(earlier.is_none(), "seed {seed}: a ticket was given twice");
                    tickets.push(ticket);
                }
                2..=4 if jobs.len() < 3 => {
                    if let Some(job) = schedule.take() {
                        let request = naive.get_mut(&job.claim.ticket).unwrap();
                        assert!(!request.failed, "seed {seed}: a piece of a failed request");
                        request.out += 1;
                        jobs.push(job);
                    }
                }
                5 | 6 if !jobs.is_empty() => {
                    let job = jobs.swap_remove(below(jobs.len() as u64) as usize);
                    let request = naive.get_mut(&job.claim.ticket).unwrap();
                    let fails = below(6) == 0;
                    (request.out, request.done) = (request.out - 1, request.done + 1);
                    request.failed |= fails;
                    let _ = schedule.finish(job, if fails { failure() } else { outcome(Ok(())) });
                }
                7 if !tickets.is_empty() => {
                    let ticket = tickets[below(tickets.len() as u64) as usize];
                    let expected = naive.get(&ticket).is_some_and(|request| {
                        request.out == 0 && request.done < request.n_pieces && !request.failed
                    });
                    assert_eq!(schedule.cancel(ticket), expected, "seed {seed}");
                    if expected {
                        naive.remove(&ticket);
                    }
                }
                8 if !tickets.is_empty() => {
                    schedule.adopt(tickets[below(tickets.len() as u64) as usize]);
                }
                _ => {}
            }
            if below(3) == 0 {
                deliver(&mut schedule, &mut naive, seed);
            }
        }
        for job in jobs {
            let request = naive.get_mut(&job.claim.ticket).unwrap();
            (request.out, request.done) = (request.out - 1, request.done + 1);
            let _ = schedule.finish(job, outcome(Ok(())));
        }
        while let Some(job) = schedule.take() {
            naive.get_mut(&job.claim.ticket).unwrap().done += 1;
            let _ = schedule.finish(job, outcome(Ok(())));
        }
        deliver(&mut schedule, &mut naive, seed);
        assert!(naive.is_empty(), "seed {seed}: requests without an end");
        assert_eq!((schedule.outstanding(), schedule.used()), (0, 0), "seed {seed}");
    }
}

fn deliver(schedule: &mut Schedule, naive: &mut HashMap<Ticket, Naive>, seed: u64) {
    while let Some(completion) = schedule.pop() {
        let request = naive.remove(&completion.ticket).expect("ends once");
        assert_eq!(request.out, 0, "seed {seed}: ended while a piece was out");
        assert_eq!(completion.result.is_err(), request.failed, "seed {seed}");
        assert!(request.failed || request.done == request.n_pieces, "seed {seed}: incomplete");
    }
    assert_eq!(schedule.outstanding(), naive.len(), "seed {seed}");
}

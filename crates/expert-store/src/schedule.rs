//! Who reads what next: every request from submit to completion, as a state machine.
//!
//! No lock, thread or file: `queue` puts a lock around it. Work is handed out piece by piece, most urgent priority
//! first and oldest request first, so that the pieces of one request are spread over idle threads and the oldest
//! request completes first. A request is *waiting* (pieces left to hand out), *running* (pieces at readers), or
//! both, and completes when it is neither: only then does nobody hold a window of its destination.

use std::collections::VecDeque;
use std::time::Duration;

use checkpoint::Piece;
use units::ExpertKey;

use crate::counters::{StoreCounters, Traffic, micros};
use crate::destination::{Split, Window};
use crate::error::ReadError;
use crate::request::{Completion, Priority, ReadRequest, Ticket};

/// Most requests between submit and delivery. Slots bound them long before; a caller that never takes its
/// completions meets this instead of the end of memory.
pub(crate) const MAX_OUTSTANDING: usize = 1 << 16;

/// Who gets the result of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reply {
    /// The next [`Schedule::pop`]. An expert.
    Channel,
    /// Whoever asks for the ticket with [`Schedule::collect`]. Part of a resident tensor.
    Ticket,
}

/// The right to finish one handed-out piece.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Claim {
    ticket: Ticket,
    speculative: bool,
}

/// One piece to be read. Given back with [`Schedule::finish`], so that a reader cannot keep the window.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) claim: Claim,
    /// Whether it belongs to a resident tensor.
    pub(crate) resident: bool,
    pub(crate) piece: Piece,
    pub(crate) window: Window,
}

/// How a piece went.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) result: Result<(), ReadError>,
    pub(crate) reads: u64,
    pub(crate) device_bytes: u64,
    pub(crate) bounced: bool,
    pub(crate) busy: Duration,
}

/// Whom a change concerns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub(crate) enum Wake {
    Nobody,
    /// A completion can be popped.
    Channel,
    /// A ticket can be collected.
    Ticket,
}

#[derive(Debug)]
struct Request {
    key: ExpertKey,
    reply: Reply,
    priority: Priority,
    split: Split,
    /// Pieces at readers.
    running: usize,
    payload_bytes: u64,
    traffic: Traffic,
    error: Option<ReadError>,
    /// Ended, and waits to be collected.
    ended: bool,
}

#[derive(Debug, Default)]
struct Place {
    generation: u32,
    request: Option<Request>,
}

#[derive(Debug)]
pub(crate) struct Schedule {
    places: Vec<Place>,
    free: Vec<u32>,
    /// Requests with pieces left to hand out, by priority, oldest first.
    waiting: [VecDeque<Ticket>; 3],
    arrived: VecDeque<Completion>,
    /// Channel requests that are neither delivered nor cancelled.
    outstanding: usize,
    speculative_running: usize,
    /// Most speculative pieces at readers, so that a demand read finds a free one.
    speculative_limit: usize,
    /// Pieces that are much longer are read in parts of about this many bytes.
    part_bytes: u64,
    /// A reader died: nothing will be read any more.
    stopped: bool,
    counters: StoreCounters,
}

impl Schedule {
    /// A schedule for `readers` threads; with two or more, one never gets a speculative piece while all others
    /// have one. Long pieces are handed out in parts of about `part_bytes`.
    pub(crate) fn new(readers: usize, part_bytes: u64) -> Self {
        Self {
            places: Vec::new(),
            free: Vec::new(),
            waiting: Default::default(),
            arrived: VecDeque::new(),
            outstanding: 0,
            speculative_running: 0,
            speculative_limit: readers.saturating_sub(1).max(1),
            part_bytes,
            stopped: false,
            counters: StoreCounters::default(),
        }
    }

    /// Takes a request; the number is that of its pieces.
    pub(crate) fn submit(
        &mut self,
        request: ReadRequest,
        priority: Priority,
        reply: Reply,
    ) -> (Ticket, usize, Wake) {
        assert!(self.used() < MAX_OUTSTANDING, "{MAX_OUTSTANDING} requests are outstanding");
        let ReadRequest { key, pieces, destination } = request;
        let payload_bytes = pieces.iter().map(Piece::memory_bytes).sum();
        let mut split = Split::new(destination, &pieces, self.part_bytes);
        if self.stopped {
            split.stop();
        }
        let n_pieces = split.left();
        let ticket = self.place(Request {
            key,
            reply,
            priority,
            split,
            running: 0,
            payload_bytes,
            traffic: Traffic::default(),
            error: self.stopped.then_some(ReadError::Stopped),
            ended: false,
        });
        self.outstanding += usize::from(reply == Reply::Channel);
        if n_pieces == 0 {
            return (ticket, 0, self.end(ticket));
        }
        self.waiting[priority as usize].push_back(ticket);
        (ticket, n_pieces, Wake::Nobody)
    }

    /// The next piece to read, if there is one that may be read now.
    pub(crate) fn take(&mut self) -> Option<Job> {
        let priority = Priority::ALL.into_iter().find(|&p| !self.waiting[p as usize].is_empty())?;
        let speculative = priority == Priority::Speculative;
        if speculative && self.speculative_running == self.speculative_limit {
            return None;
        }
        let waiting = &mut self.waiting[priority as usize];
        let ticket = *waiting.front()?;
        let request = self.places[ticket.index as usize]
            .request
            .as_mut()
            .expect("a waiting request stays until its last piece is finished");
        let (piece, window) = request.split.next().expect("a waiting request has pieces left");
        request.running += 1;
        let resident = request.reply == Reply::Ticket;
        if request.split.left() == 0 {
            waiting.pop_front();
        }
        self.speculative_running += usize::from(speculative);
        Some(Job { claim: Claim { ticket, speculative }, resident, piece, window })
    }

    /// Takes a piece, and with it its window, back from its reader.
    #[expect(clippy::needless_pass_by_value, reason = "the reader must not keep the window")]
    pub(crate) fn finish(&mut self, job: Job, outcome: Outcome) -> Wake {
        self.counters.busy_us += micros(outcome.busy);
        self.release(job.claim, |request| {
            request.traffic.reads += outcome.reads;
            request.traffic.device_bytes += outcome.device_bytes;
            request.traffic.bounced += u64::from(outcome.bounced);
            outcome.result
        })
    }

    /// The reader of this piece died: it, everything waiting and everything to come fails.
    pub(crate) fn stop(&mut self, claim: Claim) {
        self.stopped = true;
        let _ = self.release(claim, |_| Err(ReadError::Stopped));
        for priority in Priority::ALL {
            while let Some(ticket) = self.waiting[priority as usize].pop_front() {
                let request = self.request(ticket).expect("a waiting request exists");
                request.split.stop();
                request.error.get_or_insert(ReadError::Stopped);
                if request.running == 0 {
                    let _ = self.end(ticket);
                }
            }
        }
    }

    /// Takes back a request of which no piece is at a reader and which has not ended. Otherwise it goes on.
    pub(crate) fn cancel(&mut self, ticket: Ticket) -> bool {
        let Some(request) = self.request(ticket) else { return false };
        if request.running > 0 || request.split.left() == 0 {
            return false;
        }
        let (priority, reply) = (request.priority, request.reply);
        // Some of its pieces may have been read.
        let traffic = request.traffic;
        self.remove_waiting(ticket, priority);
        self.count(priority, reply, &traffic);
        self.counters.cancelled += 1;
        self.outstanding -= usize::from(reply == Reply::Channel);
        self.vacate(ticket);
        true
    }

    /// Raises a speculative request that has not ended; says whether it was one.
    pub(crate) fn adopt(&mut self, ticket: Ticket) -> bool {
        let Some(request) = self.request(ticket) else { return false };
        if request.priority != Priority::Speculative || request.ended {
            return false;
        }
        request.priority = Priority::Promoted;
        if request.split.left() > 0 {
            self.remove_waiting(ticket, Priority::Speculative);
            self.waiting[Priority::Promoted as usize].push_back(ticket);
        }
        true
    }

    /// The oldest completion that was not delivered.
    pub(crate) fn pop(&mut self) -> Option<Completion> {
        let completion = self.arrived.pop_front()?;
        self.outstanding -= 1;
        Some(completion)
    }

    /// The result of a request with [`Reply::Ticket`], once it has ended.
    pub(crate) fn collect(&mut self, ticket: Ticket) -> Option<Result<u64, ReadError>> {
        let request = self.request(ticket).expect("a ticket is collected once");
        if !request.ended {
            return None;
        }
        let result = result_of(request);
        self.vacate(ticket);
        Some(result)
    }

    /// Forgets everything that no reader has: the store is being dropped.
    pub(crate) fn discard_waiting(&mut self) {
        self.waiting.iter_mut().for_each(VecDeque::clear);
    }

    pub(crate) const fn outstanding(&self) -> usize {
        self.outstanding
    }

    /// Experts that were asked for and have not ended.
    pub(crate) fn on_their_way(&self) -> usize {
        self.outstanding - self.arrived.len()
    }

    pub(crate) const fn counters(&self) -> StoreCounters {
        self.counters
    }

    pub(crate) const fn count_wait(&mut self, time: Duration) {
        self.counters.wait_us += micros(time);
    }

    pub(crate) const fn count_pending(&mut self, time: Duration) {
        self.counters.pending_us += micros(time);
    }

    /// One piece less at readers.
    fn release(
        &mut self,
        claim: Claim,
        settle: impl FnOnce(&mut Request) -> Result<(), ReadError>,
    ) -> Wake {
        let Claim { ticket, speculative } = claim;
        self.speculative_running -= usize::from(speculative);
        let request = self.request(ticket).expect("a request stays while a piece is at a reader");
        request.running -= 1;
        let mut skipped = None;
        if let Err(error) = settle(request) {
            request.error.get_or_insert(error);
            if request.split.left() > 0 {
                request.split.stop();
                skipped = Some(request.priority);
            }
        }
        let ended = request.running == 0 && request.split.left() == 0;
        if let Some(priority) = skipped {
            self.remove_waiting(ticket, priority);
        }
        if ended { self.end(ticket) } else { Wake::Nobody }
    }

    /// No window of the request is out, nor will be.
    fn end(&mut self, ticket: Ticket) -> Wake {
        let request = self.request(ticket).expect("a request ends once");
        let (key, priority, reply) = (request.key, request.priority, request.reply);
        request.ended = true;
        request.traffic.requests = 1;
        match request.error {
            None => request.traffic.payload_bytes = request.payload_bytes,
            Some(_) => request.traffic.errors = 1,
        }
        let traffic = request.traffic;
        let result = (reply == Reply::Channel).then(|| result_of(request));
        self.count(priority, reply, &traffic);
        let Some(result) = result else { return Wake::Ticket };
        self.vacate(ticket);
        self.arrived.push_back(Completion { ticket, key, result });
        Wake::Channel
    }

    fn count(&mut self, priority: Priority, reply: Reply, traffic: &Traffic) {
        match reply {
            Reply::Channel => self.counters.add_expert(priority, traffic),
            Reply::Ticket => self.counters.resident.add(traffic),
        }
    }

    fn remove_waiting(&mut self, ticket: Ticket, priority: Priority) {
        let waiting = &mut self.waiting[priority as usize];
        let at =
            waiting.iter().position(|&t| t == ticket).expect("a request with pieces left waits");
        waiting.remove(at);
    }

    fn request(&mut self, ticket: Ticket) -> Option<&mut Request> {
        let place = self.places.get_mut(ticket.index as usize)?;
        if place.generation == ticket.generation { place.request.as_mut() } else { None }
    }

    fn used(&self) -> usize {
        self.places.len() - self.free.len()
    }

    fn place(&mut self, request: Request) -> Ticket {
        let index = self.free.pop().unwrap_or_else(|| {
            self.places.push(Place::default());
            self.places.len() as u32 - 1
        });
        let place = &mut self.places[index as usize];
        place.request = Some(request);
        Ticket { index, generation: place.generation }
    }

    fn vacate(&mut self, ticket: Ticket) {
        let place = &mut self.places[ticket.index as usize];
        place.request = None;
        // Wraps after 2^32 uses of one place: no caller keeps a ticket that long.
        place.generation = place.generation.wrapping_add(1);
        self.free.push(ticket.index);
    }
}

fn result_of(request: &mut Request) -> Result<u64, ReadError> {
    request.error.take().map_or(Ok(request.payload_bytes), Err)
}

#[cfg(test)]
mod tests;

//! The engine's thread: who runs, which rows make the next pass, what becomes of it.

use std::collections::VecDeque;
use std::ops::{ControlFlow, Range};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use compute::backend::{Role, Row};
use model::{ForwardError, LogitRows};
use units::Bytes;

use super::job::{CancelToken, Choice, ChooseError, JobError, JobEvent, JobReport};
use super::pace::{Pace, deal};
use super::prefix::Prefixes;
use super::seat::{Running, Seat, panic_text};
use super::shared::{Shared, Waiting, fail};
use super::{SchedulerOptions, Serving, StartError};
use crate::engine::Engine;
use crate::generate::Finish;
use crate::sequence::{GRID, Mark, Phase};

/// Rows of one job in a pass.
struct Part {
    seat: usize,
    /// Places in the pass.
    rows: Range<usize>,
    /// Whether the logits of its last row are wanted.
    chooses: bool,
    /// What came of them.
    choice: Option<Result<Choice, JobError>>,
}

/// A pass that is about to run.
struct Pass {
    role: Role,
    rows: Vec<Row>,
    parts: Vec<Part>,
}

/// Why a job is not to go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unwanted {
    Cancelled,
    NoProgress(Duration),
    ShuttingDown,
}

impl Unwanted {
    const fn error(self, layer: Option<u32>) -> JobError {
        match self {
            Self::Cancelled => JobError::Cancelled { layer },
            Self::NoProgress(patience) => JobError::NoProgress { patience, layer },
            Self::ShuttingDown => JobError::ShuttingDown,
        }
    }
}

/// What tells whether a job is still wanted.
struct Wish {
    cancel: CancelToken,
    progress: Instant,
    patience: Option<Duration>,
}

impl Wish {
    fn of(running: &Running) -> Self {
        let (cancel, patience) = (running.job.cancel.clone(), running.job.patience);
        Self { cancel, progress: running.progress, patience }
    }

    fn unwanted(&self, closing: Option<Instant>) -> Option<Unwanted> {
        if self.cancel.is_cancelled() {
            return Some(Unwanted::Cancelled);
        }
        let late = |patience: &Duration| self.progress.elapsed() >= *patience;
        let late = self.patience.filter(late).map(Unwanted::NoProgress);
        let closed = closing.is_some_and(|at| Instant::now() >= at);
        late.or(closed.then_some(Unwanted::ShuttingDown))
    }
}

pub(super) struct Worker {
    engine: Engine,
    options: SchedulerOptions,
    shared: Arc<Shared>,
    seats: Vec<Seat>,
    /// Jobs that have left the queue and are about to get a sequence.
    entering: VecDeque<Waiting>,
    prefixes: Prefixes,
    pace: Pace,
    /// Passes over prompts: who is dealt rows first.
    turn: usize,
    /// Jobs that have left.
    left: u64,
}

impl Worker {
    pub(super) fn new(
        mut engine: Engine,
        options: SchedulerOptions,
        shared: Arc<Shared>,
    ) -> Result<Self, StartError> {
        if engine.options.speculation.is_on() || engine.network.has_draft() {
            return Err(StartError::Guesses);
        }
        let pass_rows = engine.plan.pass_rows as usize;
        if let Some(rows) = options.piece_rows
            && (!rows.is_multiple_of(GRID) || !(GRID..=pass_rows).contains(&rows))
        {
            return Err(StartError::Piece { rows, pass_rows });
        }
        let prefixes = Prefixes::open(&engine, &options)?;
        let Serving { sequences, prefix, .. } = engine.options.serving;
        let seats = (0..sequences)
            .map(|_| Seat::open(&mut engine.network, prefix > Bytes::ZERO))
            .collect::<Result<_, ForwardError>>()?;
        let pace = Pace::default();
        let entering = VecDeque::with_capacity(sequences as usize);
        Ok(Self { engine, options, shared, seats, entering, prefixes, pace, turn: 0, left: 0 })
    }

    /// Serves until the scheduler is shut down; gives the engine back unless it panicked.
    pub(super) fn run(mut self) -> Option<Engine> {
        // A panic leaves the engine in any state; nothing of it is used again.
        let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.serve())) else {
            return Some(self.engine);
        };
        let message = panic_text(&*panic);
        self.shared.stop(&message);
        let running = self.seats.iter_mut().filter_map(|seat| seat.running.take());
        let jobs = running.map(|running| running.job);
        for mut job in jobs.chain(self.entering.drain(..).map(|waiting| waiting.job)) {
            self.shared.lock().stats.failed += 1;
            fail(&mut job, JobError::EngineStopped { message: message.clone() });
        }
        // Nothing runs and nothing is taken any more, so this gives nothing and tells those that wait.
        while self.shared.next(0, 0).is_some() {}
        // Its parts may wait for each other; the process is about to end.
        std::mem::forget(self.engine);
        None
    }

    fn serve(&mut self) {
        loop {
            let running = self.running().count();
            if running == 0 && !self.options.preload.is_empty() {
                self.engine.network.preload(&self.options.preload);
            }
            if running == 0 {
                self.write_prefixes();
                self.publish();
            }
            let free = self.seats.len() - running;
            let Some(next) = self.shared.next(free, running) else { return };
            self.entering = next.into();
            while !self.entering.is_empty() {
                self.admit();
            }
            self.reap();
            if let Some(pass) = self.next_pass() {
                self.run_pass(pass);
            }
            self.prefixes.write_some(false);
            self.publish();
        }
    }

    /// In idle time, and before the end as long as there is grace: what is to be written to disk.
    fn write_prefixes(&mut self) {
        while self.prefixes.write_some(true) && self.shared.is_idle() {}
    }

    fn running(&self) -> impl Iterator<Item = &Running> {
        self.seats.iter().filter_map(|seat| seat.running.as_ref())
    }

    /// Gives the first of those that enter the free sequence that spares it most, and of those the one where that costs
    /// least.
    fn admit(&mut self) {
        let Self { seats, prefixes, engine, entering, .. } = self;
        let Some(waiting) = entering.front() else { return };
        let prompt = &waiting.job.prompt;
        let free = seats.iter().filter(|seat| seat.running.is_none());
        let held = free.map(|seat| seat.reusable(prompt)).max().unwrap_or(0);
        let from_disk = prefixes.load(&engine.network, prompt, held);
        let (cached, known) = (prefixes.reusable(prompt), prefixes.known(prompt));
        let free = seats.iter_mut().filter(|seat| seat.running.is_none());
        let best = free.min_by_key(|seat| {
            let at = seat.reusable(prompt).max(cached);
            (std::cmp::Reverse(at), seat.cost(prompt, at))
        });
        let seat = best.expect("no more jobs are taken than sequences are free");
        let held = seat.reusable(prompt);
        if cached > held {
            seat.restore(&mut engine.network, prefixes, prompt, cached);
            prefixes.count(0, cached, from_disk);
        } else {
            seat.go_back(&mut engine.network, held);
            prefixes.count(held, 0, 0);
        }
        let at = held.max(cached);
        let waiting = entering.pop_front().expect("it was there");
        let mut running = Running::new(waiting, at, known);
        let prompt = running.job.prompt.len();
        tell(&mut running, JobEvent::Started { prompt, cached: at });
        seat.running = Some(running);
        self.shared.lock().stats.cached_rows += at as u64;
    }

    /// Ends jobs that are not to go on.
    fn reap(&mut self) {
        let closing = self.shared.closing();
        for seat in 0..self.seats.len() {
            let running = self.seats[seat].running.as_ref();
            if let Some(why) = running.and_then(|running| Wish::of(running).unwanted(closing)) {
                self.fail(seat, why.error(None));
            }
        }
    }

    /// Prompts or answers, whoever's turn it is.
    fn next_pass(&mut self) -> Option<Pass> {
        let generates = self.running().any(|running| running.next.is_some());
        let reads = self.running().any(|running| running.next.is_none());
        if self.pace.reads_prompts(reads, generates) {
            Some(self.prompt_pass(generates))
        } else {
            generates.then(|| self.decode_pass())
        }
    }

    fn prompt_pass(&mut self, others_wait: bool) -> Pass {
        let readers: Vec<usize> = self.seats_that(|running| running.next.is_none());
        let needs = |seat: &usize| self.seats[*seat].running.as_ref().map_or(0, Running::to_read);
        let needs: Vec<usize> = readers.iter().map(needs).collect();
        let most = self.engine.plan.pass_rows as usize;
        let most = self.options.piece_rows.filter(|_| others_wait).unwrap_or(most);
        let dealt = deal(&needs, self.turn, most, GRID);
        self.turn = (self.turn + 1) % readers.len();
        let mut pass =
            Pass { role: Role::Prompt, rows: Vec::with_capacity(most), parts: Vec::new() };
        for (seat, rows) in readers.into_iter().zip(dealt).filter(|(_, rows)| *rows > 0) {
            let running = self.seats[seat].running.as_ref().expect("it reads");
            let (start, end) = (running.read, running.read + rows);
            let chooses = end == running.job.prompt.len() && running.wants_tokens();
            pass.add(&self.seats[seat], start, &running.job.prompt[start..end]);
            pass.part(seat, rows, chooses);
            self.seats[seat].mark(&mut self.engine.network, &(start..end));
        }
        pass
    }

    fn decode_pass(&self) -> Pass {
        let mut pass = Pass { role: Role::Generated, rows: Vec::new(), parts: Vec::new() };
        for seat in self.seats_that(|running| running.next.is_some()) {
            let running = self.seats[seat].running.as_ref().expect("it generates");
            let token = running.next.expect("it generates");
            pass.add(&self.seats[seat], running.position(), &[token]);
            pass.part(seat, 1, true);
        }
        pass
    }

    fn seats_that(&self, wanted: impl Fn(&Running) -> bool) -> Vec<usize> {
        let is = |seat: &usize| self.seats[*seat].running.as_ref().is_some_and(&wanted);
        (0..self.seats.len()).filter(is).collect()
    }

    fn run_pass(&mut self, mut pass: Pass) {
        let mark = Mark::now(&self.engine.network);
        let outcome = self.forward(&mut pass);
        let phase = mark.phase(&self.engine.network, 0);
        self.count(&pass, phase.elapsed, outcome.is_ok());
        match outcome {
            Ok(()) => pass.parts.into_iter().for_each(|part| self.advance(part, pass.role, &phase)),
            Err(ForwardError::Stopped { layer }) => self.cut(&pass, layer.0),
            Err(error) => {
                let error = Arc::new(error);
                for part in pass.parts {
                    self.seats[part.seat].lose(&mut self.engine.network);
                    self.fail(part.seat, JobError::Forward(Arc::clone(&error)));
                }
            }
        }
    }

    fn count(&mut self, pass: &Pass, took: Duration, is_complete: bool) {
        let others_wait = self.running().any(|running| running.next.is_some());
        let rows = if is_complete { pass.rows.len() as u64 } else { 0 };
        let stats = &mut self.shared.lock().stats;
        match pass.role {
            Role::Prompt => {
                self.pace.read(took, others_wait);
                stats.prompt_passes += 1;
                stats.prompt_rows += rows;
            }
            Role::Generated => {
                self.pace.generated(took);
                stats.decode_passes += 1;
                stats.generated_rows += rows;
            }
        }
    }

    /// Runs the pass as long as any of its jobs is wanted, and lets each choose from its logits.
    fn forward(&mut self, pass: &mut Pass) -> Result<(), ForwardError> {
        let Pass { rows, parts, .. } = pass;
        let Self { seats, shared, engine, .. } = self;
        let running = |part: &Part| seats[part.seat].running.as_ref().expect("it runs");
        let wishes: Vec<Wish> = parts.iter().map(|part| Wish::of(running(part))).collect();
        let choosing = parts.iter().filter(|part| part.chooses);
        let wanted: Vec<usize> = choosing.map(|part| part.rows.end - 1).collect();
        let mut go_on = |_| {
            let closing = shared.closing();
            if wishes.iter().all(|wish| wish.unwanted(closing).is_some()) {
                return ControlFlow::Break(());
            }
            shared.layer_begins();
            ControlFlow::Continue(())
        };
        let mut sink = |row: usize, logits: &[f32]| {
            let part = parts.iter_mut().find(|part| part.rows.end == row + 1);
            let part = part.expect("logits of a part's last row");
            let running = seats[part.seat].running.as_mut().expect("it runs");
            part.choice = Some(running.choose(logits));
        };
        engine.network.forward_while(rows, LogitRows::These(&wanted), &mut go_on, &mut sink)
    }

    /// Nobody wants the pass any more.
    fn cut(&mut self, pass: &Pass, layer: u32) {
        let closing = self.shared.closing();
        let why = |part: &Part| {
            let running = self.seats[part.seat].running.as_ref().expect("it ran");
            let why = Wish::of(running).unwanted(closing);
            (part.seat, why.expect("a cut pass is wanted by nobody"))
        };
        let reasons: Vec<_> = pass.parts.iter().map(why).collect();
        // Before anybody hears of it.
        if reasons.iter().any(|(_, why)| *why == Unwanted::Cancelled) {
            let counters = &mut self.shared.lock().stats.cancelled;
            counters.cut_passes += 1;
            counters.last_layer = Some(layer);
        }
        for (seat, why) in reasons {
            self.fail(seat, why.error(Some(layer)));
        }
    }

    /// A part of a pass has run.
    fn advance(&mut self, part: Part, role: Role, phase: &Phase) {
        let seat = &mut self.seats[part.seat];
        let rows = part.rows.len();
        let running = seat.running.as_mut().expect("it ran");
        running.progress = Instant::now();
        let own = Phase { tokens: rows as u64, elapsed: Duration::ZERO, ..*phase };
        match role {
            Role::Prompt => {
                running.prefill.add(&own);
                let end = running.read + rows;
                seat.read(&mut self.engine.network, &mut self.prefixes, end);
                let running = seat.running.as_mut().expect("it ran");
                let (rows, of) = (end - running.cached, running.job.prompt.len() - running.cached);
                tell(running, JobEvent::Prefilled { rows, of });
            }
            Role::Generated => {
                running.decode.add(&own);
                running.decoded += rows;
            }
        }
        let running = seat.running.as_mut().expect("it ran");
        if running.to_read() > 0 {
            return;
        }
        if running.first.is_none() {
            running.first = Some(Instant::now());
            running.prefill.elapsed = running.started.elapsed();
        }
        match part.choice {
            Some(choice) => self.give(part.seat, choice),
            None => self.finish(part.seat, Finish::Length),
        }
    }

    /// A job has chosen.
    fn give(&mut self, seat: usize, choice: Result<Choice, JobError>) {
        let context = self.engine.plan.context as usize;
        let running = self.seats[seat].running.as_mut().expect("it has chosen");
        let (token, end) = match choice {
            Ok(Choice::Token(token)) => (Some(token), None),
            Ok(Choice::Last(token, finish)) => (Some(token), Some(finish)),
            Ok(Choice::End(finish)) => (None, Some(finish)),
            Err(error) => return self.fail(seat, error),
        };
        let vocab = self.engine.network.config().vocab;
        if let Some(token) = token.filter(|token| *token >= vocab) {
            let what = format!("token {token} was chosen from a vocabulary of {vocab}");
            return self.fail(seat, ChooseError::Other(what).into());
        }
        if let Some(id) = token {
            running.generated += 1;
            tell(running, JobEvent::Token { id });
            self.shared.lock().stats.generated_tokens += 1;
        }
        let full = running.position() >= context;
        let length = (running.generated >= running.job.max_tokens).then_some(Finish::Length);
        match end.or(length).or(full.then_some(Finish::Context)) {
            Some(finish) => self.finish(seat, finish),
            None => running.next = token,
        }
    }

    fn finish(&mut self, seat: usize, finish: Finish) {
        let mut running = self.leave(seat);
        if let Some(first) = running.first {
            running.decode.elapsed = first.elapsed();
        }
        let report = JobReport {
            finish,
            prompt: running.job.prompt.len(),
            cached: running.cached,
            generated: running.generated,
            queued: running.queued,
            prefill: running.prefill,
            decode: running.decode,
        };
        // The counters first: whoever hears of the end may look at them.
        let mut state = self.shared.lock();
        state.stats.finished += 1;
        state.stats.running -= 1;
        state.took(running.started.elapsed());
        drop(state);
        tell(&mut running, JobEvent::Finished(report));
    }

    fn fail(&mut self, seat: usize, error: JobError) {
        let mut running = self.leave(seat);
        let mut state = self.shared.lock();
        match error {
            JobError::Cancelled { .. } => state.stats.cancelled.jobs += 1,
            _ => state.stats.failed += 1,
        }
        state.stats.running -= 1;
        drop(state);
        fail(&mut running.job, error);
    }

    fn leave(&mut self, seat: usize) -> Running {
        self.left += 1;
        self.publish();
        self.seats[seat].leave(self.left)
    }

    /// Shows what the network counted.
    fn publish(&self) {
        let network = &self.engine.network;
        let stats = &mut self.shared.lock().stats;
        stats.experts = network.experts().counters();
        stats.ngrams = network.ngram_counters();
        stats.lookahead = network.lookahead_counters();
        stats.prefix = self.prefixes.counters();
    }
}

impl Pass {
    fn add(&mut self, seat: &Seat, first: usize, tokens: &[u32]) {
        let (sequence, role) = (seat.id, self.role);
        let row = |(i, &token)| Row { sequence, position: (first + i) as u32, role, token };
        self.rows.extend(tokens.iter().enumerate().map(row));
    }

    /// The last `rows` rows are a job's.
    fn part(&mut self, seat: usize, rows: usize, chooses: bool) {
        let rows = self.rows.len() - rows..self.rows.len();
        self.parts.push(Part { seat, rows, chooses, choice: None });
    }
}

/// Tells a job how it goes. One that nobody listens to is not wanted any more.
fn tell(running: &mut Running, event: JobEvent) {
    if !running.job.tell(event) {
        running.job.cancel.cancel();
    }
}

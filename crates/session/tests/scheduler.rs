//! Several jobs on one engine: each answer is that of a run alone, whoever comes and goes beside it.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/jobs.rs"]
mod jobs;
mod support;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use compute::backend::{Role, Row};
use expert_store::{FaultKind, FaultPlan};
use memory_plan::Plan;
use model::{LogitRows, RouteLog};
use session::scheduler::{
    Choice, ChooseError, Chooser, EventSink, Job, JobError, JobEvent, Scheduler, SchedulerOptions,
    SchedulerStats, Serving, StartError, SubmitError,
};
use session::{BackendKind, EngineOptions, Finish, PromptError, SpeculationOptions};
use units::{Bytes, ExpertKey};

use jobs::{
    ANSWER, Gated, Heard, Logits, alone, fixtures, job, start, submit, text, usual, with_chooser,
};
use support::demo;

/// Prompts of many lengths: within a block, on the grid, longer than a pass.
fn prompts(vocab: u32) -> Vec<Vec<u32>> {
    let lengths = [70, 5, 128, 200, 1];
    lengths.iter().enumerate().map(|(i, n)| text(vocab, *n, i)).collect()
}

/// Jobs that come while others read or generate; what each saw.
fn arrivals(scheduler: &Scheduler, prompts: &[Vec<u32>]) -> Vec<Heard> {
    let first = submit(scheduler, &prompts[0], ANSWER);
    first.await_tokens(2);
    let mut heard = vec![first];
    heard.extend(prompts[1..4].iter().map(|prompt| submit(scheduler, prompt, ANSWER)));
    heard[2].await_tokens(1);
    heard.push(submit(scheduler, &prompts[4], ANSWER));
    heard
}

fn check_arrivals(path: &Path, backends: &[BackendKind]) {
    let mut engine = support::engine(path, usual(1, 0));
    let config = engine.network.config().clone();
    let prompts = prompts(config.vocab);
    let expected: Vec<_> = prompts.iter().map(|p| alone(&mut engine, p, ANSWER)).collect();
    drop(engine);
    for backend in backends {
        let slots = match backend {
            BackendKind::Deferred => vec![3 * config.top_k],
            _ => vec![config.top_k + 1, config.n_layers * config.n_experts],
        };
        for slots in slots {
            let options = EngineOptions { backend: *backend, slots: Some(slots), ..usual(3, 4) };
            let scheduler = start(path, options);
            let heard = arrivals(&scheduler, &prompts);
            for (i, (heard, expected)) in heard.iter().zip(&expected).enumerate() {
                let report = heard.finished();
                let case = format!("{} {backend:?} {slots} job {i}", path.display());
                assert_eq!((report.finish, report.generated), (Finish::Length, ANSWER), "{case}");
                assert!(*heard.logits.lock().unwrap() == *expected, "{case}");
            }
            let stats = scheduler.stats();
            let rows: usize = prompts.iter().map(Vec::len).sum();
            assert_eq!((stats.finished, stats.prompt_rows), (5, rows as u64));
            assert_eq!(stats.generated_tokens, 5 * ANSWER as u64);
            assert_eq!(stats.generated_rows, 5 * (ANSWER as u64 - 1));
            assert!(stats.decode_passes < stats.generated_rows, "some passes were shared");
            assert_eq!((stats.running, stats.queued, stats.failed), (0, 0, 0));
        }
    }
}

#[test]
fn answers_of_every_family_never_depend_on_who_else_is_in_the_pass() {
    for path in fixtures() {
        check_arrivals(&path, &[BackendKind::Cpu, BackendKind::Deferred]);
    }
}

#[test]
fn answers_of_the_demo_never_depend_on_who_else_is_in_the_pass() {
    check_arrivals(&demo(), &[BackendKind::Cpu, BackendKind::Deferred]);
}

#[test]
fn a_pass_reads_the_union_of_what_is_missing_and_nothing_else() {
    for path in fixtures().into_iter().chain([demo()]) {
        let experts = support::engine(&path, usual(1, 0)).network.config().clone();
        let all = experts.n_layers * experts.n_experts;
        let mut engine =
            support::engine(&path, EngineOptions { slots: Some(all), sweep: false, ..usual(4, 0) });
        let config = engine.network.config().clone();
        let shape = (config.n_layers as usize, config.top_k as usize);
        engine.network.routes = Some(RouteLog::new(shape.0, shape.1));
        let ids: Vec<_> = (0..4).map(|_| engine.network.open_sequence().unwrap()).collect();
        let row = |sequence, position, role, token| Row { sequence, position, role, token };
        let mut resident = BTreeSet::new();
        for step in 0..6 {
            let rows: Vec<Row> = if step == 0 {
                let prompts = ids.iter().enumerate().map(|(i, id)| (*id, text(config.vocab, 9, i)));
                prompts
                    .flat_map(|(id, tokens)| {
                        let tokens = tokens.into_iter().enumerate();
                        tokens.map(move |(i, token)| row(id, i as u32, Role::Prompt, token))
                    })
                    .collect()
            } else {
                let token = |i: usize| text(config.vocab, 9, i)[step];
                let rows = ids.iter().enumerate();
                rows.map(|(i, id)| row(*id, 8 + step as u32, Role::Generated, token(i))).collect()
            };
            let before = engine.network.experts().counters();
            let done = engine.network.routes.as_ref().unwrap().shape()[0];
            engine.network.forward(&rows, LogitRows::None, &mut |_, _| {}).unwrap();
            let moved = engine.network.experts().counters().minus(&before);
            let log = engine.network.routes.as_ref().unwrap();
            let routes = &log.experts()[done * shape.0 * shape.1..];
            let keys = routes.chunks_exact(shape.1).enumerate().flat_map(|(at, experts)| {
                let layer = (at % shape.0) as u32;
                experts.iter().map(move |expert| ExpertKey::new(layer, *expert as u32))
            });
            let union: BTreeSet<ExpertKey> = keys.collect();
            let missing = union.difference(&resident);
            let records = engine.network.experts().records();
            let record = |key: &ExpertKey| {
                let pieces = records.record(*key).pieces;
                pieces.iter().map(|piece| piece.bytes).sum::<u64>()
            };
            let bytes: u64 = missing.map(record).sum();
            assert_eq!(moved.store.payload_bytes, bytes, "{} step {step}", path.display());
            assert_eq!(moved.pool.hits + moved.pool.misses, union.len() as u64);
            assert!(step > 0 || bytes > 0);
            resident.extend(union);
        }
    }
}

/// A prompt of the demo model whose reading takes many layers.
fn long_prompt(n: usize) -> Vec<u32> {
    text(4000, n, 0)
}

fn wait_until(scheduler: &Scheduler, reached: impl Fn(&SchedulerStats) -> bool) -> SchedulerStats {
    loop {
        let stats = scheduler.stats();
        if reached(&stats) {
            return stats;
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}

#[test]
fn a_cancelled_job_begins_at_most_one_more_layer() {
    let options = EngineOptions { context: Some(4096), pass_rows: Some(512), ..usual(2, 2) };
    let scheduler = start(&demo(), options);
    let layers = u64::from(scheduler.config().n_layers);
    // In the middle of a prompt, and of an answer.
    for (prompt, after) in [(4000, 3 * layers / 2), (1, 20 * layers + layers / 2)] {
        let begun = scheduler.stats();
        let heard = submit(&scheduler, &long_prompt(prompt), 4000);
        wait_until(&scheduler, |stats| stats.layers >= begun.layers + after);
        heard.cancel.cancel();
        let at_most = scheduler.stats().layers + 1;
        let error = heard.outcome().end.unwrap_err();
        let stats = scheduler.stats();
        assert!(stats.layers <= at_most, "{} layers, at most {at_most}", stats.layers);
        let JobError::Cancelled { layer } = error else { panic!("{error}") };
        assert_eq!(stats.cancelled.jobs, begun.cancelled.jobs + 1);
        if let Some(layer) = layer {
            assert_eq!(stats.cancelled.cut_passes, begun.cancelled.cut_passes + 1);
            assert_eq!(stats.cancelled.last_layer, Some(layer));
            assert_eq!((stats.layers - begun.layers) % layers, u64::from(layer));
        } else {
            assert_eq!((stats.layers - begun.layers) % layers, 0, "between two passes");
        }
    }
}

#[test]
fn whoever_shares_a_pass_with_a_cancelled_job_loses_nothing() {
    for path in fixtures().into_iter().chain([demo()]) {
        let mut engine = support::engine(&path, usual(1, 0));
        let vocab = engine.network.config().vocab;
        let prompts = prompts(vocab);
        let expected = alone(&mut engine, &prompts[0], 2 * ANSWER);
        drop(engine);
        let scheduler = start(&path, EngineOptions { context: Some(4096), ..usual(3, 4) });
        let kept = submit(&scheduler, &prompts[0], 2 * ANSWER);
        let (reads, generates) =
            (submit(&scheduler, &prompts[3], 3800), submit(&scheduler, &prompts[1], 3800));
        kept.await_tokens(2);
        reads.cancel.cancel();
        kept.await_tokens(2);
        generates.cancel.cancel();
        assert!(kept.finished().generated == 2 * ANSWER);
        assert!(*kept.logits.lock().unwrap() == expected, "{}", path.display());
        for cancelled in [reads, generates] {
            assert!(matches!(cancelled.outcome().end, Err(JobError::Cancelled { .. })));
        }
        // And their sequences are as good as new.
        let again = submit(&scheduler, &prompts[0], 2 * ANSWER);
        again.finished();
        assert!(*again.logits.lock().unwrap() == expected, "{}", path.display());
    }
}

#[test]
fn a_job_that_nobody_listens_to_is_cancelled() {
    let scheduler = start(&fixtures()[0], usual(1, 2));
    let (gone, heard) = job(&[1, 2, 3], 400);
    drop(heard);
    scheduler.submit(gone).unwrap();
    submit(&scheduler, &[1, 2, 3], 1).finished();
    let stats = scheduler.stats();
    assert_eq!((stats.cancelled.jobs, stats.finished), (1, 1));
    assert!(stats.generated_tokens <= 2, "{stats:?}");
}

/// Events of several jobs, in the order in which they came.
type Log = Arc<Mutex<Vec<(usize, JobEvent)>>>;

/// Writes events of the job of this name down.
struct Logged(usize, Log);

impl EventSink for Logged {
    fn send(&mut self, event: JobEvent) -> bool {
        self.1.lock().unwrap().push((self.0, event));
        true
    }
}

#[test]
fn a_long_prompt_stops_nobody_for_longer_than_one_pass() {
    let engine = support::engine(&demo(), EngineOptions { context: Some(4096), ..usual(3, 3) });
    let pieces = SchedulerOptions { piece_rows: Some(64), ..SchedulerOptions::default() };
    let scheduler = Scheduler::start(engine, pieces).unwrap();
    let log = Log::default();
    let mut cancels = Vec::new();
    let (open, gate) = channel();
    let submit = |name, (mut job, heard): (Job, Heard)| {
        job.events = Box::new(Logged(name, Arc::clone(&log)));
        scheduler.submit(job).unwrap();
        heard.cancel
    };
    let count = |name, is: fn(&JobEvent) -> bool| {
        log.lock().unwrap().iter().filter(|(of, event)| *of == name && is(event)).count()
    };
    let gated = Gated { gate, chosen: 0 };
    cancels.push(submit(0, with_chooser(&[1, 2, 3], 4000, gated, Logits::default())));
    while count(0, |event| matches!(event, JobEvent::Token { .. })) < 1 {
        std::thread::yield_now();
    }
    cancels.push(submit(1, job(&long_prompt(640), 1)));
    cancels.push(submit(2, job(&long_prompt(320)[1..], 1)));
    drop::<Sender<()>>(open);
    while count(1, |event| matches!(event, JobEvent::Finished(_))) == 0 {
        std::thread::yield_now();
    }
    cancels[0].cancel();
    drop(scheduler);
    let log = log.lock().unwrap();
    let prefilled = |event: &JobEvent| matches!(event, JobEvent::Prefilled { .. });
    let pieces: Vec<usize> =
        (0..log.len()).filter(|i| log[*i].0 > 0 && prefilled(&log[*i].1)).collect();
    assert_eq!(pieces.len(), 15, "ten of one prompt, five of the other");
    for pair in pieces.windows(2) {
        let between = log[pair[0]..pair[1]].iter();
        let tokens =
            between.filter(|(of, event)| *of == 0 && matches!(event, JobEvent::Token { .. }));
        assert!(tokens.count() >= 1, "whoever generates goes on between two pieces");
    }
    // The shorter prompt came second and was not made to wait for all of the longer one.
    let events = &log;
    let of = |name| pieces.iter().filter(move |at| events[**at].0 == name);
    assert!(of(2).next_back() < of(1).next_back());
    assert!(of(2).next() < of(1).nth(2), "prompts take turns");
}

#[test]
fn the_queue_is_bounded_and_first_come_first_served() {
    let scheduler = start(&fixtures()[0], usual(1, 2));
    let (open, gate) = channel();
    let gated = Gated { gate, chosen: 0 };
    let (gated, first) = with_chooser(&[1, 2, 3], 300, gated, Logits::default());
    scheduler.submit(gated).unwrap();
    first.await_tokens(1);
    let waiting: Vec<Heard> = (0..2).map(|i| submit(&scheduler, &[1, 2, i], 1)).collect();
    let ahead = |heard: &Heard| match heard.next() {
        JobEvent::Queued { ahead } => ahead,
        other => panic!("{other:?}"),
    };
    assert_eq!((ahead(&waiting[0]), ahead(&waiting[1])), (0, 1));
    let refused = scheduler.submit(job(&[1], 1).0).unwrap_err();
    let SubmitError::QueueFull { waiting: n, retry_after } = refused.clone() else {
        panic!("{refused}")
    };
    assert!(n == 2 && retry_after >= Duration::from_secs(1), "{refused}");
    // Who gives up makes room.
    waiting[0].cancel.cancel();
    let last = submit(&scheduler, &[3, 2, 1], 1);
    assert!(matches!(waiting[0].outcome().end, Err(JobError::Cancelled { layer: None })));
    first.cancel.cancel();
    drop::<Sender<()>>(open);
    assert_eq!(waiting[1].finished().generated, 1);
    assert_eq!(last.finished().generated, 1);
    let stats = scheduler.stats();
    assert_eq!((stats.submitted, stats.refused, stats.finished), (4, 1, 2));
    assert_eq!(stats.cancelled.jobs, 2);
}

#[test]
fn what_cannot_run_is_refused_with_what_is_wrong() {
    let scheduler = start(&fixtures()[0], usual(1, 2));
    let (context, vocab) = (scheduler.context_tokens(), scheduler.config().vocab);
    let refused = |prompt: &[u32]| scheduler.submit(job(prompt, 1).0).unwrap_err();
    assert_eq!(refused(&[]), SubmitError::Prompt(PromptError::Empty));
    let prompt = context + 1;
    let too_long = PromptError::TooLong { prompt, context };
    assert_eq!(refused(&vec![1; prompt]), SubmitError::Prompt(too_long));
    assert_eq!(refused(&[1, vocab]), SubmitError::TokenOutOfRange { token: vocab, vocab });
    // What fills the context gives one token, and no room is left.
    let full = submit(&scheduler, &text(vocab, context, 0), 10).finished();
    assert_eq!((full.finish, full.generated), (Finish::Context, 1));
    let none = submit(&scheduler, &[1, 2], 0).finished();
    assert_eq!((none.finish, none.generated, none.prefill.tokens), (Finish::Length, 0, 2));
    drop(scheduler);
    let start = |options: EngineOptions, more| {
        Scheduler::start(support::engine(&fixtures()[0], options), more).err()
    };
    let guesses = SpeculationOptions { lookup: true, draft: false, most: 4 };
    let options = EngineOptions { speculation: guesses, ..usual(1, 1) };
    assert!(matches!(start(options, SchedulerOptions::default()), Some(StartError::Guesses)));
    for rows in [0, 65, 192] {
        let pieces = SchedulerOptions { piece_rows: Some(rows), ..SchedulerOptions::default() };
        assert!(matches!(start(usual(1, 1), pieces), Some(StartError::Piece { .. })));
    }
}

/// Chooses until it does not.
struct Odd(fn(usize) -> Result<Choice, ChooseError>, usize);

impl Chooser for Odd {
    fn begin(&mut self, _: &[u32]) {}

    fn choose(&mut self, _: &[f32]) -> Result<Choice, ChooseError> {
        self.1 += 1;
        (self.0)(self.1)
    }
}

#[test]
fn choosers_end_fail_and_panic_for_their_own_job_only() {
    let path = &fixtures()[1];
    let mut engine = support::engine(path, usual(1, 0));
    let prompts = prompts(engine.network.config().vocab);
    let expected = alone(&mut engine, &prompts[0], 2 * ANSWER);
    drop(engine);
    let scheduler = start(path, usual(4, 4));
    let other = submit(&scheduler, &prompts[0], 2 * ANSWER);
    let odd = |choose: fn(usize) -> Result<Choice, ChooseError>| {
        let (job, heard) = with_chooser(&prompts[1], 100, Odd(choose, 0), Logits::default());
        scheduler.submit(job).unwrap();
        heard.outcome()
    };
    let ended =
        odd(
            |n| {
                if n < 3 { Ok(Choice::Token(n as u32)) } else { Ok(Choice::End(Finish::EndOfText)) }
            },
        );
    assert_eq!((ended.tokens, ended.end.unwrap().finish), (vec![1, 2], Finish::EndOfText));
    let last = odd(|_| Ok(Choice::Last(7, Finish::Stopped)));
    assert_eq!((last.tokens, last.end.unwrap().finish), (vec![7], Finish::Stopped));
    let failed = odd(|n| {
        if n < 2 {
            Ok(Choice::Token(1))
        } else {
            Err(ChooseError::Other("no word fits".to_owned()))
        }
    });
    assert!(failed.end.unwrap_err().to_string().contains("no word fits"));
    let panicked = odd(|n| if n < 2 { Ok(Choice::Token(1)) } else { panic!("a chooser's bug") });
    let error = panicked.end.unwrap_err();
    assert!(
        matches!(&error, JobError::ChooserPanicked { message } if message == "a chooser's bug")
    );
    // So is whoever listens.
    let (mut job, heard) = job(&prompts[1], 100);
    job.events = Box::new(Broken);
    scheduler.submit(job).unwrap();
    drop(heard);
    // A token that does not exist is the chooser's fault, and nobody else's.
    let absurd = odd(|_| Ok(Choice::Token(u32::MAX)));
    assert!(absurd.end.unwrap_err().to_string().contains("vocabulary"));
    other.finished();
    assert!(*other.logits.lock().unwrap() == expected);
    wait_until(&scheduler, |stats| stats.running == 0);
    assert_eq!(scheduler.stats().cancelled.jobs, 1);
}

/// Breaks when a job starts.
struct Broken;

impl EventSink for Broken {
    fn send(&mut self, event: JobEvent) -> bool {
        assert!(matches!(event, JobEvent::Queued { .. }), "a listener's bug");
        true
    }
}

#[test]
fn idle_time_is_for_experts_that_will_be_needed() {
    // Small pools keep a few slots free.
    let engine = support::engine(&demo(), usual(1, 1));
    let config = engine.network.config().clone();
    let preload = (0..config.n_experts).map(|expert| ExpertKey::new(0, expert)).collect();
    let options = SchedulerOptions { preload, ..SchedulerOptions::default() };
    let scheduler = Scheduler::start(engine, options).unwrap();
    wait_until(&scheduler, |stats| stats.experts.hot_set.issued > 0);
    submit(&scheduler, &text(config.vocab, 20, 0), 1).finished();
    let hot_set = scheduler.stats().experts.hot_set;
    assert!(hot_set.used + hot_set.cancelled > 0, "{hot_set:?}");
}

#[test]
fn a_failed_read_fails_its_jobs_and_the_next_ones_run() {
    for (backend, path) in
        [(BackendKind::Cpu, demo()), (BackendKind::Deferred, fixtures().remove(1))]
    {
        let mut engine = support::engine(&path, usual(1, 0));
        let prompts = prompts(engine.network.config().vocab);
        let slots = Some(3 * engine.network.config().top_k);
        let expected: Vec<_> = prompts[..2].iter().map(|p| alone(&mut engine, p, ANSWER)).collect();
        drop(engine);
        let mut failed = 0;
        let with = |faults| EngineOptions {
            backend,
            faults: Some(faults),
            slots,
            sweep: false,
            ..usual(2, 4)
        };
        let loading = FaultPlan::default();
        drop(support::engine(&path, with(loading.clone())));
        for read in [0, 40, 150, 400] {
            let faults = FaultPlan::nth(loading.reads() + read, FaultKind::Error(5));
            let options = with(faults.clone());
            let scheduler = start(&path, options);
            let both = [0, 1].map(|i| submit(&scheduler, &prompts[i], ANSWER));
            for (heard, expected) in both.iter().zip(&expected) {
                match heard.outcome().end {
                    Ok(_) => assert!(*heard.logits.lock().unwrap() == *expected),
                    Err(JobError::Forward(_)) => failed += 1,
                    Err(other) => panic!("{other}"),
                }
            }
            for (prompt, expected) in prompts.iter().zip(&expected) {
                let fired = faults.fired();
                let mut heard = submit(&scheduler, prompt, ANSWER);
                if heard.outcome().end.is_err() {
                    assert_eq!((fired, faults.fired()), (0, 1), "one read fails");
                    failed += 1;
                    heard = submit(&scheduler, prompt, ANSWER);
                    heard.finished();
                }
                assert!(*heard.logits.lock().unwrap() == *expected, "nothing is left of it");
            }
        }
        assert!(failed > 0, "some read failed in a pass");
    }
}

#[test]
fn patience_looks_at_progress() {
    let scheduler = start(&fixtures()[0], usual(1, 2));
    let (mut hasty, heard) = job(&text(100, 400, 0), 10);
    hasty.patience = Some(Duration::ZERO);
    scheduler.submit(hasty).unwrap();
    let error = heard.outcome().end.unwrap_err();
    assert!(matches!(error, JobError::NoProgress { .. }), "{error}");
    let (mut patient, heard) = job(&text(100, 400, 0), 10);
    patient.patience = Some(Duration::from_hours(1));
    scheduler.submit(patient).unwrap();
    assert_eq!(heard.finished().generated, 10);
    assert_eq!(scheduler.stats().failed, 1);
}

#[test]
fn a_shutdown_ends_everything_and_gives_the_engine_back() {
    let path = &fixtures()[0];
    let usual = || EngineOptions { context: Some(4096), ..usual(1, 2) };
    for grace in [Duration::ZERO, Duration::from_hours(1)] {
        let scheduler = start(path, usual());
        let runs = submit(&scheduler, &[1, 2, 3], if grace.is_zero() { 4000 } else { 200 });
        let waits = submit(&scheduler, &[1, 2, 3], 1);
        runs.await_tokens(1);
        let engine = scheduler.shutdown(grace).expect("it did not panic");
        assert!(matches!(waits.outcome().end, Err(JobError::ShuttingDown)));
        match runs.outcome().end {
            Ok(report) => assert_eq!((grace.is_zero(), report.generated), (false, 200)),
            Err(JobError::ShuttingDown) => assert!(grace.is_zero()),
            Err(other) => panic!("{other}"),
        }
        assert_eq!(scheduler.submit(job(&[1], 1).0), Err(SubmitError::ShuttingDown));
        assert!(scheduler.shutdown(grace).is_none(), "there is one engine");
        drop(engine);
    }
    let scheduler = start(path, usual());
    let runs = submit(&scheduler, &[1, 2, 3], 4000);
    drop(scheduler);
    assert!(matches!(runs.outcome().end, Err(JobError::ShuttingDown)));
}

#[test]
fn what_jobs_take_is_in_the_plan() {
    for path in fixtures() {
        let serving =
            Serving { sequences: 4, queue: 8, prefix: Bytes::mib(1), requests: Bytes::mib(2) };
        let options = EngineOptions { serving, ..usual(1, 0) };
        let one = support::engine(&path, usual(1, 0)).plan;
        let scheduler = start(&path, options);
        let prompts = prompts(scheduler.config().vocab);
        let heard: Vec<_> = prompts.iter().map(|p| submit(&scheduler, p, ANSWER)).collect();
        heard.iter().for_each(|heard| _ = heard.finished());
        let plan = scheduler.plan().clone();
        let term = |plan: &Plan, name: &str| {
            plan.terms.iter().find(|term| term.name == name).map_or(0, |term| term.bytes.0)
        };
        assert_eq!(term(&plan, "KV cache"), 4 * term(&one, "KV cache"));
        // The running one, where the next turn begins, and what is on its way to the cache.
        assert_eq!(term(&plan, "recurrent state"), 4 * 3 * term(&one, "recurrent state") / 2);
        assert_eq!(term(&plan, "prefix cache"), 1 << 20);
        let outside = ["process", "margin", "slots", "prefix cache"];
        let outside: u64 = outside.iter().map(|name| term(&plan, name)).sum();
        let mut engine = scheduler.shutdown(Duration::ZERO).unwrap();
        let allocated = engine.network.allocated_bytes();
        assert!(allocated <= plan.total.0 - outside, "{}", path.display());
    }
}

#[test]
#[ignore = "a measurement: of the demo model, or of MODEL=file under MEMORY=size with SLOTS=number"]
fn jobs_together_and_one_after_the_other() {
    let path = std::env::var_os("MODEL").map_or_else(demo, Into::into);
    let memory = std::env::var("MEMORY").map_or(Bytes::mib(72), |size| size.parse().unwrap());
    let slots = std::env::var("SLOTS").ok().map(|slots| slots.parse().unwrap());
    for (n_in, n_out) in [(64, 64), (256, 32)] {
        let mut expected: Vec<Vec<u32>> = Vec::new();
        for sequences in [1, 4] {
            let options = EngineOptions {
                budget: memory_plan::Budget::detect(Some(memory)).unwrap(),
                context: Some(512),
                pass_rows: None,
                threads: 2,
                slots,
                ..usual(sequences, 4)
            };
            let scheduler = start(&path, options);
            let vocab = scheduler.config().vocab;
            let began = std::time::Instant::now();
            let jobs = (0..4).map(|i| submit(&scheduler, &text(vocab, n_in, i), n_out));
            let heard: Vec<Heard> = jobs.collect();
            let tokens: Vec<Vec<u32>> = heard.iter().map(|heard| heard.outcome().tokens).collect();
            let seconds = began.elapsed().as_secs_f64();
            let stats = scheduler.stats();
            eprintln!(
                "4 prompts of {n_in} tokens, {n_out} tokens each, {sequences} at a time, {} slots: \
                 {seconds:.2} s, {:.1} tok/s, {:.1} MB read, {} passes over prompts, {} over answers",
                scheduler.plan().slots(),
                (4 * n_out) as f64 / seconds,
                stats.experts.store.payload_bytes as f64 / 1e6,
                stats.prompt_passes,
                stats.decode_passes,
            );
            assert!(expected.is_empty() || expected == tokens);
            expected = tokens;
        }
    }
}

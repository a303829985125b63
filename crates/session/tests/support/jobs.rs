//! Jobs as tests want them, and what they must give.
#![allow(dead_code, reason = "every test file uses some of it")]

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use compute::backend::{Activations, KvType};
use session::scheduler::{
    CancelToken, Choice, ChooseError, Chooser, Job, JobError, JobEvent, JobReport, Scheduler,
    SchedulerOptions, Serving,
};
use session::{Engine, EngineOptions, Prompt, Sequence};
use units::Bytes;

use crate::support::{self, FLASH, argmax, data, npy, options, words};

/// Tokens of an answer here.
pub(crate) const ANSWER: usize = 6;

/// One model of each family.
pub(crate) fn fixtures() -> Vec<PathBuf> {
    let names = ["qwen3_moe-k/kq.gguf", "qwen3_next-k/kq.gguf", "qwen3_5_moe-a/f32.gguf", FLASH];
    names.map(|name| data("fixtures/models").join(name)).into()
}

pub(crate) fn usual(sequences: u32, queue: u32) -> EngineOptions {
    let serving = Serving { sequences, queue, prefix: Bytes::ZERO, requests: Bytes::ZERO };
    EngineOptions {
        activations: Activations::Q8,
        kv: KvType::F16,
        context: Some(512),
        pass_rows: Some(128),
        logit_rows: 1,
        threads: 1,
        serving,
        ..options()
    }
}

pub(crate) fn start(path: &Path, options: EngineOptions) -> Scheduler {
    Scheduler::start(support::engine(path, options), SchedulerOptions::default()).unwrap()
}

/// `n` tokens for any model, not those of another `variant`.
pub(crate) fn text(vocab: u32, n: usize, variant: usize) -> Vec<u32> {
    let ids = words(&npy("ids_prose.npy"), u32::from_le_bytes);
    ids.iter().cycle().skip(17 * variant).take(n).map(|id| (id + variant as u32) % vocab).collect()
}

/// Logits as they came, by job.
pub(crate) type Logits = Arc<Mutex<Vec<f32>>>;

/// Takes the likeliest token, and remembers what it saw.
pub(crate) struct Greedy {
    pub(crate) seen: Logits,
    pub(crate) begun: bool,
}

impl Chooser for Greedy {
    fn begin(&mut self, prompt: &[u32]) {
        assert!(!self.begun && !prompt.is_empty(), "once, with the prompt");
        self.begun = true;
    }

    fn choose(&mut self, logits: &[f32]) -> Result<Choice, ChooseError> {
        assert!(self.begun);
        self.seen.lock().unwrap().extend_from_slice(logits);
        Ok(Choice::Token(argmax(logits).0 as u32))
    }
}

/// Chooses the same token again and again; after the first it waits until its gate is dropped, and everybody with it.
pub(crate) struct Gated {
    pub(crate) gate: Receiver<()>,
    pub(crate) chosen: usize,
}

impl Chooser for Gated {
    fn begin(&mut self, _: &[u32]) {}

    fn choose(&mut self, _: &[f32]) -> Result<Choice, ChooseError> {
        self.chosen += 1;
        if self.chosen == 2 {
            assert!(self.gate.recv().is_err(), "gates are dropped");
        }
        Ok(Choice::Token(1))
    }
}

/// A job that was submitted.
pub(crate) struct Heard {
    pub(crate) events: Receiver<JobEvent>,
    pub(crate) cancel: CancelToken,
    pub(crate) logits: Logits,
}

/// What became of it.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) tokens: Vec<u32>,
    pub(crate) end: Result<JobReport, JobError>,
}

impl Heard {
    pub(crate) fn next(&self) -> JobEvent {
        self.events.recv_timeout(Duration::from_mins(5)).expect("a job is always told its end")
    }

    /// Waits until it has given so many tokens.
    pub(crate) fn await_tokens(&self, n: usize) {
        for _ in 0..n {
            while !matches!(self.next(), JobEvent::Token { .. }) {}
        }
    }

    pub(crate) fn outcome(&self) -> Outcome {
        let mut tokens = Vec::new();
        let end = loop {
            match self.next() {
                JobEvent::Token { id } => tokens.push(id),
                JobEvent::Finished(report) => break Ok(report),
                JobEvent::Failed(error) => break Err(error),
                _ => {}
            }
        };
        assert!(self.events.recv().is_err(), "the end is the last event");
        Outcome { tokens, end }
    }

    pub(crate) fn finished(&self) -> JobReport {
        self.outcome().end.unwrap()
    }
}

pub(crate) fn job(prompt: &[u32], max_tokens: usize) -> (Job, Heard) {
    let logits = Logits::default();
    with_chooser(prompt, max_tokens, Greedy { seen: Arc::clone(&logits), begun: false }, logits)
}

pub(crate) fn with_chooser(
    prompt: &[u32],
    max_tokens: usize,
    chooser: impl Chooser + 'static,
    logits: Logits,
) -> (Job, Heard) {
    let (sender, events) = channel();
    let cancel = CancelToken::new();
    let job = Job {
        prompt: prompt.to_vec(),
        shared: 0,
        max_tokens,
        chooser: Box::new(chooser),
        events: Box::new(sender),
        cancel: cancel.clone(),
        patience: None,
    };
    (job, Heard { events, cancel, logits })
}

pub(crate) fn submit(scheduler: &Scheduler, prompt: &[u32], max_tokens: usize) -> Heard {
    let (job, heard) = job(prompt, max_tokens);
    scheduler.submit(job).unwrap();
    heard
}

/// Logits of every token of an answer, on an engine of its own.
pub(crate) fn alone(engine: &mut Engine, prompt: &[u32], max_tokens: usize) -> Vec<f32> {
    let mut sequence = Sequence::open(&mut engine.network).unwrap();
    let mut all = Vec::new();
    sequence
        .prefill(
            &mut engine.network,
            &Prompt::new(prompt, engine.plan.pass_rows as usize),
            &mut |_, row| {
                all.extend_from_slice(row);
            },
        )
        .unwrap();
    let vocab = all.len();
    for _ in 1..max_tokens {
        let token = argmax(&all[all.len() - vocab..]).0 as u32;
        sequence.step(&mut engine.network, token, &mut |row| all.extend_from_slice(row)).unwrap();
    }
    engine.network.reset(sequence.id());
    all
}

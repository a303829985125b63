//! A model of scripts, for tests: the demo model's tokenizer and template, and answers that a test writes down.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::{Duration, SystemTime};

use session::scheduler::{
    Choice, ChooseError, Job, JobError, JobEvent, JobReport, SchedulerStats, SubmitError,
};
use session::{ChatTemplate, Finish, OpenModel, Phase, SamplerConfig, Specials, Tokenizer};

use crate::engine::Runner;
use crate::grammar::{GrammarError, Grammars};
use crate::models::{Loaded, ModelInfo, Shelf};
use crate::prompt::Prompts;

struct Demo {
    tokenizer: Arc<Tokenizer>,
    template: String,
}

fn demo() -> &'static Demo {
    static DEMO: OnceLock<Demo> = OnceLock::new();
    DEMO.get_or_init(|| {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/sakia-demo-Q4_K_M.gguf");
        let opened = OpenModel::open(Path::new(path)).expect("the demo model is there");
        let template = opened.checkpoint.metadata.str("tokenizer.chat_template");
        let template = template.expect("it has a template").to_owned();
        Demo { tokenizer: Arc::new(opened.tokenizer), template }
    })
}

pub(crate) fn tokenizer() -> Arc<Tokenizer> {
    Arc::clone(&demo().tokenizer)
}

pub(crate) fn prompts() -> Prompts {
    let template = ChatTemplate::parse(&demo().template).expect("it is a template");
    Prompts::new(tokenizer(), template, 1024)
}

pub(crate) fn grammars() -> Arc<Result<Grammars, GrammarError>> {
    static GRAMMARS: OnceLock<Arc<Result<Grammars, GrammarError>>> = OnceLock::new();
    Arc::clone(GRAMMARS.get_or_init(|| Arc::new(Grammars::of(&tokenizer()))))
}

/// What the script says to a prompt.
#[derive(Debug, Clone)]
pub(crate) enum Line {
    /// These tokens, spelled as text, and the end.
    Says(&'static str),
    /// The same, without an end: it repeats the last token until it is stopped.
    Babbles(&'static str),
    /// These tokens, then an error of the disk.
    Breaks(&'static str),
    /// These tokens; then the engine panics, and with it all that it was at.
    Dies(&'static str),
    /// It waits in the queue until the engine panics, or the test lets go of it.
    Waits,
    /// Nothing is taken: the queue is full.
    Full,
    /// It reads the prompt until it is cancelled.
    Reads,
}

/// A runner whose answers are written down.
pub(crate) struct Script {
    lines: Mutex<VecDeque<Line>>,
    /// Prompts that came, decoded.
    pub(crate) prompts: Mutex<Vec<String>>,
    /// Tokens that were chosen.
    pub(crate) steps: AtomicUsize,
    /// Jobs that ended by being cancelled.
    pub(crate) cancelled: (Mutex<usize>, Condvar),
    /// The engine has panicked.
    pub(crate) is_dead: AtomicBool,
    /// Asking for counters panics.
    pub(crate) has_bug: AtomicBool,
}

/// What the engine says when it panics.
pub(crate) const PANIC: &str = "index out of bounds";

impl Script {
    pub(crate) fn new(lines: impl IntoIterator<Item = Line>) -> Arc<Self> {
        Arc::new(Self {
            lines: Mutex::new(lines.into_iter().collect()),
            prompts: Mutex::new(Vec::new()),
            steps: AtomicUsize::new(0),
            cancelled: (Mutex::new(0), Condvar::new()),
            is_dead: AtomicBool::new(false),
            has_bug: AtomicBool::new(false),
        })
    }

    /// Waits until so many jobs have been cancelled.
    pub(crate) fn wait_for_cancelled(&self, count: usize) {
        let (lock, changed) = &self.cancelled;
        let mut cancelled = lock.lock().unwrap();
        while *cancelled < count {
            cancelled = changed.wait(cancelled).unwrap();
        }
    }

    fn play(&self, line: &Line, job: &mut Job) -> Result<Finish, JobError> {
        let cancelled = || JobError::Cancelled { layer: None };
        let dead = || JobError::EngineStopped { message: PANIC.to_owned() };
        if matches!(line, Line::Waits) {
            while !self.is_dead.load(Ordering::Relaxed) {
                if job.cancel.is_cancelled() {
                    return Err(cancelled());
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            return Err(dead());
        }
        let prompt = job.prompt.len();
        let cached = prompt / 64 * 64;
        job.events.send(JobEvent::Started { prompt, cached });
        if matches!(line, Line::Reads) {
            loop {
                if job.cancel.is_cancelled() {
                    return Err(cancelled());
                }
                job.events.send(JobEvent::Prefilled { rows: 1, of: prompt });
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        job.events.send(JobEvent::Prefilled { rows: prompt - cached, of: prompt - cached });
        job.chooser.begin(&job.prompt);
        let tokenizer = tokenizer();
        let (text, ends) = match line {
            Line::Says(text) => (*text, true),
            Line::Babbles(text) | Line::Breaks(text) | Line::Dies(text) => (*text, false),
            Line::Full | Line::Reads | Line::Waits => ("", true),
        };
        let mut tokens = tokenizer.encode(text, Specials::Parse).expect("it can be encoded");
        if ends {
            tokens.push(tokenizer.end_tokens()[0]);
        }
        for step in 0..job.max_tokens {
            if job.cancel.is_cancelled() {
                return Err(cancelled());
            }
            if step >= tokens.len() && matches!(line, Line::Breaks(_)) {
                let message = "reading layer 3 failed: input/output error".to_owned();
                return Err(ChooseError::Other(message).into());
            }
            if step >= tokens.len() && matches!(line, Line::Dies(_)) {
                self.is_dead.store(true, Ordering::Relaxed);
                return Err(dead());
            }
            let token = tokens[step.min(tokens.len() - 1)];
            // The others are possible, so that a grammar has something to choose from.
            let mut logits = vec![-5.0; tokenizer.vocab_len()];
            logits[token as usize] = 20.0;
            self.steps.fetch_add(1, Ordering::Relaxed);
            match job.chooser.choose(&logits)? {
                Choice::Token(id) => job.events.send(JobEvent::Token { id }),
                Choice::Last(_, finish) | Choice::End(finish) => return Ok(finish),
            };
            if matches!(line, Line::Babbles(_)) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(Finish::Length)
    }
}

/// A script as a runner.
pub(crate) struct Player(pub(crate) Arc<Script>);

impl Runner for Player {
    fn submit(&self, mut job: Job) -> Result<(), SubmitError> {
        let script = Arc::clone(&self.0);
        if let Some(message) = self.stopped() {
            return Err(SubmitError::EngineStopped { message });
        }
        let line = script.lines.lock().unwrap().pop_front().expect("the script has no more lines");
        if matches!(line, Line::Full) {
            let retry_after = Duration::from_secs(7);
            return Err(SubmitError::QueueFull { waiting: 3, retry_after });
        }
        let prompt = tokenizer().decode(&job.prompt).expect("it can be decoded");
        script.prompts.lock().unwrap().push(prompt);
        std::thread::spawn(move || match script.play(&line, &mut job) {
            Ok(finish) => {
                let zero = Duration::ZERO;
                job.events.send(JobEvent::Finished(JobReport {
                    finish,
                    prompt: job.prompt.len(),
                    cached: 0,
                    generated: 0,
                    queued: zero,
                    prefill: Phase::default(),
                    decode: Phase::default(),
                }));
            }
            Err(error) => {
                let was_cancelled = matches!(error, JobError::Cancelled { .. });
                job.events.send(JobEvent::Failed(error));
                if was_cancelled {
                    *script.cancelled.0.lock().unwrap() += 1;
                    script.cancelled.1.notify_all();
                }
            }
        });
        Ok(())
    }

    fn stats(&self) -> SchedulerStats {
        assert!(!self.0.has_bug.load(Ordering::Relaxed), "a bug");
        let generated_tokens = self.0.steps.load(Ordering::Relaxed) as u64;
        SchedulerStats { generated_tokens, ..SchedulerStats::default() }
    }

    fn stopped(&self) -> Option<String> {
        self.0.is_dead.load(Ordering::Relaxed).then(|| PANIC.to_owned())
    }

    fn shutdown(&self, _: Duration) {}
}

/// A shelf of scripted models.
pub(crate) struct Scripts {
    script: Arc<Script>,
    /// Loads that were asked for.
    pub(crate) loads: Arc<AtomicUsize>,
    /// Loading fails.
    pub(crate) is_broken: AtomicBool,
    /// The next load waits here.
    pub(crate) gate: Mutex<Option<Receiver<()>>>,
}

/// The models of the shelf.
pub(crate) const DEMO: &str = "demo";
pub(crate) const OTHER: &str = "org/other:Q4_K_M";

impl Scripts {
    pub(crate) fn new(script: &Arc<Script>) -> Self {
        Self {
            script: Arc::clone(script),
            loads: Arc::default(),
            is_broken: AtomicBool::new(false),
            gate: Mutex::new(None),
        }
    }
}

impl Shelf for Scripts {
    fn list(&self) -> Vec<ModelInfo> {
        let info = |name: &str| ModelInfo {
            name: name.to_owned(),
            bytes: 58_000_000,
            modified: SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000),
            digest: None,
        };
        vec![info(DEMO), info(OTHER)]
    }

    fn load(&self, _: &str) -> Result<Loaded, String> {
        self.loads.fetch_add(1, Ordering::Relaxed);
        if self.is_broken.load(Ordering::Relaxed) {
            return Err("the file ends early".to_owned());
        }
        if let Some(gate) = self.gate.lock().unwrap().take() {
            gate.recv().expect("the test lets it go on");
        }
        Ok(Loaded {
            tokenizer: tokenizer(),
            prompts: prompts(),
            grammars: grammars(),
            runner: Box::new(Player(Arc::clone(&self.script))),
            context: 1024,
            patience: None,
            defaults: SamplerConfig { temperature: 0.0, ..SamplerConfig::default() },
            family: "qwen3next".to_owned(),
            parameters: 93_500_000,
            quantization: "Q4_K_M".to_owned(),
            memory_bytes: 44 << 20,
        })
    }
}

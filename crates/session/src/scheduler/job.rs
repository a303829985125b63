//! What somebody wants from the scheduler, and what they hear of it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use model::ForwardError;

use crate::generate::Finish;
use crate::sampler::{Sampler, SamplerError};
use crate::sequence::Phase;

/// Takes a job back. Clones mean the same job.
#[derive(Debug, Clone, Default)]
pub struct CancelToken(Arc<AtomicBool>);

impl CancelToken {
    /// A token of a job that is wanted.
    pub fn new() -> Self {
        Self::default()
    }

    /// From here on the job is not wanted. It ends at the next layer of a pass that is its own, and at the end of a pass
    /// that it shares with others.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether [`Self::cancel`] was called.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// What becomes of a row of logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// This token is given out, and run if more may follow.
    Token(u32),
    /// This token is given out, and the answer ends with it: a stop string is complete.
    Last(u32, Finish),
    /// The answer has ended without a further token.
    End(Finish),
}

/// Why a chooser cannot choose. The job fails with it.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ChooseError {
    /// The logits or the settings are not fit to choose from.
    #[error(transparent)]
    Sampler(#[from] SamplerError),
    /// Whatever else stands in the way, such as a grammar that allows no token.
    #[error("{0}")]
    Other(String),
}

/// Chooses the tokens of one job, on the engine's thread: what it takes to choose, all others wait for.
///
/// It keeps account of what it chose. A chooser that panics fails its job and nothing else.
pub trait Chooser: Send {
    /// The whole prompt, once, before the first choice.
    fn begin(&mut self, prompt: &[u32]);

    /// The token after everything so far. `logits`: `[vocab]`, finite.
    ///
    /// # Errors
    /// [`ChooseError`] ends the job.
    fn choose(&mut self, logits: &[f32]) -> Result<Choice, ChooseError>;
}

/// A sampler, and the tokens that end its answer.
#[derive(Debug)]
pub struct SamplerChooser {
    sampler: Sampler,
    end_tokens: Vec<u32>,
}

impl SamplerChooser {
    /// `end_tokens` are not given out.
    pub const fn new(sampler: Sampler, end_tokens: Vec<u32>) -> Self {
        Self { sampler, end_tokens }
    }
}

impl Chooser for SamplerChooser {
    fn begin(&mut self, prompt: &[u32]) {
        self.sampler.begin(prompt);
    }

    fn choose(&mut self, logits: &[f32]) -> Result<Choice, ChooseError> {
        let token = self.sampler.sample(logits)?;
        if self.end_tokens.contains(&token) {
            return Ok(Choice::End(Finish::EndOfText));
        }
        self.sampler.accept(token);
        Ok(Choice::Token(token))
    }
}

/// Where the events of a job go. It must not block: others wait for the engine's thread. One that panics counts as one
/// that nobody listens to.
pub trait EventSink: Send {
    /// Takes an event; `false` if nobody listens any more, which cancels the job.
    fn send(&mut self, event: JobEvent) -> bool;
}

impl EventSink for mpsc::Sender<JobEvent> {
    fn send(&mut self, event: JobEvent) -> bool {
        Self::send(self, event).is_ok()
    }
}

/// A full channel counts as one that nobody listens to.
impl EventSink for mpsc::SyncSender<JobEvent> {
    fn send(&mut self, event: JobEvent) -> bool {
        self.try_send(event).is_ok()
    }
}

/// A prompt to continue.
pub struct Job {
    /// All tokens, at least one.
    pub prompt: Vec<u32>,
    /// How many tokens at the beginning are likely to begin other prompts too: a system prompt and its tools. A hint
    /// for the prefix cache; 0 if that is not known.
    pub shared: usize,
    /// Most tokens of the answer. The context may end it before.
    pub max_tokens: usize,
    /// Who chooses them.
    pub chooser: Box<dyn Chooser>,
    /// Who hears of it.
    pub events: Box<dyn EventSink>,
    /// Takes it back.
    pub cancel: CancelToken,
    /// Longest time without progress once it runs, where a row read or a token given is progress. It says nothing about
    /// how long the job waits in the queue or takes in all.
    pub patience: Option<Duration>,
}

impl Job {
    /// Sends an event; whether anybody listens.
    pub(super) fn tell(&mut self, event: JobEvent) -> bool {
        let events = &mut self.events;
        // Whatever a panic leaves behind is the sink's own; its job is about to end.
        catch_unwind(AssertUnwindSafe(|| events.send(event))).unwrap_or(false)
    }
}

/// Names a job of one scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JobId(pub u64);

/// What a job cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JobReport {
    /// Why it ended.
    pub finish: Finish,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Of those, not read again, since their state was kept.
    pub cached: usize,
    /// Tokens given out.
    pub generated: usize,
    /// Time in the queue.
    pub queued: Duration,
    /// From the first row to the first token: `tokens` are this job's own, what moved is that of all passes that it
    /// took part in, whoever else did.
    pub prefill: Phase,
    /// The same of the tokens after the first.
    pub decode: Phase,
}

/// News of a job, in this order: queued, started, prefilled any number of times, tokens, and one of the last two, which
/// is the last.
#[derive(Debug, Clone)]
#[expect(clippy::large_enum_variant, reason = "the large one is sent once a job, at its end")]
pub enum JobEvent {
    /// It waits, behind so many others.
    Queued {
        /// Jobs that are before it.
        ahead: usize,
    },
    /// It runs.
    Started {
        /// Tokens of its prompt.
        prompt: usize,
        /// Of those, not read again.
        cached: usize,
    },
    /// A part of the prompt was read.
    Prefilled {
        /// Rows that were read so far, without those that were cached.
        rows: usize,
        /// Of so many.
        of: usize,
    },
    /// A token of the answer.
    Token {
        /// Its id.
        id: u32,
    },
    /// The answer is complete.
    Finished(JobReport),
    /// It is not, and will not be.
    Failed(JobError),
}

/// Why a job has no answer, or not all of it.
#[derive(Debug, Clone, thiserror::Error)]
pub enum JobError {
    /// It was taken back, or nobody listens.
    #[error("the request was cancelled")]
    Cancelled {
        /// The layer that did not run any more, if a pass was cut for it.
        layer: Option<u32>,
    },
    /// Nothing came of it for too long.
    #[error("no progress within {patience:?}, the longest that this request may wait for any")]
    NoProgress {
        /// What it allowed.
        patience: Duration,
        /// The layer that did not run any more, if a pass was cut for it.
        layer: Option<u32>,
    },
    /// The engine is being shut down.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// The pass that it took part in failed.
    #[error(transparent)]
    Forward(Arc<ForwardError>),
    /// Its chooser gave up.
    #[error(transparent)]
    Chooser(#[from] ChooseError),
    /// Its chooser panicked.
    #[error("choosing a token failed: {message}; this is a bug")]
    ChooserPanicked {
        /// What it said.
        message: String,
    },
    /// The engine panicked and is gone.
    #[error("the engine stopped: {message}; this is a bug")]
    EngineStopped {
        /// What it said.
        message: String,
    },
}

//! The scheduler as others see it.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use checkpoint::ModelConfig;
use memory_plan::Plan;

use super::job::{Job, JobId};
use super::shared::Shared;
use super::stats::SchedulerStats;
use super::worker::Worker;
use super::{SchedulerOptions, Serving, StartError, SubmitError};
use crate::engine::Engine;
use crate::generate::PromptError;
use crate::tokenizer::Tokenizer;

/// An engine that serves jobs. Dropping it cuts them and waits for the engine's thread.
pub struct Scheduler {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<Option<Engine>>>>,
    serving: Serving,
    plan: Plan,
    config: ModelConfig,
    tokenizer: Arc<Tokenizer>,
}

impl Scheduler {
    /// Opens the engine's sequences and starts its thread.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start(engine: Engine, options: SchedulerOptions) -> Result<Self, StartError> {
        let serving = engine.options.serving;
        let (plan, config) = (engine.plan.clone(), engine.network.config().clone());
        let tokenizer = Arc::clone(&engine.tokenizer);
        let shared = Arc::new(Shared::new(serving));
        let worker = Worker::new(engine, options, Arc::clone(&shared))?;
        let thread = std::thread::Builder::new().name("engine".to_owned());
        let thread = thread.spawn(move || worker.run()).map_err(StartError::Thread)?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)), serving, plan, config, tokenizer })
    }

    /// Puts a job into the queue. Its events tell the rest.
    ///
    /// # Errors
    /// [`SubmitError`]; the job is dropped.
    pub fn submit(&self, job: Job) -> Result<JobId, SubmitError> {
        PromptError::check(job.prompt.len(), self.context_tokens())?;
        let vocab = self.config.vocab;
        if let Some(&token) = job.prompt.iter().find(|token| **token >= vocab) {
            return Err(SubmitError::TokenOutOfRange { token, vocab });
        }
        self.shared.submit(job)
    }

    /// What the engine said when it panicked, if it did. It is gone then, its jobs were told, and its memory is not given
    /// back: nobody knows what it was doing.
    pub fn stopped(&self) -> Option<String> {
        self.shared.stopped()
    }

    /// How it goes. Numbers are those after the last pass, but for the queue and for layers.
    pub fn stats(&self) -> SchedulerStats {
        self.shared.stats()
    }

    /// Positions of a sequence: prompt and answer together.
    pub const fn context_tokens(&self) -> usize {
        self.plan.context as usize
    }

    /// What was reserved for jobs.
    pub const fn serving(&self) -> Serving {
        self.serving
    }

    /// What the engine promised.
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// What the model is.
    pub const fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Text to ids and back.
    pub const fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Takes no more jobs, fails those that wait, lets those that run go on for `grace`, and cuts them at the next layer
    /// then. Returns when the engine's thread has ended, with the engine for whoever asks first, unless it panicked.
    pub fn shutdown(&self, grace: Duration) -> Option<Engine> {
        self.shared.close(grace);
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        // A panic of the engine was caught on its thread, and its jobs were told.
        thread.take().and_then(|thread| thread.join().ok().flatten())
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        self.shutdown(Duration::ZERO);
    }
}

//! Which models there are, and the one that is loaded.
//!
//! The budget is one for the whole process, so one model is loaded at a time: when it is asked for, until it has been idle
//! for as long as it is kept, or another one is wanted and nobody is being answered. A request names a model; it never
//! names a file.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use session::scheduler::SchedulerStats;
use session::{SamplerConfig, Tokenizer};
use tokio::sync::OwnedMutexGuard;

use crate::chat::KeepAlive;
use crate::engine::Runner;
use crate::error::{ApiError, ErrorKind};
use crate::grammar::{GrammarError, Grammars};
use crate::prompt::Prompts;

/// Seconds after which a client may ask again for a model while another one answers.
const SWITCH_RETRY_S: u32 = 10;

/// A model that can be had.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelInfo {
    /// What requests call it.
    pub name: String,
    /// Of its files.
    pub bytes: u64,
    /// When it came here.
    pub modified: SystemTime,
    /// SHA-256 of its (first) file, if known.
    pub digest: Option<String>,
}

/// Where models come from.
pub trait Shelf: Send + Sync {
    /// All that there are. Reads small files at most.
    fn list(&self) -> Vec<ModelInfo>;

    /// Makes one ready. May take minutes; what went wrong is told to whoever asked.
    ///
    /// # Errors
    /// In the words of whatever failed.
    fn load(&self, name: &str) -> Result<Loaded, String>;
}

/// A model that is loaded.
pub struct Loaded {
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) prompts: Prompts,
    pub(crate) grammars: Arc<Result<Grammars, GrammarError>>,
    pub(crate) runner: Box<dyn Runner>,
    /// Positions that a request may have.
    pub(crate) context: usize,
    /// Longest time without progress.
    pub(crate) patience: Option<Duration>,
    pub(crate) defaults: SamplerConfig,
    pub(crate) family: String,
    pub(crate) parameters: u64,
    pub(crate) quantization: String,
    /// What its plan promises.
    pub(crate) memory_bytes: u64,
}

/// The one that is loaded.
struct Current {
    name: String,
    model: Arc<Loaded>,
    /// Answers that are being made.
    active: usize,
    keep: KeepAlive,
    idle_since: Instant,
}

impl Current {
    /// When it is to be unloaded, if nothing happens.
    fn expires(&self) -> Option<Instant> {
        match self.keep {
            KeepAlive::Forever => None,
            KeepAlive::For(time) => self.idle_since.checked_add(time),
        }
    }
}

/// What is told of the loaded model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Running {
    pub(crate) name: String,
    pub(crate) memory_bytes: u64,
    /// How long until it is unloaded; `None` if it stays.
    pub(crate) left: Option<Duration>,
    pub(crate) family: String,
    pub(crate) parameters: u64,
    pub(crate) quantization: String,
    pub(crate) context: usize,
    pub(crate) has_tools: bool,
    pub(crate) can_think: bool,
    pub(crate) stats: SchedulerStats,
}

/// Models by name.
pub(crate) struct Models {
    shelf: Arc<dyn Shelf>,
    /// For requests that name none.
    default: Option<String>,
    keep: KeepAlive,
    current: Mutex<Option<Current>>,
    /// Held while one is loaded or unloaded.
    loading: Arc<tokio::sync::Mutex<()>>,
    last_use: Mutex<Instant>,
}

impl Models {
    pub(crate) fn new(shelf: Arc<dyn Shelf>, default: Option<String>, keep: KeepAlive) -> Self {
        Self {
            shelf,
            default,
            keep,
            current: Mutex::new(None),
            loading: Arc::default(),
            last_use: Mutex::new(Instant::now()),
        }
    }

    /// All models.
    pub(crate) async fn list(&self) -> Vec<ModelInfo> {
        let shelf = Arc::clone(&self.shelf);
        tokio::task::spawn_blocking(move || shelf.list()).await.unwrap_or_default()
    }

    /// The model that a request means.
    pub(crate) async fn find(&self, name: Option<&str>) -> Result<ModelInfo, ApiError> {
        let list = self.list().await;
        let name = name.filter(|name| !name.is_empty() && *name != "default");
        let Some(wanted) = name.or(self.default.as_deref()) else {
            return match <[ModelInfo; 1]>::try_from(list) {
                Ok([only]) => Ok(only),
                Err(list) => Err(missing("no model is named", &list).at("model")),
            };
        };
        // Ollama's clients add a tag to names that have none.
        let bare = wanted.strip_suffix(":latest").unwrap_or(wanted);
        let found = list.iter().find(|info| info.name == wanted || info.name == bare);
        found.cloned().ok_or_else(|| {
            let shown: String = wanted.chars().take(100).collect();
            missing(&format!("there is no model `{shown}`"), &list).at("model")
        })
    }

    /// A model for an answer; loads it if need be.
    pub(crate) async fn lease(
        self: &Arc<Self>,
        name: Option<&str>,
        keep: Option<KeepAlive>,
    ) -> Result<Lease, ApiError> {
        let name = self.find(name).await?.name;
        if let Some(lease) = self.lease_current(&name, keep)? {
            return Ok(lease);
        }
        let loading = Arc::clone(&self.loading).lock_owned().await;
        if let Some(lease) = self.lease_current(&name, keep)? {
            return Ok(lease);
        }
        let models = Arc::clone(self);
        // Whoever asked may go away; what was begun for them is not to be begun again beside itself.
        let loaded = tokio::spawn(async move {
            let _loading = loading;
            models.load(&name, keep).await
        });
        loaded.await.unwrap_or_else(|error| Err(ApiError::internal(format!("loading: {error}"))))
    }

    /// Loads a model in the place of another one.
    async fn load(
        self: &Arc<Self>,
        name: &str,
        keep: Option<KeepAlive>,
    ) -> Result<Lease, ApiError> {
        self.unload_other().await?;
        let (shelf, wanted) = (Arc::clone(&self.shelf), name.to_owned());
        let loaded = tokio::task::spawn_blocking(move || shelf.load(&wanted)).await;
        let loaded = loaded.map_err(|error| error.to_string()).and_then(|loaded| loaded);
        let model = loaded.map_err(|error| {
            ApiError::internal(format!("`{name}` cannot be loaded: {error}")).code("load_failed")
        })?;
        *self.current() = Some(Current {
            name: name.to_owned(),
            model: Arc::new(model),
            active: 0,
            keep: self.keep,
            idle_since: Instant::now(),
        });
        self.lease_current(name, keep)?
            .ok_or_else(|| ApiError::internal(format!("`{name}` was unloaded at once")))
    }

    /// The loaded model, if it is the one that is wanted.
    fn lease_current(
        self: &Arc<Self>,
        name: &str,
        keep: Option<KeepAlive>,
    ) -> Result<Option<Lease>, ApiError> {
        *lock(&self.last_use) = Instant::now();
        let mut current = self.current();
        let Some(current) = current.as_mut() else { return Ok(None) };
        if let Some(message) = current.model.runner.stopped() {
            return Err(engine_stopped(&message));
        }
        if current.name != name {
            return Ok(None);
        }
        current.active += 1;
        if let Some(keep) = keep {
            current.keep = keep;
        }
        let (models, model) = (Arc::clone(self), Arc::clone(&current.model));
        Ok(Some(Lease { models, model, name: name.to_owned() }))
    }

    /// What the engine said when it panicked, if it did.
    pub(crate) fn failure(&self) -> Option<String> {
        self.current().as_ref()?.model.runner.stopped()
    }

    /// Makes room for another model, if nobody is being answered.
    async fn unload_other(&self) -> Result<(), ApiError> {
        let taken = {
            let mut current = self.current();
            if let Some(current) = current.as_ref().filter(|current| current.active > 0) {
                let message = format!(
                    "`{}` is answering, and one model is loaded at a time; try again",
                    current.name
                );
                return Err(ApiError::new(ErrorKind::Busy(SWITCH_RETRY_S), message));
            }
            current.take()
        };
        give_back(taken, None).await;
        Ok(())
    }

    /// Unloads a model now, if nobody is being answered.
    pub(crate) async fn unload(&self, name: &str) {
        let loading = Arc::clone(&self.loading).lock_owned().await;
        let taken = self.take_idle(|current| current.name == name);
        give_back(taken, Some(loading)).await;
    }

    /// Unloads what has been idle for long enough. Called now and then.
    pub(crate) async fn tend(&self) {
        let Ok(loading) = Arc::clone(&self.loading).try_lock_owned() else { return };
        let now = Instant::now();
        let taken =
            self.take_idle(|current| current.expires().is_some_and(|expires| expires <= now));
        give_back(taken, Some(loading)).await;
    }

    /// Takes the model to unload it, if nobody is being answered. One whose engine panicked stays: its memory does too.
    fn take_idle(&self, is_wanted: impl Fn(&Current) -> bool) -> Option<Current> {
        let mut current = self.current();
        let may_go = |current: &Current| {
            current.active == 0 && current.model.runner.stopped().is_none() && is_wanted(current)
        };
        if current.as_ref().is_some_and(may_go) { current.take() } else { None }
    }

    /// How long nobody has asked for anything.
    pub(crate) fn idle(&self) -> Duration {
        let is_active = self.current().as_ref().is_some_and(|current| current.active > 0);
        if is_active || self.loading.try_lock().is_err() {
            Duration::ZERO
        } else {
            lock(&self.last_use).elapsed()
        }
    }

    /// What is told of the loaded model; never waits for it.
    pub(crate) fn running(&self) -> Option<Running> {
        let current = self.current();
        let current = current.as_ref()?;
        let model = &current.model;
        let now = Instant::now();
        let left = |expires: Instant| expires.saturating_duration_since(now);
        Some(Running {
            name: current.name.clone(),
            memory_bytes: model.memory_bytes,
            left: current.expires().map(left),
            family: model.family.clone(),
            parameters: model.parameters,
            quantization: model.quantization.clone(),
            context: model.context,
            has_tools: model.prompts.call_form().is_some(),
            can_think: model.prompts.can_think(),
            stats: model.runner.stats(),
        })
    }

    /// Ends what runs within a bound, and unloads.
    pub(crate) async fn shutdown(&self, bound: Duration) {
        let taken = self.current().take();
        let end = move || {
            if let Some(current) = taken {
                current.model.runner.shutdown(bound);
            }
        };
        // A panic there is the end as well.
        let _ = tokio::task::spawn_blocking(end).await;
    }

    fn current(&self) -> MutexGuard<'_, Option<Current>> {
        lock(&self.current)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Gives a model's memory back, which takes a while, before anybody else may load or unload.
async fn give_back(current: Option<Current>, loading: Option<OwnedMutexGuard<()>>) {
    let Some(current) = current else { return };
    let give_back = move || {
        // Who was answered last lets go of it within moments; its memory is free when all have.
        while Arc::strong_count(&current.model) > 1 {
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(current);
        drop(loading);
    };
    // A panic there has nobody to tell.
    let _ = tokio::task::spawn_blocking(give_back).await;
}

/// No model will answer any more: the server is about to end.
pub(crate) fn engine_stopped(message: &str) -> ApiError {
    ApiError::internal(format!("the engine stopped: {message}; this is a bug, and the server ends"))
        .code("engine_stopped")
}

fn missing(problem: &str, list: &[ModelInfo]) -> ApiError {
    const SHOWN: usize = 20;
    let mut names: Vec<&str> = list.iter().take(SHOWN).map(|info| info.name.as_str()).collect();
    if list.len() > SHOWN {
        names.push("...");
    }
    let message = if names.is_empty() {
        format!("{problem}, and none is here; `sakia pull org/name` gets one")
    } else {
        format!("{problem}; there are: {}", names.join(", "))
    };
    ApiError::new(ErrorKind::NotFound, message).code("model_not_found")
}

/// A loaded model that stays loaded while an answer is made.
pub(crate) struct Lease {
    models: Arc<Models>,
    pub(crate) model: Arc<Loaded>,
    pub(crate) name: String,
}

impl Drop for Lease {
    fn drop(&mut self) {
        *lock(&self.models.last_use) = Instant::now();
        let mut current = self.models.current();
        let own = |current: &&mut Current| Arc::ptr_eq(&current.model, &self.model);
        if let Some(current) = current.as_mut().filter(own) {
            current.active -= 1;
            current.idle_since = Instant::now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{DEMO, OTHER, Script, Scripts};
    use std::sync::atomic::Ordering;

    fn models(keep: KeepAlive) -> (Arc<Models>, Arc<Scripts>) {
        let shelf = Arc::new(Scripts::new(&Script::new([])));
        let default = Some(DEMO.to_owned());
        (Arc::new(Models::new(Arc::clone(&shelf) as Arc<dyn Shelf>, default, keep)), shelf)
    }

    fn run<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    #[test]
    fn a_model_is_loaded_when_it_is_asked_for_and_once() {
        let (models, shelf) = models(KeepAlive::Forever);
        run(async {
            assert_eq!(models.running(), None);
            let first = models.lease(None, None).await.unwrap();
            let second = models.lease(Some("demo:latest"), None).await.unwrap();
            assert!(Arc::ptr_eq(&first.model, &second.model));
            assert_eq!(shelf.loads.load(Ordering::Relaxed), 1);
            let busy = models.lease(Some(OTHER), None).await.err().unwrap();
            assert_eq!(busy.kind, ErrorKind::Busy(SWITCH_RETRY_S));
            drop((first, second));
            assert_eq!(models.lease(Some(OTHER), None).await.unwrap().name, OTHER);
        });
    }

    #[test]
    fn what_somebody_began_to_load_is_loaded_once_even_if_they_go_away() {
        let (models, shelf) = models(KeepAlive::Forever);
        run(async {
            let (go_on, gate) = std::sync::mpsc::channel();
            *shelf.gate.lock().unwrap() = Some(gate);
            {
                let mut first = Box::pin(models.lease(None, None));
                while shelf.loads.load(Ordering::Relaxed) == 0 {
                    let tick = tokio::time::timeout(Duration::from_millis(1), &mut first);
                    assert!(tick.await.is_err(), "it is loading");
                }
            }
            assert_eq!(models.idle(), Duration::ZERO, "it is still loading");
            go_on.send(()).unwrap();
            drop(models.lease(None, None).await.unwrap());
            assert_eq!(shelf.loads.load(Ordering::Relaxed), 1);
        });
    }

    #[test]
    fn an_idle_model_is_unloaded_and_a_busy_one_is_not() {
        let (models, _) = models(KeepAlive::Forever);
        run(async {
            let now = Some(KeepAlive::For(Duration::ZERO));
            let lease = models.lease(None, now).await.unwrap();
            models.tend().await;
            assert!(models.running().is_some(), "it is being used");
            drop(lease);
            models.tend().await;
            assert_eq!(models.running(), None);
            drop(models.lease(None, None).await.unwrap());
            models.tend().await;
            assert!(models.running().is_some(), "it is kept for ever");
        });
    }

    #[test]
    fn a_name_that_is_no_model_is_refused_and_never_a_path() {
        let (models, shelf) = models(KeepAlive::Forever);
        run(async {
            for name in ["gpt-4", "../demo", "/etc/passwd", "demo/", "DEMO"] {
                let error = models.lease(Some(name), None).await.err().unwrap();
                assert_eq!(error.kind, ErrorKind::NotFound, "{name}");
                assert!(error.message.contains("there are: demo, org/other"), "{}", error.message);
            }
            shelf.is_broken.store(true, Ordering::Relaxed);
            let error = models.lease(None, None).await.err().unwrap();
            assert_eq!(error.message, "`demo` cannot be loaded: the file ends early");
        });
    }
}

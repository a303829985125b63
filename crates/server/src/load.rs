//! From an opened model to one that answers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use session::scheduler::{Scheduler, SchedulerOptions, StartError};
use session::{
    ChatTemplate, Engine, EngineError, EngineOptions, OpenModel, SamplerConfig, SamplerError,
    TemplateError,
};

use crate::grammar::Grammars;
use crate::models::Loaded;
use crate::prompt::Prompts;

/// How a model is made ready.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// Of the engine.
    pub engine: EngineOptions,
    /// Of the scheduler.
    pub scheduler: SchedulerOptions,
    /// Settings that requests change; the model's own when absent.
    pub sampler: Option<SamplerConfig>,
    /// Longest time without progress of a request that runs.
    pub patience: Option<Duration>,
}

/// Why a model cannot answer.
#[derive(Debug, thiserror::Error)]
pub enum LoadProblem {
    /// It cannot be loaded.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// It cannot be served.
    #[error(transparent)]
    Start(#[from] StartError),
    /// Its template cannot be used.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// Its own settings make no sense.
    #[error(transparent)]
    Sampler(#[from] SamplerError),
}

/// Loads a model.
///
/// The vocabulary's grammar comes first: what it takes is then part of the process that the plan measures.
///
/// # Errors
/// [`LoadProblem`].
pub fn load(
    opened: OpenModel,
    options: LoadOptions,
    progress: &mut dyn FnMut(u64),
) -> Result<Loaded, LoadProblem> {
    let grammars = Arc::new(Grammars::of(&opened.tokenizer));
    let tokenizer = &opened.tokenizer;
    let token = |id| tokenizer.decode(&[id]).ok();
    let metadata = &opened.checkpoint.metadata;
    let template = ChatTemplate::from_metadata(metadata, token)?.with_clock(SystemTime::now);
    let defaults = options.sampler.unwrap_or_else(|| SamplerConfig::from_metadata(metadata));
    defaults.check()?;
    let family = metadata.str("general.architecture").unwrap_or("unknown").to_owned();
    let tensors = opened.checkpoint.directory.iter();
    let parameters = tensors.map(|tensor| tensor.shape.iter().product::<u64>()).sum();
    let quantization = quantization(&opened);
    let engine = Engine::load(opened, options.engine, progress)?;
    let (tokenizer, memory) = (Arc::clone(&engine.tokenizer), engine.plan.budget.bytes);
    let scheduler = Scheduler::start(engine, options.scheduler)?;
    let context = scheduler.context_tokens();
    Ok(Loaded {
        prompts: Prompts::new(Arc::clone(&tokenizer), template, context),
        tokenizer,
        grammars,
        context,
        patience: options.patience,
        runner: Box::new(scheduler),
        defaults,
        family,
        parameters,
        quantization,
        memory_bytes: memory.0,
    })
}

/// The block type that most bytes have.
fn quantization(opened: &OpenModel) -> String {
    let mut bytes: BTreeMap<&'static str, u64> = BTreeMap::new();
    for tensor in opened.checkpoint.directory.iter() {
        *bytes.entry(tensor.block_type.name()).or_default() += tensor.bytes;
    }
    let most = bytes.into_iter().max_by_key(|(_, bytes)| *bytes);
    most.map_or_else(String::new, |(name, _)| name.to_owned())
}

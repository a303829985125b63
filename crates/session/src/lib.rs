//! Text in, text out: opens a model under a budget, reads prompts, generates tokens, keeps the record of it.
//!
//! Start at [`Engine::load`] and [`generate()`]; several people at once are served by [`scheduler`].

mod engine;
pub mod fit;
pub mod fitted;
mod generate;
pub mod hot_set;
mod mirrors;
mod parity;
mod reads;
pub mod receipt;
mod replay;
mod roofline;
mod sampler;
pub mod scheduler;
mod sequence;
mod slots;
mod speculate;
mod stream;
mod synthetic;
mod template;
mod tokenizer;
mod trace;

pub use engine::{BackendKind, DEFAULT_CONTEXT, Engine, EngineError, EngineOptions, OpenModel};
pub use fit::{FitError, FitPlan, FitReport};
pub use fitted::FittedError;
pub use generate::{
    Finish, Forced, ForcedOutcome, GenerateError, Generated, Limits, LogitsRun, PromptError,
    generate,
};
pub use hot_set::{HotSet, HotSetError};
pub use mirrors::{MirrorError, MirrorOptions};
pub use parity::{ExpertKind, Parity, ParityError, ParityResult};
pub use reads::{Reads, Unknown};
pub use receipt::Receipt;
pub use replay::{Pace, PoolTime, Replay, ReplayError, ReplayPolicy, Tally, replay, time_pool};
pub use roofline::{Roofline, Wall};
pub use sampler::{Sampler, SamplerConfig, SamplerError};
pub use sequence::{GRID, Phase, Prompt, Sequence};
pub use speculate::{
    Depth, Drafter, MOST_GUESSES, Speculation, SpeculationCounters, SpeculationOptions,
};
pub use stream::{TextStream, complete_prefix, overlap};
pub use synthetic::{Synthetic, SyntheticError};
pub use template::{ChatTemplate, Message, RenderOptions, TemplateError};
pub use tokenizer::{Specials, Tokenizer, TokenizerError};
pub use trace::{MAX_TRACE_BYTES, Trace, TraceError};

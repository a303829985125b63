//! From a request to answers on their way.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use session::scheduler::{
    CancelToken, Choice, ChooseError, Chooser, EventSink, Job, JobError, JobEvent, SubmitError,
};
use session::{Finish as Ended, PromptError, Sampler};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::answerer::{Answerer, Event, Sink, Thought, begin_of};
use crate::chat::{Ask, Call, Finish, Input, Thinking, TokenChance, ToolChoice, Usage};
use crate::error::{ApiError, ErrorKind};
use crate::grammar::{CallForm, Grammar, Rule};
use crate::metrics::Metrics;
use crate::models::{Lease, Loaded, engine_stopped};
use crate::prompt::Prompt;
use crate::room::Held;
use crate::splitter::{Begin, Piece, Splitter};

/// Seconds after which a client may ask again where this server was: another one may have taken its place.
const SHUTDOWN_RETRY_S: u32 = 5;

/// Answers that are being made. Dropping it cancels them.
pub(crate) struct Generation {
    /// Which answer, and what happened to it. There are no more events than tokens, so nothing needs to wait.
    pub(crate) events: UnboundedReceiver<(usize, Event)>,
    pub(crate) model: String,
    pub(crate) prompt_tokens: usize,
    /// Of the random numbers of the first answer.
    pub(crate) seed: u64,
    pub(crate) n: usize,
    /// Seconds since 1970.
    pub(crate) created: u64,
    cancel: CancelToken,
    metrics: Arc<Metrics>,
    _held: Held,
    _lease: Lease,
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.cancel.cancel();
        self.metrics.finished();
    }
}

/// An answer, whole.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Answer {
    pub(crate) reasoning: String,
    pub(crate) text: String,
    pub(crate) calls: Vec<Call>,
    pub(crate) chances: Vec<TokenChance>,
    pub(crate) finish: Finish,
    pub(crate) usage: Usage,
    /// When its first token came.
    pub(crate) first: Option<Instant>,
}

/// What a request made of a model, ready to be run.
struct Prepared {
    prompt: Prompt,
    begin: Begin,
    /// Whether the answer is JSON of a format.
    is_json: bool,
    /// What the answer has to be, from its first token of text on.
    grammar: Option<Grammar>,
    /// What a call has to be, where tools are strict and the model may call or not.
    strict: Option<Grammar>,
    /// Memory of either.
    grammar_bytes: usize,
    max_tokens: usize,
}

/// Starts answers. Renders, encodes and compiles, so it may take a while: call it where that is allowed.
pub(crate) fn start(
    lease: Lease,
    ask: &Ask,
    metrics: &Arc<Metrics>,
    (mut held, kept_bytes): (Held, usize),
) -> Result<Generation, ApiError> {
    let model = Arc::clone(&lease.model);
    let prepared = prepare(&model, ask, &mut held)?;
    held.shrink_to(kept_bytes + prepared.grammar_bytes);
    held.grow_by(ask.n * prepared.grammar_bytes)?;
    let (sender, events) = unbounded_channel();
    let config = ask.sampling.over(&model.defaults);
    let seed = config.seed;
    let cancel = CancelToken::new();
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    metrics.started();
    let generation = Generation {
        events,
        model: lease.name.clone(),
        prompt_tokens: prepared.prompt.tokens.len(),
        seed,
        n: ask.n,
        created,
        cancel: cancel.clone(),
        metrics: Arc::clone(metrics),
        _held: held,
        _lease: lease,
    };
    for index in 0..ask.n {
        let config =
            session::SamplerConfig { seed: seed.wrapping_add(index as u64), ..config.clone() };
        let sampler = Sampler::new(config).map_err(|error| {
            ApiError::invalid(error.to_string().trim_start_matches("--").to_owned())
        })?;
        let sender = sender.clone();
        let counted = Arc::clone(metrics);
        let sink: Sink = Arc::new(move |event| {
            counted.count(&event);
            // Nobody listens any more: the job is being cancelled.
            let _ = sender.send((index, event));
        });
        let answerer = answerer(&model, ask, &prepared, sampler, sink)?;
        let job = job(&model, &prepared, answerer, cancel.clone());
        // What was taken before is cancelled as the generation goes.
        model.runner.submit(job).map_err(|error| refused(&error))?;
    }
    Ok(generation)
}

fn prepare(model: &Loaded, ask: &Ask, held: &mut Held) -> Result<Prepared, ApiError> {
    let prompt = model.prompts.of(ask)?;
    let (found, most) = (prompt.tokens.len(), model.context);
    // One is left for an answer.
    PromptError::check(found, most.saturating_sub(1)).map_err(|error| prompt_error(&error))?;
    let begin = match ask.input {
        Input::Chat(_) => begin_of(&prompt.tail, ask.continues),
        Input::Text(_) | Input::Tokens(_) => Begin::Text,
    };
    let left = most - found;
    let max_tokens = ask.max_tokens.unwrap_or(left).min(left);
    let rule = rule(model, ask);
    let is_json = matches!(rule, Some(Rule::Json(_)));
    let strict = rule.is_none().then(|| strict_rule(model, ask, begin)).flatten();
    // There is one of them at most.
    let grammar_bytes = rule.as_ref().or(strict.as_ref()).map_or(0, Rule::grammar_bytes);
    held.grow_by(grammar_bytes)?;
    let compiled = |rule: Option<Rule>| rule.map(|rule| compile(model, &rule)).transpose();
    let (grammar, strict) = (compiled(rule)?, compiled(strict)?);
    Ok(Prepared { prompt, begin, is_json, grammar, strict, grammar_bytes, max_tokens })
}

/// Whether calls are looked for in an answer.
fn finds_calls(ask: &Ask, begin: Begin) -> bool {
    ask.tool_choice != ToolChoice::None && begin != Begin::Text
}

/// What calls have to be that the model is free to make.
fn strict_rule(model: &Loaded, ask: &Ask, begin: Begin) -> Option<Rule> {
    let is_strict = finds_calls(ask, begin) && ask.tools.iter().any(|tool| tool.strict);
    let form = model.prompts.call_form().unwrap_or(CallForm::Json);
    is_strict.then(|| Rule::Call { tools: ask.tools.clone(), form })
}

/// What the answer has to look like.
fn rule(model: &Loaded, ask: &Ask) -> Option<Rule> {
    let form = model.prompts.call_form().unwrap_or(CallForm::Json);
    let parallel = ask.parallel;
    match &ask.tool_choice {
        ToolChoice::Required => Some(Rule::Calls { tools: ask.tools.clone(), form, parallel }),
        ToolChoice::Named(name) => {
            let tools = ask.tools.iter().filter(|tool| tool.name == *name).cloned().collect();
            Some(Rule::Calls { tools, form, parallel: false })
        }
        ToolChoice::Auto | ToolChoice::None => Rule::of(&ask.format),
    }
}

fn answerer(
    model: &Loaded,
    ask: &Ask,
    prepared: &Prepared,
    sampler: Sampler,
    sink: Sink,
) -> Result<Answerer, ApiError> {
    // JSON that was asked for is text, whatever tags it may spell.
    let has_calls = finds_calls(ask, prepared.begin) && !prepared.is_json;
    let tools = if has_calls { ask.tools.clone() } else { Vec::new() };
    let begin = match prepared.begin {
        Begin::Either if prepared.grammar.is_some() => Begin::Text,
        begin => begin,
    };
    let splitter = Splitter::new(begin, tools, &ask.stop);
    let mut answerer = Answerer::new(Arc::clone(&model.tokenizer), sampler, splitter, sink);
    answerer.bias = ask.sampling.logit_bias.iter().map(|(id, bias)| (*id, *bias)).collect();
    answerer.logprobs = ask.logprobs;
    answerer.one_call = !ask.parallel;
    answerer.grammar = prepared.grammar.as_ref().map(Grammar::fresh);
    answerer.strict = prepared.strict.as_ref().map(Grammar::fresh);
    if let Thinking::On { budget: Some(budget), .. } = ask.thinking {
        let mut closing = model.prompts.plain("\n</think>\n\n")?;
        closing.reverse();
        answerer.thought = Some(Thought { left: budget, closing });
    }
    Ok(answerer)
}

fn compile(model: &Loaded, rule: &Rule) -> Result<Grammar, ApiError> {
    let grammars = model.grammars.as_ref().as_ref();
    let grammar = grammars
        .map_err(ToString::to_string)
        .and_then(|grammars| grammars.compile(rule).map_err(|error| error.to_string()));
    grammar.map_err(|problem| {
        let (what, at) = match rule {
            Rule::Json(_) => ("the JSON schema", "response_format"),
            Rule::Calls { .. } | Rule::Call { .. } => ("the schemas of the tools", "tools"),
        };
        ApiError::invalid(format!("{what} cannot be followed: {problem}"))
            .at(at)
            .code("invalid_json_schema")
    })
}

/// An answerer that the job chooses with, and its end flushes.
struct Shared(Arc<Mutex<Answerer>>);

impl Shared {
    fn with<T>(&self, act: impl FnOnce(&mut Answerer) -> T) -> T {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Chooser for Shared {
    fn begin(&mut self, prompt: &[u32]) {
        self.with(|answerer| answerer.begin(prompt));
    }

    fn choose(&mut self, logits: &[f32]) -> Result<Choice, ChooseError> {
        self.with(|answerer| answerer.choose(logits))
    }
}

/// Where the events of a job go: on, with the rest of the answer before its end.
struct Forward {
    answerer: Shared,
    sink: Sink,
}

impl EventSink for Forward {
    fn send(&mut self, event: JobEvent) -> bool {
        let event = match event {
            JobEvent::Queued { ahead } => Event::Queued { ahead },
            JobEvent::Started { cached, .. } => Event::Started { cached },
            JobEvent::Prefilled { rows, of } => Event::Progress { rows, of },
            JobEvent::Token { .. } => return true,
            JobEvent::Finished(report) => {
                let finish = self.answerer.with(Answerer::end);
                let is_full = matches!(report.finish, Ended::Length | Ended::Context);
                Event::Ended(if is_full && finish == Finish::Stop {
                    Finish::Length
                } else {
                    finish
                })
            }
            JobEvent::Failed(JobError::Cancelled { .. }) => Event::Ended(Finish::Cut),
            JobEvent::Failed(error) => Event::Failed(failed(&error)),
        };
        (self.sink)(event);
        true
    }
}

fn job(model: &Loaded, prepared: &Prepared, answerer: Answerer, cancel: CancelToken) -> Job {
    let sink = Arc::clone(&answerer.sink);
    let answerer = Arc::new(Mutex::new(answerer));
    Job {
        prompt: prepared.prompt.tokens.clone(),
        shared: prepared.prompt.shared,
        max_tokens: prepared.max_tokens,
        chooser: Box::new(Shared(Arc::clone(&answerer))),
        events: Box::new(Forward { answerer: Shared(answerer), sink }),
        cancel,
        patience: model.patience,
    }
}

fn refused(refused: &SubmitError) -> ApiError {
    match refused {
        SubmitError::QueueFull { retry_after, .. } => {
            let seconds = u32::try_from(retry_after.as_secs()).unwrap_or(u32::MAX).max(1);
            ApiError::new(ErrorKind::Busy(seconds), refused.to_string())
        }
        SubmitError::ShuttingDown => shutting_down(),
        SubmitError::EngineStopped { message } => engine_stopped(message),
        SubmitError::Prompt(error) => prompt_error(error),
        SubmitError::TokenOutOfRange { .. } => ApiError::invalid(refused.to_string()),
    }
}

fn prompt_error(error: &PromptError) -> ApiError {
    let refused = ApiError::invalid(error.to_string());
    match error {
        PromptError::TooLong { .. } => refused.code("context_length_exceeded"),
        PromptError::Empty => refused,
    }
}

/// Why an answer broke off. What was said of it so far is not an answer: nobody has to take it for one.
fn failed(error: &JobError) -> ApiError {
    match error {
        JobError::ShuttingDown => shutting_down(),
        JobError::EngineStopped { message } => engine_stopped(message),
        _ => broke_off(&error.to_string()),
    }
}

fn shutting_down() -> ApiError {
    ApiError::new(ErrorKind::Busy(SHUTDOWN_RETRY_S), "the server is shutting down")
        .code("shutting_down")
}

/// Puts answers together from their events.
#[derive(Debug, Clone)]
pub(crate) struct Collector {
    pub(crate) answer: Answer,
    is_over: bool,
}

impl Collector {
    pub(crate) fn new(prompt: usize) -> Self {
        let usage = Usage { prompt, ..Usage::default() };
        let answer = Answer {
            reasoning: String::new(),
            text: String::new(),
            calls: Vec::new(),
            chances: Vec::new(),
            finish: Finish::Cut,
            usage,
            first: None,
        };
        Self { answer, is_over: false }
    }

    /// Adds what an event brings; the error, if the answer broke off.
    pub(crate) fn add(&mut self, event: &Event) -> Result<(), ApiError> {
        let answer = &mut self.answer;
        match event {
            Event::Started { cached } => answer.usage.cached = *cached,
            Event::Queued { .. } | Event::Progress { .. } => {}
            Event::Token(token) => {
                answer.first.get_or_insert_with(Instant::now);
                answer.usage.generated += usize::from(token.counts);
                answer.usage.reasoning += usize::from(token.counts && token.is_reasoning);
                for piece in &token.pieces {
                    match piece {
                        Piece::Reasoning(text) => answer.reasoning.push_str(text),
                        Piece::Text(text) => answer.text.push_str(text),
                        Piece::Call(call) => answer.calls.push(call.clone()),
                    }
                }
                answer.chances.extend(token.chance.clone());
            }
            Event::Ended(finish) => {
                answer.finish = finish.clone();
                self.is_over = true;
            }
            Event::Failed(error) => {
                self.is_over = true;
                return Err(error.clone());
            }
        }
        Ok(())
    }

    pub(crate) const fn is_over(&self) -> bool {
        self.is_over
    }
}

impl Generation {
    /// All answers, when all are over.
    pub(crate) async fn collect(mut self) -> Result<Vec<Answer>, ApiError> {
        let mut collectors = vec![Collector::new(self.prompt_tokens); self.n];
        while let Some((index, event)) = self.events.recv().await {
            collectors[index].add(&event)?;
            if collectors.iter().all(Collector::is_over) {
                break;
            }
        }
        if !collectors.iter().all(Collector::is_over) {
            return Err(broke_off("the model was unloaded"));
        }
        Ok(collectors.into_iter().map(|collector| collector.answer).collect())
    }
}

/// An answer that the disk or the model broke off.
pub(crate) fn broke_off(error: &str) -> ApiError {
    ApiError::internal(format!("the answer broke off: {error}")).code("generation_failed")
}

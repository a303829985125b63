//! Prompt in, tokens out.

use std::ops::ControlFlow;

use model::{ForwardError, Network};

use crate::sampler::{Sampler, SamplerError};
use crate::sequence::{Mark, Phase, Prompt, Sequence};
use crate::speculate::SpeculationCounters;

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// The model ended it.
    EndOfText,
    /// As many tokens as were allowed.
    Length,
    /// No room is left in the context.
    Context,
    /// The caller stopped it.
    Stopped,
}

/// Why an answer broke off.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// The network stopped.
    #[error(transparent)]
    Forward(#[from] ForwardError),
    /// No token can be chosen.
    #[error(transparent)]
    Sampler(#[from] SamplerError),
    /// The prompt cannot be continued.
    #[error(transparent)]
    Prompt(#[from] PromptError),
}

/// Why a prompt cannot be continued.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PromptError {
    /// It is longer than all that may be read and written.
    #[error(
        "prompt is too long: {prompt} tokens > {context} maximum; shorten it or reserve more with `--context`"
    )]
    TooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Positions reserved.
        context: usize,
    },
    /// There is nothing to continue.
    #[error("the prompt is empty; give at least one token of text")]
    Empty,
}

impl PromptError {
    /// Whether a prompt of so many tokens can be read in a context of so many positions.
    ///
    /// # Errors
    /// [`PromptError`].
    pub const fn check(prompt: usize, context: usize) -> Result<(), Self> {
        match prompt {
            0 => Err(Self::Empty),
            _ if prompt > context => Err(Self::TooLong { prompt, context }),
            _ => Ok(()),
        }
    }
}

/// What an answer cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Generated {
    /// Reading the prompt, up to the first token.
    pub prefill: Phase,
    /// The tokens after the first.
    pub decode: Phase,
    /// All tokens, the end token not counted.
    pub tokens: u64,
    /// Why it ended.
    pub finish: Finish,
    /// What came of guesses.
    pub speculation: SpeculationCounters,
}

/// Limits of an answer.
#[derive(Debug, Clone, Copy)]
pub struct Limits<'a> {
    /// Most tokens.
    pub max_tokens: usize,
    /// Tokens that end the answer.
    pub end_tokens: &'a [u32],
}

/// Reads the prompt, then samples until something ends it. `on_token` sees every token and may stop.
///
/// # Errors
/// See [`GenerateError`]; the sequence starts from nothing afterwards.
pub fn generate(
    network: &mut Network,
    sequence: &mut Sequence,
    prompt: &Prompt<'_>,
    sampler: &mut Sampler,
    limits: &Limits<'_>,
    on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
) -> Result<Generated, GenerateError> {
    check_prompt(prompt.tokens, network)?;
    let guesses = sequence.speculation_counters();
    let mut first = Err(SamplerError::Empty);
    sampler.begin(prompt.tokens);
    let prefill =
        sequence.prefill(network, prompt, &mut |_, logits| first = sampler.sample(logits))?;
    let context = network.options().context_tokens;
    let mut answer =
        Answer { sampler, limits, on_token, context, tokens: 0, ended: Ok(Finish::Stopped) };
    let mut decode = Phase::default();
    if sequence.tokens().len() == prompt.tokens.len() {
        let mark = Mark::now(network);
        let mut decoded = 0;
        let mut next = answer.take(first?, prompt.tokens.len());
        while let Some(token) = next {
            let (before, room) = (sequence.tokens().len(), answer.room());
            decoded += sequence.advance(network, token, room, &mut |row, logits| {
                next = answer.choose(logits, before + row + 1);
                next
            })?;
        }
        decode = mark.phase(network, decoded as u64);
    }
    let speculation = sequence.speculation_counters().minus(&guesses);
    let (tokens, finish) = (answer.tokens as u64, answer.ended?);
    Ok(Generated { prefill, decode, tokens, finish, speculation })
}

/// What becomes of logits: the next token, or the end.
struct Answer<'a> {
    sampler: &'a mut Sampler,
    limits: &'a Limits<'a>,
    on_token: &'a mut dyn FnMut(u32) -> ControlFlow<()>,
    context: usize,
    /// Those that were given out.
    tokens: usize,
    /// Why it ended, once it has.
    ended: Result<Finish, SamplerError>,
}

impl Answer<'_> {
    /// Samples, and gives the token if it is to be run. By then the network will have run `run` tokens.
    fn choose(&mut self, logits: &[f32], run: usize) -> Option<u32> {
        match self.sampler.sample(logits) {
            Ok(token) => self.take(token, run),
            Err(error) => {
                self.ended = Err(error);
                None
            }
        }
    }

    fn take(&mut self, token: u32, run: usize) -> Option<u32> {
        let end = self.give(token, run);
        match end {
            None => self.sampler.accept(token),
            Some(finish) => self.ended = Ok(finish),
        }
        end.is_none().then_some(token)
    }

    /// Gives the token out; why nothing follows it, or why it is not given out.
    fn give(&mut self, token: u32, run: usize) -> Option<Finish> {
        if self.limits.end_tokens.contains(&token) {
            return Some(Finish::EndOfText);
        }
        self.tokens += 1;
        if (self.on_token)(token).is_break() {
            Some(Finish::Stopped)
        } else if self.tokens >= self.limits.max_tokens {
            Some(Finish::Length)
        } else {
            (run >= self.context).then_some(Finish::Context)
        }
    }

    /// Rows that can still give a token.
    const fn room(&self) -> usize {
        self.limits.max_tokens.saturating_sub(self.tokens)
    }
}

/// A given text, read as prompt: the logits after every token.
#[derive(Clone, Copy)]
pub struct LogitsRun<'a> {
    /// The text.
    pub tokens: &'a [u32],
    /// Rows of a pass.
    pub pass_rows: usize,
    /// Called after each pass with tokens read and to read; `false` stops.
    pub progress: &'a dyn Fn(usize, usize) -> bool,
}

impl LogitsRun<'_> {
    /// Rows of logits that are worth computing at once.
    pub const LOGIT_ROWS: u32 = 16;

    /// Hands `[vocab]` logits to `sink`, position after position.
    ///
    /// # Errors
    /// See [`GenerateError`].
    pub fn run(
        &self,
        network: &mut Network,
        sequence: &mut Sequence,
        sink: &mut dyn FnMut(&[f32]),
    ) -> Result<Phase, GenerateError> {
        check_prompt(self.tokens, network)?;
        Ok(sequence.prefill(network, &self.prompt(), &mut |_, logits| sink(logits))?)
    }

    /// The same, and hands the draft head's logits to `drafts`: for every position but the last, which no token
    /// follows.
    ///
    /// # Errors
    /// See [`GenerateError`].
    ///
    /// # Panics
    /// If the draft head is not loaded.
    pub fn run_with_draft(
        &self,
        network: &mut Network,
        sequence: &mut Sequence,
        sink: &mut dyn FnMut(&[f32]),
        drafts: &mut dyn FnMut(&[f32]),
    ) -> Result<Phase, GenerateError> {
        check_prompt(self.tokens, network)?;
        let (sink, drafts) =
            (&mut |_, logits: &[f32]| sink(logits), &mut |_, logits: &[f32]| drafts(logits));
        Ok(sequence.prefill_with_draft(network, &self.prompt(), sink, drafts)?)
    }

    fn prompt(&self) -> Prompt<'_> {
        Prompt {
            every_row: true,
            from_nothing: true,
            progress: self.progress,
            ..Prompt::new(self.tokens, self.pass_rows)
        }
    }
}

/// A prompt, then given tokens one by one as generated rows: two programs (or two settings) run the same work.
#[derive(Debug, Clone, Copy)]
pub struct Forced<'a> {
    /// Read as prompt.
    pub prompt: &'a [u32],
    /// Decoded one by one, whatever the model says.
    pub forced: &'a [u32],
    /// Rows of a pass.
    pub pass_rows: usize,
}

/// What a forced run cost.
#[derive(Debug, Clone, PartialEq)]
pub struct ForcedOutcome {
    /// Reading the prompt.
    pub prefill: Phase,
    /// The forced tokens after the first.
    pub decode: Phase,
    /// Wall time of each forced token.
    pub token_us: Vec<u64>,
    /// The likeliest token after the prompt and after each forced token.
    pub likeliest: Vec<u32>,
    /// What came of guesses.
    pub speculation: SpeculationCounters,
}

impl Forced<'_> {
    /// Runs it.
    ///
    /// # Errors
    /// See [`GenerateError`].
    pub fn run(
        &self,
        network: &mut Network,
        sequence: &mut Sequence,
    ) -> Result<ForcedOutcome, GenerateError> {
        check_prompt(self.prompt, network)?;
        let mut likeliest = Vec::new();
        let argmax = |logits: &[f32]| {
            let best = logits.iter().enumerate().reduce(|a, b| if b.1 > a.1 { b } else { a });
            best.map_or(0, |(id, _)| id as u32)
        };
        let prompt = Prompt { from_nothing: true, ..Prompt::new(self.prompt, self.pass_rows) };
        let prefill =
            sequence.prefill(network, &prompt, &mut |_, logits| likeliest.push(argmax(logits)))?;
        let guesses = sequence.speculation_counters();
        let (mut decode, mut token_us) = (Phase::default(), Vec::new());
        while let Some(token) = self.forced.get(token_us.len()) {
            let (mark, done) = (Mark::now(network), token_us.len());
            let room = if done == 0 { 1 } else { self.forced.len() - done };
            let rows = sequence.advance(network, *token, room, &mut |row, logits| {
                likeliest.push(argmax(logits));
                self.forced.get(done + row + 1).copied()
            })?;
            let phase = mark.phase(network, rows as u64);
            // Rows of a pass share its time.
            let row_us = phase.elapsed.as_micros() as u64 / rows as u64;
            token_us.extend(std::iter::repeat_n(row_us, rows));
            // As in generation, the first token belongs to the prompt: the rate is taken between tokens.
            if done > 0 {
                decode.add(&phase);
            }
        }
        let speculation = sequence.speculation_counters().minus(&guesses);
        Ok(ForcedOutcome { prefill, decode, token_us, likeliest, speculation })
    }
}

fn check_prompt(tokens: &[u32], network: &Network) -> Result<(), GenerateError> {
    Ok(PromptError::check(tokens.len(), network.options().context_tokens)?)
}

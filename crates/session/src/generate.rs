//! Prompt in, tokens out.

use std::ops::ControlFlow;

use model::{ForwardError, Network};

use crate::sampler::{Sampler, SamplerError};
use crate::sequence::{Mark, Phase, Prompt, Sequence};

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
    /// The prompt alone is too long.
    #[error(
        "the prompt has {prompt} tokens and the context holds {context}; shorten it or reserve more with `--context`"
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Positions reserved.
        context: usize,
    },
    /// There is nothing to continue.
    #[error("the prompt is empty; give at least one token of text")]
    EmptyPrompt,
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
    let context = network.options().context_tokens;
    let mut next = Err(SamplerError::Empty);
    sampler.begin(prompt.tokens);
    let prefill =
        sequence.prefill(network, prompt, &mut |_, logits| next = sampler.sample(logits))?;
    let mut generated =
        Generated { prefill, decode: Phase::default(), tokens: 0, finish: Finish::Stopped };
    if sequence.tokens().len() < prompt.tokens.len() {
        return Ok(generated);
    }
    let mark = Mark::now(network);
    let mut decoded = 0;
    generated.finish = loop {
        let token = next?;
        if limits.end_tokens.contains(&token) {
            break Finish::EndOfText;
        }
        generated.tokens += 1;
        if on_token(token).is_break() {
            break Finish::Stopped;
        }
        if generated.tokens as usize >= limits.max_tokens {
            break Finish::Length;
        }
        if sequence.tokens().len() >= context {
            break Finish::Context;
        }
        sampler.accept(token);
        let mut sampled = Err(SamplerError::Empty);
        sequence.step(network, token, &mut |logits| sampled = sampler.sample(logits))?;
        next = sampled;
        decoded += 1;
    };
    generated.decode = mark.phase(network, decoded);
    Ok(generated)
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
        let mut decode = Phase::default();
        let mut token_us = Vec::new();
        for (i, token) in self.forced.iter().enumerate() {
            let mark = Mark::now(network);
            sequence.step(network, *token, &mut |logits| likeliest.push(argmax(logits)))?;
            let phase = mark.phase(network, 1);
            token_us.push(phase.elapsed.as_micros() as u64);
            // As in generation, the first token belongs to the prompt: the rate is taken between tokens.
            if i > 0 {
                decode.add(&phase);
            }
        }
        Ok(ForcedOutcome { prefill, decode, token_us, likeliest })
    }
}

fn check_prompt(tokens: &[u32], network: &Network) -> Result<(), GenerateError> {
    let context = network.options().context_tokens;
    match tokens.len() {
        0 => Err(GenerateError::EmptyPrompt),
        prompt if prompt > context => Err(GenerateError::PromptTooLong { prompt, context }),
        _ => Ok(()),
    }
}

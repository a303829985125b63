//! From logits to pieces of an answer: bias, grammar, sampler, budget of thought, splitter.
//!
//! Runs on the thread that computes, so that an answer ends with the token that ends it. What comes out is sent on and
//! never waited for.

use std::sync::Arc;

use session::scheduler::{Choice, ChooseError, Chooser};
use session::{Finish as Ended, Sampler, Tokenizer};

use crate::chat::{Finish, TokenChance};
use crate::error::ApiError;
use crate::grammar::Grammar;
use crate::prompt::is_control;
use crate::splitter::{Begin, Piece, Splitter};

/// What happens to an answer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Event {
    /// It waits, behind so many others.
    Queued { ahead: usize },
    /// Its turn has come; so many tokens of the prompt need not be read again.
    Started { cached: usize },
    /// Tokens of the prompt that were read.
    Progress { rows: usize, of: usize },
    /// A token was chosen.
    Token(Token),
    /// It ended.
    Ended(Finish),
    /// It broke off.
    Failed(ApiError),
}

/// What a token brought.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Token {
    pub(crate) pieces: Vec<Piece>,
    /// Where probabilities were asked for, and the token is part of the text.
    pub(crate) chance: Option<TokenChance>,
    /// Whether it is thought.
    pub(crate) is_reasoning: bool,
    /// Whether it counts: the rest at the end comes with none.
    pub(crate) counts: bool,
}

/// Where events go.
pub(crate) type Sink = Arc<dyn Fn(Event) + Send + Sync>;

/// How an answer is made.
pub(crate) struct Answerer {
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) sampler: Sampler,
    /// Added to logits, in order of ids.
    pub(crate) bias: Vec<(u32, f32)>,
    pub(crate) grammar: Option<Grammar>,
    /// What a call has to be from its opening tag on, where tools are strict and the model may call or not.
    pub(crate) strict: Option<Grammar>,
    pub(crate) splitter: Splitter,
    /// Likeliest tokens to tell, if probabilities are wanted.
    pub(crate) logprobs: Option<usize>,
    /// Most tokens of thought.
    pub(crate) thought: Option<Thought>,
    /// Whether the answer ends with its first call.
    pub(crate) one_call: bool,
    pub(crate) sink: Sink,
    /// Logits that were changed.
    scratch: Vec<f32>,
    finish: Option<Finish>,
}

/// A budget of thought, and what ends it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Thought {
    pub(crate) left: usize,
    /// Tokens that close the block, the last one first.
    pub(crate) closing: Vec<u32>,
}

impl Answerer {
    pub(crate) fn new(
        tokenizer: Arc<Tokenizer>,
        sampler: Sampler,
        splitter: Splitter,
        sink: Sink,
    ) -> Self {
        Self {
            tokenizer,
            sampler,
            bias: Vec::new(),
            grammar: None,
            strict: None,
            splitter,
            logprobs: None,
            thought: None,
            one_call: false,
            sink,
            scratch: Vec::new(),
            finish: None,
        }
    }

    /// The token that a used-up budget of thought asks for.
    fn forced(&mut self) -> Option<u32> {
        let thought = self.thought.as_mut()?;
        if !self.splitter.is_reasoning() {
            return None;
        }
        if thought.left > 0 {
            thought.left -= 1;
            return None;
        }
        thought.closing.pop()
    }

    fn sample(&mut self, logits: &[f32]) -> Result<u32, ChooseError> {
        let constrained = self.grammar.is_some() && !self.splitter.is_reasoning();
        if self.bias.is_empty() && !constrained {
            return Ok(self.sampler.sample(logits)?);
        }
        self.scratch.clear();
        self.scratch.extend_from_slice(logits);
        for (id, bias) in &self.bias {
            if let Some(logit) = self.scratch.get_mut(*id as usize) {
                *logit += bias;
            }
        }
        if let Some(grammar) = self.grammar.as_mut().filter(|_| constrained) {
            let ends = self.tokenizer.end_tokens();
            grammar.mask(&mut self.scratch, ends).map_err(other)?;
        }
        Ok(self.sampler.sample(&self.scratch)?)
    }

    fn take(&mut self, token: u32, logits: &[f32]) -> Result<Choice, ChooseError> {
        self.sampler.accept(token);
        let (was_reasoning, was_text) = (self.splitter.is_reasoning(), self.splitter.is_text());
        let mut complete = false;
        if let Some(grammar) = self.grammar.as_mut().filter(|_| !was_reasoning) {
            complete = grammar.accept(token).map_err(other)?;
        }
        let mut pieces = Vec::new();
        if !is_control(&self.tokenizer, token) {
            let bytes = self.tokenizer.token_bytes(token).map_err(other)?;
            self.splitter.push(bytes, &mut pieces);
        }
        self.watch_call(complete);
        let chance = self.logprobs.filter(|_| was_text).map(|n| self.chance(token, n, logits));
        self.send(Token { pieces, chance, is_reasoning: was_reasoning, counts: true });
        if let Some(stop) = self.splitter.stopped_by() {
            self.finish = Some(Finish::StopText(stop.to_owned()));
            return Ok(Choice::Last(token, Ended::Stopped));
        }
        let is_over =
            complete && self.strict.is_none() || self.one_call && self.splitter.has_calls();
        Ok(if is_over { Choice::Last(token, Ended::Stopped) } else { Choice::Token(token) })
    }

    /// A strict call follows its grammar from its opening tag on, and is free again after it.
    fn watch_call(&mut self, complete: bool) {
        let Some(strict) = &self.strict else { return };
        if self.splitter.opens_call() {
            self.grammar = Some(strict.fresh());
        } else if complete {
            self.grammar = None;
        }
    }

    fn send(&self, token: Token) {
        (self.sink)(Event::Token(token));
    }

    fn chance(&self, token: u32, n: usize, logits: &[f32]) -> TokenChance {
        let most = logits.iter().fold(f32::NEG_INFINITY, |most, logit| most.max(*logit));
        let sum: f64 = logits.iter().map(|logit| f64::from(logit - most).exp()).sum();
        let log = |id: usize| (f64::from(logits[id] - most) - sum.ln()) as f32;
        let bytes = |id: usize| {
            self.tokenizer.token_bytes(id as u32).map(<[u8]>::to_vec).unwrap_or_default()
        };
        let top = likeliest(logits, n).into_iter().map(|id| (bytes(id), log(id))).collect();
        TokenChance { bytes: bytes(token as usize), logprob: log(token as usize), top }
    }

    /// The rest, when no token follows. Why the answer ended, as far as is known here.
    pub(crate) fn end(&mut self) -> Finish {
        let mut pieces = Vec::new();
        self.splitter.finish(&mut pieces);
        if !pieces.is_empty() {
            let is_reasoning = self.splitter.is_reasoning();
            self.send(Token { pieces, chance: None, is_reasoning, counts: false });
        }
        if self.splitter.has_calls() {
            return Finish::Calls;
        }
        self.finish.take().unwrap_or(Finish::Stop)
    }
}

fn other(error: impl std::fmt::Display) -> ChooseError {
    ChooseError::Other(error.to_string())
}

/// The ids of the largest logits, largest first; of equals the lower first.
fn likeliest(logits: &[f32], n: usize) -> Vec<usize> {
    let mut top: Vec<usize> = Vec::with_capacity(n + 1);
    for (id, logit) in logits.iter().enumerate() {
        if top.len() == n && top.last().is_none_or(|last| *logit <= logits[*last]) {
            continue;
        }
        let place = top.partition_point(|other| logits[*other] >= *logit);
        top.insert(place, id);
        top.truncate(n);
    }
    top
}

impl Chooser for Answerer {
    fn begin(&mut self, prompt: &[u32]) {
        self.sampler.begin(prompt);
    }

    fn choose(&mut self, logits: &[f32]) -> Result<Choice, ChooseError> {
        if let Some(token) = self.forced() {
            return self.take(token, logits);
        }
        let token = self.sample(logits)?;
        if self.tokenizer.end_tokens().contains(&token) {
            return Ok(Choice::End(Ended::EndOfText));
        }
        self.take(token, logits)
    }
}

/// How a splitter begins, for a prompt that went through a template.
pub(crate) fn begin_of(prompt: &str, continues: bool) -> Begin {
    if continues {
        return Begin::Text;
    }
    if prompt.trim_end().ends_with("<think>") { Begin::Thinking } else { Begin::Either }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_likeliest_tokens_come_in_order_and_ties_go_to_the_lower_id() {
        assert_eq!(likeliest(&[0.0, 3.0, 1.0, 3.0, 2.0], 3), [1, 3, 4]);
        assert_eq!(likeliest(&[1.0], 5), [0]);
        assert_eq!(likeliest(&[1.0, 2.0], 0), Vec::<usize>::new());
    }
}

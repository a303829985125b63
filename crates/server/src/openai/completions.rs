//! `/v1/completions`: a text, gone on with.

use serde_json::{Map, Value, json};

use super::chat::{Head, Options};
use super::{FINGERPRINT, HARMLESS, MAX_N};
use crate::answerer::Event;
use crate::chat::{Ask, Input, TokenChance, Usage};
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use crate::generate::Answer;
use crate::splitter::Piece;
use crate::stream::{Encoder, progress, sse};

/// Likeliest tokens that this path tells.
const MAX_LOGPROBS: i64 = 20;
/// Tokens when nothing is said, as the path has always had it.
const DEFAULT_TOKENS: i64 = 16;

/// Reads a request.
pub(crate) fn parse(body: Value) -> Result<(Ask, Options), ApiError> {
    let mut fields = Fields::of(body, "")?;
    fields.refuse(&[
        ("suffix", "this server does not fill in"),
        ("echo", "the prompt is not repeated; its log-probabilities are `sakia logits`"),
    ])?;
    let best = fields.whole("best_of", 1..=MAX_N)?;
    let input = match fields.take("prompt") {
        None => return Err(fields.missing("prompt")),
        Some(prompt) => input(prompt)?,
    };
    let mut ask = Ask::new(input);
    ask.model = fields.text("model")?;
    ask.sampling = super::sampling(&mut fields)?;
    ask.stop = super::stops(&mut fields)?;
    ask.stream = fields.flag("stream")?.unwrap_or(false);
    let include_usage = super::include_usage(&mut fields)?;
    ask.n = fields.whole("n", 1..=MAX_N)?.unwrap_or(1) as usize;
    if best.is_some_and(|best| best as usize != ask.n) {
        return Err(
            ApiError::invalid("`best_of` is not supported: ask for `n` and choose").at("best_of")
        );
    }
    let most = fields.whole("max_tokens", 1..=i64::from(u32::MAX))?;
    ask.max_tokens = Some(most.unwrap_or(DEFAULT_TOKENS) as usize);
    ask.logprobs = fields.whole("logprobs", 0..=MAX_LOGPROBS)?.map(|n| n as usize);
    ask.format = super::response_format(fields.object("response_format")?)?;
    fields.ignore(HARMLESS);
    fields.end()?;
    Ok((ask.checked()?, Options { include_usage }))
}

/// A text, or tokens; a list of one of these.
fn input(prompt: Value) -> Result<Input, ApiError> {
    let needed = "a string or a list of token ids";
    match prompt {
        Value::String(text) => Ok(Input::Text(text)),
        Value::Array(mut list) => match list.first() {
            Some(Value::Number(_)) => {
                let id = |(index, value): (usize, &Value)| {
                    let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
                    id.ok_or_else(|| wrong(&format!("prompt[{index}]"), value, "a token id"))
                };
                Ok(Input::Tokens(list.iter().enumerate().map(id).collect::<Result<_, _>>()?))
            }
            Some(Value::String(_) | Value::Array(_)) if list.len() == 1 => input(list.remove(0)),
            Some(Value::String(_) | Value::Array(_)) => {
                Err(ApiError::invalid("`prompt` has several prompts; send a request for each")
                    .at("prompt"))
            }
            _ => Err(wrong("prompt", &Value::Array(list), needed)),
        },
        other => Err(wrong("prompt", &other, needed)),
    }
}

/// Probabilities, as this path tells them.
fn chances(chances: &[TokenChance]) -> Value {
    let mut offset = 0;
    let (mut tokens, mut logs, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
    for chance in chances {
        let text = super::token_text(&chance.bytes);
        offsets.push(offset);
        offset += text.chars().count();
        tokens.push(text);
        logs.push(chance.logprob.max(-9999.0));
        let top = chance
            .top
            .iter()
            .map(|(bytes, log)| (super::token_text(bytes), Value::from(log.max(-9999.0))));
        tops.push(top.collect::<Map<_, _>>());
    }
    json!({ "tokens": tokens, "token_logprobs": logs, "top_logprobs": tops, "text_offset": offsets })
}

fn choice(index: usize, text: &str, logprobs: &Value, finish: Option<&str>) -> Value {
    json!({ "index": index, "text": text, "logprobs": logprobs, "finish_reason": finish })
}

/// Answers, whole.
pub(crate) fn whole(ask: &Ask, head: &Head, answers: &[Answer]) -> Value {
    let one = |(index, answer): (usize, &Answer)| {
        let logprobs = ask.logprobs.map_or(Value::Null, |_| chances(&answer.chances));
        choice(index, &answer.text, &logprobs, Some(super::finish_reason(&answer.finish)))
    };
    json!({
        "id": head.id, "object": "text_completion", "created": head.created, "model": head.model,
        "system_fingerprint": FINGERPRINT,
        "choices": answers.iter().enumerate().map(one).collect::<Vec<_>>(),
        "usage": super::usage(answers.iter().map(|answer| &answer.usage)),
    })
}

/// Chunks of a stream.
pub(crate) struct Chunks {
    head: Head,
    options: Options,
    usage: Vec<Usage>,
}

impl Chunks {
    pub(crate) fn new(ask: &Ask, options: Options, head: Head, prompt: usize) -> Self {
        Self { head, options, usage: vec![Usage { prompt, ..Usage::default() }; ask.n] }
    }

    fn chunk(&self, choices: &Value, usage: Option<Value>, out: &mut String) {
        let mut chunk = json!({
            "id": self.head.id, "object": "text_completion", "created": self.head.created,
            "model": self.head.model, "system_fingerprint": FINGERPRINT, "choices": choices,
        });
        if self.options.include_usage {
            chunk["usage"] = usage.unwrap_or_default();
        }
        sse(out, None, &chunk);
    }
}

impl Encoder for Chunks {
    fn begin(&mut self, _: &mut String) {}

    fn event(&mut self, index: usize, event: &Event, out: &mut String) {
        progress(event, out);
        match event {
            Event::Started { cached } => self.usage[index].cached = *cached,
            Event::Token(token) => {
                self.usage[index].generated += usize::from(token.counts);
                let text: String = token
                    .pieces
                    .iter()
                    .map(|piece| match piece {
                        Piece::Text(text) => text.as_str(),
                        Piece::Reasoning(_) | Piece::Call(_) => "",
                    })
                    .collect();
                let logprobs =
                    token.chance.as_ref().map(|chance| chances(std::slice::from_ref(chance)));
                if !text.is_empty() || logprobs.is_some() {
                    let logprobs = logprobs.unwrap_or_default();
                    self.chunk(&json!([choice(index, &text, &logprobs, None)]), None, out);
                }
            }
            Event::Ended(finish) => {
                let reason = Some(super::finish_reason(finish));
                self.chunk(&json!([choice(index, "", &Value::Null, reason)]), None, out);
            }
            Event::Queued { .. } | Event::Progress { .. } | Event::Failed(_) => {}
        }
    }

    fn broke(&mut self, error: &ApiError, out: &mut String) {
        sse(out, None, &super::error(error));
    }

    fn end(&mut self, out: &mut String) {
        if self.options.include_usage {
            self.chunk(&json!([]), Some(super::usage(&self.usage)), out);
        }
        out.push_str("data: [DONE]\n\n");
    }
}

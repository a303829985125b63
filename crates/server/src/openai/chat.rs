//! `/v1/chat/completions`.

use serde_json::{Value, json};

use super::{FINGERPRINT, HARMLESS, MAX_N, MAX_TOP};
use crate::answerer::Event;
use crate::chat::{Ask, Call, Input, TokenChance, Usage, new_id};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::generate::{Answer, Generation};
use crate::splitter::Piece;
use crate::stream::{Encoder, progress, sse};

/// Settings of the response itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Options {
    pub(crate) include_usage: bool,
}

/// Reads a request.
pub(crate) fn parse(body: Value) -> Result<(Ask, Options), ApiError> {
    let mut fields = Fields::of(body, "")?;
    fields.refuse(&[
        ("audio", "there is no sound"),
        ("functions", "it is the old name of `tools`"),
        ("function_call", "it is the old name of `tool_choice`"),
        ("web_search_options", "this server does not search"),
        ("suffix", "this model does not fill in"),
    ])?;
    if let Some(modalities) = fields.list("modalities")?
        && modalities.iter().any(|modality| modality != "text")
    {
        return Err(ApiError::invalid("`modalities`: this model answers in text only")
            .at("modalities")
            .code("unsupported_parameter"));
    }
    let mut ask = Ask::new(Input::Chat(super::messages(&mut fields)?));
    ask.model = fields.text("model")?;
    ask.sampling = super::sampling(&mut fields)?;
    ask.stop = super::stops(&mut fields)?;
    ask.stream = fields.flag("stream")?.unwrap_or(false);
    let include_usage = super::include_usage(&mut fields)?;
    ask.n = fields.whole("n", 1..=MAX_N)?.unwrap_or(1) as usize;
    let old = fields.whole("max_tokens", 1..=i64::from(u32::MAX))?;
    let new = fields.whole("max_completion_tokens", 1..=i64::from(u32::MAX))?;
    ask.max_tokens = new.or(old).map(|tokens| tokens as usize);
    let top = fields.whole("top_logprobs", 0..=MAX_TOP)?;
    match (fields.flag("logprobs")?.unwrap_or(false), top) {
        (true, top) => ask.logprobs = Some(top.unwrap_or(0) as usize),
        (false, Some(1..)) => {
            return Err(
                ApiError::invalid("`top_logprobs` needs `logprobs` to be true").at("top_logprobs")
            );
        }
        (false, _) => {}
    }
    ask.tools = super::tools(&mut fields)?;
    ask.tool_choice = super::tool_choice(&mut fields)?;
    ask.parallel = fields.flag("parallel_tool_calls")?.unwrap_or(true);
    ask.format = super::response_format(fields.object("response_format")?)?;
    super::template(&mut fields, &mut ask)?;
    ask.thinking = super::thinking(&mut fields)?;
    fields.ignore(HARMLESS);
    fields.end()?;
    Ok((ask.checked()?, Options { include_usage }))
}

fn call(index: usize, call: &Call) -> Value {
    json!({ "index": index, "id": call.id, "type": "function",
            "function": { "name": call.name, "arguments": call.arguments_text() } })
}

/// Answers, whole.
pub(crate) fn whole(ask: &Ask, head: &Head, answers: &[Answer]) -> Value {
    let choice = |(index, answer): (usize, &Answer)| {
        let has_text = !answer.text.is_empty() || answer.calls.is_empty();
        let text = has_text.then_some(answer.text.as_str());
        let mut message = json!({ "role": "assistant", "content": text, "refusal": null });
        if !answer.reasoning.is_empty() {
            message["reasoning_content"] = answer.reasoning.as_str().into();
        }
        if !answer.calls.is_empty() {
            let calls = answer.calls.iter().enumerate().map(|(index, one)| {
                let mut one = call(index, one);
                if let Some(map) = one.as_object_mut() {
                    map.shift_remove("index");
                }
                one
            });
            message["tool_calls"] = calls.collect();
        }
        let logprobs = ask.logprobs.map(|_| super::chances(&answer.chances));
        json!({ "index": index, "message": message, "logprobs": logprobs,
                "finish_reason": super::finish_reason(&answer.finish) })
    };
    json!({
        "id": head.id, "object": "chat.completion", "created": head.created, "model": head.model,
        "system_fingerprint": FINGERPRINT,
        "choices": answers.iter().enumerate().map(choice).collect::<Vec<_>>(),
        "usage": super::usage(answers.iter().map(|answer| &answer.usage)),
    })
}

/// What all parts of a response have in common.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: String,
}

impl Head {
    pub(crate) fn new(prefix: &str, generation: &Generation) -> Self {
        Self { id: new_id(prefix), created: generation.created, model: generation.model.clone() }
    }
}

/// Chunks of a stream.
pub(crate) struct Chunks {
    head: Head,
    options: Options,
    has_logprobs: bool,
    /// Of each answer.
    usage: Vec<Usage>,
    calls: Vec<usize>,
}

impl Chunks {
    pub(crate) fn new(ask: &Ask, options: Options, head: Head, prompt: usize) -> Self {
        Self {
            head,
            options,
            has_logprobs: ask.logprobs.is_some(),
            usage: vec![Usage { prompt, ..Usage::default() }; ask.n],
            calls: vec![0; ask.n],
        }
    }

    fn chunk(&self, choices: &Value, out: &mut String) {
        let mut chunk = json!({
            "id": self.head.id, "object": "chat.completion.chunk", "created": self.head.created,
            "model": self.head.model, "system_fingerprint": FINGERPRINT, "choices": choices,
        });
        if self.options.include_usage {
            chunk["usage"] = Value::Null;
        }
        sse(out, None, &chunk);
    }

    fn delta(&self, index: usize, delta: &Value, chance: Option<&TokenChance>, out: &mut String) {
        let logprobs = chance.filter(|_| self.has_logprobs);
        let logprobs = logprobs.map(|chance| super::chances(std::slice::from_ref(chance)));
        let choice =
            json!({ "index": index, "delta": delta, "logprobs": logprobs, "finish_reason": null });
        self.chunk(&json!([choice]), out);
    }
}

impl Encoder for Chunks {
    fn begin(&mut self, out: &mut String) {
        for index in 0..self.usage.len() {
            self.delta(index, &json!({ "role": "assistant", "content": "" }), None, out);
        }
    }

    fn event(&mut self, index: usize, event: &Event, out: &mut String) {
        progress(event, out);
        match event {
            Event::Started { cached } => self.usage[index].cached = *cached,
            Event::Token(token) => {
                let usage = &mut self.usage[index];
                usage.generated += usize::from(token.counts);
                usage.reasoning += usize::from(token.counts && token.is_reasoning);
                let mut chance = token.chance.as_ref();
                for piece in &token.pieces {
                    let delta = match piece {
                        Piece::Reasoning(text) => json!({ "reasoning_content": text }),
                        Piece::Text(text) => json!({ "content": text }),
                        Piece::Call(one) => {
                            self.calls[index] += 1;
                            json!({ "tool_calls": [call(self.calls[index] - 1, one)] })
                        }
                    };
                    self.delta(index, &delta, chance.take(), out);
                }
                if chance.is_some() {
                    self.delta(index, &json!({ "content": "" }), chance, out);
                }
            }
            Event::Ended(finish) => {
                let reason = super::finish_reason(finish);
                let choice = json!({ "index": index, "delta": {}, "logprobs": null,
                                     "finish_reason": reason });
                self.chunk(&json!([choice]), out);
            }
            Event::Queued { .. } | Event::Progress { .. } | Event::Failed(_) => {}
        }
    }

    fn broke(&mut self, error: &ApiError, out: &mut String) {
        sse(out, None, &super::error(error));
    }

    fn end(&mut self, out: &mut String) {
        if self.options.include_usage {
            sse(
                out,
                None,
                &json!({
                    "id": self.head.id, "object": "chat.completion.chunk", "created": self.head.created,
                    "model": self.head.model, "system_fingerprint": FINGERPRINT, "choices": [],
                    "usage": super::usage(&self.usage),
                }),
            );
        }
        out.push_str("data: [DONE]\n\n");
    }
}

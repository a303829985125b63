//! `OpenAI`'s dialect: chat completions, completions, responses, models.

pub(crate) mod chat;
pub(crate) mod completions;
pub(crate) mod responses;

use serde_json::{Map, Value, json};

use crate::chat::{
    Ask, Call, Finish, Format, Message, Role, Sampling, Thinking, TokenChance, Tool, ToolChoice,
    Usage,
};
use crate::error::{ApiError, ErrorKind};
use crate::fields::{Fields, kind, wrong};
use crate::models::ModelInfo;

/// Most answers to one request.
const MAX_N: i64 = 16;
/// Most likeliest tokens to tell.
const MAX_TOP: i64 = 20;

/// What the server is, as far as that matters to an answer's bits.
pub(crate) const FINGERPRINT: &str = concat!("sakia-", env!("CARGO_PKG_VERSION"));

/// An error in this dialect.
pub(crate) fn error(error: &ApiError) -> Value {
    let kind = match error.kind {
        ErrorKind::Unauthorized => "authentication_error",
        ErrorKind::Forbidden => "permission_error",
        ErrorKind::NotFound => "not_found_error",
        ErrorKind::Busy(_) => "overloaded_error",
        ErrorKind::Internal => "server_error",
        _ => "invalid_request_error",
    };
    json!({ "error": {
        "message": error.message, "type": kind, "param": error.param, "code": error.code
    }})
}

/// A model in this dialect.
pub(crate) fn model(info: &ModelInfo) -> Value {
    let since = info.modified.duration_since(std::time::UNIX_EPOCH);
    let created = since.map_or(0, |since| since.as_secs());
    // Anthropic's clients ask at the same path, and read the other half.
    json!({ "id": info.name, "object": "model", "created": created, "owned_by": "sakia",
            "type": "model", "display_name": info.name,
            "created_at": crate::ollama::timestamp(info.modified) })
}

/// Fields that change nothing here: they say who asks, what a service may keep, and how gateways and other servers pass a
/// request on or report on it.
const HARMLESS: &[&str] = &[
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "prediction",
    "cache_prompt",
    "cache_control",
    "verbosity",
    "stream_options",
    "usage",
    "provider",
    "transforms",
    "session_id",
    "trace",
    "include_reasoning",
    "reasoning_split",
    "timings_per_token",
    "return_progress",
    "id_slot",
    "keep_alive",
    "client_metadata",
];

/// Fields of messages that clients send back with what they were sent, or keep for themselves.
const HARMLESS_IN_MESSAGES: &[&str] = &[
    "refusal",
    "annotations",
    "parsed",
    "reasoning_details",
    "reasoning_opaque",
    "reasoning_text",
    "thinking",
    "thinking_blocks",
    "provider_specific_fields",
    "tool_name",
    "cache_control",
    "id",
    "created",
    "created_at",
    "model",
    "type",
    "metadata",
];

/// Settings of the sampler.
pub(crate) fn sampling(fields: &mut Fields) -> Result<Sampling, ApiError> {
    let mut sampling = Sampling {
        temperature: fields.real("temperature", 0.0..=2.0)?,
        top_p: fields.real("top_p", 0.0..=1.0)?,
        min_p: fields.real("min_p", 0.0..=1.0)?,
        presence_penalty: fields.real("presence_penalty", -2.0..=2.0)?,
        frequency_penalty: fields.real("frequency_penalty", -2.0..=2.0)?,
        repeat_penalty: fields.real("repetition_penalty", 0.01..=100.0)?,
        // -1 is what some servers take for "all".
        top_k: fields.whole("top_k", -1..=1_000_000)?.map(|k| k.max(0) as usize),
        seed: fields.whole("seed", i64::MIN..=i64::MAX)?.map(|seed| seed as u64),
        ..Sampling::default()
    };
    if let Some(repeat) = fields.real("repeat_penalty", 0.01..=100.0)? {
        sampling.repeat_penalty = Some(repeat);
    }
    if let Some(bias) = fields.object("logit_bias")? {
        for (token, value) in bias.into_map() {
            let at = format!("logit_bias.{token:.20}");
            let id = token.parse().map_err(|_| {
                ApiError::invalid(format!("`{at}` is not named by the id of a token"))
                    .at("logit_bias")
            })?;
            let number = value.as_f64().filter(|number| (-100.0..=100.0).contains(number));
            let number = number.ok_or_else(|| wrong(&at, &value, "a number from -100 to 100"))?;
            // The ends mean never and always.
            // As good as a ban, and no less of a number if every token is banned.
            let bias = if number <= -100.0 { -1e30 } else { number as f32 };
            sampling.logit_bias.insert(id, bias);
        }
    }
    Ok(sampling)
}

/// A stop text or a list of them.
pub(crate) fn stops(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    match fields.take("stop") {
        None => Ok(Vec::new()),
        Some(Value::String(text)) => Ok(vec![text]),
        Some(Value::Array(list)) => texts(list, "stop"),
        Some(other) => Err(fields.wrong("stop", &other, "a string or a list of strings")),
    }
}

/// A list of texts.
pub(crate) fn texts(list: Vec<Value>, at: &str) -> Result<Vec<String>, ApiError> {
    let text = |(index, value)| match value {
        Value::String(text) => Ok(text),
        other => Err(wrong(&format!("{at}[{index}]"), &other, "a string")),
    };
    list.into_iter().enumerate().map(text).collect()
}

/// Whether the stream ends with the tokens that were used.
pub(crate) fn include_usage(fields: &mut Fields) -> Result<bool, ApiError> {
    let Some(mut options) = fields.object("stream_options")? else { return Ok(false) };
    let include = options.flag("include_usage")?.unwrap_or(false);
    options.ignore(&["include_obfuscation", "continuous_usage_stats"]);
    options.end()?;
    Ok(include)
}

/// How much the model is to think.
pub(crate) fn effort(word: &str, at: &str) -> Result<Thinking, ApiError> {
    match word {
        "none" | "minimal" => Ok(Thinking::Off),
        "low" | "medium" | "high" | "xhigh" | "max" => {
            Ok(Thinking::On { effort: Some(word.to_owned()), budget: None })
        }
        _ => Err(wrong(at, &word.into(), "none, minimal, low, medium, high, xhigh or max")),
    }
}

/// How much the model is to think, in all the ways in which clients of this dialect say so; the last one counts.
pub(crate) fn thinking(fields: &mut Fields) -> Result<Thinking, ApiError> {
    let mut thinking = Thinking::Default;
    if let Some(word) = fields.text("reasoning_effort")? {
        thinking = effort(&word, "reasoning_effort")?;
    }
    if let Some(mut reasoning) = fields.object("reasoning")? {
        // As gateways have it.
        if let Some(word) = reasoning.text("effort")? {
            thinking = effort(&word, "reasoning.effort")?;
        }
        let budget = reasoning.whole("max_tokens", 1..=i64::from(u32::MAX))?;
        match (reasoning.flag("enabled")?, budget) {
            (Some(false), _) => thinking = Thinking::Off,
            (None, None) => {}
            (_, budget) => thinking = thinking.on(budget),
        }
        reasoning.ignore(&["exclude", "summary"]);
        reasoning.end()?;
    }
    if let Some(mut switch) = fields.object("thinking")? {
        // As several services have it.
        let budget = switch.whole("budget_tokens", 1..=i64::from(u32::MAX))?;
        match switch.needed_text("type")?.as_str() {
            "disabled" => thinking = Thinking::Off,
            "enabled" | "adaptive" | "auto" => thinking = thinking.on(budget),
            other => return Err(switch.wrong("type", &other.into(), "enabled or disabled")),
        }
        switch.ignore(&["clear_thinking"]);
        switch.end()?;
    }
    if let Some(think) = fields.flag("enable_thinking")? {
        thinking = if think { thinking.on(None) } else { Thinking::Off };
    }
    Ok(thinking)
}

/// Variables for the template, as other servers take them.
pub(crate) fn template(fields: &mut Fields, ask: &mut Ask) -> Result<(), ApiError> {
    if let Some(variables) = fields.object("chat_template_kwargs")? {
        for name in ["messages", "tools", "add_generation_prompt", "bos_token", "eos_token"] {
            if variables.has(name) {
                let path = variables.path(name);
                return Err(ApiError::invalid(format!("`{path}` is set by the server")).at(&path));
            }
        }
        ask.template = variables.into_map();
    }
    Ok(())
}

/// What the answer has to look like.
pub(crate) fn response_format(fields: Option<Fields>) -> Result<Format, ApiError> {
    let Some(mut fields) = fields else { return Ok(Format::Text) };
    let form = fields.needed_text("type")?;
    match form.as_str() {
        "text" => Ok(Format::Text),
        "json_object" => {
            // Some clients put a schema beside it.
            Ok(fields.take("schema").map_or(Format::JsonObject, Format::Schema))
        }
        "json_schema" => {
            // Chat completions nest it, responses do not.
            let mut inner = fields.object("json_schema")?.unwrap_or(fields);
            let schema = inner.take("schema").ok_or_else(|| inner.missing("schema"))?;
            Ok(Format::Schema(schema))
        }
        other => {
            let path = fields.path("type");
            Err(wrong(&path, &other.into(), "text, json_object or json_schema"))
        }
    }
}

/// A tool; the fields of `function` may stand beside `type` (responses) or under it (chat completions).
pub(crate) fn tool(value: Value, at: &str) -> Result<Tool, ApiError> {
    let mut fields = Fields::of(value, at)?;
    let form = fields.text("type")?.unwrap_or_else(|| "function".to_owned());
    if form != "function" {
        let path = fields.path("type");
        return Err(ApiError::invalid(format!(
            "`{path}` is `{form:.40}`; only tools of type `function` can be had"
        ))
        .at(&path)
        .code("unsupported_parameter"));
    }
    let mut function = fields.object("function")?.unwrap_or(fields);
    let path = function.path("name");
    let name = function.needed_text("name")?;
    let description = function.text("description")?;
    let strict = function.flag("strict")?.unwrap_or(false);
    let tool = Tool::new(name, description, function.take("parameters"), &path)?;
    Ok(Tool { strict, ..tool })
}

/// All tools of a request.
pub(crate) fn tools(fields: &mut Fields) -> Result<Vec<Tool>, ApiError> {
    let list = fields.list("tools")?.unwrap_or_default();
    list.into_iter().enumerate().map(|(i, value)| tool(value, &format!("tools[{i}]"))).collect()
}

/// Whether a tool has to be called.
pub(crate) fn tool_choice(fields: &mut Fields) -> Result<ToolChoice, ApiError> {
    let needed = "auto, none, required, or an object that names a function";
    match fields.take("tool_choice") {
        None => Ok(ToolChoice::Auto),
        Some(Value::String(word)) => match word.as_str() {
            "auto" => Ok(ToolChoice::Auto),
            "none" => Ok(ToolChoice::None),
            "required" | "any" => Ok(ToolChoice::Required),
            _ => Err(fields.wrong("tool_choice", &word.into(), needed)),
        },
        Some(Value::Object(map)) => {
            let inner = map.get("function").and_then(Value::as_object).unwrap_or(&map);
            let name = inner.get("name").and_then(Value::as_str).map(str::to_owned);
            let value = Value::Object(map.clone());
            name.map(ToolChoice::Named).ok_or_else(|| fields.wrong("tool_choice", &value, needed))
        }
        Some(other) => Err(fields.wrong("tool_choice", &other, needed)),
    }
}

/// A message's text: a string, or parts of text.
pub(crate) fn content(value: Option<Value>, at: &str) -> Result<String, ApiError> {
    match value {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(text)) => Ok(text),
        Some(Value::Array(parts)) => {
            let part = |(index, value)| part(value, &format!("{at}[{index}]"));
            parts.into_iter().enumerate().map(part).collect()
        }
        Some(other) => Err(wrong(at, &other, "a string or a list of parts")),
    }
}

fn part(value: Value, at: &str) -> Result<String, ApiError> {
    if let Value::String(text) = value {
        return Ok(text);
    }
    let mut fields = Fields::of(value, at)?;
    let form = fields.needed_text("type")?;
    match form.as_str() {
        "text" | "input_text" | "output_text" => fields.needed_text("text"),
        "refusal" => fields.needed_text("refusal"),
        other => {
            let path = fields.path("type");
            Err(ApiError::invalid(format!(
                "`{path}` is `{other:.40}`: this model reads text only; needed: text"
            ))
            .at(&path)
            .code("unsupported_content"))
        }
    }
}

/// The arguments of a call in the history.
pub(crate) fn arguments(value: Option<Value>, at: &str) -> Result<Map<String, Value>, ApiError> {
    let parsed = match value {
        None | Some(Value::Null) => return Ok(Map::new()),
        Some(Value::Object(map)) => return Ok(map),
        Some(Value::String(text)) if text.trim().is_empty() => return Ok(Map::new()),
        Some(Value::String(text)) => serde_json::from_str(&text).map_err(|error| error.to_string()),
        Some(other) => Err(format!("it is {}", kind(&other))),
    };
    parsed.map_err(|problem| {
        ApiError::invalid(format!("`{at}` is not a JSON object as text: {problem}")).at(at)
    })
}

/// Messages of chat completions.
pub(crate) fn messages(fields: &mut Fields) -> Result<Vec<Message>, ApiError> {
    let list = fields.list("messages")?.ok_or_else(|| fields.missing("messages"))?;
    if list.len() > crate::chat::MAX_MESSAGES {
        let (found, most) = (list.len(), crate::chat::MAX_MESSAGES);
        return Err(ApiError::invalid(format!(
            "the conversation has {found} messages; at most {most} are accepted"
        ))
        .at("messages"));
    }
    let one = |(index, value)| message(value, &format!("messages[{index}]"));
    list.into_iter().enumerate().map(one).collect()
}

fn message(value: Value, at: &str) -> Result<Message, ApiError> {
    let mut fields = Fields::of(value, at)?;
    let role = fields.needed_text("role")?;
    let role = match role.as_str() {
        "system" | "developer" => Role::System,
        "user" => Role::User,
        "assistant" => Role::Assistant,
        "tool" => Role::Tool,
        other => {
            let needed = "system, developer, user, assistant or tool";
            return Err(fields.wrong("role", &other.into(), needed));
        }
    };
    let text = content(fields.take("content"), &fields.path("content"))?;
    let mut message = Message::new(role, text);
    message.name = fields.text("name")?;
    message.reasoning = fields.text("reasoning_content")?.or(fields.text("reasoning")?);
    message.call_id = fields.text("tool_call_id")?;
    if role == Role::Tool && message.call_id.is_none() {
        return Err(fields.missing("tool_call_id"));
    }
    for (index, value) in fields.list("tool_calls")?.unwrap_or_default().into_iter().enumerate() {
        message.calls.push(call(value, &format!("{at}.tool_calls[{index}]"))?);
    }
    fields.ignore(HARMLESS_IN_MESSAGES);
    fields.refuse(&[("audio", "there is no sound"), ("function_call", "use `tool_calls`")])?;
    fields.end()?;
    Ok(message)
}

fn call(value: Value, at: &str) -> Result<Call, ApiError> {
    let mut fields = Fields::of(value, at)?;
    let id = fields.needed_text("id")?;
    let mut function = fields.object("function")?.ok_or_else(|| fields.missing("function"))?;
    let name = function.needed_text("name")?;
    let path = function.path("arguments");
    Ok(Call { id, name, arguments: arguments(function.take("arguments"), &path)? })
}

/// Why an answer ended, in this dialect.
pub(crate) const fn finish_reason(finish: &Finish) -> &'static str {
    match finish {
        Finish::Stop | Finish::StopText(_) => "stop",
        Finish::Length | Finish::Cut => "length",
        Finish::Calls => "tool_calls",
    }
}

/// Tokens of answers to one prompt.
pub(crate) fn usage<'a>(all: impl IntoIterator<Item = &'a Usage>) -> Value {
    let mut sum = Usage::default();
    for usage in all {
        sum.prompt = usage.prompt;
        sum.cached = sum.cached.max(usage.cached);
        sum.generated += usage.generated;
        sum.reasoning += usage.reasoning;
    }
    json!({
        "prompt_tokens": sum.prompt, "completion_tokens": sum.generated,
        "total_tokens": sum.prompt + sum.generated,
        "prompt_tokens_details": { "cached_tokens": sum.cached },
        "completion_tokens_details": { "reasoning_tokens": sum.reasoning },
    })
}

/// A token's text, and its bytes where these are not whole characters.
pub(crate) fn token_text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Probabilities, as chat completions tell them.
pub(crate) fn chances(chances: &[TokenChance]) -> Value {
    let one = |bytes: &[u8], logprob: f32| {
        // Minus infinity is no JSON; nothing is less likely than this.
        json!({ "token": token_text(bytes), "logprob": logprob.max(-9999.0), "bytes": bytes })
    };
    let token = |chance: &TokenChance| {
        let mut token = one(&chance.bytes, chance.logprob);
        token["top_logprobs"] = chance.top.iter().map(|(bytes, log)| one(bytes, *log)).collect();
        token
    };
    json!({ "content": chances.iter().map(token).collect::<Vec<_>>(), "refusal": null })
}

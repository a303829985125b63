//! Ollama's dialect: chat, generate, and what is told of models.

use std::time::{Duration, Instant, SystemTime};

use serde_json::{Map, Value, json};

use crate::answerer::Event;
use crate::chat::{
    Ask, Call, Finish, Format, Input, KeepAlive, Message, Role, Sampling, Thinking, Usage,
};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::generate::Answer;
use crate::models::{ModelInfo, Running};
use crate::splitter::Piece;
use crate::stream::Encoder;

/// The version of the interface that is spoken; some clients ask whether it is new enough.
pub(crate) const VERSION: &str = "0.12.0";

/// An error in this dialect.
pub(crate) fn error(error: &ApiError) -> Value {
    json!({ "error": error.message })
}

/// A request for text.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Wanted {
    Answer(Box<Ask>),
    /// Load the model, or with 0 unload it.
    Load {
        model: String,
        keep: Option<KeepAlive>,
    },
}

/// Reads a request of `/api/chat`.
pub(crate) fn parse_chat(body: Value) -> Result<Wanted, ApiError> {
    let mut fields = Fields::of(body, "")?;
    let model = fields.needed_text("model")?;
    let keep = keep_alive(&mut fields)?;
    let list = fields.list("messages")?.unwrap_or_default();
    if list.is_empty() {
        return Ok(Wanted::Load { model, keep });
    }
    let mut messages = Vec::new();
    for (index, value) in list.into_iter().enumerate() {
        messages.push(message(value, &format!("messages[{index}]"), index)?);
    }
    let continues = crate::prompt::ends_with_assistant(&messages);
    let mut ask = Ask::new(Input::Chat(messages));
    ask.continues = continues;
    for (index, value) in fields.list("tools")?.unwrap_or_default().into_iter().enumerate() {
        ask.tools.push(crate::openai::tool(value, &format!("tools[{index}]"))?);
    }
    common(&mut fields, &mut ask)?;
    fields.end()?;
    (ask.model, ask.keep_alive) = (Some(model), keep);
    Ok(Wanted::Answer(Box::new(ask.checked()?)))
}

/// Reads a request of `/api/generate`.
pub(crate) fn parse_generate(body: Value) -> Result<Wanted, ApiError> {
    let mut fields = Fields::of(body, "")?;
    let model = fields.needed_text("model")?;
    let keep = keep_alive(&mut fields)?;
    let prompt = fields.text("prompt")?.unwrap_or_default();
    if prompt.is_empty() {
        return Ok(Wanted::Load { model, keep });
    }
    let system = fields.text("system")?.filter(|system| !system.is_empty());
    let is_raw = fields.flag("raw")?.unwrap_or(false);
    let input = if is_raw {
        Input::Text(prompt)
    } else {
        let system = system.map(|system| Message::new(Role::System, system));
        Input::Chat(system.into_iter().chain([Message::new(Role::User, prompt)]).collect())
    };
    let mut ask = Ask::new(input);
    fields.refuse(&[
        ("images", "this model reads text only"),
        ("context", "it is the old form of a conversation; use /api/chat"),
    ])?;
    for (name, why) in
        [("suffix", "this model does not fill in"), ("template", "the model's own is used")]
    {
        if fields.text(name)?.is_some_and(|text| !text.is_empty()) {
            return Err(ApiError::invalid(format!("`{name}` is not supported: {why}")).at(name));
        }
    }
    common(&mut fields, &mut ask)?;
    fields.end()?;
    (ask.model, ask.keep_alive) = (Some(model), keep);
    Ok(Wanted::Answer(Box::new(ask.checked()?)))
}

/// What both have.
fn common(fields: &mut Fields, ask: &mut Ask) -> Result<(), ApiError> {
    ask.stream = fields.flag("stream")?.unwrap_or(true);
    ask.format = match fields.take("format") {
        None => Format::Text,
        Some(Value::String(word)) if word.is_empty() => Format::Text,
        Some(Value::String(word)) if word == "json" => Format::JsonObject,
        Some(Value::Object(schema)) => Format::Schema(Value::Object(schema)),
        Some(other) => return Err(fields.wrong("format", &other, "\"json\" or a JSON schema")),
    };
    ask.thinking = match fields.take("think") {
        None => Thinking::Default,
        Some(Value::Bool(true)) => Thinking::On { effort: None, budget: None },
        Some(Value::Bool(false)) => Thinking::Off,
        Some(Value::String(word)) => crate::openai::effort(&word, "think")?,
        Some(other) => return Err(fields.wrong("think", &other, "true, false or a level")),
    };
    if fields.flag("logprobs")?.unwrap_or(false) {
        ask.logprobs = Some(0);
    }
    if let Some(top) = fields.whole("top_logprobs", 0..=20)?
        && ask.logprobs.is_some()
    {
        ask.logprobs = Some(top as usize);
    }
    fields.ignore(&["truncate", "shift", "metadata", "user"]);
    if let Some(options) = fields.object("options")? {
        read_options(options, ask)?;
    }
    Ok(())
}

fn read_options(mut options: Fields, ask: &mut Ask) -> Result<(), ApiError> {
    ask.sampling = Sampling {
        temperature: options.real("temperature", 0.0..=100.0)?,
        top_p: options.real("top_p", 0.0..=1.0)?,
        min_p: options.real("min_p", 0.0..=1.0)?,
        top_k: options.whole("top_k", -1..=1_000_000)?.map(|k| k.max(0) as usize),
        repeat_penalty: options.real("repeat_penalty", 0.01..=100.0)?,
        presence_penalty: options.real("presence_penalty", -2.0..=2.0)?,
        frequency_penalty: options.real("frequency_penalty", -2.0..=2.0)?,
        seed: options.whole("seed", i64::MIN..=i64::MAX)?.map(|seed| seed as u64),
        ..Sampling::default()
    };
    // Negative numbers mean no limit.
    let most = options.whole("num_predict", -2..=i64::from(u32::MAX))?;
    ask.max_tokens = most.and_then(|most| usize::try_from(most).ok());
    match options.take("stop") {
        None => {}
        Some(Value::String(text)) => ask.stop = vec![text],
        Some(Value::Array(list)) => ask.stop = crate::openai::texts(list, "options.stop")?,
        Some(other) => return Err(options.wrong("stop", &other, "a list of strings")),
    }
    // How a model is loaded is said when the server starts.
    options.ignore(&[
        "num_ctx",
        "num_batch",
        "num_gpu",
        "main_gpu",
        "num_thread",
        "num_keep",
        "use_mmap",
        "use_mlock",
        "low_vram",
        "vocab_only",
        "numa",
        "f16_kv",
        "num_gqa",
        "logits_all",
        "embedding_only",
        "rope_frequency_base",
        "rope_frequency_scale",
        "draft_num_predict",
        "repeat_last_n",
        "penalize_newline",
    ]);
    let why = "it is not one of this sampler's methods";
    options.refuse_unless(&[
        ("mirostat", 0.0, why),
        ("tfs_z", 1.0, why),
        ("typical_p", 1.0, why),
    ])?;
    options.ignore(&["mirostat_tau", "mirostat_eta"]);
    options.end()
}

fn message(value: Value, at: &str, index: usize) -> Result<Message, ApiError> {
    let mut fields = Fields::of(value, at)?;
    let role = match fields.needed_text("role")?.as_str() {
        "system" => Role::System,
        "user" => Role::User,
        "assistant" => Role::Assistant,
        "tool" => Role::Tool,
        other => {
            return Err(fields.wrong("role", &other.into(), "system, user, assistant or tool"));
        }
    };
    let mut message = Message::new(role, fields.text("content")?.unwrap_or_default());
    message.reasoning = fields.text("thinking")?.filter(|text| !text.is_empty());
    message.name = fields.text("tool_name")?.or(fields.text("name")?);
    message.call_id = fields.text("tool_call_id")?;
    for (place, value) in fields.list("tool_calls")?.unwrap_or_default().into_iter().enumerate() {
        let mut call = Fields::of(value, format!("{at}.tool_calls[{place}]"))?;
        let id = call.text("id")?.unwrap_or_else(|| format!("call_{index}_{place}"));
        let mut function = call.object("function")?.ok_or_else(|| call.missing("function"))?;
        let name = function.needed_text("name")?;
        let path = function.path("arguments");
        let arguments = crate::openai::arguments(function.take("arguments"), &path)?;
        message.calls.push(Call { id, name, arguments });
    }
    fields.refuse(&[("images", "this model reads text only")])?;
    fields.end()?;
    Ok(message)
}

/// How long the model stays loaded: seconds, or a text like `5m`; less than 0 is for ever.
fn keep_alive(fields: &mut Fields) -> Result<Option<KeepAlive>, ApiError> {
    let needed = "seconds, or a text like \"5m\"";
    let Some(value) = fields.take("keep_alive") else { return Ok(None) };
    let seconds = match &value {
        Value::Number(number) => number.as_f64(),
        Value::String(text) => duration_seconds(text),
        _ => None,
    };
    let seconds = seconds.filter(|seconds| seconds.is_finite());
    let seconds = seconds.ok_or_else(|| fields.wrong("keep_alive", &value, needed))?;
    if seconds < 0.0 {
        return Ok(Some(KeepAlive::Forever));
    }
    // Longer than a century is for ever.
    Ok(Some(if seconds > 3e9 {
        KeepAlive::Forever
    } else {
        KeepAlive::For(Duration::from_secs_f64(seconds))
    }))
}

/// Seconds of a text like `1h30m`, `90s`, `-1`.
pub(crate) fn duration_seconds(text: &str) -> Option<f64> {
    let text = text.trim();
    let (sign, mut rest) = text.strip_prefix('-').map_or((1.0, text), |rest| (-1.0, rest));
    if let Ok(plain) = rest.parse::<f64>() {
        return Some(sign * plain);
    }
    let mut sum = 0.0;
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let number: f64 = rest[..end].parse().ok()?;
        rest = &rest[end..];
        let units = [("ms", 1e-3), ("h", 3600.0), ("m", 60.0), ("s", 1.0)];
        let (unit, factor) = units.into_iter().find(|(unit, _)| rest.starts_with(unit))?;
        sum += number * factor;
        rest = &rest[unit.len()..];
    }
    Some(sign * sum)
}

/// A moment as RFC 3339 in UTC.
pub(crate) fn timestamp(time: SystemTime) -> String {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let (days, second) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    let (year, month, day) = civil(days as i64);
    let (hour, minute) = (second / 3600, second / 60 % 60);
    let (second, nano) = (second % 60, since.subsec_nanos());
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{nano:09}Z")
}

/// Year, month and day of a day since 1970: Howard Hinnant's `civil_from_days`.
const fn civil(days: i64) -> (i64, i64, i64) {
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let day_of_era = z.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (year_of_era + era * 400 + (month <= 2) as i64, month, day)
}

fn parameter_size(parameters: u64) -> String {
    let billions = parameters as f64 / 1e9;
    if billions >= 1.0 { format!("{billions:.1}B") } else { format!("{:.1}M", billions * 1e3) }
}

fn details(running: Option<&Running>) -> Value {
    let text = |get: fn(&Running) -> String| running.map_or_else(String::new, get);
    json!({
        "parent_model": "", "format": "gguf", "family": text(|r| r.family.clone()),
        "families": running.map(|running| vec![running.family.clone()]),
        "parameter_size": text(|r| parameter_size(r.parameters)),
        "quantization_level": text(|r| r.quantization.clone()),
    })
}

/// A model in lists.
pub(crate) fn tag(info: &ModelInfo, running: Option<&Running>) -> Value {
    let own = running.filter(|running| running.name == info.name);
    json!({
        "name": info.name, "model": info.name, "modified_at": timestamp(info.modified),
        "size": info.bytes, "digest": info.digest.clone().unwrap_or_default(),
        "details": details(own),
    })
}

/// The model that is loaded, in `/api/ps`.
pub(crate) fn process(info: &ModelInfo, running: &Running) -> Value {
    let mut process = tag(info, Some(running));
    // For ever is far away.
    let left = running.left.unwrap_or(Duration::from_hours(24 * 365 * 100));
    process["expires_at"] = timestamp(SystemTime::now() + left).into();
    process["size_vram"] = 0.into();
    process["size"] = running.memory_bytes.into();
    process["context_length"] = running.context.into();
    if let Some(map) = process.as_object_mut() {
        map.shift_remove("modified_at");
    }
    process
}

/// What `/api/show` tells.
pub(crate) fn show(info: &ModelInfo, running: Option<&Running>) -> Value {
    let own = running.filter(|running| running.name == info.name);
    let mut model_info = Map::new();
    if let Some(running) = own {
        let family = running.family.as_str();
        model_info.insert("general.architecture".to_owned(), family.into());
        model_info.insert("general.parameter_count".to_owned(), running.parameters.into());
        model_info.insert(format!("{family}.context_length"), running.context.into());
    }
    let mut capabilities = vec!["completion"];
    if own.is_none_or(|running| running.has_tools) {
        capabilities.push("tools");
    }
    if own.is_some_and(|running| running.can_think) {
        capabilities.push("thinking");
    }
    json!({
        "modelfile": "", "parameters": "", "template": "", "license": "",
        "modified_at": timestamp(info.modified), "details": details(own),
        "model_info": model_info, "capabilities": capabilities,
    })
}

/// Which of the two paths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Path {
    Chat,
    Generate,
}

/// Lines of a stream, or the one line of an answer.
pub(crate) struct Lines {
    path: Path,
    model: String,
    usage: Usage,
    began: Instant,
    /// When the prompt was read.
    read: Option<Instant>,
    /// Nothing is written before this, as it loaded.
    load: Duration,
    finish: Finish,
}

impl Lines {
    pub(crate) fn new(path: Path, model: String, prompt: usize, load: Duration) -> Self {
        Self {
            path,
            model,
            usage: Usage { prompt, ..Usage::default() },
            began: Instant::now(),
            read: None,
            load,
            finish: Finish::Cut,
        }
    }

    fn line(&self, text: &str, thinking: &str, calls: &[&Call]) -> Value {
        let mut line = json!({ "model": self.model, "created_at": timestamp(SystemTime::now()) });
        if self.path == Path::Generate {
            line["response"] = text.into();
            if !thinking.is_empty() {
                line["thinking"] = thinking.into();
            }
        } else {
            line["message"] = json!({ "role": "assistant", "content": text });
            if !thinking.is_empty() {
                line["message"]["thinking"] = thinking.into();
            }
            if !calls.is_empty() {
                let call = |(index, call): (usize, &&Call)| {
                    json!({ "id": call.id, "function": {
                        "index": index, "name": call.name, "arguments": call.arguments
                    }})
                };
                line["message"]["tool_calls"] = calls.iter().enumerate().map(call).collect();
            }
        }
        line["done"] = false.into();
        line
    }

    /// The last line.
    fn done(&self, mut line: Value) -> Value {
        let reason = match self.finish {
            Finish::Length | Finish::Cut => "length",
            Finish::Stop | Finish::StopText(_) | Finish::Calls => "stop",
        };
        let now = Instant::now();
        let read = self.read.unwrap_or(now);
        let nanos = |time: Duration| Value::from(time.as_nanos() as u64);
        line["done"] = true.into();
        line["done_reason"] = reason.into();
        line["total_duration"] = nanos(self.load + (now - self.began));
        line["load_duration"] = nanos(self.load);
        line["prompt_eval_count"] = self.usage.prompt.into();
        line["prompt_eval_duration"] = nanos(read - self.began);
        line["eval_count"] = self.usage.generated.into();
        line["eval_duration"] = nanos(now - read);
        line
    }

    /// An answer, whole.
    pub(crate) fn whole(mut self, answer: &Answer) -> Value {
        self.usage = answer.usage;
        self.read = answer.first;
        self.finish = answer.finish.clone();
        let calls: Vec<&Call> = answer.calls.iter().collect();
        let mut line = self.line(&answer.text, &answer.reasoning, &calls);
        if !answer.chances.is_empty() {
            line["logprobs"] = crate::openai::chances(&answer.chances)["content"].take();
        }
        self.done(line)
    }
}

fn write(out: &mut String, line: &Value) {
    out.push_str(&line.to_string());
    out.push('\n');
}

impl Encoder for Lines {
    fn content_type(&self) -> &'static str {
        "application/x-ndjson"
    }

    fn begin(&mut self, _: &mut String) {}

    fn event(&mut self, _: usize, event: &Event, out: &mut String) {
        match event {
            Event::Started { cached } => self.usage.cached = *cached,
            Event::Token(token) => {
                self.read.get_or_insert_with(Instant::now);
                self.usage.generated += usize::from(token.counts);
                let (mut text, mut thinking, mut calls) = (String::new(), String::new(), vec![]);
                for piece in &token.pieces {
                    match piece {
                        Piece::Text(piece) => text.push_str(piece),
                        Piece::Reasoning(piece) => thinking.push_str(piece),
                        Piece::Call(call) => calls.push(call),
                    }
                }
                if !token.pieces.is_empty() || token.chance.is_some() {
                    let mut line = self.line(&text, &thinking, &calls);
                    if let Some(chance) = &token.chance {
                        let one = std::slice::from_ref(chance);
                        line["logprobs"] = crate::openai::chances(one)["content"].take();
                    }
                    write(out, &line);
                }
            }
            Event::Ended(finish) => self.finish = finish.clone(),
            Event::Queued { .. } | Event::Progress { .. } | Event::Failed(_) => {}
        }
    }

    /// A line without text: clients read every line as JSON, so there are no comments.
    fn idle(&mut self, out: &mut String) {
        write(out, &self.line("", "", &[]));
    }

    fn broke(&mut self, error: &ApiError, out: &mut String) {
        write(out, &self::error(error));
    }

    fn end(&mut self, out: &mut String) {
        let line = self.done(self.line("", "", &[]));
        write(out, &line);
    }
}

/// What is said when a model was loaded or unloaded and nothing was asked.
pub(crate) fn loaded(path: Path, model: &str, reason: &str) -> Value {
    let lines = Lines::new(path, model.to_owned(), 0, Duration::ZERO);
    let mut line = lines.line("", "", &[]);
    line["done"] = true.into();
    line["done_reason"] = reason.into();
    line
}

/// The name in a request of `/api/show`.
pub(crate) fn parse_show(body: Value) -> Result<String, ApiError> {
    let mut fields = Fields::of(body, "")?;
    let name = match fields.text("model")? {
        Some(name) => name,
        None => fields.text("name")?.ok_or_else(|| fields.missing("model"))?,
    };
    fields.ignore(&["name", "verbose", "system", "template", "options"]);
    fields.end()?;
    Ok(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_as_clients_write_them() {
        for (text, seconds) in [
            ("5m", 300.0),
            ("1h30m", 5400.0),
            ("90s", 90.0),
            ("-1", -1.0),
            ("-1m", -60.0),
            ("0", 0.0),
            ("500ms", 0.5),
        ] {
            assert_eq!(duration_seconds(text), Some(seconds), "{text}");
        }
        for text in ["", "m", "5x", "five"] {
            assert_eq!(duration_seconds(text), None, "{text}");
        }
    }

    #[test]
    fn moments_are_written_as_rfc_3339() {
        let at = |seconds| timestamp(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "1970-01-01T00:00:00.000000000Z");
        assert_eq!(at(951_782_399), "2000-02-28T23:59:59.000000000Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00.000000000Z");
        assert_eq!(at(1_700_000_000), "2023-11-14T22:13:20.000000000Z");
    }
}

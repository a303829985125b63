//! Anthropic's dialect: messages, and counting their tokens.

use serde_json::{Map, Value, json};

use crate::answerer::Event;
use crate::chat::{
    Ask, Call, Finish, Format, Input, Message, Role, Sampling, Thinking, Tool, ToolChoice, Usage,
    new_id,
};
use crate::error::{ApiError, ErrorKind};
use crate::fields::{Fields, wrong};
use crate::generate::{Answer, Generation};
use crate::splitter::Piece;
use crate::stream::{Encoder, progress, sse};

/// Words for how much the model is to think.
const EFFORTS: [&str; 5] = ["low", "medium", "high", "xhigh", "max"];
/// Fewest tokens of a budget of thought.
const MIN_BUDGET: i64 = 1;

/// Fields that change nothing here: who asks and pays, what a service may keep or drop of a conversation.
const HARMLESS: &[&str] = &[
    "metadata",
    "service_tier",
    "speed",
    "context_management",
    "compaction",
    "cache_control",
    "inference_geo",
    "diagnostics",
    "billing_policy",
    "fallbacks",
    "user_profile_id",
    "workspace_id",
    "betas",
    // Gateways put headers into bodies.
    "anthropic_beta",
    "anthropic_version",
    "user",
];

/// Fields of messages that clients send back as they got them.
const HARMLESS_IN_MESSAGES: &[&str] = &[
    "id",
    "type",
    "model",
    "stop_reason",
    "stop_sequence",
    "stop_details",
    "usage",
    "cache_control",
];

/// An error in this dialect.
pub(crate) fn error(error: &ApiError) -> Value {
    let kind = match error.kind {
        ErrorKind::Unauthorized => "authentication_error",
        ErrorKind::Forbidden => "permission_error",
        ErrorKind::NotFound | ErrorKind::Method => "not_found_error",
        ErrorKind::TooLarge => "request_too_large",
        ErrorKind::Timeout => "timeout_error",
        ErrorKind::Busy(_) => "overloaded_error",
        ErrorKind::Internal => "api_error",
        ErrorKind::Invalid | ErrorKind::MediaType => "invalid_request_error",
    };
    json!({ "type": "error", "error": { "type": kind, "message": error.message } })
}

/// Reads a request; `counts` if only its tokens are wanted.
pub(crate) fn parse(body: Value, counts: bool) -> Result<Ask, ApiError> {
    let mut fields = Fields::of(body, "")?;
    let mut messages = Vec::new();
    if let Some(system) = fields.take("system") {
        messages.push(Message::new(Role::System, text_of(system, "system")?));
    }
    let list = fields.list("messages")?.ok_or_else(|| fields.missing("messages"))?;
    if list.is_empty() {
        return Err(ApiError::invalid("`messages` is empty; at least one is needed").at("messages"));
    }
    for (index, value) in list.into_iter().enumerate() {
        read_message(value, &format!("messages[{index}]"), &mut messages)?;
    }
    let continues = crate::prompt::ends_with_assistant(&messages);
    let mut ask = Ask::new(Input::Chat(messages));
    ask.continues = continues;
    ask.model = fields.text("model")?;
    let most = fields.whole("max_tokens", 1..=i64::from(u32::MAX))?;
    if most.is_none() && !counts {
        return Err(fields.missing("max_tokens"));
    }
    ask.max_tokens = most.map(|most| most as usize);
    ask.sampling = Sampling {
        temperature: fields.real("temperature", 0.0..=1.0)?,
        top_p: fields.real("top_p", 0.0..=1.0)?,
        top_k: fields.whole("top_k", 0..=1_000_000)?.map(|k| k as usize),
        ..Sampling::default()
    };
    if let Some(list) = fields.list("stop_sequences")? {
        ask.stop = crate::openai::texts(list, "stop_sequences")?;
    }
    ask.stream = fields.flag("stream")?.unwrap_or(false);
    let tools = fields.list("tools")?.unwrap_or_default();
    for (index, value) in tools.into_iter().enumerate() {
        ask.tools.push(tool(value, &format!("tools[{index}]"))?);
    }
    (ask.tool_choice, ask.parallel) = tool_choice(&mut fields)?;
    ask.thinking = thinking(&mut fields, &mut ask)?;
    fields.refuse(&[
        ("container", "nothing is run here"),
        ("mcp_servers", "this server calls no others"),
        ("thread", "nothing is stored here; send the whole conversation as `messages`"),
    ])?;
    fields.ignore(HARMLESS);
    fields.end()?;
    ask.checked()
}

/// A text, or blocks of text.
fn text_of(value: Value, at: &str) -> Result<String, ApiError> {
    match value {
        Value::String(text) => Ok(text),
        Value::Array(blocks) => {
            let mut texts = Vec::new();
            for (index, block) in blocks.into_iter().enumerate() {
                let at = format!("{at}[{index}]");
                let mut fields = Fields::of(block, &at)?;
                match fields.needed_text("type")?.as_str() {
                    "text" => texts.push(fields.needed_text("text")?),
                    other => return Err(no_such_block(&fields, other)),
                }
            }
            Ok(texts.join("\n"))
        }
        other => Err(wrong(at, &other, "a string or a list of blocks")),
    }
}

fn no_such_block(fields: &Fields, form: &str) -> ApiError {
    let path = fields.path("type");
    ApiError::invalid(format!(
        "`{path}` is `{form:.40}`: this model reads text, and calls and results of tools"
    ))
    .at(&path)
}

/// A message, and the results of tools in it as messages of their own, before it.
fn read_message(value: Value, at: &str, out: &mut Vec<Message>) -> Result<(), ApiError> {
    let mut fields = Fields::of(value, at)?;
    let role = match fields.needed_text("role")?.as_str() {
        "user" => Role::User,
        "assistant" => Role::Assistant,
        "system" => Role::System,
        other => return Err(fields.wrong("role", &other.into(), "user or assistant")),
    };
    let content = fields.take("content").ok_or_else(|| fields.missing("content"))?;
    let path = fields.path("content");
    fields.ignore(HARMLESS_IN_MESSAGES);
    fields.end()?;
    let blocks = match content {
        Value::String(text) => {
            out.push(Message::new(role, text));
            return Ok(());
        }
        Value::Array(blocks) => blocks,
        other => return Err(wrong(&path, &other, "a string or a list of blocks")),
    };
    let (mut texts, mut message, mut thoughts) = (Vec::new(), Message::new(role, ""), Vec::new());
    let mut has_results = false;
    for (index, block) in blocks.into_iter().enumerate() {
        let mut fields = Fields::of(block, format!("{path}[{index}]"))?;
        match (fields.needed_text("type")?.as_str(), role) {
            ("text", _) => texts.push(fields.needed_text("text")?),
            ("thinking", Role::Assistant) => thoughts.push(fields.needed_text("thinking")?),
            // What was hidden from us has nothing to say.
            ("redacted_thinking", Role::Assistant) => {}
            ("tool_use", Role::Assistant) => message.calls.push(call(&mut fields)?),
            ("tool_result", Role::User) => {
                out.push(result(&mut fields)?);
                has_results = true;
            }
            (other, _) => return Err(no_such_block(&fields, other)),
        }
    }
    message.text = texts.join("\n");
    message.reasoning = (!thoughts.is_empty()).then(|| thoughts.join("\n"));
    if !has_results || !message.text.is_empty() {
        out.push(message);
    }
    Ok(())
}

fn call(fields: &mut Fields) -> Result<Call, ApiError> {
    let input = fields.object("input")?.map_or_else(Map::new, Fields::into_map);
    Ok(Call { id: fields.needed_text("id")?, name: fields.needed_text("name")?, arguments: input })
}

fn result(fields: &mut Fields) -> Result<Message, ApiError> {
    let id = fields.needed_text("tool_use_id")?;
    let at = fields.path("content");
    let text = fields.take("content").map(|content| text_of(content, &at)).transpose()?;
    let mut text = text.unwrap_or_default();
    if fields.flag("is_error")?.unwrap_or(false) {
        text = format!("Error: {text}");
    }
    let mut message = Message::new(Role::Tool, text);
    message.call_id = Some(id);
    Ok(message)
}

fn tool(value: Value, at: &str) -> Result<Tool, ApiError> {
    let mut fields = Fields::of(value, at)?;
    if let Some(form) = fields.text("type")?.filter(|form| form != "custom") {
        let path = fields.path("type");
        return Err(ApiError::invalid(format!(
            "`{path}` is `{form:.40}`: tools that the server would run are not to be had"
        ))
        .at(&path));
    }
    let path = fields.path("name");
    let name = fields.needed_text("name")?;
    let description = fields.text("description")?;
    let strict = fields.flag("strict")?.unwrap_or(false);
    let tool = Tool::new(name, description, fields.take("input_schema"), &path)?;
    fields.ignore(&[
        "cache_control",
        "eager_input_streaming",
        "defer_loading",
        "input_examples",
        "allowed_callers",
    ]);
    fields.end()?;
    Ok(Tool { strict, ..tool })
}

/// Whether a tool has to be called, and whether several may be.
fn tool_choice(fields: &mut Fields) -> Result<(ToolChoice, bool), ApiError> {
    let Some(mut choice) = fields.object("tool_choice")? else {
        return Ok((ToolChoice::Auto, true));
    };
    let single = choice.flag("disable_parallel_tool_use")?.unwrap_or(false);
    let form = choice.needed_text("type")?;
    let chosen = match form.as_str() {
        "auto" => ToolChoice::Auto,
        "none" => ToolChoice::None,
        "any" => ToolChoice::Required,
        "tool" => ToolChoice::Named(choice.needed_text("name")?),
        other => return Err(choice.wrong("type", &other.into(), "auto, none, any or tool")),
    };
    choice.end()?;
    Ok((chosen, !single))
}

/// Thought, which this dialect has only where it is asked for; and the format of the answer.
fn thinking(fields: &mut Fields, ask: &mut Ask) -> Result<Thinking, ApiError> {
    let mut effort = None;
    let format = fields.object("output_format")?;
    if let Some(mut config) = fields.object("output_config")? {
        if let Some(word) = config.text("effort")? {
            if !EFFORTS.contains(&word.as_str()) {
                return Err(config.wrong(
                    "effort",
                    &word.into(),
                    "low, medium, high, xhigh or max",
                ));
            }
            effort = Some(word);
        }
        config.ignore(&["task_budget"]);
        ask.format = output_format(config.object("format")?)?;
        config.end()?;
    }
    if format.is_some() {
        ask.format = output_format(format)?;
    }
    let Some(mut thinking) = fields.object("thinking")? else { return Ok(Thinking::Off) };
    let form = thinking.needed_text("type")?;
    let budget = thinking.whole("budget_tokens", MIN_BUDGET..=i64::from(u32::MAX))?;
    thinking.ignore(&["display", "block_binding"]);
    let path = thinking.path("type");
    thinking.end()?;
    match form.as_str() {
        "disabled" => Ok(Thinking::Off),
        "enabled" | "adaptive" => {
            Ok(Thinking::On { effort, budget: budget.map(|budget| budget as usize) })
        }
        other => Err(wrong(&path, &other.into(), "enabled, adaptive or disabled")),
    }
}

fn output_format(format: Option<Fields>) -> Result<Format, ApiError> {
    let Some(mut format) = format else { return Ok(Format::Text) };
    match format.needed_text("type")?.as_str() {
        "json_schema" => {
            let schema = format.take("schema").ok_or_else(|| format.missing("schema"))?;
            Ok(Format::Schema(schema))
        }
        other => Err(format.wrong("type", &other.into(), "json_schema")),
    }
}

/// Why an answer ended, in this dialect: the reason, and the stop text.
fn stop_reason(finish: &Finish) -> (&'static str, Option<&str>) {
    match finish {
        Finish::Stop => ("end_turn", None),
        Finish::StopText(text) => ("stop_sequence", Some(text)),
        Finish::Length | Finish::Cut => ("max_tokens", None),
        Finish::Calls => ("tool_use", None),
    }
}

fn usage(usage: &Usage) -> Value {
    json!({
        "input_tokens": usage.prompt - usage.cached.min(usage.prompt),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.generated,
    })
}

fn tool_use(call: &Call, input: &Value) -> Value {
    json!({ "type": "tool_use", "id": call.id, "name": call.name, "input": input })
}

/// An answer, whole.
pub(crate) fn whole(model: &str, answer: &Answer) -> Value {
    let mut content = Vec::new();
    if !answer.reasoning.is_empty() {
        content.push(json!({ "type": "thinking", "thinking": answer.reasoning, "signature": "" }));
    }
    if !answer.text.is_empty() {
        content.push(json!({ "type": "text", "text": answer.text }));
    }
    content.extend(
        answer.calls.iter().map(|call| tool_use(call, &Value::Object(call.arguments.clone()))),
    );
    let (reason, stop) = stop_reason(&answer.finish);
    json!({
        "id": new_id("msg_"), "type": "message", "role": "assistant", "model": model,
        "content": content, "stop_reason": reason, "stop_sequence": stop,
        "usage": usage(&answer.usage),
    })
}

/// Which block of content is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Open {
    Nothing,
    Thinking,
    Text,
}

/// Events of a stream.
pub(crate) struct Events {
    id: String,
    model: String,
    usage: Usage,
    open: Open,
    /// Blocks that were begun.
    blocks: usize,
    finish: Finish,
}

impl Events {
    pub(crate) fn new(generation: &Generation) -> Self {
        Self {
            id: new_id("msg_"),
            model: generation.model.clone(),
            usage: Usage { prompt: generation.prompt_tokens, ..Usage::default() },
            open: Open::Nothing,
            blocks: 0,
            finish: Finish::Cut,
        }
    }

    fn start_block(&mut self, block: &Value, out: &mut String) {
        sse(
            out,
            Some("content_block_start"),
            &json!({
                "type": "content_block_start", "index": self.blocks, "content_block": block
            }),
        );
        self.blocks += 1;
    }

    fn delta(&self, delta: &Value, out: &mut String) {
        sse(
            out,
            Some("content_block_delta"),
            &json!({
                "type": "content_block_delta", "index": self.blocks - 1, "delta": delta
            }),
        );
    }

    fn close(&mut self, out: &mut String) {
        if self.open == Open::Thinking {
            self.delta(&json!({ "type": "signature_delta", "signature": "" }), out);
        }
        if self.open != Open::Nothing {
            self.stop_block(out);
        }
        self.open = Open::Nothing;
    }

    fn stop_block(&self, out: &mut String) {
        let index = self.blocks - 1;
        sse(
            out,
            Some("content_block_stop"),
            &json!({ "type": "content_block_stop", "index": index }),
        );
    }

    fn open(&mut self, wanted: Open, out: &mut String) {
        if self.open == wanted {
            return;
        }
        self.close(out);
        let block = match wanted {
            Open::Thinking => json!({ "type": "thinking", "thinking": "", "signature": "" }),
            Open::Text | Open::Nothing => json!({ "type": "text", "text": "" }),
        };
        self.start_block(&block, out);
        self.open = wanted;
    }

    fn piece(&mut self, piece: &Piece, out: &mut String) {
        match piece {
            Piece::Reasoning(text) => {
                self.open(Open::Thinking, out);
                self.delta(&json!({ "type": "thinking_delta", "thinking": text }), out);
            }
            Piece::Text(text) => {
                self.open(Open::Text, out);
                self.delta(&json!({ "type": "text_delta", "text": text }), out);
            }
            Piece::Call(call) => {
                self.close(out);
                self.start_block(&tool_use(call, &json!({})), out);
                let arguments = call.arguments_text();
                self.delta(&json!({ "type": "input_json_delta", "partial_json": arguments }), out);
                self.stop_block(out);
            }
        }
    }
}

impl Encoder for Events {
    fn begin(&mut self, out: &mut String) {
        sse(
            out,
            Some("message_start"),
            &json!({ "type": "message_start", "message": {
                "id": self.id, "type": "message", "role": "assistant", "model": self.model,
                "content": [], "stop_reason": null, "stop_sequence": null, "usage": usage(&self.usage),
            }}),
        );
        self.idle(out);
    }

    fn event(&mut self, _: usize, event: &Event, out: &mut String) {
        progress(event, out);
        match event {
            Event::Started { cached } => self.usage.cached = *cached,
            Event::Token(token) => {
                self.usage.generated += usize::from(token.counts);
                token.pieces.iter().for_each(|piece| self.piece(piece, out));
            }
            Event::Ended(finish) => self.finish = finish.clone(),
            Event::Queued { .. } | Event::Progress { .. } | Event::Failed(_) => {}
        }
    }

    fn idle(&mut self, out: &mut String) {
        sse(out, Some("ping"), &json!({ "type": "ping" }));
    }

    fn broke(&mut self, error: &ApiError, out: &mut String) {
        sse(out, Some("error"), &self::error(error));
    }

    fn end(&mut self, out: &mut String) {
        self.close(out);
        let (reason, stop) = stop_reason(&self.finish);
        sse(
            out,
            Some("message_delta"),
            &json!({
                "type": "message_delta", "delta": { "stop_reason": reason, "stop_sequence": stop },
                "usage": usage(&self.usage),
            }),
        );
        sse(out, Some("message_stop"), &json!({ "type": "message_stop" }));
    }
}

//! `/v1/responses`. Nothing is stored: a conversation comes whole with every request.

use serde_json::{Value, json};

use super::chat::Head;
use super::{HARMLESS, MAX_TOP};
use crate::answerer::Event;
use crate::chat::{
    Ask, Call, Finish, Input, Message, Role, TokenChance, Tool, Usage, check_name, new_id,
};
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use crate::generate::{Answer, Collector};
use crate::splitter::Piece;
use crate::stream::{Encoder, progress, sse};

/// What a response repeats of its request.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Echo {
    instructions: Option<String>,
    metadata: Value,
    tools: Value,
    tool_choice: Value,
    format: Value,
    max_output_tokens: Option<usize>,
    parallel: bool,
    temperature: Option<f32>,
    top_p: Option<f32>,
    reasoning: Value,
    /// Names of groups of tools.
    namespaces: Vec<String>,
}

/// Reads a request.
pub(crate) fn parse(body: Value) -> Result<(Ask, Echo), ApiError> {
    let mut fields = Fields::of(body, "")?;
    refuse(&mut fields)?;
    let instructions = fields.text("instructions")?;
    let system = instructions.as_deref().map(|text| Message::new(Role::System, text));
    let mut messages: Vec<Message> = system.into_iter().collect();
    match fields.take("input") {
        None => return Err(fields.missing("input")),
        Some(Value::String(text)) => messages.push(Message::new(Role::User, text)),
        Some(Value::Array(items)) => read_items(items, &mut messages)?,
        Some(other) => return Err(fields.wrong("input", &other, "a string or a list of items")),
    }
    let mut ask = Ask::new(Input::Chat(messages));
    let mut echo = Echo { instructions, ..Echo::default() };
    ask.model = fields.text("model")?;
    echo.metadata = fields.take("metadata").unwrap_or_else(|| json!({}));
    echo.tools = fields_copy(&fields, "tools", json!([]));
    echo.tool_choice = fields_copy(&fields, "tool_choice", json!("auto"));
    ask.sampling = super::sampling(&mut fields)?;
    (echo.temperature, echo.top_p) = (ask.sampling.temperature, ask.sampling.top_p);
    ask.stream = fields.flag("stream")?.unwrap_or(false);
    ask.max_tokens =
        fields.whole("max_output_tokens", 1..=i64::from(u32::MAX))?.map(|most| most as usize);
    echo.max_output_tokens = ask.max_tokens;
    let top = fields.whole("top_logprobs", 0..=MAX_TOP)?.unwrap_or(0) as usize;
    let include = super::texts(fields.list("include")?.unwrap_or_default(), "include")?;
    let wants_logprobs = include.iter().any(|name| name == "message.output_text.logprobs");
    ask.logprobs = (wants_logprobs || top > 0).then_some(top);
    (ask.tools, echo.namespaces) = tools(&mut fields)?;
    ask.tool_choice = super::tool_choice(&mut fields)?;
    ask.parallel = fields.flag("parallel_tool_calls")?.unwrap_or(true);
    echo.parallel = ask.parallel;
    echo.format = json!({ "type": "text" });
    if let Some(mut text) = fields.object("text")? {
        if let Some(format) = text.take("format") {
            echo.format = format.clone();
            ask.format = super::response_format(Some(Fields::of(format, "text.format")?))?;
        }
        text.ignore(&["verbosity"]);
        text.end()?;
    }
    super::template(&mut fields, &mut ask)?;
    echo.reasoning = json!({ "effort": null, "summary": null });
    if let Some(mut reasoning) = fields.object("reasoning")? {
        if let Some(word) = reasoning.text("effort")? {
            ask.thinking = super::effort(&word, "reasoning.effort")?;
            echo.reasoning["effort"] = word.into();
        }
        reasoning.ignore(&["summary", "generate_summary", "context", "mode"]);
        reasoning.end()?;
    }
    fields.ignore(HARMLESS);
    fields.ignore(&["truncation", "max_tool_calls", "context_management", "background_options"]);
    fields.end()?;
    Ok((ask.checked()?, echo))
}

/// All tools, and the names of their groups. A tool of a group is one of the name `group.tool`; a search that a service
/// would make is left out: it is an offer that the model may leave, and here nobody would make it.
fn tools(fields: &mut Fields) -> Result<(Vec<Tool>, Vec<String>), ApiError> {
    let (mut tools, mut groups) = (Vec::new(), Vec::new());
    for (index, value) in fields.list("tools")?.unwrap_or_default().into_iter().enumerate() {
        let at = format!("tools[{index}]");
        let form = value["type"].as_str().unwrap_or_default();
        if form.starts_with("web_search") {
            continue;
        }
        if form != "namespace" {
            tools.push(super::tool(value, &at)?);
            continue;
        }
        let mut group = Fields::of(value, &at)?;
        let name = group.needed_text("name")?;
        for (index, value) in group.list("tools")?.unwrap_or_default().into_iter().enumerate() {
            let at = format!("{at}.tools[{index}]");
            let tool = super::tool(value, &at)?;
            let full = format!("{name}.{}", tool.name);
            check_name(&full, &at)?;
            tools.push(Tool { name: full, ..tool });
        }
        groups.push(name);
    }
    Ok((tools, groups))
}

fn refuse(fields: &mut Fields) -> Result<(), ApiError> {
    fields.refuse(&[
        ("previous_response_id", "nothing is stored here; send the whole conversation as `input`"),
        ("conversation", "nothing is stored here; send the whole conversation as `input`"),
        ("background", "nothing is stored here to be fetched later"),
        ("prompt", "there are no stored prompts"),
    ])
}

/// A field's value, which stays where it is.
fn fields_copy(fields: &Fields, name: &str, default: Value) -> Value {
    fields.peek(name).cloned().unwrap_or(default)
}

/// Items of an input: messages, thoughts, calls and their results.
fn read_items(items: Vec<Value>, out: &mut Vec<Message>) -> Result<(), ApiError> {
    let mut thought: Option<String> = None;
    for (index, item) in items.into_iter().enumerate() {
        let at = format!("input[{index}]");
        let mut fields = Fields::of(item, &at)?;
        let form = fields.text("type")?.unwrap_or_else(|| "message".to_owned());
        match form.as_str() {
            "message" => {
                let mut message = read_message(&mut fields)?;
                if message.role == Role::Assistant {
                    message.reasoning = thought.take();
                }
                out.push(message);
            }
            "reasoning" => thought = Some(reasoning_text(&mut fields)?),
            "function_call" => {
                let path = fields.path("arguments");
                let call = Call {
                    id: fields.needed_text("call_id")?,
                    name: match fields.text("namespace")? {
                        Some(group) => format!("{group}.{}", fields.needed_text("name")?),
                        None => fields.needed_text("name")?,
                    },
                    arguments: super::arguments(fields.take("arguments"), &path)?,
                };
                if let Some(last) = out.last_mut().filter(|last| last.role == Role::Assistant) {
                    last.calls.push(call);
                } else {
                    let mut message = Message::new(Role::Assistant, "");
                    message.reasoning = thought.take();
                    message.calls.push(call);
                    out.push(message);
                }
            }
            "function_call_output" => {
                let path = fields.path("output");
                let text = super::content(fields.take("output"), &path)?;
                let mut message = Message::new(Role::Tool, text);
                message.call_id = Some(fields.needed_text("call_id")?);
                out.push(message);
            }
            other => {
                let path = fields.path("type");
                let needed = "message, reasoning, function_call or function_call_output";
                return Err(wrong(&path, &other.into(), needed));
            }
        }
    }
    Ok(())
}

fn read_message(fields: &mut Fields) -> Result<Message, ApiError> {
    let role = match fields.needed_text("role")?.as_str() {
        "system" | "developer" => Role::System,
        "user" => Role::User,
        "assistant" => Role::Assistant,
        other => {
            let needed = "system, developer, user or assistant";
            return Err(fields.wrong("role", &other.into(), needed));
        }
    };
    let path = fields.path("content");
    Ok(Message::new(role, super::content(fields.take("content"), &path)?))
}

fn reasoning_text(fields: &mut Fields) -> Result<String, ApiError> {
    let mut texts = Vec::new();
    for part in fields.list("content")?.unwrap_or_default() {
        let mut part = Fields::of(part, fields.path("content"))?;
        texts.extend(part.text("text")?);
    }
    Ok(texts.join("\n"))
}

fn usage(usage: &Usage) -> Value {
    json!({
        "input_tokens": usage.prompt, "input_tokens_details": { "cached_tokens": usage.cached },
        "output_tokens": usage.generated,
        "output_tokens_details": { "reasoning_tokens": usage.reasoning },
        "total_tokens": usage.prompt + usage.generated,
    })
}

fn chances(chances: &[TokenChance]) -> Value {
    super::chances(chances)["content"].take()
}

fn text_part(text: &str, logprobs: &Value) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": logprobs })
}

fn message_item(id: &str, status: &str, content: &Value) -> Value {
    json!({ "id": id, "type": "message", "role": "assistant", "status": status, "content": content })
}

fn reasoning_item(id: &str, text: &str, status: &str) -> Value {
    let content = if text.is_empty() {
        json!([])
    } else {
        json!([{ "type": "reasoning_text", "text": text }])
    };
    json!({ "id": id, "type": "reasoning", "summary": [], "content": content, "status": status })
}

fn call_item(id: &str, call: &Call, arguments: &str, status: &str, groups: &[String]) -> Value {
    let rest = |group: &str| call.name.strip_prefix(group)?.strip_prefix('.');
    let group = groups.iter().find_map(|group| Some((group, rest(group)?)));
    let name = group.map_or(call.name.as_str(), |(_, name)| name);
    let mut item = json!({ "id": id, "type": "function_call", "call_id": call.id, "name": name,
                           "arguments": arguments, "status": status });
    if let Some((group, _)) = group {
        item["namespace"] = group.as_str().into();
    }
    item
}

/// A response around its output.
fn response(head: &Head, echo: &Echo, status: &str, output: &Value, used: Option<&Usage>) -> Value {
    let is_incomplete = status == "incomplete";
    json!({
        "id": head.id, "object": "response", "created_at": head.created, "status": status,
        "error": null,
        "incomplete_details": is_incomplete.then(|| json!({ "reason": "max_output_tokens" })),
        "instructions": echo.instructions, "max_output_tokens": echo.max_output_tokens,
        "model": head.model, "output": output, "parallel_tool_calls": echo.parallel,
        "previous_response_id": null, "reasoning": echo.reasoning, "store": false,
        "temperature": echo.temperature, "text": { "format": echo.format },
        "tool_choice": echo.tool_choice, "tools": echo.tools, "top_p": echo.top_p,
        "truncation": "disabled", "usage": used.map(usage), "user": null,
        "metadata": echo.metadata,
    })
}

const fn status(finish: &Finish) -> &'static str {
    match finish {
        Finish::Length | Finish::Cut => "incomplete",
        Finish::Stop | Finish::StopText(_) | Finish::Calls => "completed",
    }
}

/// An answer, whole.
pub(crate) fn whole(head: &Head, echo: &Echo, answer: &Answer) -> Value {
    let status = status(&answer.finish);
    let mut output = Vec::new();
    if !answer.reasoning.is_empty() {
        output.push(reasoning_item(&new_id("rs_"), &answer.reasoning, "completed"));
    }
    if !answer.text.is_empty() || answer.calls.is_empty() && answer.reasoning.is_empty() {
        let part = text_part(&answer.text, &chances(&answer.chances));
        output.push(message_item(&new_id("msg_"), status, &json!([part])));
    }
    for call in &answer.calls {
        let (id, arguments) = (new_id("fc_"), call.arguments_text());
        output.push(call_item(&id, call, &arguments, "completed", &echo.namespaces));
    }
    response(head, echo, status, &output.into(), Some(&answer.usage))
}

/// The item of output that is being written.
enum Open {
    Nothing,
    Reasoning { id: String, text: String },
    Message { id: String, text: String, chances: Vec<TokenChance> },
}

/// Events of a stream.
pub(crate) struct Events {
    head: Head,
    echo: Echo,
    sequence: u64,
    open: Open,
    /// Items that are complete.
    output: Vec<Value>,
    whole: Collector,
}

impl Events {
    pub(crate) fn new(head: Head, echo: Echo, prompt: usize) -> Self {
        let whole = Collector::new(prompt);
        Self { head, echo, sequence: 0, open: Open::Nothing, output: Vec::new(), whole }
    }

    fn send(&mut self, name: &str, mut data: Value, out: &mut String) {
        data["type"] = name.into();
        data["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        sse(out, Some(name), &data);
    }

    fn added(&mut self, item: &Value, out: &mut String) {
        let index = self.output.len();
        self.send(
            "response.output_item.added",
            json!({ "output_index": index, "item": item }),
            out,
        );
    }

    fn done(&mut self, item: Value, out: &mut String) {
        let index = self.output.len();
        self.send("response.output_item.done", json!({ "output_index": index, "item": item }), out);
        self.output.push(item);
    }

    fn part(&mut self, name: &str, id: &str, part: &Value, out: &mut String) {
        let index = self.output.len();
        let data =
            json!({ "item_id": id, "output_index": index, "content_index": 0, "part": part });
        self.send(name, data, out);
    }

    fn close(&mut self, status: &str, out: &mut String) {
        let index = self.output.len();
        match std::mem::replace(&mut self.open, Open::Nothing) {
            Open::Nothing => {}
            Open::Reasoning { id, text } => {
                let data = json!({ "item_id": id, "output_index": index, "content_index": 0, "text": text });
                self.send("response.reasoning_text.done", data, out);
                self.done(reasoning_item(&id, &text, "completed"), out);
            }
            Open::Message { id, text, chances } => {
                let logprobs = self::chances(&chances);
                let data = json!({ "item_id": id, "output_index": index, "content_index": 0,
                                   "text": text, "logprobs": logprobs });
                self.send("response.output_text.done", data, out);
                let part = text_part(&text, &logprobs);
                self.part("response.content_part.done", &id, &part, out);
                self.done(message_item(&id, status, &json!([part])), out);
            }
        }
    }

    fn open_message(&mut self, out: &mut String) {
        if matches!(self.open, Open::Message { .. }) {
            return;
        }
        self.close("completed", out);
        let id = new_id("msg_");
        self.added(&message_item(&id, "in_progress", &json!([])), out);
        self.part("response.content_part.added", &id, &text_part("", &json!([])), out);
        self.open = Open::Message { id, text: String::new(), chances: Vec::new() };
    }

    fn say(&mut self, more: &str, chance: Option<&TokenChance>, out: &mut String) {
        self.open_message(out);
        let index = self.output.len();
        let Open::Message { id, text, chances } = &mut self.open else { return };
        text.push_str(more);
        chances.extend(chance.cloned());
        let logprobs =
            chance.map_or_else(|| json!([]), |chance| self::chances(std::slice::from_ref(chance)));
        let data = json!({ "item_id": id, "output_index": index, "content_index": 0,
                           "delta": more, "logprobs": logprobs });
        self.send("response.output_text.delta", data, out);
    }

    fn think(&mut self, more: &str, out: &mut String) {
        if !matches!(self.open, Open::Reasoning { .. }) {
            self.close("completed", out);
            let id = new_id("rs_");
            self.added(&reasoning_item(&id, "", "in_progress"), out);
            self.open = Open::Reasoning { id, text: String::new() };
        }
        let index = self.output.len();
        let Open::Reasoning { id, text } = &mut self.open else { return };
        text.push_str(more);
        let data =
            json!({ "item_id": id, "output_index": index, "content_index": 0, "delta": more });
        self.send("response.reasoning_text.delta", data, out);
    }

    fn call(&mut self, call: &Call, out: &mut String) {
        self.close("completed", out);
        let (id, index, arguments) = (new_id("fc_"), self.output.len(), call.arguments_text());
        let item = |arguments: &str, status| {
            call_item(&id, call, arguments, status, &self.echo.namespaces)
        };
        let (begun, complete) = (item("", "in_progress"), item(&arguments, "completed"));
        self.added(&begun, out);
        let delta = json!({ "item_id": id, "output_index": index, "delta": arguments });
        self.send("response.function_call_arguments.delta", delta, out);
        let done = json!({ "item_id": id, "output_index": index, "name": call.name,
                           "arguments": arguments });
        self.send("response.function_call_arguments.done", done, out);
        self.done(complete, out);
    }
}

impl Encoder for Events {
    fn begin(&mut self, out: &mut String) {
        let empty = response(&self.head, &self.echo, "in_progress", &json!([]), None);
        self.send("response.created", json!({ "response": empty }), out);
        self.send("response.in_progress", json!({ "response": empty }), out);
    }

    fn event(&mut self, _: usize, event: &Event, out: &mut String) {
        progress(event, out);
        // What fails goes another way.
        let _ = self.whole.add(event);
        let Event::Token(token) = event else { return };
        let mut chance = token.chance.as_ref();
        for piece in &token.pieces {
            match piece {
                Piece::Reasoning(text) => self.think(text, out),
                Piece::Text(text) => self.say(text, chance.take(), out),
                Piece::Call(call) => self.call(call, out),
            }
        }
        if let (Some(chance), Open::Message { chances, .. }) = (chance, &mut self.open) {
            chances.push(chance.clone());
        }
    }

    fn broke(&mut self, error: &ApiError, out: &mut String) {
        let output = Value::from(self.output.clone());
        let mut failed = response(&self.head, &self.echo, "failed", &output, None);
        failed["error"] = json!({ "code": "server_error", "message": error.message });
        self.send("response.failed", json!({ "response": failed }), out);
    }

    fn end(&mut self, out: &mut String) {
        let status = status(&self.whole.answer.finish);
        if self.output.is_empty() && matches!(self.open, Open::Nothing) {
            self.open_message(out);
        }
        self.close(status, out);
        let output = Value::from(self.output.clone());
        let used = self.whole.answer.usage;
        let done = response(&self.head, &self.echo, status, &output, Some(&used));
        let name = if status == "completed" { "response.completed" } else { "response.incomplete" };
        self.send(name, json!({ "response": done }), out);
    }
}

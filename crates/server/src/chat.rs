//! One request and one answer, which all dialects translate to and from.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Map, Value, json};
use session::SamplerConfig;

use crate::error::ApiError;

/// Messages of a conversation.
pub(crate) const MAX_MESSAGES: usize = 10_000;
/// Tools of a request.
const MAX_TOOLS: usize = 512;
/// Bytes of a tool's name.
const MAX_NAME: usize = 128;
/// Stop texts, and bytes of one.
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 1024;

/// Who says something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    System,
    User,
    Assistant,
    /// The result of a call.
    Tool,
}

/// One message.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Message {
    pub(crate) role: Role,
    pub(crate) text: String,
    /// What the model thought before it said that.
    pub(crate) reasoning: Option<String>,
    /// Calls that the model made.
    pub(crate) calls: Vec<Call>,
    /// The call that a result belongs to.
    pub(crate) call_id: Option<String>,
    /// The tool that a result comes from, or whoever speaks.
    pub(crate) name: Option<String>,
}

impl Message {
    pub(crate) fn new(role: Role, text: impl Into<String>) -> Self {
        Self {
            role,
            text: text.into(),
            reasoning: None,
            calls: Vec::new(),
            call_id: None,
            name: None,
        }
    }

    /// As chat templates know it.
    pub(crate) fn to_template(&self) -> Value {
        let role = match self.role {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        };
        let mut message = json!({ "role": role, "content": self.text });
        if let Some(reasoning) = &self.reasoning {
            message["reasoning_content"] = reasoning.as_str().into();
        }
        if !self.calls.is_empty() {
            let call = |call: &Call| {
                json!({ "id": call.id, "type": "function",
                        "function": { "name": call.name, "arguments": call.arguments } })
            };
            message["tool_calls"] = self.calls.iter().map(call).collect();
        }
        if let Some(id) = &self.call_id {
            message["tool_call_id"] = id.as_str().into();
        }
        if let Some(name) = &self.name {
            message["name"] = name.as_str().into();
        }
        message
    }
}

/// A call of a tool: always complete.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Call {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) arguments: Map<String, Value>,
}

impl Call {
    /// The arguments as the text that `OpenAI`'s dialect wants.
    pub(crate) fn arguments_text(&self) -> String {
        serde_json::to_string(&self.arguments).expect("a JSON map can be written as text")
    }
}

/// A tool that the model may call.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tool {
    pub(crate) name: String,
    pub(crate) description: Option<String>,
    /// A schema of an object.
    pub(crate) parameters: Value,
    /// Whether calls have to follow the schema to the letter.
    pub(crate) strict: bool,
}

impl Tool {
    /// A tool with a name that can stand in a prompt.
    pub(crate) fn new(
        name: String,
        description: Option<String>,
        parameters: Option<Value>,
        at: &str,
    ) -> Result<Self, ApiError> {
        check_name(&name, at)?;
        let parameters = crate::schema::normalised(parameters).map_err(|problem| {
            ApiError::invalid(format!("the parameters of `{name}`: {problem}")).at(at)
        })?;
        Ok(Self { name, description, parameters, strict: false })
    }

    /// As chat templates know it.
    pub(crate) fn to_template(&self) -> Value {
        let mut function = json!({ "name": self.name });
        if let Some(description) = &self.description {
            function["description"] = description.as_str().into();
        }
        function["parameters"] = self.parameters.clone();
        json!({ "type": "function", "function": function })
    }
}

/// Whether a name of a tool can stand in a prompt.
pub(crate) fn check_name(name: &str, at: &str) -> Result<(), ApiError> {
    let is_fine = |c: char| c.is_ascii_alphanumeric() || "_-.:/".contains(c);
    if name.is_empty() || name.len() > MAX_NAME || !name.chars().all(is_fine) {
        return Err(ApiError::invalid(format!(
            "`{at}` is not a name of a tool: needed are 1 to {MAX_NAME} letters, digits and `_-.:/`"
        ))
        .at(at));
    }
    Ok(())
}

/// Whether the model has to call a tool.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum ToolChoice {
    #[default]
    Auto,
    None,
    Required,
    Named(String),
}

/// What an answer has to look like.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) enum Format {
    #[default]
    Text,
    /// Any JSON object.
    JsonObject,
    /// JSON of a schema.
    Schema(Value),
}

/// Whether the model thinks first.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum Thinking {
    /// As the template has it.
    #[default]
    Default,
    Off,
    On {
        /// A word that some templates know.
        effort: Option<String>,
        /// Most tokens of thought.
        budget: Option<usize>,
    },
}

impl Thinking {
    /// On, with the effort that was said before, and at most so many tokens.
    pub(crate) fn on(self, budget: Option<i64>) -> Self {
        let effort = match self {
            Self::On { effort, .. } => effort,
            Self::Default | Self::Off => None,
        };
        Self::On { effort, budget: budget.and_then(|budget| usize::try_from(budget).ok()) }
    }
}

/// What a model is given to go on from.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Input {
    /// A conversation, through the model's template.
    Chat(Vec<Message>),
    /// A text as it is.
    Text(String),
    /// Tokens as they are.
    Tokens(Vec<u32>),
}

/// Settings of the sampler that a request changes.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Sampling {
    pub(crate) temperature: Option<f32>,
    pub(crate) top_p: Option<f32>,
    pub(crate) top_k: Option<usize>,
    pub(crate) min_p: Option<f32>,
    pub(crate) repeat_penalty: Option<f32>,
    pub(crate) presence_penalty: Option<f32>,
    pub(crate) frequency_penalty: Option<f32>,
    pub(crate) seed: Option<u64>,
    pub(crate) logit_bias: BTreeMap<u32, f32>,
}

impl Sampling {
    /// Over the model's own settings. A seed that is not given is a random one.
    pub(crate) fn over(&self, defaults: &SamplerConfig) -> SamplerConfig {
        SamplerConfig {
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_k: self.top_k.unwrap_or(defaults.top_k),
            // 0 keeps the likeliest alone, which is what a smallest number does too.
            top_p: self.top_p.unwrap_or(defaults.top_p).max(f32::MIN_POSITIVE),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            repeat_penalty: self.repeat_penalty.unwrap_or(defaults.repeat_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(defaults.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(defaults.frequency_penalty),
            seed: self.seed.unwrap_or_else(random_u64),
        }
    }
}

/// How long a model stays loaded after an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeepAlive {
    /// Until the server ends or another model is wanted.
    Forever,
    /// This long.
    For(Duration),
}

/// Everything that a request can ask for.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Ask {
    /// The model's name; the default model when absent.
    pub(crate) model: Option<String>,
    pub(crate) input: Input,
    pub(crate) tools: Vec<Tool>,
    pub(crate) tool_choice: ToolChoice,
    /// Whether several calls may be made at once.
    pub(crate) parallel: bool,
    pub(crate) format: Format,
    pub(crate) thinking: Thinking,
    /// Anything else for the template.
    pub(crate) template: Map<String, Value>,
    pub(crate) sampling: Sampling,
    /// Most tokens; as many as fit when absent.
    pub(crate) max_tokens: Option<usize>,
    pub(crate) stop: Vec<String>,
    /// Answers.
    pub(crate) n: usize,
    /// Likeliest tokens to tell beside each token's own probability.
    pub(crate) logprobs: Option<usize>,
    pub(crate) stream: bool,
    pub(crate) keep_alive: Option<KeepAlive>,
    /// The last message is the assistant's own and is to be gone on with.
    pub(crate) continues: bool,
}

impl Ask {
    pub(crate) fn new(input: Input) -> Self {
        Self {
            model: None,
            input,
            tools: Vec::new(),
            tool_choice: ToolChoice::Auto,
            parallel: true,
            format: Format::Text,
            thinking: Thinking::Default,
            template: Map::new(),
            sampling: Sampling::default(),
            max_tokens: None,
            stop: Vec::new(),
            n: 1,
            logprobs: None,
            stream: false,
            keep_alive: None,
            continues: false,
        }
    }

    /// What no dialect may ask for; puts results of calls into the calls' order.
    pub(crate) fn checked(mut self) -> Result<Self, ApiError> {
        check_stops(&self.stop)?;
        if self.tools.len() > MAX_TOOLS {
            let found = self.tools.len();
            return Err(ApiError::invalid(format!(
                "the request has {found} tools; at most {MAX_TOOLS} are accepted"
            ))
            .at("tools"));
        }
        let mut names: Vec<&str> = self.tools.iter().map(|tool| tool.name.as_str()).collect();
        names.sort_unstable();
        if let Some([name, _]) = names.array_windows().find(|[first, second]| first == second) {
            return Err(ApiError::invalid(format!("two tools are named `{name}`")).at("tools"));
        }
        match &self.tool_choice {
            ToolChoice::Required if self.tools.is_empty() => {
                return Err(ApiError::invalid(
                    "a call of a tool is required and there are no tools",
                )
                .at("tool_choice"));
            }
            ToolChoice::Named(name) if !names.contains(&name.as_str()) => {
                return Err(ApiError::invalid(format!(
                    "`tool_choice` names `{name}`, which is none of the tools"
                ))
                .at("tool_choice"));
            }
            _ => {}
        }
        let forced = matches!(self.tool_choice, ToolChoice::Required | ToolChoice::Named(_));
        if forced && self.format != Format::Text {
            return Err(ApiError::invalid(
                "an answer cannot be JSON of a format and a call of a tool at once",
            )
            .at("tool_choice"));
        }
        if let Input::Chat(messages) = &mut self.input {
            check_messages(messages)?;
            pair_results(messages)?;
            join_system(messages);
        }
        Ok(self)
    }
}

fn check_stops(stops: &[String]) -> Result<(), ApiError> {
    if stops.len() > MAX_STOPS {
        let found = stops.len();
        return Err(ApiError::invalid(format!(
            "the request has {found} stop texts; at most {MAX_STOPS} are accepted"
        ))
        .at("stop"));
    }
    if let Some(long) = stops.iter().find(|stop| stop.len() > MAX_STOP_BYTES) {
        let found = long.len();
        return Err(ApiError::invalid(format!(
            "a stop text has {found} bytes; at most {MAX_STOP_BYTES} are accepted"
        ))
        .at("stop"));
    }
    Ok(())
}

fn check_messages(messages: &[Message]) -> Result<(), ApiError> {
    match messages.len() {
        0 => Err(ApiError::invalid("there are no messages; at least one is needed").at("messages")),
        found if found > MAX_MESSAGES => Err(ApiError::invalid(format!(
            "the conversation has {found} messages; at most {MAX_MESSAGES} are accepted"
        ))
        .at("messages")),
        _ => Ok(()),
    }
}

/// Templates know results by their order, clients by their ids: results that follow calls are put into the order of
/// the calls.
fn pair_results(messages: &mut [Message]) -> Result<(), ApiError> {
    let mut at = 0;
    while at < messages.len() {
        if messages[at].role != Role::Tool {
            at += 1;
            continue;
        }
        let end = messages[at..].iter().position(|message| message.role != Role::Tool);
        let end = end.map_or(messages.len(), |end| at + end);
        let (before, rest) = messages.split_at_mut(at);
        let calls = before.last().filter(|message| message.role == Role::Assistant);
        let calls = calls.map_or(&[][..], |message| &message.calls);
        let results = &mut rest[..end - at];
        for (offset, result) in results.iter_mut().enumerate() {
            name_result(result, calls, offset)
                .map_err(|problem| ApiError::invalid(problem).at("messages"))?;
        }
        let place = |result: &Message| {
            let id = result.call_id.as_deref();
            calls.iter().position(|call| Some(call.id.as_str()) == id).unwrap_or(usize::MAX)
        };
        results.sort_by_key(place);
        at = end;
    }
    Ok(())
}

/// Finds a result's call: by id, else by the tool's name or the order.
fn name_result(result: &mut Message, calls: &[Call], offset: usize) -> Result<(), String> {
    let call = match (&result.call_id, &result.name) {
        (Some(id), _) => {
            let found = calls.iter().find(|call| call.id == *id);
            found.ok_or_else(|| {
                format!(
                    "a tool's result answers the call `{id}`, which the assistant's message before it does not have"
                )
            })?
        }
        (None, name) => {
            let by_name = |call: &&Call| name.as_deref() == Some(&call.name);
            let in_order = calls.get(offset).filter(|call| name.is_none() || by_name(call));
            match in_order.or_else(|| calls.iter().find(by_name)) {
                Some(call) => call,
                // Without ids nothing can be paired; the template takes it as it comes.
                None => return Ok(()),
            }
        }
    };
    result.call_id = Some(call.id.clone());
    result.name = Some(call.name.clone());
    Ok(())
}

/// Instructions at the start become one message: most templates allow one.
fn join_system(messages: &mut Vec<Message>) {
    let leading = messages.iter().take_while(|message| message.role == Role::System).count();
    if leading > 1 {
        let texts: Vec<&str> = messages[..leading].iter().map(|m| m.text.as_str()).collect();
        messages[0].text = texts.join("\n\n");
        messages.drain(1..leading);
    }
}

/// Why an answer ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Finish {
    /// The model ended it, or what it had to look like is complete.
    Stop,
    /// A stop text was met: this one.
    StopText(String),
    /// As many tokens as were allowed, or as fit.
    Length,
    /// It ended with calls.
    Calls,
    /// It was cancelled; nobody hears of it.
    Cut,
}

/// Tokens of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Usage {
    pub(crate) prompt: usize,
    /// Of the prompt, those that did not have to be read again.
    pub(crate) cached: usize,
    pub(crate) generated: usize,
    /// Of the generated ones, those of thought.
    pub(crate) reasoning: usize,
}

/// A token's probability, and those of others in its place.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TokenChance {
    pub(crate) bytes: Vec<u8>,
    pub(crate) logprob: f32,
    pub(crate) top: Vec<(Vec<u8>, f32)>,
}

/// A random number, from the system.
pub(crate) fn random_u64() -> u64 {
    // Without it, ids would repeat: the clock has to do.
    getrandom::u64().unwrap_or_else(|_| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.map_or(0, |since| since.as_nanos() as u64)
    })
}

/// An id that nobody else has, like `call_5f…`.
pub(crate) fn new_id(prefix: &str) -> String {
    format!("{prefix}{:016x}{:08x}", random_u64(), random_u64() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(id: &str, name: &str) -> Call {
        Call { id: id.to_owned(), name: name.to_owned(), arguments: Map::new() }
    }

    fn result(id: Option<&str>, name: Option<&str>) -> Message {
        let mut message = Message::new(Role::Tool, "x");
        message.call_id = id.map(str::to_owned);
        message.name = name.map(str::to_owned);
        message
    }

    fn with_results(results: Vec<Message>) -> Result<Vec<String>, ApiError> {
        let mut asked = Message::new(Role::Assistant, "");
        asked.calls = vec![call("a", "add"), call("b", "sub"), call("c", "add")];
        let mut messages = vec![Message::new(Role::User, "?"), asked];
        messages.extend(results);
        let Input::Chat(messages) = Ask::new(Input::Chat(messages)).checked()?.input else {
            panic!("it stays a conversation")
        };
        Ok(messages[2..].iter().filter_map(|m| m.call_id.clone()).collect())
    }

    #[test]
    fn results_come_in_the_order_of_their_calls() {
        let results =
            vec![result(Some("c"), None), result(Some("a"), None), result(Some("b"), None)];
        assert_eq!(with_results(results).unwrap(), ["a", "b", "c"]);
        let by_name = vec![result(None, Some("sub")), result(None, None)];
        assert_eq!(with_results(by_name).unwrap(), ["b", "b"]);
    }

    #[test]
    fn a_result_of_no_call_is_refused_by_its_id() {
        let error = with_results(vec![result(Some("zz"), None)]).unwrap_err();
        assert!(error.message.contains("`zz`"), "{}", error.message);
    }

    #[test]
    fn instructions_at_the_start_become_one() {
        let messages = vec![
            Message::new(Role::System, "a"),
            Message::new(Role::System, "b"),
            Message::new(Role::User, "c"),
        ];
        let ask = Ask::new(Input::Chat(messages)).checked().unwrap();
        let Input::Chat(messages) = ask.input else { panic!("it stays a conversation") };
        assert_eq!(messages.iter().map(|m| m.text.as_str()).collect::<Vec<_>>(), ["a\n\nb", "c"]);
    }

    #[test]
    fn a_seed_that_is_not_given_is_never_the_same() {
        let defaults = SamplerConfig::default();
        let seed = || Sampling::default().over(&defaults).seed;
        assert_ne!(seed(), seed());
        assert_eq!(Sampling { seed: Some(7), ..Sampling::default() }.over(&defaults).seed, 7);
    }
}

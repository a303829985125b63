//! Requests become the prompts that the templates' own tools make of the same conversations.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use session::{ChatTemplate, RenderOptions};

use crate::chat::{Ask, Input, Message, Tool};
use crate::fields::Fields;
use crate::openai;

fn fixture(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/fixtures/chat")).join(name)
}

/// A case's messages as a client sends them: calls and results with ids, arguments as text.
fn request(case: &Value) -> Value {
    let mut messages = case["messages"].as_array().unwrap().clone();
    let (mut made, mut answered) = (0, 0);
    for message in &mut messages {
        for call in message["tool_calls"].as_array_mut().into_iter().flatten() {
            let function = call.get("function").unwrap_or(call).clone();
            let arguments = match &function["arguments"] {
                Value::String(text) => text.clone(),
                other => other.to_string(),
            };
            *call = json!({ "id": format!("call_{made}"), "type": "function",
                            "function": { "name": function["name"], "arguments": arguments } });
            made += 1;
        }
        if message["tool_calls"].is_null() {
            message.as_object_mut().unwrap().remove("tool_calls");
        }
        if message["role"] == "tool" {
            message["tool_call_id"] = format!("call_{answered}").into();
            answered += 1;
        }
    }
    json!({ "messages": messages, "tools": case["tools"] })
}

fn rendered(case: &Value) -> Result<String, String> {
    let mut fields = Fields::of(request(case), "").unwrap();
    let problem = |error: crate::error::ApiError| error.message;
    let messages = openai::messages(&mut fields).map_err(problem)?;
    let tools = openai::tools(&mut fields).map_err(problem)?;
    let ask = Ask::new(Input::Chat(messages)).checked().map_err(problem)?;
    let Input::Chat(messages) = ask.input else { unreachable!("it stays a conversation") };
    let values: Vec<Value> = messages.iter().map(Message::to_template).collect();
    let mut options = RenderOptions {
        add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
        enable_thinking: case.get("enable_thinking").and_then(Value::as_bool),
        tools: (!tools.is_empty()).then(|| tools.iter().map(Tool::to_template).collect()),
        ..RenderOptions::default()
    };
    for key in ["preserve_thinking", "reasoning_effort"] {
        if let Some(value) = case.get(key) {
            options.extra.insert(key.to_owned(), value.clone());
        }
    }
    let template = std::fs::read_to_string(fixture(case["template"].as_str().unwrap())).unwrap();
    let template = ChatTemplate::parse(&template).unwrap();
    template.render(&values, &options).map_err(|error| error.to_string())
}

#[test]
fn requests_become_the_prompts_of_the_golden_conversations() {
    let cases: Value =
        serde_json::from_slice(&std::fs::read(fixture("cases.json")).unwrap()).unwrap();
    let (mut compared, mut different) = (0, Vec::new());
    for case in cases["cases"].as_array().unwrap() {
        let template = case["template"].as_str().unwrap();
        // The probes print values as they are, which is not what a request has.
        let is_chat = matches!(template, "chatml_think.jinja" | "xml_tools_effort.jinja");
        let is_ours = |message: &Value| {
            let is_text = message["content"].is_string() || message["content"].is_null();
            let roles = ["system", "user", "assistant", "tool"];
            is_text && roles.iter().any(|role| message["role"] == *role)
        };
        let messages = case["messages"].as_array().unwrap();
        if !is_chat || !messages.iter().all(is_ours) || messages.is_empty() {
            continue;
        }
        let Some(expected) = case["rendered"].as_str() else { continue };
        compared += 1;
        let found = rendered(case);
        if found.as_deref() != Ok(expected) {
            different.push(format!("{}: {found:?}\nneeded {expected:?}", case["id"]));
        }
    }
    assert!(compared > 60, "{compared} cases were compared");
    assert!(different.is_empty(), "{} differ:\n{}", different.len(), different.join("\n"));
}

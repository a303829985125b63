//! Chat templates against the renderings of Jinja2 in Hugging Face's environment.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use checkpoint::{MemorySource, Source, parse_text};
use serde_json::Value;
use session::{ChatTemplate, Message, RenderOptions, TemplateError};

fn fixture(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/fixtures/chat")).join(name)
}

fn cases() -> Vec<Value> {
    let json: Value =
        serde_json::from_slice(&std::fs::read(fixture("cases.json")).unwrap()).unwrap();
    let mut cases = json["cases"].as_array().unwrap().clone();
    // It prints Python's own forms of numbers, which no chat template does: advisory.
    cases.retain(|case| case["template"] != "python_repr_probe.jinja");
    cases
}

fn options(case: &Value) -> RenderOptions {
    let mut options = RenderOptions {
        add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
        enable_thinking: case.get("enable_thinking").and_then(Value::as_bool),
        tools: case.get("tools").cloned(),
        ..RenderOptions::default()
    };
    for key in ["preserve_thinking", "reasoning_effort"] {
        if let Some(value) = case.get(key) {
            options.extra.insert(key.to_owned(), value.clone());
        }
    }
    options
}

#[test]
fn malformed_templates_of_model_folders_are_refused() {
    let read = |case: &str| {
        let path = fixture(&format!("../bad/folders/{case}/chat_template.jinja"));
        let bytes = std::fs::read(path).unwrap();
        let source: &dyn Source = &MemorySource(&bytes);
        parse_text(&[("chat_template.jinja", source)], "qwen3moe", None).unwrap()
    };
    let syntax = ChatTemplate::from_metadata(&read("template_syntax"), |_| None);
    assert!(matches!(syntax, Err(TemplateError::Parse(_))), "{syntax:?}");
    let endless = ChatTemplate::from_metadata(&read("template_endless"), |_| None).unwrap();
    let outcome = endless.render(&[Message::text("user", "hi")], &RenderOptions::default());
    assert!(matches!(outcome, Err(TemplateError::TooManySteps)), "{outcome:?}");
}

#[test]
fn templates_render_exactly_and_refuse_what_they_must() {
    let mut templates = BTreeMap::new();
    let (mut rendered, mut refused, mut wrong) = (0, 0, Vec::new());
    for case in cases() {
        let name = case["template"].as_str().unwrap().to_owned();
        let template = templates.entry(name).or_insert_with_key(|name| {
            ChatTemplate::parse(&std::fs::read_to_string(fixture(name)).unwrap()).unwrap()
        });
        let outcome = template.render(&case["messages"], &options(&case));
        match (&outcome, case.get("error").is_some()) {
            (Err(TemplateError::Render(words)), true) => {
                refused += 1;
                if case["error_class"] == "raised by template" {
                    let own = case["error_text"].as_str().unwrap();
                    assert!(words.contains(own), "{}: {words}", case["id"]);
                }
            }
            (Ok(text), false) if text == case["rendered"].as_str().unwrap() => rendered += 1,
            _ => wrong.push(format!("{}: {outcome:?}, expected {}", case["id"], case["rendered"])),
        }
    }
    assert!(
        wrong.is_empty(),
        "{} wrong, the first: {:#?}",
        wrong.len(),
        &wrong[..wrong.len().min(3)]
    );
    assert_eq!((rendered, refused), (324, 74));
}

#[test]
fn typed_messages_render_as_their_json_does() {
    let mut checked = 0;
    for case in cases().iter().filter(|case| case.get("error").is_none()) {
        // A message without content differs from one with null for templates that ask whether it is defined.
        let all = case["messages"].as_array().unwrap();
        if all.iter().any(|message| message.get("content").is_none()) {
            continue;
        }
        let messages: Vec<Message> = serde_json::from_value(case["messages"].clone()).unwrap();
        let source = std::fs::read_to_string(fixture(case["template"].as_str().unwrap())).unwrap();
        let text = ChatTemplate::parse(&source).unwrap().render(&messages, &options(case));
        assert_eq!(text.unwrap(), case["rendered"].as_str().unwrap(), "{}", case["id"]);
        checked += 1;
    }
    assert!(checked > 250, "only {checked} cases");
}

#[test]
fn the_demo_model_s_template_opens_an_answer_without_thinking() {
    let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/sakia-demo-Q4_K_M.gguf");
    let metadata = checkpoint::open(Path::new(demo)).unwrap().metadata;
    let template = ChatTemplate::from_metadata(&metadata, |_| None).unwrap();
    assert!(!template.is_fallback());
    let options = RenderOptions {
        add_generation_prompt: true,
        enable_thinking: Some(false),
        ..RenderOptions::default()
    };
    let messages = [Message::text("user", "What is the capital of France?")];
    // A prompt of the model's own samples.
    let expected = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";
    assert_eq!(template.render(&messages, &options).unwrap(), expected);
}

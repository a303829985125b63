//! Tokenizer and chat template against what other software gives.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::PathBuf;

use serde_json::Value;
use session::{ChatTemplate, OpenModel, RenderOptions, Specials, Tokenizer};

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/fixtures")).join(name)
}

fn json(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(fixture(name)).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn check_tokenizer(tokenizer: &Tokenizer, cases: &Value, at_least: usize) {
    let mut checked = 0;
    for case in cases["cases"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let expected = ids(&case["ids"]);
        assert_eq!(tokenizer.encode(text, Specials::Parse).unwrap(), expected, "{text:?}");
        assert_eq!(
            tokenizer.decode(&expected).unwrap(),
            case["decoded"].as_str().unwrap(),
            "{text:?}"
        );
        if let Some(plain) = case.get("ids_specials_as_text") {
            assert_eq!(
                tokenizer.encode(text, Specials::AsText).unwrap(),
                ids(plain),
                "{text:?} as text"
            );
        }
        checked += 1;
    }
    assert!(checked >= at_least, "only {checked} cases");
}

#[test]
fn ids_equal_the_golden_ones_for_both_pre_tokenisers() {
    for name in ["qwen2", "qwen35"] {
        let model = OpenModel::open(&fixture(&format!("models/tok-tiny/{name}.gguf"))).unwrap();
        check_tokenizer(&model.tokenizer, &json(&format!("tokenizer/tiny_{name}.json")), 290);
    }
}

#[test]
fn a_model_with_an_unknown_tokenizer_opens_and_refuses_text() {
    let model = OpenModel::open(&fixture("models/qwen3_moe-a/f32.gguf")).unwrap();
    let error = model.tokenizer.encode("hello", Specials::Parse).unwrap_err();
    assert_eq!(error.to_string(), "tokenizer model `llama` is not supported; supported: gpt2");
}

#[test]
fn templates_render_exactly_and_refuse_what_they_must() {
    let cases = json("chat/cases.json");
    let (mut rendered, mut refused, mut wrong) = (0, 0, Vec::new());
    for case in cases["cases"].as_array().unwrap() {
        let name = case["template"].as_str().unwrap();
        if name == "python_repr_probe.jinja" {
            continue;
        }
        let source = std::fs::read_to_string(fixture("chat").join(name)).unwrap();
        let template = ChatTemplate::parse(&source).unwrap();
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
        let id = case["id"].as_str().unwrap();
        match (template.render(&case["messages"], &options), case.get("error").is_some()) {
            (Err(_), true) => refused += 1,
            (Ok(text), false) if text == case["rendered"].as_str().unwrap() => rendered += 1,
            (outcome, _) => wrong.push(format!("{id}: {outcome:?}, expected {}", case["rendered"])),
        }
    }
    assert!(
        wrong.is_empty(),
        "{} wrong, the first: {:#?}",
        wrong.len(),
        &wrong[..wrong.len().min(4)]
    );
    assert_eq!((rendered, refused), (324, 74));
}

#[test]
fn a_template_that_never_ends_is_stopped() {
    let template = ChatTemplate::parse(
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    )
    .unwrap();
    assert!(template.render(&Value::Array(Vec::new()), &RenderOptions::default()).is_err());
}

use serde_json::{Value, json};

use super::Server;
use crate::testing::{Line, OTHER};

fn ask(text: &str, more: &Value) -> Value {
    let mut body = json!({ "model": "demo", "messages": [{ "role": "user", "content": text }] });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

#[test]
fn a_chat_streams_lines_unless_it_is_told_not_to() {
    let says = Line::Says("<think>\nHm\n</think>\n\nHello there");
    let server = Server::start([says.clone(), says]);
    let reply = server.post("/api/chat", &ask("Hi", &json!({ "think": true })));
    assert_eq!(reply.header("content-type"), Some("application/x-ndjson"));
    let lines = reply.lines();
    let text = |field: &str| -> String {
        lines.iter().filter_map(|line| line["message"][field].as_str()).collect()
    };
    assert_eq!((text("content"), text("thinking")), ("Hello there".to_owned(), "Hm".to_owned()));
    let (last, others) = lines.split_last().unwrap();
    assert!(others.iter().all(|line| line["done"] == false));
    assert_eq!((&last["done"], &last["done_reason"]), (&json!(true), &json!("stop")));
    assert!(
        last["eval_count"].as_u64().unwrap() > 3 && last["prompt_eval_count"].as_u64().unwrap() > 3
    );
    let whole =
        server.post("/api/chat", &ask("Hi", &json!({ "stream": false, "think": false }))).json();
    assert_eq!(whole["message"]["content"], "Hello there");
    assert_eq!(whole["done"], true);
    assert!(server.prompts()[1].ends_with("</think>\n\n"));
}

#[test]
fn tools_formats_and_options_are_understood() {
    let call =
        "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";
    let server = Server::start([
        Line::Says(call),
        Line::Says("Sunny."),
        Line::Babbles("No"),
        Line::Babbles("a"),
    ]);
    let tools = json!([{ "type": "function", "function": { "name": "weather", "parameters": { "type": "object" } } }]);
    let body = ask("Weather?", &json!({ "stream": false, "tools": tools }));
    let message = server.post("/api/chat", &body).json()["message"].clone();
    assert_eq!(message["tool_calls"][0]["function"]["arguments"], json!({ "city": "Rome" }));
    let mut next = body;
    next["messages"].as_array_mut().unwrap().extend([
        json!({ "role": "assistant", "content": "", "tool_calls": [{ "function": { "name": "weather", "arguments": { "city": "Rome" } } }] }),
        json!({ "role": "tool", "tool_name": "weather", "content": "sun" }),
    ]);
    assert_eq!(server.post("/api/chat", &next).json()["message"]["content"], "Sunny.");
    let schema = json!({ "type": "object", "properties": { "a": { "const": 1 } }, "required": ["a"], "additionalProperties": false });
    let json =
        server.post("/api/chat", &ask("x", &json!({ "stream": false, "format": schema }))).json();
    let text = json["message"]["content"].as_str().unwrap();
    assert_eq!(serde_json::from_str::<Value>(text).unwrap(), json!({ "a": 1 }), "{text}");
    let options = json!({ "num_predict": 3, "num_ctx": 4096, "temperature": 0, "seed": 1 });
    let cut =
        server.post("/api/chat", &ask("x", &json!({ "stream": false, "options": options }))).json();
    assert_eq!((&cut["done_reason"], &cut["eval_count"]), (&json!("length"), &json!(3)));
    let refused = server.post("/api/chat", &ask("x", &json!({ "options": { "mirostat": 2 } })));
    assert_eq!(refused.status, 400);
    assert!(refused.json()["error"].as_str().unwrap().contains("options.mirostat"));
}

#[test]
fn a_prompt_is_answered_and_a_model_is_loaded_and_unloaded() {
    let server = Server::start([Line::Says("Hello"), Line::Says("raw")]);
    let body =
        json!({ "model": "demo:latest", "prompt": "Hi", "system": "Brief.", "stream": false });
    let answer = server.post("/api/generate", &body).json();
    assert_eq!((&answer["response"], &answer["done"]), (&json!("Hello"), &json!(true)));
    let raw = json!({ "model": "demo", "prompt": "Once", "raw": true });
    let lines = server.post("/api/generate", &raw).lines();
    assert_eq!(lines[0]["response"], "raw");
    assert_eq!(server.prompts()[1], "Once");
    assert_eq!(server.get("/api/ps").json()["models"][0]["name"], "demo");
    let unload = server.post("/api/generate", &json!({ "model": "demo", "keep_alive": 0 }));
    assert_eq!(unload.json()["done_reason"], "unload");
    assert_eq!(server.get("/api/ps").json(), json!({ "models": [] }));
    let load =
        server.post("/api/chat", &json!({ "model": OTHER, "messages": [], "keep_alive": "1h" }));
    assert_eq!(load.json()["done_reason"], "load", "{}", load.body);
    let running = server.get("/api/ps").json();
    assert_eq!(running["models"][0]["name"], OTHER);
    assert_eq!(running["models"][0]["context_length"], 1024);
}

#[test]
fn models_are_listed_and_shown() {
    let server = Server::start([]);
    let tags = server.get("/api/tags").json();
    let names: Vec<&str> = tags["models"]
        .as_array()
        .unwrap()
        .iter()
        .map(|model| model["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["demo", OTHER]);
    assert_eq!(tags["models"][0]["modified_at"], "2023-11-14T22:13:20.000000000Z");
    let show = server.post("/api/show", &json!({ "model": "demo" }));
    assert_eq!(show.json()["capabilities"], json!(["completion", "tools"]));
    let missing = server.post("/api/show", &json!({ "model": "gone" }));
    assert_eq!(missing.status, 404);
    assert!(missing.json()["error"].as_str().unwrap().contains("there is no model `gone`"));
    assert!(server.get("/api/version").json()["version"].is_string());
}

#[test]
fn an_answer_that_breaks_off_ends_with_an_error_line() {
    let server = Server::start([Line::Breaks("Hi"), Line::Full]);
    let lines = server.post("/api/chat", &ask("x", &json!({}))).lines();
    assert!(lines.last().unwrap()["error"].as_str().unwrap().contains("broke off"));
    assert_eq!(server.post("/api/chat", &ask("x", &json!({}))).status, 503);
}

use serde_json::{Value, json};

use super::Server;
use crate::testing::Line;

const PATH: &str = "/v1/messages";

fn ask(text: &str, more: &Value) -> Value {
    let mut body = json!({ "model": "demo", "max_tokens": 100,
                           "messages": [{ "role": "user", "content": text }] });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn tools() -> Value {
    json!([{ "name": "weather", "description": "Tells it", "input_schema": {
        "type": "object", "properties": { "city": { "type": "string" } }, "required": ["city"] } }])
}

#[test]
fn a_message_is_answered_whole_and_thinks_only_when_it_is_told_to() {
    let server = Server::start([Line::Says("Hello"), Line::Says("<think>\nHm\n</think>\n\nHello")]);
    let reply =
        server.post(PATH, &ask("Hi", &json!({ "system": [{ "type": "text", "text": "Brief." }] })));
    let answer = reply.json();
    assert_eq!(
        (&answer["type"], &answer["role"]),
        (&json!("message"), &json!("assistant")),
        "{answer}"
    );
    assert_eq!(answer["content"], json!([{ "type": "text", "text": "Hello" }]));
    assert_eq!(
        (&answer["stop_reason"], &answer["stop_sequence"]),
        (&json!("end_turn"), &Value::Null)
    );
    assert!(server.prompts()[0].ends_with("<think>\n\n</think>\n\n"));
    let thinking = json!({ "thinking": { "type": "enabled", "budget_tokens": 1024 } });
    let answer = server.post(PATH, &ask("Hi", &thinking)).json();
    assert_eq!(answer["content"][0]["thinking"], "Hm");
    assert_eq!(answer["content"][1]["text"], "Hello");
    assert!(server.prompts()[1].ends_with("assistant\n"));
}

#[test]
fn a_budget_of_thought_ends_the_thought() {
    let server = Server::start([Line::Babbles("<think>\nHm hm")]);
    let body = ask(
        "Hi",
        &json!({ "thinking": { "type": "enabled", "budget_tokens": 8 }, "max_tokens": 40 }),
    );
    let answer = server.post(PATH, &body).json();
    assert_eq!(answer["content"][0]["type"], "thinking", "{answer}");
    assert_eq!(
        answer["content"][1]["type"], "text",
        "what comes after the budget is text: {answer}"
    );
}

#[test]
fn a_stream_has_the_events_that_clients_count_on() {
    let says = "<think>\nHm\n</think>\n\nLet me see.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";
    let server = Server::start([Line::Says(says)]);
    let more = json!({ "stream": true, "tools": tools(), "thinking": { "type": "adaptive" } });
    let reply = server.post(PATH, &ask("Weather?", &more));
    let events = reply.events();
    let mut kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    kinds.dedup();
    assert_eq!(
        kinds,
        [
            "message_start",
            "ping",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
    );
    for event in &events {
        let name = format!("event: {}\n", event["type"].as_str().unwrap());
        assert!(reply.body.contains(&name));
    }
    let starts: Vec<&Value> =
        events.iter().filter(|e| e["type"] == "content_block_start").collect();
    let blocks: Vec<&str> =
        starts.iter().map(|event| event["content_block"]["type"].as_str().unwrap()).collect();
    assert_eq!(blocks, ["thinking", "text", "tool_use"]);
    let json: String =
        events.iter().filter_map(|event| event["delta"]["partial_json"].as_str()).collect();
    assert_eq!(serde_json::from_str::<Value>(&json).unwrap(), json!({ "city": "Rome" }));
    let text: String = events.iter().filter_map(|event| event["delta"]["text"].as_str()).collect();
    assert_eq!(text, "Let me see.");
    let end = events.iter().find(|event| event["type"] == "message_delta").unwrap();
    assert_eq!(end["delta"]["stop_reason"], "tool_use");
    assert!(end["usage"]["output_tokens"].as_u64().unwrap() > 10);
}

#[test]
fn results_of_tools_come_before_what_else_the_user_says() {
    let server = Server::start([Line::Says("Sunny.")]);
    let mut body = ask("Weather?", &json!({ "tools": tools() }));
    body["messages"] = json!([
        { "role": "user", "content": "Weather?" },
        { "role": "assistant", "content": [
            { "type": "thinking", "thinking": "Hm", "signature": "" },
            { "type": "text", "text": "Wait." },
            { "type": "tool_use", "id": "toolu_1", "name": "weather", "input": { "city": "Rome" } }] },
        { "role": "user", "content": [
            { "type": "text", "text": "And?" },
            { "type": "tool_result", "tool_use_id": "toolu_1", "is_error": true,
              "content": [{ "type": "text", "text": "no sun" }] }] }
    ]);
    assert_eq!(server.post(PATH, &body).status, 200);
    let prompt = &server.prompts()[0];
    let (result, text) = (prompt.find("Error: no sun").unwrap(), prompt.find("And?").unwrap());
    assert!(result < text, "{prompt}");
}

#[test]
fn an_answer_that_was_begun_is_gone_on_with() {
    let server = Server::start([Line::Says(" is Rome.")]);
    let mut body = ask("Capital?", &json!({}));
    body["messages"].as_array_mut().unwrap().push(json!({ "role": "assistant", "content": "It" }));
    let answer = server.post(PATH, &body).json();
    assert_eq!(answer["content"][0]["text"], " is Rome.");
    assert!(server.prompts()[0].ends_with("</think>\n\nIt"), "{}", server.prompts()[0]);
}

#[test]
fn errors_and_stops_are_in_this_dialects_own_words() {
    let server = Server::start([Line::Says("one END two"), Line::Breaks("Hi"), Line::Full]);
    let stopped = server.post(PATH, &ask("x", &json!({ "stop_sequences": ["END"] }))).json();
    assert_eq!(
        (&stopped["stop_reason"], &stopped["stop_sequence"]),
        (&json!("stop_sequence"), &json!("END"))
    );
    let broken = server.post(PATH, &ask("x", &json!({ "stream": true })));
    assert!(broken.body.contains("event: error\n"), "{}", broken.body);
    assert_eq!(broken.events().last().unwrap()["error"]["type"], "api_error");
    let full = server.post(PATH, &ask("x", &json!({})));
    assert_eq!((full.status, full.header("retry-after")), (529, Some("7")));
    assert_eq!(full.json()["error"]["type"], "overloaded_error");
    let missing = server.post(PATH, &json!({ "messages": [{ "role": "user", "content": "x" }] }));
    assert_eq!(missing.status, 400);
    assert_eq!(
        missing.json(),
        json!({ "type": "error", "error": {
        "type": "invalid_request_error", "message": "`max_tokens` is missing" } })
    );
    assert_eq!(server.get("/v1/messages").json()["type"], "error");
}

#[test]
fn tokens_are_counted_without_an_answer() {
    let server = Server::start([Line::Says("x")]);
    let mut body = ask("Hello world", &json!({ "tools": tools() }));
    let counted = server.post("/v1/messages/count_tokens", &body).json();
    let answer = server.post(PATH, &body).json();
    let usage = &answer["usage"];
    let read = usage["input_tokens"].as_u64().unwrap()
        + usage["cache_read_input_tokens"].as_u64().unwrap();
    assert_eq!(counted, json!({ "input_tokens": read }));
    body.as_object_mut().unwrap().remove("max_tokens");
    assert_eq!(server.post("/v1/messages/count_tokens", &body).status, 200);
}

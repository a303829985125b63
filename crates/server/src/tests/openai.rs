#![expect(clippy::needless_pass_by_value, reason = "so that cases are literals")]

use serde_json::{Value, json};

use super::Server;
use crate::testing::Line;

const CHAT: &str = "/v1/chat/completions";

fn ask(text: &str) -> Value {
    json!({ "model": "demo", "messages": [{ "role": "user", "content": text }] })
}

fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn weather() -> Value {
    json!([{ "type": "function", "function": { "name": "weather", "parameters": {
        "type": "object", "properties": { "city": { "type": "string" }, "days": { "type": "integer" } },
        "required": ["city"], "additionalProperties": false } } }])
}

/// The deltas of a stream's first choice, put together.
fn joined(events: &[Value], field: &str) -> String {
    let delta = |event: &Value| event["choices"][0]["delta"][field].as_str().map(str::to_owned);
    events.iter().filter_map(delta).collect()
}

#[test]
fn a_conversation_is_answered_whole() {
    let server = Server::start([Line::Says("Hello there.")]);
    let messages = json!([
        { "role": "system", "content": "Be brief." },
        { "role": "user", "content": [{ "type": "text", "text": "Hi" }] },
        { "role": "assistant", "content": "Yes?" },
        { "role": "user", "content": "Say hello" }
    ]);
    let reply = server.post(CHAT, &json!({ "model": "demo", "messages": messages, "seed": 5 }));
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert_eq!(reply.header("sakia-seed"), Some("5"));
    let answer = reply.json();
    assert_eq!(answer["object"], "chat.completion");
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"]["content"], "Hello there.");
    assert_eq!((&choice["finish_reason"], &choice["logprobs"]), (&json!("stop"), &Value::Null));
    let usage = &answer["usage"];
    let (prompt, generated) =
        (usage["prompt_tokens"].as_u64().unwrap(), &usage["completion_tokens"]);
    assert!(prompt > 20);
    assert_eq!(usage["total_tokens"], prompt + generated.as_u64().unwrap());
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], prompt / 64 * 64);
    let prompt = &server.prompts()[0];
    assert!(
        prompt
            .starts_with("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>"),
        "{prompt}"
    );
    assert!(prompt.ends_with("Say hello<|im_end|>\n<|im_start|>assistant\n"), "{prompt}");
}

#[test]
fn a_stream_brings_every_token_and_ends_with_usage() {
    let server = Server::start([Line::Says("One two three."), Line::Says("x")]);
    let body =
        with(ask("Count"), json!({ "stream": true, "stream_options": { "include_usage": true } }));
    let reply = server.post(CHAT, &body);
    assert_eq!(reply.header("content-type"), Some("text/event-stream"));
    assert!(reply.body.contains(": prefill "), "progress comes as comments: {}", reply.body);
    assert!(reply.body.ends_with("data: [DONE]\n\n"));
    let events = reply.events();
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    assert_eq!(joined(&events, "content"), "One two three.");
    let (usage, chunks) = events.split_last().unwrap();
    assert_eq!(usage["choices"], json!([]));
    let tokens = usage["usage"]["completion_tokens"].as_u64().unwrap() as usize;
    let texts = chunks.iter().filter(|chunk| {
        chunk["choices"][0]["delta"]["content"].as_str().is_some_and(|text| !text.is_empty())
    });
    assert_eq!(texts.count(), tokens, "a chunk for each token");
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "stop");
    let plain = server.post(CHAT, &with(ask("x"), json!({ "stream": true })));
    assert!(plain.events().iter().all(|event| event.get("usage").is_none()));
}

#[test]
fn thought_is_told_from_text() {
    let says = Line::Says("<think>\nHm, yes.\n</think>\n\nHello");
    let server = Server::start([says.clone(), says]);
    let message = &server.post(CHAT, &ask("Hi")).json()["choices"][0]["message"];
    assert_eq!(message["reasoning_content"], "Hm, yes.");
    assert_eq!(message["content"], "Hello");
    let events = server.post(CHAT, &with(ask("Hi"), json!({ "stream": true }))).events();
    assert_eq!(joined(&events, "reasoning_content"), "Hm, yes.");
    assert_eq!(joined(&events, "content"), "Hello");
}

#[test]
fn effort_turns_thought_off() {
    let server = Server::start([Line::Says("x"), Line::Says("x"), Line::Says("x")]);
    for more in [
        json!({ "reasoning_effort": "none" }),
        json!({ "chat_template_kwargs": { "enable_thinking": false } }),
        json!({ "reasoning_effort": "high" }),
    ] {
        assert_eq!(server.post(CHAT, &with(ask("Hi"), more)).status, 200);
    }
    let prompts = server.prompts();
    assert!(prompts[0].ends_with("<think>\n\n</think>\n\n"), "{}", prompts[0]);
    assert_eq!(prompts[0], prompts[1]);
    assert!(prompts[2].ends_with("assistant\n"));
}

#[test]
fn a_call_comes_whole_and_its_result_goes_back_to_it() {
    let call = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\", \"days\": \"3\"}}\n</tool_call>";
    let server = Server::start([Line::Says(call), Line::Says(call), Line::Says("Sunny.")]);
    let body = with(ask("Weather?"), json!({ "tools": weather() }));
    let choice = &server.post(CHAT, &body).json()["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], Value::Null);
    let made = &choice["message"]["tool_calls"][0];
    assert_eq!(made["function"]["name"], "weather");
    let arguments: Value =
        serde_json::from_str(made["function"]["arguments"].as_str().unwrap()).unwrap();
    assert_eq!(arguments, json!({ "city": "Rome", "days": 3 }));

    let events = server.post(CHAT, &with(body.clone(), json!({ "stream": true }))).events();
    let deltas: Vec<&Value> =
        events.iter().filter_map(|event| event["choices"][0]["delta"].get("tool_calls")).collect();
    assert_eq!(deltas.len(), 1, "never half of a call");
    assert_eq!(deltas[0][0]["index"], 0);
    assert_eq!(joined(&events, "content"), "", "no tag is shown");

    let mut next = body;
    next["messages"].as_array_mut().unwrap().extend([
        choice["message"].clone(),
        json!({ "role": "tool", "tool_call_id": made["id"], "content": "sun" }),
    ]);
    let answer = server.post(CHAT, &next);
    assert_eq!(answer.json()["choices"][0]["message"]["content"], "Sunny.", "{}", answer.body);
    let prompt = &server.prompts()[2];
    assert!(
        prompt
            .contains("{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\", \"days\": 3}}"),
        "{prompt}"
    );
    assert!(prompt.contains("<tool_response>\nsun\n</tool_response>"), "{prompt}");
}

#[test]
fn a_call_that_is_cut_is_text() {
    let server = Server::start([Line::Babbles("<tool_call>\n{\"name\": \"weather\", \"argum")]);
    let body = with(ask("Weather?"), json!({ "tools": weather(), "max_tokens": 12 }));
    let choice = &server.post(CHAT, &body).json()["choices"][0];
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(choice["message"].get("tool_calls"), None);
    assert!(choice["message"]["content"].as_str().unwrap().starts_with("<tool_call>"));
}

#[test]
fn a_required_call_and_a_schema_are_what_the_model_cannot_leave() {
    // It wants to say something else; the grammar leaves it the other tokens.
    let server = Server::start([Line::Babbles("I will not."), Line::Babbles("Never.")]);
    let tools = json!([{ "type": "function", "function": { "name": "stop" , "parameters": {
        "type": "object", "properties": {}, "additionalProperties": false } } }]);
    let body = with(
        ask("x"),
        json!({ "tools": tools, "tool_choice": "required", "parallel_tool_calls": false }),
    );
    let choice = &server.post(CHAT, &body).json()["choices"][0];
    assert_eq!(choice["message"]["tool_calls"][0]["function"]["name"], "stop", "{choice}");
    let schema = json!({ "type": "object", "properties": { "ok": { "enum": [true] } },
                         "required": ["ok"], "additionalProperties": false });
    let format = json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": schema, "strict": true } });
    let answer =
        server.post(CHAT, &with(ask("x"), json!({ "response_format": format, "max_tokens": 200 })));
    let text = answer.json()["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), json!({ "ok": true }), "{text}");
}

#[test]
fn a_strict_tool_is_called_by_its_schema_or_not_at_all() {
    let wrong = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"town\": 1}}\n</tool_call>";
    let server = Server::start([Line::Babbles(wrong), Line::Says("No call.")]);
    let mut tools = weather();
    tools[0]["function"]["strict"] = true.into();
    tools[0]["function"]["parameters"]["properties"]["city"] = json!({ "enum": ["Rome"] });
    let body = with(ask("x"), json!({ "tools": tools, "parallel_tool_calls": false }));
    let choice = &server.post(CHAT, &body).json()["choices"][0];
    let arguments = choice["message"]["tool_calls"][0]["function"]["arguments"].as_str();
    let arguments: Value = serde_json::from_str(arguments.unwrap_or_default()).unwrap();
    assert_eq!(arguments["city"], "Rome", "{choice}");
    assert_eq!(server.post(CHAT, &body).json()["choices"][0]["message"]["content"], "No call.");
}

#[test]
fn stops_limits_and_several_answers() {
    let says = Line::Says("one two END three");
    let server = Server::start([says.clone(), says.clone(), says.clone(), says]);
    let stopped = server.post(CHAT, &with(ask("x"), json!({ "stop": ["END"], "n": 2 }))).json();
    for index in 0..2 {
        assert_eq!(stopped["choices"][index]["index"], index);
        assert_eq!(stopped["choices"][index]["message"]["content"], "one two ");
        assert_eq!(stopped["choices"][index]["finish_reason"], "stop");
    }
    let cut = server.post(CHAT, &with(ask("x"), json!({ "max_completion_tokens": 1 }))).json();
    assert_eq!(cut["choices"][0]["finish_reason"], "length");
    assert_eq!(cut["usage"]["completion_tokens"], 1);
    let biased = with(
        ask("x"),
        json!({ "logit_bias": { "999999": 5 }, "logprobs": true, "top_logprobs": 2, "max_tokens": 2 }),
    );
    let choice = &server.post(CHAT, &biased).json()["choices"][0];
    let tokens = choice["logprobs"]["content"].as_array().unwrap();
    assert_eq!(tokens.len(), 2);
    assert_eq!(tokens[0]["top_logprobs"].as_array().unwrap().len(), 2);
    assert_eq!(tokens[0]["top_logprobs"][0]["token"], tokens[0]["token"]);
    let log = tokens[0]["logprob"].as_f64().unwrap();
    assert!((-0.1..=0.0).contains(&log), "{log}");
}

#[test]
fn what_cannot_be_had_is_refused_by_name() {
    let server = Server::start([]);
    for (more, param) in [
        (json!({ "audio": { "voice": "x" } }), "audio"),
        (json!({ "functions": [{}] }), "functions"),
        (json!({ "temprature": 1 }), "temprature"),
        (json!({ "temperature": 3 }), "temperature"),
        (json!({ "n": 0 }), "n"),
        (json!({ "top_logprobs": 3 }), "top_logprobs"),
        (json!({ "modalities": ["audio"] }), "modalities"),
        (json!({ "tool_choice": "required" }), "tool_choice"),
        (json!({ "logit_bias": { "x": 1 } }), "logit_bias"),
        (json!({ "tools": [{ "type": "web_search" }] }), "tools[0].type"),
        (json!({ "messages": [] }), "messages"),
        (
            json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url", "image_url": {} }] }] }),
            "messages[0].content[0].type",
        ),
        (
            json!({ "messages": [{ "role": "tool", "content": "x", "tool_call_id": "a" }] }),
            "messages",
        ),
        (
            json!({ "response_format": { "type": "json_schema", "json_schema": { "schema": { "type": "strin" } } } }),
            "response_format",
        ),
        (
            json!({ "response_format": { "type": "json_schema", "json_schema": {} } }),
            "response_format.json_schema.schema",
        ),
        (json!({ "chat_template_kwargs": { "messages": [] } }), "chat_template_kwargs.messages"),
    ] {
        let reply = server.post(CHAT, &with(ask("x"), more.clone()));
        let error = &reply.json()["error"];
        assert_eq!((reply.status, &error["param"]), (400, &json!(param)), "{more}: {}", reply.body);
        assert_eq!(error["type"], "invalid_request_error");
    }
    let long = server.post(CHAT, &ask(&"word ".repeat(2000)));
    assert_eq!(
        (long.status, &long.json()["error"]["code"]),
        (400, &json!("context_length_exceeded"))
    );
    let missing = server.post(CHAT, &with(ask("x"), json!({ "model": "gpt-4" })));
    assert_eq!(
        (missing.status, &missing.json()["error"]["code"]),
        (404, &json!("model_not_found"))
    );
    for harmless in ["user", "metadata", "store", "service_tier", "prompt_cache_key"] {
        let error = server.post(CHAT, &with(ask("x"), json!({ harmless: "x", "n": 0 }))).json();
        assert_eq!(error["error"]["param"], "n", "{harmless} is no reason");
    }
}

#[test]
fn an_answer_that_breaks_off_is_an_error_also_in_a_stream() {
    let breaks = || Line::Breaks("Hello");
    let server = Server::start([breaks(), breaks(), Line::Full]);
    let whole = server.post(CHAT, &ask("x"));
    assert_eq!((whole.status, &whole.json()["error"]["type"]), (500, &json!("server_error")));
    assert!(whole.body.contains("reading layer 3 failed"), "{}", whole.body);
    let stream = server.post(CHAT, &with(ask("x"), json!({ "stream": true })));
    let events = stream.events();
    assert_eq!(joined(&events, "content"), "Hello");
    assert_eq!(events.last().unwrap()["error"]["code"], "generation_failed");
    let full = server.post(CHAT, &ask("x"));
    assert_eq!((full.status, full.header("retry-after")), (503, Some("7")));
}

#[test]
fn a_text_is_gone_on_with() {
    let server = Server::start([
        Line::Says(" time"),
        Line::Says(" time"),
        Line::Says("<think>x"),
        Line::Says("x"),
    ]);
    let body = json!({ "model": "demo", "prompt": "Once upon a", "logprobs": 1 });
    let answer = server.post("/v1/completions", &body).json();
    assert_eq!(
        (&answer["object"], &answer["choices"][0]["text"]),
        (&json!("text_completion"), &json!(" time"))
    );
    assert_eq!(answer["choices"][0]["logprobs"]["text_offset"][0], 0);
    let events = server.post("/v1/completions", &with(body, json!({ "stream": true }))).events();
    let text: String = events.iter().filter_map(|e| e["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, " time");
    let raw = server.post("/v1/completions", &json!({ "prompt": [1, 2, 3] })).json();
    assert_eq!(raw["choices"][0]["text"], "<think>x");
    assert_eq!(server.prompts()[0], "Once upon a");
    for prompt in [json!(["a", "b"]), json!([]), json!([999_999]), json!(5), json!([1.5])] {
        let reply = server.post("/v1/completions", &json!({ "prompt": prompt }));
        assert_eq!(reply.status, 400, "{prompt}");
    }
    let one = server.post("/v1/completions", &json!({ "prompt": ["a"] }));
    assert_eq!(one.status, 200);
}

#[test]
fn responses_tell_items_as_they_come() {
    let says = Line::Says(
        "<think>\nHm\n</think>\n\nHello\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>",
    );
    let server = Server::start([says.clone(), says, Line::Says("Sunny.")]);
    let tool = json!({ "type": "function", "name": "weather", "parameters": weather()[0]["function"]["parameters"] });
    let body = json!({ "model": "demo", "instructions": "Be brief.", "input": "Weather?", "tools": [tool] });
    let whole = server.post("/v1/responses", &body).json();
    assert_eq!(whole["status"], "completed", "{whole}");
    let kinds: Vec<&str> = whole["output"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| item["type"].as_str().unwrap())
        .collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call"]);
    assert_eq!(whole["output"][1]["content"][0]["text"], "Hello");
    let events =
        server.post("/v1/responses", &with(body.clone(), json!({ "stream": true }))).events();
    for (index, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], index);
    }
    let deltas: String = events
        .iter()
        .filter(|event| event["type"] == "response.output_text.delta")
        .map(|event| event["delta"].as_str().unwrap())
        .collect();
    assert_eq!(deltas, "Hello");
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.completed");
    let strip = |output: &Value| {
        let items = output.as_array().unwrap().iter().cloned().map(|mut item| {
            item["id"].take();
            item.get_mut("call_id").map(Value::take);
            item
        });
        items.collect::<Vec<_>>()
    };
    assert_eq!(
        strip(&last["response"]["output"]),
        strip(&whole["output"]),
        "both forms say the same"
    );

    let call = &whole["output"][2];
    let mut next = body;
    next["input"] = json!([
        { "role": "user", "content": [{ "type": "input_text", "text": "Weather?" }] },
        whole["output"][0], whole["output"][1], call,
        { "type": "function_call_output", "call_id": call["call_id"], "output": "sun" }
    ]);
    let answer = server.post("/v1/responses", &next);
    assert_eq!(answer.json()["output"][0]["content"][0]["text"], "Sunny.", "{}", answer.body);
    let prompt = &server.prompts()[2];
    assert!(prompt.contains("Be brief.") && prompt.contains("<tool_response>\nsun"), "{prompt}");
    let stored =
        server.post("/v1/responses", &json!({ "input": "x", "previous_response_id": "resp_1" }));
    assert_eq!(
        (stored.status, &stored.json()["error"]["param"]),
        (400, &json!("previous_response_id"))
    );
}

//! Requests as programs send them that people use, with every field that they have: none is a reason to refuse.

use serde_json::{Value, json};

use super::Server;
use crate::testing::Line;

fn requests() -> Vec<Value> {
    serde_json::from_str(include_str!("clients.json")).unwrap()
}

#[test]
fn no_client_is_refused_for_a_field_that_changes_nothing() {
    let requests = requests();
    let server = Server::start(requests.iter().map(|_| Line::Says("Hello")));
    for request in &requests {
        let headers = format!("content-type: application/json\r\n{}", text(request, "headers"));
        let body = request["body"].to_string();
        let reply = server.request("POST", text(request, "path"), &headers, &body);
        assert_eq!(reply.status, 200, "{}: {}", request["client"], reply.body);
        assert!(reply.body.contains("Hel"), "{}: {}", request["client"], reply.body);
        assert!(!reply.body.contains("\"error\":{"), "{}: {}", request["client"], reply.body);
    }
}

fn text<'a>(request: &'a Value, field: &str) -> &'a str {
    request[field].as_str().unwrap()
}

/// The same requests with one field more, which nobody knows: a slip of the pen is told.
#[test]
fn a_field_that_nobody_knows_is_still_refused_by_its_name() {
    let server = Server::start([]);
    for request in requests() {
        let mut body = request["body"].clone();
        body["temprature"] = json!(1);
        let reply = server.post(text(&request, "path"), &body);
        assert_eq!(reply.status, 400, "{}: {}", request["client"], reply.body);
        assert!(reply.body.contains("`temprature`"), "{}: {}", request["client"], reply.body);
    }
}

#[test]
fn what_a_setting_off_would_be_is_no_reason_and_what_it_would_do_is() {
    let server = Server::start([]);
    for (options, found) in [
        (json!({ "mirostat": 2, "zz": 1 }), "options.mirostat"),
        (json!({ "mirostat": 0, "zz": 1 }), "options.zz"),
        (json!({ "typical_p": 0.5, "zz": 1 }), "options.typical_p"),
        (json!({ "tfs_z": 1, "zz": 1 }), "options.zz"),
    ] {
        let body = json!({ "model": "demo", "messages": [{ "role": "user", "content": "x" }],
                           "options": options });
        let reply = server.post("/api/chat", &body);
        assert!(reply.body.contains(found), "{options}: {}", reply.body);
    }
}

/// A call of a tool in a group comes back under the names that the client gave.
#[test]
fn tools_of_groups_are_called_by_group_and_name() {
    let says = "<tool_call>\n{\"name\": \"agents.wait_agent\", \"arguments\": {}}\n</tool_call>";
    let server = Server::start([Line::Says(says), Line::Says(says)]);
    let codex = requests().into_iter().find(|request| request["client"] == "Codex CLI").unwrap();
    let mut body = codex["body"].clone();
    let events = server.post("/v1/responses", &body).events();
    let is_call = |item: &&Value| item["item"]["type"] == "function_call";
    let items: Vec<&Value> = events.iter().filter(is_call).map(|event| &event["item"]).collect();
    assert_eq!(items.len(), 2, "added and done");
    body["stream"] = false.into();
    let whole = server.post("/v1/responses", &body).json();
    for item in items.into_iter().chain([&whole["output"][0]]) {
        let (name, group) = (&item["name"], &item["namespace"]);
        assert_eq!((name, group), (&json!("wait_agent"), &json!("agents")), "{item}");
    }
    let prompt = &server.prompts()[0];
    assert!(prompt.contains("agents.wait_agent") && !prompt.contains("web_search"), "{prompt}");
    body["tool_choice"] = json!({ "type": "web_search" });
    assert_eq!(server.post("/v1/responses", &body).status, 400, "nobody would search");
}

/// Agents of this dialect make room in a conversation when they read these words.
#[test]
fn a_prompt_that_is_too_long_is_told_in_words_that_agents_understand() {
    let server = Server::start([]);
    let text = "word ".repeat(2000);
    let body = json!({ "model": "demo", "max_tokens": 9,
                       "messages": [{ "role": "user", "content": text }] });
    for path in ["/v1/messages", "/v1/chat/completions", "/api/chat"] {
        let mut body = body.clone();
        if path == "/api/chat" {
            body.as_object_mut().unwrap().remove("max_tokens");
        }
        let reply = server.post(path, &body);
        let said = &reply.body;
        let number = said.split("prompt is too long: ").nth(1).and_then(|rest| {
            let (found, rest) = rest.split_once(" tokens > ")?;
            let (most, _) = rest.split_once(" maximum")?;
            Some((found.parse::<usize>().ok()?, most.parse::<usize>().ok()?))
        });
        let (found, most) = number.unwrap_or_else(|| panic!("{path}: {said}"));
        assert!(found > 2000 && most == 1023, "{path}: {said}");
        assert_eq!(reply.status, 400);
    }
}

#[test]
fn anthropics_clients_see_models_and_errors_in_their_own_form() {
    let server = Server::start([]);
    let version = "anthropic-version: 2023-06-01\r\n";
    let list = server.request("GET", "/v1/models", version, "").json();
    let model = &list["data"][0];
    assert_eq!((&model["type"], &model["display_name"]), (&json!("model"), &json!("demo")));
    assert_eq!(model["created_at"], "2023-11-14T22:13:20.000000000Z");
    let missing = server.request("GET", "/v1/models/gone", version, "");
    assert_eq!((missing.status, &missing.json()["type"]), (404, &json!("error")));
    assert_eq!(server.get("/v1/models/gone").json()["error"]["code"], "model_not_found");
}

#[test]
fn pages_of_an_allowed_origin_may_send_what_headers_they_have() {
    let server = Server::with([], |options| {
        options.cors_origins = vec!["http://page.example".to_owned()];
    });
    let asked = "origin: http://page.example\r\naccess-control-request-headers: authorization,x-stainless-lang\r\n";
    let reply = server.request("OPTIONS", "/v1/chat/completions", asked, "");
    let allowed = reply.header("access-control-allow-headers");
    assert_eq!((reply.status, allowed), (204, Some("authorization,x-stainless-lang")));
    let other = asked.replace("page.example", "other.example");
    let refused = server.request("OPTIONS", "/v1/chat/completions", &other, "");
    assert_eq!((refused.status, refused.header("access-control-allow-headers")), (403, None));
}

/// Clients divide by these.
#[test]
fn times_of_a_whole_answer_are_told_apart() {
    let server = Server::start([Line::Babbles("x")]);
    let body = json!({ "model": "demo", "stream": false, "options": { "num_predict": 20 },
                       "messages": [{ "role": "user", "content": "x" }] });
    let answer = server.post("/api/chat", &body).json();
    let nanos = |name: &str| answer[name].as_u64().unwrap();
    // The script sleeps after each token.
    assert!(nanos("eval_duration") >= 10_000_000, "{answer}");
    assert!(nanos("prompt_eval_duration") < nanos("total_duration"), "{answer}");
}

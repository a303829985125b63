//! What the server says of itself.

use serde_json::{Map, Value, json};

/// The schemas of requests and answers: data, not code.
const SCHEMAS: &str = include_str!("openapi.json");

/// How a path is described.
struct Operation {
    path: &'static str,
    method: &'static str,
    about: &'static str,
    /// The schema of the body, if it has one.
    request: Option<&'static str>,
    /// Types and schemas of the answer.
    answers: &'static [(&'static str, &'static str)],
    /// The schema of errors.
    error: &'static str,
    /// Whether it needs no key.
    is_open: bool,
}

const JSON: &str = "application/json";
const EVENTS: (&str, &str) = ("text/event-stream", "Text");
const LINES: (&str, &str) = ("application/x-ndjson", "Text");

const fn get(
    path: &'static str,
    about: &'static str,
    answers: &'static [(&'static str, &'static str)],
    error: &'static str,
) -> Operation {
    Operation { path, method: "get", about, request: None, answers, error, is_open: false }
}

const fn post(
    path: &'static str,
    about: &'static str,
    request: &'static str,
    answers: &'static [(&'static str, &'static str)],
    error: &'static str,
) -> Operation {
    let request = Some(request);
    Operation { path, method: "post", about, request, answers, error, is_open: false }
}

const OPERATIONS: [Operation; 17] = [
    Operation { is_open: true, ..get("/", "A word", &[("text/plain", "Text")], "Error") },
    Operation { is_open: true, ..get("/health", "Whether it runs", &[(JSON, "Health")], "Error") },
    get("/metrics", "Counters for Prometheus", &[("text/plain", "Text")], "Error"),
    get("/openapi.json", "This document", &[(JSON, "Any")], "Error"),
    get("/v1/models", "Models", &[(JSON, "Models")], "Error"),
    get("/v1/models/{id}", "A model", &[(JSON, "Model")], "Error"),
    post(
        "/v1/chat/completions",
        "Answers a conversation (OpenAI)",
        "ChatRequest",
        &[(JSON, "ChatCompletion"), EVENTS],
        "Error",
    ),
    post(
        "/v1/completions",
        "Goes on with a text (OpenAI)",
        "CompletionRequest",
        &[(JSON, "Completion"), EVENTS],
        "Error",
    ),
    post(
        "/v1/responses",
        "Answers a conversation (OpenAI), storing nothing",
        "ResponsesRequest",
        &[(JSON, "Response"), EVENTS],
        "Error",
    ),
    post(
        "/v1/messages",
        "Answers a conversation (Anthropic)",
        "MessagesRequest",
        &[(JSON, "AnthropicMessage"), EVENTS],
        "AnthropicError",
    ),
    post(
        "/v1/messages/count_tokens",
        "Counts the tokens of a conversation (Anthropic)",
        "CountRequest",
        &[(JSON, "Count")],
        "AnthropicError",
    ),
    get("/api/version", "Version (Ollama)", &[(JSON, "Version")], "OllamaError"),
    get("/api/tags", "Models (Ollama)", &[(JSON, "OllamaModels")], "OllamaError"),
    get("/api/ps", "Loaded models (Ollama)", &[(JSON, "OllamaModels")], "OllamaError"),
    post("/api/show", "A model (Ollama)", "ShowRequest", &[(JSON, "Any")], "OllamaError"),
    post(
        "/api/chat",
        "Answers a conversation (Ollama)",
        "OllamaChatRequest",
        &[(JSON, "OllamaAnswer"), LINES],
        "OllamaError",
    ),
    post(
        "/api/generate",
        "Answers a prompt (Ollama)",
        "OllamaGenerateRequest",
        &[(JSON, "OllamaAnswer"), LINES],
        "OllamaError",
    ),
];

fn schema(name: &str) -> Value {
    json!({ "$ref": format!("#/components/schemas/{name}") })
}

fn described(operation: &Operation) -> Value {
    let mut contents = Map::new();
    for (kind, name) in operation.answers {
        // Of a stream there is no schema: it is events in each dialect's own form.
        let is_stream = matches!(*kind, "text/event-stream" | "application/x-ndjson");
        let content = if is_stream { json!({}) } else { json!({ "schema": schema(name) }) };
        contents.insert((*kind).to_owned(), content);
    }
    let mut responses = Map::new();
    responses.insert("200".to_owned(), json!({ "description": "Done", "content": contents }));
    let error = |about: &str| {
        json!({ "description": about,
                "content": { JSON: { "schema": schema(operation.error) } } })
    };
    responses.insert("400".to_owned(), error("The request cannot be met"));
    responses.insert("401".to_owned(), error("No key, or a wrong one"));
    responses
        .insert("403".to_owned(), error("Asked by a page of another origin, or by another name"));
    responses.insert("404".to_owned(), error("No such model"));
    responses.insert("405".to_owned(), error("No such method"));
    if operation.path == "/health" {
        let content = json!({ JSON: { "schema": schema("Health") } });
        let about = "The engine stopped, and the server is about to end";
        responses.insert("503".to_owned(), json!({ "description": about, "content": content }));
    }
    if operation.request.is_some() {
        responses.insert("408".to_owned(), error("The body did not come in time"));
        responses.insert("413".to_owned(), error("The body is too large"));
        responses.insert("415".to_owned(), error("The body is not JSON"));
        responses.insert("500".to_owned(), error("The answer broke off"));
        let busy = if operation.error == "AnthropicError" { "529" } else { "503" };
        responses.insert(busy.to_owned(), error("Too many requests wait; see Retry-After"));
    }
    let mut described = json!({
        "summary": operation.about,
        "operationId": format!("{}{}", operation.method, operation.path.replace(['/', '{', '}', '.'], "_")),
        "responses": responses,
    });
    if operation.is_open {
        described["security"] = json!([]);
    }
    if let Some(request) = operation.request {
        let content = json!({ JSON: { "schema": schema(request) } });
        described["requestBody"] = json!({ "required": true, "content": content });
    }
    if operation.path.contains("{id}") {
        described["parameters"] = json!([{ "name": "id", "in": "path", "required": true, "schema": { "type": "string", "minLength": 1 } }]);
    }
    described
}

/// The document.
pub(crate) fn document() -> Value {
    let mut paths = Map::new();
    for operation in &OPERATIONS {
        let described = json!({ operation.method: described(operation) });
        paths.insert(operation.path.to_owned(), described);
    }
    let schemas: Value = serde_json::from_str(SCHEMAS).expect("a test parses it");
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Sakia", "version": env!("CARGO_PKG_VERSION"),
            "description": "Models larger than memory, in the dialects of OpenAI, Anthropic and Ollama."
        },
        "security": [{ "bearer": [] }, { "header": [] }, {}],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "bearer": { "type": "http", "scheme": "bearer" },
                "header": { "type": "apiKey", "in": "header", "name": "x-api-key" },
            },
            "schemas": schemas,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_schema_that_is_named_is_there() {
        let document = document();
        let text = document.to_string();
        let names = text.split("\"#/components/schemas/").skip(1);
        let names: Vec<&str> = names.filter_map(|rest| rest.split('"').next()).collect();
        assert!(names.len() > 20);
        for name in names {
            assert!(document["components"]["schemas"][name].is_object(), "{name}");
        }
    }
}

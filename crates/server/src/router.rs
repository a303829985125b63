//! Paths, and what stands before all of them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::routing::{get, post};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use serde_json::{Value, json};

use crate::access::Access;
use crate::body::{Bodies, JsonBody};
use crate::chat::{Ask, KeepAlive, new_id};
use crate::error::{ApiError, ErrorKind};
use crate::generate::{self, Generation};
use crate::metrics::Metrics;
use crate::models::{Models, engine_stopped};
use crate::ollama::{self, Lines, Path, Wanted};
use crate::openai::chat::Head;
use crate::room::Held;
use crate::stream::{self, Encoder};
use crate::{anthropic, openai, openapi};

/// Bytes of a path with its query.
const MAX_PATH: usize = 2048;
/// The seed of an answer's random numbers, so that it can be had again.
const SEED: HeaderName = HeaderName::from_static("sakia-seed");

/// What all requests share.
pub(crate) struct App {
    pub(crate) models: Arc<Models>,
    pub(crate) metrics: Arc<Metrics>,
    access: Access,
    bodies: Bodies,
    log: Option<fn(&str)>,
}

type Shared = State<Arc<App>>;

impl App {
    pub(crate) fn new(
        models: Arc<Models>,
        access: Access,
        bodies: Bodies,
        log: Option<fn(&str)>,
    ) -> Self {
        Self { models, metrics: Arc::default(), access, bodies, log }
    }
}

/// Whose words an answer is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Dialect {
    OpenAi,
    Anthropic,
    Ollama,
}

impl Dialect {
    fn of(request: &Request) -> Self {
        let path = request.uri().path();
        // Their clients say so where paths do not.
        let is_anthropic = request.headers().contains_key("anthropic-version");
        if path.starts_with("/v1/messages") || path.starts_with("/v1/models") && is_anthropic {
            Self::Anthropic
        } else if path.starts_with("/api/") {
            Self::Ollama
        } else {
            Self::OpenAi
        }
    }

    fn error(self, error: &ApiError) -> Response {
        let body = match self {
            Self::OpenAi => openai::error(error),
            Self::Anthropic => anthropic::error(error),
            Self::Ollama => ollama::error(error),
        };
        let mut response = json_response(&body);
        *response.status_mut() = match (self, error.kind) {
            // Its clients know "overloaded" by a number of its own.
            (Self::Anthropic, ErrorKind::Busy(_)) => {
                StatusCode::from_u16(529).unwrap_or(StatusCode::SERVICE_UNAVAILABLE)
            }
            _ => error.kind.status(),
        };
        if let ErrorKind::Busy(seconds) = error.kind {
            response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
        }
        if error.kind == ErrorKind::Unauthorized {
            let bearer = HeaderValue::from_static("Bearer");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, bearer);
        }
        response
    }
}

fn json_response(value: &Value) -> Response {
    let mut response = Response::new(Body::from(value.to_string()));
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}

fn text_response(text: impl Into<Body>, kind: &'static str) -> Response {
    let mut response = Response::new(text.into());
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

/// All paths.
pub(crate) fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/", get(root))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/openapi.json", get(async || json_response(&openapi::document())))
        .route("/v1/models", get(list_models))
        .route("/v1/models/{*id}", get(one_model))
        .route("/v1/chat/completions", post(chat_completions))
        .route("/v1/completions", post(completions))
        .route("/v1/responses", post(responses))
        .route("/v1/messages", post(messages))
        .route("/v1/messages/count_tokens", post(count_tokens))
        .route("/api/version", get(async || json_response(&json!({ "version": ollama::VERSION }))))
        .route("/api/tags", get(tags))
        .route("/api/ps", get(processes))
        .route("/api/show", post(show))
        .route("/api/chat", post(api_chat))
        .route("/api/generate", post(api_generate))
        .fallback(nothing)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(Arc::clone(&app), before))
        .with_state(app)
}

/// What every request passes: its size, who asks, and the log.
async fn before(State(app): Shared, request: Request, next: Next) -> Response {
    let began = Instant::now();
    let method = request.method().clone();
    let path = request.uri().path().to_owned();
    let dialect = Dialect::of(&request);
    let origin = request.headers().get(header::ORIGIN).cloned();
    let is_open = matches!(path.as_str(), "/health" | "/") || method == Method::OPTIONS;
    let is_long = request.uri().path_and_query().is_some_and(|path| path.as_str().len() > MAX_PATH);
    let checked = app.access.check(request.headers(), is_open);
    let mut response = match checked {
        Err(error) => dialect.error(&error),
        Ok(()) if is_long => {
            let message = format!("the path has more than {MAX_PATH} bytes");
            dialect.error(&ApiError::invalid(message))
        }
        Ok(()) if method == Method::OPTIONS && origin.is_some() => preflight(request.headers()),
        Ok(()) => unless_it_panics(next.run(request), dialect).await,
    };
    let headers = response.headers_mut();
    if let Some(origin) = origin.and_then(|origin| app.access.allowed_origin(&origin)) {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::VARY, HeaderValue::from_static("origin"));
        let exposed = HeaderValue::from_static("request-id, x-request-id, retry-after, sakia-seed");
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, exposed);
    }
    if let Ok(id) = HeaderValue::from_str(&new_id("req_")) {
        // One for each dialect's clients.
        headers.insert("x-request-id", id.clone());
        headers.insert("request-id", id);
    }
    headers.insert("x-content-type-options", HeaderValue::from_static("nosniff"));
    let status = response.status().as_u16();
    app.metrics.answered(status);
    if let Some(log) = app.log {
        let seconds = began.elapsed().as_secs_f64();
        let shown: String = path.chars().take(100).collect();
        log(&format!("{method} {} {status} {seconds:.3} s", shown.escape_debug()));
    }
    response
}

/// A response, also if making it panics: that is a bug, and still somebody waits for an answer.
async fn unless_it_panics(response: impl Future<Output = Response>, dialect: Dialect) -> Response {
    let mut response = std::pin::pin!(response);
    let respond = std::future::poll_fn(|cx| {
        // What a panic leaves behind is dropped with the request; locks are taken whoever panicked.
        let poll = AssertUnwindSafe(|| response.as_mut().poll(cx));
        catch_unwind(poll).map_or_else(|_| Poll::Ready(None), |poll| poll.map(Some))
    });
    respond.await.unwrap_or_else(|| {
        dialect.error(&ApiError::internal("answering this request failed; this is a bug"))
    })
}

/// What a browser asks before a page may.
fn preflight(asked: &HeaderMap) -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    let headers = response.headers_mut();
    headers.insert(
        header::ACCESS_CONTROL_ALLOW_METHODS,
        HeaderValue::from_static("GET, POST, OPTIONS"),
    );
    // Their origin was allowed, and SDKs have many headers of their own.
    if let Some(wanted) = asked.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted.clone());
    }
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
    response
}

async fn root() -> Response {
    text_response("Sakia is running\n", "text/plain; charset=utf-8")
}

async fn health(State(app): Shared) -> Response {
    let model = app.models.running().map(|running| running.name);
    let failure = app.models.failure();
    let status = if failure.is_some() { "failed" } else { "ok" };
    let mut health = json!({ "status": status, "model": model, "active": app.metrics.active() });
    let Some(message) = failure else { return json_response(&health) };
    health["error"] = engine_stopped(&message).message.into();
    let mut response = json_response(&health);
    *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    response
}

async fn metrics(State(app): Shared) -> Response {
    let text = app.metrics.text(app.models.running().as_ref());
    text_response(text, "text/plain; version=0.0.4; charset=utf-8")
}

async fn nothing(request: Request) -> Response {
    let shown: String = request.uri().path().chars().take(100).collect();
    let message = format!("there is no {shown}; /openapi.json lists what there is");
    let error = ApiError::new(ErrorKind::NotFound, message).code("unknown_path");
    Dialect::of(&request).error(&error)
}

async fn wrong_method(request: Request) -> Response {
    let message = format!("{} cannot be done to this path", request.method());
    let error = ApiError::new(ErrorKind::Method, message);
    Dialect::of(&request).error(&error)
}

async fn list_models(State(app): Shared) -> Response {
    let data: Vec<Value> = app.models.list().await.iter().map(openai::model).collect();
    // Anthropic's clients ask at the same path, and read these.
    let ends = |model: Option<&Value>| model.map_or(Value::Null, |model| model["id"].clone());
    let (first, last) = (ends(data.first()), ends(data.last()));
    json_response(&json!({ "object": "list", "data": data, "has_more": false,
                           "first_id": first, "last_id": last }))
}

async fn one_model(
    State(app): Shared,
    axum::extract::Path(id): axum::extract::Path<String>,
    request: Request,
) -> Response {
    let dialect = Dialect::of(&request);
    match app.models.find(Some(&id)).await {
        Ok(info) => json_response(&openai::model(&info)),
        Err(error) => dialect.error(&error),
    }
}

/// Loads the model, and starts the answers where that may take a while.
async fn begin(
    app: &Arc<App>,
    ask: Ask,
    room: (Held, usize),
) -> Result<(Ask, Generation), ApiError> {
    let lease = app.models.lease(ask.model.as_deref(), ask.keep_alive).await?;
    let metrics = Arc::clone(&app.metrics);
    let start = move || {
        let generation = generate::start(lease, &ask, &metrics, room)?;
        Ok((ask, generation))
    };
    let started = tokio::task::spawn_blocking(start).await;
    started.unwrap_or_else(|error| Err(ApiError::internal(format!("starting an answer: {error}"))))
}

/// Answers, in whichever form is wanted.
async fn answer<T: Send + 'static>(
    app: &Arc<App>,
    request: Request,
    read: impl FnOnce(Value) -> Result<(Ask, T), ApiError>,
    stream: impl FnOnce(&Ask, T, &Generation) -> Box<dyn Encoder>,
    whole: impl FnOnce(&Ask, T, &Head, &[generate::Answer]) -> Value,
) -> Result<Response, ApiError> {
    let JsonBody { value, held, kept_bytes } = app.bodies.read(request).await?;
    let (ask, more) = read(value)?;
    let (ask, generation) = begin(app, ask, (held, kept_bytes)).await?;
    let seed = generation.seed;
    let mut response = if ask.stream {
        let encoder = stream(&ask, more, &generation);
        stream::response(generation, encoder)
    } else {
        let head = Head::new(id_prefix(&ask), &generation);
        let answers = generation.collect().await?;
        json_response(&whole(&ask, more, &head, &answers))
    };
    if let Ok(seed) = HeaderValue::from_str(&seed.to_string()) {
        response.headers_mut().insert(SEED, seed);
    }
    Ok(response)
}

const fn id_prefix(ask: &Ask) -> &'static str {
    match ask.input {
        crate::chat::Input::Chat(_) => "chatcmpl-",
        crate::chat::Input::Text(_) | crate::chat::Input::Tokens(_) => "cmpl-",
    }
}

fn finished(dialect: Dialect, outcome: Result<Response, ApiError>) -> Response {
    outcome.unwrap_or_else(|error| dialect.error(&error))
}

async fn chat_completions(State(app): Shared, request: Request) -> Response {
    let outcome = answer(
        &app,
        request,
        openai::chat::parse,
        |ask, options, generation| {
            let head = Head::new("chatcmpl-", generation);
            Box::new(openai::chat::Chunks::new(ask, options, head, generation.prompt_tokens))
        },
        |ask, _, head, answers| openai::chat::whole(ask, head, answers),
    );
    finished(Dialect::OpenAi, outcome.await)
}

async fn completions(State(app): Shared, request: Request) -> Response {
    let outcome = answer(
        &app,
        request,
        openai::completions::parse,
        |ask, options, generation| {
            let head = Head::new("cmpl-", generation);
            Box::new(openai::completions::Chunks::new(ask, options, head, generation.prompt_tokens))
        },
        |ask, _, head, answers| openai::completions::whole(ask, head, answers),
    );
    finished(Dialect::OpenAi, outcome.await)
}

async fn responses(State(app): Shared, request: Request) -> Response {
    let outcome = answer(
        &app,
        request,
        openai::responses::parse,
        |_, echo, generation| {
            let head = Head::new("resp_", generation);
            Box::new(openai::responses::Events::new(head, echo, generation.prompt_tokens))
        },
        |_, echo, head, answers| {
            let head = Head { id: new_id("resp_"), ..head.clone() };
            openai::responses::whole(&head, &echo, &answers[0])
        },
    );
    finished(Dialect::OpenAi, outcome.await)
}

async fn messages(State(app): Shared, request: Request) -> Response {
    let outcome = answer(
        &app,
        request,
        |body| Ok((anthropic::parse(body, false)?, ())),
        |_, (), generation| Box::new(anthropic::Events::new(generation)),
        |_, (), head, answers| anthropic::whole(&head.model, &answers[0]),
    );
    finished(Dialect::Anthropic, outcome.await)
}

async fn count_tokens(State(app): Shared, request: Request) -> Response {
    let count = async {
        let body = app.bodies.read(request).await?;
        let ask = anthropic::parse(body.value, true)?;
        let lease = app.models.lease(ask.model.as_deref(), None).await?;
        let count = move || lease.model.prompts.of(&ask).map(|prompt| prompt.tokens.len());
        let counted = tokio::task::spawn_blocking(count).await;
        counted.unwrap_or_else(|error| Err(ApiError::internal(error.to_string())))
    };
    let outcome = count.await.map(|count| json_response(&json!({ "input_tokens": count })));
    finished(Dialect::Anthropic, outcome)
}

async fn tags(State(app): Shared) -> Response {
    let running = app.models.running();
    let list = app.models.list().await;
    let models: Vec<Value> = list.iter().map(|info| ollama::tag(info, running.as_ref())).collect();
    json_response(&json!({ "models": models }))
}

async fn processes(State(app): Shared) -> Response {
    let list = app.models.list().await;
    let running = app.models.running();
    let own = running.and_then(|running| {
        let info = list.iter().find(|info| info.name == running.name)?;
        Some(ollama::process(info, &running))
    });
    json_response(&json!({ "models": own.into_iter().collect::<Vec<_>>() }))
}

async fn show(State(app): Shared, request: Request) -> Response {
    let outcome = async {
        let body = app.bodies.read(request).await?;
        let name = ollama::parse_show(body.value)?;
        let info = app.models.find(Some(&name)).await?;
        Ok(json_response(&ollama::show(&info, app.models.running().as_ref())))
    };
    finished(Dialect::Ollama, outcome.await)
}

async fn api_chat(State(app): Shared, request: Request) -> Response {
    finished(Dialect::Ollama, api(&app, request, Path::Chat, ollama::parse_chat).await)
}

async fn api_generate(State(app): Shared, request: Request) -> Response {
    finished(Dialect::Ollama, api(&app, request, Path::Generate, ollama::parse_generate).await)
}

async fn api(
    app: &Arc<App>,
    request: Request,
    path: Path,
    read: fn(Value) -> Result<Wanted, ApiError>,
) -> Result<Response, ApiError> {
    let JsonBody { value, held, kept_bytes } = app.bodies.read(request).await?;
    let began = Instant::now();
    let ask = match read(value)? {
        Wanted::Answer(ask) => *ask,
        Wanted::Load { model, keep } => {
            let name = app.models.find(Some(&model)).await?.name;
            if keep == Some(KeepAlive::For(std::time::Duration::ZERO)) {
                app.models.unload(&name).await;
                return Ok(json_response(&ollama::loaded(path, &name, "unload")));
            }
            drop(app.models.lease(Some(&name), keep).await?);
            return Ok(json_response(&ollama::loaded(path, &name, "load")));
        }
    };
    let (ask, generation) = begin(app, ask, (held, kept_bytes)).await?;
    let name = ask.model.clone().unwrap_or_default();
    let lines = Lines::new(path, name, generation.prompt_tokens, began.elapsed());
    if ask.stream {
        return Ok(stream::response(generation, Box::new(lines)));
    }
    let answers = generation.collect().await?;
    Ok(json_response(&lines.whole(&answers[0])))
}

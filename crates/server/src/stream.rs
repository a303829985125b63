//! Answers as they are made: server-sent events and lines of JSON.

use std::fmt::Write as _;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use http::{HeaderValue, Response, header};
use hyper::body::{Body as HttpBody, Frame};
use tokio::time::{Instant, Sleep};

use crate::answerer::Event;
use crate::error::ApiError;
use crate::generate::{Generation, broke_off};

/// Silence after which something is sent, so that nobody in between takes the connection for dead.
pub(crate) const KEEP_ALIVE: Duration = Duration::from_secs(5);
/// Bytes that are gathered before they are handed on.
const FRAME_BYTES: usize = 16 << 10;

/// Writes the events of answers in a dialect.
pub(crate) trait Encoder: Send {
    /// The type of the whole.
    fn content_type(&self) -> &'static str {
        "text/event-stream"
    }

    /// What comes first.
    fn begin(&mut self, out: &mut String);

    /// Something happened to an answer.
    fn event(&mut self, index: usize, event: &Event, out: &mut String);

    /// Nothing has happened for a while.
    fn idle(&mut self, out: &mut String) {
        out.push_str(": keep-alive\n\n");
    }

    /// The answers break off; nothing follows.
    fn broke(&mut self, error: &ApiError, out: &mut String);

    /// All answers are over.
    fn end(&mut self, out: &mut String);
}

/// One server-sent event.
pub(crate) fn sse(out: &mut String, name: Option<&str>, data: &serde_json::Value) {
    if let Some(name) = name {
        out.push_str("event: ");
        out.push_str(name);
        out.push('\n');
    }
    out.push_str("data: ");
    out.push_str(&data.to_string());
    out.push_str("\n\n");
}

/// A comment that tells how far reading the prompt is; no client takes it for data.
pub(crate) fn progress(event: &Event, out: &mut String) {
    let written = match event {
        Event::Queued { ahead } => write!(out, ": queued, {ahead} ahead\n\n"),
        Event::Started { cached } => write!(out, ": started, {cached} cached\n\n"),
        Event::Progress { rows, of } => write!(out, ": prefill {rows}/{of}\n\n"),
        _ => Ok(()),
    };
    written.expect("a string can be written to");
}

/// The body of a streamed response. Dropping it cancels the answers.
struct EventBody {
    generation: Option<Generation>,
    encoder: Box<dyn Encoder>,
    has_begun: bool,
    over: usize,
    idle: Pin<Box<Sleep>>,
}

impl EventBody {
    /// Writes what has happened.
    fn gather(&mut self, cx: &mut Context<'_>, out: &mut String) {
        if !self.has_begun {
            self.has_begun = true;
            self.encoder.begin(out);
        }
        while out.len() < FRAME_BYTES {
            let Some(generation) = &mut self.generation else { return };
            match generation.events.poll_recv(cx) {
                Poll::Pending => return,
                Poll::Ready(None) => {
                    self.generation = None;
                    self.encoder.broke(&broke_off("the model was unloaded"), out);
                }
                Poll::Ready(Some((_, Event::Failed(error)))) => {
                    self.generation = None;
                    self.encoder.broke(&error, out);
                }
                Poll::Ready(Some((index, event))) => {
                    self.encoder.event(index, &event, out);
                    self.over += usize::from(matches!(event, Event::Ended(_)));
                    if self.over == generation.n {
                        self.generation = None;
                        self.encoder.end(out);
                    }
                }
            }
        }
    }
}

impl HttpBody for EventBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let mut out = String::new();
        self.gather(cx, &mut out);
        if out.is_empty() && self.generation.is_none() {
            return Poll::Ready(None);
        }
        if out.is_empty() {
            if self.idle.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            self.encoder.idle(&mut out);
        }
        self.idle.as_mut().reset(Instant::now() + KEEP_ALIVE);
        Poll::Ready(Some(Ok(Frame::data(out.into()))))
    }
}

/// A response that tells of answers as they are made.
pub(crate) fn response(generation: Generation, encoder: Box<dyn Encoder>) -> Response<Body> {
    let content_type = HeaderValue::from_static(encoder.content_type());
    let body = EventBody {
        generation: Some(generation),
        encoder,
        has_begun: false,
        over: 0,
        idle: Box::pin(tokio::time::sleep(KEEP_ALIVE)),
    };
    let mut response = Response::new(Body::new(body));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, content_type);
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies that gather what they pass on would make it come all at once.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

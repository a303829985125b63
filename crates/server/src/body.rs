//! The bodies of requests: so large, so slow, so many at once, and no more.

use axum::body::Body;
use http::{HeaderMap, Request, header};
use hyper::body::Body as HttpBody;
use serde_json::Value;
use tokio::time::{Instant, timeout_at};

use crate::error::{ApiError, ErrorKind};
use crate::fields::{measure, parse};
use crate::listen::Times;
use crate::room::{Held, Room};

/// How often a body is in memory while its prompt is made: as it came, as JSON, as messages, marked, rendered, as tokens.
const COPIES: usize = 6;
/// A value of JSON, with its place in a list or in an object.
const VALUE_BYTES: usize = 128;

/// Reads bodies.
#[derive(Debug, Clone)]
pub(crate) struct Bodies {
    max_bytes: usize,
    times: Times,
    room: Room,
}

/// A body as JSON, and the room that its request has.
#[derive(Debug)]
pub(crate) struct JsonBody {
    pub(crate) value: Value,
    pub(crate) held: Held,
    /// What is left of it in memory while it is being answered.
    pub(crate) kept_bytes: usize,
}

impl Bodies {
    pub(crate) fn new(max_bytes: usize, times: Times, room: Room) -> Self {
        Self { max_bytes: max_bytes.min(room.bytes() / COPIES), times, room }
    }

    /// Reads a body to its end.
    pub(crate) async fn read(&self, request: Request<Body>) -> Result<JsonBody, ApiError> {
        check_type(request.headers())?;
        let announced = request.body().size_hint().lower();
        if announced > self.max_bytes as u64 {
            return Err(self.too_large(announced));
        }
        let (mut bytes, mut held) = (Vec::new(), self.room.hold());
        let mut body = request.into_body();
        let end = Instant::now() + self.times.body;
        loop {
            let pause = end.min(Instant::now() + self.times.pause);
            let next = std::future::poll_fn(|cx| std::pin::Pin::new(&mut body).poll_frame(cx));
            let frame = timeout_at(pause, next).await.map_err(|_| {
                ApiError::new(ErrorKind::Timeout, "the body of the request did not come in time")
            })?;
            let Some(frame) = frame else { break };
            let frame =
                frame.map_err(|error| ApiError::invalid(format!("the body broke off: {error}")))?;
            let Ok(data) = frame.into_data() else { continue };
            if bytes.len() + data.len() > self.max_bytes {
                return Err(self.too_large((bytes.len() + data.len()) as u64));
            }
            held.grow_to(COPIES * (bytes.len() + data.len()))?;
            bytes.extend_from_slice(&data);
        }
        if bytes.is_empty() {
            return Err(ApiError::invalid("the request has no body; a JSON object is needed"));
        }
        let (_, values) = measure(&bytes);
        held.grow_by(values * VALUE_BYTES)?;
        let kept_bytes = bytes.len() + values * VALUE_BYTES;
        Ok(JsonBody { value: parse(&bytes)?, held, kept_bytes })
    }

    fn too_large(&self, found: u64) -> ApiError {
        let most = self.max_bytes;
        ApiError::new(
            ErrorKind::TooLarge,
            format!("the body has {found} bytes or more; at most {most} are accepted"),
        )
    }
}

/// JSON, or what curl calls a body that it was not told the type of.
fn check_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(value) = headers.get(header::CONTENT_TYPE) else { return Ok(()) };
    let text = value.to_str().unwrap_or_default();
    let kind = text.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    match kind.as_str() {
        "application/json" | "application/x-www-form-urlencoded" => Ok(()),
        _ => Err(ApiError::new(
            ErrorKind::MediaType,
            format!("the body is of type `{kind:.60}`; needed: application/json"),
        )),
    }
}

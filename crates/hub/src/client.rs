//! One request: redirects, the token, and what an answer means. Nothing here tries twice; see [`crate::retry`].

use std::ops::Range;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use ureq::http::{HeaderMap, HeaderValue, Response, header};
use ureq::{Agent, Body, BodyReader};

use crate::error::HubError;
use crate::tls;
use crate::token::Token;
use crate::url::{Host, Url};

/// Most redirects that are followed for one request.
const MOST_REDIRECTS: u32 = 8;
/// Longest wait for an address, a connection, or a server that has taken the request.
const CONNECT: Duration = Duration::from_secs(20);
const ANSWER: Duration = Duration::from_mins(1);
/// Longest silence inside a body.
const SILENCE: Duration = Duration::from_secs(30);
/// Most bytes of all headers of an answer.
const HEADER_BYTES: usize = 64 << 10;

/// Why there is no usable answer.
pub(crate) enum Failure {
    /// It may work again: what happened, and how long the server wants to be left alone.
    Passing(String, Option<Duration>),
    /// It will not.
    Final(HubError),
}

impl From<HubError> for Failure {
    fn from(error: HubError) -> Self {
        Self::Final(error)
    }
}

/// The start of an answer that may be used: 200, or 206 with the range asked for.
pub(crate) struct Answer {
    /// The server that gave it, after redirects.
    pub(crate) host: String,
    /// What its body holds: `None` for the whole file, else from where to where, and of how many.
    pub(crate) part: Option<(Range<u64>, Option<u64>)>,
    /// The length of the body by the server's word.
    pub(crate) length: Option<u64>,
    /// The file's tag, of the first server that gave one.
    pub(crate) etag: Option<String>,
    pub(crate) body: BodyReader<'static>,
}

/// A connection pool to one host and to whatever it redirects to.
pub(crate) struct Client {
    agent: Agent,
    host: Host,
    token: Option<HeaderValue>,
    /// Whether a token was left out because it would travel in the clear.
    withheld: bool,
    /// Why there is no encryption, if there is none.
    no_https: Option<HubError>,
}

impl Client {
    /// # Errors
    ///
    /// [`HubError::Processor`] or [`HubError::Certificates`] if the host needs encryption and there is none.
    pub(crate) fn new(
        host: Host,
        token: Option<&Token>,
        certificates: Option<PathBuf>,
    ) -> Result<Self, HubError> {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            // Followed here, so that a token and a protocol never change hands unseen.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .max_response_header_size(HEADER_BYTES)
            .user_agent(concat!("sakia/", env!("CARGO_PKG_VERSION")))
            .timeout_resolve(Some(CONNECT))
            .timeout_connect(Some(CONNECT))
            .timeout_send_request(Some(SILENCE))
            .timeout_recv_response(Some(ANSWER))
            .timeout_per_read(Some(SILENCE));
        // A proxy of the environment has no way to this machine.
        let config = if host.url().is_loopback() { config.proxy(None) } else { config };
        let (config, no_https) = match tls::config(certificates) {
            Ok(tls) => (config.tls_config(tls), None),
            Err(error) if host.url().is_encrypted() => return Err(error),
            Err(error) => (config, Some(error)),
        };
        let private = host.url().is_encrypted() || host.url().is_loopback();
        let header = token.filter(|_| private).map(|token| {
            let mut value = HeaderValue::from_str(&token.header())
                .expect("a token holds visible ASCII only, see Token::new");
            value.set_sensitive(true);
            value
        });
        let withheld = token.is_some() && header.is_none();
        Ok(Self { agent: config.build().new_agent(), host, token: header, withheld, no_https })
    }

    pub(crate) const fn host(&self) -> &Host {
        &self.host
    }

    /// Ends all connections, so that threads that wait for them return.
    pub(crate) fn shut_down(&self) {
        self.agent.clone().shutdown();
    }

    /// Sends one GET request and follows where it leads. `what` is what messages call the thing.
    pub(crate) fn get(
        &self,
        url: &Url,
        range: Option<Range<u64>>,
        what: &str,
    ) -> Result<Answer, Failure> {
        let mut url = url.clone();
        let mut etag = None;
        for _ in 0..=MOST_REDIRECTS {
            let response = self.send(&url, range.as_ref())?;
            let headers = response.headers();
            // A hash that the first host knows is worth more than what a cache behind it makes up.
            etag = etag
                .or_else(|| text(headers, "x-linked-etag"))
                .or_else(|| text(headers, header::ETAG.as_str()));
            if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
                return self.accept(&url, response, etag, range, what);
            }
            url = self.follow(&url, headers, what)?;
        }
        Err(Failure::Final(HubError::Redirect {
            from: self.host.url().authority(),
            what: what.to_owned(),
            problem: format!("there are more than {MOST_REDIRECTS} redirects, one after the other"),
        }))
    }

    fn send(&self, url: &Url, range: Option<&Range<u64>>) -> Result<Response<Body>, Failure> {
        let mut request = self.agent.get(url.to_string());
        // Lengths and ranges are those of the file, not of a compressed one.
        request = request.header(header::ACCEPT_ENCODING, "identity");
        if let Some(range) = range {
            request =
                request.header(header::RANGE, format!("bytes={}-{}", range.start, range.end - 1));
        }
        if let Some(token) = self.token.as_ref().filter(|_| url.same_origin(self.host.url())) {
            request = request.header(header::AUTHORIZATION, token.clone());
        }
        request.call().map_err(|error| failure(error, &url.authority()))
    }

    fn follow(&self, from: &Url, headers: &HeaderMap, what: &str) -> Result<Url, Failure> {
        let refuse = |problem: String| {
            let (from, what) = (from.authority(), what.to_owned());
            Failure::Final(HubError::Redirect { from, what, problem })
        };
        let location = text(headers, "location")
            .ok_or_else(|| refuse("it does not say where to".to_owned()))?;
        let to = from.join(&location).map_err(|problem| refuse(problem.to_owned()))?;
        if from.is_encrypted() && !to.is_encrypted() {
            return Err(refuse(format!("{} is not encrypted", to.authority())));
        }
        match &self.no_https {
            Some(error) if to.is_encrypted() => Err(refuse(error.to_string())),
            _ => Ok(to),
        }
    }

    fn accept(
        &self,
        url: &Url,
        response: Response<Body>,
        etag: Option<String>,
        range: Option<Range<u64>>,
        what: &str,
    ) -> Result<Answer, Failure> {
        let status = response.status().as_u16();
        let part = match (status, range) {
            (200, _) => None,
            (206, Some(range)) => {
                Some(content_range(response.headers(), &range).ok_or_else(|| {
                    Failure::Passing(
                        "an answer for another range than the one asked for".to_owned(),
                        None,
                    )
                })?)
            }
            _ => return Err(self.refuse(url, &response, what)),
        };
        let length = text(response.headers(), "content-length").and_then(|n| n.parse().ok());
        let body = response.into_body().into_with_config().limit(u64::MAX).reader();
        Ok(Answer { host: url.authority(), part, length, etag, body })
    }

    /// What a status other than success means.
    fn refuse(&self, url: &Url, response: &Response<Body>, what: &str) -> Failure {
        let (host, what) = (url.authority(), what.to_owned());
        let status = response.status().as_u16();
        let code = text(response.headers(), "x-error-code").unwrap_or_default();
        Failure::Final(match (status, code.as_str()) {
            (408 | 425 | 429 | 500 | 502..=599, _) => {
                let wait = text(response.headers(), "retry-after")
                    .and_then(|text| retry_after(&text, SystemTime::now()));
                return Failure::Passing(format!("status {status}"), wait);
            }
            (_, "RevisionNotFound") => {
                HubError::NotFound { host, what, hint: "look at `--revision`" }
            }
            (404 | 410, _) => HubError::NotFound {
                host,
                what,
                hint: "look at the spelling, also of upper and lower case",
            },
            (401 | 403, code) => {
                let (reason, hint) = self.denied(code, status);
                HubError::Refused { host, what, status, reason, hint }
            }
            _ => HubError::Status { host, what, status },
        })
    }

    fn denied(&self, code: &str, status: u16) -> (&'static str, String) {
        let page = self.host.to_string();
        let has_token = self.token.is_some();
        match code {
            _ if self.withheld => (
                "no token was sent, since the connection is not encrypted",
                "name the host with https://".to_owned(),
            ),
            "GatedRepo" if has_token => (
                "its owner decides who may have it, and this token's user may not yet",
                format!("ask for access on the model's page at {page}"),
            ),
            "GatedRepo" => (
                "its owner decides who may have it",
                format!("ask for access on the model's page at {page}, then set `HF_TOKEN`"),
            ),
            _ if has_token && status == 401 => (
                "the token is not valid, or there is no such repository",
                "look at the spelling, and make a new token".to_owned(),
            ),
            _ if has_token => (
                "the token gives no access",
                "use a token that may read this repository".to_owned(),
            ),
            _ => (
                "it is private or gated, or there is no such repository",
                "look at the spelling; if it is right, set `HF_TOKEN`".to_owned(),
            ),
        }
    }
}

/// `bytes a-b/n` that begins where it was asked to and ends no later.
fn content_range(headers: &HeaderMap, wanted: &Range<u64>) -> Option<(Range<u64>, Option<u64>)> {
    let value = text(headers, "content-range")?;
    let (range, total) = value.trim().strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last): (u64, u64) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
    let fits = first == wanted.start && first <= last && last < wanted.end;
    let total = match total.trim() {
        "*" => None,
        total => Some(total.parse().ok()?),
    };
    fits.then(|| (first..last + 1, total))
}

/// How long a host asks to wait: seconds, or until a date (RFC 9110, 10.2.3).
fn retry_after(text: &str, now: SystemTime) -> Option<Duration> {
    let text = text.trim();
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let until = httpdate::parse_http_date(text).ok()?;
    Some(until.duration_since(now).unwrap_or_default())
}

fn text(headers: &HeaderMap, name: &str) -> Option<String> {
    Some(headers.get(name)?.to_str().ok()?.to_owned())
}

/// Sorts the library's errors: most of what a network does may pass.
fn failure(error: ureq::Error, host: &str) -> Failure {
    let problem = error.to_string();
    match error {
        ureq::Error::Rustls(_)
        | ureq::Error::Tls(_)
        | ureq::Error::Pem(_)
        | ureq::Error::BadUri(_)
        | ureq::Error::Http(_)
        | ureq::Error::InvalidProxyUrl
        | ureq::Error::LargeResponseHeader(..) => {
            Failure::Final(HubError::Connection { host: host.to_owned(), problem })
        }
        // A certificate that is not trusted arrives as an I/O error round the real one.
        ureq::Error::Io(error)
            if error.get_ref().is_some_and(|inner| inner.to_string().contains("certificate")) =>
        {
            Failure::Final(HubError::Connection { host: host.to_owned(), problem })
        }
        _ => Failure::Passing(problem, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_content_range_must_begin_where_asked_and_not_exceed_it() {
        let check = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("content-range", value.parse().unwrap());
            content_range(&headers, &(10..20))
        };
        assert_eq!(check("bytes 10-19/100"), Some((10..20, Some(100))));
        assert_eq!(check("bytes 10-12/*"), Some((10..13, None)));
        for bad in [
            "bytes 0-19/100",
            "bytes 10-20/100",
            "bytes 19-10/100",
            "bytes 10-18446744073709551615/100",
            "bytes 10-/100",
            "bytes */100",
            "items 10-19/100",
            "bytes 10-19/x",
        ] {
            assert_eq!(check(bad), None, "{bad}");
        }
    }
    #[test]
    fn a_host_names_seconds_or_a_date() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_700);
        let wait = |text| retry_after(text, now).map(|wait| wait.as_secs());
        assert_eq!(wait(" 120 "), Some(120));
        assert_eq!(wait("Sun, 06 Nov 1994 08:49:37 GMT"), Some(77));
        assert_eq!(wait("Sun, 06 Nov 1994 08:00:00 GMT"), Some(0));
        for bad in ["", "-1", "1.5", "soon", "Sun, 06 Nov"] {
            assert_eq!(wait(bad), None, "{bad}");
        }
    }
}

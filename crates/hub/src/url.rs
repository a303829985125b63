//! Addresses: the host that the user names, and where its answers point to.

use std::fmt;
use std::fmt::Write as _;
use std::net::IpAddr;
use std::str::FromStr;

use ureq::http::Uri;

use crate::error::HubError;

/// Where models come from unless told otherwise.
pub const DEFAULT_HOST: &str = "https://huggingface.co";

/// Most bytes of an address. Signed ones have a few thousand.
const ADDRESS_BYTES: usize = 16 << 10;

/// An `http` or `https` address without user, password and fragment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Url {
    encrypted: bool,
    /// Lower case.
    host: String,
    port: u16,
    /// Begins with a slash.
    path_and_query: String,
}

impl Url {
    pub(crate) fn parse(text: &str) -> Result<Self, &'static str> {
        if text.len() > ADDRESS_BYTES {
            return Err("it is longer than 16 KiB");
        }
        let text = text.split('#').next().unwrap_or_default();
        let uri: Uri = text.parse().map_err(|_| "it is no address")?;
        let encrypted = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err("it does not begin with https:// or http://"),
        };
        let authority = uri.authority().ok_or("it names no host")?;
        if authority.as_str().contains('@') {
            return Err("it holds a user or a password");
        }
        let host = authority.host().to_ascii_lowercase();
        let rest = &authority.as_str()[authority.host().len()..];
        let port = match rest.strip_prefix(':') {
            Some(port) => port.parse().map_err(|_| "its port is no number below 65536")?,
            None if encrypted => 443,
            None => 80,
        };
        if host.is_empty() || port == 0 {
            return Err("it names no host");
        }
        let path_and_query = uri.path_and_query().map_or("/", |rest| rest.as_str());
        // `http://host?query` has no path of its own.
        let slash = if path_and_query.starts_with('/') { "" } else { "/" };
        Ok(Self { encrypted, host, port, path_and_query: format!("{slash}{path_and_query}") })
    }

    /// Follows a `Location`, absolute or relative.
    ///
    /// Only what hosts really send: a whole address, one without a scheme, an absolute path, or a sibling's name.
    pub(crate) fn join(&self, location: &str) -> Result<Self, &'static str> {
        let scheme = if self.encrypted { "https" } else { "http" };
        if location.contains("://") && !location.starts_with('/') {
            return Self::parse(location);
        }
        if location.starts_with("//") {
            return Self::parse(&format!("{scheme}:{location}"));
        }
        let path = self.path_and_query.split('?').next().unwrap_or_default();
        let folder = if location.starts_with('/') {
            ""
        } else {
            path.rfind('/').map_or("/", |end| &path[..=end])
        };
        Self::parse(&format!("{scheme}://{}{folder}{location}", self.authority()))
    }

    /// Whether both go to the same server by the same protocol, so that a secret may go to both.
    pub(crate) fn same_origin(&self, other: &Self) -> bool {
        (self.encrypted, &self.host, self.port) == (other.encrypted, &other.host, other.port)
    }

    pub(crate) const fn is_encrypted(&self) -> bool {
        self.encrypted
    }

    /// Whether it stays on this machine.
    pub(crate) fn is_loopback(&self) -> bool {
        let bare = self.host.trim_start_matches('[').trim_end_matches(']');
        self.host == "localhost"
            || bare.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
    }

    /// Host and, where it is not the usual one, port.
    pub(crate) fn authority(&self) -> String {
        match (self.encrypted, self.port) {
            (true, 443) | (false, 80) => self.host.clone(),
            _ => format!("{}:{}", self.host, self.port),
        }
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.encrypted { "https" } else { "http" };
        write!(f, "{scheme}://{}{}", self.authority(), self.path_and_query)
    }
}

/// The base address of a host, perhaps with a path in front of everything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host(Url);

impl Host {
    /// An address under the base. `segments` are escaped and joined by slashes; `query` is taken as it is.
    pub(crate) fn at<'a>(&self, segments: impl IntoIterator<Item = &'a str>, query: &str) -> Url {
        let mut path = self.0.path_and_query.trim_end_matches('/').to_owned();
        for segment in segments {
            path.push('/');
            escape(&mut path, segment);
        }
        path.push_str(query);
        Url { path_and_query: path, ..self.0.clone() }
    }

    pub(crate) const fn url(&self) -> &Url {
        &self.0
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.to_string().trim_end_matches('/'))
    }
}

impl FromStr for Host {
    type Err = HubError;

    fn from_str(text: &str) -> Result<Self, HubError> {
        let error = |problem| HubError::Host {
            // What stands before an `@` may be a password.
            found: text.rsplit('@').next().unwrap_or_default().escape_debug().to_string(),
            problem,
        };
        let url = Url::parse(text.trim()).map_err(error)?;
        if url.path_and_query.contains('?') {
            return Err(error("it holds a query"));
        }
        Ok(Self(url))
    }
}

/// Percent-encodes all but what never means anything in an address.
fn escape(into: &mut String, segment: &str) {
    for byte in segment.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            into.push(char::from(byte));
        } else {
            let _ = write!(into, "%{byte:02X}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(text: &str) -> Url {
        Url::parse(text).unwrap()
    }

    #[test]
    fn segments_are_escaped_and_slashes_in_them_too() {
        let host: Host = "https://mirror.example/hf/".parse().unwrap();
        let url = host.at(["api", "models", "a", "b", "revision", "refs/pr/1"], "?blobs=true");
        assert_eq!(
            url.to_string(),
            "https://mirror.example/hf/api/models/a/b/revision/refs%2Fpr%2F1?blobs=true"
        );
        assert_eq!(host.to_string(), "https://mirror.example/hf");
        assert_eq!(
            host.at(["a b%?#ü"], "").to_string(),
            "https://mirror.example/hf/a%20b%25%3F%23%C3%BC"
        );
    }

    #[test]
    fn locations_are_followed_in_every_form() {
        let base = url("https://one.example/a/b?c");
        for (location, expected) in [
            ("https://two.example/x?y#z", "https://two.example/x?y"),
            ("//two.example:8443/x", "https://two.example:8443/x"),
            ("/x/y?to=https://three.example", "https://one.example/x/y?to=https://three.example"),
            ("sibling", "https://one.example/a/sibling"),
        ] {
            assert_eq!(base.join(location).unwrap().to_string(), expected);
        }
        for bad in
            ["ftp://x/", "https://user:pass@x/", "https:///x", "javascript://x", "http://x:99999/"]
        {
            assert!(base.join(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn an_origin_is_protocol_host_and_port() {
        let base = url("https://Example.com/a");
        for (other, same) in [
            ("https://example.com:443/b", true),
            ("http://example.com/a", false),
            ("https://example.com:444/a", false),
            ("https://cdn.example.com/a", false),
            ("https://example.com.evil.org/a", false),
            ("https://example.com./a", false),
        ] {
            assert_eq!(base.same_origin(&url(other)), same, "{other}");
        }
    }

    #[test]
    fn hosts_that_hide_something_are_refused_and_passwords_not_shown() {
        let error = "https://me:secret@x.example".parse::<Host>().unwrap_err().to_string();
        assert!(!error.contains("secret"), "{error}");
        for bad in ["huggingface.co", "", "file:///x", "https://x/?q=1", "https://"] {
            assert!(bad.parse::<Host>().is_err(), "{bad}");
        }
        assert!(url("http://127.0.0.1:9/").is_loopback() && url("http://[::1]/").is_loopback());
        assert!(!url("http://localhost.evil.org/").is_loopback());
    }
}

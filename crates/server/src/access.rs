//! Who may ask: keys, names of this machine, pages of other origins.
//!
//! On loopback without a key, everybody on this machine may ask, and no page in a browser: a page of another origin says
//! so in `Origin`, and one that had its own name point here says so in `Host`.

use std::net::IpAddr;

use http::{HeaderMap, HeaderValue, header};

use crate::error::{ApiError, ErrorKind};

/// The rules.
#[derive(Debug, Clone, Default)]
pub(crate) struct Access {
    pub(crate) key: Option<String>,
    /// Whether only names of this machine are accepted as `Host`.
    pub(crate) own_names_only: bool,
    /// Origins whose pages may ask; `*` for all.
    pub(crate) origins: Vec<String>,
}

impl Access {
    /// Checks a request; paths that are open need no key.
    pub(crate) fn check(&self, headers: &HeaderMap, is_open: bool) -> Result<(), ApiError> {
        self.check_host(headers)?;
        if let Some(origin) = headers.get(header::ORIGIN)
            && self.allowed_origin(origin).is_none()
            && !is_same_origin(origin, headers.get(header::HOST))
        {
            return Err(ApiError::new(
                ErrorKind::Forbidden,
                "pages of this origin may not ask; `sakia serve --cors-origin` allows one",
            )
            .code("origin_not_allowed"));
        }
        match &self.key {
            Some(key) if !is_open => check_key(key, headers),
            _ => Ok(()),
        }
    }

    fn check_host(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        if !self.own_names_only {
            return Ok(());
        }
        let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
        // HTTP/1.0 has no `Host`, and no browser speaks it.
        match host {
            Some(host) if !is_own_name(host) => Err(ApiError::new(
                ErrorKind::Forbidden,
                "this server listens on this machine only, and is called by another name",
            )
            .code("host_not_allowed")),
            _ => Ok(()),
        }
    }

    /// The origin, if its pages may ask and read the answer.
    pub(crate) fn allowed_origin(&self, origin: &HeaderValue) -> Option<HeaderValue> {
        let is_allowed =
            |allowed: &String| allowed == "*" || allowed.as_bytes() == origin.as_bytes();
        self.origins.iter().any(is_allowed).then(|| origin.clone())
    }
}

/// The key, as any of the dialects' clients send it.
fn check_key(key: &str, headers: &HeaderMap) -> Result<(), ApiError> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| {
        let (scheme, token) = value.as_bytes().split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then_some(token)
    });
    let given = bearer.or_else(|| headers.get("x-api-key").map(HeaderValue::as_bytes));
    match given {
        Some(given) if is_equal(given, key.as_bytes()) => Ok(()),
        Some(_) => {
            Err(ApiError::new(ErrorKind::Unauthorized, "the API key is wrong")
                .code("invalid_api_key"))
        }
        None => Err(ApiError::new(
            ErrorKind::Unauthorized,
            "an API key is needed, as `Authorization: Bearer KEY` or `x-api-key: KEY`",
        )
        .code("missing_api_key")),
    }
}

/// Takes the same time for every text of a length.
fn is_equal(given: &[u8], key: &[u8]) -> bool {
    let mut difference = u8::from(given.len() != key.len());
    for (index, byte) in given.iter().enumerate() {
        // Whatever the lengths, as many steps as were given.
        difference |= byte ^ key.get(index % key.len().max(1)).copied().unwrap_or(0);
    }
    std::hint::black_box(difference) == 0
}

/// Whether a `Host` is a name of this machine for itself.
fn is_own_name(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    name.eq_ignore_ascii_case("localhost")
        || name.to_ascii_lowercase().ends_with(".localhost")
        || name.parse().is_ok_and(|address: IpAddr| address.is_loopback())
        // Containers call their host so.
        || name.eq_ignore_ascii_case("host.docker.internal")
}

fn is_same_origin(origin: &HeaderValue, host: Option<&HeaderValue>) -> bool {
    let origin = origin.to_str().unwrap_or_default();
    let authority = origin.split_once("://").map(|(_, authority)| authority);
    host.and_then(|host| host.to_str().ok()).is_some_and(|host| authority == Some(host))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(
        access: &Access,
        headers: &[(&'static str, &'static str)],
    ) -> Result<(), &'static str> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.insert(*name, HeaderValue::from_static(value));
        }
        access.check(&map, false).map_err(|error| error.code.unwrap())
    }

    #[test]
    fn a_key_is_taken_as_any_client_sends_it_and_a_wrong_one_is_not() {
        let access = Access { key: Some("secret".to_owned()), ..Access::default() };
        assert_eq!(check(&access, &[]), Err("missing_api_key"));
        assert_eq!(check(&access, &[("authorization", "Bearer secret")]), Ok(()));
        assert_eq!(check(&access, &[("authorization", "bearer secret")]), Ok(()));
        assert_eq!(check(&access, &[("x-api-key", "secret")]), Ok(()));
        for wrong in ["Bearer secre", "Bearer secretsecret", "Bearer ", "Bearer Secret"] {
            assert_eq!(check(&access, &[("authorization", wrong)]), Err("invalid_api_key"));
        }
        assert_eq!(check(&access, &[("authorization", "Basic secret")]), Err("missing_api_key"));
    }

    #[test]
    fn pages_of_other_origins_and_other_names_of_this_machine_are_refused() {
        let access = Access { own_names_only: true, ..Access::default() };
        for host in ["localhost:8484", "127.0.0.1:1", "[::1]:8484", "LOCALHOST", "127.9.9.9"] {
            assert_eq!(check(&access, &[("host", host)]), Ok(()), "{host}");
        }
        for host in ["evil.example", "localhost.evil.example:80", "10.0.0.1", "127.0.0.1.evil"] {
            assert_eq!(check(&access, &[("host", host)]), Err("host_not_allowed"), "{host}");
        }
        let own = [("host", "localhost:1"), ("origin", "http://localhost:1")];
        assert_eq!(check(&access, &own), Ok(()));
        for origin in ["http://evil.example", "null", "http://localhost:2"] {
            let headers = [("host", "localhost:1"), ("origin", origin)];
            assert_eq!(check(&access, &headers), Err("origin_not_allowed"), "{origin}");
        }
        let open = Access { origins: vec!["http://a.example".to_owned()], ..Access::default() };
        assert_eq!(check(&open, &[("origin", "http://a.example")]), Ok(()));
        assert_eq!(check(&open, &[("origin", "http://b.example")]), Err("origin_not_allowed"));
    }
}

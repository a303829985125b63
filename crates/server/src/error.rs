//! What can go wrong with a request, before anybody's dialect has words for it.

use http::StatusCode;

/// Kinds of errors, as far as status codes and dialects tell them apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ErrorKind {
    /// The request asks for something that cannot be.
    Invalid,
    /// No key, or a wrong one.
    Unauthorized,
    /// A page of another origin, or a name that is not ours.
    Forbidden,
    /// No such model or path.
    NotFound,
    /// The path knows other methods.
    Method,
    /// The body did not come in time.
    Timeout,
    /// The body is too large.
    TooLarge,
    /// The body is of another type than JSON.
    MediaType,
    /// Everybody is busy; try again after these seconds.
    Busy(u32),
    /// What only we can cause, or the disk.
    Internal,
}

impl ErrorKind {
    /// The status code that all dialects use, but for [`ErrorKind::Busy`] in Anthropic's.
    pub(crate) const fn status(self) -> StatusCode {
        match self {
            Self::Invalid => StatusCode::BAD_REQUEST,
            Self::Unauthorized => StatusCode::UNAUTHORIZED,
            Self::Forbidden => StatusCode::FORBIDDEN,
            Self::NotFound => StatusCode::NOT_FOUND,
            Self::Method => StatusCode::METHOD_NOT_ALLOWED,
            Self::Timeout => StatusCode::REQUEST_TIMEOUT,
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::MediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::Busy(_) => StatusCode::SERVICE_UNAVAILABLE,
            Self::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

/// Why a request is not answered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub(crate) struct ApiError {
    pub(crate) kind: ErrorKind,
    /// For people.
    pub(crate) message: String,
    /// The field, if one is to blame.
    pub(crate) param: Option<String>,
    /// For programs.
    pub(crate) code: Option<&'static str>,
}

impl ApiError {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), param: None, code: None }
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, message)
    }

    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Internal, message)
    }

    /// Names the field.
    pub(crate) fn at(mut self, param: &str) -> Self {
        self.param = Some(param.to_owned()).filter(|param| !param.is_empty());
        self
    }

    pub(crate) const fn code(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }
}

//! The user's access token: found where the usual tools keep it, sent to the chosen host only, never shown.

use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::PathBuf;

use crate::error::HubError;

/// Most characters of a token. Real ones have about 40.
const TOKEN_CHARS: usize = 1024;

/// A secret. It has no `Display`, and its `Debug` says nothing.
#[derive(Clone)]
pub struct Token(String);

impl Token {
    /// Takes a token, without the white space around it.
    ///
    /// # Errors
    ///
    /// [`HubError::Token`], naming `origin` and not the token, if it cannot stand in a header.
    pub fn new(text: &str, origin: &str) -> Result<Self, HubError> {
        let text = text.trim();
        let fits = !text.is_empty() && text.len() <= TOKEN_CHARS;
        if fits && text.chars().all(|c| c.is_ascii_graphic()) {
            Ok(Self(text.to_owned()))
        } else {
            Err(HubError::Token { origin: origin.to_owned() })
        }
    }

    /// `$HF_TOKEN`, else the file that `hf auth login` writes: `$HF_TOKEN_PATH`, `$HF_HOME/token`,
    /// `$XDG_CACHE_HOME/huggingface/token` or `~/.cache/huggingface/token`.
    ///
    /// # Errors
    ///
    /// [`HubError::Token`] if there is something that is no token; [`HubError::Io`] if the file cannot be read.
    pub fn find(env: &dyn Fn(&str) -> Option<OsString>) -> Result<Option<Self>, HubError> {
        let set = |name: &str| env(name).filter(|value| !value.is_empty());
        if let Some(value) = set("HF_TOKEN") {
            return Self::new(&value.to_string_lossy(), "`$HF_TOKEN`").map(Some);
        }
        let path =
            |name: &str, rest: &str| set(name).map(|folder| PathBuf::from(folder).join(rest));
        let file = set("HF_TOKEN_PATH")
            .map(PathBuf::from)
            .or_else(|| path("HF_HOME", "token"))
            .or_else(|| path("XDG_CACHE_HOME", "huggingface/token"))
            .or_else(|| path("HOME", ".cache/huggingface/token"));
        let Some(file) = file.filter(|file| file.is_file()) else { return Ok(None) };
        let mut text = String::new();
        let limit = 2 * TOKEN_CHARS as u64;
        File::open(&file)
            .and_then(|open| open.take(limit).read_to_string(&mut text))
            .map_err(HubError::io("read the token in", &file))?;
        // An empty file is what is left after a log-out.
        if text.trim().is_empty() {
            return Ok(None);
        }
        Self::new(&text, &file.display().to_string()).map(Some)
    }

    /// The value of an `Authorization` header.
    pub(crate) fn header(&self) -> String {
        format!("Bearer {}", self.0)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn find(values: &[(&str, &Path)]) -> Result<Option<Token>, HubError> {
        Token::find(&|name| {
            values.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into())
        })
    }

    #[test]
    fn the_variable_comes_before_the_file_and_neither_is_shown() {
        let home = tempfile::tempdir().unwrap();
        std::fs::write(home.path().join("token"), "hf_file\n").unwrap();
        let file = find(&[("HF_HOME", home.path())]).unwrap().unwrap();
        assert_eq!(file.header(), "Bearer hf_file");
        let both = find(&[("HF_HOME", home.path()), ("HF_TOKEN", Path::new("hf_env"))]);
        let both = both.unwrap().unwrap();
        assert_eq!(both.header(), "Bearer hf_env");
        assert!(!format!("{both:?}").contains("hf_env"));
        assert!(find(&[("HOME", home.path())]).unwrap().is_none());
    }

    #[test]
    fn what_could_break_a_header_is_refused_without_being_shown() {
        for bad in ["se cret", "secret\r\nX: y", "secret\u{e9}", "sec\0ret"] {
            let error = Token::new(bad, "`$HF_TOKEN`").unwrap_err().to_string();
            assert!(!error.contains("sec") && error.contains("HF_TOKEN"), "{error}");
        }
        assert!(Token::new(&"x".repeat(2000), "a file").is_err());
    }
}

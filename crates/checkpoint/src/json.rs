//! JSON with limits: a small tree for configurations, and a guarded stream for everything that is too long for one.
//!
//! Parsing is serde's. What is added here is what a hostile file makes necessary: a stream that ends a token which is
//! too long before anybody keeps it, a tree whose every node is charged, and no second value for a key.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, BufReader, Read};
use std::path::Path;

use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};

use crate::error::{CheckpointError, printable};
use crate::limits::{self, Budget};
use crate::source::Source;

/// Bytes read at a time.
const WINDOW: usize = 1 << 15;

/// What a value costs: itself with the room that a list of one has, and the allocation's own bookkeeping.
const VALUE_OVERHEAD: u64 = 4 * size_of::<Json>() as u64 + 32;
/// What a pair costs beside the bytes of its key: its share of a tree node, half empty at worst.
const PAIR_OVERHEAD: u64 = 256;

/// A JSON value.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Json {
    Null,
    Bool(bool),
    U64(u64),
    I64(i64),
    F64(f64),
    Text(String),
    List(Vec<Json>),
    Object(BTreeMap<String, Json>),
}

impl Json {
    /// What kind of value it is, for messages.
    pub(crate) const fn kind(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "a boolean",
            Self::U64(_) => "an unsigned integer",
            Self::I64(_) => "an integer",
            Self::F64(_) => "a float",
            Self::Text(_) => "a string",
            Self::List(_) => "a list",
            Self::Object(_) => "an object",
        }
    }

    /// The value itself where it is short, its kind where it is not; for messages.
    pub(crate) fn shown(&self) -> String {
        match self {
            Self::Bool(value) => value.to_string(),
            Self::U64(value) => value.to_string(),
            Self::I64(value) => value.to_string(),
            Self::F64(value) => value.to_string(),
            Self::Text(value) => format!("`{}`", printable(value)),
            Self::Null | Self::List(_) | Self::Object(_) => self.kind().to_owned(),
        }
    }

    /// The value of a key of an object; nothing if it is null.
    pub(crate) fn get(&self, key: &str) -> Option<&Self> {
        match self {
            Self::Object(pairs) => pairs.get(key).filter(|value| **value != Self::Null),
            _ => None,
        }
    }

    pub(crate) const fn bool(&self) -> Option<bool> {
        match self {
            Self::Bool(value) => Some(*value),
            _ => None,
        }
    }

    pub(crate) const fn u64(&self) -> Option<u64> {
        match self {
            Self::U64(value) => Some(*value),
            _ => None,
        }
    }

    /// A number, whole or not.
    pub(crate) const fn f64(&self) -> Option<f64> {
        match self {
            Self::U64(value) => Some(*value as f64),
            Self::I64(value) => Some(*value as f64),
            Self::F64(value) => Some(*value),
            _ => None,
        }
    }

    pub(crate) fn text(&self) -> Option<&str> {
        match self {
            Self::Text(value) => Some(value),
            _ => None,
        }
    }

    pub(crate) fn list(&self) -> Option<&[Self]> {
        match self {
            Self::List(values) => Some(values),
            _ => None,
        }
    }

    pub(crate) const fn object(&self) -> Option<&BTreeMap<String, Self>> {
        match self {
            Self::Object(pairs) => Some(pairs),
            _ => None,
        }
    }
}

/// Why a JSON text was not read; what the caller's errors are made of.
#[derive(Debug)]
pub(crate) enum JsonError {
    /// Not JSON, or not of the form that the reader wants; safe to print.
    Form(String),
    /// Longer or larger than it may be: the thing, what was found, the limit.
    Limit(&'static str, u64, u64),
    /// The operating system refused.
    Io(io::Error),
}

impl JsonError {
    /// As an error of a file; `form` makes one of what was found.
    pub(crate) fn of_file(
        self,
        file: &Path,
        form: impl FnOnce(String) -> CheckpointError,
    ) -> CheckpointError {
        match self {
            Self::Form(found) => form(found),
            Self::Limit(what, found, limit) => CheckpointError::Limit {
                file: file.to_owned(),
                what: what.to_owned(),
                found,
                limit,
            },
            Self::Io(source) => CheckpointError::Io { file: file.to_owned(), source },
        }
    }
}

/// Reads the whole of a small file as a tree, whose memory is taken from `budget`.
pub(crate) fn read(source: &dyn Source, budget: &mut Budget) -> Result<Json, JsonError> {
    let bytes = source.len();
    if bytes > limits::CONFIG_BYTES {
        return Err(JsonError::Limit("bytes of the file", bytes, limits::CONFIG_BYTES));
    }
    let mut state = State { budget, over: false };
    let result = stream(source, 0..bytes, limits::CONFIG_BYTES, Node { state: &mut state });
    if state.over {
        let limit = limits::HEADER_MEMORY;
        return Err(JsonError::Limit("memory for the file's JSON", limit + 1, limit));
    }
    result
}

/// A part of a stream as a tree, whose memory is taken from `budget`.
pub(crate) struct Tree<'a> {
    pub(crate) budget: &'a mut Budget,
    /// Set where the budget is too small; then there is an error too.
    pub(crate) over: &'a mut bool,
}

impl<'de> DeserializeSeed<'de> for Tree<'_> {
    type Value = Json;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Json, D::Error> {
        let mut state = State { budget: self.budget, over: false };
        let result = Node { state: &mut state }.deserialize(deserializer);
        *self.over = state.over;
        result
    }
}

/// Reads bytes `range` of a file with a visitor of the caller's. No token may be longer than `token` bytes.
pub(crate) fn stream<T>(
    source: &dyn Source,
    range: std::ops::Range<u64>,
    token: u64,
    seed: impl for<'de> DeserializeSeed<'de, Value = T>,
) -> Result<T, JsonError> {
    let guarded = Guarded { source, at: range.start, end: range.end, token, scan: Scan::default() };
    let mut json = serde_json::Deserializer::from_reader(BufReader::with_capacity(WINDOW, guarded));
    let result = seed.deserialize(&mut json).and_then(|value| json.end().map(|()| value));
    result.map_err(|error| {
        if !error.is_io() {
            return JsonError::Form(printable(&error.to_string()));
        }
        let error = io::Error::from(error);
        match error.get_ref().and_then(|inner| inner.downcast_ref::<TokenTooLong>()) {
            Some(_) => JsonError::Limit("bytes of a JSON token", token + 1, token),
            None => JsonError::Io(error),
        }
    })
}

/// A range of a source as a stream that fails at a token which is too long.
///
/// A parser keeps a token until it ends, so without this a file of one string would be held whole.
struct Guarded<'a> {
    source: &'a dyn Source,
    at: u64,
    end: u64,
    token: u64,
    scan: Scan,
}

#[derive(Debug, Clone, Copy, Default)]
struct Scan {
    in_string: bool,
    escaped: bool,
    len: u64,
}

impl Scan {
    /// The length of the token up to and with this byte.
    const fn step(&mut self, byte: u8) -> u64 {
        self.len += 1;
        if self.in_string {
            if self.escaped {
                self.escaped = false;
            } else if byte == b'\\' {
                self.escaped = true;
            } else if byte == b'"' {
                self.in_string = false;
                self.len = 0;
            }
        } else if byte == b'"' {
            self.in_string = true;
            self.len = 0;
        } else if matches!(
            byte,
            b' ' | b'\n' | b'\r' | b'\t' | b',' | b':' | b'{' | b'}' | b'[' | b']'
        ) {
            self.len = 0;
        }
        self.len
    }
}

#[derive(Debug, thiserror::Error)]
#[error("a token is too long")]
struct TokenTooLong;

impl Read for Guarded<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let len = out.len().min(usize::try_from(self.end - self.at).unwrap_or(usize::MAX));
        let out = &mut out[..len];
        self.source.read_at(self.at, out)?;
        self.at += len as u64;
        if out.iter().any(|byte| self.scan.step(*byte) > self.token) {
            return Err(io::Error::other(TokenTooLong));
        }
        Ok(len)
    }
}

/// What the nodes of a tree share while it grows.
struct State<'a> {
    budget: &'a mut Budget,
    over: bool,
}

impl State<'_> {
    fn charge<E: de::Error>(&mut self, bytes: u64) -> Result<(), E> {
        if self.budget.take(bytes) {
            return Ok(());
        }
        self.over = true;
        Err(E::custom("too large"))
    }
}

struct Node<'a, 'b> {
    state: &'a mut State<'b>,
}

impl<'de> DeserializeSeed<'de> for Node<'_, '_> {
    type Value = Json;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Json, D::Error> {
        self.state.charge(VALUE_OVERHEAD)?;
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Node<'_, '_> {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<Json, E> {
        Ok(Json::Bool(value))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Json, E> {
        Ok(Json::U64(value))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Json, E> {
        Ok(Json::I64(value))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Json, E> {
        Ok(Json::F64(value))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Json, E> {
        self.state.charge(value.len() as u64)?;
        Ok(Json::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Json, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = list.next_element_seed(Node { state: &mut *self.state })? {
            values.push(value);
        }
        Ok(Json::List(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Json, A::Error> {
        let mut pairs = BTreeMap::new();
        while let Some(key) = object.next_key::<String>()? {
            self.state.charge(PAIR_OVERHEAD + key.len() as u64)?;
            let value = object.next_value_seed(Node { state: &mut *self.state })?;
            if pairs.contains_key(&key) {
                return Err(de::Error::custom(format_args!("a second value of `{key}`")));
            }
            pairs.insert(key, value);
        }
        Ok(Json::Object(pairs))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::MemorySource;

    fn parse(text: &str) -> Result<Json, JsonError> {
        read(&MemorySource(text.as_bytes()), &mut Budget::new())
    }

    #[test]
    fn values_keep_their_kind() {
        let json =
            parse(r#"{"a": [1, -1, 1.5, true, null, "x"], "n": null, "o": {"k": 7}}"#).unwrap();
        let kinds: Vec<_> = json.get("a").unwrap().list().unwrap().iter().map(Json::kind).collect();
        assert_eq!(
            kinds,
            ["an unsigned integer", "an integer", "a float", "a boolean", "null", "a string"]
        );
        assert_eq!(json.get("n"), None);
        assert_eq!(json.get("o").and_then(|o| o.get("k")).and_then(Json::u64), Some(7));
        assert_eq!(parse("18446744073709551616").unwrap().u64(), None, "never wrapped");
    }

    #[test]
    fn what_is_not_json_is_refused() {
        let deep = "[".repeat(60_000);
        for text in ["", "{", "{} x", "nul", r#"{"a":1,"a":2}"#, "1e999", "\"\u{1}\"", &deep] {
            assert!(matches!(parse(text), Err(JsonError::Form(_))), "{text:.20}");
        }
    }

    #[test]
    fn a_file_cannot_make_its_tree_larger_than_the_budget() {
        let zeros = format!("[{}0]", "0,".repeat((limits::CONFIG_BYTES / 2 - 2) as usize));
        assert!(matches!(parse(&zeros), Err(JsonError::Limit(..))));
        let long = " ".repeat(limits::CONFIG_BYTES as usize + 1);
        assert!(matches!(parse(&long), Err(JsonError::Limit(..))));
    }

    #[test]
    fn a_token_that_is_too_long_ends_the_stream() {
        let read = |text: &str| {
            let source = MemorySource(text.as_bytes());
            let mut budget = Budget::new();
            let mut state = State { budget: &mut budget, over: false };
            stream(&source, 0..source.len(), 10, Node { state: &mut state })
        };
        assert!(read(r#"["123456789", "a\"b\\", 1234567890]"#).is_ok());
        for text in [r#"["1234567890a"]"#, "[12345678901]", r#"{"1234567890a": 1}"#] {
            assert!(matches!(read(text), Err(JsonError::Limit(..))), "{text}");
        }
    }
}

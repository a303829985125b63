//! `tojson` as Python's `json.dumps` writes it in Hugging Face's tools: `, ` and `: ` between, non-ASCII kept, nothing
//! escaped for HTML.

use std::fmt::Write;

use minijinja::value::{Kwargs, Serde, Value, ValueKind};
use minijinja::{Error, ErrorKind};
use serde_json::Value as Json;

use super::MAX_OUTPUT_BYTES;

/// Values inside values.
const MAX_DEPTH: usize = 128;

/// The filter `tojson(ensure_ascii=false, indent=none, separators=none, sort_keys=false)`.
///
/// # Errors
/// A value that JSON does not have, or too much of it.
#[expect(clippy::needless_pass_by_value, reason = "the form of a filter")]
pub(super) fn to_json(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let ensure_ascii: Option<bool> = options.get("ensure_ascii")?;
    let sort_keys: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;
    let [item, key] = match separators.as_deref() {
        None => [if indent.is_some() { "," } else { ", " }, ": "].map(str::to_owned),
        Some([item, key]) => [item.clone(), key.clone()],
        Some(_) => return Err(failed("tojson: two separators are needed")),
    };
    let mut writer = Writer {
        out: String::new(),
        indent,
        item,
        key,
        is_ascii: ensure_ascii.unwrap_or(false),
        is_sorted: sort_keys.unwrap_or(false),
    };
    writer.value(value, 0)?;
    Ok(Value::from_safe_string(writer.out))
}

/// The filter `fromjson`: arguments of calls arrive as text in some conversations.
///
/// # Errors
/// The text is no JSON.
pub(super) fn from_json(text: &str) -> Result<Value, Error> {
    let json: Json = serde_json::from_str(text).map_err(|error| failed(&error.to_string()))?;
    Ok(Value::from(Serde(json)))
}

fn failed(message: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.to_owned())
}

struct Writer {
    out: String,
    indent: Option<usize>,
    /// Between items.
    item: String,
    /// Between a key and its value.
    key: String,
    is_ascii: bool,
    is_sorted: bool,
}

impl Writer {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH || self.out.len() > MAX_OUTPUT_BYTES {
            return Err(failed("tojson: the value is too large"));
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value)?,
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => self.list(value, depth)?,
            ValueKind::Map => self.map(value, depth)?,
            kind => return Err(failed(&format!("tojson: {kind} is no JSON"))),
        }
        Ok(())
    }

    fn list(&mut self, list: &Value, depth: usize) -> Result<(), Error> {
        self.out.push('[');
        let mut is_empty = true;
        for item in list.try_iter()? {
            self.between(is_empty, depth + 1);
            self.value(&item, depth + 1)?;
            is_empty = false;
        }
        self.end(is_empty, depth);
        self.out.push(']');
        Ok(())
    }

    fn map(&mut self, map: &Value, depth: usize) -> Result<(), Error> {
        let mut keys: Vec<(String, Value)> = Vec::new();
        for key in map.try_iter()? {
            keys.push((key_text(&key)?, key));
        }
        if self.is_sorted {
            keys.sort_by(|a, b| a.0.cmp(&b.0));
        }
        self.out.push('{');
        for (i, (text, key)) in keys.iter().enumerate() {
            self.between(i == 0, depth + 1);
            self.string(text);
            self.out.push_str(&self.key);
            self.value(&map.get_item(key)?, depth + 1)?;
        }
        self.end(keys.is_empty(), depth);
        self.out.push('}');
        Ok(())
    }

    fn between(&mut self, is_first: bool, depth: usize) {
        if !is_first {
            self.out.push_str(&self.item);
        }
        self.line(depth);
    }

    fn end(&mut self, is_empty: bool, depth: usize) {
        if !is_empty {
            self.line(depth);
        }
    }

    fn line(&mut self, depth: usize) {
        if let Some(width) = self.indent {
            self.out.push('\n');
            let spaces = width.saturating_mul(depth).min(MAX_OUTPUT_BYTES);
            self.out.extend(std::iter::repeat_n(' ', spaces));
        }
    }

    fn number(&mut self, value: &Value) -> Result<(), Error> {
        if value.is_integer() {
            self.out.push_str(&value.to_string());
        } else {
            self.out.push_str(&python_float(f64::try_from(value.clone())?));
        }
        Ok(())
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || self.is_ascii && !c.is_ascii() => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(self.out, "\\u{unit:04x}");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// A key as Python turns it into text.
fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.as_str().unwrap_or_default().to_owned()),
        ValueKind::None => Ok("null".to_owned()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.to_owned()),
        ValueKind::Number if key.is_integer() => Ok(key.to_string()),
        ValueKind::Number => Ok(python_float(f64::try_from(key.clone())?)),
        kind => Err(failed(&format!("tojson: {kind} cannot be a key"))),
    }
}

/// The shortest digits that read back, written out from 1e-4 to below 1e16, as Python's `repr`.
fn python_float(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let shortest = format!("{value:e}");
    let (digits, exponent) = shortest.split_once('e').expect("the form of `e`");
    let exponent: i32 = exponent.parse().expect("the form of `e`");
    if value != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let mut text = value.to_string();
    if !text.contains('.') {
        text.push_str(".0");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_written_as_python_writes_them() {
        // Each from `json.dumps(x)`.
        for (value, expected) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (-2.5, "-2.5"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (1e15, "1000000000000000.0"),
            (123_456_789_012_345_680.0, "1.2345678901234568e+17"),
            (1e16, "1e+16"),
            (1e100, "1e+100"),
            (5e-324, "5e-324"),
        ] {
            assert_eq!(python_float(value), expected);
        }
    }

    fn dumps(json: &str, options: &[(&str, Value)]) -> String {
        let options: Kwargs = options.iter().map(|(name, value)| (*name, value.clone())).collect();
        to_json(&from_json(json).unwrap(), options).unwrap().to_string()
    }

    #[test]
    fn json_is_written_as_python_writes_it() {
        let json = r#"{"b":[1,"é<&'\"\n\u0001\u007f",null,true,1e2],"a":{},"c":[]}"#;
        let plain =
            "{\"b\": [1, \"é<&'\\\"\\n\\u0001\u{7f}\", null, true, 100.0], \"a\": {}, \"c\": []}";
        assert_eq!(dumps(json, &[]), plain);
        let sorted = "{\"a\": {}, \"b\": [1, \"\\u00e9<&'\\\"\\n\\u0001\u{7f}\", null, true, 100.0], \"c\": []}";
        let options = [("sort_keys", Value::from(true)), ("ensure_ascii", Value::from(true))];
        assert_eq!(dumps(json, &options), sorted);
        assert_eq!(dumps(r#""😀""#, &options), r#""\ud83d\ude00""#);
    }

    #[test]
    fn indents_and_separators_are_those_of_python() {
        let json = r#"{"a":[1,{"b":2}],"c":[]}"#;
        let indented = "{\n  \"a\": [\n    1,\n    {\n      \"b\": 2\n    }\n  ],\n  \"c\": []\n}";
        assert_eq!(dumps(json, &[("indent", Value::from(2))]), indented);
        let tight = [("separators", Value::from(vec![",", ":"]))];
        assert_eq!(dumps(json, &tight), r#"{"a":[1,{"b":2}],"c":[]}"#);
    }

    #[test]
    fn what_is_no_json_is_refused() {
        assert!(to_json(&Value::UNDEFINED, std::iter::empty::<(&str, Value)>().collect()).is_err());
        assert!(from_json("{").is_err());
    }
}

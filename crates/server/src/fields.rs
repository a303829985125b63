//! A request's JSON, taken apart field by field.
//!
//! Every field of an object is either taken, accepted because it changes nothing here, or refused by its name. So a
//! client that asks for something that cannot be had hears of it, and a typing error is not silently ignored.

use serde_json::{Map, Value};

use crate::error::ApiError;

/// Nesting of a body: far above any tool's schema.
const MAX_DEPTH: usize = 64;
/// Values in a body: numbers, texts, lists, objects. A conversation of 5,000 messages has 30,000.
const MAX_VALUES: usize = 200_000;

/// Reads a body as JSON within the limits.
///
/// The limits are checked on the bytes, before anything is built of them: a list of zeros takes sixteen times its text.
pub(crate) fn parse(bytes: &[u8]) -> Result<Value, ApiError> {
    let (depth, values) = measure(bytes);
    if depth > MAX_DEPTH {
        return Err(ApiError::invalid(format!(
            "the body is nested {depth} levels deep; at most {MAX_DEPTH} are accepted"
        )));
    }
    if values > MAX_VALUES {
        return Err(ApiError::invalid(format!(
            "the body has about {values} values; at most {MAX_VALUES} are accepted"
        )));
    }
    serde_json::from_slice(bytes)
        .map_err(|error| ApiError::invalid(format!("the body is not valid JSON: {error}")))
}

/// Levels and values of a JSON text; of something else, numbers that mean nothing and are not too small.
pub(crate) fn measure(bytes: &[u8]) -> (usize, usize) {
    let (mut depth, mut deepest, mut values) = (0_usize, 0, 1);
    let (mut in_text, mut is_escaped) = (false, false);
    for byte in bytes {
        if in_text {
            in_text = is_escaped || *byte != b'"';
            is_escaped = !is_escaped && *byte == b'\\';
            continue;
        }
        match byte {
            b'"' => in_text = true,
            b'{' | b'[' => {
                depth += 1;
                deepest = deepest.max(depth);
                values += 1;
            }
            b'}' | b']' => depth = depth.saturating_sub(1),
            b',' => values += 1,
            _ => {}
        }
    }
    (deepest, values)
}

/// An object whose fields are taken one by one.
#[derive(Debug)]
pub(crate) struct Fields {
    map: Map<String, Value>,
    /// Where it stands, like `messages[2]`; empty for the body itself.
    at: String,
}

impl Fields {
    /// The fields of an object.
    pub(crate) fn of(value: Value, at: impl Into<String>) -> Result<Self, ApiError> {
        let at = at.into();
        match value {
            Value::Object(map) => Ok(Self { map, at }),
            other => {
                let what = if at.is_empty() { "the body" } else { &at };
                Err(ApiError::invalid(format!("{what} is {}, not an object", kind(&other))).at(&at))
            }
        }
    }

    /// The full name of a field.
    pub(crate) fn path(&self, name: &str) -> String {
        if self.at.is_empty() { name.to_owned() } else { format!("{}.{name}", self.at) }
    }

    /// Takes a field; null is as good as none.
    pub(crate) fn take(&mut self, name: &str) -> Option<Value> {
        self.map.shift_remove(name).filter(|value| !value.is_null())
    }

    /// Looks at a field; null is as good as none.
    pub(crate) fn peek(&self, name: &str) -> Option<&Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// Whether a field is there, also as null.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.map.contains_key(name)
    }

    /// Takes a text.
    pub(crate) fn text(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(name, &other, "a string")),
        }
    }

    /// Takes a text that must be there.
    pub(crate) fn needed_text(&mut self, name: &str) -> Result<String, ApiError> {
        self.text(name)?.ok_or_else(|| self.missing(name))
    }

    /// Takes true or false.
    pub(crate) fn flag(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(other) => Err(self.wrong(name, &other, "true or false")),
        }
    }

    /// Takes a whole number within bounds.
    pub(crate) fn whole(
        &mut self,
        name: &str,
        bounds: std::ops::RangeInclusive<i64>,
    ) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        // Some clients write 5.0.
        let number = value.as_i64().or_else(|| {
            let real = value.as_f64().filter(|real| real.fract() == 0.0)?;
            (real.abs() < 9e15).then_some(real as i64)
        });
        match number {
            Some(number) if bounds.contains(&number) => Ok(Some(number)),
            _ => {
                let needed = format!("a whole number from {} to {}", bounds.start(), bounds.end());
                Err(self.wrong(name, &value, &needed))
            }
        }
    }

    /// Takes a number within bounds.
    pub(crate) fn real(
        &mut self,
        name: &str,
        bounds: std::ops::RangeInclusive<f64>,
    ) -> Result<Option<f32>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.as_f64() {
            Some(number) if bounds.contains(&number) => Ok(Some(number as f32)),
            _ => {
                let needed = format!("a number from {} to {}", bounds.start(), bounds.end());
                Err(self.wrong(name, &value, &needed))
            }
        }
    }

    /// Takes a list.
    pub(crate) fn list(&mut self, name: &str) -> Result<Option<Vec<Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(other) => Err(self.wrong(name, &other, "a list")),
        }
    }

    /// Takes an object.
    pub(crate) fn object(&mut self, name: &str) -> Result<Option<Self>, ApiError> {
        let at = self.path(name);
        self.take(name).map(|value| Self::of(value, at)).transpose()
    }

    /// Everything that was not taken.
    pub(crate) fn into_map(self) -> Map<String, Value> {
        self.map
    }

    /// Drops fields that change nothing here.
    pub(crate) fn ignore(&mut self, names: &[&str]) {
        for name in names {
            self.map.shift_remove(*name);
        }
    }

    /// Refuses fields that ask for something that cannot be had; as null, false, or empty they ask for nothing.
    pub(crate) fn refuse(&mut self, names: &[(&str, &str)]) -> Result<(), ApiError> {
        for (name, why) in names {
            let Some(value) = self.take(name) else { continue };
            let asks = match &value {
                Value::Bool(flag) => *flag,
                Value::Array(list) => !list.is_empty(),
                _ => true,
            };
            if asks {
                let path = self.path(name);
                return Err(ApiError::invalid(format!("`{path}` is not supported: {why}"))
                    .at(&path)
                    .code("unsupported_parameter"));
            }
        }
        Ok(())
    }

    /// Refuses settings that cannot be had, unless their value is the one that turns them off.
    pub(crate) fn refuse_unless(&mut self, names: &[(&str, f64, &str)]) -> Result<(), ApiError> {
        for (name, off, why) in names {
            if self.peek(name).and_then(Value::as_f64) == Some(*off) {
                self.ignore(&[*name]);
            }
            self.refuse(&[(*name, *why)])?;
        }
        Ok(())
    }

    /// Refuses what is left.
    pub(crate) fn end(self) -> Result<(), ApiError> {
        match self.map.iter().find(|(_, value)| !value.is_null()) {
            None => Ok(()),
            Some((name, _)) => {
                let path = self.path(name);
                Err(ApiError::invalid(format!("`{path}` is not a field that this server knows"))
                    .at(&path)
                    .code("unknown_parameter"))
            }
        }
    }

    /// A field that has to be there.
    pub(crate) fn missing(&self, name: &str) -> ApiError {
        let path = self.path(name);
        ApiError::invalid(format!("`{path}` is missing"))
            .at(&path)
            .code("missing_required_parameter")
    }

    /// A field of the wrong kind.
    pub(crate) fn wrong(&self, name: &str, found: &Value, needed: &str) -> ApiError {
        wrong(&self.path(name), found, needed)
    }
}

/// A value of the wrong kind.
pub(crate) fn wrong(path: &str, found: &Value, needed: &str) -> ApiError {
    let shown = match found {
        Value::Number(_) | Value::Bool(_) | Value::Null => found.to_string(),
        Value::String(text) if text.len() <= 40 => format!("{found}"),
        other => kind(other).to_owned(),
    };
    ApiError::invalid(format!("`{path}` is {shown}; needed: {needed}")).at(path)
}

/// What a value is, in words.
pub(crate) const fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn message(result: Result<impl std::fmt::Debug, ApiError>) -> String {
        result.unwrap_err().message
    }

    #[test]
    fn a_body_beyond_the_limits_is_refused_before_it_is_built() {
        let deep = "[".repeat(100_000);
        assert!(message(parse(deep.as_bytes())).contains("nested 100000 levels"));
        let many = format!("[{}0]", "0,".repeat(MAX_VALUES));
        assert!(message(parse(many.as_bytes())).contains("values"));
        let quoted = format!("[\"{}\\\"[\"]", "[,".repeat(MAX_VALUES));
        assert!(parse(quoted.as_bytes()).is_ok(), "what stands in a text does not count");
        assert!(message(parse(b"{\"a\":")).contains("line 1 column 5"));
    }

    #[test]
    fn what_is_not_known_or_cannot_be_had_is_refused_by_name() {
        let mut fields = Fields::of(json!({"audio": {"voice": "x"}, "no": null}), "").unwrap();
        assert!(message(fields.refuse(&[("audio", "there is no sound")])).contains("`audio`"));
        let mut fields = Fields::of(json!({"functions": [], "temprature": 1}), "a[0]").unwrap();
        fields.refuse(&[("functions", "old")]).unwrap();
        let error = fields.end().unwrap_err();
        assert_eq!(error.param.as_deref(), Some("a[0].temprature"));
    }

    #[test]
    fn a_field_of_the_wrong_kind_says_what_was_found_and_what_is_needed() {
        let mut fields = Fields::of(json!({"n": 0, "t": "x", "f": 5.0, "big": 1e300}), "").unwrap();
        assert_eq!(
            message(fields.whole("n", 1..=8)),
            "`n` is 0; needed: a whole number from 1 to 8"
        );
        assert_eq!(
            message(fields.real("t", 0.0..=2.0)),
            "`t` is \"x\"; needed: a number from 0 to 2"
        );
        assert_eq!(fields.whole("f", 1..=8).unwrap(), Some(5));
        assert!(fields.whole("big", i64::MIN..=i64::MAX).is_err());
    }
}

//! JSON schemas of tools: brought into one form, and used to give arguments their types.
//!
//! Models write arguments as text or with slips of type. A value is changed only where its schema leaves no doubt and the
//! change loses nothing; anything else stays as the model wrote it.

use std::cell::Cell;

use serde_json::{Map, Value, json};

/// Nesting that is followed.
const MAX_DEPTH: usize = 32;
/// Schemas that are looked at for one call: alternatives of alternatives would be more than anybody waits for.
const MAX_STEPS: usize = 200_000;

/// A schema of an object with `properties`, whatever form of "no parameters" a client has.
pub(crate) fn normalised(schema: Option<Value>) -> Result<Value, String> {
    let mut map = match schema {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(map)) => map,
        Some(other) => return Err(format!("{} is not a schema", crate::fields::kind(&other))),
    };
    match map.get("type") {
        None | Some(Value::Null) => {
            map.insert("type".to_owned(), "object".into());
        }
        Some(Value::String(name)) if name == "object" => {}
        Some(other) => return Err(format!("their type is {other}; needed: \"object\"")),
    }
    match map.get("properties") {
        None | Some(Value::Null) => {
            map.insert("properties".to_owned(), json!({}));
        }
        Some(Value::Object(_)) => {}
        Some(_) => return Err("their `properties` are no object".to_owned()),
    }
    if map.get("required").is_some_and(Value::is_null) {
        map.shift_remove("required");
    }
    Ok(Value::Object(map))
}

/// What a schema allows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "one for each type that JSON has")]
struct Kinds {
    text: bool,
    whole: bool,
    real: bool,
    flag: bool,
    list: bool,
    object: bool,
    null: bool,
}

impl Kinds {
    const NONE: Self = Self {
        text: false,
        whole: false,
        real: false,
        flag: false,
        list: false,
        object: false,
        null: false,
    };
    const ALL: Self = Self {
        text: true,
        whole: true,
        real: true,
        flag: true,
        list: true,
        object: true,
        null: true,
    };

    fn named(name: &str) -> Self {
        let mut kinds = Self::NONE;
        match name {
            "string" => kinds.text = true,
            "integer" => kinds.whole = true,
            "number" => (kinds.whole, kinds.real) = (true, true),
            "boolean" => kinds.flag = true,
            "array" => kinds.list = true,
            "object" => kinds.object = true,
            "null" => kinds.null = true,
            _ => return Self::ALL,
        }
        kinds
    }

    fn or(self, other: Self) -> Self {
        Self {
            text: self.text || other.text,
            whole: self.whole || other.whole,
            real: self.real || other.real,
            flag: self.flag || other.flag,
            list: self.list || other.list,
            object: self.object || other.object,
            null: self.null || other.null,
        }
    }

    fn allows(self, value: &Value) -> bool {
        match value {
            Value::Null => self.null,
            Value::Bool(_) => self.flag,
            Value::Number(number) => self.real || (self.whole && !number.is_f64()),
            Value::String(_) => self.text,
            Value::Array(_) => self.list,
            Value::Object(_) => self.object,
        }
    }

    fn of_value(value: &Value) -> Self {
        Self::named(match value {
            Value::Null => "null",
            Value::Bool(_) => "boolean",
            Value::Number(_) => "number",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        })
    }
}

/// A schema inside of a tool's parameters, which its references lead to.
#[derive(Clone, Copy)]
struct Schema<'a> {
    root: &'a Value,
    here: &'a Value,
    /// Looks that are left.
    steps: &'a Cell<usize>,
}

impl<'a> Schema<'a> {
    fn at(self, here: &'a Value) -> Self {
        Self { here, ..self }
    }

    /// Whether there is another look.
    fn step(self) -> bool {
        let left = self.steps.get();
        self.steps.set(left.saturating_sub(1));
        left > 0
    }

    /// Follows `$ref`.
    fn resolved(self) -> Self {
        let mut schema = self;
        for _ in 0..MAX_DEPTH {
            if !self.step() {
                break;
            }
            let target = schema.here.get("$ref").and_then(Value::as_str);
            let target = target.and_then(|text| text.strip_prefix('#'));
            match target.and_then(|pointer| self.root.pointer(pointer)) {
                Some(here) => schema = self.at(here),
                None => break,
            }
        }
        schema
    }

    fn kinds(self, depth: usize) -> Kinds {
        let schema = self.resolved();
        // What nobody has looked at may be anything, so its values stay as they are.
        if depth == 0 || !self.step() {
            return Kinds::ALL;
        }
        if let Some(value) = schema.here.get("const") {
            return Kinds::of_value(value);
        }
        if let Some(Value::Array(values)) = schema.here.get("enum") {
            return values.iter().map(Kinds::of_value).fold(Kinds::NONE, Kinds::or);
        }
        match schema.here.get("type") {
            Some(Value::String(name)) => {
                let nullable = schema.here.get("nullable") == Some(&Value::Bool(true));
                let mut kinds = Kinds::named(name);
                kinds.null |= nullable;
                return kinds;
            }
            Some(Value::Array(names)) => {
                let kind = |name: &Value| name.as_str().map_or(Kinds::ALL, Kinds::named);
                return names.iter().map(kind).fold(Kinds::NONE, Kinds::or);
            }
            _ => {}
        }
        for key in ["anyOf", "oneOf"] {
            if let Some(Value::Array(options)) = schema.here.get(key) {
                let kinds = options.iter().map(|option| schema.at(option).kinds(depth - 1));
                return kinds.fold(Kinds::NONE, Kinds::or);
            }
        }
        Kinds::ALL
    }

    fn property(self, name: &str) -> Option<Self> {
        let schema = self.resolved();
        let own = |schema: Self| schema.here.get("properties").and_then(|all| all.get(name));
        if let Some(found) = own(schema) {
            return Some(schema.at(found));
        }
        let options =
            ["anyOf", "oneOf", "allOf"].iter().filter_map(|key| schema.here.get(key)?.as_array());
        let options = options.flatten().take_while(|_| self.step());
        let found = options.into_iter().find_map(|option| own(schema.at(option).resolved()));
        found.map(|found| schema.at(found))
    }

    fn items(self) -> Option<Self> {
        let schema = self.resolved();
        schema.here.get("items").map(|items| schema.at(items))
    }
}

/// Gives arguments that came as JSON the types of their schema.
pub(crate) fn coerced(arguments: Map<String, Value>, parameters: &Value) -> Map<String, Value> {
    let steps = Cell::new(MAX_STEPS);
    let schema = Schema { root: parameters, here: parameters, steps: &steps };
    match coerce(Value::Object(arguments), schema, MAX_DEPTH) {
        Value::Object(map) => map,
        _ => unreachable!("an object stays one"),
    }
}

fn coerce(value: Value, schema: Schema<'_>, depth: usize) -> Value {
    if depth == 0 {
        return value;
    }
    match value {
        Value::Object(map) => {
            let field = |(name, value): (String, Value)| {
                let value = match schema.property(&name) {
                    Some(property) => coerce(typed(value, property), property, depth - 1),
                    None => value,
                };
                (name, value)
            };
            Value::Object(map.into_iter().map(field).collect())
        }
        Value::Array(list) => match schema.items() {
            Some(items) => {
                let item = |value| coerce(typed(value, items), items, depth - 1);
                Value::Array(list.into_iter().map(item).collect())
            }
            None => Value::Array(list),
        },
        other => other,
    }
}

/// A value as its schema wants it, if it can be without loss.
fn typed(value: Value, schema: Schema<'_>) -> Value {
    let kinds = schema.kinds(MAX_DEPTH);
    if kinds.allows(&value) {
        return value;
    }
    match &value {
        Value::String(text) => parsed(text, kinds).unwrap_or(value),
        Value::Number(number) if kinds.whole => {
            let whole = number.as_f64().filter(|real| real.fract() == 0.0 && real.abs() < 9e15);
            whole.map_or(value, |real| Value::from(real as i64))
        }
        Value::Number(_) | Value::Bool(_) if kinds.text => Value::String(value.to_string()),
        _ => value,
    }
}

/// A text as a value of one of these kinds.
fn parsed(text: &str, kinds: Kinds) -> Option<Value> {
    let text = text.trim();
    if kinds.flag {
        match text {
            "True" | "TRUE" => return Some(Value::Bool(true)),
            "False" | "FALSE" => return Some(Value::Bool(false)),
            _ => {}
        }
    }
    if kinds.null && matches!(text, "None" | "null") {
        return Some(Value::Null);
    }
    let value: Value = serde_json::from_str(text).ok()?;
    if value.is_string() {
        return None;
    }
    if kinds.allows(&value) {
        return Some(value);
    }
    let whole =
        value.as_f64().filter(|real| kinds.whole && real.fract() == 0.0 && real.abs() < 9e15);
    whole.map(|real| Value::from(real as i64))
}

/// An argument that came as bare text, as its schema wants it.
pub(crate) fn from_text(text: &str, name: &str, parameters: &Value) -> Value {
    let steps = Cell::new(MAX_STEPS);
    let schema = Schema { root: parameters, here: parameters, steps: &steps };
    let Some(property) = schema.property(name) else {
        // Nothing is known of it: JSON where it is JSON.
        return serde_json::from_str(text.trim()).unwrap_or_else(|_| text.into());
    };
    let kinds = property.kinds(MAX_DEPTH);
    let real = Kinds { text: false, null: false, ..kinds };
    // One real type beside null decides alone: a text of digits stays a text.
    let value = if kinds.text && real == Kinds::NONE {
        (kinds.null && text.trim() == "null").then_some(Value::Null)
    } else {
        parsed(text, kinds)
    };
    coerce(value.unwrap_or_else(|| text.into()), property, MAX_DEPTH)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::needless_pass_by_value, reason = "so that cases are literals")]
    use super::*;

    fn text(text: &str, schema: Value) -> Value {
        from_text(text, "x", &json!({"type": "object", "properties": {"x": schema}}))
    }

    fn value(value: Value, schema: Value) -> Value {
        let schema = json!({"type": "object", "properties": {"x": schema}});
        let arguments = Map::from_iter([("x".to_owned(), value)]);
        coerced(arguments, &schema)["x"].clone()
    }

    #[test]
    fn a_text_of_digits_stays_a_text_where_a_text_is_wanted() {
        assert_eq!(text("2024", json!({"type": "string"})), "2024");
        assert_eq!(text("2024", json!({"type": ["string", "null"]})), "2024");
        assert_eq!(text("2024", json!({"anyOf": [{"type": "null"}, {"type": "string"}]})), "2024");
        assert_eq!(text("null", json!({"type": ["string", "null"]})), Value::Null);
        assert_eq!(text("null", json!({"type": "string"})), "null");
        assert_eq!(text("  indented\n", json!({"type": "string"})), "  indented\n");
    }

    #[test]
    fn other_types_are_read_from_text() {
        assert_eq!(text("5", json!({"type": "integer"})), 5);
        assert_eq!(text("5.0", json!({"type": "integer"})), 5);
        assert_eq!(text("5.5", json!({"type": "integer"})), "5.5");
        assert_eq!(text("True", json!({"type": "boolean"})), true);
        assert_eq!(text("[1, 2]", json!({"type": "array"})), json!([1, 2]));
        assert_eq!(
            text(
                "[{\"a\": \"1\"}]",
                json!({"type": "array", "items": {"properties": {"a": {"type": "integer"}}}})
            ),
            json!([{"a": 1}])
        );
        assert_eq!(text("2024", json!({"type": ["integer", "null"]})), 2024);
        assert_eq!(text("hello", json!({"type": "integer"})), "hello");
        assert_eq!(text("{\"a\":1}", json!({})), json!({"a": 1}));
    }

    #[test]
    fn json_of_the_wrong_type_is_put_right_where_nothing_is_lost() {
        assert_eq!(value(json!("5"), json!({"type": "integer"})), 5);
        assert_eq!(value(json!(5), json!({"type": "string"})), "5");
        assert_eq!(value(json!("[1]"), json!({"type": "array"})), json!([1]));
        assert_eq!(value(json!(5.0), json!({"type": "integer"})), 5);
        assert_eq!(value(json!(5.5), json!({"type": "integer"})), 5.5);
        assert_eq!(value(json!(null), json!({"type": "string"})), Value::Null);
        let recursive = json!({"$ref": "#/properties/x"});
        assert_eq!(value(json!("5"), recursive), "5", "a reference in a circle ends");
    }

    /// 4^32 looks, on the thread that everybody waits for.
    #[test]
    fn alternatives_without_end_are_given_up() {
        let refer = || json!({"$ref": "#/properties/x"});
        let endless = json!({"anyOf": [refer(), refer(), refer(), refer()]});
        assert_eq!(text("5", endless.clone()), 5);
        assert_eq!(value(json!("5"), endless), "5");
    }

    #[test]
    fn every_form_of_no_parameters_is_an_object_without_properties() {
        let none = json!({"type": "object", "properties": {}});
        for schema in [None, Some(Value::Null), Some(json!({})), Some(json!({"type": "object"}))] {
            assert_eq!(normalised(schema).unwrap(), none);
        }
        let nulls = json!({"type": null, "properties": null, "required": null});
        assert_eq!(normalised(Some(nulls)).unwrap(), none);
        assert!(normalised(Some(json!({"type": "string"}))).is_err());
        assert!(normalised(Some(json!([]))).is_err());
    }
}

//! Calls of tools in the forms that models write them.
//!
//! Two forms, between `<tool_call>` and `</tool_call>`: JSON (`{"name": …, "arguments": {…}}`, Hermes and Qwen) and tags
//! (`<function=…><parameter=…>`, Qwen3-Coder). A block is read as a whole or not at all: whoever gets `None` has text.

use serde_json::{Map, Value};

use crate::chat::{Call, Tool, new_id};
use crate::schema;

/// Begins a block of calls.
pub(crate) const OPENS: &str = "<tool_call>";
/// Ends it.
pub(crate) const CLOSES: &str = "</tool_call>";
/// Begins a call in tags, which some models write without a block around it.
pub(crate) const FUNCTION: &str = "<function=";
/// Begins an argument in tags.
const PARAMETER: &str = "<parameter=";
/// Ends a call in tags.
pub(crate) const FUNCTION_CLOSES: &str = "</function>";

/// What a block turns out to be.
#[derive(Debug, PartialEq)]
pub(crate) enum Block {
    /// Calls of tools, all of it.
    Calls(Vec<Call>),
    /// It may become calls when more is added.
    Begun,
    /// No calls, however it goes on.
    Text,
}

/// Reads a block that may be over.
pub(crate) fn read(block: &str, tools: &[Tool]) -> Block {
    let block = block.trim();
    if block.starts_with('{') || block.starts_with('[') {
        return read_json(block, tools);
    }
    let (mut calls, mut rest) = (Vec::new(), block);
    while !rest.is_empty() {
        match read_tags(rest, tools) {
            Ok((call, after)) => {
                calls.push(call);
                rest = after.trim_start();
            }
            Err(block) => return block,
        }
    }
    if calls.is_empty() { Block::Text } else { Block::Calls(calls) }
}

fn read_json(block: &str, tools: &[Tool]) -> Block {
    let calls = match serde_json::from_str(block) {
        Err(error) if error.is_eof() => return Block::Begun,
        Err(_) => None,
        Ok(Value::Array(list)) if !list.is_empty() => {
            list.into_iter().map(|call| json_call(call, tools)).collect()
        }
        Ok(value) => json_call(value, tools).map(|call| vec![call]),
    };
    calls.map_or(Block::Text, Block::Calls)
}

fn json_call(value: Value, tools: &[Tool]) -> Option<Call> {
    let Value::Object(mut map) = value else { return None };
    // Some models wrap it as they see it in the prompt.
    if let Some(Value::Object(inner)) = map.shift_remove("function") {
        map = inner;
    }
    let name = map.get("name")?.as_str()?.to_owned();
    let tool = tools.iter().find(|tool| tool.name == name)?;
    let arguments = map.shift_remove("arguments").or_else(|| map.shift_remove("parameters"));
    let arguments = match arguments {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(arguments)) => arguments,
        Some(Value::String(text)) => serde_json::from_str(&text).ok()?,
        Some(_) => return None,
    };
    let arguments = schema::coerced(arguments, &tool.parameters);
    Some(Call { id: new_id("call_"), name, arguments })
}

/// A call in tags at the start of a text, and what follows it.
fn read_tags<'a>(text: &'a str, tools: &[Tool]) -> Result<(Call, &'a str), Block> {
    let (name, mut rest) = tag(text, FUNCTION)?;
    let Some(tool) = tools.iter().find(|tool| tool.name == name) else { return Err(Block::Text) };
    let mut arguments = Map::new();
    loop {
        rest = rest.trim_start();
        if let Some(after) = rest.strip_prefix(FUNCTION_CLOSES) {
            let call = Call { id: new_id("call_"), name: name.to_owned(), arguments };
            return Ok((call, after));
        }
        let (key, after) = match tag(rest, PARAMETER) {
            Err(Block::Text) if FUNCTION_CLOSES.starts_with(rest) => return Err(Block::Begun),
            other => other?,
        };
        let (value, after) = parameter_value(after).ok_or(Block::Begun)?;
        arguments.insert(key.to_owned(), schema::from_text(value, key, &tool.parameters));
        rest = after;
    }
}

/// The name in a tag like `<function=name>`, and what follows the tag.
fn tag<'a>(text: &'a str, opens: &str) -> Result<(&'a str, &'a str), Block> {
    let Some(inside) = text.strip_prefix(opens) else {
        return Err(if opens.starts_with(text) { Block::Begun } else { Block::Text });
    };
    let (name, rest) = inside.split_once('>').ok_or(Block::Begun)?;
    Ok((name.trim().trim_matches('"'), rest))
}

/// The text up to the tag that ends it: the first one after which the call goes on or ends. So a value may spell the tag
/// itself.
fn parameter_value(text: &str) -> Option<(&str, &str)> {
    const END: &str = "</parameter>";
    let mut from = 0;
    while let Some(at) = text[from..].find(END).map(|at| from + at) {
        let after = &text[at + END.len()..];
        let next = after.trim_start();
        if next.starts_with(PARAMETER) || next.starts_with(FUNCTION_CLOSES) {
            let value = &text[..at];
            let value = value.strip_prefix('\n').unwrap_or(value);
            return Some((value.strip_suffix('\n').unwrap_or(value), after));
        }
        from = at + END.len();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn tools() -> Vec<Tool> {
        let edits = json!({"type": "object", "properties": {
            "path": {"type": "string"}, "line": {"type": "integer"},
            "edits": {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "integer"}}}}
        }});
        vec![
            Tool::new("edit".to_owned(), None, Some(edits), "tools").unwrap(),
            Tool::new("now".to_owned(), None, None, "tools").unwrap(),
        ]
    }

    fn check(block: &str, expected: &[(&str, Value)]) {
        let Block::Calls(calls) = read(block, &tools()) else { panic!("no call: {block}") };
        let calls: Vec<_> =
            calls.into_iter().map(|c| (c.name, Value::Object(c.arguments))).collect();
        let expected: Vec<_> = expected.iter().map(|(n, v)| ((*n).to_owned(), v.clone())).collect();
        assert_eq!(calls, expected, "{block}");
    }

    #[test]
    fn calls_in_json_are_read() {
        check("\n{\"name\": \"now\", \"arguments\": {}}\n", &[("now", json!({}))]);
        check("{\"name\": \"now\"}", &[("now", json!({}))]);
        check(
            r#"{"name": "edit", "arguments": {"edits": [{"n": "1"}, {"n": 2}], "path": "a</tool_call>b"}}"#,
            &[("edit", json!({"edits": [{"n": 1}, {"n": 2}], "path": "a</tool_call>b"}))],
        );
        check(
            r#"{"name": "edit", "arguments": "{\"line\": \"3\"}"}"#,
            &[("edit", json!({"line": 3}))],
        );
        check(
            r#"[{"name": "now"}, {"name": "now", "parameters": {}}]"#,
            &[("now", json!({})), ("now", json!({}))],
        );
    }

    #[test]
    fn calls_in_tags_are_read() {
        check(
            "<function=edit>\n<parameter=path>\na\n\n  b\n</parameter>\n<parameter=line>\n7\n</parameter>\n</function>",
            &[("edit", json!({"path": "a\n\n  b", "line": 7}))],
        );
        check(
            "<function=edit><parameter=path>x</parameter> y</parameter></function>",
            &[("edit", json!({"path": "x</parameter> y"}))],
        );
        check(
            "<function=edit>\n<parameter=edits>\n[{\"n\": \"1\"}]\n</parameter>\n</function>\n<function=now>\n</function>",
            &[("edit", json!({"edits": [{"n": 1}]})), ("now", json!({}))],
        );
    }

    #[test]
    fn what_may_become_a_call_is_told_from_what_never_will() {
        for block in [
            "{",
            "{\"name\": \"edit\", \"arguments\": {\"path\": \"a",
            "<function=edit>\n<parameter=path>\nx\n</function>",
            "<function=edit>\n<parameter=path>\nx\n</parameter>\n",
            "<func",
            "<function=edit>\n</func",
        ] {
            assert_eq!(read(block, &tools()), Block::Begun, "{block}");
        }
        for block in [
            "",
            "{\"name\": \"now\", \"arguments\": [1]}",
            "{\"name\": \"gone\", \"arguments\": {}}",
            "{\"name\": \"now\"} and more",
            "{'name': 'now'}",
            "[]",
            "<function=gone>\n</function>",
            "<function=now></function> and more",
            "<function=now> and more",
        ] {
            assert_eq!(read(block, &tools()), Block::Text, "{block}");
        }
    }
}

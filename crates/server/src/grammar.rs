//! Answers that cannot be anything but what was asked for: JSON of a schema, calls of tools.
//!
//! A grammar says which tokens may come next; all others get the logit minus infinity. Compiling and masks are
//! `llguidance`'s, under limits that are smaller than its own: a schema comes from a stranger.

use std::fmt::Write as _;
use std::sync::Arc;

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Map, Value, json};
use session::Tokenizer;

use crate::calls::{CLOSES, FUNCTION, FUNCTION_CLOSES, OPENS};
use crate::chat::{Format, Tool};
use crate::prompt;

/// Bytes of a schema, and of those of all tools together.
const MAX_SCHEMA_BYTES: usize = 256 << 10;
/// States of a grammar's lexer: about 2 KiB each.
const MAX_LEXER_STATES: usize = 16_384;
const MAX_GRAMMAR_SYMBOLS: usize = 100_000;
/// States of the parser that a token may cost: everybody waits for a mask.
const MAX_STEP_ITEMS: usize = 10_000;
/// What a grammar takes on its way through an answer, as measured: so much, and this many times the text of its schemas.
const GRAMMAR_BYTES: usize = 256 << 10;
const GRAMMAR_SHARE: usize = 96;
/// Properties of an object: the time to compile one grows with their square.
const MAX_PROPERTIES: usize = 256;
/// Bytes that begin a control token in the vocabulary of `llguidance`; no text has it.
const CONTROL: u8 = TokTrie::SPECIAL_TOKEN_MARKER;
/// White space between the parts of JSON: as people indent it, and never without end.
const WHITE_SPACE: &str = r"\n[ ]{0,24}|[ ]{1,4}|\n?\t{1,6}";

/// In which form a model writes calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallForm {
    /// JSON between tags.
    Json,
    /// Tags all the way down.
    Tags,
}

/// What an answer has to be.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Rule {
    /// JSON of a schema.
    Json(Value),
    /// Calls of these tools, at least one; one only unless `parallel`.
    Calls { tools: Vec<Tool>, form: CallForm, parallel: bool },
    /// What follows the opening tag of a call of these tools.
    Call { tools: Vec<Tool>, form: CallForm },
}

impl Rule {
    /// The rule of a format, if it has one.
    pub(crate) fn of(format: &Format) -> Option<Self> {
        match format {
            Format::Text => None,
            Format::JsonObject => Some(Self::Json(json!({ "type": "object" }))),
            Format::Schema(schema) => Some(Self::Json(schema.clone())),
        }
    }

    /// Memory of its grammar.
    pub(crate) fn grammar_bytes(&self) -> usize {
        let text = match self {
            Self::Json(schema) => schema.to_string().len(),
            Self::Calls { tools, .. } | Self::Call { tools, .. } => {
                tools.iter().map(|tool| tool.parameters.to_string().len()).sum()
            }
        };
        GRAMMAR_BYTES + GRAMMAR_SHARE * text
    }
}

/// Why a rule cannot be followed.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct GrammarError(String);

/// Compiles rules for a vocabulary.
pub(crate) struct Grammars {
    factory: ParserFactory,
}

impl Grammars {
    /// The vocabulary as a trie of bytes: about 12 bytes for each byte of it.
    pub(crate) fn of(tokenizer: &Tokenizer) -> Result<Self, GrammarError> {
        let vocab = tokenizer.vocab_len() as u32;
        let end = tokenizer.end_tokens().iter().copied().find(|id| *id < vocab);
        let end = end.ok_or_else(|| {
            GrammarError("the model's vocabulary has no token that ends an answer".to_owned())
        })?;
        let word = |id| {
            let bytes = tokenizer.token_bytes(id).unwrap_or_default();
            if prompt::is_control(tokenizer, id) || id == end {
                [&[CONTROL], bytes].concat()
            } else if bytes.first() == Some(&CONTROL) {
                // Never part of a text.
                Vec::new()
            } else {
                bytes.to_vec()
            }
        };
        let words: Vec<Vec<u8>> = (0..vocab).map(word).collect();
        let trie = TokTrie::from(&TokRxInfo::new(vocab, end), &words);
        let env: llguidance::toktrie::TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        // Its tables for free text would take as much memory again as the vocabulary.
        let mut factory =
            ParserFactory::new(&env, InferenceCapabilities::default(), &[]).map_err(failed)?;
        factory.quiet();
        let limits = factory.limits_mut();
        limits.max_lexer_states = MAX_LEXER_STATES;
        limits.max_grammar_size = MAX_GRAMMAR_SYMBOLS;
        limits.step_max_items = MAX_STEP_ITEMS;
        limits.verbose_errors = false;
        Ok(Self { factory })
    }

    /// Compiles a rule; takes some milliseconds, and never more than the limits allow.
    pub(crate) fn compile(&self, rule: &Rule) -> Result<Grammar, GrammarError> {
        let grammar = match rule {
            Rule::Json(schema) => TopLevelGrammar::from_json_schema(guided(schema)?),
            Rule::Calls { tools, form, parallel } => {
                TopLevelGrammar::from_lark(calls(tools, *form, Repeat::of(*parallel))?)
            }
            Rule::Call { tools, form } => {
                TopLevelGrammar::from_lark(calls(tools, *form, Repeat::Rest)?)
            }
        };
        let parser = self.factory.create_parser(grammar).map_err(failed)?;
        let mut matcher = Matcher::new(Ok(parser));
        if let Some(error) = matcher.get_error() {
            return Err(GrammarError(first_line(&error)));
        }
        // What can be seen at once to be impossible is said at once.
        matcher.compute_mask().map_err(failed)?;
        Ok(Grammar { matcher })
    }
}

fn failed(error: impl std::fmt::Display) -> GrammarError {
    GrammarError(first_line(&format!("{error:#}")))
}

fn first_line(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    line.chars().take(400).collect()
}

/// A schema with our own rules for white space.
fn guided(schema: &Value) -> Result<Value, GrammarError> {
    let bytes = schema.to_string().len();
    if bytes > MAX_SCHEMA_BYTES {
        return Err(GrammarError(format!(
            "the schema has {bytes} bytes; at most {MAX_SCHEMA_BYTES} are accepted"
        )));
    }
    check_properties(schema)?;
    let mut map = match schema {
        Value::Object(map) => map.clone(),
        Value::Bool(true) => Map::new(),
        other => {
            let found = crate::fields::kind(other);
            return Err(GrammarError(format!("a schema is an object, not {found}")));
        }
    };
    map.insert(
        "x-guidance".to_owned(),
        json!({ "whitespace_pattern": WHITE_SPACE, "coerce_one_of": true }),
    );
    Ok(Value::Object(map))
}

fn check_properties(schema: &Value) -> Result<(), GrammarError> {
    match schema {
        Value::Object(map) => {
            let found = map.get("properties").and_then(Value::as_object).map_or(0, Map::len);
            if found > MAX_PROPERTIES {
                return Err(GrammarError(format!(
                    "an object has {found} properties; at most {MAX_PROPERTIES} can be followed"
                )));
            }
            map.values().try_for_each(check_properties)
        }
        Value::Array(list) => list.iter().try_for_each(check_properties),
        _ => Ok(()),
    }
}

/// How many calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Repeat {
    One,
    Many,
    /// One, of which the opening tag was written.
    Rest,
}

impl Repeat {
    const fn of(parallel: bool) -> Self {
        if parallel { Self::Many } else { Self::One }
    }
}

/// A grammar of calls.
fn calls(tools: &[Tool], form: CallForm, repeat: Repeat) -> Result<String, GrammarError> {
    let mut text = String::new();
    let rest = if repeat == Repeat::Many { " (\"\\n\" call)*" } else { "" };
    let _ = writeln!(text, "start: call{rest}");
    let names: Vec<String> = (0..tools.len()).map(|index| format!("tool{index}")).collect();
    let (opens, closes) = (
        literal(&format!("{}\n", if repeat == Repeat::Rest { "" } else { OPENS })),
        literal(&format!("\n{CLOSES}")),
    );
    let _ = writeln!(text, "call: {opens} ({}) {closes}", names.join(" | "));
    for (index, tool) in tools.iter().enumerate() {
        match form {
            CallForm::Json => json_tool(&mut text, index, tool)?,
            CallForm::Tags => tags_tool(&mut text, index, tool)?,
        }
        within(text.len())?;
    }
    if form == CallForm::Tags {
        let _ = writeln!(text, "bare[suffix={}]: /(?s:.*)/", literal("\n</parameter>\n"));
    }
    within(text.len())?;
    Ok(text)
}

/// Refuses what grows beyond the limit while it grows: what is shared by parts is written for each.
fn within(bytes: usize) -> Result<(), GrammarError> {
    if bytes <= MAX_SCHEMA_BYTES {
        return Ok(());
    }
    Err(GrammarError(format!(
        "the schemas of the tools have {bytes} bytes or more; at most {MAX_SCHEMA_BYTES} are accepted"
    )))
}

fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

fn json_tool(text: &mut String, index: usize, tool: &Tool) -> Result<(), GrammarError> {
    let schema = guided(&tool.parameters)?;
    let name = Value::from(tool.name.as_str());
    let before = literal(&format!("{{\"name\": {name}, \"arguments\": "));
    let _ = writeln!(text, "tool{index}: {before} args{index} \"}}\"");
    let _ = writeln!(text, "args{index}: %json {schema}");
    Ok(())
}

fn tags_tool(text: &mut String, index: usize, tool: &Tool) -> Result<(), GrammarError> {
    let needed: Vec<&str> = tool.parameters["required"]
        .as_array()
        .map(|names| names.iter().filter_map(Value::as_str).collect())
        .unwrap_or_default();
    let empty = Map::new();
    let properties = tool.parameters["properties"].as_object().unwrap_or(&empty);
    let (mut parts, mut rules) = (String::new(), String::new());
    for (place, (name, schema)) in properties.iter().enumerate() {
        let mark = if needed.contains(&name.as_str()) { "" } else { "?" };
        let _ = write!(parts, " (arg{index}_{place}){mark}");
        let before = literal(&format!("<parameter={name}>\n"));
        if schema["type"] == "string" && schema.get("enum").is_none() {
            let _ = writeln!(rules, "arg{index}_{place}: {before} bare");
        } else {
            let mut schema = schema.clone();
            for key in ["$defs", "definitions"] {
                if let (Some(shared), Some(map)) =
                    (tool.parameters.get(key), schema.as_object_mut())
                {
                    map.insert(key.to_owned(), shared.clone());
                }
            }
            let after = literal("\n</parameter>\n");
            let _ = writeln!(rules, "arg{index}_{place}: {before} val{index}_{place} {after}");
            let _ = writeln!(rules, "val{index}_{place}: {}", bare_value(&schema)?);
        }
        within(text.len() + parts.len() + rules.len())?;
    }
    let before = literal(&format!("{FUNCTION}{}>\n", tool.name));
    let _ = writeln!(text, "tool{index}: {before}{parts} {}", literal(FUNCTION_CLOSES));
    text.push_str(&rules);
    Ok(())
}

/// A value between tags: texts of an enumeration stand there without quotes.
fn bare_value(schema: &Value) -> Result<String, GrammarError> {
    let texts: Option<Vec<String>> = schema["enum"]
        .as_array()
        .filter(|list| !list.is_empty())
        .and_then(|list| list.iter().map(|value| value.as_str().map(literal)).collect());
    match texts {
        Some(texts) => Ok(texts.join(" | ")),
        None => Ok(format!("%json {}", guided(schema)?)),
    }
}

/// A rule on the way through an answer.
pub(crate) struct Grammar {
    matcher: Matcher,
}

impl Grammar {
    /// The same rule from its start.
    pub(crate) fn fresh(&self) -> Self {
        Self { matcher: self.matcher.deep_clone() }
    }

    /// Takes the chance of all tokens that must not come next. Those that end the answer may where it may end.
    pub(crate) fn mask(
        &mut self,
        logits: &mut [f32],
        end_tokens: &[u32],
    ) -> Result<(), GrammarError> {
        let mask = self.matcher.compute_mask_or_eos().map_err(failed)?;
        let may_end = self.matcher.is_accepting().map_err(failed)?;
        let words = mask.as_slice();
        for (id, logit) in logits.iter_mut().enumerate() {
            let allowed = words.get(id / 32).is_some_and(|word| word >> (id % 32) & 1 == 1);
            let is_end = end_tokens.contains(&(id as u32));
            if !(allowed && !is_end || is_end && may_end) {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    /// A token was chosen. Whether the answer is complete, so that nothing can follow.
    pub(crate) fn accept(&mut self, token: u32) -> Result<bool, GrammarError> {
        self.matcher.consume_token(token).map_err(failed)?;
        Ok(self.matcher.is_stopped())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    /// Whether a grammar lets a text pass, token by token, and whether it may end after it.
    fn passes(rule: &Rule, text: &str) -> (bool, bool) {
        let tokenizer = testing::tokenizer();
        let grammars = Grammars::of(&tokenizer).unwrap();
        let mut grammar = grammars.compile(rule).unwrap();
        let ends = tokenizer.end_tokens();
        let allowed = |grammar: &mut Grammar, id: u32| {
            let mut logits = vec![0.0; tokenizer.vocab_len()];
            grammar.mask(&mut logits, ends).unwrap();
            logits[id as usize] == 0.0
        };
        for id in tokenizer.encode(text, session::Specials::AsText).unwrap() {
            if !allowed(&mut grammar, id) {
                return (false, false);
            }
            if grammar.accept(id).unwrap() {
                return (true, true);
            }
        }
        (true, allowed(&mut grammar, ends[0]))
    }

    fn tools() -> Vec<Tool> {
        let schema = json!({"type": "object", "required": ["city"], "properties": {
            "city": {"type": "string"}, "days": {"type": "integer"},
            "unit": {"enum": ["C", "F"]}
        }, "additionalProperties": false});
        vec![Tool::new("weather".to_owned(), None, Some(schema), "tools").unwrap()]
    }

    #[test]
    fn json_of_a_schema_passes_and_other_text_does_not() {
        let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}},
            "required": ["a"], "additionalProperties": false});
        let rule = Rule::Json(schema);
        assert_eq!(passes(&rule, "{\"a\": 12}"), (true, true));
        assert_eq!(passes(&rule, "{\n  \"a\": 12\n}"), (true, true));
        assert_eq!(passes(&rule, "{\"a\": 12"), (true, false));
        assert_eq!(passes(&rule, "{\"b\": 12}"), (false, false));
        assert_eq!(passes(&rule, "Sure: {\"a\": 12}"), (false, false));
        assert_eq!(passes(&rule, &format!("{{{}", "\n".repeat(9))), (false, false));
        let any = Rule::of(&Format::JsonObject).unwrap();
        assert_eq!(passes(&any, "{\"é\": [1, {\"x\": null}]}"), (true, true));
        assert_eq!(passes(&any, "[1]"), (false, false));
    }

    #[test]
    fn calls_in_either_form_follow_their_schema() {
        let rule = |form, parallel| Rule::Calls { tools: tools(), form, parallel };
        let call = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";
        assert_eq!(passes(&rule(CallForm::Json, false), call), (true, true));
        assert_eq!(
            passes(&rule(CallForm::Json, false), &call.replace("Rome\"", "R\", \"x\": 1")),
            (false, false)
        );
        assert_eq!(
            passes(&rule(CallForm::Json, false), &call.replace("weather", "other")),
            (false, false)
        );
        assert_eq!(passes(&rule(CallForm::Json, true), &format!("{call}\n{call}")), (true, true));
        let tags = "<tool_call>\n<function=weather>\n<parameter=city>\nNew\n\nYork <\n</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=unit>\nC\n</parameter>\n</function>\n</tool_call>";
        assert_eq!(passes(&rule(CallForm::Tags, false), tags), (true, true));
        assert_eq!(
            passes(&rule(CallForm::Tags, false), &tags.replace("\n3\n", "\nx\n")),
            (false, false)
        );
        assert_eq!(
            passes(&rule(CallForm::Tags, false), &tags.replace("\nC\n", "\nK\n")),
            (false, false)
        );
    }

    #[test]
    fn a_schema_that_cannot_be_followed_is_an_error() {
        let grammars = Grammars::of(&testing::tokenizer()).unwrap();
        let long = json!({"enum": ["x".repeat(MAX_SCHEMA_BYTES)]});
        let property = |i: usize| (format!("p{i}"), json!({}));
        let wide = json!({"anyOf": [{"type": "object",
            "properties": (0..=MAX_PROPERTIES).map(property).collect::<Map<_, _>>()}]});
        for schema in [
            json!({"type": "strin"}),
            json!({"type": "string", "pattern": "("}),
            json!({"$ref": "#/$defs/gone"}),
            json!({"$ref": "https://example.com/schema"}),
            json!([]),
            json!(false),
            long,
            wide,
        ] {
            assert!(grammars.compile(&Rule::Json(schema.clone())).is_err(), "{schema:.200}");
        }
    }

    /// Each property is written with all that it may refer to: as long as both together, it would be gigabytes.
    #[test]
    fn what_properties_share_is_not_written_without_end() {
        let shared = "x".repeat(MAX_SCHEMA_BYTES / 4);
        let property = |i: usize| (format!("p{i}"), json!({"$ref": "#/$defs/d"}));
        let schema = json!({"type": "object", "$defs": {"d": {"const": shared}},
            "properties": (0..MAX_PROPERTIES).map(property).collect::<Map<_, _>>()});
        let tools = vec![Tool::new("f".to_owned(), None, Some(schema), "tools").unwrap()];
        let text = calls(&tools, CallForm::Tags, Repeat::One);
        assert!(text.unwrap_err().0.contains("at most"));
    }

    #[test]
    fn a_schema_may_refer_to_itself() {
        let schema = json!({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {
            "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}, "required": ["next"], "additionalProperties": false}}});
        assert_eq!(passes(&Rule::Json(schema), "{\"next\": {\"next\": null}}"), (true, true));
    }
}

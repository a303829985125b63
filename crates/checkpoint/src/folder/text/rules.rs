//! The parts of `tokenizer.json` that are rules: those that this program follows, and none beside them.

use std::path::Path;

use super::tokens::Added;
use crate::error::{CheckpointError, printable};
use crate::json::Json;
use crate::vocabulary::SPLIT_RULES;

/// How text is brought into pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rules {
    /// The name of the splitting rule.
    pub(super) split: &'static str,
    /// Whether text is brought to NFC first.
    pub(super) is_nfc: bool,
}

impl Rules {
    /// Refuses added tokens that are to be found in normalised text.
    pub(super) fn check_added(&self, path: &Path, added: &[Added]) -> Result<(), CheckpointError> {
        match added.iter().find(|token| token.normalized && self.is_nfc) {
            None => Ok(()),
            Some(token) => Err(unsupported(
                path,
                format!("added token `{}`", printable(&token.text)),
                "`normalized` true with a normalizer".to_owned(),
                "`normalized` false",
            )),
        }
    }
}

/// Whether text is brought to NFC: no normalizer, `NFC`, or a sequence of that.
pub(super) fn normalizer(path: &Path, json: &Json) -> Result<bool, CheckpointError> {
    let refused = |found: String| unsupported(path, "normalizer", found, "none, NFC");
    match (json, kind(json)) {
        (Json::Null, _) => Ok(false),
        (_, Some("NFC")) => Ok(true),
        (_, Some("Sequence")) => match json.get("normalizers").and_then(Json::list) {
            Some([]) => Ok(false),
            Some([only]) if kind(only) == Some("NFC") => Ok(true),
            _ => Err(refused("a sequence of others".to_owned())),
        },
        _ => Err(refused(named(json))),
    }
}

/// The name of the rule that splits text.
pub(super) fn pre_tokenizer(path: &Path, json: &Json) -> Result<&'static str, CheckpointError> {
    const SUPPORTED: &str = "a Sequence of Split and ByteLevel";
    let refused = |found: String| unsupported(path, "pre_tokenizer", found, SUPPORTED);
    let parts = json.get("pretokenizers").and_then(Json::list);
    let Some([split, bytes]) = parts.filter(|_| kind(json) == Some("Sequence")) else {
        return Err(refused(named(json)));
    };
    for (part, name) in [(split, "Split"), (bytes, "ByteLevel")] {
        if kind(part) != Some(name) {
            return Err(refused(format!("a sequence with {}", named(part))));
        }
    }
    for (key, needed) in [("add_prefix_space", false), ("use_regex", false)] {
        let found = bytes.get(key).and_then(Json::bool);
        if found != Some(needed) {
            let what = format!("pre_tokenizer ByteLevel: {key}");
            return Err(unsupported(path, what, shown(bytes.get(key)), "false"));
        }
    }
    let behavior = split.get("behavior");
    if behavior.and_then(Json::text) != Some("Isolated") {
        return Err(unsupported(
            path,
            "pre_tokenizer Split: behavior",
            shown(behavior),
            "Isolated",
        ));
    }
    let invert = split.get("invert");
    if invert.is_some_and(|invert| invert.bool() != Some(false)) {
        return Err(unsupported(path, "pre_tokenizer Split: invert", shown(invert), "false"));
    }
    let pattern = split.get("pattern").and_then(|pattern| pattern.get("Regex"));
    let rule = SPLIT_RULES.iter().find(|(_, rule)| pattern.and_then(Json::text) == Some(rule));
    rule.map(|(name, _)| *name).ok_or_else(|| {
        let names = SPLIT_RULES.map(|(name, _)| name).join(", ");
        unsupported(
            path,
            "pre_tokenizer Split: pattern",
            shown(pattern),
            format!("the regexes of {names}"),
        )
    })
}

/// What is added around a text: nothing.
pub(super) fn post_processor(path: &Path, json: &Json) -> Result<(), CheckpointError> {
    let adds_nothing = |json: &Json| kind(json) == Some("ByteLevel");
    let parts = json.get("processors").and_then(Json::list).unwrap_or_default();
    let is_sequence = kind(json) == Some("Sequence") && parts.iter().all(adds_nothing);
    if *json == Json::Null || adds_nothing(json) || is_sequence {
        return Ok(());
    }
    Err(unsupported(path, "post_processor", named(json), "none, ByteLevel"))
}

/// How ids become text: as bytes.
pub(super) fn decoder(path: &Path, json: &Json) -> Result<(), CheckpointError> {
    if kind(json) == Some("ByteLevel") {
        return Ok(());
    }
    Err(unsupported(path, "decoder", named(json), "ByteLevel"))
}

/// Settings of the model beside its vocabulary: byte-pair encoding without anything special.
pub(super) fn model_setting(path: &Path, key: &str, json: &Json) -> Result<(), CheckpointError> {
    let is_off = match key {
        "type" => json.text() == Some("BPE"),
        "dropout" => *json == Json::Null || json.f64() == Some(0.0),
        "unk_token" => *json == Json::Null,
        "continuing_subword_prefix" | "end_of_word_suffix" => {
            *json == Json::Null || json.text() == Some("")
        }
        "byte_fallback" | "ignore_merges" => matches!(json, Json::Null | Json::Bool(false)),
        // Unknown tokens do not exist where every byte is a token.
        "fuse_unk" => true,
        _ => {
            let what = format!("model: key `{}`", printable(key));
            let known = "type, dropout, unk_token, continuing_subword_prefix, end_of_word_suffix, fuse_unk, \
                         byte_fallback, ignore_merges, vocab, merges";
            return Err(unsupported(path, what, json.shown(), known));
        }
    };
    if is_off {
        return Ok(());
    }
    let supported = match key {
        "type" => "BPE",
        "dropout" => "none, 0",
        "byte_fallback" | "ignore_merges" => "false",
        _ => "none",
    };
    Err(unsupported(path, format!("model: {key}"), json.shown(), supported))
}

fn kind(json: &Json) -> Option<&str> {
    json.get("type").and_then(Json::text)
}

/// A part by its type, for messages.
fn named(json: &Json) -> String {
    json.get("type").map_or_else(|| json.shown(), Json::shown)
}

pub(super) fn shown(json: Option<&Json>) -> String {
    json.map_or_else(|| "nothing".to_owned(), Json::shown)
}

pub(super) fn unsupported(
    path: &Path,
    what: impl Into<String>,
    found: String,
    supported: impl Into<String>,
) -> CheckpointError {
    let file = path.to_owned();
    CheckpointError::Unsupported { file, what: what.into(), found, supported: supported.into() }
}

//! `tokenizer_config.json` and `generation_config.json`: special tokens, chat templates, sampling.

use std::path::Path;

use super::rules::{Rules, shown, unsupported};
use super::tokenizer::added;
use super::tokens::{Added, Kept};
use super::{MAX_END_TOKENS, MAX_TEMPLATE_BYTES, check_len, config_error};
use crate::error::{CheckpointError, printable};
use crate::json::Json;
use crate::metadata::{MetaArray, MetaValue, Metadata};

/// Classes of `tokenizer_config.json` whose text is split by the rule of the model's family.
const CLASSES: [&str; 4] =
    ["Qwen2Tokenizer", "Qwen2TokenizerFast", "Qwen3_5Tokenizer", "Qwen3_5TokenizerFast"];

/// What `tokenizer_config.json` says, checked.
#[derive(Debug, Default)]
pub(super) struct Settings {
    pub(super) added: Vec<Added>,
    /// Names and texts; the default has no name.
    pub(super) templates: Vec<(String, String)>,
    eos: Option<String>,
    bos: Option<String>,
    pad: Option<String>,
    adds_bos: Option<bool>,
    class: Option<String>,
}

impl Settings {
    pub(super) fn of(path: &Path, json: &Json) -> Result<Self, CheckpointError> {
        let token = |key: &str| match json.get(key) {
            None => Ok(None),
            Some(value) => {
                let text = value.text().or_else(|| value.get("content").and_then(Json::text));
                let text = text.ok_or_else(|| {
                    config_error(
                        path,
                        key,
                        value.shown(),
                        "a token, or an object with its `content`",
                    )
                })?;
                Ok(Some(text.to_owned()))
            }
        };
        for key in ["add_eos_token", "split_special_tokens"] {
            if json.get(key).is_some_and(|value| *value != Json::Bool(false)) {
                return Err(unsupported(path, key, shown(json.get(key)), "false"));
            }
        }
        let adds_bos = match json.get("add_bos_token") {
            None => None,
            Some(Json::Bool(value)) => Some(*value),
            Some(other) => {
                return Err(config_error(path, "add_bos_token", other.shown(), "true or false"));
            }
        };
        let own = json.get("chat_template");
        Ok(Self {
            added: added_tokens(path, json)?,
            templates: own.map_or(Ok(Vec::new()), |value| templates(path, value))?,
            eos: token("eos_token")?,
            bos: token("bos_token")?,
            pad: token("pad_token")?,
            adds_bos,
            class: json.get("tokenizer_class").and_then(Json::text).map(str::to_owned),
        })
    }

    /// Bytes of memory.
    pub(super) fn memory(&self) -> u64 {
        let templates = self.templates.iter().map(|(name, text)| name.len() + text.len() + 128);
        let added = self.added.iter().map(Added::memory);
        templates.sum::<usize>() as u64 + added.sum::<u64>() + 1024
    }

    /// Whether it names the added tokens of a vocabulary without `tokenizer.json`.
    pub(super) const fn names_added(&self) -> bool {
        !self.added.is_empty()
    }

    /// The rules of a vocabulary that comes without them: those of its tokenizer class and family.
    ///
    /// # Errors
    /// Class `unsupported`.
    pub(super) fn rules(&self, path: &Path, metadata: &Metadata) -> Result<Rules, CheckpointError> {
        if let Some(class) = self.class.as_deref().filter(|class| !CLASSES.contains(class)) {
            let found = format!("`{}` without a tokenizer.json", printable(class));
            return Err(unsupported(path, "tokenizer_class", found, CLASSES.join(", ")));
        }
        // The class alone does not tell: later models go on naming that of Qwen2.
        let split = match metadata.str("general.architecture") {
            Some("qwen3moe" | "qwen3next") => "qwen2",
            Some("qwen35moe" | "qwen4exp") => "qwen35",
            other => {
                let found =
                    format!("`{}` without a tokenizer.json", printable(other.unwrap_or("(none)")));
                let known = "qwen3moe, qwen3next, qwen35moe, qwen4exp";
                return Err(unsupported(path, "the family of vocab.json", found, known));
            }
        };
        Ok(Rules { split, is_nfc: true })
    }

    /// Begin and end tokens as ids.
    ///
    /// # Errors
    /// The vocabulary lacks one.
    pub(super) fn set_tokens(
        &self,
        path: &Path,
        kept: &Kept,
        metadata: &mut Metadata,
    ) -> Result<(), CheckpointError> {
        for (key, name, token) in [
            ("eos_token", "eos", &self.eos),
            ("bos_token", "bos", &self.bos),
            ("pad_token", "padding", &self.pad),
        ] {
            let Some(token) = token else { continue };
            let Some(id) = kept.tokens.iter().position(|text| text == token) else {
                let found = format!("`{}`", printable(token));
                return Err(config_error(path, key, found, "a token of the vocabulary"));
            };
            metadata.insert(format!("tokenizer.ggml.{name}_token_id"), MetaValue::U64(id as u64));
        }
        // Without a begin token there is nothing to add.
        if let Some(adds) = self.adds_bos {
            let adds = adds && self.bos.is_some();
            metadata.insert("tokenizer.ggml.add_bos_token".to_owned(), MetaValue::Bool(adds));
        }
        Ok(())
    }
}

fn added_tokens(path: &Path, json: &Json) -> Result<Vec<Added>, CheckpointError> {
    let Some(value) = json.get("added_tokens_decoder") else { return Ok(Vec::new()) };
    let Some(pairs) = value.object() else {
        let needed = "an object of tokens by id";
        return Err(config_error(path, "added_tokens_decoder", value.shown(), needed));
    };
    let token = |(id, token): (&String, &Json)| added(path, id.parse().ok(), token);
    pairs.iter().map(token).collect()
}

/// Chat templates: one text, or a list of named ones of which one is called `default`.
pub(super) fn templates(
    path: &Path,
    json: &Json,
) -> Result<Vec<(String, String)>, CheckpointError> {
    let key = "chat_template";
    if let Some(text) = json.text() {
        check_len(path, text.len() as u64, MAX_TEMPLATE_BYTES)?;
        return Ok(vec![(String::new(), text.to_owned())]);
    }
    let needed = "a text, or a list of objects with `name` and `template`";
    let Some(list) = json.list() else {
        return Err(config_error(path, key, json.shown(), needed));
    };
    let mut templates = Vec::new();
    for entry in list {
        let field = |key: &str| entry.get(key).and_then(Json::text);
        let (Some(name), Some(text)) = (field("name"), field("template")) else {
            return Err(config_error(path, key, "an entry without them".to_owned(), needed));
        };
        let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
        if name.is_empty() || name.len() > 64 || !name.chars().all(is_plain) {
            let found = format!("the name `{}`", printable(name));
            return Err(config_error(path, key, found, "up to 64 letters, digits, `_` and `-`"));
        }
        check_len(path, text.len() as u64, MAX_TEMPLATE_BYTES)?;
        let name = if name == "default" { "" } else { name };
        if templates.iter().any(|(have, _)| have == name) {
            let found = format!("`{}` twice", printable(name));
            return Err(config_error(path, key, found, "one template of a name"));
        }
        templates.push((name.to_owned(), text.to_owned()));
    }
    if templates.iter().all(|(name, _)| !name.is_empty()) {
        let found = format!("{} templates, none of which is `default`", templates.len());
        return Err(unsupported(path, key, found, "one text, or a list with `default`"));
    }
    Ok(templates)
}

/// `generation_config.json`: end tokens and settings for sampling.
///
/// # Errors
/// Class `config`.
pub(super) fn generation(
    path: &Path,
    json: &Json,
    rows: Option<u64>,
    metadata: &mut Metadata,
    warnings: &mut Vec<String>,
) -> Result<(), CheckpointError> {
    let one = std::slice::from_ref;
    let ids = json.get("eos_token_id").map_or(&[][..], |ids| ids.list().unwrap_or(one(ids)));
    let most = rows.unwrap_or(u64::from(u32::MAX));
    let mut ends = Vec::new();
    for id in ids {
        let Some(id) = id.u64().filter(|id| *id < most) else {
            let needed = format!("a token id below {most}, or a list of such");
            return Err(config_error(path, "eos_token_id", id.shown(), needed));
        };
        ends.push(id);
    }
    if ends.len() > MAX_END_TOKENS {
        let found = format!("{} ids", ends.len());
        return Err(config_error(path, "eos_token_id", found, format!("at most {MAX_END_TOKENS}")));
    }
    if let Some(first) = ends.first() {
        let key = "tokenizer.ggml.eos_token_id";
        if !metadata.contains(key) {
            metadata.insert(key.to_owned(), MetaValue::U64(*first));
        }
        let all = MetaValue::Array(MetaArray::U64s(ends));
        metadata.insert("tokenizer.ggml.eos_token_ids".to_owned(), all);
    }
    let mut set = |key: &str, value: f64| {
        metadata.insert(format!("general.sampling.{key}"), MetaValue::F64(value));
    };
    for (key, name) in [
        ("temperature", "temp"),
        ("top_k", "top_k"),
        ("top_p", "top_p"),
        ("min_p", "min_p"),
        ("repetition_penalty", "penalty_repeat"),
    ] {
        let Some(value) = json.get(key) else { continue };
        let number = value.f64();
        let number = number.ok_or_else(|| config_error(path, key, value.shown(), "a number"))?;
        set(name, number);
    }
    match json.get("do_sample") {
        // The likeliest token always: the other settings are for programs that override it.
        Some(Json::Bool(false)) => set("temp", 0.0),
        None | Some(Json::Bool(true)) => {}
        Some(other) => {
            return Err(config_error(path, "do_sample", other.shown(), "true or false"));
        }
    }
    for key in ["bad_words_ids", "suppress_tokens", "forced_eos_token_id", "sequence_bias"] {
        if json.get(key).is_some() {
            warnings.push(format!("{}: `{key}` is left out", path.display()));
        }
    }
    Ok(())
}

//! `tokenizer.json` as a stream: tokens and merges go straight into flat tables.

use std::fmt;
use std::path::Path;

use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};

use super::rules::{self, Rules, unsupported};
use super::tokens::{Added, Full, Tokens};
use super::{MAX_TOKEN_BYTES, MAX_TOKENIZER_BYTES, TOKENIZER, Text, check_len, config_error};
use crate::error::{CheckpointError, printable};
use crate::json::{self, Json, Tree};
use crate::limits::Budget;

/// Reads tokens, merges and added tokens; what is left are rules.
///
/// # Errors
/// Class `config`, `unsupported`, `limit` or `io`.
pub(super) fn read(
    file: &Text<'_>,
    tokens: &mut Tokens,
    budget: &mut Budget,
) -> Result<Rules, CheckpointError> {
    check_len(&file.path, file.source.len(), MAX_TOKENIZER_BYTES)?;
    let mut walk = Walk {
        path: &file.path,
        tokens,
        budget,
        seen: Vec::new(),
        refused: None,
        split: None,
        is_nfc: false,
    };
    let outcome =
        json::stream(&*file.source, 0..file.source.len(), MAX_TOKEN_BYTES, Document(&mut walk));
    match (walk.refused.take(), outcome) {
        (Some(refused), _) => return Err(refused),
        (None, Err(error)) => return Err(file.malformed(error)),
        (None, Ok(())) => {}
    }
    for key in ["model", "model.type", "model.vocab", "model.merges", "decoder", "pre_tokenizer"] {
        if !walk.seen.contains(&key) {
            let needed = "a value: the file is incomplete without it";
            return Err(config_error(&file.path, key, "nothing".to_owned(), needed));
        }
    }
    let split = walk.split.expect("seen");
    Ok(Rules { split, is_nfc: walk.is_nfc })
}

/// Reads the object of tokens and ids that `vocab.json` is.
///
/// # Errors
/// As [`read`].
pub(super) fn read_vocab(
    file: &Text<'_>,
    tokens: &mut Tokens,
    budget: &mut Budget,
) -> Result<(), CheckpointError> {
    check_len(&file.path, file.source.len(), MAX_TOKENIZER_BYTES)?;
    let mut walk = Walk {
        path: &file.path,
        tokens,
        budget,
        seen: Vec::new(),
        refused: None,
        split: None,
        is_nfc: false,
    };
    let outcome =
        json::stream(&*file.source, 0..file.source.len(), MAX_TOKEN_BYTES, Vocab(&mut walk));
    match (walk.refused.take(), outcome) {
        (Some(refused), _) => Err(refused),
        (None, outcome) => outcome.map_err(|error| file.malformed(error)),
    }
}

/// What is known so far.
struct Walk<'a> {
    path: &'a Path,
    tokens: &'a mut Tokens,
    budget: &'a mut Budget,
    /// Keys that were there.
    seen: Vec<&'static str>,
    /// The error that ended the walk.
    refused: Option<CheckpointError>,
    split: Option<&'static str>,
    is_nfc: bool,
}

/// Keys of the document and of `model`; a second value of one is an error.
const DOCUMENT: [&str; 9] = [
    "version",
    "truncation",
    "padding",
    "added_tokens",
    "normalizer",
    "pre_tokenizer",
    "post_processor",
    "decoder",
    "model",
];
const MODEL: [&str; 10] = [
    "model.type",
    "model.dropout",
    "model.unk_token",
    "model.continuing_subword_prefix",
    "model.end_of_word_suffix",
    "model.fuse_unk",
    "model.byte_fallback",
    "model.ignore_merges",
    "model.vocab",
    "model.merges",
];

impl Walk<'_> {
    /// Ends the walk with an error of this crate.
    fn refuse<E: de::Error>(&mut self, error: CheckpointError) -> E {
        self.refused = Some(error);
        E::custom("refused")
    }

    fn or_refuse<T, E: de::Error>(&mut self, result: Result<T, CheckpointError>) -> Result<T, E> {
        result.map_err(|error| self.refuse(error))
    }

    fn full<E: de::Error>(&mut self, full: Full) -> E {
        let error = full.of_file(self.path, self.budget);
        self.refuse(error)
    }

    fn see<E: de::Error>(&mut self, key: &'static str) -> Result<(), E> {
        if self.seen.contains(&key) {
            return Err(E::custom(format_args!("a second `{key}`")));
        }
        self.seen.push(key);
        Ok(())
    }

    /// The value of a small key. Its memory is free again when `take` returns.
    fn small<'de, A: MapAccess<'de>, T>(
        &mut self,
        map: &mut A,
        take: impl FnOnce(&mut Self, &Json) -> Result<T, CheckpointError>,
    ) -> Result<T, A::Error> {
        let mark = self.budget.mark();
        let mut over = false;
        let tree = map.next_value_seed(Tree { budget: &mut *self.budget, over: &mut over });
        if over {
            let bytes = self.budget.mark() + 1;
            return Err(self.full(Full(bytes)));
        }
        let tree = tree?;
        self.budget.restore(mark);
        let taken = take(self, &tree);
        self.or_refuse(taken)
    }

    fn document_key<'de, A: MapAccess<'de>>(
        &mut self,
        key: &str,
        map: &mut A,
    ) -> Result<(), A::Error> {
        let Some(key) = DOCUMENT.into_iter().find(|known| *known == key) else {
            return self.small(map, |walk, json| {
                let what = format!("key `{}`", printable(key));
                Err(unsupported(walk.path, what, json.shown(), DOCUMENT.join(", ")))
            });
        };
        self.see(key)?;
        match key {
            "model" => map.next_value_seed(Model(self)),
            "added_tokens" => self.small(map, |walk, json| {
                let list = if *json == Json::Null { Some(&[][..]) } else { json.list() };
                let list = list.ok_or_else(|| {
                    config_error(walk.path, "added_tokens", json.shown(), "a list of tokens")
                })?;
                for token in list {
                    let token = added(walk.path, token.get("id").and_then(Json::u64), token)?;
                    let pushed = walk.tokens.push_added(token, walk.budget);
                    pushed.map_err(|full| full.of_file(walk.path, walk.budget))?;
                }
                Ok(())
            }),
            "normalizer" => self.small(map, |walk, json| {
                walk.is_nfc = rules::normalizer(walk.path, json)?;
                Ok(())
            }),
            "pre_tokenizer" => self.small(map, |walk, json| {
                walk.split = Some(rules::pre_tokenizer(walk.path, json)?);
                Ok(())
            }),
            "post_processor" => {
                self.small(map, |walk, json| rules::post_processor(walk.path, json))
            }
            "decoder" => self.small(map, |walk, json| rules::decoder(walk.path, json)),
            // Truncation and padding are for batches; every program that makes text sets its own.
            _ => self.small(map, |_, _| Ok(())),
        }
    }

    fn model_key<'de, A: MapAccess<'de>>(
        &mut self,
        key: &str,
        map: &mut A,
    ) -> Result<(), A::Error> {
        let known = MODEL.into_iter().find(|known| known.strip_prefix("model.") == Some(key));
        if let Some(known) = known {
            self.see(known)?;
        }
        match key {
            "vocab" => map.next_value_seed(Vocab(self)),
            "merges" => map.next_value_seed(Merges(self)),
            _ => self.small(map, |walk, json| rules::model_setting(walk.path, key, json)),
        }
    }
}

/// An added token of either file that has them.
pub(super) fn added(path: &Path, id: Option<u64>, token: &Json) -> Result<Added, CheckpointError> {
    let Some(text) = token.get("content").and_then(Json::text).filter(|text| !text.is_empty())
    else {
        let found = rules::shown(token.get("content"));
        return Err(config_error(path, "added token: content", found, "text"));
    };
    let Some(id) = id.and_then(|id| u32::try_from(id).ok()) else {
        let key = format!("added token `{text}`: id");
        return Err(config_error(path, &key, rules::shown(token.get("id")), "a token id"));
    };
    let flag = |key: &str, default: bool| match token.get(key) {
        None => Ok(default),
        Some(Json::Bool(value)) => Ok(*value),
        Some(other) => {
            let key = format!("added token `{text}`: {key}");
            Err(config_error(path, &key, other.shown(), "true or false"))
        }
    };
    for key in ["single_word", "lstrip", "rstrip"] {
        if flag(key, false)? {
            let what = format!("added token `{}`: {key}", printable(text));
            return Err(unsupported(path, what, "true".to_owned(), "false"));
        }
    }
    let special = flag("special", false)?;
    Ok(Added { id, text: text.to_owned(), special, normalized: flag("normalized", !special)? })
}

/// The whole file.
struct Document<'w, 'a>(&'w mut Walk<'a>);

impl<'de> DeserializeSeed<'de> for Document<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Document<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the object of a {TOKENIZER}")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            self.0.document_key(&key, &mut map)?;
        }
        Ok(())
    }
}

/// `model`.
struct Model<'w, 'a>(&'w mut Walk<'a>);

impl<'de> DeserializeSeed<'de> for Model<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Model<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("`model` as an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            self.0.model_key(&key, &mut map)?;
        }
        Ok(())
    }
}

/// `vocab`: ids by token, in any order.
struct Vocab<'w, 'a>(&'w mut Walk<'a>);

impl<'de> DeserializeSeed<'de> for Vocab<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Vocab<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the vocabulary as an object of ids by token")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut token = String::new();
        while map.next_key_seed(Copied(&mut token))?.is_some() {
            let id: u32 = map.next_value()?;
            if let Err(full) = self.0.tokens.push(&token, id, self.0.budget) {
                return Err(self.0.full(full));
            }
        }
        Ok(())
    }
}

/// A string into a buffer that is used again.
struct Copied<'b>(&'b mut String);

impl<'de> DeserializeSeed<'de> for Copied<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for Copied<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<(), E> {
        self.0.clear();
        self.0.push_str(text);
        Ok(())
    }
}

/// `merges`: `"a b"` or `["a", "b"]`.
struct Merges<'w, 'a>(&'w mut Walk<'a>);

impl<'de> DeserializeSeed<'de> for Merges<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Merges<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the merges as a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        let mut buffers = [String::new(), String::new()];
        while list.next_element_seed(Merge { walk: &mut *self.0, buffers: &mut buffers })?.is_some()
        {
        }
        Ok(())
    }
}

struct Merge<'w, 'a, 'b> {
    walk: &'w mut Walk<'a>,
    buffers: &'b mut [String; 2],
}

fn push_merge<E: de::Error>(walk: &mut Walk<'_>, left: &str, right: &str) -> Result<(), E> {
    if [left, right].iter().any(|part| part.is_empty() || part.contains(' ')) {
        return Err(E::custom("a merge is not of two tokens without spaces"));
    }
    walk.tokens.push_merge(left, right, walk.budget).map_err(|full| walk.full(full))
}

impl<'de> DeserializeSeed<'de> for Merge<'_, '_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Merge<'_, '_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a merge: two tokens in a string or a list")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<(), E> {
        let (left, right) = text.split_once(' ').unwrap_or((text, ""));
        push_merge(self.walk, left, right)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        let [left, right] = self.buffers;
        for part in [&mut *left, &mut *right] {
            if list.next_element_seed(Copied(part))?.is_none() {
                return Err(de::Error::custom("a merge of fewer than two tokens"));
            }
        }
        if list.next_element::<de::IgnoredAny>()?.is_some() {
            return Err(de::Error::custom("a merge of more than two tokens"));
        }
        push_merge(self.walk, left, right)
    }
}

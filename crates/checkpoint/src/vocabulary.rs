//! What can be checked of a vocabulary without a tokenizer: lengths, special ids, the form of merges.

use crate::Checkpoint;
use crate::config::ModelConfig;
use crate::error::CheckpointError;
use crate::metadata::{
    END_TOKENS, MERGES, MetaArray, MetaValue, Metadata, SCORES, TOKEN_TYPE, TOKENS,
};

/// The rules that split text into pieces before bytes are merged: the names that GGUF gives them, and their regexes.
pub const SPLIT_RULES: [(&str, &str); 2] = [
    // Qwen2 and Qwen3: digits one by one, letters with the sign before them.
    (
        "qwen2",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    // Qwen3.5: combining marks count as letters.
    (
        "qwen35",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
];

/// Refuses arrays and ids that contradict the vocabulary. Lengths are enough: the arrays may be gone.
pub(crate) fn check(checkpoint: &Checkpoint, config: &ModelConfig) -> Result<(), CheckpointError> {
    let metadata = &checkpoint.metadata;
    let error = |key: &str, found: String, needed: String| CheckpointError::Config {
        file: checkpoint.metadata_file().to_owned(),
        key: metadata.spelling(key).to_owned(),
        found,
        needed,
    };
    for key in [TOKENS, MERGES, TOKEN_TYPE, SCORES] {
        if let Some(value) = metadata.get(key).filter(|value| !has_its_type(key, value)) {
            let needed = match key {
                TOKENS | MERGES => "an array of strings",
                _ => "an array of numbers",
            };
            return Err(error(key, value.kind().to_owned(), needed.to_owned()));
        }
    }
    // Every id is a row of the embedding, so all of these are as long as it has rows.
    let rows = u64::from(config.vocab);
    for key in [TOKENS, TOKEN_TYPE, SCORES] {
        if let Some(len) = metadata.array_len(key).filter(|len| *len != rows) {
            let needed = format!("{rows}, the rows of token_embd.weight");
            return Err(error(key, format!("{len} entries"), needed));
        }
    }
    if let Some(value) = metadata.get(END_TOKENS) {
        let ids = match value {
            MetaValue::Array(MetaArray::U64s(ids)) => Some(ids),
            _ => None,
        };
        let needed = format!("an array of token ids from 0 to {}", rows.saturating_sub(1));
        match ids.map(|ids| ids.iter().find(|id| **id >= rows)) {
            Some(None) => {}
            Some(Some(id)) => return Err(error(END_TOKENS, id.to_string(), needed)),
            None => return Err(error(END_TOKENS, value.kind().to_owned(), needed)),
        }
    }
    for (key, value) in metadata.iter() {
        if !(key.starts_with("tokenizer.ggml.") && key.ends_with("_token_id")) {
            continue;
        }
        let needed = format!("a token id from 0 to {}", rows.saturating_sub(1));
        match (metadata.u64(key), value) {
            (Some(id), _) if id < rows => {}
            (Some(id), _) => return Err(error(key, id.to_string(), needed)),
            (None, MetaValue::I64(id)) => return Err(error(key, id.to_string(), needed)),
            (None, other) => return Err(error(key, other.kind().to_owned(), needed)),
        }
    }
    Ok(())
}

fn has_its_type(key: &str, value: &MetaValue) -> bool {
    let MetaValue::Array(array) = value else { return false };
    let strings = matches!(array, MetaArray::Strings(_));
    let numbers = matches!(array, MetaArray::U64s(_) | MetaArray::I64s(_) | MetaArray::F64s(_));
    match key {
        TOKENS | MERGES => strings,
        _ => numbers,
    }
}

/// Notes merges that no tokenizer can use: not two parts with one space between them.
pub(crate) fn warning(metadata: &Metadata) -> Option<String> {
    let merges = metadata.strings(MERGES)?;
    let is_pair = |merge: &str| {
        merge.split_once(' ').is_some_and(|(left, right)| {
            !left.is_empty() && !right.is_empty() && !right.contains(' ')
        })
    };
    let bad = merges.iter().filter(|merge| !is_pair(merge)).count();
    (bad > 0).then(|| {
        format!("{bad} of {} tokenizer merges are not two parts and are skipped", merges.len())
    })
}

//! What can be checked of a vocabulary without a tokenizer: lengths and special ids.

use crate::Checkpoint;
use crate::config::ModelConfig;
use crate::error::CheckpointError;

const TOKENS: &str = "tokenizer.ggml.tokens";

/// Refuses arrays and ids that contradict the vocabulary.
pub(crate) fn check(checkpoint: &Checkpoint, config: &ModelConfig) -> Result<(), CheckpointError> {
    let metadata = &checkpoint.metadata;
    let error = |key: &str, found: String, needed: String| {
        Err(CheckpointError::Config {
            file: checkpoint.files[0].path.clone(),
            key: key.to_owned(),
            found,
            needed,
        })
    };
    if let Some(value) = metadata.get(TOKENS) {
        let Some(tokens) = metadata.strings(TOKENS) else {
            return error(TOKENS, value.kind().to_owned(), "an array of strings".to_owned());
        };
        if tokens.len() != config.vocab as usize {
            let needed = format!("{}, the rows of token_embd.weight", config.vocab);
            return error(TOKENS, format!("{} tokens", tokens.len()), needed);
        }
    }
    for key in ["tokenizer.ggml.token_type", "tokenizer.ggml.scores"] {
        let Some(value) = metadata.get(key) else { continue };
        match metadata.array(key) {
            Some(array) if array.len() == config.vocab as usize => {}
            Some(array) => {
                return error(key, format!("{} entries", array.len()), format!("{}", config.vocab));
            }
            None => return error(key, value.kind().to_owned(), "an array".to_owned()),
        }
    }
    for (key, value) in metadata.iter() {
        if !(key.starts_with("tokenizer.ggml.") && key.ends_with("_token_id")) {
            continue;
        }
        match metadata.u64(key) {
            Some(id) if id < u64::from(config.vocab) => {}
            Some(id) => return error(key, id.to_string(), format!("an id below {}", config.vocab)),
            None => return error(key, value.kind().to_owned(), "a token id".to_owned()),
        }
    }
    Ok(())
}

/// Notes merges that no tokenizer can use.
pub(crate) fn warn(checkpoint: &mut Checkpoint) {
    let Some(merges) = checkpoint.metadata.strings("tokenizer.ggml.merges") else { return };
    let is_pair = |merge: &str| {
        let mut parts = merge.split(' ');
        let pair = [parts.next(), parts.next()];
        parts.next().is_none()
            && pair.into_iter().all(|part| part.is_some_and(|part| !part.is_empty()))
    };
    let bad = merges.iter().filter(|merge| !is_pair(merge)).count();
    if bad > 0 {
        let total = merges.len();
        checkpoint
            .warnings
            .push(format!("{bad} of {total} tokenizer merges are not two parts and are skipped"));
    }
}

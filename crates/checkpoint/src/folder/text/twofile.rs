//! A vocabulary in two files: `vocab.json` and `merges.txt`.

use super::tokens::Tokens;
use super::{MAX_TOKEN_BYTES, MAX_TOKENIZER_BYTES, Text, check_len, config_error, tokenizer};
use crate::error::{CheckpointError, printable};
use crate::limits::Budget;

/// Bytes of `merges.txt` read at a time.
const WINDOW: usize = 1 << 15;

/// Reads both.
///
/// # Errors
/// Class `config`, `limit` or `io`.
pub(super) fn read(
    vocab: &Text<'_>,
    merges: &Text<'_>,
    tokens: &mut Tokens,
    budget: &mut Budget,
) -> Result<(), CheckpointError> {
    tokenizer::read_vocab(vocab, tokens, budget)?;
    lines(merges, &mut |number, line| {
        if line.is_empty() || number == 1 && line.starts_with("#version") {
            return Ok(());
        }
        let mut parts = line.split_ascii_whitespace();
        let (Some(left), Some(right), None) = (parts.next(), parts.next(), parts.next()) else {
            let found = format!("`{}`", printable(line));
            let key = format!("line {number}");
            return Err(config_error(&merges.path, &key, found, "two tokens with a space between"));
        };
        let pushed = tokens.push_merge(left, right, budget);
        pushed.map_err(|full| full.of_file(&merges.path, budget))
    })
}

/// Hands over the lines of a text with their numbers, white space at their ends removed.
fn lines(
    file: &Text<'_>,
    each: &mut dyn FnMut(usize, &str) -> Result<(), CheckpointError>,
) -> Result<(), CheckpointError> {
    let len = file.source.len();
    check_len(&file.path, len, MAX_TOKENIZER_BYTES)?;
    let mut window = vec![0; WINDOW];
    let (mut line, mut number, mut at) = (Vec::new(), 0, 0);
    let mut end = |line: &mut Vec<u8>| {
        number += 1;
        let result = if let Ok(text) = std::str::from_utf8(line) {
            each(number, text.trim_ascii())
        } else {
            let found = "bytes that are not UTF-8".to_owned();
            Err(config_error(&file.path, &format!("line {number}"), found, "UTF-8 text"))
        };
        line.clear();
        result
    };
    while at < len {
        let part = &mut window[..WINDOW.min((len - at) as usize)];
        let read = file.source.read_at(at, part);
        read.map_err(|source| CheckpointError::Io { file: file.path.clone(), source })?;
        at += part.len() as u64;
        for byte in part {
            if *byte == b'\n' {
                end(&mut line)?;
                continue;
            }
            line.push(*byte);
            if line.len() as u64 > MAX_TOKEN_BYTES {
                let (found, limit) = (line.len() as u64, MAX_TOKEN_BYTES);
                let what = "bytes of a line".to_owned();
                return Err(CheckpointError::Limit { file: file.path.clone(), what, found, limit });
            }
        }
    }
    if line.is_empty() { Ok(()) } else { end(&mut line) }
}

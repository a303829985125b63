//! A byte-level BPE vocabulary of any size, made by rule: bytes, then letters of many scripts, then syllables.
//!
//! It has the form of a trained one: token 256 + r is the result of merge r, and is what encoding its own text gives.
//! To find the merge of a new token, its text is encoded with the merges so far; two tokens must be left.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value, json};

/// How Qwen3.5 and later split text before the merges.
const QWEN35_SPLIT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Added tokens of the 151,643-token vocabulary, in order.
pub(super) const QWEN2_ADDED: [&str; 26] = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
];

/// What the 248,044-token vocabulary adds behind those.
const QWEN35_MORE: [&str; 7] = [
    "<|audio_start|>",
    "<|audio_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<tts_text_bos_single>",
    "<|audio_pad|>",
];

/// Whether an added token is control, not text that a model writes.
pub(super) fn is_control(token: &str) -> bool {
    token.starts_with("<|")
        && !token.starts_with("<|fim")
        && !["<|repo_name|>", "<|file_sep|>"].contains(&token)
        || token.starts_with("<tts")
}

/// Tokens by id, and merges by rank.
pub(super) struct Vocabulary {
    /// Bytes of each token.
    pub(super) tokens: Vec<Vec<u8>>,
    /// Two ids; the result of merge `r` is token `256 + r`.
    pub(super) merges: Vec<[u32; 2]>,
}

impl Vocabulary {
    /// The first `len` tokens of the rule.
    ///
    /// # Panics
    /// If the rule has fewer.
    pub(super) fn of(len: usize) -> Self {
        let mut builder = Builder::new();
        for text in texts() {
            if builder.vocabulary.tokens.len() == len {
                break;
            }
            builder.offer(&text);
        }
        assert_eq!(builder.vocabulary.tokens.len(), len, "the rule makes enough tokens");
        builder.vocabulary
    }

    /// A token in the alphabet that stands for bytes in files.
    pub(super) fn spelling(&self, id: usize) -> String {
        self.tokens[id].iter().map(|byte| char_of(*byte)).collect()
    }

    /// The parts of a merge in that alphabet.
    pub(super) fn merge(&self, rank: usize) -> [String; 2] {
        self.merges[rank].map(|id| self.spelling(id as usize))
    }
}

/// Bytes in the order of their ids: those that print, then the others.
fn bytes_by_id() -> impl Iterator<Item = u8> {
    let (printed, others): (Vec<u8>, Vec<u8>) = (0..=255).partition(|byte| prints(*byte));
    printed.into_iter().chain(others)
}

const fn prints(byte: u8) -> bool {
    matches!(byte, 33..=126 | 161..=172 | 174..=255)
}

/// The character for a byte: itself if it prints, else one of those from U+0100 on.
fn char_of(byte: u8) -> char {
    if prints(byte) {
        return char::from(byte);
    }
    let others = (0..byte).filter(|byte| !prints(*byte)).count() as u32;
    char::from_u32(256 + others).expect("68 characters from U+0100 on are there")
}

/// A vocabulary in the making.
struct Builder {
    vocabulary: Vocabulary,
    known: HashSet<Vec<u8>>,
    id_of_byte: [u32; 256],
    /// Pair of ids to the id of their merge; smaller is earlier.
    merged: HashMap<[u32; 2], u32>,
}

impl Builder {
    fn new() -> Self {
        let tokens: Vec<Vec<u8>> = bytes_by_id().map(|byte| vec![byte]).collect();
        let mut id_of_byte = [0; 256];
        for (id, token) in tokens.iter().enumerate() {
            id_of_byte[usize::from(token[0])] = id as u32;
        }
        let known = tokens.iter().cloned().collect();
        let vocabulary = Vocabulary { tokens, merges: Vec::new() };
        Self { vocabulary, known, id_of_byte, merged: HashMap::new() }
    }

    /// Adds the text as a token, unless it is one or is more than two of the present ones.
    fn offer(&mut self, text: &[u8]) {
        if let [left, right] = self.encode(text)[..]
            && self.known.insert(text.to_vec())
        {
            self.merged.insert([left, right], self.vocabulary.tokens.len() as u32);
            self.vocabulary.merges.push([left, right]);
            self.vocabulary.tokens.push(text.to_vec());
        }
    }

    /// The definition: merge the earliest pair, the leftmost of equals, until none is left.
    fn encode(&self, text: &[u8]) -> Vec<u32> {
        let mut ids: Vec<u32> =
            text.iter().map(|byte| self.id_of_byte[usize::from(*byte)]).collect();
        loop {
            let at = |i: usize| self.merged.get(&[ids[i], ids[i + 1]]).map(|id| (*id, i));
            let Some((id, i)) = (0..ids.len().saturating_sub(1)).filter_map(at).min() else {
                return ids;
            };
            ids.splice(i..i + 2, [id]);
        }
    }
}

/// Scripts whose characters are tokens: first and last.
const SCRIPTS: [(u32, u32); 14] = [
    (0xa0, 0x17f),
    (0x370, 0x3ff),
    (0x400, 0x4ff),
    (0x5d0, 0x5ea),
    (0x620, 0x64a),
    (0x900, 0x97f),
    (0x980, 0x9ff),
    (0xe00, 0xe7f),
    (0x2010, 0x203a),
    (0x2190, 0x21ff),
    (0x3000, 0x30ff),
    (0xff00, 0xff5e),
    (0x4e00, 0x9fff),
    (0xac00, 0xd7a3),
];

/// The texts of the rule, in the order in which they become tokens.
fn texts() -> impl Iterator<Item = Vec<u8>> {
    let spaces = (1..=5).map(|n| " ".repeat(1 << n));
    let lines = ["\n\n", "\r\n", "\t\t", ".\n", ",\n", ":\n", "();", "//", "==", "->", "::", "</"];
    let lines = lines.into_iter().map(str::to_owned);
    let scripts =
        SCRIPTS.into_iter().flat_map(|(first, last)| first..=last).filter_map(char::from_u32);
    // Every start of a character's bytes becomes a token before the character does.
    let scripts = scripts.flat_map(|c| {
        let bytes = c.to_string().into_bytes();
        (2..=bytes.len()).map(move |len| bytes[..len].to_vec())
    });
    let pairs = || words(["l", "l"]);
    let triples = || words(["l", "l", "l"]);
    let letters = words(["l"]).chain(words(["u"]));
    let capitals = words(["u", "l"]).chain(words(["u", "l", "l"])).chain(words(["u", "u"]));
    let bare = pairs().chain(capitals).chain(triples());
    let spaced = letters.chain(pairs()).chain(triples()).map(|word| with_space(&word));
    let syllables =
        [["c", "v", "c", "v"], ["v", "c", "v", "c"], ["c", "v", "c", "c"], ["c", "c", "v", "c"]];
    let syllables =
        syllables.into_iter().flat_map(words).flat_map(|word| [with_space(&word), word]);
    let text = spaces.chain(lines).chain(bare).chain(spaced);
    text.map(String::into_bytes).chain(scripts).chain(syllables.map(String::into_bytes))
}

fn with_space(word: &str) -> String {
    format!(" {word}")
}

/// Every word with letters of these classes: any lower, any upper, vowels, consonants.
fn words<const N: usize>(classes: [&'static str; N]) -> impl Iterator<Item = String> {
    let letters = classes.map(|class| match class {
        "l" => "abcdefghijklmnopqrstuvwxyz",
        "u" => "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
        "v" => "aeiou",
        _ => "bcdfghjklmnpqrstvwxyz",
    });
    let count: usize = letters.iter().map(|class| class.len()).product();
    (0..count).map(move |number| {
        let mut rest = number;
        let mut word: Vec<char> = letters
            .iter()
            .rev()
            .map(|class| {
                let letter = class.as_bytes()[rest % class.len()];
                rest /= class.len();
                char::from(letter)
            })
            .collect();
        word.reverse();
        word.into_iter().collect()
    })
}

/// The added tokens of Qwen3.5 and later, in order.
fn qwen35_added() -> impl Iterator<Item = &'static str> {
    QWEN2_ADDED.into_iter().chain(QWEN35_MORE)
}

/// `tokenizer.json` with the added tokens and the splitting of Qwen3.5.
pub(super) fn tokenizer_json(vocabulary: &Vocabulary) -> Value {
    let first = vocabulary.tokens.len();
    let added: Vec<Value> = qwen35_added()
        .enumerate()
        .map(|(index, content)| {
            let mut token = json!({ "id": first + index });
            token.as_object_mut().expect("an object").extend(added_token(content));
            token
        })
        .collect();
    let ids: Map<String, Value> =
        (0..first).map(|id| (vocabulary.spelling(id), Value::from(id))).collect();
    let merges: Vec<[String; 2]> =
        (0..vocabulary.merges.len()).map(|rank| vocabulary.merge(rank)).collect();
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": { "type": "NFC" },
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                { "type": "Split", "pattern": { "Regex": QWEN35_SPLIT }, "behavior": "Isolated", "invert": false },
                { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false },
            ],
        },
        "post_processor": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false },
        "decoder": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false },
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": false,
            "vocab": ids,
            "merges": merges,
        },
    })
}

/// `tokenizer_config.json`, which names another class than the one that the vocabulary needs, as published files do.
pub(super) fn tokenizer_config(first_added: usize) -> Value {
    let decoder: Map<String, Value> = qwen35_added()
        .enumerate()
        .map(|(index, content)| {
            ((first_added + index).to_string(), Value::Object(added_token(content)))
        })
        .collect();
    json!({
        "add_bos_token": false,
        "add_prefix_space": false,
        "added_tokens_decoder": decoder,
        "bos_token": null,
        "clean_up_tokenization_spaces": false,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 262_144,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": false,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": null,
    })
}

fn added_token(content: &str) -> Map<String, Value> {
    let token = json!({
        "content": content,
        "single_word": false,
        "lstrip": false,
        "rstrip": false,
        "normalized": false,
        "special": is_control(content),
    });
    match token {
        Value::Object(members) => members,
        _ => unreachable!("braces make an object"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_is_the_merge_of_two_earlier_ones() {
        let vocabulary = Vocabulary::of(248_044);
        assert_eq!(vocabulary.merges.len() + 256, vocabulary.tokens.len());
        for (rank, [left, right]) in vocabulary.merges.iter().enumerate() {
            let id = 256 + rank;
            assert!((*left as usize) < id && (*right as usize) < id);
            let parts =
                [&vocabulary.tokens[*left as usize][..], &vocabulary.tokens[*right as usize]];
            assert_eq!(parts.concat(), vocabulary.tokens[id]);
        }
        let distinct: HashSet<&Vec<u8>> = vocabulary.tokens.iter().collect();
        assert_eq!(distinct.len(), vocabulary.tokens.len());
    }

    #[test]
    fn a_smaller_vocabulary_is_the_beginning_of_a_larger_one() {
        let (small, large) = (Vocabulary::of(1000), Vocabulary::of(2000));
        assert_eq!(small.tokens[..], large.tokens[..1000]);
    }

    #[test]
    fn the_text_of_a_token_is_that_token() {
        let mut builder = Builder::new();
        texts().take(60_000).for_each(|text| builder.offer(&text));
        assert!(builder.vocabulary.tokens.len() > 40_000);
        for (id, token) in builder.vocabulary.tokens.iter().enumerate() {
            assert_eq!(builder.encode(token), [id as u32], "{}", String::from_utf8_lossy(token));
        }
    }

    #[test]
    fn bytes_have_the_ids_and_spellings_of_published_vocabularies() {
        let vocabulary = Vocabulary::of(256);
        let id = |byte: u8| vocabulary.tokens.iter().position(|token| token[..] == [byte]);
        assert_eq!([b'!', b'0', b'a', b' ', b'\n'].map(id), [0, 15, 64, 220, 198].map(Some));
        assert_eq!([220, 198, 0].map(|id| vocabulary.spelling(id)), ["\u{120}", "\u{10a}", "!"]);
    }

    #[test]
    fn added_tokens_have_the_published_ids() {
        let added: Vec<&str> = qwen35_added().collect();
        let id = |token| added.iter().position(|other| *other == token).map(|at| at + 248_044);
        for (token, published) in [
            ("<|im_end|>", 248_046),
            ("<|image_pad|>", 248_056),
            ("<think>", 248_068),
            ("<|audio_pad|>", 248_076),
        ] {
            assert_eq!(id(token), Some(published));
        }
        assert!(is_control("<|im_end|>") && !is_control("<think>") && !is_control("<|fim_pad|>"));
    }
}

//! Text to token ids and back, from the vocabulary in a GGUF file.
//!
//! Byte-level BPE by the crate `tokenizers`, NFC first, split by the pre-tokeniser that the file names. A model whose
//! tokenizer is unknown still loads: the error comes when text is encoded or decoded.

mod bytes;

use checkpoint::{Checkpoint, MetaArray, Metadata};
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior};

use bytes::byte_of;

/// Splits of Qwen2 and Qwen3: digits one by one, letters with the sign before them.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Qwen3.5: combining marks count as letters.
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Token types of GGUF.
const TYPE_CONTROL: u64 = 3;
const TYPE_USER_DEFINED: u64 = 4;

/// Tokens that end an answer when the vocabulary has them, beside the file's own end token.
const END_TOKENS: [&str; 3] = ["<|im_end|>", "<|endoftext|>", "<|eot_id|>"];

/// Words that BPE remembers; a prompt repeats few.
const CACHE_WORDS: usize = 1024;

/// Why text cannot be encoded or decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TokenizerError {
    /// The file has no vocabulary.
    #[error(
        "the model file has no vocabulary (`tokenizer.ggml.tokens`); give token ids instead of text"
    )]
    NoVocabulary,
    /// A kind that this program does not know.
    #[error("tokenizer {what} `{found}` is not supported; supported: {supported}")]
    Unsupported {
        /// `model` or `pre-tokeniser`.
        what: &'static str,
        /// What the file names.
        found: String,
        /// What would do.
        supported: &'static str,
    },
    /// The vocabulary contradicts itself.
    #[error("the model file's vocabulary cannot be used: {0}")]
    Vocabulary(String),
    /// An id that the vocabulary does not have.
    #[error("token id {id} is outside of the vocabulary of {vocab} tokens")]
    UnknownId {
        /// The id.
        id: u32,
        /// Tokens.
        vocab: usize,
    },
}

/// What to do with text that spells a special token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Specials {
    /// Make it that token: rendered chat templates need this.
    Parse,
    /// Take it letter by letter.
    AsText,
}

type Pipeline = tokenizers::TokenizerImpl<
    BPE,
    NFC,
    Sequence,
    tokenizers::PostProcessorWrapper,
    tokenizers::DecoderWrapper,
>;

/// A model's tokenizer, or the reason why it has none that works.
#[derive(Debug)]
pub struct Tokenizer {
    pipeline: Result<Pipelines, TokenizerError>,
    end_tokens: Vec<u32>,
    bos: Option<u32>,
    warnings: Vec<String>,
}

#[derive(Debug)]
struct Pipelines {
    pipeline: Pipeline,
    /// Special ids in order, so that a stream can leave them out.
    special: Vec<u32>,
    vocab: usize,
}

impl Tokenizer {
    /// The tokenizer of a checkpoint. Text fails later if there is none that works.
    ///
    /// # Errors
    /// None so far; the signature leaves room for tokenizers beside the model file.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Self, TokenizerError> {
        let metadata = &checkpoint.metadata;
        let mut warnings = Vec::new();
        let pipeline = Pipelines::of(metadata, &mut warnings);
        let id = |key: &str| {
            metadata
                .u64(&format!("tokenizer.ggml.{key}_token_id"))
                .and_then(|id| u32::try_from(id).ok())
        };
        let mut end_tokens: Vec<u32> = ["eos", "eot"].into_iter().filter_map(id).collect();
        if let Ok(pipelines) = &pipeline {
            end_tokens.extend(END_TOKENS.iter().filter_map(|text| pipelines.special_id(text)));
        }
        end_tokens.sort_unstable();
        end_tokens.dedup();
        let adds_bos = metadata.bool("tokenizer.ggml.add_bos_token").unwrap_or(false);
        Ok(Self { pipeline, end_tokens, bos: id("bos").filter(|_| adds_bos), warnings })
    }

    /// What is odd but harmless about the vocabulary.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Tokens that end an answer.
    pub fn end_tokens(&self) -> &[u32] {
        &self.end_tokens
    }

    /// Ids of a text.
    ///
    /// # Errors
    /// There is no vocabulary, or one of a kind that is not supported.
    pub fn encode(&self, text: &str, specials: Specials) -> Result<Vec<u32>, TokenizerError> {
        let Pipelines { pipeline, .. } = self.pipelines()?;
        let fail = |error: tokenizers::Error| TokenizerError::Vocabulary(error.to_string());
        let mut ids: Vec<u32> = self.bos.into_iter().collect();
        let encoding = match specials {
            Specials::Parse => pipeline.encode_fast(text, false).map_err(fail)?,
            Specials::AsText => {
                let mut plain = pipeline.clone();
                plain.set_encode_special_tokens(true);
                plain.encode_fast(text, false).map_err(fail)?
            }
        };
        ids.extend_from_slice(encoding.get_ids());
        Ok(ids)
    }

    /// The bytes that a token stands for.
    ///
    /// # Errors
    /// As [`Self::encode`], or the id does not exist.
    pub fn token_bytes(&self, id: u32) -> Result<Vec<u8>, TokenizerError> {
        let pipelines = self.pipelines()?;
        let vocab = pipelines.vocab;
        let token =
            pipelines.pipeline.id_to_token(id).ok_or(TokenizerError::UnknownId { id, vocab })?;
        if pipelines.is_added(id) {
            return Ok(token.into_bytes());
        }
        // A character outside of the byte alphabet stands for itself.
        let mut bytes = Vec::new();
        for c in token.chars() {
            match byte_of(c) {
                Some(byte) => bytes.push(byte),
                None => bytes.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
            }
        }
        Ok(bytes)
    }

    /// Whether a token is a control token, which is not shown.
    pub fn is_special(&self, id: u32) -> bool {
        self.pipeline.as_ref().is_ok_and(|pipelines| pipelines.special.binary_search(&id).is_ok())
    }

    /// Text of ids, special tokens included; bytes that are no UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// As [`Self::token_bytes`].
    pub fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        let mut bytes = Vec::new();
        for id in ids {
            bytes.extend(self.token_bytes(*id)?);
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn pipelines(&self) -> Result<&Pipelines, TokenizerError> {
        self.pipeline.as_ref().map_err(Clone::clone)
    }
}

impl Pipelines {
    fn of(metadata: &Metadata, warnings: &mut Vec<String>) -> Result<Self, TokenizerError> {
        let key = |name: &str| format!("tokenizer.ggml.{name}");
        let tokens = metadata.strings(&key("tokens")).ok_or(TokenizerError::NoVocabulary)?;
        let unsupported = |what, found: &str, supported| {
            Err(TokenizerError::Unsupported { what, found: found.to_owned(), supported })
        };
        match metadata.str(&key("model")) {
            Some("gpt2") => {}
            other => return unsupported("model", other.unwrap_or("(none)"), "gpt2"),
        }
        let pattern = match metadata.str(&key("pre")) {
            Some("qwen2") => QWEN2,
            Some("qwen35") => QWEN35,
            other => {
                return unsupported("pre-tokeniser", other.unwrap_or("(none)"), "qwen2, qwen35");
            }
        };
        let kind = |id: usize| match metadata.array(&key("token_type")) {
            Some(MetaArray::U64s(kinds)) => kinds.get(id).copied().unwrap_or(0),
            Some(MetaArray::I64s(kinds)) => {
                kinds.get(id).copied().unwrap_or(0).max(0).cast_unsigned()
            }
            _ => 0,
        };
        let mut vocab = Vocab::with_capacity(tokens.len());
        let mut added = Vec::new();
        for (id, token) in tokens.iter().enumerate() {
            let kind = kind(id);
            if matches!(kind, TYPE_CONTROL | TYPE_USER_DEFINED) {
                added.push((
                    id as u32,
                    AddedToken::from(token, kind == TYPE_CONTROL).normalized(false),
                ));
            }
            vocab.insert(token.to_owned(), id as u32);
        }
        let merges = usable_merges(metadata, &vocab, warnings);
        let pipeline = build(vocab, merges, pattern, &added)
            .map_err(|e| TokenizerError::Vocabulary(e.to_string()))?;
        let special = added.iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect();
        Ok(Self { pipeline, special, vocab: tokens.len() })
    }

    fn special_id(&self, text: &str) -> Option<u32> {
        let id = self.pipeline.token_to_id(text)?;
        self.special.binary_search(&id).is_ok().then_some(id)
    }

    fn is_added(&self, id: u32) -> bool {
        self.pipeline.get_added_vocabulary().simple_id_to_token(id).is_some()
    }
}

fn build(
    vocab: Vocab,
    merges: Merges,
    pattern: &str,
    added: &[(u32, AddedToken)],
) -> Result<Pipeline, tokenizers::Error> {
    let model =
        BPE::builder().vocab_and_merges(vocab, merges).cache_capacity(CACHE_WORDS).build()?;
    let split = Split::new(
        SplitPattern::Regex(pattern.to_owned()),
        SplitDelimiterBehavior::Isolated,
        false,
    )?;
    let mut pipeline = Pipeline::new(model);
    pipeline.with_normalizer(Some(NFC))?;
    pipeline.with_pre_tokenizer(Some(Sequence::new(vec![
        split.into(),
        ByteLevel::new(false, false, false).into(),
    ])));
    let tokens: Vec<AddedToken> = added.iter().map(|(_, token)| token.clone()).collect();
    pipeline.add_tokens(tokens)?;
    Ok(pipeline)
}

/// Merges whose parts and result are in the vocabulary.
fn usable_merges(metadata: &Metadata, vocab: &Vocab, warnings: &mut Vec<String>) -> Merges {
    let Some(list) = metadata.strings("tokenizer.ggml.merges") else { return Merges::new() };
    let usable = |merge: &str| {
        let (left, right) = merge.split_once(' ')?;
        let known = |part: &str| vocab.contains_key(part);
        let both = known(left) && known(right) && !right.contains(' ');
        (both && known(&format!("{left}{right}"))).then(|| (left.to_owned(), right.to_owned()))
    };
    let merges: Merges = list.iter().filter_map(usable).collect();
    let skipped = list.len() - merges.len();
    if skipped > 0 {
        warnings.push(format!(
            "{skipped} of {} tokenizer merges name unknown tokens and are skipped",
            list.len()
        ));
    }
    merges
}

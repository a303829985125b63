//! Text to token ids and back, from the vocabulary in a GGUF file.
//!
//! Byte-level BPE: added tokens are found in the text (`pieces.rs`), the rest is brought to NFC and split by the rule
//! that the file names, and the bytes of each piece are merged (`merges.rs`). A model whose tokenizer is unknown still
//! loads: the error comes when text is encoded or decoded.
//!
//! Everything is built straight from the checkpoint's arrays and is small: about 3 MiB for 150,000 tokens.

mod bytes;
mod merges;
mod pieces;
mod vocabulary;

use checkpoint::{Checkpoint, MetaArray, Metadata, StringArray};

use merges::{Merges, Workspace};
use pieces::{Added, Piece, Splitter};
use vocabulary::{Index, Spelling, TokenBytes};

/// Token types of GGUF.
const TYPE_CONTROL: u64 = 3;
const TYPE_USER_DEFINED: u64 = 4;
const TYPE_UNUSED: u64 = 5;

/// Control tokens that end an answer when the vocabulary has them, beside the file's own end tokens.
const END_TOKENS: [&str; 2] = ["<|im_end|>", "<|endoftext|>"];

/// Bytes of a text: far above any context.
const MAX_TEXT_BYTES: usize = 64 << 20;

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
    /// The vocabulary cannot spell the text.
    #[error("the model file's vocabulary has no token for byte {byte:#04x}, which the text needs")]
    NoByte {
        /// The byte.
        byte: u8,
    },
    /// An id that the vocabulary does not have.
    #[error("token id {id} is outside of the vocabulary of {vocab} tokens")]
    UnknownId {
        /// The id.
        id: u32,
        /// Tokens.
        vocab: usize,
    },
    /// More text than any context holds.
    #[error("the text has {found} bytes; at most {MAX_TEXT_BYTES} are encoded at once")]
    TooLong {
        /// Bytes.
        found: usize,
    },
    /// White space that cannot be split.
    #[error("the text has {found} white-space characters in a row; at most {most} can be split")]
    WhiteSpace {
        /// Characters in a row.
        found: usize,
        /// How many may be.
        most: usize,
    },
    /// The splitting rule failed.
    #[error("the text cannot be split into pieces: {0}")]
    Split(String),
}

/// What to do with text that spells a control token, like `<|im_end|>`.
///
/// A rendered chat template is one text, so with [`Specials::Parse`] what a user writes can spell control tokens too;
/// so it is in the programs that these templates are written for. Encode text that nobody should be able to steer with
/// [`Specials::AsText`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Specials {
    /// Make it that token: rendered chat templates need this.
    Parse,
    /// Take it letter by letter. Tokens that a vocabulary marks as user-defined are found all the same.
    AsText,
}

/// A model's tokenizer, or the reason why it has none that works.
#[derive(Debug)]
pub struct Tokenizer {
    encoder: Result<Encoder, TokenizerError>,
    end_tokens: Vec<u32>,
    bos: Option<u32>,
    adds_bos: bool,
    warnings: Vec<String>,
}

#[derive(Debug)]
struct Encoder {
    tokens: TokenBytes,
    /// Ids of control tokens in order.
    special: Vec<u32>,
    splitter: Splitter,
    merges: Merges,
}

impl Tokenizer {
    /// The tokenizer of a checkpoint whose vocabulary is in memory; it may be dropped afterwards. Text fails later if
    /// there is none that works.
    ///
    /// # Errors
    /// None so far; the signature leaves room for tokenizers beside the model file.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Self, TokenizerError> {
        Ok(Self::from_metadata(&checkpoint.metadata))
    }

    /// As [`Self::from_checkpoint`], from the metadata alone.
    pub fn from_metadata(metadata: &Metadata) -> Self {
        let mut warnings = Vec::new();
        let encoder = Encoder::of(metadata, &mut warnings);
        let id = |name: &str| {
            let id = metadata.u64(&format!("tokenizer.ggml.{name}_token_id"))?;
            u32::try_from(id).ok()
        };
        let mut end_tokens: Vec<u32> = ["eos", "eot"].into_iter().filter_map(id).collect();
        if let Ok(encoder) = &encoder {
            let ends = |id: &&u32| {
                let bytes = encoder.tokens.get(**id);
                END_TOKENS.iter().any(|text| bytes == Some(text.as_bytes()))
            };
            end_tokens.extend(encoder.special.iter().filter(ends));
        }
        end_tokens.sort_unstable();
        end_tokens.dedup();
        let adds_bos = metadata.bool("tokenizer.ggml.add_bos_token").unwrap_or(false);
        Self { encoder, end_tokens, bos: id("bos"), adds_bos, warnings }
    }

    /// What is odd but harmless about the vocabulary.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Tokens that end an answer, in order: the file's `eos` and `eot`, and `<|im_end|>` and `<|endoftext|>` if there
    /// are such control tokens.
    pub fn end_tokens(&self) -> &[u32] {
        &self.end_tokens
    }

    /// The token that begins a text, if the file names one; see [`Self::adds_bos`].
    pub const fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Whether the model wants its begin token before every text; [`Self::encode`] puts it there.
    pub const fn adds_bos(&self) -> bool {
        self.adds_bos
    }

    /// Tokens of the vocabulary; 0 if there is none that works.
    pub fn vocab_len(&self) -> usize {
        self.encoder.as_ref().map_or(0, |encoder| encoder.tokens.len())
    }

    /// Bytes of the longest token; 0 if there is no vocabulary that works.
    pub fn longest_token(&self) -> usize {
        self.encoder.as_ref().map_or(0, |encoder| encoder.tokens.longest())
    }

    /// Ids of a text.
    ///
    /// # Errors
    /// There is no vocabulary or one of a kind that is not supported, or the text cannot be split or spelled.
    pub fn encode(&self, text: &str, specials: Specials) -> Result<Vec<u32>, TokenizerError> {
        let encoder = self.encoder()?;
        if text.len() > MAX_TEXT_BYTES {
            return Err(TokenizerError::TooLong { found: text.len() });
        }
        let mut ids = Vec::new();
        encoder.encode(text, specials, &mut ids)?;
        if let Some(bos) = self.bos.filter(|_| self.adds_bos)
            && ids.first() != Some(&bos)
        {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// The bytes that a token stands for: not always whole characters.
    ///
    /// # Errors
    /// As [`Self::encode`], or the id does not exist.
    pub fn token_bytes(&self, id: u32) -> Result<&[u8], TokenizerError> {
        let tokens = &self.encoder()?.tokens;
        tokens.get(id).ok_or(TokenizerError::UnknownId { id, vocab: tokens.len() })
    }

    /// Whether a token is a control token, which is not shown.
    pub fn is_special(&self, id: u32) -> bool {
        self.encoder.as_ref().is_ok_and(|encoder| encoder.special.binary_search(&id).is_ok())
    }

    /// Text of ids, control tokens included; bytes that are no UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// As [`Self::token_bytes`].
    pub fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        let mut bytes = Vec::new();
        for id in ids {
            bytes.extend_from_slice(self.token_bytes(*id)?);
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn encoder(&self) -> Result<&Encoder, TokenizerError> {
        self.encoder.as_ref().map_err(Clone::clone)
    }
}

impl Encoder {
    fn of(metadata: &Metadata, warnings: &mut Vec<String>) -> Result<Self, TokenizerError> {
        let tokens = metadata.strings("tokenizer.ggml.tokens").filter(|tokens| !tokens.is_empty());
        let tokens = tokens.ok_or(TokenizerError::NoVocabulary)?;
        let unsupported = |what, found: Option<&str>, supported| {
            let found = found.unwrap_or("(none)").to_owned();
            Err(TokenizerError::Unsupported { what, found, supported })
        };
        match metadata.str("tokenizer.ggml.model") {
            Some("gpt2") => {}
            other => return unsupported("model", other, "gpt2"),
        }
        let name = metadata.str("tokenizer.ggml.pre");
        let Some(rule) = name.and_then(pieces::rule) else {
            return unsupported("pre-tokeniser", name, pieces::RULES);
        };
        let kinds = Kinds(metadata.array("tokenizer.ggml.token_type"));
        let added = added_tokens(tokens, &kinds);
        let splitter = Splitter::new(rule, &added)
            .map_err(|error| TokenizerError::Vocabulary(error.to_string()))?;
        let spelling = |id| match kinds.get(id) {
            Some(TYPE_CONTROL | TYPE_USER_DEFINED) => Spelling::Literal,
            Some(TYPE_UNUSED) => Spelling::Nothing,
            _ => Spelling::Alphabet,
        };
        let merges = merges(metadata, &Index::of(tokens), warnings);
        Ok(Self {
            tokens: TokenBytes::of(tokens, spelling),
            special: added.iter().filter(|token| token.is_special).map(|token| token.id).collect(),
            splitter,
            merges,
        })
    }

    fn encode(
        &self,
        text: &str,
        specials: Specials,
        ids: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        let mut work = Workspace::default();
        self.splitter.each(text, specials, &mut |piece| match piece {
            Piece::Added(id) => {
                ids.push(id);
                Ok(())
            }
            Piece::Text(piece) => self
                .merges
                .encode(piece.as_bytes(), &mut work, ids)
                .map_err(|byte| TokenizerError::NoByte { byte }),
        })
    }
}

fn merges(metadata: &Metadata, index: &Index<'_>, warnings: &mut Vec<String>) -> Merges {
    let list = metadata.strings("tokenizer.ggml.merges");
    let (merges, useless) = Merges::of(list, index);
    if useless > 0 {
        let all = list.map_or(0, StringArray::len);
        warnings.push(format!(
            "{useless} of {all} tokenizer merges repeat others or name unknown tokens, and are skipped"
        ));
    }
    merges
}

/// The types of tokens, as far as the file has them.
struct Kinds<'a>(Option<&'a MetaArray>);

impl Kinds<'_> {
    fn get(&self, id: usize) -> Option<u64> {
        match self.0? {
            MetaArray::U64s(kinds) => kinds.get(id).copied(),
            MetaArray::I64s(kinds) => kinds.get(id).and_then(|kind| u64::try_from(*kind).ok()),
            _ => None,
        }
    }
}

/// Control and user-defined tokens in the order of their ids.
fn added_tokens<'a>(tokens: &'a StringArray, kinds: &Kinds<'_>) -> Vec<Added<'a>> {
    let added = |(id, text): (usize, &'a str)| {
        let is_special = match kinds.get(id)? {
            TYPE_CONTROL => true,
            TYPE_USER_DEFINED => false,
            _ => return None,
        };
        Some(Added { id: id as u32, text, is_special })
    };
    tokens.iter().enumerate().filter_map(added).collect()
}

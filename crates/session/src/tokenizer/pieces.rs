//! Text to pieces: added tokens are found, the rest is normalised (NFC, unless the model goes without) and split by the
//! model's rule.
//!
//! The Unicode work is that of the crate `tokenizers`. It keeps a few dozen bytes for each byte of text, so text goes
//! through it in parts, cut where no rule can look across.

use checkpoint::SPLIT_RULES;
use tokenizers::models::bpe::Vocab;
use tokenizers::models::wordlevel::WordLevel;
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{
    AddedToken, AddedVocabulary, OffsetReferential, OffsetType, PreTokenizer,
    SplitDelimiterBehavior,
};

use super::{Specials, TokenizerError};

/// Names of the rules, for messages.
pub(super) const RULES: &str = "qwen2, qwen35";

/// Least bytes of a part of text.
const PART_BYTES: usize = 4 << 10;

/// White space in a row. The regex engine gives up on more than twice as much, and the crate would go on with the
/// rest of the text unsplit.
const MAX_WHITE_SPACE: usize = 400_000;

/// A rule by the name that GGUF gives it (`tokenizer.ggml.pre`).
pub(super) fn rule(name: &str) -> Option<&'static str> {
    SPLIT_RULES.iter().find(|(known, _)| *known == name).map(|(_, rule)| *rule)
}

/// A token outside of the merges.
pub(super) struct Added<'a> {
    pub(super) id: u32,
    pub(super) text: &'a str,
    /// A control token; otherwise the model's author wants it found in any text.
    pub(super) is_special: bool,
}

/// Part of a text.
pub(super) enum Piece<'a> {
    Added(u32),
    Text(&'a str),
}

/// Finds added tokens and splits what is between them.
pub(super) struct Splitter {
    all: AddedVocabulary,
    /// Those that are found in any text.
    plain: AddedVocabulary,
    split: Split,
    /// Whether text is brought to NFC.
    is_nfc: bool,
    /// No added token has a space in it, so text may be cut before one.
    may_cut: bool,
}

impl std::fmt::Debug for Splitter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Splitter")
            .field("all", &self.all)
            .field("split", &self.split.pattern)
            .finish_non_exhaustive()
    }
}

impl Splitter {
    pub(super) fn new(
        rule: &str,
        is_nfc: bool,
        added: &[Added<'_>],
    ) -> Result<Self, tokenizers::Error> {
        let pattern = SplitPattern::Regex(rule.to_owned());
        Ok(Self {
            all: vocabulary(added.iter())?,
            plain: vocabulary(added.iter().filter(|token| !token.is_special))?,
            split: Split::new(pattern, SplitDelimiterBehavior::Isolated, false)?,
            is_nfc,
            may_cut: added.iter().all(|token| !token.text.contains(' ')),
        })
    }

    /// Hands over the pieces of a text in order.
    pub(super) fn each(
        &self,
        text: &str,
        specials: Specials,
        sink: &mut dyn FnMut(Piece<'_>) -> Result<(), TokenizerError>,
    ) -> Result<(), TokenizerError> {
        let run = longest_white_space(text);
        if run > MAX_WHITE_SPACE {
            return Err(TokenizerError::WhiteSpace { found: run, most: MAX_WHITE_SPACE });
        }
        let mut rest = text;
        while !rest.is_empty() {
            let (part, after) = rest.split_at(if self.may_cut { cut(rest) } else { rest.len() });
            self.part(part, specials, sink)?;
            rest = after;
        }
        Ok(())
    }

    fn part(
        &self,
        text: &str,
        specials: Specials,
        sink: &mut dyn FnMut(Piece<'_>) -> Result<(), TokenizerError>,
    ) -> Result<(), TokenizerError> {
        let added = match specials {
            Specials::Parse => &self.all,
            Specials::AsText => &self.plain,
        };
        let mut pieces = added.extract_and_normalize(self.is_nfc.then_some(&NFC), text);
        let failed = |error: tokenizers::Error| TokenizerError::Split(error.to_string());
        self.split.pre_tokenize(&mut pieces).map_err(failed)?;
        for (piece, _, token) in pieces.get_splits(OffsetReferential::Normalized, OffsetType::None)
        {
            match token {
                Some(tokens) => tokens.iter().try_for_each(|token| sink(Piece::Added(token.id)))?,
                None => sink(Piece::Text(piece))?,
            }
        }
        Ok(())
    }
}

/// The crate asks a model for the ids of added tokens; one that knows only these is enough.
fn vocabulary<'a>(
    added: impl Iterator<Item = &'a Added<'a>> + Clone,
) -> Result<AddedVocabulary, tokenizers::Error> {
    let ids: Vocab = added.clone().map(|token| (token.text.to_owned(), token.id)).collect();
    let model = WordLevel::builder().vocab(ids).build()?;
    let mut vocabulary = AddedVocabulary::new();
    let tokens =
        added.map(|token| AddedToken::from(token.text, token.is_special).normalized(false));
    vocabulary.add_tokens(tokens, &model, None::<&NFC>)?;
    Ok(vocabulary)
}

/// Where the first part ends: between an ASCII letter or digit and a space that another one follows.
///
/// A match that holds letters ends with letters and holds a space only as its first character, and a digit is a match of
/// its own; none of them changes under NFC together with a space. So no match, no composition and no added token without
/// a space reaches across.
fn cut(text: &str) -> usize {
    let bytes = text.as_bytes();
    let is_cut = |at: &usize| {
        bytes[*at] == b' '
            && bytes[at - 1].is_ascii_alphanumeric()
            && bytes[at + 1].is_ascii_alphanumeric()
    };
    (PART_BYTES..bytes.len().saturating_sub(1)).find(is_cut).unwrap_or(bytes.len())
}

/// Characters of the longest run of white space.
fn longest_white_space(text: &str) -> usize {
    let (mut longest, mut run) = (0, 0);
    for c in text.chars() {
        run = if c.is_whitespace() { run + 1 } else { 0 };
        longest = longest.max(run);
    }
    longest
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn splitter(name: &str, may_cut: bool) -> Splitter {
        let added = [
            Added { id: 1, text: "<|x|>", is_special: true },
            Added { id: 2, text: "<t>", is_special: false },
        ];
        Splitter { may_cut, ..Splitter::new(rule(name).unwrap(), true, &added).unwrap() }
    }

    fn pieces(splitter: &Splitter, text: &str, specials: Specials) -> Vec<String> {
        let mut all = Vec::new();
        let mut sink = |piece: Piece<'_>| {
            all.push(match piece {
                Piece::Added(id) => format!("#{id}"),
                Piece::Text(text) => text.to_owned(),
            });
            Ok(())
        };
        splitter.each(text, specials, &mut sink).unwrap();
        all
    }

    #[test]
    fn text_is_split_as_the_rules_say() {
        let qwen2 = splitter("qwen2", true);
        let of = |text| pieces(&qwen2, text, Specials::Parse);
        assert_eq!(
            of("I'm here  now 12\n\n x"),
            ["I", "'m", " here", " ", " now", " ", "1", "2", "\n\n", " x"]
        );
        assert_eq!(of("a<|x|>b<t>"), ["a", "#1", "b", "#2"]);
        assert_eq!(of("e\u{301}"), ["é"]);
        assert_eq!(of(""), Vec::<String>::new());
        let as_text = pieces(&qwen2, "<|x|><t>", Specials::AsText);
        assert_eq!(as_text, ["<|", "x", "|>", "#2"]);
        let marks = "na\u{94d}";
        assert_eq!(of(marks), ["na", "\u{94d}"]);
        assert_eq!(pieces(&splitter("qwen35", true), marks, Specials::Parse), [marks]);
    }

    #[test]
    fn text_is_left_as_it_is_where_the_model_says_so() {
        let plain = Splitter { is_nfc: false, ..splitter("qwen35", true) };
        assert_eq!(pieces(&plain, "e\u{301}", Specials::Parse), ["e\u{301}"]);
    }

    #[test]
    fn white_space_that_the_regex_engine_cannot_take_is_an_error() {
        let qwen2 = splitter("qwen2", true);
        let most = " ".repeat(MAX_WHITE_SPACE);
        let text = format!("{most}a");
        assert_eq!(pieces(&qwen2, &text, Specials::Parse), [&most[1..], " a"]);
        let error = qwen2.each(&(most + " "), Specials::Parse, &mut |_| Ok(()));
        let expected =
            TokenizerError::WhiteSpace { found: MAX_WHITE_SPACE + 1, most: MAX_WHITE_SPACE };
        assert_eq!(error, Err(expected));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn cutting_changes_no_piece(
            words in prop::collection::vec("([a-z]{1,8}|[0-9]{1,3}|[a-z' ]{1,5}|[ \\n\\r\\t]{1,3}|\\PC|<t>|<\\|x\\|>|[0-9.,!]{1,4}|\u{301})", 500..2500),
            spaced in any::<bool>(),
        ) {
            let text = words.join(if spaced { " " } else { "" });
            for rule in ["qwen2", "qwen35"] {
                let cut = pieces(&splitter(rule, true), &text, Specials::Parse);
                prop_assert_eq!(cut, pieces(&splitter(rule, false), &text, Specials::Parse));
            }
        }
    }
}

//! Key-value pairs: those of a GGUF file, or those that the files of a folder say the same with.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub(crate) const TOKENS: &str = "tokenizer.ggml.tokens";
pub(crate) const MERGES: &str = "tokenizer.ggml.merges";
pub(crate) const TOKEN_TYPE: &str = "tokenizer.ggml.token_type";
pub(crate) const SCORES: &str = "tokenizer.ggml.scores";

/// All tokens that end an answer; of model folders, whose files name several.
pub(crate) const END_TOKENS: &str = "tokenizer.ggml.eos_token_ids";

/// Keys of the vocabulary, which are large and used once.
pub(crate) const VOCABULARY_KEYS: [&str; 4] = [TOKENS, MERGES, TOKEN_TYPE, SCORES];

/// Whether to keep the vocabulary: about 7 MiB for 250,000 tokens and as many merges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vocabulary {
    /// Keep it, until [`Metadata::drop_vocabulary`].
    Load,
    /// Check and keep lengths only ([`Metadata::array_len`]).
    Skip,
}

/// Many strings in two allocations: the text of all, and where each one ends.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StringArray {
    text: String,
    ends: Vec<u32>,
}

impl StringArray {
    /// How many.
    pub const fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// String `index`.
    pub fn get(&self, index: usize) -> Option<&str> {
        let end = *self.ends.get(index)? as usize;
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before] as usize);
        Some(&self.text[start..end])
    }

    /// All in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> {
        let mut start = 0;
        self.ends.iter().map(move |end| {
            let text = &self.text[start..*end as usize];
            start = *end as usize;
            text
        })
    }

    /// Strings from their concatenated bytes and their ends in it, in order.
    ///
    /// # Errors
    /// Index and bytes of the first string that is not UTF-8.
    pub(crate) fn from_parts(text: Vec<u8>, ends: Vec<u32>) -> Result<Self, (usize, Vec<u8>)> {
        match String::from_utf8(text) {
            // Whole characters on both sides of every end: so every string is made of whole ones.
            Ok(text) if ends.iter().all(|end| text.is_char_boundary(*end as usize)) => {
                Ok(Self { text, ends })
            }
            outcome => {
                let text =
                    outcome.map_or_else(std::string::FromUtf8Error::into_bytes, String::into_bytes);
                let starts = std::iter::once(0).chain(ends.iter().copied());
                let mut strings =
                    starts.zip(&ends).map(|(start, end)| &text[start as usize..*end as usize]);
                let is_bad = |bytes: &&[u8]| std::str::from_utf8(bytes).is_err();
                let (index, bytes) = strings
                    .by_ref()
                    .enumerate()
                    .find(|(_, bytes)| is_bad(bytes))
                    .expect("the whole is not UTF-8 or is cut inside a character");
                Err((index, bytes.to_vec()))
            }
        }
    }
}

impl<'a> FromIterator<&'a str> for StringArray {
    /// # Panics
    /// If the strings take 4 GiB or more.
    fn from_iter<I: IntoIterator<Item = &'a str>>(strings: I) -> Self {
        let mut array = Self::default();
        for text in strings {
            array.text.push_str(text);
            let end = u32::try_from(array.text.len()).expect("fewer than 4 GiB of strings");
            array.ends.push(end);
        }
        array
    }
}

/// An array of one type; integers and floats are widened.
#[derive(Debug, Clone, PartialEq)]
pub enum MetaArray {
    /// Unsigned integers.
    U64s(Vec<u64>),
    /// Signed integers.
    I64s(Vec<i64>),
    /// Floats.
    F64s(Vec<f64>),
    /// Booleans.
    Bools(Vec<bool>),
    /// Strings.
    Strings(StringArray),
}

impl MetaArray {
    /// Elements.
    pub fn len(&self) -> usize {
        match self {
            Self::U64s(v) => v.len(),
            Self::I64s(v) => v.len(),
            Self::F64s(v) => v.len(),
            Self::Bools(v) => v.len(),
            Self::Strings(v) => v.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A value; integers and floats are widened.
#[derive(Debug, Clone, PartialEq)]
pub enum MetaValue {
    /// Unsigned integer.
    U64(u64),
    /// Signed integer.
    I64(i64),
    /// Float.
    F64(f64),
    /// Boolean.
    Bool(bool),
    /// String.
    String(String),
    /// Array.
    Array(MetaArray),
}

impl MetaValue {
    /// What kind of value it is, for messages.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::U64(_) => "an unsigned integer",
            Self::I64(_) => "an integer",
            Self::F64(_) => "a float",
            Self::Bool(_) => "a boolean",
            Self::String(_) => "a string",
            Self::Array(_) => "an array",
        }
    }
}

/// All key-value pairs.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Metadata {
    values: BTreeMap<String, MetaValue>,
    /// Lengths of arrays that are in the file but not (or no longer) in memory.
    set_aside: BTreeMap<String, u64>,
    /// Names in `file` of keys that are called otherwise there.
    spellings: BTreeMap<String, String>,
    /// The file that they come from, where that is not the first with tensors.
    file: Option<PathBuf>,
}

impl Metadata {
    pub(crate) const fn new() -> Self {
        Self {
            values: BTreeMap::new(),
            set_aside: BTreeMap::new(),
            spellings: BTreeMap::new(),
            file: None,
        }
    }

    /// The value of a key; nothing if it is not in the file or not in memory.
    pub fn get(&self, key: &str) -> Option<&MetaValue> {
        self.values.get(key)
    }

    /// All keys in memory, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &MetaValue)> {
        self.values.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// A non-negative integer.
    pub fn u64(&self, key: &str) -> Option<u64> {
        match self.get(key)? {
            MetaValue::U64(value) => Some(*value),
            MetaValue::I64(value) => u64::try_from(*value).ok(),
            _ => None,
        }
    }

    /// A number.
    pub fn f64(&self, key: &str) -> Option<f64> {
        match self.get(key)? {
            MetaValue::F64(value) => Some(*value),
            MetaValue::U64(value) => Some(*value as f64),
            MetaValue::I64(value) => Some(*value as f64),
            _ => None,
        }
    }

    /// A boolean.
    pub fn bool(&self, key: &str) -> Option<bool> {
        match self.get(key)? {
            MetaValue::Bool(value) => Some(*value),
            _ => None,
        }
    }

    /// A string.
    pub fn str(&self, key: &str) -> Option<&str> {
        match self.get(key)? {
            MetaValue::String(value) => Some(value),
            _ => None,
        }
    }

    /// An array.
    pub fn array(&self, key: &str) -> Option<&MetaArray> {
        match self.get(key)? {
            MetaValue::Array(value) => Some(value),
            _ => None,
        }
    }

    /// An array of strings.
    pub fn strings(&self, key: &str) -> Option<&StringArray> {
        match self.array(key)? {
            MetaArray::Strings(value) => Some(value),
            _ => None,
        }
    }

    /// The length of an array, also of one that is not (or no longer) in memory.
    pub fn array_len(&self, key: &str) -> Option<u64> {
        match self.array(key) {
            Some(array) => Some(array.len() as u64),
            None => self.set_aside.get(key).copied(),
        }
    }

    /// Whether the file has a value of this key, in memory or not.
    pub fn contains(&self, key: &str) -> bool {
        self.values.contains_key(key) || self.set_aside.contains_key(key)
    }

    /// Notes an array that is not kept.
    pub(crate) fn set_aside(&mut self, key: String, len: u64) {
        self.set_aside.insert(key, len);
    }

    /// The file that the pairs come from, where that is not the first one with tensors.
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    pub(crate) fn set_file(&mut self, file: PathBuf) {
        self.file = Some(file);
    }

    /// What a key is called in its file: for messages.
    pub fn spelling<'a>(&'a self, key: &'a str) -> &'a str {
        self.spellings.get(key).map_or(key, String::as_str)
    }

    /// Notes what a key is called in its file.
    pub(crate) fn spell(&mut self, key: String, spelling: String) {
        self.spellings.insert(key, spelling);
    }

    /// Sets a value; the old one if there was one.
    pub fn insert(&mut self, key: String, value: MetaValue) -> Option<MetaValue> {
        self.values.insert(key, value)
    }

    /// Frees tokens and merges: what a tokenizer was built from. Their lengths stay known.
    pub fn drop_vocabulary(&mut self) {
        for key in VOCABULARY_KEYS {
            if let Some(MetaValue::Array(array)) = self.values.get(key) {
                self.set_aside.insert(key.to_owned(), array.len() as u64);
                self.values.remove(key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_in_one_allocation_come_back_one_by_one() {
        let texts = ["", "Ġthe", "", "é", "x"];
        let array: StringArray = texts.into_iter().collect();
        assert_eq!(array.iter().collect::<Vec<_>>(), texts);
        assert_eq!((array.len(), array.get(3), array.get(5)), (5, Some("é"), None));
    }

    #[test]
    fn a_string_cut_inside_a_character_is_named() {
        let whole = "aéb".as_bytes().to_vec();
        assert!(StringArray::from_parts(whole.clone(), vec![1, 3, 4]).is_ok());
        assert_eq!(StringArray::from_parts(whole, vec![1, 2, 4]), Err((1, vec![0xc3])));
        assert_eq!(StringArray::from_parts(vec![b'a', 0xff], vec![1, 2]), Err((1, vec![0xff])));
    }

    #[test]
    fn a_dropped_vocabulary_leaves_its_lengths() {
        let mut metadata = Metadata::default();
        let tokens = MetaArray::Strings(["a", "b"].into_iter().collect());
        metadata.insert(TOKENS.to_owned(), MetaValue::Array(tokens));
        metadata.insert("general.name".to_owned(), MetaValue::String("x".to_owned()));
        metadata.drop_vocabulary();
        assert_eq!(metadata.get(TOKENS), None);
        assert_eq!((metadata.array_len(TOKENS), metadata.contains(TOKENS)), (Some(2), true));
        assert_eq!((metadata.array_len(MERGES), metadata.contains(MERGES)), (None, false));
        assert_eq!(metadata.str("general.name"), Some("x"));
    }

    #[test]
    fn numbers_are_read_across_widths_but_never_wrapped() {
        let mut metadata = Metadata::default();
        for (key, value) in [
            ("u", MetaValue::U64(7)),
            ("i", MetaValue::I64(7)),
            ("negative", MetaValue::I64(-1)),
            ("f", MetaValue::F64(7.0)),
            ("b", MetaValue::Bool(true)),
        ] {
            metadata.insert(key.to_owned(), value);
        }
        let integers = ["u", "i", "negative", "f", "b"].map(|key| metadata.u64(key));
        assert_eq!(integers, [Some(7), Some(7), None, None, None]);
        let floats = ["u", "i", "negative", "f", "b"].map(|key| metadata.f64(key));
        assert_eq!(floats, [Some(7.0), Some(7.0), Some(-1.0), Some(7.0), None]);
    }
}

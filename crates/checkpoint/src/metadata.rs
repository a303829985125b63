//! Key-value pairs of a GGUF file.

use std::collections::BTreeMap;

/// Keys of the vocabulary, which are large and used once.
const VOCABULARY_KEYS: [&str; 4] = [
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.merges",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.scores",
];

/// Many strings in one allocation.
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
        (0..self.len()).map(|index| self.get(index).expect("the index is below the length"))
    }

    /// Adds a string; `false` if the array would pass 4 GiB.
    pub(crate) fn push(&mut self, text: &str) -> bool {
        self.text.push_str(text);
        u32::try_from(self.text.len()).map(|end| self.ends.push(end)).is_ok()
    }

    pub(crate) const fn text_bytes(&self) -> usize {
        self.text.len()
    }
}

impl<'a> FromIterator<&'a str> for StringArray {
    fn from_iter<I: IntoIterator<Item = &'a str>>(strings: I) -> Self {
        let mut array = Self::default();
        for text in strings {
            assert!(array.push(text), "fewer than 4 GiB of strings");
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
}

impl Metadata {
    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&MetaValue> {
        self.values.get(key)
    }

    /// All keys in order.
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

    /// Sets a value; the old one if there was one.
    pub fn insert(&mut self, key: String, value: MetaValue) -> Option<MetaValue> {
        self.values.insert(key, value)
    }

    /// Frees tokens and merges; what a tokenizer was built from.
    pub fn drop_vocabulary(&mut self) {
        for key in VOCABULARY_KEYS {
            self.values.remove(key);
        }
    }
}

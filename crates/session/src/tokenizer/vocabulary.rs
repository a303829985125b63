//! Tokens by id, and ids by token while a tokenizer is built.

use std::hash::{BuildHasher, RandomState};

use checkpoint::StringArray;

use super::bytes::byte_of;

/// The bytes of every token, in two allocations.
#[derive(Debug)]
pub(super) struct TokenBytes {
    bytes: Vec<u8>,
    ends: Vec<u32>,
}

/// What a token stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spelling {
    /// The bytes that its characters stand for.
    Alphabet,
    /// Its own text.
    Literal,
    /// Nothing: it fills the vocabulary up.
    Nothing,
}

impl TokenBytes {
    /// The bytes of tokens, each spelled as `spelling` says of its id.
    pub(super) fn of(tokens: &StringArray, spelling: impl Fn(usize) -> Spelling) -> Self {
        // A character of the alphabet takes one or two bytes and stands for one.
        let mut bytes = Vec::with_capacity(tokens.iter().map(str::len).sum());
        let mut ends = Vec::with_capacity(tokens.len());
        for (id, token) in tokens.iter().enumerate() {
            match spelling(id) {
                Spelling::Alphabet => decode(token, &mut bytes),
                Spelling::Literal => bytes.extend_from_slice(token.as_bytes()),
                Spelling::Nothing => {}
            }
            ends.push(bytes.len() as u32);
        }
        bytes.shrink_to_fit();
        Self { bytes, ends }
    }

    /// Tokens.
    pub(super) const fn len(&self) -> usize {
        self.ends.len()
    }

    /// Bytes of the longest.
    pub(super) fn longest(&self) -> usize {
        let starts = std::iter::once(&0).chain(&self.ends);
        starts.zip(&self.ends).map(|(start, end)| (end - start) as usize).max().unwrap_or(0)
    }

    /// The bytes that a token stands for.
    pub(super) fn get(&self, id: u32) -> Option<&[u8]> {
        let end = *self.ends.get(id as usize)? as usize;
        let start = id.checked_sub(1).map_or(0, |before| self.ends[before as usize]) as usize;
        Some(&self.bytes[start..end])
    }
}

/// A character outside of the alphabet stands for itself.
fn decode(token: &str, out: &mut Vec<u8>) {
    for c in token.chars() {
        match byte_of(c) {
            Some(byte) => out.push(byte),
            None => out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
}

/// Ids by the text of a token as the file spells it: 8 bytes a token, and only while a tokenizer is built.
///
/// Open addressing. The hash is seeded, so no file can be made to collide.
pub(super) struct Index<'a> {
    tokens: &'a StringArray,
    slots: Vec<u32>,
    hasher: RandomState,
}

const FREE: u32 = u32::MAX;

impl<'a> Index<'a> {
    pub(super) fn of(tokens: &'a StringArray) -> Self {
        let slots = vec![FREE; (tokens.len() * 3 / 2 + 1).next_power_of_two()];
        let mut index = Self { tokens, slots, hasher: RandomState::new() };
        for (id, token) in tokens.iter().enumerate() {
            let slot = index.slot(token);
            // Of equal tokens the last one has the name, as in the crate `tokenizers` and in llama.cpp.
            index.slots[slot] = id as u32;
        }
        index
    }

    /// The id of a token.
    pub(super) fn id(&self, token: &str) -> Option<u32> {
        Some(self.slots[self.slot(token)]).filter(|id| *id != FREE)
    }

    /// Where the token is, or the free slot where it belongs; there is always a free one.
    fn slot(&self, token: &str) -> usize {
        let mask = self.slots.len() - 1;
        let mut slot = self.hasher.hash_one(token) as usize & mask;
        loop {
            let id = self.slots[slot];
            if id == FREE || self.tokens.get(id as usize) == Some(token) {
                return slot;
            }
            slot = (slot + 1) & mask;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_stand_for_bytes_and_literals_for_their_text() {
        let tokens: StringArray = ["Ġa", "", "Ã©", "<Ġ>", "中", "[PAD]"].into_iter().collect();
        let bytes = TokenBytes::of(&tokens, |id| match id {
            3 => Spelling::Literal,
            5 => Spelling::Nothing,
            _ => Spelling::Alphabet,
        });
        let all: Vec<_> = (0..7).filter_map(|id| bytes.get(id)).collect();
        let expected = [" a", "", "é", "<Ġ>", "中", ""].map(str::as_bytes);
        assert_eq!((all, bytes.len(), bytes.longest()), (expected.to_vec(), 6, 4));
    }

    #[test]
    fn every_token_is_found_and_no_other() {
        let names: Vec<String> = (0..3000).map(|n| format!("t{n}")).collect();
        let tokens: StringArray = names.iter().map(String::as_str).collect();
        let index = Index::of(&tokens);
        for (id, name) in names.iter().enumerate() {
            assert_eq!(index.id(name), Some(id as u32));
        }
        assert_eq!((index.id("t3000"), index.id("")), (None, None));
        assert_eq!(Index::of(&StringArray::default()).id("a"), None);
    }

    #[test]
    fn of_equal_tokens_the_last_has_the_name() {
        let tokens: StringArray = ["a", "b", "a"].into_iter().collect();
        assert_eq!(Index::of(&tokens).id("a"), Some(2));
    }
}

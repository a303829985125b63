//! Byte-pair encoding of one piece of text.
//!
//! The merge table is flat: 12 bytes a merge and 4 to 8 bytes of index, about 3 MiB for the largest vocabularies. A
//! map of strings to ids, the usual form, takes ten times as much, and memory that the tokenizer takes is not there for
//! experts.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::hash::{BuildHasher, RandomState};

use checkpoint::StringArray;

use super::bytes::char_of;
use super::vocabulary::Index;

const NONE: u32 = u32::MAX;

/// Bytes to tokens: the token of each byte, and which neighbours become one token, in order of rank.
#[derive(Debug)]
pub(super) struct Merges {
    /// The token of each byte; `NONE` if the vocabulary lacks it.
    of_byte: Box<[u32; 256]>,
    /// By rank: left, right and what they become.
    by_rank: Vec<[u32; 3]>,
    /// Open addressing by left and right: ranks.
    slots: Vec<u32>,
    /// Mixed into hashes, so that no file can be made to collide.
    seed: u64,
}

/// Buffers of [`Merges::encode`], kept between pieces.
#[derive(Debug, Default)]
pub(super) struct Workspace {
    symbols: Vec<Symbol>,
    /// Candidates: rank, then position of the left one. Outdated ones are recognised when they come up.
    queue: BinaryHeap<Reverse<(u32, u32)>>,
}

/// A token in a linked list of the piece's tokens.
#[derive(Debug, Clone, Copy)]
struct Symbol {
    /// `NONE` once it was merged into the one before it.
    id: u32,
    previous: u32,
    next: u32,
}

impl Merges {
    /// The table of a file's merges; and how many of them are of no use: not two known tokens that make a known one, or
    /// two that an earlier merge has.
    pub(super) fn of(list: Option<&StringArray>, index: &Index<'_>) -> (Self, usize) {
        let of_byte = |byte: usize| index.id(char_of(byte as u8).encode_utf8(&mut [0; 4]));
        let of_byte = Box::new(std::array::from_fn(|byte| of_byte(byte).unwrap_or(NONE)));
        let len = list.map_or(0, StringArray::len);
        let mut table = Self {
            of_byte,
            by_rank: Vec::with_capacity(len),
            slots: vec![NONE; (len * 3 / 2 + 1).next_power_of_two()],
            seed: RandomState::new().hash_one(len),
        };
        let mut joined = String::new();
        for merge in list.into_iter().flat_map(StringArray::iter) {
            table.add(merge, index, &mut joined);
        }
        let useless = len - table.by_rank.len();
        table.by_rank.shrink_to_fit();
        (table, useless)
    }

    fn add(&mut self, merge: &str, index: &Index<'_>, joined: &mut String) -> Option<()> {
        let (left, right) = merge.split_once(' ')?;
        joined.clear();
        joined.push_str(left);
        joined.push_str(right);
        let parts = [index.id(left)?, index.id(right)?, index.id(joined)?];
        let slot = self.slot(parts[0], parts[1]);
        if self.slots[slot] == NONE {
            self.slots[slot] = self.by_rank.len() as u32;
            self.by_rank.push(parts);
        }
        Some(())
    }

    /// Rank and result of a merge.
    fn find(&self, left: u32, right: u32) -> Option<(u32, u32)> {
        let rank = self.slots[self.slot(left, right)];
        self.by_rank.get(rank as usize).map(|merge| (rank, merge[2]))
    }

    /// Where the merge is, or the free slot where it belongs; there is always a free one.
    fn slot(&self, left: u32, right: u32) -> usize {
        let mask = self.slots.len() - 1;
        let pair = u64::from(left) << 32 | u64::from(right);
        // Both halves of a 128-bit product: every bit of the pair reaches the low bits.
        let product = u128::from(pair ^ self.seed) * 0x9e37_79b9_7f4a_7c15;
        let mut slot = ((product >> 64) as u64 ^ product as u64) as usize & mask;
        loop {
            match self.by_rank.get(self.slots[slot] as usize) {
                Some(merge) if merge[..2] != [left, right] => slot = (slot + 1) & mask,
                _ => return slot,
            }
        }
    }

    /// Appends the tokens of a piece: the merge of lowest rank first, the leftmost of equals, until none is left.
    ///
    /// # Errors
    /// The first byte that has no token; `out` may have grown.
    pub(super) fn encode(
        &self,
        piece: &[u8],
        work: &mut Workspace,
        out: &mut Vec<u32>,
    ) -> Result<(), u8> {
        let Workspace { symbols, queue } = work;
        symbols.clear();
        queue.clear();
        for (at, &byte) in piece.iter().enumerate() {
            let id = self.of_byte[usize::from(byte)];
            if id == NONE {
                return Err(byte);
            }
            let next = if at + 1 == piece.len() { NONE } else { at as u32 + 1 };
            symbols.push(Symbol { id, previous: (at as u32).wrapping_sub(1), next });
        }
        for at in 1..symbols.len() {
            self.propose(at as u32 - 1, symbols, queue);
        }
        while let Some(Reverse((rank, at))) = queue.pop() {
            self.merge(rank, at, symbols, queue);
        }
        out.extend(symbols.iter().map(|symbol| symbol.id).filter(|id| *id != NONE));
        Ok(())
    }

    /// Merges the token at `at` with the next one, if that is still the merge of this rank.
    fn merge(
        &self,
        rank: u32,
        at: u32,
        symbols: &mut [Symbol],
        queue: &mut BinaryHeap<Reverse<(u32, u32)>>,
    ) {
        let left = symbols[at as usize];
        if left.id == NONE || left.next == NONE {
            return;
        }
        let right = symbols[left.next as usize];
        let Some((found, id)) = self.find(left.id, right.id) else { return };
        if found != rank {
            return;
        }
        symbols[left.next as usize].id = NONE;
        symbols[at as usize] = Symbol { id, next: right.next, ..left };
        if right.next != NONE {
            symbols[right.next as usize].previous = at;
            self.propose(at, symbols, queue);
        }
        if left.previous != NONE {
            self.propose(left.previous, symbols, queue);
        }
    }

    /// Queues the token at `at` and the one after it, if they merge.
    fn propose(&self, at: u32, symbols: &[Symbol], queue: &mut BinaryHeap<Reverse<(u32, u32)>>) {
        let left = symbols[at as usize];
        let right = symbols[left.next as usize];
        if let Some((rank, _)) = self.find(left.id, right.id) {
            queue.push(Reverse((rank, at)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn alphabet() -> Vec<String> {
        (0..=255).map(|byte| char_of(byte).to_string()).collect()
    }

    fn table(extra: &[&str], merges: &[&str]) -> (Merges, usize) {
        let mut tokens = alphabet();
        tokens.extend(extra.iter().map(|token| (*token).to_owned()));
        let tokens: StringArray = tokens.iter().map(String::as_str).collect();
        let merges: StringArray = merges.iter().copied().collect();
        Merges::of(Some(&merges), &Index::of(&tokens))
    }

    fn encode(merges: &Merges, text: &str) -> Vec<u32> {
        let mut out = Vec::new();
        merges.encode(text.as_bytes(), &mut Workspace::default(), &mut out).unwrap();
        out
    }

    #[test]
    fn lower_ranks_merge_first_and_the_leftmost_of_equals() {
        let (merges, useless) = table(&["bc", "ab", "aa", "abc"], &["b c", "a b", "a a", "ab c"]);
        assert_eq!(useless, 0);
        let [a, b, bc, ab, aa] = [97, 98, 256, 257, 258];
        assert_eq!(encode(&merges, "abc"), [a, bc]);
        assert_eq!(encode(&merges, "abb"), [ab, b]);
        assert_eq!(encode(&merges, "aaa"), [aa, a]);
        assert_eq!(encode(&merges, "aaab"), [aa, ab]);
        assert_eq!(encode(&merges, ""), Vec::<u32>::new());
    }

    #[test]
    fn merges_of_no_use_are_skipped_and_counted() {
        let merges = ["a b", "ab", "", " ", "a  b", "a x", "zz a", "a b", "a b c", "b a"];
        let (table, useless) = table(&["ab"], &merges);
        assert_eq!(useless, 9);
        assert_eq!(encode(&table, "ab"), [256]);
    }

    #[test]
    fn a_byte_without_a_token_is_an_error() {
        let tokens: StringArray = ["a"].into_iter().collect();
        let (merges, _) = Merges::of(None, &Index::of(&tokens));
        assert_eq!(encode(&merges, "aa"), [0, 0]);
        let (mut work, mut out) = Default::default();
        assert_eq!(merges.encode(b"ab", &mut work, &mut out), Err(b'b'));
    }

    /// The definition: look at all neighbours, merge the best, start again.
    fn naive(merges: &Merges, text: &str) -> Vec<u32> {
        let mut ids: Vec<u32> =
            text.bytes().map(|byte| merges.of_byte[usize::from(byte)]).collect();
        loop {
            let at = |i: usize| merges.find(ids[i], ids[i + 1]).map(|(rank, id)| (rank, i, id));
            let Some((_, i, id)) = (0..ids.len().saturating_sub(1)).filter_map(at).min() else {
                return ids;
            };
            ids.splice(i..i + 2, [id]);
        }
    }

    proptest! {
        #[test]
        fn the_queue_merges_as_the_definition_does(
            text in "[abc]{0,60}",
            pairs in prop::collection::vec(("[abc]{1,3}", "[abc]{1,3}"), 0..40),
        ) {
            let joined: Vec<String> = pairs.iter().map(|(l, r)| format!("{l}{r}")).collect();
            let merges: Vec<String> = pairs.iter().map(|(l, r)| format!("{l} {r}")).collect();
            let joined: Vec<&str> = joined.iter().map(String::as_str).collect();
            let merges: Vec<&str> = merges.iter().map(String::as_str).collect();
            let (table, _) = table(&joined, &merges);
            prop_assert_eq!(encode(&table, &text), naive(&table, &text));
        }
    }
}

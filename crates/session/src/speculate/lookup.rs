//! Guesses from the text itself: what followed when it last went like this.
//!
//! The longest end of the text that occurred before, of 2 to 5 tokens, is looked for; of several places the most recent
//! one counts. (Prompt lookup: Saxena 2023; in LLMs as in Lempel and Ziv's compression.) Places where the same two
//! tokens stood are chained from the most recent to the oldest, as matches are found in DEFLATE: four bytes a token
//! and four of a table, and a new token costs one step.

use model::{ForwardError, Network};

use super::Drafter;
use crate::sequence::Sequence;

/// Tokens of the shortest end that is looked for: those that a chain has in common.
const SHORTEST: usize = 2;
/// Tokens of the longest. More would not make a guess much better.
const LONGEST: usize = 5;
/// Most places of a chain that are compared: in a long text some pairs are everywhere.
const MOST_PLACES: usize = 128;
/// No place.
const NONE: u32 = u32::MAX;

/// Where pairs of tokens stood.
#[derive(Debug)]
pub(super) struct Lookup {
    /// By hash of a pair, the position of its second token: the most recent.
    last: Vec<u32>,
    /// By position of a second token, the one before with the same hash.
    before: Vec<u32>,
}

impl Lookup {
    pub(super) fn new(context_tokens: usize) -> Self {
        let before = Vec::with_capacity(context_tokens + 1);
        Self { last: vec![NONE; table_len(context_tokens)], before }
    }

    /// Bytes for a context.
    pub(super) const fn bytes(context_tokens: usize) -> u64 {
        4 * (table_len(context_tokens) + context_tokens + 1) as u64
    }

    /// Takes in what `text` has more than what is known.
    fn follow(&mut self, text: &[u32]) {
        for position in self.before.len()..text.len() {
            let Some(place) = position.checked_sub(1) else {
                self.before.push(NONE);
                continue;
            };
            let place = self.place([text[place], text[position]]);
            self.before.push(std::mem::replace(&mut self.last[place], position as u32));
        }
    }

    /// Of a pair in the table: Knuth's multiplicative hash of both.
    fn place(&self, [first, second]: [u32; 2]) -> usize {
        let pair = u64::from(first) << 32 | u64::from(second);
        (pair.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize & (self.last.len() - 1)
    }

    /// The position after the best earlier place of the text's end.
    fn find(&self, text: &[u32]) -> Option<usize> {
        let end = text.len().checked_sub(1)?;
        let (mut best, mut length) = (None, SHORTEST - 1);
        let mut place = *self.before.get(end)?;
        for _ in 0..MOST_PLACES {
            if place == NONE || length == LONGEST {
                break;
            }
            let same = common_end(text, place as usize, end);
            if same > length {
                (best, length) = (Some(place as usize + 1), same);
            }
            place = self.before[place as usize];
        }
        best
    }
}

/// How many tokens up to `place` are those up to `end`, no more than [`LONGEST`].
fn common_end(text: &[u32], place: usize, end: usize) -> usize {
    let pairs = text[..=place].iter().rev().zip(text[..=end].iter().rev());
    pairs.take(LONGEST).take_while(|(a, b)| a == b).count()
}

/// A power of two, no less than half of the context: chains bear some company.
const fn table_len(context_tokens: usize) -> usize {
    context_tokens.div_ceil(2).next_power_of_two()
}

impl Drafter for Lookup {
    fn name(&self) -> &'static str {
        "lookup"
    }

    fn begin(&mut self, _read: usize) {
        self.last.fill(NONE);
        self.before.clear();
    }

    fn propose(
        &mut self,
        _network: &mut Network,
        _sequence: &Sequence,
        text: &[u32],
        most: usize,
        guesses: &mut Vec<u32>,
    ) -> Result<(), ForwardError> {
        self.follow(text);
        if let Some(start) = self.find(text) {
            let first = guesses.len();
            for ahead in start..start + most {
                // What follows may be the guesses themselves: the text repeats.
                let token = text.get(ahead).copied();
                guesses.push(token.unwrap_or_else(|| guesses[first + ahead - text.len()]));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guess(text: &[u32], most: usize) -> Vec<u32> {
        let mut lookup = Lookup::new(text.len());
        // Piece by piece, as a text grows.
        for end in 0..=text.len() {
            lookup.follow(&text[..end]);
        }
        lookup
            .find(text)
            .map_or_else(Vec::new, |start| text[start..].iter().take(most).copied().collect())
    }

    #[test]
    fn the_longest_end_wins_and_of_equals_the_most_recent() {
        assert_eq!(guess(&[1, 2, 3, 9, 1, 2], 1), [3]);
        assert_eq!(guess(&[1, 2, 3, 1, 2, 4, 1, 2], 1), [4], "the most recent of two");
        assert_eq!(guess(&[7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 1), [3], "three tokens beat two");
        assert_eq!(guess(&[1, 2, 3, 4], 4), [0; 0]);
        assert_eq!(guess(&[1, 2, 3, 9, 2], 4), [0; 0], "one token is no match");
    }

    #[test]
    fn texts_shorter_than_a_pair_have_no_guess() {
        assert!(
            guess(&[], 3).is_empty() && guess(&[5], 3).is_empty() && guess(&[5, 5], 3).is_empty()
        );
        assert_eq!(guess(&[5, 5, 5], 3), [5]);
    }

    /// The definition: every earlier place, every length.
    fn naive(text: &[u32]) -> Option<usize> {
        let end = text.len();
        (SHORTEST..=LONGEST.min(end))
            .rev()
            .find_map(|n| (n..end).rev().find(|at| text[at - n..*at] == text[end - n..]))
    }

    proptest::proptest! {
        #[test]
        fn it_finds_what_a_search_of_the_whole_text_finds(
            text in proptest::collection::vec(0_u32..4, 0..100),
        ) {
            let mut lookup = Lookup::new(text.len());
            lookup.follow(&text);
            proptest::prop_assert_eq!(lookup.find(&text), naive(&text));
        }
    }

    #[test]
    fn a_chain_that_is_too_long_ends_the_search() {
        let often = [1, 5, 5, 9].repeat(MOST_PLACES + 1);
        let text = [vec![2, 1, 5, 5, 7], often, vec![2, 1, 5, 5]].concat();
        assert_eq!(naive(&text), Some(4), "four tokens, but far away");
        let mut lookup = Lookup::new(text.len());
        lookup.follow(&text);
        assert_eq!(lookup.find(&text), Some(text.len() - 5), "three, and near");
    }

    #[test]
    fn its_memory_is_linear_in_the_context() {
        for context in [1, 63, 1000, 8192, 262_144] {
            let lookup = Lookup::new(context);
            let held = lookup.last.capacity() + lookup.before.capacity();
            assert_eq!(Lookup::bytes(context), 4 * held as u64);
            assert!(Lookup::bytes(context) <= 8 * context as u64 + 16);
        }
    }
}

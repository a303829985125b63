//! Text as it is generated: whole characters only, stop texts never shown, an empty think block hidden.
//!
//! Pure: bytes of tokens go in, text that may be shown comes out. How the bytes are cut into tokens changes when text
//! comes out, never which text.

const THINK_OPENS: &str = "<think>";
const THINK_CLOSES: &str = "</think>";

/// Turns token bytes into text that can be shown.
#[derive(Debug, Clone)]
pub struct TextStream {
    stops: Vec<String>,
    /// Bytes of a character that has not ended.
    partial: Vec<u8>,
    /// Text that may turn out to begin a stop text or an empty think block.
    held: String,
    start: Start,
    stopped: bool,
}

/// How far the beginning of an answer is understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Start {
    /// What is held may become an empty think block.
    Undecided,
    /// A block was hidden; the line breaks after it are too.
    AfterBlock,
    /// The answer itself.
    Passed,
}

impl TextStream {
    /// A stream that ends before any of `stops`; empty ones are ignored.
    ///
    /// The stop text that is complete first counts; of two that end together, the longer one.
    pub fn new(stops: impl IntoIterator<Item = String>) -> Self {
        Self {
            stops: stops.into_iter().filter(|stop| !stop.is_empty()).collect(),
            partial: Vec::new(),
            held: String::new(),
            start: Start::Undecided,
            stopped: false,
        }
    }

    /// Shows think blocks as they are, also empty ones.
    #[must_use]
    pub const fn showing_think(mut self) -> Self {
        self.start = Start::Passed;
        self
    }

    /// Whether a stop text was met; nothing follows.
    pub const fn stopped(&self) -> bool {
        self.stopped
    }

    /// Adds a token's bytes; the text that can be shown now. Bytes that are no UTF-8 become U+FFFD.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        if self.stopped {
            return String::new();
        }
        self.partial.extend_from_slice(bytes);
        let rest = self.partial.split_off(complete_prefix(&self.partial));
        let whole = std::mem::replace(&mut self.partial, rest);
        self.held.push_str(&String::from_utf8_lossy(&whole));
        self.release(false)
    }

    /// The rest, when the answer has ended.
    pub fn finish(&mut self) -> String {
        if self.stopped {
            return String::new();
        }
        let rest = std::mem::take(&mut self.partial);
        self.held.push_str(&String::from_utf8_lossy(&rest));
        self.release(true)
    }

    fn release(&mut self, is_last: bool) -> String {
        if !self.pass_start(is_last) {
            return String::new();
        }
        if let Some(at) = first_stop(&self.held, &self.stops) {
            self.stopped = true;
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        let overlaps = self.stops.iter().map(|stop| overlap(&self.held, stop));
        let keep = if is_last { 0 } else { overlaps.max().unwrap_or(0) };
        let rest = self.held.split_off(self.held.len() - keep);
        std::mem::replace(&mut self.held, rest)
    }

    /// Removes an empty think block; `false` while it may still become one.
    fn pass_start(&mut self, is_last: bool) -> bool {
        if self.start == Start::Undecided {
            match empty_block(&self.held) {
                Block::Whole(len) => {
                    self.held.drain(..len);
                    self.start = Start::AfterBlock;
                }
                Block::Begun if !is_last => return false,
                Block::Begun | Block::None => self.start = Start::Passed,
            }
        }
        if self.start == Start::AfterBlock {
            let breaks = self.held.len() - self.held.trim_start_matches('\n').len();
            self.held.drain(..breaks);
            if !self.held.is_empty() {
                self.start = Start::Passed;
            }
        }
        true
    }
}

enum Block {
    /// It takes this many bytes.
    Whole(usize),
    /// The text ends where it could go on.
    Begun,
    None,
}

/// A think block with nothing but white space in it, at the start of a text.
fn empty_block(text: &str) -> Block {
    let Some(inside) = text.strip_prefix(THINK_OPENS) else {
        return if THINK_OPENS.starts_with(text) { Block::Begun } else { Block::None };
    };
    let end = inside.trim_start();
    match end.strip_prefix(THINK_CLOSES) {
        Some(rest) => Block::Whole(text.len() - rest.len()),
        None if THINK_CLOSES.starts_with(end) => Block::Begun,
        None => Block::None,
    }
}

/// Where the stop text begins that ends first.
fn first_stop(text: &str, stops: &[String]) -> Option<usize> {
    let found = |stop: &String| text.find(stop.as_str()).map(|at| (at + stop.len(), at));
    stops.iter().filter_map(found).min().map(|(_, at)| at)
}

/// Bytes at the end of `text` that begin `stop`, which is not empty.
pub fn overlap(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len() - 1);
    let begins = |n: &usize| text.as_bytes().ends_with(&stop.as_bytes()[..*n]);
    (1..=longest).rev().filter(|n| stop.is_char_boundary(*n)).find(begins).unwrap_or(0)
}

/// How many bytes can be decoded now: everything but a character that has begun and not ended.
pub fn complete_prefix(bytes: &[u8]) -> usize {
    let mut at = 0;
    while let Err(error) = std::str::from_utf8(&bytes[at..]) {
        match error.error_len() {
            // Never valid, however it continues: it is replaced now.
            Some(len) => at += error.valid_up_to() + len,
            None => return at + error.valid_up_to(),
        }
    }
    bytes.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What each piece shows, what the end shows, and whether a stop text was met.
    fn all(pieces: &[&[u8]], stops: &[&str]) -> (Vec<String>, String, bool) {
        let mut stream = TextStream::new(stops.iter().map(|s| (*s).to_owned()));
        let shown = pieces.iter().map(|piece| stream.push(piece)).collect();
        (shown, stream.finish(), stream.stopped())
    }

    fn whole(pieces: &[&[u8]], stops: &[&str]) -> String {
        let (shown, rest, _) = all(pieces, stops);
        shown.concat() + &rest
    }

    #[test]
    fn a_character_is_shown_when_its_last_byte_has_come() {
        let (shown, rest, _) = all(&[b"a\xf0\x9f", b"\x98", b"\x80b"], &[]);
        assert_eq!((shown, rest.as_str()), (vec!["a".into(), String::new(), "😀b".into()], ""));
    }

    #[test]
    fn bytes_that_are_no_text_become_replacement_characters() {
        let (shown, rest, _) = all(&[b"\xff", b"a\xc3"], &[]);
        assert_eq!((shown.concat(), rest.as_str()), ("\u{fffd}a".to_owned(), "\u{fffd}"));
        let (shown, _, _) = all(&[b"\xf0\x9f", b"a"], &[]);
        assert_eq!(shown, ["", "\u{fffd}a"]);
    }

    #[test]
    fn a_stop_text_is_never_shown_even_when_it_spans_pieces() {
        let (shown, rest, stopped) = all(&[b"one EN", b"D two"], &["END"]);
        assert_eq!((shown, rest.as_str(), stopped), (vec!["one ".into(), String::new()], "", true));
        let (shown, rest, stopped) = all(&[b"one EN", b"T"], &["END"]);
        assert_eq!((shown.concat() + &rest, stopped), ("one ENT".to_owned(), false));
        let (shown, rest, _) = all(&[b"EN"], &["END"]);
        assert_eq!((shown.concat(), rest.as_str()), (String::new(), "EN"));
        assert_eq!(whole(&[b"a\xc3", b"\xa9b"], &["éb", ""]), "a");
    }

    #[test]
    fn the_stop_text_that_ends_first_counts() {
        assert_eq!(whole(&[b"xabcd"], &["abcd", "bc"]), "xa");
        assert_eq!(whole(&[b"xabcd"], &["bcd", "abcd"]), "x");
    }

    #[test]
    fn an_empty_think_block_is_hidden_with_the_line_breaks_after_it() {
        assert_eq!(whole(&[b"<think>", b"\n\n", b"</think>", b"\n\n", b"\nHi\n\n"], &[]), "Hi\n\n");
        assert_eq!(whole(&[b"<think></think>Hi"], &[]), "Hi");
        assert_eq!(whole(&[b"<think>\n</think>"], &[]), "");
    }

    #[test]
    fn other_think_blocks_are_shown() {
        for text in [
            "<think>\n\nHm</think>\n\nHi",
            "Hi <think>\n\n</think>\n\n",
            "<think>\n\n",
            "<thin",
            "<think>\n</thinker>",
        ] {
            assert_eq!(whole(&[text.as_bytes()], &[]), text);
        }
        let mut stream = TextStream::new([]).showing_think();
        assert_eq!(stream.push(b"<think>\n\n</think>\n\nHi"), "<think>\n\n</think>\n\nHi");
    }

    fn cut_at<'a>(bytes: &'a [u8], cuts: &[usize]) -> Vec<&'a [u8]> {
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut % (bytes.len() + 1)).collect();
        cuts.extend([0, bytes.len()]);
        cuts.sort_unstable();
        cuts.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect()
    }

    proptest! {
        #[test]
        fn pieces_together_are_the_whole(
            bytes in prop::collection::vec(prop_oneof![any::<u8>(), Just(0xf0), Just(0x9f), Just(0x98)], 0..80),
            cuts in prop::collection::vec(any::<usize>(), 0..10),
        ) {
            prop_assert_eq!(whole(&cut_at(&bytes, &cuts), &[]), String::from_utf8_lossy(&bytes));
        }

        #[test]
        fn where_pieces_are_cut_never_changes_the_text(
            text in "(<think>[\n ]{0,3}(</think>)?)?[\nabé]{0,20}",
            cuts in prop::collection::vec(any::<usize>(), 0..20),
            stops in prop::collection::vec("[abé]{1,4}", 0..4),
        ) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let at_once = all(&[text.as_bytes()], &stops);
            let cut = all(&cut_at(text.as_bytes(), &cuts), &stops);
            prop_assert_eq!(cut.0.concat() + &cut.1, at_once.0.concat() + &at_once.1);
            prop_assert_eq!(cut.2, at_once.2);
            let shown = at_once.0.concat() + &at_once.1;
            prop_assert!(stops.iter().all(|stop| !shown.contains(stop)));
        }
    }
}

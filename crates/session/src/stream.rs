//! Text as it is generated: whole characters only, stop texts kept back, an empty think block not shown.

/// Text of an empty think block that opens an answer.
const EMPTY_THINK: [&str; 2] = ["<think>\n\n</think>\n\n", "<think>\n\n</think>"];

/// Turns token bytes into text that can be shown.
#[derive(Debug, Clone)]
pub struct TextStream {
    stops: Vec<String>,
    /// Bytes of a character that has not ended.
    partial: Vec<u8>,
    /// Text that may turn out to begin a stop text or an empty think block.
    held: String,
    /// Nothing has been shown yet.
    at_start: bool,
    hide_think: bool,
    stopped: bool,
}

impl TextStream {
    /// A stream that ends before any of `stops`.
    pub fn new(stops: impl IntoIterator<Item = String>) -> Self {
        Self {
            stops: stops.into_iter().filter(|stop| !stop.is_empty()).collect(),
            partial: Vec::new(),
            held: String::new(),
            at_start: true,
            hide_think: true,
            stopped: false,
        }
    }

    /// Shows think blocks as they are.
    #[must_use]
    pub const fn showing_think(mut self) -> Self {
        self.hide_think = false;
        self
    }

    /// Whether a stop text was met; nothing follows.
    pub const fn stopped(&self) -> bool {
        self.stopped
    }

    /// Adds a token's bytes; the text that can be shown now.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        if self.stopped {
            return String::new();
        }
        self.partial.extend_from_slice(bytes);
        let complete = complete_prefix(&self.partial);
        let rest = self.partial.split_off(complete);
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

    fn release(&mut self, last: bool) -> String {
        if self.at_start && self.hide_think {
            if let Some(rest) = EMPTY_THINK.iter().find_map(|block| self.held.strip_prefix(block)) {
                // The longer form is tried first; what may still become it is waited for.
                let undecided = !last && EMPTY_THINK[0].starts_with(self.held.as_str());
                if !undecided {
                    self.held = rest.trim_start_matches('\n').to_owned();
                    self.hide_think = false;
                }
            }
            if self.hide_think && !last && EMPTY_THINK[0].starts_with(self.held.as_str()) {
                return String::new();
            }
        }
        if let Some(at) = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min() {
            self.stopped = true;
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        let keep = if last {
            0
        } else {
            self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0)
        };
        let rest = self.held.split_off(self.held.len() - keep);
        let shown = std::mem::replace(&mut self.held, rest);
        self.at_start &= shown.is_empty();
        shown
    }
}

/// Bytes at the end of `text` that begin `stop`.
fn overlap(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len() - 1);
    (1..=longest)
        .rev()
        .find(|n| stop.is_char_boundary(*n) && text.ends_with(&stop[..*n]))
        .unwrap_or(0)
}

/// How many bytes can be decoded now: everything but a character that has begun and not ended.
fn complete_prefix(bytes: &[u8]) -> usize {
    let mut at = 0;
    while at < bytes.len() {
        match std::str::from_utf8(&bytes[at..]) {
            Ok(_) => return bytes.len(),
            Err(error) => match error.error_len() {
                // Never valid, however it continues: it is replaced now.
                Some(len) => at += error.valid_up_to() + len,
                None => return at + error.valid_up_to(),
            },
        }
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(pieces: &[&[u8]], stops: &[&str]) -> (Vec<String>, String, bool) {
        let mut stream = TextStream::new(stops.iter().map(|s| (*s).to_owned()));
        let shown = pieces.iter().map(|piece| stream.push(piece)).collect();
        (shown, stream.finish(), stream.stopped())
    }

    #[test]
    fn a_character_is_shown_when_its_last_byte_has_come() {
        let (shown, rest, _) = all(&[b"a\xf0\x9f", b"\x98", b"\x80b"], &[]);
        assert_eq!(
            (shown, rest.as_str()),
            (vec!["a".to_owned(), String::new(), "😀b".to_owned()], "")
        );
        let (shown, rest, _) = all(&[b"\xff", b"a\xc3"], &[]);
        assert_eq!((shown.concat(), rest.as_str()), ("\u{fffd}a".to_owned(), "\u{fffd}"));
    }

    #[test]
    fn a_stop_text_is_never_shown_even_when_it_spans_pieces() {
        let (shown, rest, stopped) = all(&[b"one EN", b"D two"], &["END"]);
        assert_eq!((shown.concat(), rest.as_str(), stopped), ("one ".to_owned(), "", true));
        let (shown, rest, stopped) = all(&[b"one EN", b"T"], &["END"]);
        assert_eq!((shown.concat() + &rest, stopped), ("one ENT".to_owned(), false));
        let (shown, rest, _) = all(&[b"EN"], &["END"]);
        assert_eq!((shown.concat(), rest.as_str()), (String::new(), "EN"));
    }

    #[test]
    fn an_empty_think_block_is_not_shown_and_a_full_one_is() {
        let (shown, rest, _) = all(&[b"<think>", b"\n\n", b"</think>", b"\n\n", b"Hi"], &[]);
        assert_eq!(shown.concat() + &rest, "Hi");
        let (shown, rest, _) = all(&[b"<think>\n\nHm", b"</think>\n\nHi"], &[]);
        assert_eq!(shown.concat() + &rest, "<think>\n\nHm</think>\n\nHi");
        let (shown, rest, _) = all(&[b"Hi <think>\n\n</think>\n\n"], &[]);
        assert_eq!(shown.concat() + &rest, "Hi <think>\n\n</think>\n\n");
    }

    proptest! {
        #[test]
        fn pieces_together_are_the_whole(bytes in prop::collection::vec(any::<u8>(), 0..80), cuts in prop::collection::vec(0..80_usize, 0..10)) {
            let mut stream = TextStream::new([]).showing_think();
            let mut cuts: Vec<usize> = cuts.into_iter().filter(|cut| *cut <= bytes.len()).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let mut text: String = cuts.windows(2).map(|pair| stream.push(&bytes[pair[0]..pair[1]])).collect();
            text.push_str(&stream.finish());
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
        }
    }
}

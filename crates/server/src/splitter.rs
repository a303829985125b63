//! An answer as it is generated, split into thought, text and calls of tools.
//!
//! Pure: bytes of tokens go in, pieces come out. How the bytes are cut into tokens changes when pieces come out, never
//! what they add up to. A call comes out whole or, if it never becomes one, as the text that it was.

use session::{complete_prefix, overlap};

use crate::calls::{self, Block, CLOSES, FUNCTION, FUNCTION_CLOSES, OPENS};
use crate::chat::{Call, Tool};

const THINK_OPENS: &str = "<think>";
const THINK_CLOSES: &str = "</think>";

/// Bytes of a call; what is longer is text. A model writes that much in an hour.
const MAX_CALL_BYTES: usize = 1 << 20;

/// A part of an answer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Piece {
    Reasoning(String),
    Text(String),
    Call(Call),
}

/// Where the answer begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Begin {
    /// The prompt has opened the block of thought.
    Thinking,
    /// A block of thought may come first.
    Either,
    /// All of it is text.
    Text,
}

/// What is being read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing but white space so far, and a block of thought may begin.
    Undecided,
    Reasoning,
    Text,
    /// Inside of `<tool_call>`.
    Block,
    /// Inside of `<function=` without a block around it.
    Function,
    Ended,
}

/// Splits an answer.
#[derive(Debug)]
pub(crate) struct Splitter {
    state: State,
    tools: Vec<Tool>,
    stops: Vec<String>,
    /// Bytes of a character that has not ended.
    partial: Vec<u8>,
    /// Text that cannot be placed yet.
    held: String,
    /// White space before a call: shown if the call turns out to be none.
    before: String,
    /// Where to look for the end of a call: before that it was not.
    searched: usize,
    /// Line breaks at the start of what follows are dropped.
    at_start: bool,
    has_calls: bool,
    stopped_by: Option<String>,
}

impl Splitter {
    /// - `tools`: calls of these are found; none to take everything as text
    /// - `stops`: the text ends before any of these; empty ones are ignored
    pub(crate) fn new(begin: Begin, tools: Vec<Tool>, stops: &[String]) -> Self {
        Self {
            state: match begin {
                Begin::Thinking => State::Reasoning,
                Begin::Either => State::Undecided,
                Begin::Text => State::Text,
            },
            tools,
            stops: stops.iter().filter(|stop| !stop.is_empty()).cloned().collect(),
            partial: Vec::new(),
            held: String::new(),
            before: String::new(),
            searched: 0,
            at_start: begin == Begin::Thinking,
            has_calls: false,
            stopped_by: None,
        }
    }

    /// Whether what comes now is thought.
    pub(crate) fn is_reasoning(&self) -> bool {
        self.state == State::Reasoning
    }

    /// Whether what comes now is shown as text.
    pub(crate) const fn is_text(&self) -> bool {
        matches!(self.state, State::Text | State::Undecided)
    }

    /// Whether the tag that opens a block of calls is the last that came.
    pub(crate) fn opens_call(&self) -> bool {
        self.state == State::Block && self.held.is_empty() && self.partial.is_empty()
    }

    /// Whether calls were found.
    pub(crate) const fn has_calls(&self) -> bool {
        self.has_calls
    }

    /// The stop text that was met; nothing follows.
    pub(crate) fn stopped_by(&self) -> Option<&str> {
        self.stopped_by.as_deref()
    }

    /// Adds a token's bytes. Bytes that are no UTF-8 become U+FFFD.
    pub(crate) fn push(&mut self, bytes: &[u8], out: &mut Vec<Piece>) {
        self.partial.extend_from_slice(bytes);
        let rest = self.partial.split_off(complete_prefix(&self.partial));
        let whole = std::mem::replace(&mut self.partial, rest);
        self.held.push_str(&String::from_utf8_lossy(&whole));
        while self.step(false, out) {}
    }

    /// The rest, when the answer has ended.
    pub(crate) fn finish(&mut self, out: &mut Vec<Piece>) {
        let rest = std::mem::take(&mut self.partial);
        self.held.push_str(&String::from_utf8_lossy(&rest));
        while self.step(true, out) {}
    }

    /// One step; whether there may be another.
    fn step(&mut self, is_last: bool, out: &mut Vec<Piece>) -> bool {
        match self.state {
            State::Undecided => self.decide(is_last),
            State::Reasoning => self.reason(is_last, out),
            State::Text => self.speak(is_last, out),
            State::Block => self.call(CLOSES, is_last, out),
            State::Function => self.call(FUNCTION_CLOSES, is_last, out),
            State::Ended => {
                self.held.clear();
                false
            }
        }
    }

    /// Whether a block of thought begins the answer.
    fn decide(&mut self, is_last: bool) -> bool {
        let text = self.held.trim_start();
        if let Some(rest) = text.strip_prefix(THINK_OPENS) {
            self.held = rest.to_owned();
            (self.state, self.at_start) = (State::Reasoning, true);
            return true;
        }
        if THINK_OPENS.starts_with(text) && !is_last {
            return false;
        }
        self.state = State::Text;
        true
    }

    fn reason(&mut self, is_last: bool, out: &mut Vec<Piece>) -> bool {
        self.drop_line_breaks();
        if let Some(at) = self.held.find(THINK_CLOSES) {
            let rest = self.held.split_off(at);
            let thought = std::mem::replace(&mut self.held, rest[THINK_CLOSES.len()..].to_owned());
            give(thought.trim_end(), out, Piece::Reasoning);
            (self.state, self.at_start) = (State::Text, true);
            return true;
        }
        // White space before the end of the block belongs to the block.
        let keep = if is_last { 0 } else { overlap(&self.held, THINK_CLOSES) };
        let shown = &self.held[..self.held.len() - keep];
        let shown = if is_last { shown.len() } else { shown.trim_end().len() };
        self.give_front(shown, out, Piece::Reasoning);
        false
    }

    fn speak(&mut self, is_last: bool, out: &mut Vec<Piece>) -> bool {
        self.drop_line_breaks();
        let tags: &[&str] = if self.tools.is_empty() { &[] } else { &[OPENS, FUNCTION] };
        let patterns = tags.iter().copied().chain(self.stops.iter().map(String::as_str));
        let first = patterns
            .enumerate()
            .filter_map(|(index, pattern)| {
                let at = self.held.find(pattern)?;
                Some((at + pattern.len(), at, index))
            })
            .min();
        if let Some((end, at, index)) = first {
            let rest = self.held.split_off(at);
            let text = std::mem::take(&mut self.held);
            if index >= tags.len() {
                give(&text, out, Piece::Text);
                self.stopped_by = Some(self.stops[index - tags.len()].clone());
                self.state = State::Ended;
                return true;
            }
            let shown = text.trim_end();
            give(shown, out, Piece::Text);
            text[shown.len()..].clone_into(&mut self.before);
            self.state = if tags[index] == OPENS { State::Block } else { State::Function };
            // The tag of a function belongs to the call.
            self.held = if tags[index] == OPENS { rest[end - at..].to_owned() } else { rest };
            self.searched = 0;
            return true;
        }
        let patterns = tags.iter().copied().chain(self.stops.iter().map(String::as_str));
        let keep = patterns.map(|pattern| overlap(&self.held, pattern)).max().unwrap_or(0);
        let keep = if is_last { 0 } else { keep };
        let mut shown = self.held.len() - keep;
        if !tags.is_empty() && (!is_last || self.has_calls) {
            // White space before a call is not shown, nor after the last one.
            shown = self.held[..shown].trim_end().len();
        }
        self.give_front(shown, out, Piece::Text);
        if is_last {
            self.held.clear();
        }
        false
    }

    fn call(&mut self, closes: &str, is_last: bool, out: &mut Vec<Piece>) -> bool {
        while let Some(at) = self.held[self.searched..].find(closes).map(|at| self.searched + at) {
            let end = at + closes.len();
            let block =
                if self.state == State::Block { &self.held[..at] } else { &self.held[..end] };
            match calls::read(block, &self.tools) {
                Block::Calls(calls) => {
                    out.extend(calls.into_iter().map(Piece::Call));
                    self.held.drain(..end);
                    (self.state, self.has_calls, self.at_start) = (State::Text, true, true);
                    return true;
                }
                // A text in the call may spell the tag: it goes on until it is a call.
                Block::Begun => self.searched = end,
                Block::Text => return self.show_block(end, out),
            }
        }
        let mut searched = self.held.len().saturating_sub(closes.len() - 1).max(self.searched);
        while !self.held.is_char_boundary(searched) {
            searched -= 1;
        }
        self.searched = searched;
        if !is_last && self.held.len() <= MAX_CALL_BYTES {
            return false;
        }
        self.show_block(self.held.len(), out)
    }

    /// A block that never became a call is shown as it was written.
    fn show_block(&mut self, end: usize, out: &mut Vec<Piece>) -> bool {
        let opening = if self.state == State::Block { OPENS } else { "" };
        let before = std::mem::take(&mut self.before);
        let text = format!("{before}{opening}{}", &self.held[..end]);
        self.held.drain(..end);
        give(&text, out, Piece::Text);
        self.state = State::Text;
        true
    }

    fn drop_line_breaks(&mut self) {
        if self.at_start {
            let breaks = self.held.len() - self.held.trim_start_matches('\n').len();
            self.held.drain(..breaks);
            self.at_start = self.held.is_empty();
        }
    }

    fn give_front(&mut self, len: usize, out: &mut Vec<Piece>, piece: fn(String) -> Piece) {
        let rest = self.held.split_off(len);
        let text = std::mem::replace(&mut self.held, rest);
        give(&text, out, piece);
    }
}

fn give(text: &str, out: &mut Vec<Piece>, piece: fn(String) -> Piece) {
    if !text.is_empty() {
        out.push(piece(text.to_owned()));
    }
}

#[cfg(test)]
mod tests;

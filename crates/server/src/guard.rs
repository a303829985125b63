//! Text of a request that spells control tokens, found and marked before a template runs.
//!
//! One walk over a text, whatever it spells and how often: a request may be nothing but such spellings.

use serde_json::Value;

/// Around the number of a guarded text. Neither is a character of any text.
const MARK_OPENS: char = '\u{fdd0}';
const MARK_CLOSES: char = '\u{fdd1}';

/// A place in the tree of guarded texts, which spells a beginning of them.
#[derive(Debug, Default)]
struct Node {
    /// The text that ends here.
    text: Option<usize>,
    next: Vec<(u8, usize)>,
}

/// Texts that must not become control tokens.
#[derive(Debug)]
pub(crate) struct Guard {
    texts: Vec<String>,
    /// The first one is the root.
    nodes: Vec<Node>,
}

/// A part of a rendered text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part<'a> {
    /// As the template made it: control tokens are control tokens.
    Plain(&'a str),
    /// What somebody spelled: letters.
    Spelled(&'a str),
}

impl Guard {
    /// Guards these texts, and the marks themselves.
    pub(crate) fn new(mut texts: Vec<String>) -> Self {
        texts.extend([MARK_OPENS.to_string(), MARK_CLOSES.to_string()]);
        let mut guard = Self { texts: Vec::new(), nodes: vec![Node::default()] };
        for (index, text) in texts.iter().enumerate().filter(|(_, text)| !text.is_empty()) {
            let mut at = 0;
            for byte in text.bytes() {
                at = guard.child(at, byte).unwrap_or_else(|| guard.add(at, byte));
            }
            guard.nodes[at].text = Some(index);
        }
        guard.texts = texts;
        guard
    }

    fn child(&self, at: usize, byte: u8) -> Option<usize> {
        self.nodes[at].next.iter().find(|(own, _)| *own == byte).map(|(_, next)| *next)
    }

    fn add(&mut self, at: usize, byte: u8) -> usize {
        let new = self.nodes.len();
        self.nodes.push(Node::default());
        self.nodes[at].next.push((byte, new));
        new
    }

    /// The longest guarded text that these bytes begin with.
    fn at_start(&self, bytes: &[u8]) -> Option<usize> {
        let (mut at, mut found) = (0, None);
        for byte in bytes {
            let Some(next) = self.child(at, *byte) else { break };
            at = next;
            found = self.nodes[at].text.or(found);
        }
        found
    }

    /// The text with marks in the place of guarded texts; nothing if it has none.
    fn marked(&self, text: &str) -> Option<String> {
        let bytes = text.as_bytes();
        let (mut out, mut copied, mut at) = (String::new(), 0, 0);
        while at < bytes.len() {
            let Some(index) = self.at_start(&bytes[at..]) else {
                at += 1;
                continue;
            };
            out.push_str(&text[copied..at]);
            out.push(MARK_OPENS);
            out.push_str(&index.to_string());
            out.push(MARK_CLOSES);
            at += self.texts[index].len();
            copied = at;
        }
        if copied == 0 {
            return None;
        }
        out.push_str(&text[copied..]);
        Some(out)
    }

    /// Marks all texts of a value, also names of fields.
    pub(crate) fn mark(&self, value: &mut Value) {
        match value {
            Value::String(text) => {
                if let Some(marked) = self.marked(text) {
                    *text = marked;
                }
            }
            Value::Array(list) => list.iter_mut().for_each(|value| self.mark(value)),
            Value::Object(map) => {
                if map.keys().any(|name| self.marked(name).is_some()) {
                    let field = |(name, value): (String, Value)| {
                        (self.marked(&name).unwrap_or(name), value)
                    };
                    *map = std::mem::take(map).into_iter().map(field).collect();
                }
                map.values_mut().for_each(|value| self.mark(value));
            }
            _ => {}
        }
    }

    /// A rendered text, taken apart at its marks.
    pub(crate) fn parts<'a>(&'a self, text: &'a str) -> Vec<Part<'a>> {
        let (mut parts, mut rest) = (Vec::new(), text);
        while let Some((before, after)) = rest.split_once(MARK_OPENS) {
            let marked = after.split_once(MARK_CLOSES).and_then(|(number, after)| {
                Some((self.texts.get(number.parse::<usize>().ok()?)?, after))
            });
            // A template that changes its messages' text may break a mark, which is then text as any.
            let Some((spelled, after)) = marked else { break };
            parts.extend([Part::Plain(before), Part::Spelled(spelled)]);
            rest = after;
        }
        parts.push(Part::Plain(rest));
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn guard() -> Guard {
        Guard::new(["<|end|>", "<|end|>x", "<s>", ""].map(str::to_owned).to_vec())
    }

    fn spelled(text: &str) -> Vec<String> {
        let guard = guard();
        let mut value = json!(text);
        guard.mark(&mut value);
        let marked = value.as_str().unwrap().to_owned();
        let parts = guard.parts(&marked);
        let whole: String = parts
            .iter()
            .map(|part| match part {
                Part::Plain(text) | Part::Spelled(text) => *text,
            })
            .collect();
        assert_eq!(whole, text, "nothing is lost");
        let spelled = parts.into_iter().filter_map(|part| match part {
            Part::Spelled(text) => Some(text.to_owned()),
            Part::Plain(_) => None,
        });
        spelled.collect()
    }

    #[test]
    fn the_longest_text_at_a_place_is_found_and_nothing_is_found_twice() {
        assert_eq!(spelled("a<|end|>b"), ["<|end|>"]);
        assert_eq!(spelled("<|end|>xy<s><s>"), ["<|end|>x", "<s>", "<s>"]);
        assert_eq!(spelled("<|en<|end|>"), ["<|end|>"]);
        assert_eq!(spelled("<|end|"), Vec::<String>::new());
        assert_eq!(spelled("\u{fdd0}0\u{fdd1}é"), ["\u{fdd0}", "\u{fdd1}"]);
    }

    #[test]
    fn names_of_fields_are_marked_too() {
        let mut value = json!({ "a<s>": ["<s>", { "b": 1 }], "c": "<s>" });
        guard().mark(&mut value);
        assert!(!value.to_string().contains("<s>"), "{value}");
    }

    /// A text of nothing else took time with the square of its length.
    #[test]
    fn a_megabyte_of_control_tokens_is_marked_in_one_walk() {
        let many: Vec<String> = (0..300).map(|i| format!("<|reserved_{i}|>")).collect();
        let guard = Guard::new(many);
        let mut value = Value::from("<|reserved_7|>".repeat(1 << 16));
        guard.mark(&mut value);
        assert_eq!(value.as_str().unwrap().matches(MARK_OPENS).count(), 1 << 16);
    }

    proptest! {
        #[test]
        fn whatever_is_spelled_comes_back(
            parts in prop::collection::vec(
                prop::sample::select(vec!["<", "|", "end", "|>", "<s>", "x", "\u{fdd0}", "1", "é"]), 0..40),
        ) {
            spelled(&parts.concat());
        }
    }
}

//! Tokens and merges as they arrive, and as they are kept.

use std::path::Path;

use super::{charge, config_error, full};
use crate::error::{CheckpointError, printable};
use crate::limits::Budget;
use crate::metadata::StringArray;

/// Token types of GGUF.
const NORMAL: u64 = 1;
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;
const UNUSED: u64 = 5;

/// A token outside of the merges.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Added {
    pub(super) id: u32,
    pub(super) text: String,
    /// A control token.
    pub(super) special: bool,
    /// Found in text after it was normalised.
    pub(super) normalized: bool,
}

impl Added {
    /// Bytes of memory, its share of a list that grows included.
    pub(super) const fn memory(&self) -> u64 {
        (self.text.len() + 3 * size_of::<Self>()) as u64
    }
}

/// A vocabulary in order of ids.
#[derive(Debug)]
pub(super) struct Kept {
    pub(super) tokens: StringArray,
    pub(super) kinds: Vec<u64>,
    pub(super) merges: StringArray,
}

impl Kept {
    /// Bytes of memory.
    pub(super) fn memory(&self) -> u64 {
        let strings = |array: &StringArray| {
            array.iter().map(str::len).sum::<usize>() + array.len() * size_of::<u32>()
        };
        let kinds = self.kinds.len() * size_of::<u64>();
        (strings(&self.tokens) + strings(&self.merges) + kinds) as u64
    }
}

/// Where a token is in the text of all.
#[derive(Debug, Clone, Copy)]
struct Entry {
    id: u32,
    start: u32,
    end: u32,
}

/// Tokens in the order in which a file has them.
#[derive(Debug, Default)]
pub(super) struct Tokens {
    text: Vec<u8>,
    entries: Vec<Entry>,
    merges: Strings,
    added: Vec<Added>,
}

/// Memory that is not there: bytes.
#[derive(Debug)]
pub(super) struct Full(pub(super) u64);

impl Full {
    pub(super) fn of_file(self, path: &Path, budget: &Budget) -> CheckpointError {
        full(path, budget, self.0)
    }
}

impl Tokens {
    /// A token of the merges' vocabulary.
    pub(super) fn push(&mut self, text: &str, id: u32, budget: &mut Budget) -> Result<(), Full> {
        grow(&mut self.text, text.len(), budget)?;
        grow(&mut self.entries, 1, budget)?;
        let start = self.text.len() as u32;
        self.text.extend_from_slice(text.as_bytes());
        self.entries.push(Entry { id, start, end: self.text.len() as u32 });
        Ok(())
    }

    /// A merge of two tokens, which have no space in them.
    pub(super) fn push_merge(
        &mut self,
        left: &str,
        right: &str,
        budget: &mut Budget,
    ) -> Result<(), Full> {
        self.merges.push(&[left, " ", right], budget)
    }

    /// A token outside of the merges; it may be in the vocabulary too.
    pub(super) fn push_added(&mut self, token: Added, budget: &mut Budget) -> Result<(), Full> {
        let bytes = token.memory();
        if !budget.take(bytes) {
            return Err(Full(bytes));
        }
        self.added.push(token);
        Ok(())
    }

    pub(super) fn added(&self) -> &[Added] {
        &self.added
    }

    /// Adds a token that another file names, unless this one has it.
    ///
    /// # Errors
    /// It has it under another id, or the id for another one.
    pub(super) fn add_missing(
        &mut self,
        path: &Path,
        token: &Added,
        budget: &mut Budget,
    ) -> Result<(), CheckpointError> {
        match self.added.iter().find(|have| have.id == token.id || have.text == token.text) {
            Some(have) if have.id == token.id && have.text == token.text => Ok(()),
            Some(have) => Err(contradiction(path, token, have.id, &have.text)),
            None => {
                self.push_added(token.clone(), budget).map_err(|full| full.of_file(path, budget))
            }
        }
    }

    /// Brings everything in the order of ids; unused ids up to `rows` get names of their own.
    ///
    /// # Errors
    /// Two tokens of one id or two ids of one token; an id outside of the rows; too much memory.
    pub(super) fn finish(
        mut self,
        path: &Path,
        rows: Option<u64>,
        budget: &mut Budget,
    ) -> Result<Kept, CheckpointError> {
        self.entries.sort_unstable_by_key(|entry| entry.id);
        let same = self.entries.windows(2).find(|pair| pair[0].id == pair[1].id);
        if let Some([first, again]) = same {
            let found = format!("the id of `{}` too", printable(self.text(first)));
            let needed = "an id of its own";
            return Err(config_error(path, self.text(again), found, needed));
        }
        let fresh = self.fresh_added(path)?;
        self.no_token_twice(path, &fresh, budget)?;
        let kept = self.in_order(path, rows, &fresh, budget)?;
        Ok(kept)
    }

    fn text(&self, entry: &Entry) -> &str {
        let bytes = &self.text[entry.start as usize..entry.end as usize];
        std::str::from_utf8(bytes).expect("made of strings")
    }

    /// Added tokens that are not in the vocabulary, in order of ids.
    fn fresh_added(&mut self, path: &Path) -> Result<Vec<usize>, CheckpointError> {
        self.added.sort_unstable_by_key(|token| token.id);
        for pair in self.added.windows(2) {
            if pair[0].id == pair[1].id {
                return Err(contradiction(path, &pair[1], pair[0].id, &pair[0].text));
            }
        }
        let mut fresh = Vec::new();
        for (at, token) in self.added.iter().enumerate() {
            match self.entries.binary_search_by_key(&token.id, |entry| entry.id) {
                Err(_) => fresh.push(at),
                Ok(entry) => {
                    let text = self.text(&self.entries[entry]);
                    if text != token.text {
                        return Err(contradiction(path, token, token.id, text));
                    }
                }
            }
        }
        Ok(fresh)
    }

    fn no_token_twice(
        &self,
        path: &Path,
        fresh: &[usize],
        budget: &mut Budget,
    ) -> Result<(), CheckpointError> {
        let mark = budget.mark();
        let len = self.entries.len() + fresh.len();
        charge(path, budget, (len * size_of::<(&str, u32)>()) as u64)?;
        let mut all = Vec::with_capacity(len);
        all.extend(self.entries.iter().map(|entry| (self.text(entry), entry.id)));
        all.extend(fresh.iter().map(|at| (self.added[*at].text.as_str(), self.added[*at].id)));
        all.sort_unstable();
        if let Some([first, again]) = all.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            let found = format!("ids {} and {}", first.1, again.1);
            return Err(config_error(path, first.0, found, "one id"));
        }
        drop(all);
        budget.restore(mark);
        Ok(())
    }

    fn in_order(
        self,
        path: &Path,
        rows: Option<u64>,
        fresh: &[usize],
        budget: &mut Budget,
    ) -> Result<Kept, CheckpointError> {
        let last = self.entries.last().map(|entry| entry.id);
        let last = last.max(self.added.last().map(|token| token.id));
        let used = last.map_or(0, |id| u64::from(id) + 1);
        let rows = rows.unwrap_or(used);
        if used > rows {
            let needed = format!("ids below {rows}, the rows of the embedding");
            return Err(config_error(path, "vocabulary", format!("token id {}", used - 1), needed));
        }
        let holes = rows - (self.entries.len() + fresh.len()) as u64;
        let added: usize = fresh.iter().map(|at| self.added[*at].text.len()).sum();
        let bytes = self.text.len() as u64 + added as u64 + holes * HOLE_BYTES;
        charge(path, budget, bytes + rows * (size_of::<u32>() + size_of::<u64>()) as u64)?;
        let mut text = Vec::with_capacity(bytes as usize);
        let mut ends = Vec::with_capacity(rows as usize);
        let mut kinds = Vec::with_capacity(rows as usize);
        let mut entries = self.entries.iter().peekable();
        let mut added = self.added.iter().peekable();
        for id in 0..rows as u32 {
            let entry = entries.next_if(|entry| entry.id == id);
            let token = added.next_if(|token| token.id == id);
            kinds.push(match (entry, token) {
                (_, Some(token)) if token.special => CONTROL,
                (_, Some(_)) => USER_DEFINED,
                (Some(_), None) => NORMAL,
                (None, None) => UNUSED,
            });
            match (entry, token) {
                (Some(entry), _) => text.extend_from_slice(self.text(entry).as_bytes()),
                (None, Some(token)) => text.extend_from_slice(token.text.as_bytes()),
                (None, None) => text.extend_from_slice(format!("[PAD{id}]").as_bytes()),
            }
            ends.push(text.len() as u32);
        }
        let tokens = StringArray::from_parts(text, ends).expect("made of strings");
        Ok(Kept { tokens, kinds, merges: self.merges.finish() })
    }
}

/// Bytes of the name of an unused id, at most.
const HOLE_BYTES: u64 = "[PAD4294967295]".len() as u64;

fn contradiction(path: &Path, token: &Added, id: u32, text: &str) -> CheckpointError {
    let found = format!("id {}, and id {id} is `{}`", token.id, printable(text));
    config_error(path, &token.text, found, "one id, and one token for an id")
}

/// Strings one after the other.
#[derive(Debug, Default)]
struct Strings {
    text: Vec<u8>,
    ends: Vec<u32>,
}

impl Strings {
    fn push(&mut self, parts: &[&str], budget: &mut Budget) -> Result<(), Full> {
        grow(&mut self.text, parts.iter().map(|part| part.len()).sum(), budget)?;
        grow(&mut self.ends, 1, budget)?;
        parts.iter().for_each(|part| self.text.extend_from_slice(part.as_bytes()));
        self.ends.push(self.text.len() as u32);
        Ok(())
    }

    fn finish(mut self) -> StringArray {
        self.text.shrink_to_fit();
        self.ends.shrink_to_fit();
        StringArray::from_parts(self.text, self.ends).expect("made of strings")
    }
}

/// Makes room in a list, of which old and new are both there for a moment.
fn grow<T>(list: &mut Vec<T>, more: usize, budget: &mut Budget) -> Result<(), Full> {
    if list.capacity() - list.len() >= more {
        return Ok(());
    }
    let old = list.capacity();
    let new = (2 * old).max(list.len() + more).max(1 << 10);
    let bytes = (new * size_of::<T>()) as u64;
    if !budget.take(bytes) {
        return Err(Full(bytes));
    }
    list.reserve_exact(new - list.len());
    budget.give((old * size_of::<T>()) as u64);
    Ok(())
}

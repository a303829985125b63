//! A cursor over a file's header: numbers, strings and counts, each checked before it is used.

use std::fmt;
use std::path::Path;

use crate::error::{CheckpointError, printable};
use crate::limits::{self, Budget};
use crate::source::Source;

/// Bytes read at a time.
const WINDOW: u64 = 1 << 15;

/// Where the header is being read.
///
/// The argument `what` of the methods names the thing in messages; it is only put together when one is needed.
pub(crate) struct Cursor<'a> {
    path: &'a Path,
    source: &'a dyn Source,
    /// The file's size.
    size: u64,
    position: u64,
    window: Vec<u8>,
    window_start: u64,
    pub(crate) budget: &'a mut Budget,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(path: &'a Path, source: &'a dyn Source, budget: &'a mut Budget) -> Self {
        Self {
            path,
            source,
            size: source.len(),
            position: 0,
            window: Vec::new(),
            window_start: 0,
            budget,
        }
    }

    pub(crate) const fn path(&self) -> &'a Path {
        self.path
    }

    pub(crate) const fn size(&self) -> u64 {
        self.size
    }

    pub(crate) const fn position(&self) -> u64 {
        self.position
    }

    /// Goes back to a position where the cursor has been.
    pub(crate) fn rewind(&mut self, position: u64) {
        assert!(position <= self.position, "a cursor rewinds to where it has been");
        self.position = position;
    }

    /// The next `N` bytes.
    pub(crate) fn bytes<const N: usize>(
        &mut self,
        what: fmt::Arguments<'_>,
    ) -> Result<[u8; N], CheckpointError> {
        let mut bytes = [0; N];
        self.fill(what, &mut bytes)?;
        Ok(bytes)
    }

    /// A count of things that take at least `element_bytes` each, held against what is left of the file.
    pub(crate) fn count(
        &mut self,
        what: fmt::Arguments<'_>,
        element_bytes: u64,
        limit: u64,
    ) -> Result<u64, CheckpointError> {
        let count = u64::from_le_bytes(self.bytes(what)?);
        let left = self.size - self.position;
        if count.checked_mul(element_bytes).is_none_or(|bytes| bytes > left) {
            let needed = format!("what fits into the {left} bytes that follow");
            return Err(self.format(what, count.to_string(), &needed));
        }
        if count > limit {
            return Err(self.limit(what, count, limit));
        }
        Ok(count)
    }

    /// Charges memory before it is allocated.
    pub(crate) fn charge(
        &mut self,
        what: fmt::Arguments<'_>,
        bytes: u64,
    ) -> Result<(), CheckpointError> {
        if self.budget.take(bytes) {
            return Ok(());
        }
        let what = format_args!("memory for {what} and the header before it");
        let found = (limits::HEADER_MEMORY - self.budget.mark()).saturating_add(bytes);
        Err(self.limit(what, found, limits::HEADER_MEMORY))
    }

    /// A string to keep.
    pub(crate) fn string(
        &mut self,
        what: fmt::Arguments<'_>,
        limit: u64,
    ) -> Result<String, CheckpointError> {
        let len = self.count(what, 1, limit)?;
        self.charge(what, len)?;
        let mut bytes = vec![0; len as usize];
        self.fill(what, &mut bytes)?;
        String::from_utf8(bytes).map_err(|error| self.not_utf8(what, error.as_bytes()))
    }

    /// Passes over `bytes` without reading them.
    pub(crate) fn skip(
        &mut self,
        what: fmt::Arguments<'_>,
        bytes: u64,
    ) -> Result<(), CheckpointError> {
        self.has(what, bytes)?;
        self.position += bytes;
        Ok(())
    }

    /// Fills `out` with the bytes that follow.
    pub(crate) fn fill(
        &mut self,
        what: fmt::Arguments<'_>,
        out: &mut [u8],
    ) -> Result<(), CheckpointError> {
        self.has(what, out.len() as u64)?;
        let mut done = 0;
        while done < out.len() {
            let inside = self.position.checked_sub(self.window_start).map(|at| at as usize);
            let available = inside.and_then(|at| self.window.get(at..)).unwrap_or_default();
            if available.is_empty() {
                self.refill()?;
                continue;
            }
            let take = available.len().min(out.len() - done);
            out[done..done + take].copy_from_slice(&available[..take]);
            done += take;
            self.position += take as u64;
        }
        Ok(())
    }

    /// Moves the window to the position, which lies before the end of the file.
    fn refill(&mut self) -> Result<(), CheckpointError> {
        self.window.resize((self.size - self.position).min(WINDOW) as usize, 0);
        self.window_start = self.position;
        let outcome = self.source.read_at(self.position, &mut self.window);
        outcome.map_err(|source| CheckpointError::Io { file: self.path.to_owned(), source })
    }

    /// Whether the next `bytes` are inside the file and the largest header.
    fn has(&self, what: fmt::Arguments<'_>, bytes: u64) -> Result<(), CheckpointError> {
        let left = self.size - self.position;
        if bytes > left {
            let found = format!("the end of the file after {left} bytes");
            return Err(self.format(what, found, &format!("{bytes} bytes")));
        }
        let end = self.position + bytes;
        if end > limits::HEADER_BYTES {
            let what = format_args!("bytes of header up to {what}");
            return Err(self.limit(what, end, limits::HEADER_BYTES));
        }
        Ok(())
    }

    pub(crate) fn not_utf8(&self, what: fmt::Arguments<'_>, bytes: &[u8]) -> CheckpointError {
        let start = &bytes[..bytes.len().min(64)];
        self.format(what, format!("`{}`", printable(&String::from_utf8_lossy(start))), "UTF-8")
    }

    pub(crate) fn format(
        &self,
        what: fmt::Arguments<'_>,
        found: String,
        needed: &str,
    ) -> CheckpointError {
        CheckpointError::Format {
            file: self.path.to_owned(),
            what: printable(&what.to_string()),
            found,
            needed: needed.to_owned(),
        }
    }

    pub(crate) fn limit(
        &self,
        what: fmt::Arguments<'_>,
        found: u64,
        limit: u64,
    ) -> CheckpointError {
        CheckpointError::Limit {
            file: self.path.to_owned(),
            what: printable(&what.to_string()),
            found,
            limit,
        }
    }

    pub(crate) fn unsupported(
        &self,
        what: fmt::Arguments<'_>,
        found: String,
        supported: &str,
    ) -> CheckpointError {
        CheckpointError::Unsupported {
            file: self.path.to_owned(),
            what: printable(&what.to_string()),
            found,
            supported: supported.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::MemorySource;

    #[test]
    fn strings_longer_than_the_window_are_read_whole() {
        let text = "é".repeat(WINDOW as usize);
        let mut bytes = vec![7];
        for _ in 0..2 {
            bytes.extend((text.len() as u64).to_le_bytes());
            bytes.extend(text.as_bytes());
        }
        let (source, mut budget) = (MemorySource(&bytes), Budget::new());
        let mut cursor = Cursor::new(Path::new("x.gguf"), &source, &mut budget);
        assert_eq!(cursor.bytes(format_args!("a byte")).unwrap(), [7]);
        assert_eq!(cursor.string(format_args!("a"), 1 << 20).unwrap(), text);
        let start = cursor.position();
        cursor.skip(format_args!("b"), 8 + text.len() as u64).unwrap();
        cursor.rewind(start);
        assert_eq!(cursor.string(format_args!("b"), 1 << 20).unwrap(), text);
        assert_eq!(cursor.position(), cursor.size());
        assert!(cursor.bytes::<1>(format_args!("more")).is_err());
    }
}

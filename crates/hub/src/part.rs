//! A file on its way: `PATH.partial`, and beside it `PATH.partial.json`, which says what of it is there.
//!
//! The file is cut into chunks that several connections fill, each from its front. The record never claims a byte that
//! is not on the disk: bytes are flushed before they are recorded. So a process may die at any point, and the next one
//! goes on from the record. Whether the bytes are right, only the hash of the whole says.

use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::digest::FileHash;
use crate::error::HubError;
use crate::select::Wanted;
use crate::store::{read_small, sync_folder, write_small};

/// Most bytes of a record: a chunk's entry has at most 12.
const RECORD_BYTES: u64 = 32 << 20;
/// How much may be received before the record is brought up to date, in bytes and in time.
const UNRECORDED_BYTES: u64 = 32 << 20;
const UNRECORDED_TIME: Duration = Duration::from_millis(500);

/// What is on the disk of a file.
#[derive(Serialize, Deserialize)]
struct Record {
    path: String,
    size: u64,
    hash: FileHash,
    /// Bytes of a chunk; the last one may be shorter.
    chunk: u64,
    etag: Option<String>,
    /// How far each chunk is filled from its front.
    done: Vec<u64>,
    /// Whether the whole was hashed and found right.
    verified: bool,
}

/// A file that is being fetched.
pub(crate) struct Part {
    pub(crate) wanted: Wanted,
    partial: PathBuf,
    record_path: PathBuf,
    file: File,
    state: Mutex<State>,
}

struct State {
    record: Record,
    /// One connection fetches the file from front to end, since the host knows no ranges.
    whole: bool,
    /// Times that the content was wrong.
    mismatches: u32,
    /// Whether it was removed for that.
    discarded: bool,
    unrecorded: u64,
    recorded_at: Instant,
}

/// Who writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Writer {
    /// One of several, each at its chunk.
    Chunk,
    /// The only one.
    Whole,
}

/// What [`Part::verify`] found.
pub(crate) enum Verdict {
    Right,
    /// The hash of what is there, and how often it was wrong so far.
    Wrong(String, u32),
    Stopped,
}

impl Part {
    /// Opens what an earlier process left of this very content, or starts anew. `folder` holds all unfinished files.
    pub(crate) fn open(folder: &Path, wanted: Wanted, chunk: u64) -> Result<Self, HubError> {
        let whole_path = wanted.path.under(folder);
        let partial = whole_path.with_added_extension("partial");
        let record_path = partial.with_added_extension("json");
        let parent = partial.parent().unwrap_or(folder);
        fs::create_dir_all(parent).map_err(HubError::io("make the folder", parent))?;
        // A link would be followed to wherever it leads, and what is there written over.
        if partial.is_symlink() {
            fs::remove_file(&partial).map_err(HubError::io("remove the link", &partial))?;
        }
        let open =
            File::options().create(true).truncate(false).read(true).write(true).open(&partial);
        let file = open.map_err(HubError::io("open", &partial))?;
        let length = file.metadata().map_err(HubError::io("look at", &partial))?.len();
        // A record that cannot be understood is worth no more than none: the bytes come again.
        let old = read_small(&record_path, RECORD_BYTES)?
            .and_then(|text| serde_json::from_slice::<Record>(&text).ok())
            .filter(|old| length == wanted.size && old.is_of(&wanted));
        let record = old.unwrap_or_else(|| Record::new(&wanted, chunk));
        if length != wanted.size {
            // The record first, so that it never speaks of bytes that are cut off.
            write_small(&record_path, &record)?;
            let resized = file.set_len(0).and_then(|()| file.set_len(wanted.size));
            resized.map_err(HubError::io("resize", &partial))?;
        }
        let state = State {
            record,
            whole: false,
            mismatches: 0,
            discarded: false,
            unrecorded: 0,
            recorded_at: Instant::now(),
        };
        Ok(Self { wanted, partial, record_path, file, state: Mutex::new(state) })
    }

    /// Bytes of this very content that an earlier process left. Changes nothing.
    pub(crate) fn left_over(folder: &Path, wanted: &Wanted) -> u64 {
        let partial = wanted.path.under(folder).with_added_extension("partial");
        let length = fs::metadata(&partial).map(|meta| meta.len()).ok();
        let record = read_small(&partial.with_added_extension("json"), RECORD_BYTES).ok().flatten();
        let record = record.and_then(|text| serde_json::from_slice::<Record>(&text).ok());
        let record = record.filter(|record| length == Some(wanted.size) && record.is_of(wanted));
        record.map_or(0, |record| record.done.iter().sum())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A thread that panicked while it held the lock left whole values behind.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that are here.
    pub(crate) fn done(&self) -> u64 {
        self.state().record.done.iter().sum()
    }

    pub(crate) fn is_verified(&self) -> bool {
        self.state().record.verified
    }

    pub(crate) fn etag(&self) -> Option<String> {
        self.state().record.etag.clone()
    }

    pub(crate) fn note_etag(&self, etag: Option<String>) {
        if let Some(etag) = etag {
            self.state().record.etag = Some(etag);
        }
    }

    pub(crate) fn chunks(&self) -> usize {
        self.state().record.done.len()
    }

    /// What is missing of a chunk; empty if nothing is, or if the file is fetched as a whole.
    pub(crate) fn missing(&self, chunk: usize) -> Range<u64> {
        let state = self.state();
        let full = state.record.range(chunk);
        let start = if state.whole { full.end } else { full.start + state.record.done[chunk] };
        start..full.end
    }

    /// Makes the caller the only writer, from the file's front. `false` if somebody else is.
    pub(crate) fn claim_whole(&self) -> bool {
        let mut state = self.state();
        !std::mem::replace(&mut state.whole, true)
    }

    pub(crate) fn is_whole(&self) -> bool {
        self.state().whole
    }

    /// Forgets all bytes.
    pub(crate) fn restart(&self) -> Result<(), HubError> {
        let mut state = self.state();
        state.record.done.fill(0);
        state.record.verified = false;
        self.record(&mut state)
    }

    /// Puts bytes at their place. `false` if the writer has been overtaken and is to leave.
    pub(crate) fn write(
        &self,
        writer: Writer,
        offset: u64,
        bytes: &[u8],
    ) -> Result<bool, HubError> {
        let end = offset + bytes.len() as u64;
        assert!(end <= self.wanted.size, "the reader takes no more than the file has");
        let mut state = self.state();
        if state.whole != (writer == Writer::Whole) {
            return Ok(false);
        }
        self.file.write_all_at(bytes, offset).map_err(HubError::io("write", &self.partial))?;
        state.record.advance(offset..end);
        state.unrecorded += bytes.len() as u64;
        if state.unrecorded >= UNRECORDED_BYTES || state.recorded_at.elapsed() >= UNRECORDED_TIME {
            self.record(&mut state)?;
        }
        Ok(true)
    }

    /// Brings the record up to date.
    pub(crate) fn save(&self) -> Result<(), HubError> {
        self.record(&mut self.state())
    }

    fn record(&self, state: &mut State) -> Result<(), HubError> {
        if state.discarded {
            return Ok(());
        }
        self.file.sync_data().map_err(HubError::io("write", &self.partial))?;
        write_small(&self.record_path, &state.record)?;
        state.unrecorded = 0;
        state.recorded_at = Instant::now();
        Ok(())
    }

    /// Hashes the whole and records if it is right. Nobody may be writing.
    pub(crate) fn verify(&self, go_on: impl FnMut() -> bool) -> Result<Verdict, HubError> {
        self.save()?;
        let mut file = File::open(&self.partial).map_err(HubError::io("open", &self.partial))?;
        let found = self.wanted.hash.of(&mut file, self.wanted.size, go_on);
        let Some(found) = found.map_err(HubError::io("read", &self.partial))? else {
            return Ok(Verdict::Stopped);
        };
        let mut state = self.state();
        if found == self.wanted.hash {
            state.record.verified = true;
            self.record(&mut state)?;
            return Ok(Verdict::Right);
        }
        state.mismatches += 1;
        Ok(Verdict::Wrong(found.hex(), state.mismatches))
    }

    /// Moves the verified file to its name under `folder`, in place of what is there.
    pub(crate) fn install(&self, folder: &Path) -> Result<(), HubError> {
        assert!(self.is_verified(), "only what was hashed gets a final name");
        let to = self.wanted.path.under(folder);
        let parent = to.parent().unwrap_or(folder);
        fs::create_dir_all(parent).map_err(HubError::io("make the folder", parent))?;
        fs::rename(&self.partial, &to).map_err(HubError::io("move the file to", &to))?;
        sync_folder(parent);
        // Without its file it means nothing, and is not read.
        let _ = fs::remove_file(&self.record_path);
        Ok(())
    }

    /// Removes what was fetched; it was wrong.
    pub(crate) fn discard(&self) -> Result<(), HubError> {
        self.state().discarded = true;
        for path in [&self.record_path, &self.partial] {
            fs::remove_file(path).map_err(HubError::io("remove", path))?;
        }
        Ok(())
    }
}

impl Record {
    fn new(wanted: &Wanted, chunk: u64) -> Self {
        Self {
            path: wanted.path.as_str().to_owned(),
            size: wanted.size,
            hash: wanted.hash.clone(),
            chunk,
            etag: None,
            done: vec![0; wanted.size.div_ceil(chunk) as usize],
            verified: false,
        }
    }

    /// Whether it speaks of this content, and makes sense.
    fn is_of(&self, wanted: &Wanted) -> bool {
        self.size == wanted.size
            && self.hash == wanted.hash
            && self.chunk > 0
            && self.done.len() as u64 == self.size.div_ceil(self.chunk)
            && self.done.iter().enumerate().all(|(index, done)| {
                let range = self.range(index);
                *done <= range.end - range.start
            })
    }

    fn range(&self, chunk: usize) -> Range<u64> {
        let start = chunk as u64 * self.chunk;
        start..self.size.min(start + self.chunk)
    }

    /// Counts bytes that begin where the chunk's front is; of a whole file they may go over into the next chunks.
    fn advance(&mut self, bytes: Range<u64>) {
        let mut at = bytes.start;
        while at < bytes.end {
            let chunk = (at / self.chunk) as usize;
            let range = self.range(chunk);
            let end = range.end.min(bytes.end);
            self.done[chunk] = self.done[chunk].max(end - range.start);
            at = end;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::path::RepoPath;

    fn wanted(size: u64) -> Wanted {
        let path = RepoPath::try_from("a/b.bin".to_owned()).unwrap();
        Wanted { path, size, hash: FileHash::GitBlob([1; 20]) }
    }

    #[test]
    fn the_next_process_goes_on_from_the_record() {
        let folder = tempfile::tempdir().unwrap();
        let part = Part::open(folder.path(), wanted(25), 10).unwrap();
        assert_eq!((part.chunks(), part.done()), (3, 0));
        assert!(part.write(Writer::Chunk, 10, b"abcd").unwrap());
        part.note_etag(Some("tag".to_owned()));
        part.save().unwrap();
        assert!(part.write(Writer::Chunk, 20, b"zz").unwrap());
        drop(part);
        let part = Part::open(folder.path(), wanted(25), 7).unwrap();
        assert_eq!((part.missing(0), part.missing(1), part.missing(2)), (0..10, 14..20, 20..25));
        assert_eq!(part.etag().as_deref(), Some("tag"));
    }

    #[test]
    fn other_content_or_a_record_that_lies_starts_anew() {
        let folder = tempfile::tempdir().unwrap();
        let fill = || {
            let part = Part::open(folder.path(), wanted(25), 10).unwrap();
            part.write(Writer::Chunk, 0, b"abcd").unwrap();
            part.save().unwrap();
            part
        };
        let record = fill().record_path;
        let text = fs::read_to_string(&record).unwrap();
        for (from, to) in
            [("4,", "11,"), ("\"chunk\": 10", "\"chunk\": 0"), ("{", "["), ("  4,\n", "")]
        {
            assert!(text.contains(from), "{from}");
            fs::write(&record, text.replacen(from, to, 1)).unwrap();
            assert_eq!(Part::open(folder.path(), wanted(25), 10).unwrap().done(), 0, "{to}");
            fs::write(&record, &text).unwrap();
        }
        assert_eq!(Part::open(folder.path(), wanted(25), 10).unwrap().done(), 4);
        let other = Wanted { hash: FileHash::GitBlob([2; 20]), ..wanted(25) };
        assert_eq!(Part::open(folder.path(), other, 10).unwrap().done(), 0);
        fs::write(folder.path().join("a/b.bin.partial"), b"short").unwrap();
        assert_eq!(Part::open(folder.path(), wanted(25), 10).unwrap().done(), 0);
    }

    #[test]
    fn a_link_is_not_written_through() {
        let folder = tempfile::tempdir().unwrap();
        let elsewhere = folder.path().join("elsewhere");
        fs::write(&elsewhere, b"precious").unwrap();
        fs::create_dir_all(folder.path().join("a")).unwrap();
        let partial = folder.path().join("a/b.bin.partial");
        std::os::unix::fs::symlink(&elsewhere, &partial).unwrap();
        let part = Part::open(folder.path(), wanted(25), 10).unwrap();
        assert!(part.write(Writer::Chunk, 0, b"zz").unwrap());
        assert_eq!(fs::read(&elsewhere).unwrap(), b"precious");
        assert!(!partial.is_symlink() && fs::metadata(&partial).unwrap().len() == 25);
    }

    #[test]
    fn a_whole_writer_shuts_the_others_out() {
        let folder = tempfile::tempdir().unwrap();
        let part = Part::open(folder.path(), wanted(25), 10).unwrap();
        assert!(part.write(Writer::Chunk, 20, b"zz").unwrap());
        assert!(part.claim_whole() && !part.claim_whole());
        part.restart().unwrap();
        assert!(!part.write(Writer::Chunk, 22, b"z").unwrap());
        assert!(part.missing(0).is_empty());
        assert!(part.write(Writer::Whole, 0, &[7; 15]).unwrap());
        assert!(part.write(Writer::Whole, 15, &[7; 10]).unwrap());
        assert_eq!(part.done(), 25);
    }
}

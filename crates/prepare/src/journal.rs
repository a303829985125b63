//! What an interrupted packing leaves beside the unfinished pack: the checksums of the units that are in it.
//!
//! The first bytes say which pack of which source it is; then one checksum after the other, in the order of the file,
//! each written after its unit. A torn last one is ignored. Nothing in it is trusted without reading the unit again.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use crate::error::PrepareError;

const MAGIC: [u8; 8] = *b"SAKIAJ1\n";
/// Magic, and the fingerprint of source and layout.
const HEAD_BYTES: u64 = 16;

/// The journal of a target, which this process alone holds.
#[derive(Debug)]
pub(crate) struct Journal {
    file: File,
    path: PathBuf,
    /// Checksums of units from the first on.
    pub(crate) sums: Vec<u64>,
}

impl Journal {
    /// Whether what has the name of a journal is one, or the beginning of one. Nothing there is nobody else's either.
    pub(crate) fn is_ours(path: &Path) -> bool {
        let mut head = Vec::new();
        match File::open(path) {
            Ok(file) => {
                let read = file.take(MAGIC.len() as u64).read_to_end(&mut head);
                read.is_ok() && MAGIC.starts_with(&head)
            }
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        }
    }

    /// Opens or makes the journal, and locks it. It has no checksums unless they are of the pack with this fingerprint,
    /// and then `most` at most.
    ///
    /// # Errors
    /// [`PrepareError::Busy`] for `target` if another process has it; [`PrepareError::Io`].
    pub(crate) fn open(
        path: &Path,
        target: &Path,
        fingerprint: u64,
        most: u64,
    ) -> Result<Self, PrepareError> {
        let open =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
        let file = open.map_err(PrepareError::io("open", path))?;
        file.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => PrepareError::Busy { path: target.to_owned() },
            TryLockError::Error(source) => PrepareError::io("lock", path)(source),
        })?;
        let mut journal = Self { file, path: path.to_owned(), sums: Vec::new() };
        let fail = PrepareError::io("use", path);
        if journal.fingerprint().map_err(&fail)? == Some(fingerprint) {
            journal.read_sums(most).map_err(&fail)?;
        } else {
            journal.begin(fingerprint).map_err(&fail)?;
        }
        Ok(journal)
    }

    /// The fingerprint that it was begun with, if it is a journal.
    fn fingerprint(&mut self) -> io::Result<Option<u64>> {
        let mut head = [0; HEAD_BYTES as usize];
        if self.file.metadata()?.len() < HEAD_BYTES {
            return Ok(None);
        }
        self.file.seek(SeekFrom::Start(0))?;
        self.file.read_exact(&mut head)?;
        let (magic, fingerprint) = head.split_at(MAGIC.len());
        let fingerprint = fingerprint.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
        Ok(fingerprint.filter(|_| magic == MAGIC))
    }

    fn begin(&mut self, fingerprint: u64) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.seek(SeekFrom::Start(0))?;
        let mut head = MAGIC.to_vec();
        head.extend(fingerprint.to_le_bytes());
        self.file.write_all(&head)
    }

    fn read_sums(&mut self, most: u64) -> io::Result<()> {
        let n = (self.file.metadata()?.len() - HEAD_BYTES) / 8;
        let mut bytes = vec![0; 8 * n.min(most) as usize];
        self.file.seek(SeekFrom::Start(HEAD_BYTES))?;
        self.file.read_exact(&mut bytes)?;
        self.sums = bytes.as_chunks::<8>().0.iter().map(|sum| u64::from_le_bytes(*sum)).collect();
        Ok(())
    }

    /// Keeps the first `n` checksums; the next one goes behind them.
    ///
    /// # Errors
    /// [`PrepareError::Io`].
    pub(crate) fn keep(&mut self, n: usize) -> Result<(), PrepareError> {
        self.sums.truncate(n);
        let end = HEAD_BYTES + 8 * n as u64;
        let cut = self.file.set_len(end).and_then(|()| self.file.seek(SeekFrom::Start(end)));
        cut.map(drop).map_err(PrepareError::io("shorten", &self.path))
    }

    /// Notes that a unit is in the file.
    ///
    /// # Errors
    /// [`PrepareError::Io`].
    pub(crate) fn add(&mut self, sum: u64) -> Result<(), PrepareError> {
        self.sums.push(sum);
        let written = self.file.write_all(&sum.to_le_bytes());
        written.map_err(PrepareError::io("write to", &self.path))
    }

    /// Removes it, once the pack has its name.
    pub(crate) fn remove(self) {
        // What stays is ignored by the next packing, which knows its own fingerprint and finds no unfinished pack.
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_come_back_for_the_same_pack_only() {
        let folder = tempfile::tempdir().unwrap();
        let (path, target) = (folder.path().join("journal"), folder.path().join("x.sakia"));
        let open = |fingerprint, most| Journal::open(&path, &target, fingerprint, most).unwrap();
        let mut journal = open(7, 9);
        assert_eq!(journal.sums, [] as [u64; 0]);
        for sum in [1, 2, 3] {
            journal.add(sum).unwrap();
        }
        let busy = Journal::open(&path, &target, 7, 9).unwrap_err();
        assert!(matches!(busy, PrepareError::Busy { .. }), "{busy}");
        journal.file.write_all(&[1, 2, 3]).unwrap();
        drop(journal);
        let mut journal = open(7, 9);
        assert_eq!(journal.sums, [1, 2, 3], "a torn checksum is none");
        journal.keep(1).unwrap();
        journal.add(5).unwrap();
        drop(journal);
        assert_eq!(open(7, 9).sums, [1, 5]);
        assert_eq!(open(7, 1).sums, [1]);
        assert_eq!(open(8, 9).sums, [] as [u64; 0]);
        assert_eq!(open(7, 9).sums, [] as [u64; 0]);
    }
}

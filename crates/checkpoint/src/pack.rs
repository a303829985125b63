//! The project's own container: every expert one run of bytes, laid out as a slot is.
//!
//! One file: a header of fixed size, an index, a table of checksums, then resident tensors, expert records layer by
//! layer, rows of the n-gram table. `docs/pack-format.md` has every byte. What the container it was made from says
//! beyond GGUF (names in the files, what a loader does to values) is in the index; scales that lay apart from their
//! codes are between them already, as memory has them.
//!
//! `header` has the few numbers in front, `index` the rest of what a reader needs, `layout` decides where things go and
//! lists them as [`Unit`]s, each with a checksum. Reading and writing of weights is done elsewhere: nothing here does.

mod header;
mod index;
mod layout;

use std::fs::File;
use std::hash::Hasher;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use twox_hash::XxHash3_64;

use self::header::Header;
pub use self::header::{HEADER_BYTES, MAGIC, VERSION};
pub use self::layout::{Contents, Layout, RecordTable, Unit};
use crate::Checkpoint;
use crate::directory::{FileEntry, TensorDirectory};
use crate::error::CheckpointError;
use crate::limits::Budget;
use crate::metadata::Vocabulary;
use crate::source::{FileSource, Source};

/// What every record, and every section of the file, is aligned to: the largest page of the systems that it is read on.
pub const RECORD_ALIGN: u64 = 16 << 10;
/// What resident tensors, and matrices inside a record, are aligned to: a cache line.
pub const TENSOR_ALIGN: u64 = 64;

/// Bytes read at a time to check an index.
const WINDOW: usize = 1 << 15;

/// A checksum over bytes as they come: XXH3, 64 bits, without a seed.
#[derive(Clone, Default)]
pub struct Checksum(XxHash3_64);

impl Checksum {
    /// Of no bytes yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Of these bytes.
    pub fn of(bytes: &[u8]) -> u64 {
        XxHash3_64::oneshot(bytes)
    }

    /// Takes the bytes that follow.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    /// The checksum of all bytes so far.
    pub fn value(&self) -> u64 {
        self.0.finish()
    }
}

impl std::fmt::Debug for Checksum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Checksum({:#018x})", self.value())
    }
}

/// Whether a path is that of a regular file that begins as packs do. What cannot be read is none: whoever opens it says
/// why.
pub fn is_pack(path: &Path) -> bool {
    // Opening a pipe would block, so the kind is looked up first.
    let regular = std::fs::metadata(path).is_ok_and(|metadata| metadata.is_file());
    let mut magic = [0; MAGIC.len()];
    regular
        && File::open(path).and_then(|file| file.read_exact_at(&mut magic, 0)).is_ok()
        && magic == MAGIC
}

/// Opens a pack; its layout says where its units lie.
///
/// # Errors
/// [`CheckpointError`] of class `format`, `unsupported`, `limit`, `missing` or `io`.
pub fn open(path: &Path, vocabulary: Vocabulary) -> Result<(Checkpoint, Layout), CheckpointError> {
    parse(path, &FileSource::open(path)?, vocabulary)
}

/// Reads a pack from any source; the name serves messages.
///
/// # Errors
/// As [`open`].
///
/// # Panics
/// Never: an index whose names are not in order is refused.
pub fn parse(
    path: &Path,
    source: &dyn Source,
    vocabulary: Vocabulary,
) -> Result<(Checkpoint, Layout), CheckpointError> {
    let header = Header::read(path, source)?;
    let section = Section { source, start: header.index.start, len: header.index.len };
    check_index(path, &section, header.index_sum)?;
    let mut budget = Budget::new();
    let (metadata, layout) = index::read(path, &section, &header, (&mut budget, vocabulary))?;
    let tensors = layout.tensors().cloned().collect();
    let directory = TensorDirectory::new(tensors).expect("the index is in order of names");
    let files = vec![FileEntry { path: path.to_owned(), bytes: source.len() }];
    let warnings = crate::vocabulary::warning(&metadata).into_iter().collect();
    Ok((Checkpoint { files, metadata, directory, warnings }, layout))
}

/// Reads the checksums of a pack, in the order of [`Layout::units`].
///
/// # Errors
/// Class `format` if the table does not match its own checksum; `io`.
pub fn read_sums(
    path: &Path,
    source: &dyn Source,
    layout: &Layout,
) -> Result<Vec<u64>, CheckpointError> {
    let header = Header::read(path, source)?;
    let mut bytes = vec![0; layout.sums_bytes() as usize];
    let outcome = source.read_at(header.sums.start, &mut bytes);
    outcome.map_err(|source| CheckpointError::Io { file: path.to_owned(), source })?;
    let found = Checksum::of(&bytes);
    if found != header.sums_sum {
        return Err(damaged(path, "the table of checksums", found, header.sums_sum));
    }
    Ok(bytes.as_chunks::<8>().0.iter().map(|sum| u64::from_le_bytes(*sum)).collect())
}

/// Opens a regular file as a source of bytes.
///
/// # Errors
/// Class `missing` or `io`.
pub fn source(path: &Path) -> Result<impl Source, CheckpointError> {
    FileSource::open(path)
}

fn check_index(path: &Path, section: &Section<'_>, needed: u64) -> Result<(), CheckpointError> {
    let (mut sum, mut at) = (Checksum::new(), 0);
    let mut window = vec![0; WINDOW];
    while at < section.len {
        let bytes = &mut window[..(section.len - at).min(WINDOW as u64) as usize];
        let outcome = section.read_at(at, bytes);
        outcome.map_err(|source| CheckpointError::Io { file: path.to_owned(), source })?;
        sum.update(bytes);
        at += bytes.len() as u64;
    }
    if sum.value() == needed {
        Ok(())
    } else {
        Err(damaged(path, "the index", sum.value(), needed))
    }
}

fn damaged(path: &Path, what: &str, found: u64, needed: u64) -> CheckpointError {
    CheckpointError::Format {
        file: path.to_owned(),
        what: what.to_owned(),
        found: format!("checksum {found:#018x}"),
        needed: format!("{needed:#018x}"),
    }
}

/// A part of a source, as a source.
struct Section<'a> {
    source: &'a dyn Source,
    start: u64,
    len: u64,
}

impl Source for Section<'_> {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let end = offset.checked_add(out.len() as u64);
        if end.is_none_or(|end| end > self.len) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.source.read_at(self.start + offset, out)
    }
}

//! GGUF, versions 2 and 3, in one file or in parts.
//!
//! The format: magic, version, counts; key-value pairs; tensor descriptions; padding; data. A window of a few KiB
//! walks the header, so nothing is allocated because a count in the file says so: every count is first held against
//! the bytes that follow it, a limit, and the memory that is left for headers.
//!
//! `values` reads the key-value pairs, `descriptions` the tensors, `split` finds the parts of a model; here they are put
//! together.

mod descriptions;
mod split;
pub(crate) mod values;

use std::path::{Path, PathBuf};

use units::FileIndex;

use crate::cursor::Cursor;
use crate::directory::{FileEntry, TensorDirectory, TensorInfo};
use crate::error::{CheckpointError, printable};
use crate::limits::{self, Budget};
use crate::metadata::{Metadata, Vocabulary};
use crate::source::{FileSource, Source};
use crate::{Checkpoint, vocabulary};

const MAGIC: [u8; 4] = *b"GGUF";

/// Fewest bytes of a tensor's description: name length, dimensions, one dimension, type, offset.
const DESCRIPTION_BYTES: u64 = 8 + 4 + 8 + 4 + 8;
/// Fewest bytes of a key-value pair: key length, type, value.
const PAIR_BYTES: u64 = 8 + 4 + 1;

pub(crate) fn open(path: &Path, vocabulary: Vocabulary) -> Result<Checkpoint, CheckpointError> {
    let Some(name) = split::Name::of(path) else {
        let source = FileSource::open(path)?;
        return parse(&[(path, &source)], vocabulary);
    };
    name.check(path)?;
    let mut assembly = Assembly::new(name.parts, vocabulary);
    for index in 0..name.parts {
        let path = name.part(index);
        let source = FileSource::open(&path)?;
        assembly.add(&path, &source)?;
    }
    assembly.finish()
}

/// Reads a model whose parts are `sources`, in order.
pub(crate) fn parse(
    sources: &[(&Path, &dyn Source)],
    vocabulary: Vocabulary,
) -> Result<Checkpoint, CheckpointError> {
    let mut assembly = Assembly::new(sources.len() as u64, vocabulary);
    for (path, source) in sources {
        assembly.add(path, *source)?;
    }
    assembly.finish()
}

/// A checkpoint under construction, part by part.
struct Assembly {
    parts: u64,
    vocabulary: Vocabulary,
    budget: Budget,
    files: Vec<FileEntry>,
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    warnings: Vec<String>,
}

impl Assembly {
    const fn new(parts: u64, vocabulary: Vocabulary) -> Self {
        Self {
            parts,
            vocabulary,
            budget: Budget::new(),
            files: Vec::new(),
            metadata: Metadata::new(),
            tensors: Vec::new(),
            warnings: Vec::new(),
        }
    }

    fn add(&mut self, path: &Path, source: &dyn Source) -> Result<(), CheckpointError> {
        let index = self.files.len() as u64;
        let mut cursor = Cursor::new(path, source, &mut self.budget);
        let (n_tensors, n_keys) = counts(&mut cursor, self.tensors.len() as u64)?;
        let mark = cursor.budget.mark();
        // Later parts repeat a few keys; what they say about the vocabulary is not used.
        let keep = if index == 0 { self.vocabulary } else { Vocabulary::Skip };
        let metadata = values::read(&mut cursor, n_keys, keep)?;
        split::check_part(path, &metadata, index, self.parts)?;
        let alignment = descriptions::alignment(&cursor, &metadata)?;
        if index == 0 {
            self.metadata = metadata;
        } else {
            drop(metadata);
            cursor.budget.restore(mark);
        }
        let file = FileIndex(index as u32);
        let found = descriptions::read(&mut cursor, n_tensors, alignment, file)?;
        self.warnings.extend(found.warning);
        self.tensors.extend(found.tensors);
        self.files.push(FileEntry { path: path.to_owned(), bytes: source.len() });
        Ok(())
    }

    fn finish(self) -> Result<Checkpoint, CheckpointError> {
        let first = self.files.first().map_or_else(PathBuf::new, |file| file.path.clone());
        split::check_total(&first, &self.metadata, self.tensors.len() as u64)?;
        let directory = TensorDirectory::new(self.tensors).map_err(|same| {
            let (tensor, again) = *same;
            let [file, other] = [&tensor, &again].map(|t| &self.files[t.file.get()].path);
            CheckpointError::Format {
                file: other.clone(),
                what: format!("tensor `{}`", printable(&again.name)),
                found: format!("a second description; the first is in {}", file.display()),
                needed: "every name once".to_owned(),
            }
        })?;
        let mut warnings = self.warnings;
        warnings.extend(vocabulary::warning(&self.metadata));
        Ok(Checkpoint { files: self.files, metadata: self.metadata, directory, warnings })
    }
}

/// Checks magic and version; the numbers of tensors and of key-value pairs.
fn counts(cursor: &mut Cursor<'_>, tensors_before: u64) -> Result<(u64, u64), CheckpointError> {
    let magic: [u8; 4] = cursor.bytes(format_args!("the magic number"))?;
    if magic != MAGIC {
        let found = format!("bytes {}", magic.escape_ascii());
        return Err(cursor.format(format_args!("the magic number"), found, "GGUF"));
    }
    let version = u32::from_le_bytes(cursor.bytes(format_args!("the version"))?);
    if !(2..=3).contains(&version) {
        let found = match version.swap_bytes() {
            1..=3 => format!("version {} in big-endian order", version.swap_bytes()),
            _ => format!("version {version}"),
        };
        let supported = "versions 2 and 3 in little-endian order";
        return Err(cursor.unsupported(format_args!("the GGUF version"), found, supported));
    }
    let left = limits::TENSORS - tensors_before;
    let n_tensors = cursor.count(format_args!("the number of tensors"), DESCRIPTION_BYTES, left)?;
    let n_keys = cursor.count(format_args!("the number of keys"), PAIR_BYTES, limits::KEYS)?;
    Ok((n_tensors, n_keys))
}

//! GGUF, versions 2 and 3, in one file or in parts.
//!
//! The format: magic, version, counts; key-value pairs; tensor descriptions; padding; data. A reader window of a
//! few KiB walks the header, so nothing is allocated because a count in the file says so: every count is first held
//! against the bytes that are left.

use std::path::{Path, PathBuf};

use quant::BlockType;
use units::FileIndex;

use crate::directory::{FileEntry, TensorDirectory, TensorInfo};
use crate::error::CheckpointError;
use crate::metadata::{MetaArray, MetaValue, Metadata, StringArray};
use crate::source::{FileSource, Source};
use crate::{Checkpoint, vocabulary};

const MAGIC: [u8; 4] = *b"GGUF";
const DEFAULT_ALIGNMENT: u64 = 32;
const MAX_ALIGNMENT: u64 = 1 << 20;
const MAX_KEYS: u64 = 1 << 16;
const MAX_TENSORS: u64 = 1 << 17;
const MAX_STRING_BYTES: u64 = 1 << 24;
const MAX_KEY_BYTES: u64 = 1 << 16;
const MAX_NAME_BYTES: u64 = 1 << 10;
const MAX_ARRAY_LEN: u64 = 1 << 22;
const MAX_STRINGS_BYTES: usize = 1 << 25;
const MAX_DIMS: u32 = 4;
const MAX_PARTS: u64 = 1 << 10;
const WINDOW: usize = 1 << 14;

/// One parsed file.
struct Part {
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    warnings: Vec<String>,
}

pub(crate) fn parse_single(
    name: &Path,
    source: &dyn Source,
) -> Result<Checkpoint, CheckpointError> {
    let part = Header::new(name, source).part(FileIndex(0))?;
    let parts = part.metadata.u64("split.count").unwrap_or(0);
    if parts > 1 {
        return Err(CheckpointError::MissingFile {
            file: name.to_owned(),
            needed: format!("it is one of {parts} parts and its name does not tell the others"),
        });
    }
    let mut checkpoint = Checkpoint {
        files: vec![FileEntry { path: name.to_owned(), bytes: source.len() }],
        metadata: part.metadata,
        directory: TensorDirectory::default(),
        warnings: part.warnings,
    };
    add_tensors(&mut checkpoint, part.tensors)?;
    vocabulary::warn(&mut checkpoint);
    Ok(checkpoint)
}

pub(crate) fn open(path: &Path) -> Result<Checkpoint, CheckpointError> {
    match SplitName::of(path) {
        None => parse_single(path, &FileSource::open(path)?),
        Some(name) => open_split(path, &name),
    }
}

/// `STEM-00002-of-00003.gguf`.
struct SplitName {
    folder: PathBuf,
    stem: String,
    count: u64,
}

impl SplitName {
    fn of(path: &Path) -> Option<Self> {
        let name = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
        let (rest, count) = name.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let digits = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
        if !digits(number) || !digits(count) {
            return None;
        }
        let folder = path.parent().map(Path::to_owned).unwrap_or_default();
        Some(Self { folder, stem: stem.to_owned(), count: count.parse().ok()? })
    }

    fn part(&self, index: u64) -> PathBuf {
        self.folder.join(format!("{}-{:05}-of-{:05}.gguf", self.stem, index + 1, self.count))
    }
}

fn open_split(named: &Path, name: &SplitName) -> Result<Checkpoint, CheckpointError> {
    if name.count == 0 || name.count > MAX_PARTS {
        let what = "parts in the file name".to_owned();
        return Err(CheckpointError::Limit {
            file: named.to_owned(),
            what,
            found: name.count,
            limit: MAX_PARTS,
        });
    }
    let mut whole: Option<Checkpoint> = None;
    for index in 0..name.count {
        let path = name.part(index);
        if !path.try_exists().unwrap_or(true) {
            let needed = format!("it is part {} of {} of {}", index + 1, name.count, name.stem);
            return Err(CheckpointError::MissingFile { file: path, needed });
        }
        let source = FileSource::open(&path)?;
        let part = Header::new(&path, &source).part(FileIndex(index as u32))?;
        check_part(&path, &part.metadata, index, name.count)?;
        let entry = FileEntry { path, bytes: source.len() };
        let checkpoint = whole.get_or_insert_with(|| Checkpoint {
            files: Vec::new(),
            metadata: part.metadata,
            directory: TensorDirectory::default(),
            warnings: Vec::new(),
        });
        checkpoint.files.push(entry);
        checkpoint.warnings.extend(part.warnings);
        add_tensors(checkpoint, part.tensors)?;
    }
    let mut checkpoint = whole.expect("a split model has at least one part");
    check_total(&checkpoint)?;
    vocabulary::warn(&mut checkpoint);
    Ok(checkpoint)
}

fn check_part(
    path: &Path,
    metadata: &Metadata,
    index: u64,
    count: u64,
) -> Result<(), CheckpointError> {
    for (key, needed) in [("split.no", index), ("split.count", count)] {
        let found = metadata.u64(key);
        // A lone part may lack the keys; a part of many must carry them.
        if found != Some(needed) && (count > 1 || found.is_some()) {
            return Err(CheckpointError::Format {
                file: path.to_owned(),
                what: key.to_owned(),
                found: found.map_or_else(|| "nothing".to_owned(), |n| n.to_string()),
                needed: format!("{needed}, as in the file's name"),
            });
        }
    }
    Ok(())
}

fn check_total(checkpoint: &Checkpoint) -> Result<(), CheckpointError> {
    let Some(total) = checkpoint.metadata.u64("split.tensors.count") else { return Ok(()) };
    let found = checkpoint.directory.len() as u64;
    if found == total {
        return Ok(());
    }
    Err(CheckpointError::Format {
        file: checkpoint.files[0].path.clone(),
        what: "tensors in all parts".to_owned(),
        found: found.to_string(),
        needed: format!("{total}, by split.tensors.count"),
    })
}

fn add_tensors(
    checkpoint: &mut Checkpoint,
    tensors: Vec<TensorInfo>,
) -> Result<(), CheckpointError> {
    for tensor in tensors {
        let file = tensor.file;
        if let Some(older) = checkpoint.directory.insert(tensor) {
            return Err(CheckpointError::Format {
                file: checkpoint.files[file.get()].path.clone(),
                what: format!("tensor `{}`", older.name),
                found: "a second description".to_owned(),
                needed: "every name once".to_owned(),
            });
        }
    }
    Ok(())
}

/// A cursor over a file's header.
struct Header<'a> {
    path: &'a Path,
    source: &'a dyn Source,
    position: u64,
    window: Vec<u8>,
    window_start: u64,
}

impl<'a> Header<'a> {
    fn new(path: &'a Path, source: &'a dyn Source) -> Self {
        Self { path, source, position: 0, window: Vec::new(), window_start: 0 }
    }

    fn part(mut self, file: FileIndex) -> Result<Part, CheckpointError> {
        let magic: [u8; 4] = self.bytes("the magic number")?;
        if magic != MAGIC {
            return Err(self.format("the magic number", format!("{magic:?}"), "`GGUF`"));
        }
        let version = u32::from_le_bytes(self.bytes("the version")?);
        if !(2..=3).contains(&version) {
            return Err(self.unsupported(
                "GGUF version",
                version.to_string(),
                "2 and 3, little-endian",
            ));
        }
        let n_tensors = self.count("the number of tensors", 4 + 8 + 4 + 8, MAX_TENSORS)?;
        let n_keys = self.count("the number of keys", 8 + 4 + 1, MAX_KEYS)?;
        let mut metadata = Metadata::default();
        for _ in 0..n_keys {
            let key = self.string("a key", MAX_KEY_BYTES)?;
            let value = self.value(&key)?;
            if metadata.insert(key.clone(), value).is_some() {
                return Err(self.format(
                    &format!("key `{key}`"),
                    "a second value".to_owned(),
                    "every key once",
                ));
            }
        }
        let alignment = self.alignment(&metadata)?;
        let mut tensors = Vec::new();
        for _ in 0..n_tensors {
            tensors.push(self.tensor(file, alignment)?);
        }
        let warnings = self.place(&mut tensors, alignment)?;
        Ok(Part { metadata, tensors, warnings })
    }

    fn alignment(&self, metadata: &Metadata) -> Result<u64, CheckpointError> {
        let Some(value) = metadata.get("general.alignment") else { return Ok(DEFAULT_ALIGNMENT) };
        let number = metadata.u64("general.alignment");
        match number {
            Some(n) if n.is_power_of_two() && n <= MAX_ALIGNMENT => Ok(n),
            _ => {
                let found = number.map_or_else(|| value.kind().to_owned(), |n| n.to_string());
                Err(self.format("general.alignment", found, "a power of two up to 1 MiB"))
            }
        }
    }

    /// A tensor with its offset still relative to the data section.
    fn tensor(&mut self, file: FileIndex, alignment: u64) -> Result<TensorInfo, CheckpointError> {
        let name = self.string("a tensor name", MAX_NAME_BYTES)?;
        let what = format!("tensor `{name}`");
        let n_dims = u32::from_le_bytes(self.bytes("a number of dimensions")?);
        if n_dims == 0 || n_dims > MAX_DIMS {
            return Err(self.format(&what, format!("{n_dims} dimensions"), "1 to 4"));
        }
        let mut shape = Vec::with_capacity(n_dims as usize);
        for _ in 0..n_dims {
            shape.push(u64::from_le_bytes(self.bytes("a dimension")?));
        }
        let id = u32::from_le_bytes(self.bytes("a tensor type")?);
        let Some(block_type) = BlockType::from_ggml(id) else {
            let names = BlockType::ALL.map(BlockType::name).join(", ");
            return Err(self.unsupported(&format!("{what}: type number"), id.to_string(), &names));
        };
        // The file lists the contiguous dimension first.
        let row = shape[0];
        let row_bytes = usize::try_from(row).ok().and_then(|row| block_type.row_bytes(row));
        let (Some(row_bytes), true) = (row_bytes, row > 0) else {
            let needed =
                format!("a positive multiple of {} for {block_type}", block_type.block_len());
            return Err(self.format(&what, format!("rows of {row} values"), &needed));
        };
        let bytes = shape[1..].iter().try_fold(row_bytes as u64, |bytes, n| match n {
            0 => None,
            n => bytes.checked_mul(*n),
        });
        let Some(bytes) = bytes.filter(|bytes| *bytes <= self.source.len()) else {
            return Err(self.format(
                &what,
                format!("dimensions {shape:?}"),
                "positive ones whose bytes fit the file",
            ));
        };
        let offset = u64::from_le_bytes(self.bytes("a tensor offset")?);
        if !offset.is_multiple_of(alignment) {
            return Err(self.format(
                &what,
                format!("offset {offset}"),
                &format!("a multiple of {alignment}"),
            ));
        }
        shape.reverse();
        Ok(TensorInfo { name, block_type, shape, file, offset, bytes })
    }

    /// Makes offsets absolute and checks that tensors lie inside the file and apart from each other.
    fn place(
        &self,
        tensors: &mut [TensorInfo],
        alignment: u64,
    ) -> Result<Vec<String>, CheckpointError> {
        let start = self.position.next_multiple_of(alignment);
        let size = self.source.len();
        let mut end_of_data = start;
        for tensor in tensors.iter_mut() {
            let end =
                start.checked_add(tensor.offset).and_then(|begin| begin.checked_add(tensor.bytes));
            match end {
                Some(end) if end <= size => {
                    tensor.offset += start;
                    end_of_data = end_of_data.max(end);
                }
                _ => {
                    let found = format!("offset {} and {} bytes", tensor.offset, tensor.bytes);
                    let needed = format!("an end inside the file's {size} bytes");
                    return Err(self.format(&format!("tensor `{}`", tensor.name), found, &needed));
                }
            }
        }
        let mut order: Vec<&TensorInfo> = tensors.iter().collect();
        order.sort_by_key(|tensor| tensor.offset);
        for pair in order.windows(2) {
            if pair[0].offset + pair[0].bytes > pair[1].offset {
                let what = format!("tensor `{}`", pair[1].name);
                let found = format!("bytes that `{}` also holds", pair[0].name);
                return Err(self.format(&what, found, "bytes of its own"));
            }
        }
        let extra = size - end_of_data.min(size);
        let trailing = (!tensors.is_empty() && extra >= alignment).then(|| {
            format!("{}: {extra} bytes after the last tensor are ignored", self.path.display())
        });
        Ok(trailing.into_iter().collect())
    }

    fn value(&mut self, key: &str) -> Result<MetaValue, CheckpointError> {
        let kind = u32::from_le_bytes(self.bytes("a value type")?);
        Ok(match kind {
            8 => {
                MetaValue::String(self.string(&format!("the value of `{key}`"), MAX_STRING_BYTES)?)
            }
            9 => MetaValue::Array(self.array(key)?),
            kind => self.scalar(key, kind)?,
        })
    }

    fn scalar(&mut self, key: &str, kind: u32) -> Result<MetaValue, CheckpointError> {
        let what = "a value";
        Ok(match kind {
            0 => MetaValue::U64(u8::from_le_bytes(self.bytes(what)?).into()),
            1 => MetaValue::I64(i8::from_le_bytes(self.bytes(what)?).into()),
            2 => MetaValue::U64(u16::from_le_bytes(self.bytes(what)?).into()),
            3 => MetaValue::I64(i16::from_le_bytes(self.bytes(what)?).into()),
            4 => MetaValue::U64(u32::from_le_bytes(self.bytes(what)?).into()),
            5 => MetaValue::I64(i32::from_le_bytes(self.bytes(what)?).into()),
            6 => MetaValue::F64(f32::from_le_bytes(self.bytes(what)?).into()),
            7 => match self.bytes::<1>(what)? {
                [0] => MetaValue::Bool(false),
                [1] => MetaValue::Bool(true),
                [other] => {
                    return Err(self.format(
                        &format!("boolean `{key}`"),
                        other.to_string(),
                        "0 or 1",
                    ));
                }
            },
            10 => MetaValue::U64(u64::from_le_bytes(self.bytes(what)?)),
            11 => MetaValue::I64(i64::from_le_bytes(self.bytes(what)?)),
            12 => MetaValue::F64(f64::from_le_bytes(self.bytes(what)?)),
            other => {
                return Err(self.format(
                    &format!("the type of `{key}`"),
                    other.to_string(),
                    "0 to 12",
                ));
            }
        })
    }

    fn array(&mut self, key: &str) -> Result<MetaArray, CheckpointError> {
        let kind = u32::from_le_bytes(self.bytes("an array type")?);
        let element_bytes = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            9 => {
                return Err(self.format(
                    &format!("array `{key}`"),
                    "arrays inside".to_owned(),
                    "plain values or strings",
                ));
            }
            other => {
                return Err(self.format(
                    &format!("the type of `{key}`"),
                    other.to_string(),
                    "0 to 12",
                ));
            }
        };
        let count = self.count(&format!("the length of `{key}`"), element_bytes, MAX_ARRAY_LEN)?;
        if kind == 8 {
            return self.strings(key, count).map(MetaArray::Strings);
        }
        let mut values = Scalars::new(kind);
        for _ in 0..count {
            let value = self.scalar(key, kind)?;
            values.push(&value);
        }
        Ok(values.0)
    }

    fn strings(&mut self, key: &str, count: u64) -> Result<StringArray, CheckpointError> {
        let mut strings = StringArray::default();
        let what = format!("a string of `{key}`");
        for _ in 0..count {
            let text = self.string(&what, MAX_STRING_BYTES)?;
            if !strings.push(&text) || strings.text_bytes() > MAX_STRINGS_BYTES {
                return Err(CheckpointError::Limit {
                    file: self.path.to_owned(),
                    what: format!("bytes of strings in `{key}`"),
                    found: strings.text_bytes() as u64,
                    limit: MAX_STRINGS_BYTES as u64,
                });
            }
        }
        Ok(strings)
    }

    fn string(&mut self, what: &str, limit: u64) -> Result<String, CheckpointError> {
        let len = self.count(&format!("the length of {what}"), 1, limit)?;
        let mut bytes = vec![0; len as usize];
        self.fill(what, &mut bytes)?;
        String::from_utf8(bytes).map_err(|error| {
            let found = format!(
                "{:?}",
                String::from_utf8_lossy(error.as_bytes()).chars().take(40).collect::<String>()
            );
            self.format(what, found, "UTF-8")
        })
    }

    /// A count of things that take at least `element_bytes` each, held against what is left of the file.
    fn count(
        &mut self,
        what: &str,
        element_bytes: u64,
        limit: u64,
    ) -> Result<u64, CheckpointError> {
        let count = u64::from_le_bytes(self.bytes(what)?);
        let left = self.source.len() - self.position;
        if count.checked_mul(element_bytes).is_none_or(|bytes| bytes > left) {
            return Err(self.format(
                what,
                count.to_string(),
                &format!("what fits in the {left} bytes that follow"),
            ));
        }
        if count > limit {
            let file = self.path.to_owned();
            return Err(CheckpointError::Limit {
                file,
                what: what.to_owned(),
                found: count,
                limit,
            });
        }
        Ok(count)
    }

    fn bytes<const N: usize>(&mut self, what: &str) -> Result<[u8; N], CheckpointError> {
        let mut bytes = [0; N];
        self.fill(what, &mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, what: &str, out: &mut [u8]) -> Result<(), CheckpointError> {
        let left = self.source.len() - self.position;
        if out.len() as u64 > left {
            let found = format!("the end of the file after {left} bytes");
            return Err(self.format(what, found, &format!("{} bytes", out.len())));
        }
        let mut done = 0;
        while done < out.len() {
            let inside = self
                .position
                .checked_sub(self.window_start)
                .filter(|at| *at < self.window.len() as u64);
            let Some(at) = inside else {
                self.refill()?;
                continue;
            };
            let available = &self.window[at as usize..];
            let take = available.len().min(out.len() - done);
            out[done..done + take].copy_from_slice(&available[..take]);
            done += take;
            self.position += take as u64;
        }
        Ok(())
    }

    fn refill(&mut self) -> Result<(), CheckpointError> {
        let len = (self.source.len() - self.position).min(WINDOW as u64) as usize;
        self.window.resize(len, 0);
        self.window_start = self.position;
        let outcome = self.source.read_at(self.position, &mut self.window);
        outcome.map_err(|source| CheckpointError::Io { file: self.path.to_owned(), source })
    }

    fn format(&self, what: &str, found: String, needed: &str) -> CheckpointError {
        CheckpointError::Format {
            file: self.path.to_owned(),
            what: what.to_owned(),
            found,
            needed: needed.to_owned(),
        }
    }

    fn unsupported(&self, what: &str, found: String, supported: &str) -> CheckpointError {
        CheckpointError::Unsupported {
            file: self.path.to_owned(),
            what: what.to_owned(),
            found,
            supported: supported.to_owned(),
        }
    }
}

/// An array under construction, of the type that its elements turn out to have.
struct Scalars(MetaArray);

impl Scalars {
    const fn new(kind: u32) -> Self {
        Self(match kind {
            1 | 3 | 5 | 11 => MetaArray::I64s(Vec::new()),
            6 | 12 => MetaArray::F64s(Vec::new()),
            7 => MetaArray::Bools(Vec::new()),
            _ => MetaArray::U64s(Vec::new()),
        })
    }

    fn push(&mut self, value: &MetaValue) {
        match (&mut self.0, value) {
            (MetaArray::U64s(values), MetaValue::U64(value)) => values.push(*value),
            (MetaArray::I64s(values), MetaValue::I64(value)) => values.push(*value),
            (MetaArray::F64s(values), MetaValue::F64(value)) => values.push(*value),
            (MetaArray::Bools(values), MetaValue::Bool(value)) => values.push(*value),
            (array, value) => unreachable!("{} in {array:?}", value.kind()),
        }
    }
}

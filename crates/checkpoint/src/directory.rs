//! Where every tensor lies.

use std::ops::Range;
use std::path::PathBuf;

use quant::BlockType;
use units::FileIndex;

use crate::pieces::{Blocks, FilePlace, Piece, Tiles};

/// A file of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileEntry {
    /// Its path.
    pub path: PathBuf,
    /// Its size when it was opened.
    pub bytes: u64,
}

/// A tensor: what it is and which bytes hold it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name in the naming that all containers share, which is GGUF's.
    pub name: String,
    /// Storage of its values.
    pub block_type: BlockType,
    /// Row-major: `[n]`, `[out, in]` or `[experts, out, in]`.
    pub shape: Vec<u64>,
    /// The file that holds it, or its first part.
    pub file: FileIndex,
    /// Byte offset in that file.
    pub offset: u64,
    /// Its bytes in memory.
    pub bytes: u64,
    /// What a container that names and stores things differently says about it; boxed, since most have none.
    pub foreign: Option<Box<Foreign>>,
}

/// A tensor that is not one run of bytes under its own name.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Foreign {
    /// Its name in the file; of the first part if it has several.
    pub spelling: String,
    /// What its values are turned into.
    pub map: ValueMap,
    /// Its parts in order; none if it is one run of bytes, or lies in records.
    pub parts: Vec<Part>,
    /// Its place in the records of a pack, if it lies in those.
    pub stacked: Option<Stacked>,
}

/// Matrices of experts in records: at equal distances in the tensor's file, the first at the tensor's offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stacked {
    /// Rows of an expert.
    pub rows: u64,
    /// Byte offset of the record of expert 0, which holds all its matrices.
    pub record: u64,
    /// Bytes of a record, without the padding behind it.
    pub record_bytes: u64,
    /// Bytes from one record to the next.
    pub stride: u64,
}

/// What a loader does to the values of a vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ValueMap {
    /// Nothing.
    #[default]
    Plain,
    /// `1 + x`: norm weights that are stored as their deviation from one.
    PlusOne,
    /// `-exp(x)`: the logarithm of a decay.
    NegExp,
}

/// Consecutive rows of a tensor that lie together, an expert or a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// How many rows.
    pub rows: u64,
    /// Their values; their codes where scales lie elsewhere.
    pub place: FilePlace,
    /// Their scales, where those lie elsewhere.
    pub scales: Option<Scales>,
}

/// Scales of rows that lie elsewhere in the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scales {
    /// Bytes of a scale, and of a bias.
    pub bytes: u32,
    /// The first scale.
    pub scales: FilePlace,
    /// The first bias.
    pub biases: Option<FilePlace>,
    /// Rows that share a row of scales.
    pub rows: u32,
}

impl TensorInfo {
    /// Its name in the file that it came from.
    pub fn spelling(&self) -> &str {
        self.foreign.as_ref().map_or(&self.name, |foreign| &foreign.spelling)
    }

    /// What its values are turned into.
    pub fn map(&self) -> ValueMap {
        self.foreign.as_ref().map_or(ValueMap::Plain, |foreign| foreign.map)
    }

    /// Values in a row.
    pub fn row_len(&self) -> u64 {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Bytes of a row in memory.
    ///
    /// # Panics
    /// If rows are not made of whole blocks, which readers rule out.
    pub fn row_bytes(&self) -> u64 {
        let n_in = usize::try_from(self.row_len()).expect("readers limit the length of rows");
        self.block_type.row_bytes(n_in).expect("readers checked the row length") as u64
    }

    /// Where rows `rows` lie, counted over all leading dimensions. Places are relative to the first row's.
    ///
    /// # Panics
    /// If the tensor has no such rows.
    pub fn pieces(&self, rows: Range<u64>) -> impl Iterator<Item = Piece> {
        let row_bytes = self.row_bytes();
        let listed = self.foreign.as_ref().map_or(&[][..], |foreign| &foreign.parts);
        let total = self.bytes / row_bytes.max(1);
        assert!(rows.end <= total, "rows {rows:?} of {total} of `{}`", self.name);
        let place = FilePlace { file: self.file, offset: self.offset };
        let stacked = self.foreign.as_ref().and_then(|foreign| foreign.stacked);
        let whole = (listed.is_empty() && stacked.is_none()).then_some(Part {
            rows: total,
            place,
            scales: None,
        });
        // Records before the first row are passed over at once, not one by one.
        let experts = stacked
            .map_or(0..0, |stacked| rows.start / stacked.rows..rows.end.div_ceil(stacked.rows));
        let mut before = stacked.map_or(0, |stacked| experts.start * stacked.rows);
        let in_records = experts.filter_map(move |expert| {
            let Stacked { rows, stride, .. } = stacked?;
            Some(Part { rows, place: place.plus(expert * stride), scales: None })
        });
        let parts = listed.iter().copied().chain(whole).chain(in_records);
        let n_in = self.row_len();
        let block_len = self.block_type.block_len() as u64;
        let block_bytes = self.block_type.block_bytes() as u64;
        parts.filter_map(move |part| {
            let first = rows.start.max(before);
            let end = rows.end.min(before + part.rows);
            let skipped = first.saturating_sub(before);
            let place = (first - rows.start.min(first)) * row_bytes;
            before += part.rows;
            (first < end).then(|| {
                part.piece(skipped..skipped + (end - first), [n_in, block_len, block_bytes], place)
            })
        })
    }
}

impl Part {
    /// The rows `rows` of it, which go to `place`.
    fn piece(
        &self,
        rows: Range<u64>,
        [n_in, block_len, block_bytes]: [u64; 3],
        place: u64,
    ) -> Piece {
        let n_rows = rows.end - rows.start;
        let row_blocks = n_in / block_len;
        let Some(scales) = self.scales else {
            let row_bytes = row_blocks * block_bytes;
            let FilePlace { file, offset } = self.place.plus(rows.start * row_bytes);
            return Piece { file, offset, bytes: n_rows * row_bytes, place, blocks: None };
        };
        let per_block = if scales.biases.is_some() { 2 } else { 1 };
        let codes = block_bytes - per_block * u64::from(scales.bytes);
        let shared = u64::from(scales.rows);
        let skipped = rows.start / shared * row_blocks * u64::from(scales.bytes);
        let FilePlace { file, offset } = self.place.plus(rows.start * row_blocks * codes);
        Piece {
            file,
            offset,
            bytes: n_rows * row_blocks * codes,
            place,
            blocks: Some(Blocks {
                codes: codes as u32,
                scale: scales.bytes,
                scales: scales.scales.plus(skipped),
                biases: scales.biases.map(|biases| biases.plus(skipped)),
                tiles: (shared > 1).then_some(Tiles {
                    blocks: row_blocks as u32,
                    rows: scales.rows,
                    before: (rows.start % shared) as u32,
                }),
            }),
        }
    }
}

/// All tensors of a checkpoint by name.
///
/// A sorted list: half the memory of a map, and as quick to search.
#[derive(Debug, Clone, Default)]
pub struct TensorDirectory {
    tensors: Vec<TensorInfo>,
}

impl TensorDirectory {
    /// The tensor of this name.
    pub fn get(&self, name: &str) -> Option<&TensorInfo> {
        let index = self.tensors.binary_search_by(|tensor| tensor.name.as_str().cmp(name)).ok()?;
        Some(&self.tensors[index])
    }

    /// All tensors by name.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &TensorInfo> {
        self.tensors.iter()
    }

    /// How many.
    pub const fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Sorts tensors into a directory; two of one name, in the order of their files, if there are such.
    pub(crate) fn new(mut tensors: Vec<TensorInfo>) -> Result<Self, Box<(TensorInfo, TensorInfo)>> {
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        if let Some([first, second]) =
            tensors.array_windows().find(|[first, second]| first.name == second.name)
        {
            return Err(Box::new((first.clone(), second.clone())));
        }
        Ok(Self { tensors })
    }
}

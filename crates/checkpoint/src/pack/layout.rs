//! Where everything goes in a pack, and the units that it is written and checked in.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::ops::Range;

use units::FileIndex;

use super::header::{self, Header, Run};
use super::{HEADER_BYTES, RECORD_ALIGN, TENSOR_ALIGN, index};
use crate::directory::{Foreign, Stacked, TensorInfo, ValueMap};
use crate::error::printable;
use crate::metadata::{Metadata, VOCABULARY_KEYS};
use crate::records::LayerRecords;
use crate::{Checkpoint, Model};

/// Bytes of n-gram rows that share a checksum, in whole rows.
const RUN_BYTES: u64 = 1 << 20;

/// How a tensor lies in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// One run of bytes, in the section of resident tensors.
    Resident,
    /// A matrix in every record of a table.
    Record,
    /// One run of rows that are read one by one; so many share a checksum.
    Rows { run: u64 },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) info: TensorInfo,
    pub(super) kind: Kind,
}

/// The records of a block's experts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordTable {
    /// The block, as tensors are numbered.
    pub block: u32,
    /// Its experts.
    pub experts: u32,
    /// Byte offset of the record of expert 0.
    pub base: u64,
    /// Bytes from one record to the next.
    pub stride: u64,
    /// Bytes of a record, without the padding behind it.
    pub bytes: u64,
    /// Its matrices in the order of a record: the number of the tensor, and the place inside a record.
    pub matrices: Vec<(usize, u64)>,
}

impl RecordTable {
    /// Where the last record ends.
    pub(super) fn end(&self) -> Option<u64> {
        let before = u64::from(self.experts.checked_sub(1)?).checked_mul(self.stride)?;
        self.base.checked_add(before)?.checked_add(self.bytes)
    }
}

/// What a unit holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Contents {
    /// All of a tensor, by its number.
    Tensor(usize),
    /// All matrices of an expert.
    Record {
        /// The number of the table.
        table: usize,
        /// The expert.
        expert: u32,
    },
    /// Rows of a tensor.
    Rows {
        /// Its number.
        tensor: usize,
        /// The first row.
        first: u64,
        /// How many.
        rows: u64,
    },
}

/// Bytes that have one checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unit {
    /// What they are.
    pub contents: Contents,
    /// Where they begin in the file.
    pub offset: u64,
    /// How many there are.
    pub bytes: u64,
}

/// Where everything lies in a pack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// In order of names.
    pub(super) entries: Vec<Entry>,
    /// In order of the file.
    pub(super) tables: Vec<RecordTable>,
    pub(super) index: Run,
    pub(super) sums: Run,
    pub(super) data: u64,
    pub(super) file_bytes: u64,
}

impl Layout {
    /// The pack of a model: depends on what it holds, not on how its files lie.
    ///
    /// # Panics
    /// If the checkpoint is not the model's, or its vocabulary was dropped.
    pub fn of(checkpoint: &Checkpoint, model: &Model) -> Self {
        let metadata = &checkpoint.metadata;
        let gone = |key: &str| metadata.get(key).is_none() && metadata.contains(key);
        assert!(!VOCABULARY_KEYS.into_iter().any(gone), "a pack needs the vocabulary");
        let blocks = blocks(model);
        let stacked: BTreeMap<&str, &TensorInfo> = blocks
            .iter()
            .flat_map(|(_, layer)| layer.tensors())
            .map(|tensor| (tensor.name.as_str(), tensor))
            .collect();
        let table = model.ngram_table.as_ref().map(|table| table.tensor.name.as_str());
        let entries: Vec<Entry> = checkpoint
            .directory
            .iter()
            .map(|tensor| match stacked.get(tensor.name.as_str()) {
                // As experts by rows by values, whatever the file leaves out.
                Some(stack) => Entry { info: plain(stack), kind: Kind::Record },
                None if table == Some(&tensor.name) => {
                    let run = (RUN_BYTES / tensor.row_bytes().max(1)).max(1);
                    Entry { info: plain(tensor), kind: Kind::Rows { run } }
                }
                None => Entry { info: plain(tensor), kind: Kind::Resident },
            })
            .collect();
        let tables = blocks.iter().map(|(block, layer)| record_table(&entries, *block, layer));
        let mut layout = Self {
            tables: tables.collect(),
            entries,
            index: Run::default(),
            sums: Run::default(),
            data: 0,
            file_bytes: 0,
        };
        // Numbers have fixed widths, so the index is as long before they are known.
        let mut len = Count(0);
        layout.write_index(metadata, &mut len).expect("counting does not fail");
        let sums = 8 * layout.unit_count();
        (layout.index, layout.sums, layout.data) =
            header::places(len.0, sums).expect("an index of less than 2^64 bytes");
        layout.place();
        layout
    }

    /// Gives every tensor and record its place.
    fn place(&mut self) {
        let mut end = self.data;
        for Entry { info, .. } in self.entries.iter_mut().filter(|e| e.kind == Kind::Resident) {
            info.offset = end.next_multiple_of(TENSOR_ALIGN);
            end = info.offset + info.bytes;
        }
        for table in &mut self.tables {
            table.base = end.next_multiple_of(RECORD_ALIGN);
            for (tensor, inside) in &table.matrices {
                self.entries[*tensor].stack(table, *inside);
            }
            end = table.base + u64::from(table.experts) * table.stride;
        }
        for Entry { info, kind } in &mut self.entries {
            if matches!(kind, Kind::Rows { .. }) {
                info.offset = end.next_multiple_of(RECORD_ALIGN);
                end = info.offset + info.bytes;
            }
        }
        self.file_bytes = end.next_multiple_of(RECORD_ALIGN);
    }

    /// Bytes of the file.
    pub const fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// Where weights begin: everything before is header, index and checksums.
    pub const fn data_start(&self) -> u64 {
        self.data
    }

    /// Where the index begins.
    pub const fn index_start(&self) -> u64 {
        self.index.start
    }

    /// Bytes of the index.
    pub const fn index_bytes(&self) -> u64 {
        self.index.len
    }

    /// Where the checksums begin.
    pub const fn sums_start(&self) -> u64 {
        self.sums.start
    }

    /// Bytes of all checksums.
    pub const fn sums_bytes(&self) -> u64 {
        self.sums.len
    }

    /// All tensors by number, which is the order of their names.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &TensorInfo> {
        self.entries.iter().map(|entry| &entry.info)
    }

    /// A tensor by number.
    ///
    /// # Panics
    /// If there is no such tensor.
    pub fn tensor(&self, number: usize) -> &TensorInfo {
        &self.entries[number].info
    }

    /// The tables of records, in the order of the file.
    pub fn tables(&self) -> &[RecordTable] {
        &self.tables
    }

    /// How many units there are.
    pub fn unit_count(&self) -> u64 {
        let tensors = self.entries.iter().map(|entry| match entry.kind {
            Kind::Resident => 1,
            Kind::Record => 0,
            Kind::Rows { run } => rows_of(&entry.info).div_ceil(run),
        });
        let records = self.tables.iter().map(|table| u64::from(table.experts));
        tensors.chain(records).sum()
    }

    /// Everything that has a checksum: tensors, records, runs of rows. In the order of the file, if [`Self::of`] made it.
    pub fn units(&self) -> impl Iterator<Item = Unit> + Clone {
        let resident = self.numbered(|kind| kind == Kind::Resident).map(|(number, entry)| Unit {
            contents: Contents::Tensor(number),
            offset: entry.info.offset,
            bytes: entry.info.bytes,
        });
        let records = self.tables.iter().enumerate().flat_map(|(number, table)| {
            (0..table.experts).map(move |expert| Unit {
                contents: Contents::Record { table: number, expert },
                offset: table.base + u64::from(expert) * table.stride,
                bytes: table.bytes,
            })
        });
        let rows = self.numbered(|kind| matches!(kind, Kind::Rows { .. }));
        let rows = rows.flat_map(|(number, Entry { info, kind })| {
            let (total, row_bytes) = (rows_of(info), info.row_bytes());
            let run = if let Kind::Rows { run } = kind { *run } else { total };
            (0..total.div_ceil(run)).map(move |index| {
                let first = index * run;
                let rows = run.min(total - first);
                Unit {
                    contents: Contents::Rows { tensor: number, first, rows },
                    offset: info.offset + first * row_bytes,
                    bytes: rows * row_bytes,
                }
            })
        });
        resident.chain(records).chain(rows)
    }

    fn numbered(&self, is: fn(Kind) -> bool) -> impl Iterator<Item = (usize, &Entry)> + Clone {
        self.entries.iter().enumerate().filter(move |(_, entry)| is(entry.kind))
    }

    /// What a unit is made of, in order: its place inside the unit, the number of a tensor, and rows of it.
    pub fn parts(&self, unit: &Unit) -> Vec<(u64, usize, Range<u64>)> {
        match unit.contents {
            Contents::Tensor(number) => vec![(0, number, 0..rows_of(self.tensor(number)))],
            Contents::Rows { tensor, first, rows } => vec![(0, tensor, first..first + rows)],
            Contents::Record { table, expert } => {
                let table = &self.tables[table];
                let matrix = |(tensor, place): &(usize, u64)| {
                    let rows = rows_of(self.tensor(*tensor)) / u64::from(table.experts);
                    let first = rows * u64::from(expert);
                    (*place, *tensor, first..first + rows)
                };
                table.matrices.iter().map(matrix).collect()
            }
        }
    }

    /// What a unit is called in messages.
    pub fn name(&self, unit: &Unit) -> String {
        match unit.contents {
            Contents::Tensor(number) => {
                format!("tensor `{}`", printable(&self.tensor(number).name))
            }
            Contents::Record { table, expert } => {
                format!("record of block {} expert {expert}", self.tables[table].block)
            }
            Contents::Rows { tensor, first, rows } => {
                let name = printable(&self.tensor(tensor).name);
                format!("rows {first}..{} of `{name}`", first + rows)
            }
        }
    }

    /// Writes the index, in order.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write_index(&self, metadata: &Metadata, out: &mut dyn Write) -> io::Result<()> {
        index::write(metadata, self, out)
    }

    /// The header, once both checksums are known: of the index, and of the table of checksums.
    pub fn header(&self, index_sum: u64, sums_sum: u64) -> [u8; HEADER_BYTES as usize] {
        Header {
            file_bytes: self.file_bytes,
            index: self.index,
            index_sum,
            sums: self.sums,
            sums_sum,
            data: self.data,
        }
        .bytes()
    }
}

impl Entry {
    /// Puts the tensor into the records of a table.
    pub(super) fn stack(&mut self, table: &RecordTable, inside: u64) {
        self.info.offset = table.base + inside;
        let rows = rows_of(&self.info) / u64::from(table.experts);
        let foreign = self.info.foreign.get_or_insert_default();
        if foreign.spelling.is_empty() {
            foreign.spelling.clone_from(&self.info.name);
        }
        foreign.stacked = Some(Stacked {
            rows,
            record: table.base,
            record_bytes: table.bytes,
            stride: table.stride,
        });
    }
}

/// Rows over all leading dimensions.
fn rows_of(tensor: &TensorInfo) -> u64 {
    tensor.bytes / tensor.row_bytes().max(1)
}

/// Blocks with routed experts: those of the trunk, and the draft block.
fn blocks(model: &Model) -> Vec<(u32, &LayerRecords)> {
    let trunk = (0..model.config.n_layers)
        .map(|block| (block, model.records.layer(units::LayerIndex(block))));
    let draft = model.draft.iter().map(|draft| (model.config.n_layers, &draft.experts));
    trunk.chain(draft).collect()
}

/// A tensor as one run of bytes somewhere in the pack.
fn plain(tensor: &TensorInfo) -> TensorInfo {
    let (name, block_type) = (tensor.name.clone(), tensor.block_type);
    let foreign = foreign(&name, tensor.spelling(), tensor.map());
    let (shape, bytes) = (tensor.shape.clone(), tensor.bytes);
    TensorInfo { name, block_type, shape, file: FileIndex(0), offset: 0, bytes, foreign }
}

/// What is said of a tensor beyond its name, if anything is.
pub(super) fn foreign(name: &str, spelling: &str, map: ValueMap) -> Option<Box<Foreign>> {
    (spelling != name || map != ValueMap::Plain).then(|| {
        Box::new(Foreign { spelling: spelling.to_owned(), map, parts: Vec::new(), stacked: None })
    })
}

/// A table without a place.
fn record_table(entries: &[Entry], block: u32, layer: &LayerRecords) -> RecordTable {
    let mut bytes = 0_u64;
    let matrices = layer.tensors().map(|tensor| {
        let number = entries.binary_search_by(|entry| entry.info.name.cmp(&tensor.name));
        let place = bytes.next_multiple_of(TENSOR_ALIGN);
        bytes = place + tensor.bytes / tensor.shape[0];
        (number.expect("the checkpoint has the model's tensors"), place)
    });
    let matrices = matrices.collect();
    let experts = layer.gate.shape[0] as u32;
    RecordTable {
        block,
        experts,
        base: 0,
        stride: bytes.next_multiple_of(RECORD_ALIGN),
        bytes,
        matrices,
    }
}

/// Counts what is written.
struct Count(u64);

impl Write for Count {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

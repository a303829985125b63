//! The index of a pack: key-value pairs, tensors, tables of records; written here, and read with every number held
//! against the file and the limits.

use std::io::{self, Write};
use std::path::Path;

use quant::{Affine, BlockType, ScaleType};
use units::FileIndex;

use super::header::Header;
use super::layout::{Entry, Kind, Layout, RecordTable, foreign};
use super::{RECORD_ALIGN, Section, TENSOR_ALIGN};
use crate::cursor::Cursor;
use crate::directory::{TensorInfo, ValueMap};
use crate::error::{CheckpointError, printable};
use crate::gguf::values;
use crate::limits::{self, Budget};
use crate::metadata::{MetaArray, MetaValue, Metadata, Vocabulary};

/// Fewest bytes of a pair: key length, type, value.
const PAIR_BYTES: u64 = 8 + 4 + 1;
/// Fewest bytes of a tensor: two lengths, four words, a dimension, offset and run.
const TENSOR_BYTES: u64 = 2 * 8 + 5 * 4 + 3 * 8;
/// Bytes of a table without its matrices.
const TABLE_BYTES: u64 = 3 * 4 + 3 * 8;
/// Matrices of a record: gate, up and down, or gate and up as one.
const MATRICES: std::ops::RangeInclusive<u32> = 2..=3;

/// What a tensor costs beside the bytes of its names: itself, twice while a list grows, and again in the directory; its
/// shape and what is foreign about it, both twice; the allocations' own bookkeeping; a place while spans are sorted.
const TENSOR_OVERHEAD: u64 = 3 * size_of::<Entry>() as u64 + 2 * (4 * 8 + 192) + 256;
const TABLE_OVERHEAD: u64 = 2 * size_of::<RecordTable>() as u64 + 3 * 16 + 128;

/// Type numbers beside those of GGUF.
const AFFINE: u32 = 0x1_0000;
const FP8: u32 = 0x1_0001;
const E4M3: u32 = 0x1_0002;

/// Keys that describe how a GGUF file was split; a pack is one file.
const SPLIT: &str = "split.";

pub(super) fn write(metadata: &Metadata, layout: &Layout, out: &mut dyn Write) -> io::Result<()> {
    let pairs = || metadata.iter().filter(|(key, _)| !key.starts_with(SPLIT));
    u64_to(out, pairs().count() as u64)?;
    for (key, value) in pairs() {
        text_to(out, key)?;
        value_to(out, value)?;
    }
    u64_to(out, layout.entries.len() as u64)?;
    layout.entries.iter().try_for_each(|entry| entry_to(out, entry))?;
    u64_to(out, layout.tables.len() as u64)?;
    layout.tables.iter().try_for_each(|table| table_to(out, table))
}

fn u32_to(out: &mut dyn Write, number: u32) -> io::Result<()> {
    out.write_all(&number.to_le_bytes())
}

fn u64_to(out: &mut dyn Write, number: u64) -> io::Result<()> {
    out.write_all(&number.to_le_bytes())
}

fn text_to(out: &mut dyn Write, text: &str) -> io::Result<()> {
    u64_to(out, text.len() as u64)?;
    out.write_all(text.as_bytes())
}

/// A value as GGUF writes it, in the widest type of its kind.
fn value_to(out: &mut dyn Write, value: &MetaValue) -> io::Result<()> {
    match value {
        MetaValue::U64(number) => typed_to(out, 10, &number.to_le_bytes()),
        MetaValue::I64(number) => typed_to(out, 11, &number.to_le_bytes()),
        MetaValue::F64(number) => typed_to(out, 12, &number.to_le_bytes()),
        MetaValue::Bool(flag) => typed_to(out, 7, &[u8::from(*flag)]),
        MetaValue::String(text) => {
            u32_to(out, 8)?;
            text_to(out, text)
        }
        MetaValue::Array(array) => {
            u32_to(out, 9)?;
            let kind = match array {
                MetaArray::U64s(_) => 10,
                MetaArray::I64s(_) => 11,
                MetaArray::F64s(_) => 12,
                MetaArray::Bools(_) => 7,
                MetaArray::Strings(_) => 8,
            };
            u32_to(out, kind)?;
            u64_to(out, array.len() as u64)?;
            match array {
                MetaArray::U64s(v) => v.iter().try_for_each(|n| out.write_all(&n.to_le_bytes())),
                MetaArray::I64s(v) => v.iter().try_for_each(|n| out.write_all(&n.to_le_bytes())),
                MetaArray::F64s(v) => v.iter().try_for_each(|n| out.write_all(&n.to_le_bytes())),
                MetaArray::Bools(v) => v.iter().try_for_each(|b| out.write_all(&[u8::from(*b)])),
                MetaArray::Strings(v) => v.iter().try_for_each(|text| text_to(out, text)),
            }
        }
    }
}

fn typed_to(out: &mut dyn Write, kind: u32, bytes: &[u8]) -> io::Result<()> {
    u32_to(out, kind)?;
    out.write_all(bytes)
}

fn entry_to(out: &mut dyn Write, Entry { info, kind }: &Entry) -> io::Result<()> {
    text_to(out, &info.name)?;
    text_to(out, if info.spelling() == info.name { "" } else { info.spelling() })?;
    let (kind, run) = match kind {
        Kind::Resident => (0, 0),
        Kind::Record => (1, 0),
        Kind::Rows { run } => (2, *run),
    };
    u32_to(out, kind)?;
    let (id, detail) = type_numbers(info.block_type);
    u32_to(out, id)?;
    u32_to(out, detail)?;
    u32_to(out, info.map() as u32)?;
    u32_to(out, info.shape.len() as u32)?;
    info.shape.iter().try_for_each(|n| u64_to(out, *n))?;
    u64_to(out, info.offset)?;
    u64_to(out, run)
}

fn table_to(out: &mut dyn Write, table: &RecordTable) -> io::Result<()> {
    u32_to(out, table.block)?;
    u32_to(out, table.experts)?;
    u32_to(out, table.matrices.len() as u32)?;
    [table.base, table.stride, table.bytes].iter().try_for_each(|n| u64_to(out, *n))?;
    table.matrices.iter().try_for_each(|(tensor, place)| {
        u32_to(out, *tensor as u32)?;
        u64_to(out, *place)
    })
}

const fn scale_number(scales: ScaleType) -> u32 {
    match scales {
        ScaleType::Bf16 => 0,
        ScaleType::F16 => 1,
        ScaleType::F32 => 2,
    }
}

fn type_numbers(block_type: BlockType) -> (u32, u32) {
    match block_type {
        BlockType::Affine(affine) => {
            let (bits, group) = (affine.bits() as u32, affine.group() as u32);
            (AFFINE, bits | group << 8 | scale_number(affine.scales()) << 16)
        }
        BlockType::Fp8(scales) => (FP8, scale_number(scales)),
        BlockType::E4m3 => (E4M3, 0),
        other => (other.ggml_id().expect("all other types are GGML's"), 0),
    }
}

fn block_type(id: u32, detail: u32) -> Option<BlockType> {
    let scales = |number| ScaleType::ALL.into_iter().find(|scales| scale_number(*scales) == number);
    let found = match id {
        AFFINE => {
            let affine = Affine::new(detail & 0xff, detail >> 8 & 0xff, scales(detail >> 16)?)?;
            BlockType::Affine(affine)
        }
        FP8 => BlockType::Fp8(scales(detail)?),
        E4M3 => BlockType::E4m3,
        id => BlockType::from_ggml(id)?,
    };
    (type_numbers(found) == (id, detail)).then_some(found)
}

/// Reads the index; `header` is that of the file.
pub(super) fn read(
    path: &Path,
    section: &Section<'_>,
    header: &Header,
    (budget, vocabulary): (&mut Budget, Vocabulary),
) -> Result<(Metadata, Layout), CheckpointError> {
    let mut cursor = Cursor::new(path, section, budget);
    let n_keys = cursor.count(format_args!("the number of keys"), PAIR_BYTES, limits::KEYS)?;
    let metadata = values::read(&mut cursor, n_keys, vocabulary)?;
    let what = format_args!("the number of tensors");
    let n_tensors = cursor.count(what, TENSOR_BYTES, limits::TENSORS)?;
    cursor.charge(format_args!("{n_tensors} tensors"), n_tensors * TENSOR_OVERHEAD)?;
    let mut entries: Vec<Entry> = Vec::with_capacity(n_tensors as usize);
    for _ in 0..n_tensors {
        let entry = entry(&mut cursor, header)?;
        if let Some(before) = entries.last().filter(|before| before.info.name >= entry.info.name) {
            let what = format_args!("tensor `{}`", entry.info.name);
            let found = format!("behind `{}`", printable(&before.info.name));
            return Err(cursor.format(what, found, "names in order, each once"));
        }
        entries.push(entry);
    }
    let what = format_args!("the number of record tables");
    let n_tables = cursor.count(what, TABLE_BYTES, limits::LAYERS)?;
    cursor.charge(format_args!("{n_tables} record tables"), n_tables * TABLE_OVERHEAD)?;
    let mut tables = Vec::with_capacity(n_tables as usize);
    for _ in 0..n_tables {
        tables.push(table(&mut cursor, header, &mut entries)?);
    }
    let (index, sums, data, file_bytes) =
        (header.index, header.sums, header.data, header.file_bytes);
    let layout = Layout { entries, tables, index, sums, data, file_bytes };
    check(&cursor, &layout)?;
    Ok((metadata, layout))
}

fn word(cursor: &mut Cursor<'_>, what: std::fmt::Arguments<'_>) -> Result<u32, CheckpointError> {
    cursor.bytes(what).map(u32::from_le_bytes)
}

fn number(cursor: &mut Cursor<'_>, what: std::fmt::Arguments<'_>) -> Result<u64, CheckpointError> {
    cursor.bytes(what).map(u64::from_le_bytes)
}

fn entry(cursor: &mut Cursor<'_>, header: &Header) -> Result<Entry, CheckpointError> {
    let name = cursor.string(format_args!("a tensor's name"), limits::NAME_BYTES)?;
    if name.is_empty() {
        return Err(cursor.format(format_args!("a tensor's name"), "nothing".to_owned(), "a name"));
    }
    let what = format_args!("tensor `{name}`");
    let spelling = cursor.string(what, limits::NAME_BYTES)?;
    let kind = word(cursor, what)?;
    let (id, detail) = (word(cursor, what)?, word(cursor, what)?);
    let Some(block_type) = block_type(id, detail) else {
        let found = format!("type {id:#x} with {detail:#x}");
        return Err(cursor.unsupported(what, found, "the types of docs/pack-format.md"));
    };
    let map = match word(cursor, what)? {
        0 => ValueMap::Plain,
        1 => ValueMap::PlusOne,
        2 => ValueMap::NegExp,
        other => return Err(cursor.format(what, format!("value map {other}"), "0, 1 or 2")),
    };
    let n_dims = word(cursor, what)?;
    if n_dims == 0 || n_dims > limits::DIMS {
        let needed = format!("1 to {}", limits::DIMS);
        return Err(cursor.format(what, format!("{n_dims} dimensions"), &needed));
    }
    let shape = (0..n_dims).map(|_| number(cursor, what)).collect::<Result<Vec<_>, _>>()?;
    let bytes = bytes_of(cursor, &name, block_type, &shape, header)?;
    let (offset, run) = (number(cursor, what)?, number(cursor, what)?);
    let (kind, align) = match (kind, run) {
        (0, 0) => (Kind::Resident, TENSOR_ALIGN),
        (1, 0) => (Kind::Record, TENSOR_ALIGN),
        (2, 1..) => (Kind::Rows { run }, RECORD_ALIGN),
        _ => {
            let found = format!("kind {kind}, {run} rows a checksum");
            return Err(cursor.format(what, found, "kind 0 or 1 and no rows, or kind 2 and some"));
        }
    };
    if !offset.is_multiple_of(align) {
        return Err(cursor.format(
            what,
            format!("offset {offset}"),
            &format!("a multiple of {align}"),
        ));
    }
    let spelled = if spelling.is_empty() { &name } else { &spelling };
    let foreign = foreign(&name, spelled, map);
    let info = TensorInfo { block_type, shape, file: FileIndex(0), offset, bytes, foreign, name };
    Ok(Entry { info, kind })
}

/// The bytes of a tensor: whole blocks, more than none, no more than the file has.
fn bytes_of(
    cursor: &Cursor<'_>,
    name: &str,
    block_type: BlockType,
    shape: &[u64],
    header: &Header,
) -> Result<u64, CheckpointError> {
    let what = format_args!("tensor `{name}`");
    let (last, lead) = shape.split_last().expect("at least one dimension");
    let row = usize::try_from(*last).ok().filter(|row| *row > 0);
    let row = row.and_then(|row| block_type.row_bytes(row));
    let bytes = lead.iter().try_fold(row.unwrap_or(0) as u64, |bytes, n| bytes.checked_mul(*n));
    match bytes.filter(|bytes| (1..=header.file_bytes).contains(bytes)) {
        None => {
            let needed = format!(
                "whole blocks of {} values, and at most the file's {} bytes",
                block_type.block_len(),
                header.file_bytes
            );
            Err(cursor.format(what, format!("shape {shape:?} of {block_type}"), &needed))
        }
        Some(bytes) if bytes > limits::TENSOR_BYTES => {
            Err(cursor.limit(format_args!("bytes of {what}"), bytes, limits::TENSOR_BYTES))
        }
        Some(bytes) => Ok(bytes),
    }
}

/// Reads a table and puts its tensors into its records.
fn table(
    cursor: &mut Cursor<'_>,
    header: &Header,
    entries: &mut [Entry],
) -> Result<RecordTable, CheckpointError> {
    let block = word(cursor, format_args!("a record table"))?;
    let what = format_args!("the records of block {block}");
    let (experts, n_matrices) = (word(cursor, what)?, word(cursor, what)?);
    let [base, stride, bytes] =
        [number(cursor, what)?, number(cursor, what)?, number(cursor, what)?];
    if experts == 0 || u64::from(experts) > limits::EXPERTS || !MATRICES.contains(&n_matrices) {
        let found = format!("{experts} experts of {n_matrices} matrices");
        let needed = format!("1 to {} experts of 2 or 3 matrices", limits::EXPERTS);
        return Err(cursor.format(what, found, &needed));
    }
    let mut table = RecordTable { block, experts, base, stride, bytes, matrices: Vec::new() };
    let aligned = base.is_multiple_of(RECORD_ALIGN) && stride.is_multiple_of(RECORD_ALIGN);
    if !aligned || bytes > stride || table.end().is_none_or(|end| end > header.file_bytes) {
        let found = format!("{experts} records of {bytes} bytes from {base}, {stride} apart");
        let size = header.file_bytes;
        let needed = format!(
            "records inside the file's {size} bytes, apart, at multiples of {RECORD_ALIGN}"
        );
        return Err(cursor.format(what, found, &needed));
    }
    let mut end = 0;
    for _ in 0..n_matrices {
        let (tensor, place) = (word(cursor, what)? as usize, number(cursor, what)?);
        let whole = |entry: &&mut Entry| {
            let stacked = entry.info.foreign.as_ref().is_some_and(|f| f.stacked.is_some());
            entry.kind == Kind::Record
                && !stacked
                && matches!(*entry.info.shape, [n, _, _] if n == u64::from(experts))
        };
        let Some(entry) = entries.get_mut(tensor).filter(whole) else {
            let needed = format!("a tensor of {experts} matrices that is in no other record");
            return Err(cursor.format(what, format!("tensor number {tensor}"), &needed));
        };
        let matrix = entry.info.bytes / u64::from(experts);
        let inside = place.checked_add(matrix).is_some_and(|end| end <= bytes);
        let at = base.checked_add(place).filter(|at| *at == entry.info.offset);
        if place < end || !place.is_multiple_of(TENSOR_ALIGN) || !inside || at.is_none() {
            let found = format!("place {place} of tensor number {tensor}, {matrix} bytes each");
            let needed = format!(
                "multiples of {TENSOR_ALIGN} inside {bytes} bytes, one matrix behind the other, where the tensor is"
            );
            return Err(cursor.format(what, found, &needed));
        }
        end = place + matrix;
        entry.stack(&table, place);
        table.matrices.push((tensor, place));
    }
    Ok(table)
}

/// Checks what holds for all: the index has no more bytes, nothing shares any, checksums are as many as units.
fn check(cursor: &Cursor<'_>, layout: &Layout) -> Result<(), CheckpointError> {
    if cursor.position() != cursor.size() {
        let found = format!("{} bytes behind it", cursor.size() - cursor.position());
        return Err(cursor.format(format_args!("the end of the index"), found, "none"));
    }
    let mut spans = Vec::with_capacity(layout.entries.len() + layout.tables.len());
    for Entry { info, kind } in &layout.entries {
        let stacked = info.foreign.as_ref().is_some_and(|foreign| foreign.stacked.is_some());
        match (kind, stacked) {
            (Kind::Record, true) => {}
            (Kind::Record, false) => {
                let what = format_args!("tensor `{}`", info.name);
                return Err(cursor.format(what, "no record that has it".to_owned(), "one"));
            }
            _ => spans.push((info.offset, info.offset.checked_add(info.bytes), Err(&info.name))),
        }
    }
    let tables = layout.tables.iter().map(|table| (table.base, table.end(), Ok(table.block)));
    spans.extend(tables);
    spans.sort_unstable();
    let mut before = layout.data;
    for (start, end, name) in spans {
        let name = match name {
            Ok(block) => format!("the records of block {block}"),
            Err(tensor) => format!("tensor `{tensor}`"),
        };
        let Some(end) = end.filter(|end| *end <= layout.file_bytes && start >= before) else {
            let found = format!("offset {start}, where something else ends at {before}, or no end");
            let needed = format!("bytes of its own among the {} of the file", layout.file_bytes);
            return Err(cursor.format(format_args!("{name}"), found, &needed));
        };
        before = end;
    }
    let units = layout.unit_count();
    if units.checked_mul(8) != Some(layout.sums_bytes()) {
        let what = format_args!("bytes of checksums");
        let needed = format!("8 for each of {units} tensors, records and runs of rows");
        return Err(cursor.format(what, layout.sums_bytes().to_string(), &needed));
    }
    Ok(())
}

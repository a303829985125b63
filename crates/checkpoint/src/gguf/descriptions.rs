//! Tensor descriptions: what each tensor is and where it lies, checked against the file and against each other.

use quant::BlockType;
use units::FileIndex;

use super::Cursor;
use crate::directory::TensorInfo;
use crate::error::{CheckpointError, printable};
use crate::limits;
use crate::metadata::Metadata;

const DEFAULT_ALIGNMENT: u64 = 32;

/// What a description costs beside the bytes of its name: itself, twice while a list grows; its shape; the
/// allocations' own bookkeeping; a reference while tensors are put in order.
const TENSOR_OVERHEAD: u64 = 2 * size_of::<TensorInfo>() as u64 + 4 * 8 + 64 + 8;

/// The tensors of a file, and what is odd about them.
pub(super) struct Descriptions {
    pub(super) tensors: Vec<TensorInfo>,
    pub(super) warning: Option<String>,
}

/// The alignment of the data section and of every tensor in it.
pub(super) fn alignment(cursor: &Cursor<'_>, metadata: &Metadata) -> Result<u64, CheckpointError> {
    let key = "general.alignment";
    if !metadata.contains(key) {
        return Ok(DEFAULT_ALIGNMENT);
    }
    let range = limits::MIN_ALIGNMENT..=limits::MAX_ALIGNMENT;
    match metadata.u64(key) {
        Some(n) if n.is_power_of_two() && range.contains(&n) => Ok(n),
        number => {
            let kind = metadata.get(key).map_or("an array", |value| value.kind());
            let found = number.map_or_else(|| kind.to_owned(), |n| n.to_string());
            let needed = format!("a power of two from {} to {}", range.start(), range.end());
            Err(cursor.format(format_args!("{key}"), found, &needed))
        }
    }
}

pub(super) fn read(
    cursor: &mut Cursor<'_>,
    n_tensors: u64,
    alignment: u64,
    file: FileIndex,
) -> Result<Descriptions, CheckpointError> {
    cursor.charge(format_args!("{n_tensors} tensor descriptions"), n_tensors * TENSOR_OVERHEAD)?;
    let mut tensors = Vec::with_capacity(n_tensors as usize);
    for _ in 0..n_tensors {
        tensors.push(tensor(cursor, alignment, file)?);
    }
    let warning = place(cursor, &mut tensors, alignment)?;
    apart(cursor, &tensors)?;
    Ok(Descriptions { tensors, warning })
}

/// One tensor, its offset still relative to the data section.
fn tensor(
    cursor: &mut Cursor<'_>,
    alignment: u64,
    file: FileIndex,
) -> Result<TensorInfo, CheckpointError> {
    let name = cursor.string(format_args!("a tensor's name"), limits::NAME_BYTES)?;
    if name.is_empty() {
        return Err(cursor.format(format_args!("a tensor's name"), "nothing".to_owned(), "a name"));
    }
    let what = format_args!("tensor `{name}`");
    let n_dims = u32::from_le_bytes(cursor.bytes(what)?);
    if n_dims == 0 || n_dims > limits::DIMS {
        let needed = format!("1 to {}", limits::DIMS);
        return Err(cursor.format(what, format!("{n_dims} dimensions"), &needed));
    }
    let mut shape = Vec::with_capacity(n_dims as usize);
    for _ in 0..n_dims {
        shape.push(u64::from_le_bytes(cursor.bytes(what)?));
    }
    let id = u32::from_le_bytes(cursor.bytes(what)?);
    let Some(block_type) = BlockType::from_ggml(id) else {
        let names = BlockType::ALL.map(BlockType::name).join(", ");
        let found = type_name(id).map_or_else(|| format!("type {id}"), ToOwned::to_owned);
        return Err(cursor.unsupported(format_args!("tensor `{name}`"), found, &names));
    };
    let bytes = tensor_bytes(cursor, &name, block_type, &shape)?;
    let offset = u64::from_le_bytes(cursor.bytes(what)?);
    if !offset.is_multiple_of(alignment) {
        let needed = format!("a multiple of the alignment {alignment}");
        return Err(cursor.format(what, format!("offset {offset}"), &needed));
    }
    // The file lists the contiguous dimension first, everything else here lists it last.
    shape.reverse();
    Ok(TensorInfo { name, block_type, shape, file, offset, bytes, foreign: None })
}

/// The bytes of a tensor; `ne` is its shape as the file lists it, the contiguous dimension first.
fn tensor_bytes(
    cursor: &Cursor<'_>,
    name: &str,
    block_type: BlockType,
    ne: &[u64],
) -> Result<u64, CheckpointError> {
    let what = format_args!("tensor `{name}`");
    if ne.contains(&0) {
        return Err(cursor.format(what, format!("dimensions {ne:?}"), "positive ones"));
    }
    let row_bytes = usize::try_from(ne[0]).ok().and_then(|row| block_type.row_bytes(row));
    let Some(row_bytes) = row_bytes else {
        let needed = format!("a multiple of {} for {block_type}", block_type.block_len());
        return Err(cursor.format(what, format!("rows of {} values", ne[0]), &needed));
    };
    let bytes = ne[1..].iter().try_fold(row_bytes as u64, |bytes, n| bytes.checked_mul(*n));
    match bytes.filter(|bytes| *bytes <= cursor.size()) {
        None => {
            let needed = format!("a tensor that fits into the file's {} bytes", cursor.size());
            Err(cursor.format(what, format!("dimensions {ne:?} of {block_type}"), &needed))
        }
        Some(bytes) if bytes > limits::TENSOR_BYTES => {
            Err(cursor.limit(format_args!("bytes of {what}"), bytes, limits::TENSOR_BYTES))
        }
        Some(bytes) => Ok(bytes),
    }
}

/// Names of types that exist and are not supported, so that a message can say more than a number.
const fn type_name(id: u32) -> Option<&'static str> {
    Some(match id {
        4 | 5 => "a type that was withdrawn (Q4_2 or Q4_3)",
        9 => "Q8_1",
        15 => "Q8_K",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        34 => "TQ1_0",
        35 => "TQ2_0",
        40 => "NVFP4",
        41 => "Q1_0",
        _ => return None,
    })
}

/// Makes offsets absolute and checks that tensors lie inside the file; a warning if much follows the last one.
fn place(
    cursor: &Cursor<'_>,
    tensors: &mut [TensorInfo],
    alignment: u64,
) -> Result<Option<String>, CheckpointError> {
    let size = cursor.size();
    let start = cursor.position().next_multiple_of(alignment);
    let mut end_of_data = start;
    for tensor in tensors.iter_mut() {
        let begin = start.checked_add(tensor.offset);
        let end = begin.and_then(|begin| begin.checked_add(tensor.bytes));
        let (Some(begin), Some(end)) = (begin, end.filter(|end| *end <= size)) else {
            let found = format!("offset {} and {} bytes", tensor.offset, tensor.bytes);
            let needed = format!("an end inside the file: {size} bytes, data from {start}");
            return Err(cursor.format(format_args!("tensor `{}`", tensor.name), found, &needed));
        };
        tensor.offset = begin;
        end_of_data = end_of_data.max(end);
    }
    let extra = size.saturating_sub(end_of_data.next_multiple_of(alignment));
    Ok((extra > 0 && !tensors.is_empty()).then(|| {
        let file = cursor.path().display();
        format!("{file}: {extra} bytes after the last tensor are ignored")
    }))
}

/// Checks that no two tensors share bytes.
fn apart(cursor: &Cursor<'_>, tensors: &[TensorInfo]) -> Result<(), CheckpointError> {
    let mut order: Vec<&TensorInfo> = tensors.iter().collect();
    order.sort_unstable_by_key(|tensor| tensor.offset);
    for pair in order.windows(2) {
        if pair[0].offset + pair[0].bytes > pair[1].offset {
            let found = format!("bytes that `{}` also claims", printable(&pair[0].name));
            let what = format_args!("tensor `{}`", pair[1].name);
            return Err(cursor.format(what, found, "bytes of its own"));
        }
    }
    Ok(())
}

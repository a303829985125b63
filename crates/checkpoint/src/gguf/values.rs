//! Key-value pairs.

use super::Cursor;
use crate::error::CheckpointError;
use crate::limits;
use crate::metadata::{
    MERGES, MetaArray, MetaValue, Metadata, StringArray, TOKENS, VOCABULARY_KEYS, Vocabulary,
};

/// What a pair costs beside the bytes of its key and value: its share of a tree node, half empty at worst, and the
/// allocations' own bookkeeping.
const PAIR_OVERHEAD: u64 = 256;

const STRING: u32 = 8;
const ARRAY: u32 = 9;

pub(crate) fn read(
    cursor: &mut Cursor<'_>,
    n_keys: u64,
    vocabulary: Vocabulary,
) -> Result<Metadata, CheckpointError> {
    let mut metadata = Metadata::default();
    for _ in 0..n_keys {
        let key = cursor.string(format_args!("a key"), limits::KEY_BYTES)?;
        cursor.charge(format_args!("key `{key}`"), PAIR_OVERHEAD)?;
        if metadata.contains(&key) {
            let what = format_args!("key `{key}`");
            return Err(cursor.format(what, "a second value".to_owned(), "every key once"));
        }
        let skip = vocabulary == Vocabulary::Skip && VOCABULARY_KEYS.contains(&key.as_str());
        match value(cursor, &key, skip)? {
            Value::Kept(value) => {
                metadata.insert(key, value);
            }
            Value::SetAside { len } => metadata.set_aside(key, len),
        }
    }
    Ok(metadata)
}

enum Value {
    Kept(MetaValue),
    /// An array that was checked and not kept.
    SetAside {
        len: u64,
    },
}

fn value(cursor: &mut Cursor<'_>, key: &str, skip: bool) -> Result<Value, CheckpointError> {
    let kind = u32::from_le_bytes(cursor.bytes(format_args!("the type of `{key}`"))?);
    let value = match kind {
        STRING => {
            let what = format_args!("the value of `{key}`");
            MetaValue::String(cursor.string(what, limits::STRING_BYTES)?)
        }
        ARRAY => return array(cursor, key, skip),
        kind => scalar(cursor, key, kind)?,
    };
    Ok(Value::Kept(value))
}

fn scalar(cursor: &mut Cursor<'_>, key: &str, kind: u32) -> Result<MetaValue, CheckpointError> {
    let what = format_args!("the value of `{key}`");
    Ok(match kind {
        0 => MetaValue::U64(u8::from_le_bytes(cursor.bytes(what)?).into()),
        1 => MetaValue::I64(i8::from_le_bytes(cursor.bytes(what)?).into()),
        2 => MetaValue::U64(u16::from_le_bytes(cursor.bytes(what)?).into()),
        3 => MetaValue::I64(i16::from_le_bytes(cursor.bytes(what)?).into()),
        4 => MetaValue::U64(u32::from_le_bytes(cursor.bytes(what)?).into()),
        5 => MetaValue::I64(i32::from_le_bytes(cursor.bytes(what)?).into()),
        6 => MetaValue::F64(f32::from_le_bytes(cursor.bytes(what)?).into()),
        7 => match cursor.bytes::<1>(what)? {
            [0] => MetaValue::Bool(false),
            [1] => MetaValue::Bool(true),
            [other] => return Err(cursor.format(what, format!("boolean {other}"), "0 or 1")),
        },
        10 => MetaValue::U64(u64::from_le_bytes(cursor.bytes(what)?)),
        11 => MetaValue::I64(i64::from_le_bytes(cursor.bytes(what)?)),
        12 => MetaValue::F64(f64::from_le_bytes(cursor.bytes(what)?)),
        other => return Err(unknown(cursor, key, other)),
    })
}

fn unknown(cursor: &Cursor<'_>, key: &str, kind: u32) -> CheckpointError {
    cursor.format(format_args!("the type of `{key}`"), kind.to_string(), "a number from 0 to 12")
}

/// Fewest bytes of an element in the file.
const fn element_bytes(kind: u32) -> Option<u64> {
    Some(match kind {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        10..=12 | STRING => 8,
        ARRAY => 4 + 8,
        _ => return None,
    })
}

/// The element type and length of an array.
fn array_head(cursor: &mut Cursor<'_>, key: &str) -> Result<(u32, u64), CheckpointError> {
    let kind = u32::from_le_bytes(cursor.bytes(format_args!("the element type of `{key}`"))?);
    let Some(bytes) = element_bytes(kind) else { return Err(unknown(cursor, key, kind)) };
    let what = format_args!("the length of `{key}`");
    Ok((kind, cursor.count(what, bytes, limits::ARRAY_LEN)?))
}

fn array(cursor: &mut Cursor<'_>, key: &str, skip: bool) -> Result<Value, CheckpointError> {
    let (kind, len) = array_head(cursor, key)?;
    // An array of the wrong kind is kept, so that its role can complain.
    let expected = (kind == STRING) == matches!(key, TOKENS | MERGES);
    if kind == ARRAY || (skip && expected) {
        pass_elements(cursor, key, kind, len, 1)?;
        return Ok(Value::SetAside { len });
    }
    let array = match kind {
        STRING => MetaArray::Strings(strings(cursor, key, len)?),
        kind => scalars(cursor, key, kind, len)?,
    };
    Ok(Value::Kept(MetaValue::Array(array)))
}

/// Checks the elements of an array that is not kept. No known key holds arrays of arrays.
fn pass_elements(
    cursor: &mut Cursor<'_>,
    key: &str,
    kind: u32,
    len: u64,
    depth: u32,
) -> Result<(), CheckpointError> {
    let what = format_args!("an element of `{key}`");
    match kind {
        ARRAY if depth == limits::ARRAY_DEPTH => {
            let needed = format!("arrays at most {} deep", limits::ARRAY_DEPTH);
            Err(cursor.format(format_args!("array `{key}`"), "a deeper one".to_owned(), &needed))
        }
        ARRAY => (0..len).try_for_each(|_| {
            let (kind, len) = array_head(cursor, key)?;
            pass_elements(cursor, key, kind, len, depth + 1)
        }),
        STRING => (0..len).try_for_each(|_| {
            let bytes = cursor.count(what, 1, limits::STRING_BYTES)?;
            cursor.skip(what, bytes)
        }),
        kind => {
            let bytes = element_bytes(kind).expect("the kind was checked with the length");
            cursor.skip(what, bytes * len)
        }
    }
}

/// Strings in one allocation of the right size: they are measured first and read second.
fn strings(cursor: &mut Cursor<'_>, key: &str, len: u64) -> Result<StringArray, CheckpointError> {
    let start = cursor.position();
    pass_elements(cursor, key, STRING, len, 1)?;
    let text_bytes = cursor.position() - start - 8 * len;
    cursor.charge(format_args!("the strings of `{key}`"), text_bytes + 4 * len)?;
    cursor.rewind(start);
    let mut text = vec![0; text_bytes as usize];
    let mut ends = Vec::with_capacity(len as usize);
    let mut end = 0;
    for _ in 0..len {
        let what = format_args!("an element of `{key}`");
        let bytes = cursor.count(what, 1, limits::STRING_BYTES)? as usize;
        // A file that changes between the two readings is caught here.
        let Some(out) = text.get_mut(end..end + bytes) else {
            return Err(cursor.format(what, "another length".to_owned(), "the one read before"));
        };
        cursor.fill(what, out)?;
        end += bytes;
        ends.push(end as u32);
    }
    StringArray::from_parts(text, ends).map_err(|index_and_bytes| {
        let (index, bytes) = index_and_bytes;
        cursor.not_utf8(format_args!("element {index} of `{key}`"), &bytes)
    })
}

fn scalars(
    cursor: &mut Cursor<'_>,
    key: &str,
    kind: u32,
    len: u64,
) -> Result<MetaArray, CheckpointError> {
    // The widest element: booleans take one byte, everything else is widened to eight.
    cursor.charge(format_args!("the elements of `{key}`"), 8 * len)?;
    let n = len as usize;
    let mut array = match kind {
        1 | 3 | 5 | 11 => MetaArray::I64s(Vec::with_capacity(n)),
        6 | 12 => MetaArray::F64s(Vec::with_capacity(n)),
        7 => MetaArray::Bools(Vec::with_capacity(n)),
        _ => MetaArray::U64s(Vec::with_capacity(n)),
    };
    for _ in 0..len {
        match (&mut array, scalar(cursor, key, kind)?) {
            (MetaArray::U64s(values), MetaValue::U64(value)) => values.push(value),
            (MetaArray::I64s(values), MetaValue::I64(value)) => values.push(value),
            (MetaArray::F64s(values), MetaValue::F64(value)) => values.push(value),
            (MetaArray::Bools(values), MetaValue::Bool(value)) => values.push(value),
            (array, value) => unreachable!("{} in {array:?}", value.kind()),
        }
    }
    Ok(array)
}

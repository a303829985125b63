//! The header of a safetensors file, tensor by tensor, each checked before it is handed on.

use std::fmt;
use std::path::Path;

use serde::de::{self, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::dtype::Dtype;
use crate::error::{CheckpointError, printable};
use crate::json;
use crate::limits::{self, Budget};
use crate::source::Source;

/// Bytes of the header's length.
const LENGTH_BYTES: u64 = 8;

/// Longest token of a header: a value of `__metadata__`, which some writers fill with a description of all tensors.
const TOKEN_BYTES: u64 = 1 << 22;

/// What a tensor costs while a header is read: its span, twice while the list grows.
const SPAN_OVERHEAD: u64 = 2 * size_of::<Span>() as u64;

/// Where a tensor's bytes begin and end in the data section.
type Span = [u64; 2];

/// A tensor's description. Its bytes lie inside the file.
#[derive(Debug)]
pub(crate) struct Entry<'a> {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: &'a [u64],
    /// Absolute.
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

/// Takes descriptions as they are read; it charges what it keeps.
pub(crate) type Sink<'s> = dyn FnMut(Entry<'_>, &mut Budget) -> Result<(), CheckpointError> + 's;

/// Walks the header of a file. The bytes of its tensors fill the file, without gaps and without sharing any.
///
/// # Errors
/// Class `format`, `unsupported`, `limit` or `io`; or what `sink` refuses.
pub(crate) fn read(
    path: &Path,
    source: &dyn Source,
    budget: &mut Budget,
    sink: &mut Sink<'_>,
) -> Result<(), CheckpointError> {
    let file = File::open(path, source)?;
    let mut spans = file.walk(budget, sink)?;
    spans.sort_unstable();
    let fault = fault(&spans, file.data_bytes());
    budget.give(SPAN_OVERHEAD * spans.len() as u64);
    fault.map_or(Ok(()), |fault| Err(file.explain(&fault, budget)))
}

pub(crate) fn charge(path: &Path, budget: &mut Budget, bytes: u64) -> Result<(), CheckpointError> {
    if budget.take(bytes) {
        return Ok(());
    }
    Err(CheckpointError::Limit {
        file: path.to_owned(),
        what: "memory for the headers up to this file's".to_owned(),
        found: (limits::HEADER_MEMORY - budget.mark()).saturating_add(bytes),
        limit: limits::HEADER_MEMORY,
    })
}

/// What is wrong with the spans of a file as a whole.
#[derive(Debug, PartialEq, Eq)]
enum Fault {
    /// The first begins before the second, or with it, and ends behind its begin.
    Shared(Span, Span),
    /// Bytes of no tensor.
    Unused(Span),
}

fn fault(sorted: &[Span], data_bytes: u64) -> Option<Fault> {
    let mut last = [0, 0];
    for span in sorted {
        let [begin, end] = *span;
        if begin < last[1] {
            return Some(Fault::Shared(last, *span));
        }
        if begin > last[1] {
            return Some(Fault::Unused([last[1], begin]));
        }
        last = [begin, end];
    }
    (last[1] < data_bytes).then_some(Fault::Unused([last[1], data_bytes]))
}

/// A file whose header's length has been checked.
struct File<'a> {
    path: &'a Path,
    source: &'a dyn Source,
    /// Where the data section begins.
    data: u64,
}

impl<'a> File<'a> {
    fn open(path: &'a Path, source: &'a dyn Source) -> Result<Self, CheckpointError> {
        let size = source.len();
        let mut file = Self { path, source, data: LENGTH_BYTES };
        if size < LENGTH_BYTES {
            let found = format!("the end of the file after {size} bytes");
            return Err(file.format("the header's length", found, format!("{LENGTH_BYTES} bytes")));
        }
        let mut length = [0; LENGTH_BYTES as usize];
        let outcome = source.read_at(0, &mut length);
        outcome.map_err(|source| CheckpointError::Io { file: path.to_owned(), source })?;
        let length = u64::from_le_bytes(length);
        if length > size - LENGTH_BYTES {
            let needed = format!("at most the {} bytes that follow", size - LENGTH_BYTES);
            return Err(file.format("the header's length", format!("{length} bytes"), needed));
        }
        if length > limits::SAFETENSORS_HEADER_BYTES {
            return Err(CheckpointError::Limit {
                file: path.to_owned(),
                what: "bytes of the header".to_owned(),
                found: length,
                limit: limits::SAFETENSORS_HEADER_BYTES,
            });
        }
        file.data = LENGTH_BYTES + length;
        Ok(file)
    }

    fn data_bytes(&self) -> u64 {
        self.source.len() - self.data
    }

    /// Hands every tensor to `sink`; the spans of all.
    fn walk(&self, budget: &mut Budget, sink: &mut Sink<'_>) -> Result<Vec<Span>, CheckpointError> {
        let mut walk =
            Walk { file: self, budget, sink, spans: Vec::new(), current: None, refused: None };
        let range = LENGTH_BYTES..self.data;
        let outcome = json::stream(self.source, range, TOKEN_BYTES, &mut walk);
        let Walk { spans, current, refused, .. } = walk;
        match (refused, outcome) {
            (Some(refused), _) => Err(refused),
            (None, Ok(())) => Ok(spans),
            (None, Err(error)) => Err(error.of_file(self.path, |found| {
                let what = current.map_or_else(
                    || "the header".to_owned(),
                    |name| format!("the header at tensor `{}`", printable(&name)),
                );
                let needed = "a JSON object with dtype, shape and data_offsets of every tensor";
                self.format(&what, found, needed.to_owned())
            })),
        }
    }

    /// One tensor: its element type, shape and place.
    fn check(&self, name: &str, raw: &Description) -> Result<(Dtype, Span), CheckpointError> {
        let what = || format!("tensor `{}`", printable(name));
        if name.is_empty() || name.len() as u64 > limits::NAME_BYTES {
            let needed = format!("1 to {} bytes", limits::NAME_BYTES);
            return Err(self.format("a tensor's name", format!("{} bytes", name.len()), needed));
        }
        let Some(dtype) = Dtype::of(&raw.dtype) else {
            return Err(CheckpointError::Unsupported {
                file: self.path.to_owned(),
                what: what(),
                found: format!("type `{}`", printable(&raw.dtype)),
                supported: Dtype::names(),
            });
        };
        let shape = raw.shape.as_slice();
        if shape.contains(&0) {
            return Err(self.format(&what(), format!("shape {shape:?}"), "positive dimensions"));
        }
        let [begin, end] = raw.data_offsets;
        let bytes = shape.iter().try_fold(dtype.bytes(), |bytes, n| bytes.checked_mul(*n));
        let found = || format!("shape {shape:?} of {dtype} at bytes {begin} to {end}");
        if bytes.is_none() || end.checked_sub(begin) != bytes {
            let needed = bytes.map_or_else(
                || "a shape whose size can be computed".to_owned(),
                |bytes| format!("{bytes} bytes by its shape"),
            );
            return Err(self.format(&what(), found(), needed));
        }
        if end > self.data_bytes() {
            let needed = format!("an end inside the {} bytes of data", self.data_bytes());
            return Err(self.format(&what(), found(), needed));
        }
        if end - begin > limits::TENSOR_BYTES {
            return Err(CheckpointError::Limit {
                file: self.path.to_owned(),
                what: format!("bytes of {}", what()),
                found: end - begin,
                limit: limits::TENSOR_BYTES,
            });
        }
        Ok((dtype, [begin, end]))
    }

    /// Walks the header again for the names that a message needs.
    fn explain(&self, fault: &Fault, budget: &mut Budget) -> CheckpointError {
        let (first, second) = match *fault {
            Fault::Unused([begin, end]) => {
                let what = format!("bytes {begin} to {end} of the data");
                return self.format(&what, "no tensor".to_owned(), "tensors without gaps");
            }
            Fault::Shared(first, second) => (first, second),
        };
        let mut names = Vec::new();
        let outcome = self.walk(budget, &mut |entry, _| {
            let begin = entry.offset - self.data;
            if [first, second].contains(&[begin, begin + entry.bytes]) && names.len() < 2 {
                names.push(printable(&entry.name));
            }
            Ok(())
        });
        if let Err(error) = outcome {
            return error;
        }
        let [begin, end] = [second[0], first[1].min(second[1])];
        let what = format!("tensors `{}`", names.join("` and `"));
        let found = format!("both hold bytes {begin} to {end} of the data");
        self.format(&what, found, "bytes of its own for every tensor")
    }

    fn format(&self, what: &str, found: String, needed: impl Into<String>) -> CheckpointError {
        CheckpointError::Format {
            file: self.path.to_owned(),
            what: what.to_owned(),
            found,
            needed: needed.into(),
        }
    }
}

/// The header's object, member by member.
struct Walk<'a, 's> {
    file: &'a File<'a>,
    budget: &'a mut Budget,
    sink: &'a mut Sink<'s>,
    spans: Vec<Span>,
    /// The tensor that is being read.
    current: Option<String>,
    /// An error that is ours and not the JSON parser's.
    refused: Option<CheckpointError>,
}

impl Walk<'_, '_> {
    fn tensor(&mut self, name: String, raw: &Description) -> Result<(), CheckpointError> {
        let (dtype, span) = self.file.check(&name, raw)?;
        charge(self.file.path, self.budget, SPAN_OVERHEAD)?;
        self.spans.push(span);
        let [begin, end] = span;
        let entry = Entry {
            name,
            dtype,
            shape: raw.shape.as_slice(),
            offset: self.file.data + begin,
            bytes: end - begin,
        };
        (self.sink)(entry, self.budget)
    }
}

impl<'de> DeserializeSeed<'de> for &mut Walk<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for &mut Walk<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        while let Some(name) = members.next_key::<String>()? {
            if name == "__metadata__" {
                members.next_value_seed(Labels)?;
                continue;
            }
            self.current = Some(name);
            let description = members.next_value::<Description>()?;
            let name = self.current.take().unwrap_or_default();
            if let Err(refused) = self.tensor(name, &description) {
                self.refused = Some(refused);
                return Err(de::Error::custom("refused"));
            }
        }
        Ok(())
    }
}

/// `__metadata__`: texts by name, for people.
struct Labels;

impl<'de> DeserializeSeed<'de> for Labels {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Labels {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of strings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        while members.next_entry::<IgnoredAny, String>()?.is_some() {}
        Ok(())
    }
}

/// A tensor's description as it stands in the file.
struct Description {
    dtype: String,
    shape: Shape,
    data_offsets: Span,
}

impl<'de> de::Deserialize<'de> for Description {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Fields)
    }
}

struct Fields;

impl<'de> Visitor<'de> for Fields {
    type Value = Description;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with dtype, shape and data_offsets")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Description, A::Error> {
        let (mut dtype, mut shape, mut data_offsets) = (None, None, None);
        while let Some(field) = members.next_key::<String>()? {
            let again = match field.as_str() {
                "dtype" => dtype.replace(members.next_value()?).is_some(),
                "shape" => shape.replace(members.next_value()?).is_some(),
                "data_offsets" => data_offsets.replace(members.next_value()?).is_some(),
                other => {
                    return Err(de::Error::unknown_field(
                        other,
                        &["dtype", "shape", "data_offsets"],
                    ));
                }
            };
            if again {
                return Err(de::Error::custom(format_args!("a second `{field}`")));
            }
        }
        Ok(Description {
            dtype: dtype.ok_or_else(|| de::Error::missing_field("dtype"))?,
            shape: shape.ok_or_else(|| de::Error::missing_field("shape"))?,
            data_offsets: data_offsets.ok_or_else(|| de::Error::missing_field("data_offsets"))?,
        })
    }
}

/// Dimensions, as many as there may be, without an allocation.
#[derive(Default)]
struct Shape {
    dims: [u64; limits::SAFETENSORS_DIMS],
    len: usize,
}

impl Shape {
    fn as_slice(&self) -> &[u64] {
        &self.dims[..self.len]
    }
}

impl<'de> de::Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(Dims)
    }
}

struct Dims;

impl<'de> Visitor<'de> for Dims {
    type Value = Shape;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {} dimensions", limits::SAFETENSORS_DIMS)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Shape, A::Error> {
        let mut shape = Shape::default();
        while let Some(n) = list.next_element()? {
            let Some(place) = shape.dims.get_mut(shape.len) else {
                return Err(de::Error::invalid_length(shape.len + 1, &self));
            };
            *place = n;
            shape.len += 1;
        }
        Ok(shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_fill_the_data_and_share_nothing() {
        assert_eq!(fault(&[], 0), None);
        assert_eq!(fault(&[[0, 4], [4, 9]], 9), None);
        assert_eq!(fault(&[], 1), Some(Fault::Unused([0, 1])));
        assert_eq!(fault(&[[1, 4]], 4), Some(Fault::Unused([0, 1])));
        assert_eq!(fault(&[[0, 4], [5, 9]], 9), Some(Fault::Unused([4, 5])));
        assert_eq!(fault(&[[0, 4], [4, 9]], 10), Some(Fault::Unused([9, 10])));
        assert_eq!(fault(&[[0, 4], [3, 9]], 9), Some(Fault::Shared([0, 4], [3, 9])));
        assert_eq!(fault(&[[0, 4], [0, 4]], 4), Some(Fault::Shared([0, 4], [0, 4])));
    }
}

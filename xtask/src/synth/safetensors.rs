//! The safetensors container: which tensor goes to which file, headers, and data that is made or left out.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Map, Value, json};

use super::fill::{Fill, Stream};

/// How many bytes are made at once; a multiple of every value's size.
const CHUNK: usize = 1 << 20;

/// Types of elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DType {
    U32,
    Bf16,
    I64,
}

impl DType {
    const fn name(self) -> &'static str {
        match self {
            Self::U32 => "U32",
            Self::Bf16 => "BF16",
            Self::I64 => "I64",
        }
    }

    const fn bytes(self) -> u64 {
        match self {
            Self::Bf16 => 2,
            Self::U32 => 4,
            Self::I64 => 8,
        }
    }
}

/// A tensor to be written.
#[derive(Debug, Clone)]
pub struct Tensor {
    pub(super) name: String,
    pub(super) dtype: DType,
    /// Outermost dimension first.
    pub(super) shape: Vec<u64>,
    pub(super) fill: Fill,
}

impl Tensor {
    /// Bytes of its data.
    pub fn bytes(&self) -> u64 {
        self.shape.iter().product::<u64>() * self.dtype.bytes()
    }

    /// The name without `.weight`, `.scales` or `.biases`.
    fn module(&self) -> &str {
        self.name.rsplit_once('.').map_or(self.name.as_str(), |(module, _)| module)
    }
}

/// One file: its name and its tensors in order.
pub(super) struct Shard<'a> {
    pub(super) name: String,
    pub(super) tensors: Vec<&'a Tensor>,
}

/// Spreads tensors over files of about one size, modules together; but scales and biases of a `torn` module go to the
/// file after that of its weights (from the last file to the one before).
pub(super) fn shards<'a>(tensors: &'a [Tensor], files: usize, torn: &[String]) -> Vec<Shard<'a>> {
    let total: u64 = tensors.iter().map(Tensor::bytes).sum();
    let mut groups: Vec<Vec<&Tensor>> = vec![Vec::new(); files];
    let mut before = 0;
    let mut current = 0;
    for module in tensors.chunk_by(|a, b| a.module() == b.module()) {
        current = (u128::from(before) * files as u128 / u128::from(total)) as usize;
        let is_torn = torn.iter().any(|name| name == module[0].module());
        let other = if current + 1 < files { current + 1 } else { current.saturating_sub(1) };
        for tensor in module {
            let is_weight = tensor.name.ends_with(".weight");
            groups[if is_torn && !is_weight { other } else { current }].push(tensor);
            before += tensor.bytes();
        }
    }
    assert_eq!(current + 1, files, "every file has tensors");
    let name = |number| format!("model-{number:05}-of-{files:05}.safetensors");
    let groups = groups.into_iter().enumerate();
    groups.map(|(index, tensors)| Shard { name: name(index + 1), tensors }).collect()
}

/// `model.safetensors.index.json`.
pub(super) fn index(shards: &[Shard<'_>]) -> Value {
    let tensors = || {
        let of = |shard: &'_ Shard<'_>| -> Vec<_> {
            shard.tensors.iter().map(|tensor| (tensor.name.clone(), shard.name.clone())).collect()
        };
        shards.iter().flat_map(of)
    };
    let total: u64 =
        shards.iter().flat_map(|shard| &shard.tensors).map(|tensor| tensor.bytes()).sum();
    let map: BTreeMap<String, String> = tensors().collect();
    json!({ "metadata": { "total_size": total }, "weight_map": map })
}

/// Length and JSON of the header, padded so that the data begins at a multiple of 8.
fn header(shard: &Shard<'_>) -> Vec<u8> {
    let mut members = Map::new();
    members.insert("__metadata__".to_owned(), json!({ "format": "mlx" }));
    let mut offset = 0;
    for tensor in &shard.tensors {
        let end = offset + tensor.bytes();
        let member = json!({
            "dtype": tensor.dtype.name(),
            "shape": tensor.shape,
            "data_offsets": [offset, end],
        });
        members.insert(tensor.name.clone(), member);
        offset = end;
    }
    let mut json = Value::Object(members).to_string().into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    [&(json.len() as u64).to_le_bytes()[..], &json].concat()
}

/// Writes the header and the data of integer tensors; all other data is a hole.
pub(super) fn write_sparse(folder: &Path, shard: &Shard<'_>) -> Result<()> {
    let path = folder.join(&shard.name);
    let write = || -> std::io::Result<()> {
        let mut file = File::create_new(&path)?;
        let header = header(shard);
        file.write_all(&header)?;
        let mut at = header.len() as u64;
        for tensor in &shard.tensors {
            if let Fill::Integers(values) = &tensor.fill {
                file.seek(SeekFrom::Start(at))?;
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                file.write_all(&bytes)?;
            }
            at += tensor.bytes();
        }
        file.set_len(at)
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}

/// Writes the header and all data, made from `seed`; `progress` hears of every chunk.
pub(super) fn write_filled(
    folder: &Path,
    shard: &Shard<'_>,
    seed: u64,
    progress: &mut dyn FnMut(u64),
) -> Result<()> {
    let path = folder.join(&shard.name);
    let mut write = || -> std::io::Result<()> {
        let mut file = BufWriter::with_capacity(CHUNK, File::create_new(&path)?);
        file.write_all(&header(shard))?;
        let mut chunk = vec![0; CHUNK];
        for tensor in &shard.tensors {
            let mut stream = Stream::new(&tensor.fill, seed, &tensor.name);
            let mut left = tensor.bytes();
            while left > 0 {
                let bytes = &mut chunk[..left.min(CHUNK as u64) as usize];
                stream.next(bytes);
                file.write_all(bytes)?;
                left -= bytes.len() as u64;
                progress(bytes.len() as u64);
            }
        }
        file.into_inner()?.sync_all()
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::super::qwen38::{Geometry, tensors};
    use super::*;

    #[test]
    fn only_the_torn_modules_lie_in_two_files() {
        for geometry in [Geometry::published(), Geometry::small(4, 1 << 10)] {
            let tensors = tensors(&geometry);
            let shards = shards(&tensors, geometry.files, &geometry.torn());
            let mut homes: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
            for shard in &shards {
                for tensor in &shard.tensors {
                    let files = homes.entry(tensor.module()).or_default();
                    if !files.contains(&shard.name.as_str()) {
                        files.push(&shard.name);
                    }
                }
            }
            let mut torn: Vec<&str> =
                homes.iter().filter(|(_, files)| files.len() == 2).map(|(name, _)| *name).collect();
            let mut expected = geometry.torn();
            expected.sort_unstable();
            torn.sort_unstable();
            assert_eq!(torn, expected);
            assert!(homes.values().all(|files| files.len() <= 2));
            assert_eq!(
                shards.iter().map(|shard| shard.tensors.len()).sum::<usize>(),
                tensors.len()
            );
        }
    }

    #[test]
    fn files_are_of_about_one_size() {
        let geometry = Geometry::published();
        let tensors = tensors(&geometry);
        for shard in shards(&tensors, geometry.files, &geometry.torn()) {
            let bytes: u64 = shard.tensors.iter().map(|tensor| tensor.bytes()).sum();
            assert!((8_800_000_000..10_100_000_000).contains(&bytes), "{}: {bytes}", shard.name);
        }
    }

    #[test]
    fn a_header_describes_its_data_without_gaps() {
        let tensors = tensors(&Geometry::small(4, 1 << 10));
        let shards = shards(&tensors, 3, &[]);
        let header = header(&shards[1]);
        let length = u64::from_le_bytes(header[..8].try_into().unwrap());
        assert_eq!(length as usize, header.len() - 8);
        assert!(header.len().is_multiple_of(8));
        let json: Value = serde_json::from_slice(&header[8..]).unwrap();
        let mut end = 0;
        for (name, member) in json.as_object().unwrap().iter().skip(1) {
            assert_eq!(member["data_offsets"][0], end, "{name}");
            end = member["data_offsets"][1].as_u64().unwrap();
        }
        assert_eq!(end, shards[1].tensors.iter().map(|tensor| tensor.bytes()).sum::<u64>());
    }
}

//! Where every tensor lies.

use std::collections::BTreeMap;
use std::path::PathBuf;

use quant::BlockType;
use units::FileIndex;

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
    /// Its name in the file.
    pub name: String,
    /// Storage of its values.
    pub block_type: BlockType,
    /// Row-major: `[n]`, `[out, in]` or `[experts, out, in]`.
    pub shape: Vec<u64>,
    /// The file that holds it.
    pub file: FileIndex,
    /// Byte offset in that file.
    pub offset: u64,
    /// Its bytes.
    pub bytes: u64,
}

/// All tensors of a checkpoint by name.
#[derive(Debug, Clone, Default)]
pub struct TensorDirectory {
    tensors: BTreeMap<String, TensorInfo>,
}

impl TensorDirectory {
    /// The tensor of this name.
    pub fn get(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// All tensors by name.
    pub fn iter(&self) -> impl Iterator<Item = &TensorInfo> {
        self.tensors.values()
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Adds a tensor; the older one if the name is taken.
    pub(crate) fn insert(&mut self, tensor: TensorInfo) -> Option<TensorInfo> {
        self.tensors.insert(tensor.name.clone(), tensor)
    }
}

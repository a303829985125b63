//! Where every tensor lies.

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

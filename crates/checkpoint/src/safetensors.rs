//! Safetensors: one file's header, and the index that names the files of a model.
//!
//! The format: length of the header, a JSON object that describes tensors, their bytes without gaps. A header may
//! describe a hundred thousand tensors, so it is walked as a stream and each description is handed on at once.
//!
//! `header` reads one file, `index` the list of files; what names mean is none of their business.

mod dtype;
mod header;
mod index;

pub use self::dtype::Dtype;
pub(crate) use self::header::{Entry, charge, read};
pub(crate) use self::index::{Index, entries, files};

use std::path::Path;

use crate::error::{CheckpointError, printable};
use crate::limits::Budget;
use crate::source::Source;

/// A tensor as the header of its file describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SafeTensor {
    /// Its name.
    pub name: String,
    /// Type of its elements.
    pub dtype: Dtype,
    /// Row-major.
    pub shape: Vec<u64>,
    /// Byte offset in the file.
    pub offset: u64,
    /// Its bytes.
    pub bytes: u64,
}

/// Reads the header of one safetensors file, by name; `name` serves messages only.
///
/// # Errors
/// [`CheckpointError`] of class `format`, `unsupported`, `limit` or `io`.
pub fn parse_safetensors(
    name: &Path,
    source: &dyn Source,
) -> Result<Vec<SafeTensor>, CheckpointError> {
    let mut tensors = Vec::new();
    let mut budget = Budget::new();
    read(name, source, &mut budget, &mut |entry, budget| {
        let Entry { name: tensor, dtype, shape, offset, bytes } = entry;
        let cost = 2 * size_of::<SafeTensor>() + tensor.len() + 8 * shape.len() + 64;
        charge(name, budget, cost as u64)?;
        tensors.push(SafeTensor { name: tensor, dtype, shape: shape.to_vec(), offset, bytes });
        Ok(())
    })?;
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    match tensors.array_windows().find(|[first, second]| first.name == second.name) {
        None => Ok(tensors),
        Some([first, _]) => Err(CheckpointError::Format {
            file: name.to_owned(),
            what: format!("tensor `{}`", printable(&first.name)),
            found: "a second description".to_owned(),
            needed: "every name once".to_owned(),
        }),
    }
}

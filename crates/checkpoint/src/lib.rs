//! Weight files to a tensor directory, a model configuration and expert records.
//!
//! Pure parsing: positional reads of headers, never of weights. Everything from a file is hostile: counts, lengths,
//! offsets, overlaps and strings are checked against limits and the file's size before they are used.
//!
//! Start at [`open`] (containers), then [`bind`] (what a family needs, with every shape checked).
#![forbid(unsafe_code)]

mod config;
mod directory;
mod error;
mod gguf;
mod metadata;
mod records;
mod source;
mod tensors;
mod vocabulary;

pub use config::{DeltaNetShape, Family, HeadOrder, LayerKind, ModelConfig, Yarn};
pub use directory::{FileEntry, TensorDirectory, TensorInfo};
pub use error::{CheckpointError, ErrorClass};
pub use metadata::{MetaArray, MetaValue, Metadata, StringArray};
pub use quant::slot::{ExpertMatrices, SlotMatrix};
pub use records::{DIRECT_ALIGN, ExpertRecord, LayerRecords, Piece, Pieces, Records};
pub use source::{MemorySource, Source};
pub use tensors::{
    AttentionTensors, DeltaNetBa, DeltaNetInput, DeltaNetTensors, LayerTensors, MixerTensors,
    ModelTensors, SharedTensors,
};

use std::path::Path;

/// The headers of a model's files.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    /// Every file, in the order of [`units::FileIndex`].
    pub files: Vec<FileEntry>,
    /// Key-value pairs of the first file.
    pub metadata: Metadata,
    /// Every tensor of every file.
    pub directory: TensorDirectory,
    /// What is odd but harmless.
    pub warnings: Vec<String>,
}

/// A checkpoint with its roles assigned: which tensor is what, where every expert lies.
#[derive(Debug, Clone)]
pub struct Model {
    /// Sizes and constants.
    pub config: ModelConfig,
    /// Resident tensors by role.
    pub tensors: ModelTensors,
    /// Routed experts of the trunk.
    pub records: Records,
}

/// Opens a GGUF file, or all parts of a split one (any part may be named).
///
/// # Errors
/// [`CheckpointError`], with a class for programs to tell apart.
pub fn open(path: &Path) -> Result<Checkpoint, CheckpointError> {
    gguf::open(path)
}

/// Reads one unsplit GGUF file from any source; for tests and fuzzing.
///
/// # Errors
/// As [`open`].
pub fn parse(name: &Path, source: &dyn Source) -> Result<Checkpoint, CheckpointError> {
    gguf::parse_single(name, source)
}

/// Assigns roles: reads the configuration, finds every tensor that the family needs and checks its shape.
///
/// # Errors
/// [`CheckpointError`] of class `config`, `missing`, `shape` or `unsupported`.
pub fn bind(checkpoint: &Checkpoint) -> Result<Model, CheckpointError> {
    let config = config::read(checkpoint)?;
    vocabulary::check(checkpoint, &config)?;
    let finder = tensors::Finder::new(checkpoint, &config);
    let tensors = finder.resident()?;
    let records = records::Records::of(&finder)?;
    Ok(Model { config, tensors, records })
}

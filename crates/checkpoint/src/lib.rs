//! Weight files to a tensor directory, a model configuration and expert records.
//!
//! Pure parsing: positional reads of headers, never of weights. Everything from a file is hostile: counts, lengths,
//! offsets, overlaps and strings are checked against limits (`limits.rs`) and the file's size before they are used,
//! and no file makes parsing take more than 64 MiB.
//!
//! Nothing in a file that would change the output is left out silently: a tensor that nobody uses, a key of another
//! architecture's computation, a scaling that is not known are errors.
//!
//! Start at [`open`] (containers), then [`bind`] (what a family needs, with every shape checked).
#![forbid(unsafe_code)]

mod audit;
mod config;
mod directory;
mod error;
mod gguf;
mod limits;
mod metadata;
mod pieces;
mod records;
mod source;
mod tensors;
mod vocabulary;

pub use audit::{Audit, LayerAudit, PartBytes};
pub use config::{DeltaNetShape, Family, HeadOrder, LayerKind, ModelConfig, Yarn};
pub use directory::{FileEntry, Foreign, Part, Scales, TensorDirectory, TensorInfo, ValueMap};
pub use error::{CheckpointError, ErrorClass};
pub use metadata::{MetaArray, MetaValue, Metadata, StringArray, Vocabulary};
pub use pieces::{Blocks, DIRECT_ALIGN, FilePlace, Piece, Pieces, Tiles};
pub use quant::slot::{ExpertMatrices, SlotMatrix};
pub use records::{ExpertRecord, LayerRecords, Records};
pub use source::{MemorySource, Source};
pub use tensors::{
    AttentionTensors, DeltaNetBa, DeltaNetInput, DeltaNetTensors, LayerTensors, MixerTensors,
    ModelTensors, Role, SharedTensors,
};

use std::path::Path;

/// The headers of a model's files.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    /// Every file, in the order of [`units::FileIndex`]; at least one.
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
    gguf::open(path, Vocabulary::Load)
}

/// As [`open`], with a choice about the vocabulary: plans and inspections need its lengths only.
///
/// # Errors
/// As [`open`].
pub fn open_with(path: &Path, vocabulary: Vocabulary) -> Result<Checkpoint, CheckpointError> {
    gguf::open(path, vocabulary)
}

/// Reads one unsplit GGUF file from any source; for tests and fuzzing.
///
/// # Errors
/// As [`open`].
pub fn parse(name: &Path, source: &dyn Source) -> Result<Checkpoint, CheckpointError> {
    parse_parts(&[(name, source)], Vocabulary::Load)
}

/// Reads a model from sources, which are its parts in order; names serve messages only.
///
/// # Errors
/// As [`open`].
///
/// # Panics
/// If there is no part.
pub fn parse_parts(
    parts: &[(&Path, &dyn Source)],
    vocabulary: Vocabulary,
) -> Result<Checkpoint, CheckpointError> {
    assert!(!parts.is_empty(), "a model has at least one part");
    gguf::parse(parts, vocabulary)
}

/// Assigns roles: reads the configuration, finds every tensor that the family needs and checks its shape.
///
/// Needs lengths of the vocabulary, not the vocabulary itself.
///
/// # Errors
/// [`CheckpointError`] of class `config`, `missing`, `shape`, `unsupported` or `limit`.
pub fn bind(checkpoint: &Checkpoint) -> Result<Model, CheckpointError> {
    let config = config::read(checkpoint)?;
    vocabulary::check(checkpoint, &config)?;
    let finder = tensors::Finder::new(checkpoint, &config);
    let tensors = finder.resident()?;
    let records = Records::of(&finder)?;
    finder.all_used(&tensors, &records)?;
    Ok(Model { config, tensors, records })
}

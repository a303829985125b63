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
mod cursor;
mod directory;
mod error;
mod finder;
mod folder;
mod gguf;
mod json;
mod limits;
mod metadata;
pub mod pack;
mod pieces;
mod records;
mod safetensors;
mod source;
mod tensors;
mod vocabulary;

pub use audit::{Audit, LayerAudit, PartBytes};
pub use config::{
    DeltaNetShape, Family, GateActivation, HeadOrder, HyperShape, IndexerShape, LayerKind,
    ModelConfig, NgramShape, Yarn,
};
pub use directory::{
    FileEntry, Foreign, Part, Scales, Stacked, TensorDirectory, TensorInfo, ValueMap,
};
pub use error::{CheckpointError, ErrorClass};
pub use metadata::{MetaArray, MetaValue, Metadata, StringArray, Vocabulary};
pub use pieces::{Blocks, DIRECT_ALIGN, FilePlace, Piece, Pieces, Tiles};
pub use quant::slot::{ExpertMatrices, SlotMatrix};
pub use records::{ExpertRecord, LayerRecords, NgramTable, Records};
pub use safetensors::{Dtype, SafeTensor, parse_safetensors};
pub use source::{MemorySource, Source};
pub use tensors::{
    AttentionTensors, DeltaNetBa, DeltaNetInput, DeltaNetTensors, DraftProjection, DraftTensors,
    IndexerTensors, InputTensors, LayerTensors, MixerTensors, ModelTensors, NgramTensors, Role,
    SharedTensors, StreamTensors,
};
pub use vocabulary::SPLIT_RULES;

use std::path::{Path, PathBuf};

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

impl Checkpoint {
    /// The file that the metadata comes from: for messages about it.
    pub fn metadata_file(&self) -> &Path {
        self.metadata.file().unwrap_or(&self.files[0].path)
    }

    /// Every file that the model may be read from, by the names that it was found under: none of them may be written
    /// to. Of a folder also those beside the weights, some of which need not be there.
    pub fn inputs(&self) -> Vec<PathBuf> {
        let weights = self.files.iter().map(|file| file.path.clone());
        weights.chain(self.metadata.file().into_iter().flat_map(folder::files_beside)).collect()
    }
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
    /// The n-gram table, of a family that has one.
    pub ngram_table: Option<NgramTable>,
    /// The draft block, if the files have one that is understood. The trunk runs without it.
    pub draft: Option<DraftTensors>,
    /// What is odd but harmless.
    pub warnings: Vec<String>,
}

impl Model {
    /// The routed experts of the trunk, and those of the draft block as one more layer behind them.
    ///
    /// # Panics
    /// If the model has no draft block.
    pub fn records_with_draft(&self) -> Records {
        let draft = self.draft.as_ref().expect("the model has a draft block");
        self.records.with_layer(draft.experts.clone())
    }
}

/// Opens a model: a GGUF file, or all parts of a split one (any part may be named); a folder with `config.json` and
/// safetensors files, of which any file may be named too; or a pack ([`pack`]).
///
/// # Errors
/// [`CheckpointError`], with a class for programs to tell apart.
pub fn open(path: &Path) -> Result<Checkpoint, CheckpointError> {
    open_with(path, Vocabulary::Load)
}

/// As [`open`], with a choice about the vocabulary: plans and inspections need its lengths only.
///
/// # Errors
/// As [`open`].
pub fn open_with(path: &Path, vocabulary: Vocabulary) -> Result<Checkpoint, CheckpointError> {
    if folder::is_for(path) {
        return folder::open(path, vocabulary);
    }
    if pack::is_pack(path) {
        return Ok(pack::open(path, vocabulary)?.0);
    }
    gguf::open(path, vocabulary)
}

/// Reads a model folder from any sources: its configuration, its safetensors files in order, its index if it has one.
/// Names serve messages, and those of the files the index; for tests and fuzzing.
///
/// # Errors
/// As [`open`].
pub fn parse_folder(
    config: (&Path, &dyn Source),
    files: &[(&Path, &dyn Source)],
    index: Option<(&Path, &dyn Source)>,
) -> Result<Checkpoint, CheckpointError> {
    folder::parse(config, files, index)
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

/// Reads the text side of a model folder from any sources by their names: its vocabulary, chat template and end
/// tokens, as [`open`] adds them to the metadata of the rest. For tests and fuzzing.
///
/// - `architecture`: what decides where the files leave it open
/// - `rows`: of the embedding, which the vocabulary is filled up to
///
/// # Errors
/// As [`open`].
pub fn parse_text(
    files: &[(&str, &dyn Source)],
    architecture: &str,
    rows: Option<u64>,
) -> Result<Metadata, CheckpointError> {
    let mut metadata = Metadata::new();
    let architecture = MetaValue::String(architecture.to_owned());
    metadata.insert("general.architecture".to_owned(), architecture);
    let wanted = folder::text::Wanted { vocabulary: Vocabulary::Load, rows };
    folder::text::parse_text(files, &wanted, &mut metadata)?;
    Ok(metadata)
}

/// Assigns roles: reads the configuration, finds every tensor that the family needs and checks its shape.
///
/// Needs lengths of the vocabulary, not the vocabulary itself.
///
/// # Errors
/// [`CheckpointError`] of class `config`, `missing`, `shape`, `unsupported` or `limit`.
pub fn bind(checkpoint: &Checkpoint) -> Result<Model, CheckpointError> {
    let mut warnings = Vec::new();
    let config = config::read(checkpoint, &mut warnings)?;
    vocabulary::check(checkpoint, &config)?;
    let finder = finder::Finder::new(checkpoint, &config);
    let tensors = finder.resident()?;
    let records = Records::of(&finder)?;
    let ngram_table = finder.ngram_table()?;
    finder.all_used(&tensors, &records, ngram_table.as_ref())?;
    // A trunk is whole without its draft block, so what is wrong with that is no reason to refuse it.
    let draft = finder.draft().unwrap_or_else(|error| {
        warnings.push(error.without_draft());
        None
    });
    Ok(Model { config, tensors, records, ngram_table, draft, warnings })
}

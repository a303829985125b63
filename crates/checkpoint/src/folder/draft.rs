//! The draft head of a folder: tensors called `mtp.*`, among the others or in a file of their own.
//!
//! It becomes the block behind the trunk, as GGUF files have it. A trunk is whole without it, so whatever is wrong with
//! it is a warning and leaves it out.

use std::path::{Path, PathBuf};

use super::build::{Builder, ExpertSizes, Layout};
use super::config::Config;
use super::gather::Gathered;
use super::names::{self, Meaning};
use crate::Checkpoint;
use crate::config::Family;
use crate::directory::{FileEntry, TensorInfo};
use crate::error::{CheckpointError, printable};
use crate::limits::{self, Budget};
use crate::metadata::MetaValue;
use crate::safetensors::Entry;

/// The file that conversions put it into, which their index does not know.
pub(super) const FILE: &str = "mtp.safetensors";

/// Its tensors as they are read.
pub(super) struct Draft {
    family: Family,
    /// The block that it becomes.
    block: u32,
    gathered: Gathered,
    /// What reading it has cost.
    charged: u64,
    /// What is wrong with it, if something is.
    failed: Option<CheckpointError>,
    /// Whether it has a file of its own, which is the last then.
    own_file: bool,
}

impl Draft {
    /// None yet; nothing if the model cannot have one.
    pub(super) fn new(config: &Config) -> Option<Self> {
        let blocks = config.metadata.u64(&block_count(config.family))?;
        let known = config.family.is_hybrid() && (1..limits::LAYERS).contains(&blocks);
        known.then(|| Self {
            family: config.family,
            block: blocks as u32,
            gathered: Gathered::new(config.family, Some(blocks as u32)),
            charged: 0,
            failed: None,
            own_file: false,
        })
    }

    /// Whether a tensor is one of a draft head, by its name.
    pub(super) fn has(family: Family, name: &str) -> bool {
        names::meaning(family, name) == Meaning::Draft
    }

    /// Whether nothing was found so far.
    pub(super) const fn is_empty(&self) -> bool {
        self.gathered.total == 0 && self.failed.is_none()
    }

    /// Takes a tensor of the last of `files`.
    pub(super) fn add(&mut self, entry: &Entry<'_>, files: &[FileEntry], budget: &mut Budget) {
        if self.failed.is_some() {
            return;
        }
        let before = budget.mark();
        let outcome = self.gathered.add(entry, files, budget);
        self.charged += before - budget.mark();
        if let Err(error) = outcome {
            self.fail(error, budget);
        }
    }

    /// It has a file of its own, the last.
    pub(super) const fn has_own_file(&mut self) {
        self.own_file = true;
    }

    /// Leaves it out.
    pub(super) fn fail(&mut self, error: CheckpointError, budget: &mut Budget) {
        self.gathered = Gathered::new(self.family, Some(self.block));
        budget.give(std::mem::take(&mut self.charged));
        self.failed.get_or_insert(error);
    }

    /// Its tensors, if it has any.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(super) fn tensors(
        &mut self,
        builder: &Builder<'_>,
        (layout, sizes): (Option<Layout>, Result<Option<ExpertSizes>, CheckpointError>),
        trunk: &[TensorInfo],
        budget: &mut Budget,
    ) -> Result<Vec<TensorInfo>, CheckpointError> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        if self.gathered.total == 0 {
            return Ok(Vec::new());
        }
        self.gathered.seal(builder.files, self.block)?;
        self.check_layout(builder, layout)?;
        let mut tensors = builder.tensors(&self.gathered, layout, sizes?, budget)?;
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        let twins = tensors.array_windows().find(|[first, second]| first.name == second.name);
        let front = format!("blk.{}.", self.block);
        let same = trunk.iter().find(|tensor| tensor.name.starts_with(&front));
        match twins.map(|[_, second]| second).or(same) {
            None => Ok(tensors),
            Some(tensor) => Err(CheckpointError::Format {
                file: builder.files[tensor.file.get()].path.clone(),
                what: format!("tensor `{}`", printable(tensor.spelling())),
                found: format!("a second form of something in block {}", self.block),
                needed: "every tensor of the draft head once".to_owned(),
            }),
        }
    }

    /// Whether what wrote the trunk wrote this too, or something that treats norms alike: their values do not tell.
    fn check_layout(
        &self,
        builder: &Builder<'_>,
        layout: Option<Layout>,
    ) -> Result<(), CheckpointError> {
        // Conversions to MLX stack experts under this name, and nothing else does.
        let stacked = self.gathered.modules.values().find(|m| m.name.contains(".switch_mlp."));
        let alike = match layout {
            Some(Layout::Converted) => stacked.is_some(),
            Some(Layout::ConvertedCentred) => stacked.is_some() && !self.own_file,
            Some(Layout::Original) => stacked.is_none(),
            // The first norm is refused.
            None => true,
        };
        if alike {
            return Ok(());
        }
        let any = stacked.or_else(|| self.gathered.modules.values().next());
        Err(CheckpointError::Unsupported {
            file: builder.files.last().expect("a model has files").path.clone(),
            what: "the draft head".to_owned(),
            found: format!(
                "`{}`, in another layout than the model",
                any.map_or_else(|| "mtp.*".to_owned(), |module| printable(&module.name))
            ),
            supported: "one layout for both, which tells how norms are stored".to_owned(),
        })
    }

    /// Adds it to a checkpoint, or says why it is left out.
    pub(super) fn settle(
        &self,
        found: Result<Vec<TensorInfo>, CheckpointError>,
        tensors: &mut Vec<TensorInfo>,
        checkpoint: &mut Checkpoint,
    ) {
        match found {
            Ok(found) if !found.is_empty() => {
                tensors.extend(found);
                let (metadata, blocks) = (&mut checkpoint.metadata, u64::from(self.block) + 1);
                metadata.insert(block_count(self.family), MetaValue::U64(blocks));
                let key = format!("{}.nextn_predict_layers", self.family);
                metadata.insert(key, MetaValue::U64(1));
                return;
            }
            Ok(_) => {}
            Err(error) => checkpoint.warnings.push(error.without_draft()),
        }
        if self.own_file {
            checkpoint.files.pop();
        }
    }

    /// Its tensors.
    pub(super) const fn gathered(&self) -> &Gathered {
        &self.gathered
    }
}

fn block_count(family: Family) -> String {
    format!("{family}.block_count")
}

/// Its file beside the others, if it is not one of them.
pub(super) fn beside(folder: &Path, files: &[FileEntry]) -> Option<PathBuf> {
    let known = files.iter().any(|file| file.path.file_name().is_some_and(|name| name == FILE));
    let path = folder.join(FILE);
    (!known && path.is_file()).then_some(path)
}

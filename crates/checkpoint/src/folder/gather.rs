//! Tensors of all files as they are read: modules by name, experts in a list.
//!
//! Where every expert has tensors of its own there may be two hundred thousand; their names are numbers here, and are
//! put together again for messages only.

use std::collections::BTreeMap;

use units::FileIndex;

use super::names::{self, Matrix, Meaning, Plane, Prefix, Role};
use crate::config::Family;
use crate::directory::FileEntry;
use crate::error::{CheckpointError, printable};
use crate::limits::{self, Budget};
use crate::pieces::FilePlace;
use crate::safetensors::{Dtype, Entry, charge};

/// Dimensions of a tensor of these families.
const DIMS: usize = 3;

/// What a module costs beside the bytes of its names: its share of a tree node, half empty at worst, and what becomes
/// of it, twice while a list grows.
const MODULE_OVERHEAD: u64 = 2 * size_of::<Module>() as u64 + 1024;
/// What an expert's tensor costs: itself, twice while the list grows.
const EXPERT_OVERHEAD: u64 = 2 * size_of::<ExpertTensor>() as u64;

/// A tensor as it lies in its file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Raw {
    pub(super) dtype: Dtype,
    dims: [u64; DIMS],
    len: u8,
    pub(super) place: FilePlace,
}

impl Raw {
    pub(super) fn shape(&self) -> &[u64] {
        &self.dims[..usize::from(self.len)]
    }
}

/// A module's tensors, by [`Plane`].
pub(super) type Planes = [Option<Raw>; Plane::COUNT];

/// The tensors of a module and how they are called in their files.
#[derive(Debug)]
pub(super) struct Module {
    pub(super) role: Role,
    /// Its name in the files, without an ending.
    pub(super) name: String,
    /// Whether the files call its values by that name alone.
    bare: bool,
    pub(super) planes: Planes,
}

impl Module {
    fn new(role: Role, name: &str, plane: Plane) -> Self {
        let name = base(name, plane).0.to_owned();
        Self { role, name, bare: false, planes: [None; Plane::COUNT] }
    }

    /// Takes one of its tensors, of the last of the files.
    fn add(
        &mut self,
        plane: Plane,
        (entry, files): (&Entry<'_>, &[FileEntry]),
    ) -> Result<(), CheckpointError> {
        let (base, bare) = base(&entry.name, plane);
        let raw = raw(entry, files)?;
        if self.name != base {
            return Err(CheckpointError::Format {
                file: files[raw.place.file.get()].path.clone(),
                what: format!("tensor `{}`", printable(&entry.name)),
                found: format!("the module `{}` under another name", printable(&self.name)),
                needed: "one name for a module".to_owned(),
            });
        }
        self.bare |= bare && plane == Plane::Weight;
        match self.planes[plane as usize].replace(raw) {
            None => Ok(()),
            Some(first) => Err(twice(files, &entry.name, first.place.file, raw.place.file)),
        }
    }

    /// How one of its tensors is called.
    pub(super) fn spelled(&self, plane: Plane) -> String {
        match plane {
            Plane::Weight if self.bare => self.name.clone(),
            Plane::ScaleInv if self.bare => format!("{}_scale_inv", self.name),
            _ => format!("{}{}", self.name, plane.ending()),
        }
    }
}

/// A tensor of one expert.
#[derive(Debug, Clone, Copy)]
struct ExpertTensor {
    key: ExpertTensorKey,
    prefix: Prefix,
    dtype: Dtype,
    dims: [u32; 2],
    file: FileIndex,
    offset: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct ExpertTensorKey {
    layer: u32,
    matrix: Matrix,
    expert: u32,
    plane: Plane,
}

impl ExpertTensor {
    fn spelled(&self) -> String {
        let ExpertTensorKey { layer, matrix, expert, plane } = self.key;
        Stack { layer, matrix, prefix: self.prefix, experts: Vec::new() }.spelled(expert, plane)
    }

    fn raw(&self) -> Raw {
        let [rows, cols] = self.dims.map(u64::from);
        let place = FilePlace { file: self.file, offset: self.offset };
        Raw { dtype: self.dtype, dims: [rows, cols, 0], len: 2, place }
    }
}

/// One matrix of all experts of a layer, each in tensors of its own.
#[derive(Debug)]
pub(super) struct Stack {
    pub(super) layer: u32,
    pub(super) matrix: Matrix,
    prefix: Prefix,
    /// In order; an expert that is in no file is in no list.
    pub(super) experts: Vec<(u32, Planes)>,
}

impl Stack {
    /// What an expert's matrix is called, without an ending.
    pub(super) fn module(&self, expert: u32) -> String {
        let (layer, matrix) = (self.prefix.layer(self.layer), self.matrix.spelled());
        format!("{layer}mlp.experts.{expert}.{matrix}")
    }

    /// How a tensor of it is called.
    pub(super) fn spelled(&self, expert: u32, plane: Plane) -> String {
        format!("{}{}", self.module(expert), plane.ending())
    }
}

/// Integers that stand for a key of the metadata.
#[derive(Debug)]
pub(super) struct Numbers {
    pub(super) key: &'static str,
    pub(super) name: String,
    pub(super) raw: Raw,
}

/// All tensors, by what they mean.
#[derive(Debug)]
pub(super) struct Gathered {
    family: Family,
    /// The block that they are, of tensors of a draft head.
    draft: Option<u32>,
    pub(super) modules: BTreeMap<String, Module>,
    /// The n-gram table by number.
    pub(super) shards: BTreeMap<u32, Module>,
    /// Whether its shards are written as a list.
    pub(super) listed: bool,
    pub(super) numbers: Vec<Numbers>,
    experts: Vec<ExpertTensor>,
    /// Tensors that nothing knows: the first, and how many.
    unknown: Option<(FileIndex, String, usize)>,
    /// How many of any kind.
    pub(super) total: u64,
}

impl Gathered {
    /// Tensors of a trunk; of a draft head that becomes block `draft`.
    pub(super) const fn new(family: Family, draft: Option<u32>) -> Self {
        Self {
            family,
            draft,
            modules: BTreeMap::new(),
            shards: BTreeMap::new(),
            listed: false,
            numbers: Vec::new(),
            experts: Vec::new(),
            unknown: None,
            total: 0,
        }
    }

    /// Takes a tensor of the last of `files`.
    ///
    /// # Errors
    /// Class `format`, `shape` or `limit`.
    pub(super) fn add(
        &mut self,
        entry: &Entry<'_>,
        files: &[FileEntry],
        budget: &mut Budget,
    ) -> Result<(), CheckpointError> {
        let file = FileIndex(files.len() as u32 - 1);
        let path = &files[file.get()].path;
        self.total += 1;
        if self.total > limits::SAFETENSORS {
            return Err(CheckpointError::Limit {
                file: path.clone(),
                what: "tensors of the model".to_owned(),
                found: self.total,
                limit: limits::SAFETENSORS,
            });
        }
        let meaning = match self.draft {
            None => names::meaning(self.family, &entry.name),
            Some(block) => names::draft_meaning(self.family, block, &entry.name),
        };
        match meaning {
            Meaning::Aside | Meaning::Draft => Ok(()),
            Meaning::Unknown => {
                match &mut self.unknown {
                    Some((.., count)) => *count += 1,
                    none => *none = Some((file, entry.name.clone(), 1)),
                }
                Ok(())
            }
            Meaning::Expert { prefix, layer, matrix, expert, plane } => {
                charge(path, budget, EXPERT_OVERHEAD)?;
                let key = ExpertTensorKey { layer, matrix, expert, plane };
                let dims = match *entry.shape {
                    [rows, cols] => u32::try_from(rows).ok().zip(u32::try_from(cols).ok()),
                    _ => None,
                };
                let Some((rows, cols)) = dims else {
                    return Err(shape_error(files, file, entry, "the two dimensions of a matrix"));
                };
                self.experts.push(ExpertTensor {
                    key,
                    prefix,
                    dtype: entry.dtype,
                    dims: [rows, cols],
                    file,
                    offset: entry.offset,
                });
                Ok(())
            }
            Meaning::Module { name, role, plane } => {
                charge(path, budget, MODULE_OVERHEAD + 4 * entry.name.len() as u64)?;
                let empty = || Module::new(role, &entry.name, plane);
                let module = self.modules.entry(name).or_insert_with(empty);
                module.add(plane, (entry, files))
            }
            Meaning::Shard { number, listed, plane } => {
                charge(path, budget, MODULE_OVERHEAD + 4 * entry.name.len() as u64)?;
                self.listed |= listed;
                let empty = || Module::new(Role::Plain, &entry.name, plane);
                self.shards.entry(number).or_insert_with(empty).add(plane, (entry, files))
            }
            Meaning::Numbers { key } => {
                charge(path, budget, MODULE_OVERHEAD + entry.name.len() as u64)?;
                let raw = raw(entry, files)?;
                if let Some(first) = self.numbers.iter().find(|numbers| numbers.key == key) {
                    return Err(twice(files, &entry.name, first.raw.place.file, file));
                }
                self.numbers.push(Numbers { key, name: entry.name.clone(), raw });
                Ok(())
            }
        }
    }

    /// Puts experts in order, once everything is read.
    ///
    /// # Errors
    /// Class `format` if a tensor is there twice; `unsupported` if one is not known.
    pub(super) fn seal(&mut self, files: &[FileEntry], blocks: u32) -> Result<(), CheckpointError> {
        if let Some((file, name, count)) = &self.unknown {
            return Err(CheckpointError::UnknownTensor {
                file: files[file.get()].path.clone(),
                tensor: printable(name),
                others: count - 1,
                family: self.family,
                blocks,
            });
        }
        self.experts.sort_unstable_by_key(|tensor| (tensor.key, tensor.file, tensor.offset));
        match self.experts.array_windows().find(|[first, second]| first.key == second.key) {
            None => Ok(()),
            Some([first, second]) => Err(twice(files, &second.spelled(), first.file, second.file)),
        }
    }

    /// The file that holds the tensor of this name; nothing if none does. Tensors set aside are in any.
    pub(super) fn file_of(&self, name: &str) -> Option<FileOf> {
        match names::meaning(self.family, name) {
            Meaning::Aside | Meaning::Draft => Some(FileOf::Any),
            Meaning::Unknown => None,
            Meaning::Module { name, plane, .. } => {
                let raw = self.modules.get(&name)?.planes[plane as usize]?;
                Some(FileOf::One(raw.place.file))
            }
            Meaning::Shard { number, plane, .. } => {
                let raw = self.shards.get(&number)?.planes[plane as usize]?;
                Some(FileOf::One(raw.place.file))
            }
            Meaning::Numbers { key } => {
                let numbers = self.numbers.iter().find(|numbers| numbers.key == key)?;
                Some(FileOf::One(numbers.raw.place.file))
            }
            Meaning::Expert { layer, matrix, expert, plane, .. } => {
                let key = ExpertTensorKey { layer, matrix, expert, plane };
                let found = self.experts.binary_search_by_key(&key, |tensor| tensor.key).ok()?;
                Some(FileOf::One(self.experts[found].file))
            }
        }
    }

    /// Matrices whose experts have tensors of their own, in order.
    pub(super) fn stacks(&self) -> impl Iterator<Item = Stack> {
        let same = |a: &ExpertTensor, b: &ExpertTensor| {
            (a.key.layer, a.key.matrix) == (b.key.layer, b.key.matrix)
        };
        self.experts.chunk_by(same).map(|tensors| {
            let ExpertTensor { key, prefix, .. } = tensors[0];
            let experts = tensors.chunk_by(|a, b| a.key.expert == b.key.expert).map(|planes| {
                let mut expert = [None; Plane::COUNT];
                for tensor in planes {
                    expert[tensor.key.plane as usize] = Some(tensor.raw());
                }
                (planes[0].key.expert, expert)
            });
            Stack { layer: key.layer, matrix: key.matrix, prefix, experts: experts.collect() }
        })
    }
}

/// Which file holds a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FileOf {
    One(FileIndex),
    Any,
}

/// A tensor of the last of the files, as it lies there.
fn raw(entry: &Entry<'_>, files: &[FileEntry]) -> Result<Raw, CheckpointError> {
    let file = FileIndex(files.len() as u32 - 1);
    let mut dims = [0; DIMS];
    let Some(filled) = dims.get_mut(..entry.shape.len()) else {
        return Err(shape_error(files, file, entry, "at most three dimensions"));
    };
    filled.copy_from_slice(entry.shape);
    let place = FilePlace { file, offset: entry.offset };
    Ok(Raw { dtype: entry.dtype, dims, len: entry.shape.len() as u8, place })
}

/// A module's name, and whether the tensor is called by it without the usual ending.
fn base(name: &str, plane: Plane) -> (&str, bool) {
    let name = match plane {
        Plane::Weight => name,
        Plane::Scales => return (name.strip_suffix(".scales").unwrap_or(name), false),
        Plane::Biases => return (name.strip_suffix(".biases").unwrap_or(name), false),
        Plane::ScaleInv => name.strip_suffix("_scale_inv").unwrap_or(name),
    };
    name.strip_suffix(".weight").map_or((name, true), |base| (base, false))
}

fn twice(files: &[FileEntry], name: &str, first: FileIndex, second: FileIndex) -> CheckpointError {
    CheckpointError::Format {
        file: files[second.get()].path.clone(),
        what: format!("tensor `{}`", printable(name)),
        found: format!("a second one; the first is in {}", files[first.get()].path.display()),
        needed: "every tensor once".to_owned(),
    }
}

fn shape_error(
    files: &[FileEntry],
    file: FileIndex,
    entry: &Entry<'_>,
    needed: &str,
) -> CheckpointError {
    CheckpointError::Shape {
        file: files[file.get()].path.clone(),
        tensor: printable(&entry.name),
        found: entry.shape.to_vec(),
        needed: needed.to_owned(),
    }
}

//! Modules as tensors: their format in memory, where their bytes lie, and what is done to their values.

use std::path::Path;

use quant::{Affine, BlockType, ScaleType};

use super::config::{Config, config_error};
use super::gather::{Gathered, Module, Planes, Raw, Stack};
use super::names::{Matrix, Plane, Role, scale_beside};
use super::quantization::{Codes, FP8_BLOCK};
use crate::directory::{FileEntry, Foreign, Part, Scales, TensorInfo, ValueMap};
use crate::error::{CheckpointError, printable};
use crate::limits::{self, Budget};
use crate::metadata::Metadata;
use crate::records::NgramTable;
use crate::safetensors::{Dtype, charge};

/// What wrote the files, as far as it changes what values mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// The original weights: centred norms are stored as their deviation from one.
    Original,
    /// Converted to MLX: the one is added.
    Converted,
    /// Converted by a program that adds the one when it runs.
    ConvertedCentred,
}

/// Sizes that experts in tensors of their own are held against.
#[derive(Debug, Clone, Copy)]
pub(super) struct ExpertSizes {
    pub(super) experts: u64,
    pub(super) width: u64,
    pub(super) hidden: u64,
}

/// How a module's values are stored.
struct Stored {
    block_type: BlockType,
    /// Of the values, not of their codes.
    shape: Vec<u64>,
    parts: Vec<Part>,
}

/// Makes tensors of modules.
pub(super) struct Builder<'a> {
    pub(super) config: &'a Config,
    pub(super) config_path: &'a Path,
    pub(super) metadata: &'a Metadata,
    pub(super) files: &'a [FileEntry],
}

impl Builder<'_> {
    /// All tensors under the names that containers share.
    ///
    /// # Errors
    /// Class `missing`, `shape`, `unsupported`, `config`, `format` or `limit`.
    pub(super) fn tensors(
        &self,
        gathered: &Gathered,
        layout: Option<Layout>,
        sizes: Option<ExpertSizes>,
        budget: &mut Budget,
    ) -> Result<Vec<TensorInfo>, CheckpointError> {
        let mut tensors = Vec::new();
        for (name, module) in &gathered.modules {
            for tensor in self.module(name, module, layout)? {
                self.charge(&tensor, budget)?;
                tensors.push(tensor);
            }
        }
        if let Some(table) = self.table(gathered)? {
            self.charge(&table, budget)?;
            tensors.push(table);
        }
        for stack in gathered.stacks() {
            let sizes = sizes.expect("sizes are read where experts have tensors of their own");
            let tensor = self.stack(&stack, sizes)?;
            self.charge(&tensor, budget)?;
            tensors.push(tensor);
        }
        Ok(tensors)
    }

    /// Parts are kept twice: in the directory, and where roles are assigned.
    fn charge(&self, tensor: &TensorInfo, budget: &mut Budget) -> Result<(), CheckpointError> {
        let parts = tensor.foreign.as_ref().map_or(0, |foreign| foreign.parts.capacity());
        let bytes = 2 * parts * size_of::<Part>() + 1024;
        charge(&self.files[tensor.file.get()].path, budget, bytes as u64)
    }

    /// What wrote the files, by the one tensor that conversions turn around. Nothing if there is none.
    ///
    /// # Errors
    /// Class `shape` if files contradict each other.
    pub(super) fn layout(&self, gathered: &Gathered) -> Result<Option<Layout>, CheckpointError> {
        let mut found: Option<(Layout, String)> = None;
        for module in gathered.modules.values().filter(|module| module.role == Role::Conv) {
            let Some(raw) = module.planes[Plane::Weight as usize] else { continue };
            let spelled = module.spelled(Plane::Weight);
            let layout = match *raw.shape() {
                [_, 1, taps] if taps > 1 => Layout::Original,
                [_, taps, 1] if taps > 1 => Layout::Converted,
                _ => {
                    let needed = "[channels, 1, taps], or [channels, taps, 1] in MLX files";
                    return Err(self.shape(&raw, &spelled, needed.to_owned()));
                }
            };
            match &found {
                None => found = Some((layout, spelled)),
                Some((first, _)) if *first == layout => {}
                Some((_, first)) => {
                    let needed = format!("the layout that `{}` has", printable(first));
                    return Err(self.shape(&raw, &spelled, needed));
                }
            }
        }
        // The one converter that keeps norms as they are is also the one that lists shards.
        Ok(found.map(|(layout, _)| match layout {
            Layout::Converted if gathered.listed => Layout::ConvertedCentred,
            layout => layout,
        }))
    }

    fn module(
        &self,
        name: &str,
        module: &Module,
        layout: Option<Layout>,
    ) -> Result<Vec<TensorInfo>, CheckpointError> {
        if module.role == Role::Scalar {
            return self.scalar(name, module).map(|tensor| vec![tensor]);
        }
        let spelled = |plane| module.spelled(plane);
        let names = Names { module: &module.name, spelled: &spelled };
        let mut stored = self.stored(&names, &module.planes)?;
        if module.role == Role::IndexerQk {
            return self.indexer(name, module, &stored);
        }
        if module.role == Role::Conv {
            self.squeeze(module, &mut stored)?;
        }
        let map = match (module.role, layout) {
            (Role::Plain | Role::Conv | Role::IndexerQk | Role::Scalar, _)
            | (Role::CentredNorm, Some(Layout::Converted)) => ValueMap::Plain,
            (Role::CentredNorm, Some(Layout::Original | Layout::ConvertedCentred)) => {
                ValueMap::PlusOne
            }
            (Role::LogDecay, _) => ValueMap::NegExp,
            (Role::CentredNorm, None) => {
                let needed = format!(
                    "a short convolution in the files, whose shape tells whether norms like `{}` are stored as \
                     their deviation from one",
                    printable(&module.name)
                );
                let key = "layer_types";
                return Err(config_error(
                    self.config_path,
                    key,
                    "no such layer".to_owned(),
                    needed,
                ));
            }
        };
        Ok(vec![tensor(name.to_owned(), module.spelled(Plane::Weight), map, stored)])
    }

    /// Queries and key of an indexer, which other containers keep apart. `name` is that of the queries.
    fn indexer(
        &self,
        name: &str,
        module: &Module,
        stored: &Stored,
    ) -> Result<Vec<TensorInfo>, CheckpointError> {
        let raw = module.planes[Plane::Weight as usize].expect("what is stored has values");
        let spelled = module.spelled(Plane::Weight);
        let number = |key: &str| {
            let key = format!("{}.attention.indexer.{key}", self.config.family);
            self.metadata.u64(&key).filter(|number| *number <= limits::WIDTH)
        };
        let queries = number("head_count").zip(number("key_length")).map(|(n, dim)| n * dim);
        let (Some(queries), [rows, values]) = (queries, stored.shape.as_slice()) else {
            let needed = "rows of indexer_n_heads queries of indexer_head_dim and of a key";
            return Err(self.shape(&raw, &spelled, needed.to_owned()));
        };
        let (rows, values) = (*rows, *values);
        let part = stored.parts[0];
        // Rows that share scales stay together.
        let shared = part.scales.map_or(1, |scales| u64::from(scales.rows));
        if queries >= rows || !queries.is_multiple_of(shared) {
            let needed = format!("more than the {queries} rows of its queries");
            return Err(self.shape(&raw, &spelled, needed));
        }
        let block_type = stored.block_type;
        let block = block_type.block_bytes() as u64;
        let row_blocks = values / block_type.block_len() as u64;
        let key_part = Part {
            rows: rows - queries,
            place: part.place.plus(queries * row_blocks * codes_bytes(block, &part)),
            scales: part.scales.map(|scales| {
                let skipped = queries / shared * row_blocks * u64::from(scales.bytes);
                Scales {
                    scales: scales.scales.plus(skipped),
                    biases: scales.biases.map(|biases| biases.plus(skipped)),
                    ..scales
                }
            }),
        };
        let half = |name: String, part: Part| {
            let stored = Stored { block_type, shape: vec![part.rows, values], parts: vec![part] };
            tensor(name, spelled.clone(), ValueMap::Plain, stored)
        };
        let key = name.replace("indexer.q_proj", "indexer.k_proj");
        Ok(vec![half(name.to_owned(), Part { rows: queries, ..part }), half(key, key_part)])
    }

    /// One number as a list of one, which is what every container can hold.
    fn scalar(&self, name: &str, module: &Module) -> Result<TensorInfo, CheckpointError> {
        let spelled = module.spelled(Plane::Weight);
        let raw = module.planes[Plane::Weight as usize].expect("a scalar has no other plane");
        if !matches!(raw.shape(), [] | [1]) {
            return Err(self.shape(&raw, &spelled, "[] or [1]: one number".to_owned()));
        }
        let block_type = match self.scale_type(&raw, &spelled)? {
            ScaleType::Bf16 => BlockType::Bf16,
            ScaleType::F16 => BlockType::F16,
            ScaleType::F32 => BlockType::F32,
        };
        let parts = vec![Part { rows: 1, place: raw.place, scales: None }];
        let stored = Stored { block_type, shape: vec![1], parts };
        Ok(tensor(name.to_owned(), spelled, ValueMap::Plain, stored))
    }

    /// The n-gram table, whose shards follow each other by number.
    fn table(&self, gathered: &Gathered) -> Result<Option<TensorInfo>, CheckpointError> {
        let scale = gathered.modules.get(NgramTable::SCALE);
        let mut whole: Option<(String, Stored)> = None;
        for (expected, (number, module)) in (0..).zip(&gathered.shards) {
            if *number != expected {
                let list = module.name.trim_end_matches(|c: char| c.is_ascii_digit());
                let spelled = format!("{list}{expected}{}", Plane::Weight.ending());
                let why = format!("`{}` is there", printable(&module.name));
                return Err(self.missing(&spelled, why));
            }
            let spelled = |plane| module.spelled(plane);
            let names = Names { module: &module.name, spelled: &spelled };
            let stored = self.shard(&names, &module.planes, scale)?;
            let raw = module.planes[Plane::Weight as usize].expect("what is stored has values");
            let name = module.spelled(Plane::Weight);
            if stored.shape.len() != 2 {
                return Err(self.shape(&raw, &name, "[rows, values]".to_owned()));
            }
            let Some((first, whole)) = &mut whole else {
                whole = Some((name, stored));
                continue;
            };
            if whole.block_type != stored.block_type || whole.shape[1] != stored.shape[1] {
                let found = format!("rows of {} {}", stored.shape[1], stored.block_type);
                let all = format!("{} {}, as in `{first}`", whole.shape[1], whole.block_type);
                return Err(self.unsupported(&raw, &name, found, &all));
            }
            whole.shape[0] += stored.shape[0];
            whole.parts.extend(stored.parts);
        }
        let table =
            |(name, stored)| tensor(NgramTable::NAME.to_owned(), name, ValueMap::Plain, stored);
        Ok(whole.map(table))
    }

    /// How a shard of the n-gram table is stored: as any module, or as FP8 values that share `scale` with all shards.
    fn shard(
        &self,
        names: &Names<'_>,
        planes: &Planes,
        scale: Option<&Module>,
    ) -> Result<Stored, CheckpointError> {
        let [weight, others @ ..] = planes;
        let spelled = (names.spelled)(Plane::Weight);
        let beside = scale_beside(names.module);
        let (weight, scale) = match (weight, scale) {
            (Some(weight), Some(scale)) => (weight, scale),
            (Some(weight), None)
                if weight.dtype == Dtype::F8E4M3 && planes[Plane::ScaleInv as usize].is_none() =>
            {
                let why = format!("`{}` holds FP8 values", printable(&spelled));
                return Err(self.missing(&beside, why));
            }
            _ => return self.stored(names, planes),
        };
        let raw = scale.planes[Plane::Weight as usize].expect("a scalar has no other plane");
        let refused = |found: String, supported: &str| {
            Err(self.unsupported(&raw, &scale.spelled(Plane::Weight), found, supported))
        };
        if scale.name != beside {
            let found = format!("a scale beside `{}`", printable(&spelled));
            return refused(found, &format!("the scale `{}`", printable(&beside)));
        }
        if weight.dtype != Dtype::F8E4M3 {
            let found =
                format!("a scale beside values of {}, `{}`", weight.dtype, printable(&spelled));
            return refused(found, "a scale of F8_E4M3 values");
        }
        if others.iter().any(Option::is_some) {
            let found = format!("a second scale of `{}`", printable(&spelled));
            return refused(found, "one for all shards, or scales of each shard");
        }
        let (rows, _) = self.rows(names, weight)?;
        let parts = vec![Part { rows, place: weight.place, scales: None }];
        Ok(Stored { block_type: BlockType::E4m3, shape: weight.shape().to_vec(), parts })
    }

    /// Channels and taps of a convolution, without the dimension of 1 that is in another place in every layout.
    fn squeeze(&self, module: &Module, stored: &mut Stored) -> Result<(), CheckpointError> {
        let raw = module.planes[Plane::Weight as usize].expect("what is stored has values");
        let [channels, a, b] = *raw.shape() else {
            let needed = "[channels, 1, taps] or [channels, taps, 1]".to_owned();
            return Err(self.shape(&raw, &module.spelled(Plane::Weight), needed));
        };
        if !matches!(stored.block_type, BlockType::F32 | BlockType::F16 | BlockType::Bf16) {
            let found = stored.block_type.to_string();
            let spelled = module.spelled(Plane::Weight);
            return Err(self.unsupported(&raw, &spelled, found, "F32, F16, BF16"));
        }
        // The two that are left lie as before: one of the three has no extent.
        stored.shape = vec![channels, a * b];
        stored.parts = vec![Part { rows: channels, place: raw.place, scales: None }];
        Ok(())
    }

    /// A matrix of all experts of a layer as one tensor.
    fn stack(&self, stack: &Stack, sizes: ExpertSizes) -> Result<TensorInfo, CheckpointError> {
        let ExpertSizes { experts, width, hidden } = sizes;
        let needed = match stack.matrix {
            Matrix::Gate | Matrix::Up => [width, hidden],
            Matrix::GateUp => [2 * width, hidden],
            Matrix::Down => [hidden, width],
        };
        let mut whole: Option<Stored> = None;
        for expert in 0..experts as u32 {
            let Ok(index) = stack.experts.binary_search_by_key(&expert, |(index, _)| *index) else {
                let why = format!("every layer has {experts} experts");
                return Err(self.missing(&stack.spelled(expert, Plane::Weight), why));
            };
            let planes = &stack.experts[index].1;
            let spelled = |plane| stack.spelled(expert, plane);
            let module = stack.module(expert);
            let stored = self.stored(&Names { module: &module, spelled: &spelled }, planes)?;
            let raw = planes[Plane::Weight as usize].expect("what is stored has values");
            let spelled = stack.spelled(expert, Plane::Weight);
            if stored.shape != needed {
                let needed = format!("{needed:?} by config.json");
                return Err(self.shape_of(&raw, &spelled, stored.shape, needed));
            }
            match &mut whole {
                None => whole = Some(Stored { shape: Vec::new(), ..stored }),
                Some(whole) if whole.block_type == stored.block_type => {
                    whole.parts.extend(stored.parts);
                }
                Some(whole) => {
                    let found = stored.block_type.to_string();
                    let all = format!("one type for the experts of a layer, {}", whole.block_type);
                    return Err(self.unsupported(&raw, &spelled, found, &all));
                }
            }
        }
        if let Some((expert, planes)) =
            stack.experts.last().filter(|(e, _)| u64::from(*e) >= experts)
        {
            let raw = planes.iter().flatten().next().expect("a listed expert has a tensor");
            let needed = format!("no expert beyond the {experts} of config.json");
            let spelled = stack.spelled(*expert, Plane::Weight);
            return Err(self.shape(raw, &spelled, needed));
        }
        let mut whole = whole.expect("a model has at least one expert");
        whole.parts.shrink_to_fit();
        whole.shape = [experts].into_iter().chain(needed).collect();
        let spelled = stack.spelled(0, Plane::Weight);
        Ok(tensor(stack.matrix.stacked(stack.layer), spelled, ValueMap::Plain, whole))
    }

    /// How a module is stored, which its tensors tell: codes need scales, floats have none.
    fn stored(&self, names: &Names<'_>, planes: &Planes) -> Result<Stored, CheckpointError> {
        let [weight, scales, biases, scale_inv] = planes;
        let spelled = |plane| (names.spelled)(plane);
        let Some(weight) = weight else {
            let why = "other tensors of its module are there".to_owned();
            return Err(self.missing(&spelled(Plane::Weight), why));
        };
        let beside = |plane: Plane, raw: &Option<Raw>| match raw {
            None => Ok(()),
            Some(raw) => {
                let found = format!("scales beside values of {}", weight.dtype);
                Err(self.unsupported(raw, &spelled(plane), found, "scales of codes"))
            }
        };
        let block_type = match weight.dtype {
            Dtype::U32 => {
                beside(Plane::ScaleInv, scale_inv)?;
                return self.codes(names, weight, [scales.as_ref(), biases.as_ref()]);
            }
            Dtype::F8E4M3 => {
                beside(Plane::Scales, scales)?;
                beside(Plane::Biases, biases)?;
                return self.fp8(names, weight, scale_inv.as_ref());
            }
            Dtype::F32 => BlockType::F32,
            Dtype::F16 => BlockType::F16,
            Dtype::Bf16 => BlockType::Bf16,
            other => {
                let supported = "F32, F16, BF16, F8_E4M3 in blocks, U32 codes of MLX";
                let found = other.to_string();
                return Err(self.unsupported(weight, &spelled(Plane::Weight), found, supported));
            }
        };
        beside(Plane::Scales, scales)?;
        beside(Plane::Biases, biases)?;
        beside(Plane::ScaleInv, scale_inv)?;
        let rows = self.rows(names, weight)?.0;
        let parts = vec![Part { rows, place: weight.place, scales: None }];
        Ok(Stored { block_type, shape: weight.shape().to_vec(), parts })
    }

    /// MLX codes: a stream of bits for every row, and a scale and a bias for every group.
    fn codes(
        &self,
        names: &Names<'_>,
        weight: &Raw,
        [scales, biases]: [Option<&Raw>; 2],
    ) -> Result<Stored, CheckpointError> {
        let spelled = |plane| (names.spelled)(plane);
        let why = || format!("`{}` holds codes", printable(&spelled(Plane::Weight)));
        let scales = scales.ok_or_else(|| self.missing(&spelled(Plane::Scales), why()))?;
        let biases = biases.ok_or_else(|| self.missing(&spelled(Plane::Biases), why()))?;
        let Codes { bits, group } = self.config.quantization.of(names.module)?;
        let scale_type = self.scale_type(scales, &spelled(Plane::Scales))?;
        if biases.dtype != scales.dtype {
            let found = biases.dtype.to_string();
            let supported = format!("the type of the scales, {}", scales.dtype);
            return Err(self.unsupported(biases, &spelled(Plane::Biases), found, &supported));
        }
        let (rows, words) = self.rows(names, weight)?;
        // 32 bits of a word, of which each value takes `bits`.
        let values = words.checked_mul(32).filter(|all| all.is_multiple_of(u64::from(bits)));
        let values = values.map(|all| all / u64::from(bits));
        let groups = values.filter(|n| n.is_multiple_of(u64::from(group)));
        let Some(values) = groups else {
            let needed = format!("rows of whole groups of {group} codes of {bits} bits");
            return Err(self.shape(weight, &spelled(Plane::Weight), needed));
        };
        let mut needed = weight.shape().to_vec();
        *needed.last_mut().expect("rows() found a last dimension") = values / u64::from(group);
        for (plane, raw) in [(Plane::Scales, scales), (Plane::Biases, biases)] {
            if raw.shape() != needed {
                let needed = format!(
                    "{needed:?}: one for each group of {group} codes of {bits} bits, as config.json says"
                );
                return Err(self.shape(raw, &spelled(plane), needed));
            }
        }
        let mut shape = needed;
        *shape.last_mut().expect("rows() found a last dimension") = values;
        let affine = Affine::new(bits, group, scale_type);
        let affine = affine.expect("declarations are checked for what there is");
        let scales = Scales {
            bytes: scale_type.bytes() as u32,
            scales: scales.place,
            biases: Some(biases.place),
            rows: 1,
        };
        let parts = vec![Part { rows, place: weight.place, scales: Some(scales) }];
        Ok(Stored { block_type: BlockType::Affine(affine), shape, parts })
    }

    /// FP8 values with a scale for every square of 128 by 128.
    fn fp8(
        &self,
        names: &Names<'_>,
        weight: &Raw,
        scales: Option<&Raw>,
    ) -> Result<Stored, CheckpointError> {
        let spelled = |plane| (names.spelled)(plane);
        let scales = scales.ok_or_else(|| {
            let why = format!("`{}` holds FP8 values", printable(&spelled(Plane::Weight)));
            self.missing(&spelled(Plane::ScaleInv), why)
        })?;
        self.config.quantization.fp8(names.module)?;
        let scale_type = self.scale_type(scales, &spelled(Plane::ScaleInv))?;
        let [lead @ .., rows, values] = weight.shape() else {
            let needed = "[rows, values]".to_owned();
            return Err(self.shape(weight, &spelled(Plane::Weight), needed));
        };
        let (rows, values) = (*rows, *values);
        if !values.is_multiple_of(FP8_BLOCK) {
            let needed = format!("rows of whole blocks of {FP8_BLOCK} values");
            return Err(self.shape(weight, &spelled(Plane::Weight), needed));
        }
        let tiles = [rows.div_ceil(FP8_BLOCK), values / FP8_BLOCK];
        let needed: Vec<u64> = lead.iter().copied().chain(tiles).collect();
        if scales.shape() != needed {
            let needed = format!("{needed:?}: one for each square of {FP8_BLOCK} by {FP8_BLOCK}");
            return Err(self.shape(scales, &spelled(Plane::ScaleInv), needed));
        }
        let scale_bytes = scale_type.bytes() as u64;
        let matrices = lead.first().copied().unwrap_or(1);
        if matrices > limits::EXPERTS {
            let needed = format!("at most {} experts", limits::EXPERTS);
            return Err(self.shape(weight, &spelled(Plane::Weight), needed));
        }
        let parts = (0..matrices).map(|matrix| Part {
            rows,
            place: weight.place.plus(matrix * rows * values),
            scales: Some(Scales {
                bytes: scale_bytes as u32,
                scales: scales.place.plus(matrix * tiles[0] * tiles[1] * scale_bytes),
                biases: None,
                rows: FP8_BLOCK as u32,
            }),
        });
        let parts = parts.collect();
        let shape = weight.shape().to_vec();
        Ok(Stored { block_type: BlockType::Fp8(scale_type), shape, parts })
    }

    fn scale_type(&self, scales: &Raw, spelled: &str) -> Result<ScaleType, CheckpointError> {
        match scales.dtype {
            Dtype::Bf16 => Ok(ScaleType::Bf16),
            Dtype::F16 => Ok(ScaleType::F16),
            Dtype::F32 => Ok(ScaleType::F32),
            other => Err(self.unsupported(scales, spelled, other.to_string(), "BF16, F16, F32")),
        }
    }

    /// Rows over all leading dimensions, and elements of a row.
    fn rows(&self, names: &Names<'_>, raw: &Raw) -> Result<(u64, u64), CheckpointError> {
        let Some((last, lead)) = raw.shape().split_last() else {
            let spelled = (names.spelled)(Plane::Weight);
            return Err(self.shape(raw, &spelled, "at least one dimension".to_owned()));
        };
        Ok((lead.iter().product(), *last))
    }

    fn missing(&self, tensor: &str, needed: String) -> CheckpointError {
        CheckpointError::MissingTensor {
            file: self.files[0].path.clone(),
            tensor: printable(tensor),
            needed,
        }
    }

    fn shape(&self, raw: &Raw, tensor: &str, needed: String) -> CheckpointError {
        self.shape_of(raw, tensor, raw.shape().to_vec(), needed)
    }

    fn shape_of(
        &self,
        raw: &Raw,
        tensor: &str,
        found: Vec<u64>,
        needed: String,
    ) -> CheckpointError {
        CheckpointError::Shape {
            file: self.files[raw.place.file.get()].path.clone(),
            tensor: printable(tensor),
            found,
            needed,
        }
    }

    fn unsupported(
        &self,
        raw: &Raw,
        tensor: &str,
        found: String,
        supported: &str,
    ) -> CheckpointError {
        CheckpointError::Unsupported {
            file: self.files[raw.place.file.get()].path.clone(),
            what: format!("tensor `{}`", printable(tensor)),
            found,
            supported: supported.to_owned(),
        }
    }
}

/// What a module and its tensors are called in their files.
struct Names<'a> {
    module: &'a str,
    spelled: &'a dyn Fn(Plane) -> String,
}

/// Bytes of a block's codes in its file.
fn codes_bytes(block: u64, part: &Part) -> u64 {
    part.scales.map_or(block, |scales| {
        let planes = if scales.biases.is_some() { 2 } else { 1 };
        block - planes * u64::from(scales.bytes)
    })
}

fn tensor(name: String, spelling: String, map: ValueMap, stored: Stored) -> TensorInfo {
    let Stored { block_type, shape, parts } = stored;
    let first = parts[0].place;
    let last = shape.last().copied().unwrap_or(1) as usize;
    let row_bytes = block_type.row_bytes(last).expect("rows were made of whole blocks") as u64;
    let bytes = parts.iter().map(|part| part.rows).sum::<u64>() * row_bytes;
    // One run of bytes under another name needs no list.
    let whole = matches!(parts[..], [Part { scales: None, .. }]);
    let parts = if whole { Vec::new() } else { parts };
    let foreign = Some(Box::new(Foreign { spelling, map, parts, stacked: None }));
    let (file, offset) = (first.file, first.offset);
    TensorInfo { name, block_type, shape, file, offset, bytes, foreign }
}

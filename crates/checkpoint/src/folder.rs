//! A model as a folder: `config.json`, safetensors files in the layouts of Hugging Face and MLX, texts beside them.
//!
//! Everything is turned into what a GGUF file says: metadata under the same keys (`config`), tensors under the same
//! names (`names`, `gather`, `build`). What differs in meaning is carried by the tensors: where scales lie, what a
//! loader does to values. Which of two meanings a value has is told by the files, never assumed.

mod build;
mod config;
mod draft;
mod gather;
mod names;
mod quantization;
pub(crate) mod text;

pub(crate) use self::names::spelled;

use std::path::{Path, PathBuf};

use units::FileIndex;

use self::build::{Builder, ExpertSizes};
use self::config::Config;
use self::draft::Draft;
use self::gather::{FileOf, Gathered, Numbers};
use crate::Checkpoint;
use crate::directory::{FileEntry, TensorDirectory};
use crate::error::{CheckpointError, printable};
use crate::limits::{self, Budget};
use crate::metadata::{MetaArray, MetaValue, Vocabulary};
use crate::safetensors::{self, Dtype, Index};
use crate::source::{FileSource, Source};

const CONFIG: &str = "config.json";
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// Files beside the weights that a model folder may be read from, whether they are there or not.
pub(crate) fn files_beside(config: &Path) -> impl Iterator<Item = PathBuf> {
    let folder = config.parent().unwrap_or(Path::new("")).to_owned();
    let names = [CONFIG, INDEX, draft::FILE].into_iter().chain(text::FILES);
    names.map(move |name| folder.join(name))
}

/// Opens a model by its folder, its index, its configuration or one of its safetensors files.
///
/// # Errors
/// [`CheckpointError`] of any class.
pub(crate) fn open(path: &Path, vocabulary: Vocabulary) -> Result<Checkpoint, CheckpointError> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    if path.is_dir() {
        return open_folder(path, None, vocabulary);
    }
    let folder = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    if name == CONFIG {
        return open_folder(folder, None, vocabulary);
    }
    if path.extension().is_some_and(|ending| ending == "json") {
        // Its own error where it is absent, and not that of a folder without one.
        FileSource::open(path)?;
        return open_folder(folder, Some(Weights::Indexed(path.to_owned())), vocabulary);
    }
    let source = FileSource::open(path)?;
    let index = folder.join(INDEX);
    if let Some(source) = present(&index)? {
        let files = safetensors::files(Index { path: &index, source: &source })?;
        if files.contains(name) {
            return open_folder(folder, Some(Weights::Indexed(index)), vocabulary);
        }
    }
    if !folder.join(CONFIG).exists() {
        // What is wrong with the file itself matters more than what is missing beside it.
        safetensors::parse_safetensors(path, &source)?;
    }
    open_folder(folder, Some(Weights::Files(vec![path.to_owned()])), vocabulary)
}

/// Whether a path is for [`open`]: a folder, or a file of one by its name. A folder called like a GGUF file is what
/// somebody made who wanted to download one.
pub(crate) fn is_for(path: &Path) -> bool {
    let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
    match ending {
        "safetensors" | "json" => true,
        "gguf" => path.join(CONFIG).exists(),
        _ => path.is_dir(),
    }
}

/// Which files hold the tensors.
enum Weights {
    /// Those that an index names.
    Indexed(PathBuf),
    /// These.
    Files(Vec<PathBuf>),
}

impl Weights {
    /// The weights of a folder: by its index; or one file; or numbered ones.
    fn of(folder: &Path) -> Result<Self, CheckpointError> {
        let index = folder.join(INDEX);
        if present(&index)?.is_some() {
            return Ok(Self::Indexed(index));
        }
        let single = folder.join(SINGLE);
        if single.exists() {
            return Ok(Self::Files(vec![single]));
        }
        Ok(Self::Files(numbered(folder)?))
    }
}

/// A file that may be absent.
fn present(path: &Path) -> Result<Option<FileSource>, CheckpointError> {
    match FileSource::open(path) {
        Ok(source) => Ok(Some(source)),
        Err(CheckpointError::NoSuchFile { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The files `model-00001-of-0000N.safetensors` of a folder without an index: all of one count.
fn numbered(folder: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let single = folder.join(SINGLE);
    let failed = |source| CheckpointError::Io { file: folder.to_owned(), source };
    let needed = |file: PathBuf, needed: String| CheckpointError::NeededFile {
        file,
        needed,
        hint: "the folder is incomplete; fetch the rest of it",
    };
    let mut count: Option<u64> = None;
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let Some(parts) = name.to_str().and_then(parts_of) else { continue };
        if count.is_some_and(|count| count != parts) {
            let why = "files of different counts do not tell what belongs together".to_owned();
            return Err(needed(folder.join(INDEX), why));
        }
        count = Some(parts);
    }
    let Some(count) = count.filter(|count| (1..=limits::PARTS).contains(count)) else {
        return Err(needed(single, "a model has weights".to_owned()));
    };
    let file = |part| folder.join(format!("model-{part:05}-of-{count:05}.safetensors"));
    Ok((1..=count).map(file).collect())
}

/// How many parts a numbered file says that there are.
fn parts_of(name: &str) -> Option<u64> {
    let (part, count) =
        name.strip_prefix("model-")?.strip_suffix(".safetensors")?.split_once("-of-")?;
    let number = |digits: &str| {
        let plain = digits.len() == 5 && digits.bytes().all(|byte| byte.is_ascii_digit());
        plain.then(|| digits.parse::<u64>().ok()).flatten()
    };
    number(part)?;
    number(count)
}

fn open_folder(
    folder: &Path,
    weights: Option<Weights>,
    vocabulary: Vocabulary,
) -> Result<Checkpoint, CheckpointError> {
    let path = folder.join(CONFIG);
    let Some(source) = present(&path)? else {
        return Err(CheckpointError::NeededFile {
            file: path,
            needed: "it describes the safetensors files of a folder".to_owned(),
            hint: "name a folder that has one; a GGUF model is opened by its .gguf file",
        });
    };
    let mut assembly = Assembly::new(&path, &source)?;
    let weights = weights.map_or_else(|| Weights::of(folder), Ok)?;
    let files: Vec<PathBuf> = match &weights {
        Weights::Files(files) => files.clone(),
        Weights::Indexed(index) => {
            let source = FileSource::open(index)?;
            let files = safetensors::files(Index { path: index, source: &source })?;
            files.iter().map(|file| folder.join(file)).collect()
        }
    };
    for file in &files {
        let source = present(file)?.ok_or_else(|| CheckpointError::NeededFile {
            file: file.clone(),
            needed: match &weights {
                Weights::Indexed(index) => format!("{} names it", index.display()),
                Weights::Files(_) => "it holds a part of the weights".to_owned(),
            },
            hint: "all files of a model must lie in one folder; fetch the rest of it",
        })?;
        assembly.add(file, &source)?;
    }
    if let Weights::Indexed(path) = &weights {
        let source = FileSource::open(path)?;
        assembly.check(Index { path, source: &source })?;
    }
    if let Some(path) = draft::beside(folder, &assembly.files) {
        assembly.add_draft(&path);
    }
    let (mut checkpoint, mut budget) = assembly.finish()?;
    let embedding = checkpoint.directory.get("token_embd.weight");
    let rows = embedding.and_then(|tensor| tensor.shape.first().copied());
    let wanted = text::Wanted { vocabulary, rows };
    let odd = text::read_text(folder, &wanted, &mut budget, &mut checkpoint.metadata)?;
    checkpoint.warnings.extend(odd);
    Ok(checkpoint)
}

/// Reads a model folder from sources: its configuration, its safetensors files in order, its index if there is one.
///
/// # Errors
/// As [`crate::open`].
pub(crate) fn parse(
    config: (&Path, &dyn Source),
    files: &[(&Path, &dyn Source)],
    index: Option<(&Path, &dyn Source)>,
) -> Result<Checkpoint, CheckpointError> {
    let mut assembly = Assembly::new(config.0, config.1)?;
    for (path, source) in files {
        assembly.add(path, *source)?;
    }
    if let Some((path, source)) = index {
        let index = Index { path, source };
        safetensors::files(index)?;
        assembly.check(index)?;
    }
    assembly.finish().map(|(checkpoint, _)| checkpoint)
}

/// What experts in tensors of their own are held against, if there are such.
fn expert_sizes(
    gathered: &Gathered,
    checkpoint: &Checkpoint,
) -> Result<Option<ExpertSizes>, CheckpointError> {
    if gathered.stacks().next().is_none() {
        return Ok(None);
    }
    let [experts, width, hidden] = crate::config::expert_sizes(checkpoint)?;
    Ok(Some(ExpertSizes { experts, width, hidden }))
}

/// Integers of a tensor: a few constants that other containers keep in their metadata.
fn read_numbers(
    path: &Path,
    source: &dyn Source,
    numbers: &Numbers,
) -> Result<Vec<i64>, CheckpointError> {
    let shape = numbers.raw.shape();
    let (Dtype::I64, [len]) = (numbers.raw.dtype, shape) else {
        return Err(CheckpointError::Unsupported {
            file: path.to_owned(),
            what: format!("tensor `{}`", printable(&numbers.name)),
            found: format!("shape {shape:?} of {}", numbers.raw.dtype),
            supported: "a list of I64".to_owned(),
        });
    };
    let most = limits::NGRAM_SIZE * limits::NGRAM_HEADS;
    if *len > most {
        return Err(CheckpointError::Limit {
            file: path.to_owned(),
            what: format!("numbers in tensor `{}`", printable(&numbers.name)),
            found: *len,
            limit: most,
        });
    }
    let mut bytes = vec![0; 8 * *len as usize];
    let outcome = source.read_at(numbers.raw.place.offset, &mut bytes);
    outcome.map_err(|source| CheckpointError::Io { file: path.to_owned(), source })?;
    Ok(bytes.as_chunks::<8>().0.iter().map(|number| i64::from_le_bytes(*number)).collect())
}

/// A checkpoint under construction, file by file.
struct Assembly<'a> {
    path: &'a Path,
    budget: Budget,
    config: Config,
    gathered: Gathered,
    draft: Option<Draft>,
    files: Vec<FileEntry>,
    warnings: Vec<String>,
}

impl<'a> Assembly<'a> {
    fn new(path: &'a Path, source: &dyn Source) -> Result<Self, CheckpointError> {
        let mut budget = Budget::new();
        let config = config::read(path, source, &mut budget)?;
        let gathered = Gathered::new(config.family, None);
        let draft = Draft::new(&config);
        let (files, warnings) = (Vec::new(), Vec::new());
        Ok(Self { path, budget, config, gathered, draft, files, warnings })
    }

    fn add(&mut self, path: &Path, source: &dyn Source) -> Result<(), CheckpointError> {
        self.files.push(FileEntry { path: path.to_owned(), bytes: source.len() });
        let Self { gathered, draft, config, files, budget, .. } = self;
        let known = gathered.numbers.len();
        safetensors::read(path, source, budget, &mut |entry, budget| {
            if let Some(draft) = draft
                && Draft::has(config.family, &entry.name)
            {
                draft.add(&entry, files, budget);
            }
            gathered.add(&entry, files, budget)
        })?;
        for numbers in &self.gathered.numbers[known..] {
            let values = read_numbers(path, source, numbers)?;
            let key = format!("{}.{}", self.config.family, numbers.key);
            self.config.metadata.spell(key.clone(), numbers.name.clone());
            self.config.metadata.insert(key, MetaValue::Array(MetaArray::I64s(values)));
        }
        Ok(())
    }

    /// Takes a file that holds nothing but the draft head.
    fn add_draft(&mut self, path: &Path) {
        let Self { draft: Some(draft), files, budget, .. } = self else { return };
        if !draft.is_empty() {
            // Those among the other tensors belong to the model beyond doubt.
            return;
        }
        let mark = budget.mark();
        let outcome = FileSource::open(path).and_then(|source| {
            files.push(FileEntry { path: path.to_owned(), bytes: source.len() });
            draft.has_own_file();
            safetensors::read(path, &source, budget, &mut |entry, budget| {
                draft.add(&entry, files, budget);
                Ok(())
            })
        });
        if let Err(error) = outcome {
            draft.fail(error, budget);
            budget.restore(mark);
        }
    }

    /// Holds an index against the files.
    fn check(&mut self, index: Index<'_>) -> Result<(), CheckpointError> {
        self.gathered.seal(&self.files, self.blocks())?;
        let (mut entries, mut elsewhere) = (0_u64, 0_u64);
        safetensors::entries(index, &mut |tensor, file| {
            entries += 1;
            let named = |entry: &FileEntry| entry.path.file_name().is_some_and(|name| name == file);
            match self.gathered.file_of(tensor) {
                Some(FileOf::Any) => {}
                Some(FileOf::One(FileIndex(at))) if named(&self.files[at as usize]) => {}
                Some(FileOf::One(_)) => elsewhere += 1,
                None => {
                    return Err(CheckpointError::MissingTensor {
                        file: index.path.with_file_name(file),
                        tensor: printable(tensor),
                        needed: format!("{} says that it is there", index.path.display()),
                    });
                }
            }
            Ok(())
        })?;
        let shown = index.path.display();
        if elsewhere > 0 {
            self.warnings
                .push(format!("{shown}: {elsewhere} tensors are in other files than it says"));
        }
        if let Some(more) = self.gathered.total.checked_sub(entries).filter(|more| *more > 0) {
            self.warnings.push(format!("{shown}: {more} tensors of the files are not in it"));
        }
        Ok(())
    }

    /// Layers by the configuration, for messages.
    fn blocks(&self) -> u32 {
        let key = format!("{}.block_count", self.config.family);
        self.config.metadata.u64(&key).and_then(|n| u32::try_from(n).ok()).unwrap_or(0)
    }

    /// The checkpoint, and what memory is left.
    fn finish(mut self) -> Result<(Checkpoint, Budget), CheckpointError> {
        let Some(first) = self.files.first() else {
            return Err(CheckpointError::NeededFile {
                file: self.path.with_file_name(SINGLE),
                needed: "a model has weights".to_owned(),
                hint: "the folder is incomplete; fetch the rest of it",
            });
        };
        let first = first.path.clone();
        let blocks = self.blocks();
        self.gathered.seal(&self.files, blocks)?;
        self.head(&first)?;
        let metadata = std::mem::take(&mut self.config.metadata);
        let mut checkpoint = Checkpoint {
            files: self.files,
            metadata,
            directory: TensorDirectory::default(),
            warnings: self.warnings,
        };
        let sizes = expert_sizes(&self.gathered, &checkpoint)?;
        let builder = Builder {
            config: &self.config,
            config_path: self.path,
            metadata: &checkpoint.metadata,
            files: &checkpoint.files,
        };
        let layout = builder.layout(&self.gathered)?;
        let mut tensors = builder.tensors(&self.gathered, layout, sizes, &mut self.budget)?;
        if let Some(mut draft) = self.draft.take() {
            let sizes = expert_sizes(draft.gathered(), &checkpoint);
            let found = draft.tensors(&builder, (layout, sizes), &tensors, &mut self.budget);
            draft.settle(found, &mut tensors, &mut checkpoint);
        }
        checkpoint.directory = TensorDirectory::new(tensors).map_err(|same| {
            let (first, again) = *same;
            let [file, other] = [&first, &again].map(|t| &checkpoint.files[t.file.get()].path);
            CheckpointError::Format {
                file: other.clone(),
                what: format!("tensor `{}`", printable(again.spelling())),
                found: format!("a second form of `{}` in {}", first.name, file.display()),
                needed: "experts either stacked or each in tensors of its own".to_owned(),
            }
        })?;
        Ok((checkpoint, self.budget))
    }

    /// The head is the embedding if and only if the configuration says so.
    fn head(&mut self, first: &Path) -> Result<(), CheckpointError> {
        let name = "output.weight";
        match (self.config.tied, self.gathered.modules.contains_key(name)) {
            (true, true) => {
                self.gathered.modules.remove(name);
                let text = "lm_head is left out: tie_word_embeddings makes the embedding the head";
                self.warnings.push(format!("{}: {text}", self.path.display()));
                Ok(())
            }
            (false, false) => Err(CheckpointError::MissingTensor {
                file: first.to_owned(),
                tensor: "lm_head.weight".to_owned(),
                needed: format!("{} does not tie it to the embedding", self.path.display()),
            }),
            _ => Ok(()),
        }
    }
}

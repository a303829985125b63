//! Text of a model folder: the vocabulary and what belongs to it, under the keys that a GGUF file has.
//!
//! `tokenizer.json` is what counts; `vocab.json` and `merges.txt` stand in where it is absent. Rules of a tokenizer
//! that this program does not follow are errors, never left out. Files are read as streams, so that the largest
//! vocabularies take little more memory than they have in the end.

mod rules;
mod settings;
mod tokenizer;
mod tokens;
mod twofile;

use std::path::{Path, PathBuf};

use crate::error::{CheckpointError, printable};
use crate::json::{self, Json, JsonError};
use crate::limits::Budget;
use crate::metadata::{MERGES, MetaArray, MetaValue, Metadata, TOKEN_TYPE, TOKENS, Vocabulary};
use crate::source::{FileSource, Source};

use self::settings::Settings;
use self::tokens::{Kept, Tokens};

const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const GENERATION_CONFIG: &str = "generation_config.json";
const TEMPLATE: &str = "chat_template.jinja";
const TEMPLATE_JSON: &str = "chat_template.json";
const VOCAB: &str = "vocab.json";
const MERGES_TEXT: &str = "merges.txt";
const ADDED_TOKENS: &str = "added_tokens.json";

/// Files that a folder's text may come from.
pub(super) const FILES: [&str; 8] = [
    TOKENIZER,
    TOKENIZER_CONFIG,
    GENERATION_CONFIG,
    TEMPLATE,
    TEMPLATE_JSON,
    VOCAB,
    MERGES_TEXT,
    ADDED_TOKENS,
];

/// Bytes of `tokenizer.json`: the largest known has 20 MiB.
const MAX_TOKENIZER_BYTES: u64 = 64 << 20;
/// Bytes of a token, of a merge and of any other text in such a file.
const MAX_TOKEN_BYTES: u64 = 1 << 16;
/// Bytes of a chat template; the longest known has 20,000.
const MAX_TEMPLATE_BYTES: u64 = 1 << 20;
/// Tokens that end an answer.
const MAX_END_TOKENS: usize = 64;

/// What [`read_text`] must know beside the files.
pub(crate) struct Wanted {
    pub(crate) vocabulary: Vocabulary,
    /// Rows of the embedding, which the vocabulary is filled up to.
    pub(crate) rows: Option<u64>,
}

/// Reads what a folder says about text into `metadata`, whose architecture is set; returns what is odd but harmless.
///
/// Without any of the files nothing is set: a model without a vocabulary works with ids.
///
/// # Errors
/// Class `config`, `unsupported`, `limit`, `missing` or `io`.
pub(crate) fn read_text(
    folder: &Path,
    wanted: &Wanted,
    budget: &mut Budget,
    metadata: &mut Metadata,
) -> Result<Vec<String>, CheckpointError> {
    let open = |path: &Path| match FileSource::open(path) {
        Ok(source) => Ok(Some(Box::new(source) as Box<dyn Source>)),
        Err(CheckpointError::NoSuchFile { .. }) => Ok(None),
        Err(error) => Err(error),
    };
    Reader { folder, open: &open, wanted, budget }.read(metadata)
}

/// As [`read_text`], from sources by their names in the folder; for tests and fuzzing.
pub(crate) fn parse_text(
    files: &[(&str, &dyn Source)],
    wanted: &Wanted,
    metadata: &mut Metadata,
) -> Result<Vec<String>, CheckpointError> {
    let open = |path: &Path| {
        let found = files.iter().find(|(name, _)| Path::new(name) == path);
        Ok(found.map(|(_, source)| Box::new(Borrowed(*source)) as Box<dyn Source>))
    };
    Reader { folder: Path::new(""), open: &open, wanted, budget: &mut Budget::new() }.read(metadata)
}

struct Borrowed<'a>(&'a dyn Source);

impl Source for Borrowed<'_> {
    fn len(&self) -> u64 {
        self.0.len()
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
        self.0.read_at(offset, out)
    }
}

/// A file of the folder.
struct Text<'s> {
    path: PathBuf,
    source: Box<dyn Source + 's>,
}

impl Text<'_> {
    /// The whole of a small file, which is an object.
    fn object(&self, budget: &mut Budget) -> Result<Json, CheckpointError> {
        let tree = json::read(&*self.source, budget).map_err(|error| self.malformed(error))?;
        match tree.object() {
            Some(_) => Ok(tree),
            None => Err(config_error(&self.path, "the file", tree.shown(), "a JSON object")),
        }
    }

    fn malformed(&self, error: JsonError) -> CheckpointError {
        error.of_file(&self.path, |found| {
            config_error(&self.path, "the file", found, "a JSON object of the known form")
        })
    }

    /// The whole of a file of at most `most` bytes as text.
    fn text(&self, most: u64, budget: &mut Budget) -> Result<String, CheckpointError> {
        let len = self.source.len();
        check_len(&self.path, len, most)?;
        charge(&self.path, budget, len)?;
        let mut bytes = vec![0; len as usize];
        let read = self.source.read_at(0, &mut bytes);
        read.map_err(|source| CheckpointError::Io { file: self.path.clone(), source })?;
        String::from_utf8(bytes).map_err(|error| {
            let found =
                format!("bytes that are not UTF-8 after byte {}", error.utf8_error().valid_up_to());
            config_error(&self.path, "the file", found, "UTF-8 text")
        })
    }
}

struct Reader<'a> {
    folder: &'a Path,
    open: &'a Open<'a>,
    wanted: &'a Wanted,
    budget: &'a mut Budget,
}

/// Opens a file that may be absent.
type Open<'a> = dyn Fn(&Path) -> Result<Option<Box<dyn Source + 'a>>, CheckpointError> + 'a;

impl<'a> Reader<'a> {
    fn file(&self, name: &str) -> Result<Option<Text<'a>>, CheckpointError> {
        let path = self.folder.join(name);
        let source = (self.open)(&path)?;
        Ok(source.map(|source| Text { path, source }))
    }

    fn read(mut self, metadata: &mut Metadata) -> Result<Vec<String>, CheckpointError> {
        let mut warnings = Vec::new();
        let mut settings = Settings::default();
        if let Some(file) = self.file(TOKENIZER_CONFIG)? {
            let mark = self.budget.mark();
            let tree = file.object(self.budget)?;
            settings = Settings::of(&file.path, &tree)?;
            drop(tree);
            self.budget.restore(mark);
            charge(&file.path, self.budget, settings.memory())?;
        }
        if let Some(kept) = self.vocabulary(&settings, metadata)? {
            settings.set_tokens(&self.folder.join(TOKENIZER_CONFIG), &kept, metadata)?;
            self.keep(kept, metadata);
        }
        self.template(settings, metadata)?;
        self.generation(metadata, &mut warnings)?;
        Ok(warnings)
    }

    /// The vocabulary in order of ids, if the folder has one; and the names of its kinds.
    fn vocabulary(
        &mut self,
        settings: &Settings,
        metadata: &mut Metadata,
    ) -> Result<Option<Kept>, CheckpointError> {
        let mark = self.budget.mark();
        let mut tokens = Tokens::default();
        let (path, rules) = if let Some(file) = self.file(TOKENIZER)? {
            let rules = tokenizer::read(&file, &mut tokens, self.budget)?;
            (file.path, rules)
        } else if let Some(vocab) = self.file(VOCAB)? {
            let Some(merges) = self.file(MERGES_TEXT)? else {
                return Err(CheckpointError::NeededFile {
                    file: self.folder.join(MERGES_TEXT),
                    needed: format!("{VOCAB} is of no use without its merges"),
                    hint: "fetch it, or the model's tokenizer.json, which holds both",
                });
            };
            if let Some(added) = self.file(ADDED_TOKENS)?.filter(|_| !settings.names_added()) {
                return Err(CheckpointError::Unsupported {
                    file: added.path,
                    what: "added tokens".to_owned(),
                    found: "ids without the kinds of the tokens".to_owned(),
                    supported: format!(
                        "`added_tokens` of {TOKENIZER}, or `added_tokens_decoder` of {TOKENIZER_CONFIG}"
                    ),
                });
            }
            let rules = settings.rules(&self.folder.join(TOKENIZER_CONFIG), metadata)?;
            twofile::read(&vocab, &merges, &mut tokens, self.budget)?;
            (vocab.path, rules)
        } else {
            return Ok(None);
        };
        for token in &settings.added {
            tokens.add_missing(&path, token, self.budget)?;
        }
        rules.check_added(&path, tokens.added())?;
        let set = |metadata: &mut Metadata, key: &str, value: &str| {
            metadata.insert(key.to_owned(), MetaValue::String(value.to_owned()));
        };
        set(metadata, "tokenizer.ggml.model", "gpt2");
        set(metadata, "tokenizer.ggml.pre", rules.split);
        set(metadata, "tokenizer.ggml.normalizer", if rules.is_nfc { "nfc" } else { "none" });
        let kept = tokens.finish(&path, self.wanted.rows, self.budget)?;
        self.budget.restore(mark);
        charge(&path, self.budget, kept.memory())?;
        Ok(Some(kept))
    }

    fn keep(&self, kept: Kept, metadata: &mut Metadata) {
        let arrays = [
            (TOKENS, MetaArray::Strings(kept.tokens)),
            (MERGES, MetaArray::Strings(kept.merges)),
            (TOKEN_TYPE, MetaArray::U64s(kept.kinds)),
        ];
        for (key, array) in arrays {
            match self.wanted.vocabulary {
                Vocabulary::Load => {
                    metadata.insert(key.to_owned(), MetaValue::Array(array));
                }
                Vocabulary::Skip => metadata.set_aside(key.to_owned(), array.len() as u64),
            }
        }
    }

    /// The chat template: of a file of its own, else of `tokenizer_config.json`.
    fn template(
        &mut self,
        mut settings: Settings,
        metadata: &mut Metadata,
    ) -> Result<(), CheckpointError> {
        if let Some(file) = self.file(TEMPLATE)? {
            let text = file.text(MAX_TEMPLATE_BYTES, self.budget)?;
            settings.templates.insert(0, (String::new(), text));
        } else if let Some(file) = self.file(TEMPLATE_JSON)? {
            let tree = file.object(self.budget)?;
            let Some(value) = tree.get("chat_template") else {
                let needed = "a string or a list of templates";
                return Err(config_error(
                    &file.path,
                    "chat_template",
                    "nothing".to_owned(),
                    needed,
                ));
            };
            let mut own = settings::templates(&file.path, value)?;
            own.append(&mut settings.templates);
            settings.templates = own;
        }
        // The first of a name counts.
        for (name, text) in settings.templates {
            let key = match name.as_str() {
                "" => "tokenizer.chat_template".to_owned(),
                _ => format!("tokenizer.chat_template.{name}"),
            };
            if !metadata.contains(&key) {
                metadata.insert(key, MetaValue::String(text));
            }
        }
        Ok(())
    }

    /// End tokens and how the authors sample.
    fn generation(
        &mut self,
        metadata: &mut Metadata,
        warnings: &mut Vec<String>,
    ) -> Result<(), CheckpointError> {
        let Some(file) = self.file(GENERATION_CONFIG)? else { return Ok(()) };
        let mark = self.budget.mark();
        let tree = file.object(self.budget)?;
        settings::generation(&file.path, &tree, self.wanted.rows, metadata, warnings)?;
        drop(tree);
        self.budget.restore(mark);
        Ok(())
    }
}

fn check_len(path: &Path, found: u64, limit: u64) -> Result<(), CheckpointError> {
    if found <= limit {
        return Ok(());
    }
    let what = "bytes of the file".to_owned();
    Err(CheckpointError::Limit { file: path.to_owned(), what, found, limit })
}

fn charge(path: &Path, budget: &mut Budget, bytes: u64) -> Result<(), CheckpointError> {
    if budget.take(bytes) { Ok(()) } else { Err(full(path, budget, bytes)) }
}

/// The error of memory that is not there.
fn full(path: &Path, budget: &Budget, bytes: u64) -> CheckpointError {
    let limit = crate::limits::HEADER_MEMORY;
    CheckpointError::Limit {
        file: path.to_owned(),
        what: "memory for the headers and texts up to this file's".to_owned(),
        found: limit.saturating_sub(budget.mark()).saturating_add(bytes),
        limit,
    }
}

fn config_error(
    path: &Path,
    key: &str,
    found: String,
    needed: impl Into<String>,
) -> CheckpointError {
    let (file, key) = (path.to_owned(), printable(key));
    CheckpointError::Config { file, key, found, needed: needed.into() }
}

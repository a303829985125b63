//! Where the hot sets of models lie on disk, one small file for each.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::PathBuf;

use anyhow::{Context, Result};
use checkpoint::pack::Checksum;
use hub::Store;
use session::{Engine, HotSet, HotSetError, OpenModel, hot_set};
use units::ExpertKey;

use crate::output::OutputFile;
use crate::report;

/// Most characters of a model's name in the name of its file.
const NAME_CHARS: usize = 60;

/// The file of a model.
pub(crate) struct HotFile {
    path: PathBuf,
    identity: u64,
}

impl HotFile {
    /// See [`kept`].
    pub(crate) fn of(opened: &OpenModel) -> Option<Self> {
        let path = kept(opened, "hot-sets");
        if path.is_none() {
            report::note("note: neither $SAKIA_HOME nor $HOME is set; no hot set is kept");
        }
        Some(Self { path: path?, identity: hot_set::identity(opened) })
    }

    /// What earlier runs used, the hottest first. A file that is none or another's is said to be ignored.
    pub(crate) fn order(&self, engine: &Engine) -> Vec<ExpertKey> {
        match self.read(engine) {
            Ok(set) => set.map_or_else(Vec::new, |set| set.order()),
            Err(problem) => {
                let path = self.path.display();
                report::note(&format!("note: the hot set {path} is ignored: {problem}"));
                Vec::new()
            }
        }
    }

    /// Adds what was used since the engine was loaded, under the file's name only when it is complete.
    pub(crate) fn add(&self, engine: &Engine) -> Result<()> {
        // Another run may have written it meanwhile; what is wrong with it was said at the start.
        let mut set = self.read(engine).ok().flatten().unwrap_or_else(|| engine.empty_hot_set());
        engine.add_uses(&mut set);
        let write = || {
            std::fs::create_dir_all(self.path.parent().expect("it is in a folder"))?;
            let mut file = OutputFile::create(&self.path)?;
            file.write_all(&set.encode(self.identity))?;
            file.finish()
        };
        write().with_context(|| format!("writing the hot set {}", self.path.display()))
    }

    fn read(&self, engine: &Engine) -> Result<Option<HotSet>, Unusable> {
        let metadata = match std::fs::metadata(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            metadata => metadata?,
        };
        if !metadata.is_file() {
            return Err(Unusable::NoFile);
        }
        let config = engine.network.config();
        let (n_layers, n_experts) = (config.n_layers, config.n_experts);
        // One byte more than it may have tells one that is too long.
        let most = hot_set::file_bytes(n_layers, n_experts) as u64 + 1;
        let mut bytes = Vec::new();
        File::open(&self.path)?.take(most).read_to_end(&mut bytes)?;
        Ok(Some(HotSet::decode(&bytes, self.identity, n_layers, n_experts)?))
    }
}

/// Where something small is kept of a model: `FOLDER/NAME-HASH` in `$SAKIA_HOME`, else in `~/.cache/sakia`. The hash is
/// that of the model's path. None without a home.
pub(crate) fn kept(opened: &OpenModel, folder: &str) -> Option<PathBuf> {
    let store = Store::from_environment(&|name| std::env::var_os(name)).ok()?;
    let path = std::fs::canonicalize(&opened.path).unwrap_or_else(|_| opened.path.clone());
    let name: String = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    let name: String = name.chars().map(plain).take(NAME_CHARS).collect();
    let hash = Checksum::of(path.as_os_str().as_encoded_bytes());
    Some(store.root().join(folder).join(format!("{name}-{hash:016x}")))
}

/// Why a file is ignored.
#[derive(Debug)]
enum Unusable {
    NoFile,
    Io(io::Error),
    Content(HotSetError),
}

impl From<io::Error> for Unusable {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<HotSetError> for Unusable {
    fn from(error: HotSetError) -> Self {
        Self::Content(error)
    }
}

impl std::fmt::Display for Unusable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NoFile => f.write_str("it is no regular file"),
            Self::Io(error) => error.fmt(f),
            Self::Content(error) => error.fmt(f),
        }
    }
}

//! Where models lie, and the record of what lies there.
//!
//! A model's folder holds its files under their own names and nothing unfinished. Beside them is our folder, with the
//! record, the lock, and files on their way. A file counts as part of the model only if the record names it.

use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::digest::FileHash;
use crate::error::HubError;
use crate::name::{ModelName, RepoName};
use crate::path::{RepoPath, STATE_FOLDER};
use crate::select::Variants;

/// Version of the record's form.
const SCHEMA: u32 = 1;
/// Most bytes of a record.
const RECORD_BYTES: u64 = 64 << 20;

/// What was pulled of a repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Version of this form: 1.
    pub schema: u32,
    /// `org/name`.
    pub repo: String,
    /// Base address it came from.
    pub host: String,
    /// The commit of the last pull.
    pub revision: String,
    /// Files that are whole, in the order of their paths.
    pub files: Vec<Recorded>,
}

/// A file of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recorded {
    /// Where it lies under the model's folder.
    pub path: RepoPath,
    /// Its bytes.
    pub size: u64,
    /// What it hashes to; checked when it was fetched.
    pub hash: FileHash,
    /// The host's tag of it, if it gave one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub etag: Option<String>,
    /// The commit it was last pulled at.
    pub revision: String,
}

/// The local store.
#[derive(Debug, Clone)]
pub struct Store {
    root: PathBuf,
}

impl Store {
    /// A store at a folder, which need not exist.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// `$SAKIA_HOME`, else `~/.cache/sakia`.
    ///
    /// # Errors
    ///
    /// [`HubError::NoHome`] if neither variable is set.
    pub fn from_environment(env: &dyn Fn(&str) -> Option<OsString>) -> Result<Self, HubError> {
        let set = |name: &str| env(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let root = set("SAKIA_HOME").or_else(|| Some(set("HOME")?.join(".cache/sakia")));
        root.map(Self::at).ok_or(HubError::NoHome)
    }

    /// The folder of the store.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The folder of a repository.
    pub fn folder(&self, repo: &RepoName) -> PathBuf {
        self.root.join("models").join(repo.org()).join(repo.name())
    }

    /// The record of a repository, if it was ever pulled to the end.
    ///
    /// # Errors
    ///
    /// [`HubError::Record`] if there is one that cannot be read.
    pub fn snapshot(&self, repo: &RepoName) -> Result<Option<Snapshot>, HubError> {
        read_record(&record_path(&self.folder(repo)))
    }

    /// What `-m org/name` means: the folder of safetensors, or the first file of a GGUF.
    ///
    /// # Errors
    ///
    /// [`HubError::NotPulled`], [`HubError::OtherVariant`], [`HubError::Incomplete`] if a file is gone or has another size,
    /// [`HubError::Choice`] if there are several quantisations and the name chooses none.
    pub fn locate(&self, name: &ModelName) -> Result<PathBuf, HubError> {
        let folder = self.folder(&name.repo);
        let Some(snapshot) = self.snapshot(&name.repo)? else {
            return Err(if state_folder(&folder).is_dir() {
                let problem = "its pull was not finished".to_owned();
                HubError::Incomplete { name: name.to_string(), problem }
            } else {
                HubError::NotPulled { name: name.to_string(), store: self.root.clone() }
            });
        };
        let files = snapshot.files.iter().map(|file| (&file.path, file.size));
        let variants = Variants::of(&name.repo, files);
        let has_safetensors = snapshot.files.iter().any(is_safetensors);
        if name.variant.as_deref().is_some_and(|variant| !variants.has(variant)) {
            let safetensors = has_safetensors.then_some("safetensors");
            let found: Vec<&str> = variants.labels().chain(safetensors).collect();
            let (name, found) = (name.to_string(), found.join(", "));
            return Err(HubError::OtherVariant { name, found });
        }
        let (path, needed): (PathBuf, Vec<&RepoPath>) = if name.variant.is_none() && has_safetensors
        {
            let own = snapshot.files.iter().map(|file| &file.path);
            (folder.clone(), own.filter(|path| !path.has_ending("gguf")).collect())
        } else {
            let chosen = variants.choose(name.variant.as_deref()).map_err(|error| match error {
                HubError::Choice { repo, problem, choices, example, .. } => {
                    HubError::Choice { repo, problem, choices, command: "-m", example }
                }
                error => error,
            })?;
            let paths: Vec<_> = chosen.paths()?.collect();
            (paths.first().map_or_else(|| folder.clone(), |path| path.under(&folder)), paths)
        };
        for file in snapshot.files.iter().filter(|file| needed.contains(&&file.path)) {
            check_size(&folder, file)
                .map_err(|problem| HubError::Incomplete { name: name.to_string(), problem })?;
        }
        Ok(path)
    }
}

fn is_safetensors(file: &Recorded) -> bool {
    file.path.has_ending("safetensors")
}

/// Says what is wrong with a recorded file.
fn check_size(folder: &Path, file: &Recorded) -> Result<(), String> {
    let path = file.path.as_str();
    match size_of(&file.path.under(folder)) {
        Some(size) if size == file.size => Ok(()),
        Some(size) => Err(format!("{path} has {size} bytes, {} are needed", file.size)),
        None => Err(format!("{path} is missing")),
    }
}

/// The bytes of a regular file.
pub(crate) fn size_of(path: &Path) -> Option<u64> {
    fs::metadata(path).ok().filter(fs::Metadata::is_file).map(|meta| meta.len())
}

/// Our folder inside a model's.
pub(crate) fn state_folder(folder: &Path) -> PathBuf {
    folder.join(STATE_FOLDER)
}

pub(crate) fn record_path(folder: &Path) -> PathBuf {
    state_folder(folder).join("snapshot.json")
}

fn read_record(path: &Path) -> Result<Option<Snapshot>, HubError> {
    let Some(text) = read_small(path, RECORD_BYTES)? else { return Ok(None) };
    let damaged = |problem: String| HubError::Record { path: path.to_owned(), problem };
    let snapshot: Snapshot =
        serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
    if snapshot.schema != SCHEMA {
        let found = snapshot.schema;
        return Err(damaged(format!("it has form {found}, this program knows {SCHEMA}")));
    }
    Ok(Some(snapshot))
}

/// A small file of ours, or `None` if there is none.
pub(crate) fn read_small(path: &Path, most: u64) -> Result<Option<Vec<u8>>, HubError> {
    let mut text = Vec::new();
    let read = File::open(path).and_then(|file| file.take(most).read_to_end(&mut text));
    match read {
        Ok(_) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(HubError::io("read", path)(error)),
    }
}

/// Replaces a small file of ours as a whole: whoever reads it, after whatever crash, finds the old or the new text.
pub(crate) fn write_small(path: &Path, value: &impl Serialize) -> Result<(), HubError> {
    let mut text = serde_json::to_vec_pretty(value)
        .map_err(|error| HubError::io("write", path)(error.into()))?;
    text.push(b'\n');
    let fresh = path.with_added_extension("new");
    let write = File::create(&fresh)
        .and_then(|mut file| file.write_all(&text).and_then(|()| file.sync_data()))
        .and_then(|()| fs::rename(&fresh, path));
    write.map_err(HubError::io("write", path))
}

/// Makes a renamed or removed entry last through a power cut. A file system that cannot is left to its own pace.
pub(crate) fn sync_folder(folder: &Path) {
    let _ = File::open(folder).and_then(|folder| folder.sync_all());
}

impl Snapshot {
    /// An empty record.
    pub(crate) fn new(repo: &RepoName, host: &str, revision: &str) -> Self {
        Self {
            schema: SCHEMA,
            repo: repo.to_string(),
            host: host.to_owned(),
            revision: revision.to_owned(),
            files: Vec::new(),
        }
    }

    /// The entry of a path.
    pub(crate) fn file(&self, path: &RepoPath) -> Option<&Recorded> {
        self.files.iter().find(|file| file.path == *path)
    }

    pub(crate) fn write(&self, folder: &Path) -> Result<(), HubError> {
        write_small(&record_path(folder), self)?;
        sync_folder(&state_folder(folder));
        Ok(())
    }

    /// From now on, until [`Snapshot::write`], the model is not in the store.
    pub(crate) fn withdraw(folder: &Path) -> Result<(), HubError> {
        let path = record_path(folder);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(HubError::io("remove", path)(error))
            }
            _ => {
                sync_folder(&state_folder(folder));
                Ok(())
            }
        }
    }
}

/// The right to change a model's folder. The system takes it back when the process ends, however it ends.
pub(crate) struct Lock {
    _file: File,
}

impl Lock {
    /// # Errors
    ///
    /// [`HubError::Locked`] if another process, or another pull of this one, has it.
    pub(crate) fn take(repo: &RepoName, folder: &Path) -> Result<Self, HubError> {
        let state = state_folder(folder);
        fs::create_dir_all(&state).map_err(HubError::io("make the folder", &state))?;
        let lock = state.join("lock");
        let open = File::options().create(true).truncate(false).read(true).write(true).open(&lock);
        let mut file = open.map_err(HubError::io("open", &lock))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut text = String::new();
                let read = file.take(20).read_to_string(&mut text);
                let process = read.ok().and_then(|_| text.trim().parse().ok());
                return Err(HubError::Locked { repo: repo.to_string(), lock, process });
            }
            Err(TryLockError::Error(error)) => return Err(HubError::io("lock", lock)(error)),
        }
        // For the message of whoever comes second; the lock itself is the system's.
        let written = file
            .set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| writeln!(file, "{}", std::process::id()));
        written.map_err(HubError::io("write", &lock))?;
        Ok(Self { _file: file })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(files: &[(&str, u64)]) -> (tempfile::TempDir, Store, RepoName) {
        let root = tempfile::tempdir().unwrap();
        let store = Store::at(root.path());
        let repo: RepoName = "org/name".parse().unwrap();
        let folder = store.folder(&repo);
        fs::create_dir_all(state_folder(&folder)).unwrap();
        let mut snapshot = Snapshot::new(&repo, "https://host", "0");
        for (path, size) in files {
            let path = RepoPath::try_from((*path).to_owned()).unwrap();
            let full = path.under(&folder);
            fs::create_dir_all(full.parent().unwrap()).unwrap();
            fs::write(full, vec![0; *size as usize]).unwrap();
            let (hash, revision) = (FileHash::GitBlob([7; 20]), "0".to_owned());
            snapshot.files.push(Recorded { path, size: *size, hash, etag: None, revision });
        }
        snapshot.write(&folder).unwrap();
        (root, store, repo)
    }

    fn locate(store: &Store, name: &str) -> Result<String, String> {
        let found = store.locate(&name.parse().unwrap());
        let found = found.map_err(|error| error.to_string())?;
        Ok(found.strip_prefix(store.root()).unwrap().to_str().unwrap().to_owned())
    }

    #[test]
    fn safetensors_are_a_folder_and_gguf_its_first_part() {
        let (_root, store, repo) = store(&[("config.json", 2), ("model.safetensors", 3)]);
        assert_eq!(locate(&store, "org/name").unwrap(), "models/org/name");
        assert_eq!(store.snapshot(&repo).unwrap().unwrap().files.len(), 2);
        let (_root, store, _) = super::tests::store(&[
            ("Q8/m-Q8_0-00001-of-00002.gguf", 4),
            ("Q8/m-Q8_0-00002-of-00002.gguf", 5),
        ]);
        let first = "models/org/name/Q8/m-Q8_0-00001-of-00002.gguf";
        assert_eq!(locate(&store, "org/name").unwrap(), first);
        assert_eq!(locate(&store, "org/name:q8_0").unwrap(), first);
        assert!(locate(&store, "org/name:Q4_0").unwrap_err().contains("Q8_0"));
    }

    #[test]
    fn several_quantisations_want_a_choice() {
        let (_root, store, _) = store(&[("m-Q4_0.gguf", 4), ("m-Q8_0.gguf", 5)]);
        let error = locate(&store, "org/name").unwrap_err();
        assert!(error.contains("Q4_0") && error.contains("hint: -m org/name:"), "{error}");
        let error = locate(&store, "org/name:Q5_0").unwrap_err();
        let hint = "which has Q4_0, Q8_0 of it\n\nhint: sakia pull org/name:Q5_0";
        assert!(error.contains(hint), "{error}");
        assert_eq!(locate(&store, "org/name:Q8_0").unwrap(), "models/org/name/m-Q8_0.gguf");
    }

    #[test]
    fn what_is_missing_or_cut_is_named_with_a_hint() {
        let (_root, store, repo) = store(&[("config.json", 2), ("model.safetensors", 3)]);
        let file = store.folder(&repo).join("model.safetensors");
        fs::write(&file, b"x").unwrap();
        let error = locate(&store, "org/name").unwrap_err();
        assert!(error.contains("has 1 bytes, 3 are needed"), "{error}");
        fs::remove_file(file).unwrap();
        assert!(locate(&store, "org/name").unwrap_err().contains("model.safetensors is missing"));
        Snapshot::withdraw(&store.folder(&repo)).unwrap();
        let error = locate(&store, "org/name").unwrap_err();
        assert!(error.contains("not finished") && error.contains("hint: sakia pull org/name"));
        let error = locate(&store, "org/other").unwrap_err();
        assert!(error.contains("nor in the store") && error.contains("hint: sakia pull org/other"));
    }

    #[test]
    fn a_damaged_record_is_an_error_and_not_an_empty_one() {
        let (_root, store, repo) = store(&[]);
        let path = record_path(&store.folder(&repo));
        for text in
            ["", "{", r#"{"schema": 2, "repo": "", "host": "", "revision": "", "files": []}"#]
        {
            fs::write(&path, text).unwrap();
            assert!(matches!(store.snapshot(&repo), Err(HubError::Record { .. })), "{text}");
        }
        let outside = r#"{"schema": 1, "repo": "", "host": "", "revision": "", "files": [{"path": "../x", "size": 1,
            "hash": "git-sha1:ce013625030ba8dba906f756967f9e9ca394464a", "revision": ""}]}"#;
        fs::write(&path, outside).unwrap();
        assert!(store.snapshot(&repo).is_err());
    }

    #[test]
    fn a_lock_is_held_once() {
        let (_root, store, repo) = store(&[]);
        let folder = store.folder(&repo);
        let first = Lock::take(&repo, &folder).unwrap();
        let error = Lock::take(&repo, &folder).err().unwrap();
        let number = std::process::id();
        assert!(matches!(error, HubError::Locked { process: Some(id), .. } if id == number));
        drop(first);
        assert!(Lock::take(&repo, &folder).is_ok());
    }

    #[test]
    fn the_store_follows_its_variables() {
        let at = |values: &[(&str, &str)]| {
            let find = |name: &str| {
                values.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into())
            };
            Store::from_environment(&find).map(|store| store.root)
        };
        assert_eq!(at(&[("SAKIA_HOME", "/s"), ("HOME", "/h")]).unwrap(), Path::new("/s"));
        assert_eq!(
            at(&[("SAKIA_HOME", ""), ("HOME", "/h")]).unwrap(),
            Path::new("/h/.cache/sakia")
        );
        assert!(matches!(at(&[]), Err(HubError::NoHome)));
    }
}

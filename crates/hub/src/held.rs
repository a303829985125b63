//! What lies in the store, and taking it out.

use std::fs;
use std::path::Path;
use std::time::SystemTime;

use units::Bytes;

use crate::digest::FileHash;
use crate::error::HubError;
use crate::name::{ModelName, RepoName};
use crate::select::Variants;
use crate::store::{Lock, Recorded, Snapshot, Store};

/// A model that lies in the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// What `-m` takes.
    pub name: String,
    /// Of its files.
    pub bytes: Bytes,
    /// When it was pulled.
    pub modified: SystemTime,
    /// SHA-256 of its first file of weights, where the record has it.
    pub digest: Option<String>,
}

/// Folders of the store whose record cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unreadable {
    /// `org/name`.
    pub repo: String,
    /// Why.
    pub problem: String,
}

impl Store {
    /// All models that were pulled to the end, by name; and records that cannot be read.
    ///
    /// # Errors
    ///
    /// [`HubError::Io`] if the folders cannot be listed. A store that is not there is empty.
    pub fn list(&self) -> Result<(Vec<Held>, Vec<Unreadable>), HubError> {
        let (mut held, mut unreadable) = (Vec::new(), Vec::new());
        for org in names(&self.root().join("models"))? {
            for name in names(&self.root().join("models").join(&org))? {
                let Ok(repo) = format!("{org}/{name}").parse::<RepoName>() else { continue };
                match self.snapshot(&repo) {
                    Ok(None) => {}
                    Ok(Some(snapshot)) => held.extend(self.held(&repo, &snapshot)),
                    Err(error) => {
                        let repo = repo.to_string();
                        unreadable.push(Unreadable { repo, problem: error.to_string() });
                    }
                }
            }
        }
        held.sort_by(|a, b| a.name.cmp(&b.name));
        Ok((held, unreadable))
    }

    /// The models of a repository: one of safetensors, and one for each quantisation.
    fn held(&self, repo: &RepoName, snapshot: &Snapshot) -> Vec<Held> {
        let folder = self.folder(repo);
        let modified = fs::metadata(crate::store::record_path(&folder))
            .and_then(|record| record.modified())
            .unwrap_or(SystemTime::UNIX_EPOCH);
        let held = |name: String, files: &[&Recorded]| {
            let digest = files.iter().find_map(|file| match &file.hash {
                FileHash::Sha256(hash) => Some(hex(hash)),
                FileHash::GitBlob(_) => None,
            });
            let bytes = Bytes(files.iter().map(|file| file.size).sum());
            Held { name, bytes, modified, digest }
        };
        let listed = snapshot.files.iter().map(|file| (&file.path, file.size));
        let variants = Variants::of(repo, listed);
        let labels: Vec<&str> = variants.labels().collect();
        let mut models = Vec::new();
        let (gguf, own): (Vec<&Recorded>, Vec<&Recorded>) =
            snapshot.files.iter().partition(|file| file.path.has_ending("gguf"));
        let has_safetensors = own.iter().any(|file| file.path.has_ending("safetensors"));
        if has_safetensors {
            models.push(held(repo.to_string(), &own));
        }
        for label in &labels {
            let Ok(chosen) = variants.choose(Some(label)) else { continue };
            let Ok(paths) = chosen.paths() else { continue };
            let paths: Vec<_> = paths.collect();
            let files: Vec<&Recorded> =
                gguf.iter().copied().filter(|file| paths.contains(&&file.path)).collect();
            let is_only = labels.len() == 1 && !has_safetensors;
            let name = if is_only { repo.to_string() } else { format!("{repo}:{label}") };
            models.push(held(name, &files));
        }
        models
    }

    /// What [`Self::remove`] would take out: the bytes of its files.
    ///
    /// # Errors
    ///
    /// As [`Self::remove`].
    pub fn removable(&self, name: &ModelName) -> Result<Bytes, HubError> {
        let (_, removed, _) = self.parts(name)?;
        Ok(Bytes(removed.iter().map(|file| file.size).sum()))
    }

    /// Takes a model out: one quantisation if the name has one, else all of the repository. The record goes first, so
    /// that what is half gone is no model.
    ///
    /// # Errors
    ///
    /// [`HubError::NotPulled`], [`HubError::OtherVariant`], [`HubError::Locked`], [`HubError::Io`].
    pub fn remove(&self, name: &ModelName) -> Result<Bytes, HubError> {
        let folder = self.folder(&name.repo);
        if !folder.is_dir() {
            return Err(HubError::NotPulled {
                name: name.to_string(),
                store: self.root().to_owned(),
            });
        }
        let lock = Lock::take(&name.repo, &folder)?;
        let (snapshot, removed, kept) = self.parts(name)?;
        let bytes = Bytes(removed.iter().map(|file| file.size).sum());
        Snapshot::withdraw(&folder)?;
        if kept.is_empty() {
            fs::remove_dir_all(&folder).map_err(HubError::io("remove", &folder))?;
            drop(lock);
            // The folder of an organisation without models is of no use; one with others stays.
            let _ = fs::remove_dir(folder.parent().unwrap_or(&folder));
            return Ok(bytes);
        }
        for file in &removed {
            let path = file.path.under(&folder);
            match fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(HubError::io("remove", &path)(error));
                }
                _ => {}
            }
        }
        Snapshot { files: kept, ..snapshot }.write(&folder)?;
        Ok(bytes)
    }

    /// A repository's record, the files that a name means, and all others.
    fn parts(
        &self,
        name: &ModelName,
    ) -> Result<(Snapshot, Vec<Recorded>, Vec<Recorded>), HubError> {
        let missing =
            || HubError::NotPulled { name: name.to_string(), store: self.root().to_owned() };
        let folder = self.folder(&name.repo);
        let Some(snapshot) = self.snapshot(&name.repo)? else {
            // A pull that was not finished has no record, and can be taken out as a whole.
            if name.variant.is_none() && folder.is_dir() {
                return Ok((Snapshot::new(&name.repo, "", ""), Vec::new(), Vec::new()));
            }
            return Err(missing());
        };
        let Some(variant) = &name.variant else {
            let files = snapshot.files.clone();
            return Ok((snapshot, files, Vec::new()));
        };
        let files = snapshot.files.iter().map(|file| (&file.path, file.size));
        let variants = Variants::of(&name.repo, files);
        if !variants.has(variant) {
            let found: Vec<&str> = variants.labels().collect();
            return Err(HubError::OtherVariant { name: name.to_string(), found: found.join(", ") });
        }
        let chosen = variants.choose(Some(variant))?;
        let paths: Vec<_> = chosen.paths()?.cloned().collect();
        let (removed, kept) =
            snapshot.files.iter().cloned().partition(|file| paths.contains(&file.path));
        Ok((snapshot, removed, kept))
    }
}

/// Names of the folders in a folder that need not be there.
fn names(folder: &Path) -> Result<Vec<String>, HubError> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(HubError::io("list", folder)(error)),
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(HubError::io("list", folder))?;
        if entry.path().is_dir() {
            names.extend(entry.file_name().into_string());
        }
    }
    names.sort_unstable();
    Ok(names)
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::path::RepoPath;

    fn add(store: &Store, repo: &str, files: &[(&str, u64)]) {
        let repo: RepoName = repo.parse().unwrap();
        let folder = store.folder(&repo);
        fs::create_dir_all(crate::store::state_folder(&folder)).unwrap();
        let mut snapshot = Snapshot::new(&repo, "https://host", "0");
        for (path, size) in files {
            let path = RepoPath::try_from((*path).to_owned()).unwrap();
            fs::write(path.under(&folder), vec![0; *size as usize]).unwrap();
            let (hash, revision) = (FileHash::Sha256([7; 32]), "0".to_owned());
            snapshot.files.push(Recorded { path, size: *size, hash, etag: None, revision });
        }
        snapshot.write(&folder).unwrap();
    }

    fn list(store: &Store) -> Vec<(String, u64)> {
        let (held, unreadable) = store.list().unwrap();
        assert_eq!(unreadable, []);
        held.into_iter().map(|held| (held.name, held.bytes.0)).collect()
    }

    #[test]
    fn models_are_listed_by_the_names_that_find_them() {
        let root = tempfile::tempdir().unwrap();
        let store = Store::at(root.path());
        assert_eq!(list(&store), []);
        add(&store, "b/one", &[("m-Q4_0.gguf", 4)]);
        add(&store, "b/two", &[("m-Q4_0.gguf", 4), ("m-Q8_0.gguf", 5)]);
        add(&store, "a/st", &[("config.json", 2), ("model.safetensors", 3)]);
        let expected = [("a/st", 5), ("b/one", 4), ("b/two:Q4_0", 4), ("b/two:Q8_0", 5)];
        assert_eq!(list(&store), expected.map(|(name, bytes)| (name.to_owned(), bytes)));
        for (name, _) in expected {
            store.locate(&name.parse().unwrap()).unwrap();
        }
    }

    #[test]
    fn one_quantisation_goes_and_the_others_stay() {
        let root = tempfile::tempdir().unwrap();
        let store = Store::at(root.path());
        add(&store, "b/two", &[("m-Q4_0.gguf", 4), ("m-Q8_0.gguf", 5)]);
        assert!(store.remove(&"b/two:Q5_0".parse().unwrap()).is_err());
        assert!(store.remove(&"b/gone".parse().unwrap()).is_err());
        let name: ModelName = "b/two:Q4_0".parse().unwrap();
        assert_eq!(store.removable(&name).unwrap(), Bytes(4));
        assert_eq!(store.remove(&name).unwrap(), Bytes(4));
        assert_eq!(list(&store), [("b/two".to_owned(), 5)]);
        assert_eq!(store.remove(&"b/two".parse().unwrap()).unwrap(), Bytes(5));
        assert_eq!(list(&store), []);
        assert!(!root.path().join("models/b").exists());
    }
}

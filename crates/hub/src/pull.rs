//! From a name to a model in the store: list, choose, lock, fetch, verify, install, record.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use units::Bytes;

use crate::client::Client;
use crate::error::HubError;
use crate::fetch::Fetch;
use crate::listing::{self, Listing};
use crate::name::{ModelName, RepoName};
use crate::part::Part;
use crate::path::RepoPath;
use crate::retry::Stop;
use crate::select::{Wanted, select};
use crate::store::{Lock, Recorded, Snapshot, Store, size_of, state_folder, sync_folder};
use crate::token::Token;
use crate::url::Host;

/// What the store's folder for files on their way is called, inside of our folder.
const INCOMING: &str = "incoming";

/// How a pull goes about it.
#[derive(Debug, Clone)]
pub struct Tuning {
    /// Connections at a time.
    pub connections: usize,
    /// Bytes of a chunk of a large file.
    pub chunk: u64,
    /// The first pause after a failure; each further one is twice as long, up to half a minute.
    pub first_pause: Duration,
}

impl Default for Tuning {
    fn default() -> Self {
        Self { connections: 4, chunk: 64 << 20, first_pause: Duration::from_millis(500) }
    }
}

/// Who is told how far it is. Called from several threads.
pub trait Progress: Sync {
    /// The work is known: `total` bytes in all, of which `present` are here.
    fn begins(&self, total: u64, present: u64) {
        let _ = (total, present);
    }
    /// So many bytes are here. May go back, when a file turns out wrong.
    fn at(&self, bytes: u64) {
        let _ = bytes;
    }
    /// This file is being hashed.
    fn verifying(&self, path: &str) {
        let _ = path;
    }
    /// It was hashed, with whatever outcome.
    fn verified(&self) {}
    /// Something worth a line: a try that failed, a file that is fetched again.
    fn remark(&self, text: &str) {
        let _ = text;
    }
}

/// Tells nobody.
pub struct Silent;

impl Progress for Silent {}

/// What to pull.
#[derive(Debug, Clone)]
pub struct Request {
    /// Repository and quantisation.
    pub name: ModelName,
    /// Branch, tag or commit.
    pub revision: String,
    /// Patterns instead of the usual choice of files.
    pub include: Vec<String>,
}

/// A file of a [`Plan`].
#[derive(Debug, Clone)]
pub struct Planned {
    /// The file.
    pub wanted: Wanted,
    /// How many of its bytes are here.
    pub present: u64,
}

/// What a pull would do.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Which repository.
    pub repo: RepoName,
    /// The commit that the revision stands for.
    pub commit: String,
    /// Where the model goes.
    pub folder: PathBuf,
    /// Its files.
    pub files: Vec<Planned>,
    /// All paths of the commit, to know what is gone.
    listed: BTreeSet<RepoPath>,
}

impl Plan {
    /// Bytes of all files.
    pub fn total(&self) -> u64 {
        self.files.iter().map(|file| file.wanted.size).sum()
    }

    /// Bytes that are here.
    pub fn present(&self) -> u64 {
        self.files.iter().map(|file| file.present).sum()
    }
}

/// What a pull did.
#[derive(Debug, Clone)]
pub struct Pulled {
    /// Bytes that came over the network.
    pub fetched: u64,
    /// The record as it now is.
    pub snapshot: Snapshot,
    /// What to give to `-m`: a folder or a file.
    pub model: PathBuf,
}

/// A host, and a store to pull into. After an error its connections are gone: make a new one to try again.
pub struct Hub {
    client: Client,
    store: Store,
    tuning: Tuning,
    stop: Stop,
}

impl Hub {
    /// Nothing is sent yet. `certificates` is a file that replaces the built-in list of whom to trust.
    ///
    /// # Errors
    ///
    /// [`HubError::Processor`], [`HubError::Certificates`]: no encryption, and the host needs it.
    pub fn new(
        host: Host,
        token: Option<&Token>,
        certificates: Option<PathBuf>,
        store: Store,
        tuning: Tuning,
        stop: &Stop,
    ) -> Result<Self, HubError> {
        let client = Client::new(host, token, certificates)?;
        let stop = stop.afresh();
        Ok(Self { client, store, tuning, stop })
    }

    /// Asks the host, and looks at what is here. Writes nothing.
    ///
    /// # Errors
    ///
    /// Whatever the network, the host, or the choice of files brings.
    pub fn plan(&self, request: &Request) -> Result<Plan, HubError> {
        let Request { name, revision, include } = request;
        let listing = self.list(&name.repo, revision)?;
        let wanted = select(&listing, name.variant.as_deref(), include)?;
        let folder = self.store.folder(&name.repo);
        let snapshot = self.store.snapshot(&name.repo)?;
        let incoming = incoming(&folder);
        let planned = wanted.into_iter().map(|wanted| {
            let present = if is_here(&folder, snapshot.as_ref(), &wanted) {
                wanted.size
            } else {
                Part::left_over(&incoming, &wanted)
            };
            Planned { wanted, present }
        });
        let files: Vec<Planned> = planned.collect();
        let all = files.iter().try_fold(0u64, |sum, file| sum.checked_add(file.wanted.size));
        if all.is_none() {
            let problem = "its sizes add up to more than 16 EiB";
            return Err(listing::unusable(&listing.host, &listing.repo, problem));
        }
        let listed = listing.files.into_iter().map(|file| file.path).collect();
        Ok(Plan { repo: name.repo.clone(), commit: listing.commit, folder, files, listed })
    }

    fn list(&self, repo: &RepoName, revision: &str) -> Result<Listing, HubError> {
        std::thread::scope(|scope| {
            let first_pause = self.tuning.first_pause;
            let asking = scope.spawn(move || {
                listing::fetch(&self.client, repo, revision, first_pause, &self.stop)
            });
            while !asking.is_finished() {
                if self.stop.is_set() {
                    self.client.shut_down();
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            let listing = asking.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            let none = Bytes::ZERO;
            match listing {
                Err(_) if self.stop.is_set() => Err(HubError::Stopped { done: none, total: none }),
                listing => listing,
            }
        })
    }

    /// Fetches what is missing of a plan and makes it the model in the store.
    ///
    /// # Errors
    ///
    /// Whatever the network, the host and the disk bring, [`HubError::Space`] before anything is fetched,
    /// [`HubError::Locked`], [`HubError::Stopped`]. What was fetched stays and is gone on from at the next pull; no
    /// final name ever holds anything but a whole, verified file.
    pub fn pull(&self, plan: &Plan, progress: &dyn Progress) -> Result<Pulled, HubError> {
        let _lock = Lock::take(&plan.repo, &plan.folder)?;
        let incoming = incoming(&plan.folder);
        fs::create_dir_all(&incoming).map_err(HubError::io("make the folder", &incoming))?;
        // Another pull may have ended between the plan and the lock, so all is looked at again.
        let old = self.store.snapshot(&plan.repo)?;
        let mut missing = Vec::new();
        for file in &plan.files {
            let here = is_here(&plan.folder, old.as_ref(), &file.wanted)
                || self.adopt(&plan.folder, &file.wanted, progress)?;
            if !here {
                missing.push(&file.wanted);
            }
        }
        let left =
            missing.iter().map(|wanted| wanted.size - Part::left_over(&incoming, wanted)).sum();
        check_space(&plan.folder, left)?;
        let opened = missing
            .into_iter()
            .map(|wanted| Part::open(&incoming, wanted.clone(), self.tuning.chunk));
        let parts: Vec<Part> = opened.collect::<Result<_, _>>()?;
        progress.begins(plan.total(), plan.total() - left);
        self.fetch(plan, &parts, plan.total() - left, progress)?;
        let snapshot = self.install(plan, &parts, old.as_ref())?;
        let unfinished = unfinished(&incoming);
        if unfinished > 0 {
            progress.remark(&format!(
                "{} of other unfinished files are in {}",
                Bytes(unfinished),
                incoming.display()
            ));
        }
        let model = Self::model(plan);
        Ok(Pulled { fetched: left, snapshot, model })
    }

    /// What to open: the first part of a GGUF, else the folder.
    fn model(plan: &Plan) -> PathBuf {
        let gguf = |file: &&Planned| file.wanted.path.has_ending("gguf");
        let first = plan.files.iter().filter(gguf).map(|file| &file.wanted.path).min();
        match first {
            Some(first) if plan.files.iter().all(|file| gguf(&file)) => first.under(&plan.folder),
            _ => plan.folder.clone(),
        }
    }

    fn fetch(
        &self,
        plan: &Plan,
        parts: &[Part],
        present: u64,
        progress: &dyn Progress,
    ) -> Result<(), HubError> {
        let repo = &plan.repo;
        let url = |part: &Part| {
            let front = [repo.org(), repo.name(), "resolve", &plan.commit];
            let path = part.wanted.path.as_str();
            self.client.host().at(front.into_iter().chain(path.split('/')), "")
        };
        let work = parts.iter().filter(|part| !part.is_verified()).map(|part| (part, url(part)));
        let fetch =
            Fetch::new(&self.client, work.collect(), present, &self.stop, &self.tuning, progress);
        let result = fetch.run();
        match result {
            // Broken connections and half-done hashes are the stop's own doing.
            _ if self.stop.asked() => {
                Err(HubError::Stopped { done: Bytes(fetch.position()), total: Bytes(plan.total()) })
            }
            result => result,
        }
    }

    /// Takes a file that lies at its final name without a record, if it is the right one.
    fn adopt(
        &self,
        folder: &Path,
        wanted: &Wanted,
        progress: &dyn Progress,
    ) -> Result<bool, HubError> {
        let path = wanted.path.under(folder);
        if size_of(&path) != Some(wanted.size) {
            return Ok(false);
        }
        progress.verifying(wanted.path.as_str());
        let mut file = File::open(&path).map_err(HubError::io("open", &path))?;
        let found = wanted.hash.of(&mut file, wanted.size, || !self.stop.is_set());
        progress.verified();
        match found.map_err(HubError::io("read", &path))? {
            Some(found) => Ok(found == wanted.hash),
            None => Err(HubError::Stopped { done: Bytes::ZERO, total: Bytes::ZERO }),
        }
    }

    /// Gives all files their final names, then says so in the record.
    ///
    /// A crash in between leaves a model without a record, which the next pull hashes and takes over.
    fn install(
        &self,
        plan: &Plan,
        parts: &[Part],
        old: Option<&Snapshot>,
    ) -> Result<Snapshot, HubError> {
        let folder = &plan.folder;
        let mut snapshot = Snapshot::new(&plan.repo, &self.client.host().to_string(), &plan.commit);
        for Planned { wanted, .. } in &plan.files {
            let fetched = parts.iter().find(|part| part.wanted == *wanted).and_then(Part::etag);
            let known = old.and_then(|old| old.file(&wanted.path));
            let known = known.filter(|file| file.hash == wanted.hash);
            snapshot.files.push(Recorded {
                path: wanted.path.clone(),
                size: wanted.size,
                hash: wanted.hash.clone(),
                etag: fetched.or_else(|| known.and_then(|file| file.etag.clone())),
                revision: plan.commit.clone(),
            });
        }
        let others = old.iter().flat_map(|old| &old.files);
        let others =
            others.filter(|file| plan.files.iter().all(|new| new.wanted.path != file.path));
        let (kept, gone): (Vec<&Recorded>, Vec<&Recorded>) =
            others.partition(|file| plan.keeps(file));
        snapshot.files.extend(kept.into_iter().cloned());
        snapshot.files.sort_by(|a, b| a.path.cmp(&b.path));
        if parts.is_empty() && old == Some(&snapshot) {
            remove_empty(&incoming(folder));
            return Ok(snapshot);
        }
        if old.is_some() && !(parts.is_empty() && gone.is_empty()) {
            Snapshot::withdraw(folder)?;
        }
        for file in gone {
            // It may have been removed by hand.
            let _ = fs::remove_file(file.path.under(folder));
        }
        for part in parts {
            part.install(folder)?;
        }
        sync_folder(folder);
        snapshot.write(folder)?;
        remove_empty(&incoming(folder));
        Ok(snapshot)
    }
}

impl Plan {
    /// Whether a file of an earlier pull stays: another quantisation, or one that the repository still has. A shard or a
    /// configuration that it no longer has would only confuse a reader of the folder.
    fn keeps(&self, file: &Recorded) -> bool {
        let here = size_of(&file.path.under(&self.folder)) == Some(file.size);
        let gguf = file.path.has_ending("gguf");
        here && (gguf || self.listed.contains(&file.path))
    }
}

fn incoming(folder: &Path) -> PathBuf {
    state_folder(folder).join(INCOMING)
}

/// Whether the record has this very content and the file is as long as it should be.
fn is_here(folder: &Path, snapshot: Option<&Snapshot>, wanted: &Wanted) -> bool {
    let recorded = snapshot.and_then(|snapshot| snapshot.file(&wanted.path));
    recorded.is_some_and(|file| file.hash == wanted.hash)
        && size_of(&wanted.path.under(folder)) == Some(wanted.size)
}

fn check_space(folder: &Path, needed: u64) -> Result<(), HubError> {
    let disk = rustix::fs::statvfs(folder)
        .map_err(|error| HubError::io("look at the disk of", folder)(error.into()))?;
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    if needed > free {
        let folder = folder.to_owned();
        return Err(HubError::Space { folder, needed: Bytes(needed), free: Bytes(free) });
    }
    Ok(())
}

/// Bytes of files that other, unfinished pulls left.
fn unfinished(folder: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let bytes = entries.map(|entry| match entry.metadata() {
        Ok(meta) if meta.is_dir() => unfinished(&entry.path()),
        Ok(meta) => meta.blocks() * 512,
        Err(_) => 0,
    });
    bytes.sum()
}

/// Removes folders that hold nothing, from the inside out. One that holds something refuses by itself.
fn remove_empty(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_empty(&entry.path());
        }
    }
    let _ = fs::remove_dir(folder);
}

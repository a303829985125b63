//! Prefixes on disk: one file a block, and one a state, in a folder with a quota.
//!
//! A file appears under its name only when it is complete (written elsewhere, synced, renamed), and is believed only
//! when its checksum, its identity and all its tokens agree. What is wrong with a file costs that file, and a line to
//! whoever is told. Names carry the identity, so that models may share a folder: those of others count towards the
//! quota and leave like all when they were used least recently.
//!
//! Files are written by a thread of their own, from memory that the tree shares with it.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::SystemTime;

use checkpoint::pack::Checksum;
use expert_store::Notice;

use super::file::{FileError, Kind, Wanted};
use crate::scheduler::DiskOptions;

/// Contents that wait for the writing thread; one more is being written.
const WRITES: usize = 2;

/// Contents that are held for writing at most.
pub(super) const HELD: u64 = WRITES as u64 + 1;

/// Most files of a folder: what is known of one takes memory.
const MOST_FILES: usize = 1 << 14;

/// Memory of what is known of the files of a folder.
pub(super) const INDEX_BYTES: u64 = MOST_FILES as u64 * 128;

/// What a name says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Name {
    identity: u64,
    /// Hash of all tokens.
    text: u64,
    kind: Kind,
}

impl Name {
    fn of(identity: u64, tokens: &[u32], kind: Kind) -> Self {
        let mut sum = Checksum::new();
        for token in tokens {
            sum.update(&token.to_le_bytes());
        }
        Self { identity, text: sum.value(), kind }
    }

    fn parse(name: &str) -> Option<Self> {
        let (stem, extension) = name.rsplit_once('.')?;
        let kind = match extension {
            "rows" => Kind::Rows,
            "state" => Kind::State,
            _ => return None,
        };
        let (identity, text) = stem.split_once('-')?;
        let hex = |text: &str| {
            let digits =
                text.len() == 16 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
            digits.then(|| u64::from_str_radix(text, 16).ok()).flatten()
        };
        Some(Self { identity: hex(identity)?, text: hex(text)?, kind })
    }

    fn file(&self) -> String {
        let extension = match self.kind {
            Kind::Rows => "rows",
            Kind::State => "state",
        };
        format!("{:016x}-{:016x}.{extension}", self.identity, self.text)
    }
}

/// Ends of names of files that are being written.
const TEMPORARY: &str = ".writing";

#[derive(Clone, Copy)]
struct Entry {
    bytes: u64,
    used: SystemTime,
}

/// Numbers since the start, and of now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct DiskCounters {
    pub(super) files: u64,
    pub(super) bytes: u64,
    pub(super) written_bytes: u64,
    pub(super) read_bytes: u64,
    pub(super) dropped: u64,
    pub(super) failed: u64,
}

#[derive(Default)]
struct Index {
    files: HashMap<Name, Entry>,
    counters: DiskCounters,
}

/// The folder, for the engine's thread and for the one that writes.
struct Folder {
    path: PathBuf,
    quota: u64,
    notice: Option<Notice>,
    index: Mutex<Index>,
}

/// Something to write.
struct ToWrite {
    identity: u64,
    kind: Kind,
    tokens: Vec<u32>,
    content: Arc<Vec<u8>>,
}

/// Prefixes of one identity on disk. Dropping it waits for what is being written.
pub(super) struct Disk {
    identity: u64,
    folder: Arc<Folder>,
    sender: Option<SyncSender<ToWrite>>,
    writer: Option<JoinHandle<()>>,
}

impl Folder {
    fn open(options: &DiskOptions, notice: Option<Notice>) -> std::io::Result<Self> {
        folder_of_ours(&options.folder)?;
        let mut index = Index::default();
        for entry in std::fs::read_dir(&options.folder)? {
            let entry = entry?;
            let name = entry.file_name();
            let Some(name) = name.to_str() else { continue };
            if name.strip_suffix(TEMPORARY).is_some_and(|name| Name::parse(name).is_some()) {
                // Whoever wrote it did not come to its end.
                let _ = std::fs::remove_file(entry.path());
                continue;
            }
            let (Some(name), Ok(metadata)) = (Name::parse(name), entry.metadata()) else {
                continue;
            };
            if metadata.is_file() {
                let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                index.add(name, Entry { bytes: metadata.len(), used });
            }
        }
        let path = options.folder.clone();
        let folder = Self { path, quota: options.quota.0, notice, index: Mutex::new(index) };
        folder.make_room(0);
        Ok(folder)
    }

    /// The index; every change of it is complete.
    fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn path(&self, name: &Name) -> PathBuf {
        self.path.join(name.file())
    }

    fn tell(&self, line: &str) {
        if let Some(notice) = self.notice {
            notice(line);
        }
    }

    /// Removes files until `bytes` more fit into the quota, and one more into the index. Whether they do.
    fn make_room(&self, bytes: u64) -> bool {
        let mut index = self.index();
        while index.counters.bytes + bytes > self.quota || index.files.len() >= MOST_FILES {
            let oldest = index.files.iter().min_by_key(|(_, entry)| entry.used);
            let Some(name) = oldest.map(|(name, _)| *name) else { return bytes <= self.quota };
            index.remove(&name);
            // Should it stay, the next start counts it again.
            let _ = std::fs::remove_file(self.path(&name));
        }
        true
    }

    fn write(&self, write: &ToWrite) -> std::io::Result<()> {
        let ToWrite { identity, kind, tokens, content } = write;
        let name = Name::of(*identity, tokens, *kind);
        let wanted =
            Wanted { kind: *kind, identity: *identity, tokens, content_bytes: content.len() };
        if self.index().files.contains_key(&name) || !self.make_room(wanted.bytes()) {
            return Ok(());
        }
        let path = self.path(&name);
        let mut temporary = path.clone().into_os_string();
        temporary.push(TEMPORARY);
        let temporary = PathBuf::from(temporary);
        let outcome = write_synced(&temporary, &wanted, content)
            .and_then(|()| std::fs::rename(&temporary, &path))
            .and_then(|()| sync_folder(&self.path));
        if outcome.is_err() {
            let _ = std::fs::remove_file(&temporary);
            return outcome;
        }
        let mut index = self.index();
        index.add(name, Entry { bytes: wanted.bytes(), used: SystemTime::now() });
        index.counters.written_bytes += wanted.bytes();
        Ok(())
    }

    /// Takes what there is to write, until nobody is left to send any.
    fn write_all(&self, receiver: &Receiver<ToWrite>) {
        let mut told = false;
        while let Ok(write) = receiver.recv() {
            if let Err(error) = self.write(&write) {
                self.index().counters.failed += 1;
                if !std::mem::replace(&mut told, true) {
                    let path = self.path.display();
                    self.tell(&format!("{path}: a prefix cannot be written: {error}; said once"));
                }
            }
        }
    }
}

/// Makes a folder that is nobody else's to read: what people have said is in it.
fn folder_of_ours(path: &Path) -> std::io::Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.recursive(true).create(path)
}

fn file_of_ours(path: &Path) -> std::io::Result<File> {
    let mut options = File::options();
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.write(true).create(true).truncate(true).open(path)
}

fn write_synced(path: &Path, wanted: &Wanted<'_>, content: &[u8]) -> std::io::Result<()> {
    let mut out = BufWriter::new(file_of_ours(path)?);
    wanted.write(&mut out, content)?;
    out.flush()?;
    out.get_ref().sync_all()
}

/// So that a name is there after a power cut too. Where folders cannot be synced, the file system sees to it.
fn sync_folder(path: &Path) -> std::io::Result<()> {
    if cfg!(unix) { File::open(path)?.sync_all() } else { Ok(()) }
}

impl Index {
    fn add(&mut self, name: Name, entry: Entry) {
        self.remove(&name);
        self.files.insert(name, entry);
        self.counters.files += 1;
        self.counters.bytes += entry.bytes;
    }

    fn remove(&mut self, name: &Name) {
        if let Some(entry) = self.files.remove(name) {
            self.counters.files -= 1;
            self.counters.bytes -= entry.bytes;
        }
    }
}

impl Disk {
    /// Opens the folder and starts to write.
    ///
    /// # Errors
    /// The folder cannot be made or listed, or the system gives no thread.
    pub(super) fn open(
        options: &DiskOptions,
        identity: u64,
        notice: Option<Notice>,
    ) -> std::io::Result<Self> {
        let folder = Arc::new(Folder::open(options, notice)?);
        let (sender, receiver) = sync_channel(WRITES);
        let writes = Arc::clone(&folder);
        let writer = std::thread::Builder::new().name("prefixes".to_owned());
        let writer = writer.spawn(move || writes.write_all(&receiver))?;
        Ok(Self { identity, folder, sender: Some(sender), writer: Some(writer) })
    }

    pub(super) fn counters(&self) -> DiskCounters {
        self.folder.index().counters
    }

    /// Whether a file of this text is there.
    pub(super) fn has(&self, tokens: &[u32], kind: Kind) -> bool {
        self.folder.index().files.contains_key(&Name::of(self.identity, tokens, kind))
    }

    /// The content of the file of this text, if it is there and what it has to be.
    pub(super) fn read(&self, tokens: &[u32], kind: Kind, content_bytes: usize) -> Option<Vec<u8>> {
        let name = Name::of(self.identity, tokens, kind);
        let path = self.folder.path(&name);
        if !self.folder.index().files.contains_key(&name) {
            return None;
        }
        let wanted = Wanted { kind, identity: self.identity, tokens, content_bytes };
        match read_file(&path, &wanted) {
            Ok(content) => {
                let used = SystemTime::now();
                let mut index = self.folder.index();
                index.counters.read_bytes += wanted.bytes();
                index.add(name, Entry { bytes: wanted.bytes(), used });
                Some(content)
            }
            Err(error) => {
                let mut index = self.folder.index();
                index.remove(&name);
                index.counters.dropped += 1;
                drop(index);
                let _ = std::fs::remove_file(&path);
                self.folder.tell(&format!("{}: dropped, since {error}", path.display()));
                None
            }
        }
    }

    /// Has something written, if the writing thread can take it now, or waits until it can.
    pub(super) fn write(
        &self,
        tokens: &[u32],
        kind: Kind,
        content: &Arc<Vec<u8>>,
        wait: bool,
    ) -> bool {
        let sender = self.sender.as_ref().expect("the sender lives as long as this");
        let (tokens, content) = (tokens.to_vec(), Arc::clone(content));
        let write = ToWrite { identity: self.identity, kind, tokens, content };
        if wait {
            // A writer that is gone has told why.
            let _ = sender.send(write);
            return true;
        }
        !matches!(sender.try_send(write), Err(TrySendError::Full(_)))
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.sender = None;
        if let Some(writer) = self.writer.take() {
            // A panic there has lost what it was to write, and nothing else.
            let _ = writer.join();
        }
    }
}

/// Reads a file, and notes that it was used.
fn read_file(path: &Path, wanted: &Wanted<'_>) -> Result<Vec<u8>, FileError> {
    let mut file = File::open(path)?;
    let found = file.metadata()?.len();
    let content = wanted.read(&mut file, found)?;
    // Only the order of files is at stake.
    let _ = file.set_modified(SystemTime::now());
    Ok(content)
}

//! How the model's disk is best read: measured once, then remembered for that disk.
//!
//! What is remembered is a hint and never needed: without it, with a damaged one or one of another disk, the disk is
//! measured again; with none at all, reads are as fast as the default.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use expert_store::{DirectMode, Probed, ReadModel, StoreOptions};
use serde::{Deserialize, Serialize};
use units::ExpertKey;

use crate::engine::{EngineOptions, OpenModel};

/// Version of what is remembered.
const VERSION: u32 = 1;

/// Experts of less than this are read too soon for the measuring to pay.
const WORTH_PROBING: u64 = 1 << 30;

/// Most bytes of a remembered disk.
const RECORD_BYTES: u64 = 16 << 10;

/// Shortest parts that make sense.
const LEAST_PART_BYTES: u64 = 64 << 10;

/// How experts are read, and how that was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Reads {
    /// Threads and lengths.
    pub model: ReadModel,
    /// Bytes a second that the disk delivered when it was measured, if it was.
    pub probed_bytes_per_second: Option<u64>,
}

impl Reads {
    /// A number of reader threads that the user chose.
    pub fn with_threads(threads: usize) -> Self {
        let model = ReadModel { threads, ..ReadModel::default() };
        Self { model, probed_bytes_per_second: None }
    }

    fn of(probed: Probed) -> Self {
        let Probed { model, bytes_per_second } = probed;
        Self { model, probed_bytes_per_second: Some(bytes_per_second) }
    }
}

/// Whether a disk that is not known is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unknown {
    /// It is, which takes a second or two.
    Probe,
    /// It is not: something else is about to be said about the model.
    Default,
}

/// A disk as it is remembered.
#[derive(Debug, Serialize, Deserialize)]
struct Remembered {
    version: u32,
    /// See [`name_of`].
    disk: String,
    threads: usize,
    /// Nothing where pieces are read whole.
    part_bytes: Option<u64>,
    bytes_per_second: u64,
}

impl OpenModel {
    /// How to read this model's disk: as remembered in `folder`, or as measured now and then remembered. `note` gets a
    /// line if something about that went wrong.
    pub fn reads(
        &self,
        options: &EngineOptions,
        folder: Option<&Path>,
        unknown: Unknown,
        note: &mut dyn FnMut(&str),
    ) -> Reads {
        if self.model.records.payload_bytes() < WORTH_PROBING {
            return Reads::default();
        }
        self.known_or_found(options, folder, unknown, note)
    }

    fn known_or_found(
        &self,
        options: &EngineOptions,
        folder: Option<&Path>,
        unknown: Unknown,
        note: &mut dyn FnMut(&str),
    ) -> Reads {
        let disk = name_of(self, options);
        let path = folder.map(|folder| folder.join(file_name(&disk)));
        match path.as_deref().map(|path| recall(path, &disk)) {
            Some(Ok(Some(reads))) => return reads,
            Some(Err(what)) => note(&what),
            Some(Ok(None)) | None => {}
        }
        if unknown == Unknown::Default {
            return Reads::default();
        }
        let files: Vec<PathBuf> = self.checkpoint.files.iter().map(|f| f.path.clone()).collect();
        let (direct, reader) = (options.direct, options.reader);
        let store = StoreOptions { direct, reader, ..StoreOptions::default() };
        let in_flight = self.model.config.top_k as usize;
        let probed = expert_store::probe(&files, &self.model.records, &store, in_flight);
        memory_plan::release_free_memory();
        match probed {
            Ok(probed) => {
                if let Some(path) = &path
                    && let Err(error) = remember(path, &disk, &probed)
                {
                    note(&format!("note: {} cannot be written: {error}", path.display()));
                }
                Reads::of(probed)
            }
            Err(error) => {
                note(&format!("warning: the disk could not be measured: {error}"));
                Reads::default()
            }
        }
    }
}

/// What tells disks apart, and ways of using them: the device and what is mounted from it, whether reads are direct, and
/// the order of magnitude of the reads.
fn name_of(opened: &OpenModel, options: &EngineOptions) -> String {
    let file = &opened.checkpoint.files[0].path;
    let device = fs::metadata(file).map_or(0, |metadata| metadata.dev());
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let record = opened.model.records.record(ExpertKey::new(0, 0));
    let longest = record.pieces.iter().map(|piece| piece.bytes).max().unwrap_or(0);
    let direct = if options.direct == DirectMode::Auto { "direct" } else { "buffered" };
    let mount = mount_of(device, &mounts);
    let reader = options.reader.name();
    format!("{mount}, {reader}, {direct}, pieces up to {}", longest.next_power_of_two())
}

/// `major:minor type source` of a device in the list that Linux gives; its number where there is no such list.
fn mount_of(device: u64, mounts: &str) -> String {
    let (major, minor) = split_device(device);
    let number = format!("{major}:{minor}");
    // `id parent major:minor root mountpoint options [tags] - type source options`
    let line = mounts.lines().find(|line| line.split(' ').nth(2) == Some(number.as_str()));
    let kind = line.and_then(|line| line.split_once(" - ")).map(|(_, kind)| kind);
    let words: Vec<&str> = kind.unwrap_or_default().split(' ').take(2).collect();
    format!("{number} {}", words.join(" ")).trim_end().to_owned()
}

/// The two numbers of a device, as Linux packs them.
const fn split_device(device: u64) -> (u64, u64) {
    let major = ((device >> 8) & 0xfff) | ((device >> 32) & !0xfff);
    let minor = (device & 0xff) | ((device >> 12) & 0xffff_ff00);
    (major, minor)
}

/// The name of a disk's file: a hash, as its own name may hold anything.
fn file_name(disk: &str) -> String {
    format!("{}.json", crate::receipt::fnv_1a(disk.bytes()))
}

/// What is remembered of a disk, if anything; or a line that says why that is of no use.
fn recall(path: &Path, disk: &str) -> Result<Option<Reads>, String> {
    let useless =
        |what: &str| Err(format!("note: {} {what}; the disk is measured again", path.display()));
    let mut text = String::new();
    let read =
        fs::File::open(path).and_then(|file| file.take(RECORD_BYTES).read_to_string(&mut text));
    match read {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return useless(&format!("cannot be read ({error})")),
    }
    let Ok(known) = serde_json::from_str::<Remembered>(&text) else {
        return useless("is not what this program writes");
    };
    let Remembered { version, threads, bytes_per_second, .. } = known;
    let part_bytes = known.part_bytes.unwrap_or(u64::MAX);
    if version != VERSION {
        return useless(&format!("is of version {version}, not {VERSION}"));
    }
    if known.disk != disk {
        return useless("is about another disk");
    }
    if !(1..=expert_store::MAX_THREADS).contains(&threads) || part_bytes < LEAST_PART_BYTES {
        return useless("holds numbers that make no sense");
    }
    let model = ReadModel { threads, part_bytes };
    Ok(Some(Reads::of(Probed { model, bytes_per_second })))
}

/// Writes what was found under its name, whole or not at all.
fn remember(path: &Path, disk: &str, probed: &Probed) -> io::Result<()> {
    let Probed { model: ReadModel { threads, part_bytes }, bytes_per_second } = *probed;
    let record = Remembered {
        version: VERSION,
        disk: disk.to_owned(),
        threads,
        part_bytes: (part_bytes != u64::MAX).then_some(part_bytes),
        bytes_per_second,
    };
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(format!("{:#}\n", serde_json::to_value(&record)?).as_bytes())?;
    file.persist(path)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
25 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
31 25 0:27 / /tmp rw - tmpfs tmpfs rw,size=1g
";

    #[test]
    fn a_disk_is_named_by_its_number_and_what_is_mounted_from_it() {
        assert_eq!(mount_of(254 << 8, MOUNTS), "254:0 ext4 /dev/vda");
        assert_eq!(mount_of(27, MOUNTS), "0:27 tmpfs tmpfs");
        assert_eq!(mount_of((259 << 8) | 1, MOUNTS), "259:1");
        assert_eq!(split_device((259 << 8) | 0x02 | (0x300 << 12)), (259, 0x302));
    }

    #[test]
    fn a_disk_is_measured_once_and_known_from_then_on() {
        let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/sakia-demo-Q4_K_M.gguf");
        let opened = OpenModel::open(Path::new(demo)).unwrap();
        let budget = memory_plan::Budget::detect(Some(units::Bytes::gib(1))).unwrap();
        let options = EngineOptions::new(budget);
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join("disks");
        let said = std::cell::RefCell::new(Vec::new());
        let find = |unknown| {
            let note = &mut |line: &str| said.borrow_mut().push(line.to_owned());
            opened.known_or_found(&options, Some(&folder), unknown, note)
        };
        let small =
            opened.reads(&options, Some(&folder), Unknown::Probe, &mut |_| panic!("a note"));
        assert_eq!(small, Reads::default(), "too small to be worth it");
        assert_eq!(find(Unknown::Default), Reads::default());
        assert!(!folder.exists(), "nothing was measured");

        let found = find(Unknown::Probe);
        assert!(found.probed_bytes_per_second.is_some_and(|rate| rate > 0));
        let files: Vec<PathBuf> =
            fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        let [file] = &files[..] else { panic!("{files:?}") };
        // Another number shows that it is taken from there.
        let text = fs::read_to_string(file).unwrap();
        let threads = format!("\"threads\": {}", found.model.threads);
        fs::write(file, text.replace(&threads, "\"threads\": 7")).unwrap();
        for unknown in [Unknown::Default, Unknown::Probe] {
            assert_eq!(find(unknown).model.threads, 7);
        }
        assert!(said.borrow().is_empty());

        fs::write(file, "{").unwrap();
        assert_ne!(find(Unknown::Probe).model.threads, 7);
        assert_eq!(said.borrow().len(), 1);
        assert!(recall(file, &name_of(&opened, &options)).unwrap().is_some(), "it is whole again");
    }

    fn probed() -> Probed {
        let model = ReadModel { threads: 8, part_bytes: 1 << 20 };
        Probed { model, bytes_per_second: 123_456_789 }
    }

    #[test]
    fn what_was_found_is_remembered_for_that_disk() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disks").join(file_name("a"));
        assert_eq!(recall(&path, "a"), Ok(None));
        for probed in [probed(), Probed { model: ReadModel::default(), bytes_per_second: 1 }] {
            remember(&path, "a", &probed).unwrap();
            assert_eq!(recall(&path, "a"), Ok(Some(Reads::of(probed))));
        }
        let names = fs::read_dir(path.parent().unwrap()).unwrap().count();
        assert_eq!(names, 1, "nothing is left beside it");
        assert!(recall(&path, "b").unwrap_err().contains("another disk"));
        assert_ne!(file_name("a"), file_name("b"));
    }

    #[test]
    fn what_is_damaged_is_said_and_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.json");
        remember(&path, "a", &probed()).unwrap();
        let whole = fs::read_to_string(&path).unwrap();
        let cut = &whole[..whole.len() / 2];
        for (text, word) in [
            (cut.to_owned(), "not what this program writes"),
            (String::new(), "not what this program writes"),
            ("[1, 2]".to_owned(), "not what this program writes"),
            ("x".repeat(1 << 20), "not what this program writes"),
            (whole.replace("\"version\": 1", "\"version\": 2"), "version 2"),
            (whole.replace("\"threads\": 8", "\"threads\": 0"), "make no sense"),
            (whole.replace("\"threads\": 8", "\"threads\": 65"), "make no sense"),
            (whole.replace("1048576", "17"), "make no sense"),
        ] {
            fs::write(&path, &text).unwrap();
            let said = recall(&path, "a").unwrap_err();
            assert!(said.contains(word), "{said}");
            assert_eq!(said.lines().count(), 1);
        }
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(recall(&path, "a").unwrap_err().contains("cannot be read"));
    }
}

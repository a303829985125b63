//! Where a pack goes: the names beside it, what may be replaced, and whether there is room.

use std::ffi::OsString;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use checkpoint::Checkpoint;
use units::Bytes;

use crate::error::PrepareError;
use crate::journal::Journal;

/// The names of a pack and of what there is before it is finished.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub(crate) path: PathBuf,
    pub(crate) partial: PathBuf,
    pub(crate) journal: PathBuf,
}

impl Target {
    /// Decides whether a pack may go there.
    ///
    /// # Errors
    /// [`PrepareError::Exists`], [`PrepareError::InTheWay`], [`PrepareError::NotAFile`], [`PrepareError::IsSource`],
    /// [`PrepareError::Io`].
    pub(crate) fn new(
        path: &Path,
        checkpoint: &Checkpoint,
        force: bool,
    ) -> Result<Self, PrepareError> {
        if path.file_name().is_none() {
            return Err(PrepareError::NotAFile { path: path.to_owned(), found: "no file's name" });
        }
        // A link stays one: what it leads to is replaced.
        let path = if path.is_symlink() {
            std::fs::canonicalize(path).map_err(PrepareError::io("follow the link", path))?
        } else {
            path.to_owned()
        };
        let beside = |ending: &str| {
            let mut name: OsString = path.clone().into_os_string();
            name.push(ending);
            PathBuf::from(name)
        };
        let target =
            Self { partial: beside(".partial"), journal: beside(".partial.journal"), path };
        for name in [&target.path, &target.partial, &target.journal] {
            target.may_be_written(name, checkpoint)?;
        }
        let left_by_us = target.journal.exists();
        if !force && target.path.exists() {
            return Err(PrepareError::Exists { path: target.path });
        }
        if !force && !left_by_us && target.partial.exists() {
            return Err(PrepareError::InTheWay { path: target.partial });
        }
        if !force && !Journal::is_ours(&target.journal) {
            return Err(PrepareError::InTheWay { path: target.journal });
        }
        Ok(target)
    }

    #[expect(clippy::unused_self, reason = "reads as a question to the target")]
    fn may_be_written(&self, name: &Path, checkpoint: &Checkpoint) -> Result<(), PrepareError> {
        let there = match std::fs::metadata(name) {
            Ok(there) => there,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(PrepareError::io("look at", name)(error)),
        };
        let path = name.to_owned();
        if there.is_dir() {
            return Err(PrepareError::NotAFile { path, found: "a folder" });
        }
        if !there.is_file() {
            return Err(PrepareError::NotAFile { path, found: "a device, a pipe or a socket" });
        }
        let same = |other: &Metadata| other.dev() == there.dev() && other.ino() == there.ino();
        let mut inputs = checkpoint.inputs().into_iter();
        match inputs.find(|input| std::fs::metadata(input).is_ok_and(|other| same(&other))) {
            None => Ok(()),
            Some(input) => Err(PrepareError::IsSource { path, input }),
        }
    }

    pub(crate) fn folder(&self) -> &Path {
        match self.path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        }
    }

    /// Whether the disk has room for a file of that size, of which a part may be there.
    ///
    /// # Errors
    /// [`PrepareError::Space`], [`PrepareError::Io`].
    pub(crate) fn check_space(&self, file_bytes: u64) -> Result<(), PrepareError> {
        let folder = self.folder();
        let disk = rustix::fs::statvfs(folder)
            .map_err(|error| PrepareError::io("look at the disk of", folder)(error.into()))?;
        let free = disk.f_bavail.saturating_mul(disk.f_frsize);
        // The file has holes where nothing is written yet: only blocks count.
        let present = std::fs::metadata(&self.partial).map_or(0, |there| there.blocks() * 512);
        let needed = file_bytes.saturating_sub(present);
        if needed <= free {
            return Ok(());
        }
        let folder = folder.to_owned();
        Err(PrepareError::Space { folder, needed: Bytes(needed), free: Bytes(free) })
    }
}

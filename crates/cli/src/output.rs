//! Files that a user asks for by name.
//!
//! A regular file appears under its name only when it is complete. What is something else already, a pipe or a
//! device, stays what it is and is written to as it comes; a link stays a link, and what it leads to is replaced.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, bail};
use tempfile::NamedTempFile;

use crate::interrupt;

/// Unfinished files, for whoever ends the process.
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn unfinished() -> MutexGuard<'static, Vec<PathBuf>> {
    // Names are added and taken away whole.
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes all unfinished files, as the process ends without unwinding.
pub(crate) fn abandon() {
    for path in unfinished().drain(..) {
        // Nobody is left to be told.
        let _ = std::fs::remove_file(path);
    }
}

/// Where the bytes of an output go.
pub(crate) enum OutputFile {
    /// Until [`OutputFile::finish`] under another name in the same folder, which goes away if that never comes.
    New { file: BufWriter<NamedTempFile>, target: PathBuf },
    /// A pipe, a device: nothing to replace.
    Stream(BufWriter<File>),
}

impl OutputFile {
    /// # Errors
    /// The folder does not exist or may not be written to, or the name is a folder's.
    pub(crate) fn create(target: &Path) -> io::Result<Self> {
        match std::fs::metadata(target) {
            Ok(metadata) if metadata.is_dir() => {
                Err(io::Error::other("it is a folder; a file name is needed"))
            }
            Ok(metadata) if metadata.is_file() => Self::replacing(&std::fs::canonicalize(target)?),
            Ok(_) => Ok(Self::Stream(BufWriter::new(OpenOptions::new().write(true).open(target)?))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                if target.is_symlink() {
                    return Err(io::Error::other("it is a link that leads nowhere"));
                }
                Self::replacing(target)
            }
            Err(error) => Err(error),
        }
    }

    fn replacing(target: &Path) -> io::Result<Self> {
        let folder = match target.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        // What any new file gets; the process's mask takes away from it.
        let file = tempfile::Builder::new()
            .prefix(".sakia-")
            .suffix(".partial")
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(folder)?;
        unfinished().push(file.path().to_owned());
        Ok(Self::New { file: BufWriter::new(file), target: target.to_owned() })
    }

    /// Gives the file its name.
    ///
    /// # Errors
    /// Bytes that were still to be written could not be, or the file cannot be renamed.
    pub(crate) fn finish(self) -> io::Result<()> {
        match self {
            Self::New { file, target } => {
                let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
                let mut unfinished = unfinished();
                unfinished.retain(|path| path != file.path());
                file.persist(target).map(drop).map_err(|error| error.error)
            }
            Self::Stream(mut file) => file.flush(),
        }
    }
}

impl Write for OutputFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::New { file, .. } => file.write(bytes),
            Self::Stream(file) => file.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::New { file, .. } => file.flush(),
            Self::Stream(file) => file.flush(),
        }
    }
}

/// As [`OutputFile::create`], unless the file is one of those that are read.
///
/// # Errors
/// Said in full, with the name.
pub(crate) fn create(target: &Path, inputs: &[PathBuf]) -> Result<OutputFile> {
    let same = |input: &&PathBuf| {
        let [a, b] = [target, input].map(std::fs::metadata);
        matches!((a, b), (Ok(a), Ok(b)) if a.dev() == b.dev() && a.ino() == b.ino())
    };
    if let Some(input) = inputs.iter().find(same) {
        bail!(
            "{} is read by this very command as {}: its content would be lost; name another file",
            target.display(),
            input.display()
        );
    }
    // From here on Ctrl-C leaves nothing behind.
    interrupt::clear();
    OutputFile::create(target).with_context(|| format!("creating {}", target.display()))
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::fs::{FileTypeExt, symlink};

    use super::*;

    fn write(target: &Path, bytes: &[u8]) -> io::Result<()> {
        let mut file = OutputFile::create(target)?;
        file.write_all(bytes)?;
        file.finish()
    }

    #[test]
    fn what_is_read_is_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let (model, link) = (folder.path().join("model"), folder.path().join("link"));
        std::fs::write(&model, "weights").unwrap();
        symlink(&model, &link).unwrap();
        for target in [&model, &link] {
            let error =
                create(target, &[folder.path().join("other"), model.clone()]).err().unwrap();
            assert!(error.to_string().contains("read by this very command"), "{error}");
        }
        create(&folder.path().join("new"), &[model]).unwrap().finish().unwrap();
        assert_eq!(names(folder.path()), ["link", "model", "new"]);
    }

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn an_unfinished_file_leaves_the_old_one_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("out.json");
        std::fs::write(&target, "old").unwrap();
        let mut file = OutputFile::create(&target).unwrap();
        file.write_all(b"half").unwrap();
        assert_eq!(std::fs::read_to_string(&target).unwrap(), "old");
        drop(file);
        assert_eq!(names(folder.path()), ["out.json"]);
        write(&target, b"new").unwrap();
        assert_eq!(std::fs::read_to_string(&target).unwrap(), "new");
        assert_eq!(names(folder.path()), ["out.json"]);
    }

    #[test]
    fn a_link_stays_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let (real, link) = (folder.path().join("real"), folder.path().join("link"));
        std::fs::write(&real, "old").unwrap();
        symlink(&real, &link).unwrap();
        write(&link, b"new").unwrap();
        assert!(link.is_symlink());
        assert_eq!(std::fs::read_to_string(&real).unwrap(), "new");
        std::fs::remove_file(&real).unwrap();
        assert!(write(&link, b"new").unwrap_err().to_string().contains("leads nowhere"));
    }

    #[test]
    fn a_device_is_written_to_and_stays_one() {
        let null = Path::new("/dev/null");
        write(null, b"bytes").unwrap();
        assert!(std::fs::metadata(null).unwrap().file_type().is_char_device());
    }

    #[test]
    fn a_pipe_gets_the_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
        assert!(made.success());
        let reader = pipe.clone();
        let reader = std::thread::spawn(move || {
            let mut text = String::new();
            File::open(reader).unwrap().read_to_string(&mut text).unwrap();
            text
        });
        write(&pipe, b"through").unwrap();
        assert_eq!(reader.join().unwrap(), "through");
        assert_eq!(names(folder.path()), ["pipe"]);
    }

    #[test]
    fn a_folder_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        assert!(write(folder.path(), b"").unwrap_err().to_string().contains("folder"));
        assert!(write(&folder.path().join("no/such"), b"").is_err());
    }
}

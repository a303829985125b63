//! Folders with copies of a model's files, on other disks.
//!
//! A copy is taken for one when it has the name and the length of a file of the model, and its header and pages all over
//! it have the same bytes. That tells models apart, also fine-tuned ones of one shape; it does not prove a copy whole.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use checkpoint::Checkpoint;
use expert_store::{FaultPlan, Mirror};

/// Bytes at the front that are compared: headers, or the beginning of long ones.
const FRONT_BYTES: u64 = 1 << 20;

/// Pages behind the front that are compared, the last one among them.
const PAGES: u64 = 64;

const PAGE: u64 = 4096;

/// A folder to look for copies in.
#[derive(Debug, Clone, Default)]
pub struct MirrorOptions {
    /// As given by the user.
    pub folder: PathBuf,
    /// Reads of the copies that fail on purpose: for tests.
    pub faults: Option<FaultPlan>,
}

/// Why a folder is no mirror of a model.
#[derive(Debug, thiserror::Error)]
pub enum MirrorError {
    /// None of the model's files is there.
    #[error(
        "--mirror {}: the folder has no copy of a file of this model; {needed} was looked for, under that very name",
        folder.display()
    )]
    Empty {
        /// The folder.
        folder: PathBuf,
        /// The name of the model's file, or of its first ones.
        needed: String,
    },
    /// A file of that name is not a copy.
    #[error("--mirror: {} is not a copy of {}: {what}", copy.display(), own.display())]
    NotACopy {
        /// The file in the mirror.
        copy: PathBuf,
        /// The model's file.
        own: PathBuf,
        /// How they differ.
        what: String,
    },
    /// A file cannot be looked at or read.
    #[error("--mirror: cannot read {}: {source}", path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
}

/// The mirrors of a model in these folders.
pub(crate) fn find(
    checkpoint: &Checkpoint,
    mirrors: &[MirrorOptions],
) -> Result<Vec<Mirror>, MirrorError> {
    let own: Vec<&Path> = checkpoint.files.iter().map(|file| file.path.as_path()).collect();
    let found = mirrors.iter().map(|MirrorOptions { folder, faults }| {
        Ok(Mirror { files: copies(&own, folder)?, faults: faults.clone() })
    });
    found.collect()
}

/// The copy of each file in a folder that has at least one.
fn copies(own: &[&Path], folder: &Path) -> Result<Vec<Option<PathBuf>>, MirrorError> {
    let copies: Vec<Option<PathBuf>> =
        own.iter().map(|own| copy(own, folder)).collect::<Result<_, _>>()?;
    if copies.iter().all(Option::is_none) {
        let mut needed: Vec<String> =
            own.iter().filter_map(|own| own.file_name()).map(|n| n.display().to_string()).collect();
        let more = needed.len() > 1;
        needed.truncate(1);
        if more {
            needed.push("the other parts".to_owned());
        }
        let needed = needed.join(" or ");
        return Err(MirrorError::Empty { folder: folder.to_owned(), needed });
    }
    Ok(copies)
}

/// The copy of one file, if there is one.
fn copy(own: &Path, folder: &Path) -> Result<Option<PathBuf>, MirrorError> {
    let Some(name) = own.file_name() else { return Ok(None) };
    let path = folder.join(name);
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| MirrorError::Io { path, source }
    };
    let there = match fs::metadata(&path) {
        Ok(there) => there,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(&path)(error)),
    };
    let differs =
        |what: String| Err(MirrorError::NotACopy { copy: path.clone(), own: own.to_owned(), what });
    let here = fs::metadata(own).map_err(failed(own))?;
    if !there.is_file() {
        return differs("it is no regular file".to_owned());
    }
    if (there.dev(), there.ino()) == (here.dev(), here.ino()) {
        return differs("it is that file itself".to_owned());
    }
    if there.len() != here.len() {
        let (found, needed) = (there.len(), here.len());
        return differs(format!("it has {found} bytes, not {needed}; copy it again, whole"));
    }
    let open = |path: &Path| File::open(path).map_err(failed(path));
    let (original, other) = (open(own)?, open(&path)?);
    let (mut a, mut b) = (Vec::new(), Vec::new());
    for (offset, bytes) in compared(here.len()) {
        for (file, path, out) in [(&original, own, &mut a), (&other, path.as_path(), &mut b)] {
            out.resize(bytes as usize, 0);
            file.read_exact_at(out, offset).map_err(failed(path))?;
        }
        if let Some(at) = a.iter().zip(&b).position(|(a, b)| a != b) {
            return differs(format!("bytes differ at offset {}", offset + at as u64));
        }
    }
    Ok(Some(path))
}

/// Stretches `(offset, bytes)` of a file of so many bytes that are compared: its front, and pages up to its end.
fn compared(len: u64) -> impl Iterator<Item = (u64, u64)> {
    let front = len.min(FRONT_BYTES);
    let rest = len - front;
    let page = rest.min(PAGE);
    let pages = (1..=PAGES).map(move |i| {
        let end = u128::from(rest) * u128::from(i) / u128::from(PAGES);
        (front + (end as u64).saturating_sub(page), page)
    });
    std::iter::once((0, front)).chain(pages)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(len: usize) -> Vec<u8> {
        (0..len as u64).map(|i| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect()
    }

    /// A model's file and a folder beside it that holds `copy` under the same name.
    fn pair(original: &[u8], copy: Option<&[u8]>) -> (tempfile::TempDir, PathBuf, PathBuf) {
        let home = tempfile::tempdir().unwrap();
        let (own, folder) = (home.path().join("m.gguf"), home.path().join("copies"));
        fs::create_dir(&folder).unwrap();
        fs::write(&own, original).unwrap();
        if let Some(copy) = copy {
            fs::write(folder.join("m.gguf"), copy).unwrap();
        }
        (home, own, folder)
    }

    #[test]
    fn a_copy_is_found_by_its_name() {
        for len in [0, 1, 4096, 1 << 20, (1 << 20) + 100, 3 << 20] {
            let bytes = bytes(len);
            let (_home, own, folder) = pair(&bytes, Some(&bytes));
            let found = copies(&[&own, Path::new("/nowhere/other")], &folder).unwrap();
            assert_eq!(found, [Some(folder.join("m.gguf")), None], "{len}");
        }
    }

    #[test]
    fn what_is_no_copy_is_refused_with_the_reason() {
        let original = bytes(3 << 20);
        let mut other = original.clone();
        let mut refusal = |change: &mut dyn FnMut(&mut Vec<u8>)| {
            change(&mut other);
            let (_home, own, folder) = pair(&original, Some(&other));
            other.clone_from(&original);
            copies(&[&own], &folder).unwrap_err().to_string()
        };
        let said = refusal(&mut |bytes| bytes[77] ^= 1);
        assert!(said.contains("differ at offset 77"), "{said}");
        let said = refusal(&mut |bytes| *bytes.last_mut().unwrap() ^= 1);
        assert!(said.contains(&format!("differ at offset {}", (3 << 20) - 1)), "{said}");
        let said = refusal(&mut |bytes| bytes[1 << 20..].fill(7));
        assert!(said.contains("differ at offset"), "other weights behind the same header: {said}");
        let said = refusal(&mut |bytes| bytes.truncate(100));
        assert!(said.contains("it has 100 bytes, not 3145728"), "{said}");
    }

    #[test]
    fn a_folder_without_copies_is_refused() {
        let (_home, own, folder) = pair(b"x", None);
        let said = copies(&[&own], &folder).unwrap_err().to_string();
        assert!(said.contains("m.gguf was looked for"), "{said}");
        let said = copies(&[&own], Path::new("/nowhere")).unwrap_err().to_string();
        assert!(said.contains("/nowhere"), "{said}");
        fs::create_dir(folder.join("m.gguf")).unwrap();
        let said = copies(&[&own], &folder).unwrap_err().to_string();
        assert!(said.contains("no regular file"), "{said}");
    }

    #[test]
    fn the_models_own_file_is_no_copy() {
        let (_home, own, folder) = pair(b"x", None);
        fs::hard_link(&own, folder.join("m.gguf")).unwrap();
        let said = copies(&[&own], &folder).unwrap_err().to_string();
        assert!(said.contains("that file itself"), "{said}");
    }

    #[test]
    fn what_is_compared_lies_inside_and_reaches_the_end() {
        for len in [0, 1, 5000, FRONT_BYTES, FRONT_BYTES + 1, FRONT_BYTES + 5000, 1 << 40] {
            let mut last = 0;
            for (offset, bytes) in compared(len) {
                assert!(offset + bytes <= len, "{len}: {offset} + {bytes}");
                last = last.max(offset + bytes);
            }
            assert_eq!(last, len);
        }
    }
}

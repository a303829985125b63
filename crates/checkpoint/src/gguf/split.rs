//! Models in several files: their names and what each part says about the whole.

use std::path::{Path, PathBuf};

use crate::error::CheckpointError;
use crate::limits;
use crate::metadata::Metadata;

/// The name of a part: `STEM-00002-of-00003.gguf`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Name {
    folder: PathBuf,
    stem: String,
    pub(super) parts: u64,
}

impl Name {
    /// Nothing if the name is not of this form.
    pub(super) fn of(path: &Path) -> Option<Self> {
        let name = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
        let (rest, parts) = name.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let digits = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
        if !digits(number) || !digits(parts) {
            return None;
        }
        let folder = path.parent().map(Path::to_owned).unwrap_or_default();
        Some(Self { folder, stem: stem.to_owned(), parts: parts.parse().ok()? })
    }

    /// The path of a part, counted from 0.
    pub(super) fn part(&self, index: u64) -> PathBuf {
        self.folder.join(format!("{}-{:05}-of-{:05}.gguf", self.stem, index + 1, self.parts))
    }

    /// Refuses numbers that cannot be, and a model that lacks a part: before any is read.
    pub(super) fn check(&self, named: &Path) -> Result<(), CheckpointError> {
        let own = (0..self.parts).take(limits::PARTS as usize).any(|i| self.part(i) == named);
        if self.parts > limits::PARTS {
            return Err(CheckpointError::Limit {
                file: named.to_owned(),
                what: "parts by the file's name".to_owned(),
                found: self.parts,
                limit: limits::PARTS,
            });
        }
        if !own {
            return Err(CheckpointError::Format {
                file: named.to_owned(),
                what: "the part's number in the file's name".to_owned(),
                found: format!("one outside of 1 to {}", self.parts),
                needed: "NAME-00001-of-00003.gguf or the like".to_owned(),
            });
        }
        for index in 0..self.parts {
            let file = self.part(index);
            // A link that leads nowhere is as absent as no link; other failures show when the part is opened.
            if matches!(file.try_exists(), Ok(false)) {
                return Err(CheckpointError::MissingPart {
                    file,
                    part: index + 1,
                    parts: self.parts,
                });
            }
        }
        Ok(())
    }
}

/// Holds what a part says about itself against its place in the model.
pub(super) fn check_part(
    path: &Path,
    metadata: &Metadata,
    index: u64,
    parts: u64,
) -> Result<(), CheckpointError> {
    let claimed = metadata.u64("split.count");
    if parts == 1 && claimed.is_some_and(|claimed| claimed > 1) {
        let parts = claimed.unwrap_or_default();
        return Err(CheckpointError::LonePart { file: path.to_owned(), parts });
    }
    for (key, needed) in [("split.no", index), ("split.count", parts)] {
        let found = metadata.u64(key);
        // A model in one file may lack the keys, or count no parts; a part of many must carry them.
        let lone = parts == 1 && (!metadata.contains(key) || found == Some(0));
        if found != Some(needed) && !lone {
            let shown = |value: u64| value.to_string();
            let kind = metadata.get(key).map_or("nothing", |value| value.kind());
            return Err(CheckpointError::Format {
                file: path.to_owned(),
                what: key.to_owned(),
                found: found.map_or_else(|| kind.to_owned(), shown),
                needed: format!("{needed}, by the file's name (parts count from 0 here)"),
            });
        }
    }
    Ok(())
}

/// Holds the number of tensors against what the first part says.
pub(super) fn check_total(
    path: &Path,
    metadata: &Metadata,
    tensors: u64,
) -> Result<(), CheckpointError> {
    match metadata.u64("split.tensors.count") {
        Some(total) if total != tensors => Err(CheckpointError::Format {
            file: path.to_owned(),
            what: "tensors in all parts".to_owned(),
            found: tensors.to_string(),
            needed: format!("{total}, by split.tensors.count"),
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_part_tells_the_others() {
        let name = Name::of(Path::new("/m/a-of-b-00002-of-00003.gguf")).unwrap();
        assert_eq!(name.parts, 3);
        assert_eq!(name.part(0), Path::new("/m/a-of-b-00001-of-00003.gguf"));
        assert_eq!(name.part(2), Path::new("/m/a-of-b-00003-of-00003.gguf"));
        for other in [
            "m.gguf",
            "m-1-of-2.gguf",
            "m-00001-of-00002.bin",
            "00001-of-00002.gguf",
            "m-0000a-of-00002.gguf",
        ] {
            assert_eq!(Name::of(Path::new(other)), None, "{other}");
        }
    }
}

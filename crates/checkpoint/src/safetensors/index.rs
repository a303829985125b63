//! The index of a model in several safetensors files: which file holds which tensor.
//!
//! Walked twice, never kept: first for the names of the files, and, once their headers are read, to hold every entry
//! against them.

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

use serde::de::{self, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};

use crate::error::{CheckpointError, printable};
use crate::json;
use crate::limits;
use crate::source::Source;

/// An index and where it is.
#[derive(Clone, Copy)]
pub(crate) struct Index<'a> {
    pub(crate) path: &'a Path,
    pub(crate) source: &'a dyn Source,
}

/// The names of the files, in order. They are plain names of files that lie beside the index.
///
/// # Errors
/// Class `format`, `limit` or `io`.
pub(crate) fn files(index: Index<'_>) -> Result<BTreeSet<String>, CheckpointError> {
    let mut files = BTreeSet::new();
    entries(index, &mut |tensor, file| {
        if files.contains(file) {
            return Ok(());
        }
        let refused = |needed: &str| CheckpointError::Format {
            file: index.path.to_owned(),
            what: format!("the file of tensor `{}`", printable(tensor)),
            found: format!("`{}`", printable(file)),
            needed: needed.to_owned(),
        };
        // A separator of any system: an index may say which of its neighbours, never where else on the disk.
        if matches!(file, "" | "." | "..") || file.contains(['/', '\\', ':', '\0']) {
            return Err(refused("the plain name of a file in the same folder"));
        }
        if file.len() as u64 > limits::NAME_BYTES || !file.ends_with(".safetensors") {
            return Err(refused("the name of a .safetensors file"));
        }
        files.insert(file.to_owned());
        if files.len() as u64 > limits::PARTS {
            return Err(CheckpointError::Limit {
                file: index.path.to_owned(),
                what: "files".to_owned(),
                found: files.len() as u64,
                limit: limits::PARTS,
            });
        }
        Ok(())
    })?;
    if files.is_empty() {
        return Err(CheckpointError::Format {
            file: index.path.to_owned(),
            what: "weight_map".to_owned(),
            found: "nothing".to_owned(),
            needed: "the file of every tensor".to_owned(),
        });
    }
    Ok(files)
}

/// Takes the name of a tensor and that of its file.
pub(crate) type Visit<'v> = dyn FnMut(&str, &str) -> Result<(), CheckpointError> + 'v;

/// Walks all entries.
///
/// # Errors
/// Class `format`, `limit` or `io`; or what `visit` refuses.
pub(crate) fn entries(index: Index<'_>, visit: &mut Visit<'_>) -> Result<(), CheckpointError> {
    let Index { path, source } = index;
    if source.len() > limits::INDEX_BYTES {
        return Err(CheckpointError::Limit {
            file: path.to_owned(),
            what: "bytes of the index".to_owned(),
            found: source.len(),
            limit: limits::INDEX_BYTES,
        });
    }
    let mut walk = Walk { visit, seen: false, refused: None };
    let token = limits::STRING_BYTES.min(1 << 20);
    let outcome = json::stream(source, 0..source.len(), token, &mut walk);
    let format = |found: String| CheckpointError::Format {
        file: path.to_owned(),
        what: "the index".to_owned(),
        found,
        needed: "a JSON object with the file of every tensor in `weight_map`".to_owned(),
    };
    match (walk.refused, outcome) {
        (Some(refused), _) => Err(refused),
        (None, Ok(())) if walk.seen => Ok(()),
        (None, Ok(())) => Err(format("no `weight_map`".to_owned())),
        (None, Err(error)) => Err(error.of_file(path, format)),
    }
}

/// The index's object.
struct Walk<'a, 'v> {
    visit: &'a mut Visit<'v>,
    seen: bool,
    refused: Option<CheckpointError>,
}

impl<'de> DeserializeSeed<'de> for &mut Walk<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for &mut Walk<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        while let Some(key) = members.next_key::<String>()? {
            if key != "weight_map" {
                members.next_value::<IgnoredAny>()?;
                continue;
            }
            if std::mem::replace(&mut self.seen, true) {
                return Err(de::Error::custom("a second `weight_map`"));
            }
            members.next_value_seed(Map(&mut *self))?;
        }
        Ok(())
    }
}

/// `weight_map`.
struct Map<'w, 'a, 'v>(&'w mut Walk<'a, 'v>);

impl<'de> DeserializeSeed<'de> for Map<'_, '_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Map<'_, '_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of file names")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        while let Some((tensor, file)) = members.next_entry::<String, String>()? {
            if let Err(refused) = (self.0.visit)(&tensor, &file) {
                self.0.refused = Some(refused);
                return Err(de::Error::custom("refused"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::MemorySource;

    fn class(text: &str) -> Result<Vec<String>, String> {
        let source = MemorySource(text.as_bytes());
        let outcome = files(Index { path: Path::new("i.json"), source: &source });
        outcome.map(|files| files.into_iter().collect()).map_err(|error| {
            assert!(error.to_string().contains("i.json"), "{error}");
            error.class().to_string()
        })
    }

    #[test]
    fn files_are_named_once_and_in_order() {
        let text = r#"{"metadata": {"total_size": 1},
            "weight_map": {"a": "2.safetensors", "b": "1.safetensors", "c": "2.safetensors"}}"#;
        assert_eq!(class(text).unwrap(), ["1.safetensors", "2.safetensors"]);
    }

    #[test]
    fn an_index_names_its_neighbours_and_nothing_else() {
        for name in [
            "",
            ".",
            "..",
            "/etc/passwd.safetensors",
            "../a.safetensors",
            "sub/a.safetensors",
            "..\\\\a.safetensors",
            "C:a.safetensors",
            "a\\u0000.safetensors",
            "config.json",
        ] {
            let text = format!(r#"{{"weight_map": {{"a": "{name}"}}}}"#);
            assert_eq!(class(&text).unwrap_err(), "format", "{name}");
        }
    }

    #[test]
    fn what_is_no_index_is_refused() {
        for text in [
            "",
            "[]",
            "{}",
            r#"{"weight_map": {}}"#,
            r#"{"weight_map": []}"#,
            r#"{"weight_map": {"a": 1}}"#,
            r#"{"weight_map": {"a": "b.safetensors"}, "weight_map": {}}"#,
            r#"{"weight_map": {"a": "b.safetensors"}} {}"#,
        ] {
            assert_eq!(class(text).unwrap_err(), "format", "{text}");
        }
    }
}

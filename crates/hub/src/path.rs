//! Names of files as a host gives them, checked before anything is made of them.

use std::path::{Path, PathBuf};

use crate::error::HubError;

/// The folder beside a model's files that is ours: record, lock, unfinished files.
pub(crate) const STATE_FOLDER: &str = ".sakia";

/// Most bytes of a path and of one name in it, so that every file system takes our longer ones for unfinished files.
const PATH_BYTES: usize = 900;
const NAME_BYTES: usize = 200;

/// A path inside a repository that also stays inside the folder it is put into: relative, no `..`, no odd characters,
/// and never ours.
#[derive(
    Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(try_from = "String", into = "String")]
pub struct RepoPath(String);

impl RepoPath {
    /// The path with slashes.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The last name of the path.
    pub fn file_name(&self) -> &str {
        self.0.rsplit('/').next().unwrap_or(&self.0)
    }

    /// Whether what stands after the last dot of its name is this, in upper or lower case.
    pub fn has_ending(&self, ending: &str) -> bool {
        self.file_name().rsplit_once('.').is_some_and(|(_, own)| own.eq_ignore_ascii_case(ending))
    }

    /// Where it lies under a folder.
    pub fn under(&self, folder: &Path) -> PathBuf {
        let mut path = folder.to_owned();
        path.extend(self.0.split('/'));
        path
    }
}

impl From<RepoPath> for String {
    fn from(path: RepoPath) -> Self {
        path.0
    }
}

impl TryFrom<String> for RepoPath {
    type Error = HubError;

    fn try_from(path: String) -> Result<Self, HubError> {
        match problem(&path) {
            None => Ok(Self(path)),
            Some(problem) => Err(HubError::UnsafePath {
                path: path.chars().take(NAME_BYTES).flat_map(char::escape_debug).collect(),
                problem,
            }),
        }
    }
}

fn problem(path: &str) -> Option<&'static str> {
    if path.is_empty() || path.len() > PATH_BYTES {
        return Some("a path has 1 to 900 bytes");
    }
    // A backslash is a separator elsewhere; control characters could rewrite the terminal that shows the name.
    if path.chars().any(|c| c.is_control() || c == '\\') {
        return Some("it holds a backslash or a control character");
    }
    for name in path.split('/') {
        if name.is_empty() || name == "." || name == ".." {
            return Some("it would leave the folder of the model");
        }
        if name.len() > NAME_BYTES {
            return Some("a name in it is longer than 200 bytes");
        }
    }
    // Without regard to case, as some file systems see it.
    let first = path.split('/').next().unwrap_or_default();
    first.eq_ignore_ascii_case(STATE_FOLDER).then_some("that folder is for our own records")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(path: &str) -> Result<RepoPath, HubError> {
        RepoPath::try_from(path.to_owned())
    }

    #[test]
    fn traversal_and_odd_names_are_refused() {
        for bad in [
            "",
            "/etc/passwd",
            "../x",
            "a/../../x",
            "a//b",
            "./a",
            "a/.",
            "a/..",
            "a\\..\\b",
            "a\0b",
            "a\nb",
            "a\u{1b}[2Jb",
            ".sakia/snapshot.json",
            ".SAKIA/lock",
            ".sakia",
        ] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
        assert!(parse(&"x".repeat(201)).is_err());
        assert!(parse(&"x/".repeat(500)).is_err());
    }

    #[test]
    fn ordinary_names_pass() {
        for good in
            ["config.json", "Q4_K_M/m-00001-of-00002.gguf", "..a/b..", "ü.json", ".gitattributes"]
        {
            assert_eq!(parse(good).unwrap().as_str(), good);
        }
    }

    proptest! {
        #[test]
        fn an_accepted_path_stays_under_its_folder(path in "[a./\\\\~ :]{0,12}") {
            if let Ok(path) = parse(&path) {
                let full = path.under(Path::new("/base/folder"));
                prop_assert!(full.starts_with("/base/folder"));
                prop_assert!(full != Path::new("/base/folder"));
                prop_assert!(full.components().all(|c| c != std::path::Component::ParentDir));
            }
        }
    }
}

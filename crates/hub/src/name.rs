//! `org/name:variant`: which repository, and which of its quantisations.

use std::fmt;
use std::str::FromStr;

use crate::error::HubError;

/// Most characters of each half of a repository's name, as Hugging Face has it.
const NAME_CHARS: usize = 96;

/// A repository, `org/name`. Both halves are safe as names of folders.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepoName {
    org: String,
    name: String,
}

impl RepoName {
    /// The half before the slash.
    pub fn org(&self) -> &str {
        &self.org
    }

    /// The half after the slash.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl fmt::Display for RepoName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.org, self.name)
    }
}

impl FromStr for RepoName {
    type Err = HubError;

    fn from_str(text: &str) -> Result<Self, HubError> {
        let error = |problem| HubError::Name { found: text.escape_debug().to_string(), problem };
        let (org, name) = text.split_once('/').ok_or_else(|| error("there is no `/`"))?;
        for half in [org, name] {
            check_half(half).map_err(error)?;
        }
        Ok(Self { org: org.to_owned(), name: name.to_owned() })
    }
}

fn check_half(half: &str) -> Result<(), &'static str> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if half.is_empty() || half.len() > NAME_CHARS {
        Err("each half has 1 to 96 characters")
    } else if !half.chars().all(allowed) {
        Err("only letters, digits and `.`, `_`, `-` may stand in each half")
    } else if half.contains("..") || half.starts_with(['.', '-']) || half.ends_with(['.', '-']) {
        Err("a half may not begin or end with `.` or `-`, nor hold `..`")
    } else {
        Ok(())
    }
}

/// A repository and, after a colon, one of the quantisations it holds: `org/name:Q4_K_M`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelName {
    /// The repository.
    pub repo: RepoName,
    /// The quantisation, in the user's spelling.
    pub variant: Option<String>,
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.repo.fmt(f)?;
        self.variant.as_ref().map_or(Ok(()), |variant| write!(f, ":{variant}"))
    }
}

impl FromStr for ModelName {
    type Err = HubError;

    fn from_str(text: &str) -> Result<Self, HubError> {
        let (repo, variant) = match text.split_once(':') {
            Some((repo, variant)) => (repo, Some(variant)),
            None => (text, None),
        };
        if let Some(variant) = variant {
            check_half(variant).map_err(|_| HubError::Name {
                found: text.escape_debug().to_string(),
                problem: "after the colon stands a quantisation like Q4_K_M",
            })?;
        }
        Ok(Self { repo: repo.parse()?, variant: variant.map(str::to_owned) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_two_halves_and_perhaps_a_variant() {
        let name: ModelName = "Qwen/Qwen3-30B-A3B:Q4_K_M".parse().unwrap();
        assert_eq!((name.repo.org(), name.repo.name()), ("Qwen", "Qwen3-30B-A3B"));
        assert_eq!(name.variant.as_deref(), Some("Q4_K_M"));
        assert_eq!(name.to_string(), "Qwen/Qwen3-30B-A3B:Q4_K_M");
        assert_eq!("a/b".parse::<ModelName>().unwrap().variant, None);
    }

    #[test]
    fn a_name_that_could_leave_its_folder_is_refused() {
        for bad in [
            "",
            "a",
            "/b",
            "a/",
            "../b",
            "a/..",
            "a/b/c",
            "a/.b",
            "a\\b/c",
            "a/b c",
            "a/b:",
            "a/b:x/y",
            "a/b:..",
            "a/b:Q4:Q5",
            "a/b\n",
            "https://huggingface.co/a/b",
        ] {
            assert!(bad.parse::<ModelName>().is_err(), "{bad:?}");
        }
    }
}

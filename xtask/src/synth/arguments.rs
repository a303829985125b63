//! Options of a chore: `--name value` pairs, each at most once.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// Option names and their values.
pub(super) struct Arguments<'a>(Vec<(&'a str, &'a str)>);

impl<'a> Arguments<'a> {
    /// Takes `--out` and the options of `known`.
    pub(super) fn parse(words: &'a [String], known: &[&str]) -> Result<Self> {
        let mut pairs: Vec<(&str, &str)> = Vec::new();
        let mut words = words.iter().map(String::as_str);
        while let Some(name) = words.next() {
            if name != "--out" && !known.contains(&name) {
                let known = [&["--out"], known].concat().join("`, `");
                bail!("no option `{name}` here; there are `{known}`");
            }
            let value = words.next().with_context(|| format!("`{name}` needs a value"))?;
            if pairs.iter().any(|(other, _)| *other == name) {
                bail!("`{name}` is given twice");
            }
            pairs.push((name, value));
        }
        Ok(Self(pairs))
    }

    fn get(&self, name: &str) -> Option<&'a str> {
        self.0.iter().find(|(other, _)| *other == name).map(|(_, value)| *value)
    }

    /// `--out`; a relative path starts at `folder`.
    pub(super) fn out(&self, folder: &Path) -> Result<PathBuf> {
        Ok(folder.join(self.get("--out").context("`--out PATH` is missing: where should it go?")?))
    }

    /// A number from `min` to `max`.
    pub(super) fn number(&self, name: &str, default: u64, min: u64, max: u64) -> Result<u64> {
        let Some(text) = self.get(name) else { return Ok(default) };
        let number: u64 = text.parse().with_context(|| format!("`{name} {text}` is no number"))?;
        if !(min..=max).contains(&number) {
            bail!("`{name} {number}`: a number from {min} to {max} is needed");
        }
        Ok(number)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn what_is_not_known_or_not_in_range_is_refused() {
        let refused = |text: &str| {
            let words = words(text);
            let args = Arguments::parse(&words, &["--layers"]);
            args.and_then(|args| args.number("--layers", 4, 4, 48)).is_err()
        };
        for wrong in ["--seed 1", "--layers", "--layers x", "--layers 3", "--layers 49", "x"] {
            assert!(refused(wrong), "{wrong}");
        }
        assert!(refused("--layers 4 --layers 4"));
        assert!(!refused("--layers 48 --out x"));
    }

    #[test]
    fn a_relative_path_starts_where_the_user_stands() {
        let (relative, absolute) = (words("--out a/b"), words("--out /a/b"));
        let out =
            |words: &[String]| Arguments::parse(words, &[]).unwrap().out(Path::new("/c")).unwrap();
        assert_eq!(out(&relative), Path::new("/c/a/b"));
        assert_eq!(out(&absolute), Path::new("/a/b"));
        assert!(Arguments::parse(&[], &[]).unwrap().out(Path::new("/c")).is_err());
    }
}

//! Licence and source of every package in the lock file, for every platform, against the list in `deny.toml`.
//!
//! cargo-deny does this and more; this part needs nothing but cargo, so that it always runs.

use anyhow::{Context, Result, bail};

use crate::shell::Outcome;
use crate::workspace::{Package, Workspace};

/// Checks that every package may be used under a licence we accept and comes from the one registry.
pub(crate) fn run(workspace: &Workspace, _: &[String]) -> Result<Outcome> {
    let allowed = allow_list(&workspace.read("deny.toml")?)?;
    let allowed: Vec<&str> = allowed.iter().map(String::as_str).collect();
    let mut problems: Vec<String> =
        workspace.packages.iter().filter_map(|package| refuse(package, &allowed)).collect();
    for package in workspace.members() {
        let loose = package.dependencies.iter().filter(|d| d.external && d.requirement == "*");
        problems.extend(loose.map(|d| format!("{} takes any version of {}", package.name, d.name)));
    }
    if !problems.is_empty() {
        bail!("licences and sources:\n  {}", problems.join("\n  "));
    }
    eprintln!(
        "{} packages, all permissive, all from crates.io or this repository",
        workspace.packages.len()
    );
    Ok(Outcome::Done)
}

fn refuse(package: &Package, allowed: &[&str]) -> Option<String> {
    let Package { name, version, license, source, .. } = package;
    let known = match source {
        Some(source) => source == "registry+https://github.com/rust-lang/crates.io-index",
        None => package.member,
    };
    if !known {
        return Some(format!(
            "{name} {version} comes from {}",
            source.as_deref().unwrap_or("a folder")
        ));
    }
    let Some(license) = license else {
        return Some(format!("{name} {version} names no licence"));
    };
    match permits(license, allowed) {
        Ok(true) => None,
        Ok(false) => {
            Some(format!("{name} {version} is under {license}, which deny.toml does not allow"))
        }
        Err(error) => {
            Some(format!("{name} {version}: `{license}` is no licence expression: {error}"))
        }
    }
}

/// The strings of `allow = [ … ]` in deny.toml.
fn allow_list(deny: &str) -> Result<Vec<String>> {
    let (_, rest) = deny.split_once("\nallow = [").context("deny.toml has no list `allow`")?;
    let (list, _) = rest.split_once(']').context("the list `allow` in deny.toml has no end")?;
    let lines = list.lines().map(|line| line.trim().trim_end_matches(',').trim_matches('"'));
    Ok(lines.filter(|line| !line.is_empty() && !line.starts_with('#')).map(str::to_owned).collect())
}

/// Whether an SPDX expression can be met with the allowed licences alone.
fn permits(expression: &str, allowed: &[&str]) -> Result<bool> {
    // Before SPDX expressions, manifests said `MIT/Apache-2.0` for a choice.
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut parser = Parser { words: &words, allowed };
    let met = parser.any()?;
    match parser.words.first() {
        None => Ok(met),
        Some(word) => bail!("`{word}` is left over"),
    }
}

/// `any` = `all { OR all }`, `all` = `one { AND one }`, `one` = `( any )` or `id [ WITH exception ]`.
struct Parser<'a> {
    words: &'a [&'a str],
    allowed: &'a [&'a str],
}

impl<'a> Parser<'a> {
    fn any(&mut self) -> Result<bool> {
        let mut met = self.all()?;
        while self.take("OR") {
            met |= self.all()?;
        }
        Ok(met)
    }

    fn all(&mut self) -> Result<bool> {
        let mut met = self.one()?;
        while self.take("AND") {
            met &= self.one()?;
        }
        Ok(met)
    }

    fn one(&mut self) -> Result<bool> {
        if self.take("(") {
            let met = self.any()?;
            return if self.take(")") { Ok(met) } else { bail!("a parenthesis is not closed") };
        }
        let id = self.next().context("it ends where a licence is due")?;
        if !self.take("WITH") {
            return Ok(self.allowed.contains(&id));
        }
        let exception = self.next().context("it ends where an exception is due")?;
        // An exception only gives more rights.
        Ok(self.allowed.contains(&id)
            || self.allowed.contains(&format!("{id} WITH {exception}").as_str()))
    }

    fn next(&mut self) -> Option<&'a str> {
        let (word, rest) = self.words.split_first()?;
        self.words = rest;
        Some(word)
    }

    fn take(&mut self, word: &str) -> bool {
        let found = self.words.first() == Some(&word);
        if found {
            self.words = &self.words[1..];
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALLOWED: [&str; 3] = ["MIT", "Apache-2.0", "Unicode-3.0"];

    #[track_caller]
    fn check(expression: &str, expected: bool) {
        assert_eq!(permits(expression, &ALLOWED).unwrap(), expected, "{expression}");
    }

    #[test]
    fn a_choice_needs_one_allowed_licence_and_a_sum_needs_all() {
        check("MIT", true);
        check("GPL-3.0-only", false);
        check("GPL-3.0-only OR MIT", true);
        check("GPL-3.0-only/MIT", true);
        check("MIT AND GPL-3.0-only", false);
        check("(MIT OR GPL-3.0-only) AND Unicode-3.0", true);
        check("(MIT OR Apache-2.0) AND GPL-3.0-only", false);
    }

    #[test]
    fn and_binds_more_tightly_than_or() {
        check("MIT OR Apache-2.0 AND GPL-3.0-only", true);
        check("GPL-3.0-only AND MIT OR GPL-3.0-only", false);
    }

    #[test]
    fn an_exception_never_takes_a_licence_away() {
        check("Apache-2.0 WITH LLVM-exception", true);
        check("GPL-2.0-only WITH Classpath-exception-2.0", false);
    }

    #[test]
    fn a_broken_expression_is_an_error_not_a_yes() {
        for broken in ["", "MIT OR", "(MIT", "MIT)", "MIT Apache-2.0", "MIT WITH"] {
            assert!(permits(broken, &ALLOWED).is_err(), "`{broken}`");
        }
    }

    #[test]
    fn the_allow_list_is_read_from_deny_toml() {
        let list = allow_list("[licenses]\nallow = [\n    \"MIT\",\n    # why\n    \"Zlib\"\n]\n")
            .unwrap();
        assert_eq!(list, ["MIT", "Zlib"]);
        assert!(allow_list("[licenses]\n").is_err());
    }
}

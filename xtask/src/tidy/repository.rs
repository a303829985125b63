//! Rules for the repository as a whole.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::workspace::Workspace;

/// Most bytes that `testdata/` may hold: everybody who clones pays for them.
const TESTDATA_BYTES: u64 = 28_000_000;

/// The file with one row for every dependency.
const DEPENDENCY_DECISIONS: &str = "docs/decisions/0001-dependencies.md";

/// Crates that hold no pointer tricks at all, by compiler's word.
const WITHOUT_UNSAFE: [&str; 6] = ["units", "quant", "checkpoint", "slot-pool", "hub", "prepare"];

pub(super) fn check(workspace: &Workspace, files: &[PathBuf]) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    problems.extend(testdata(workspace, files)?);
    problems.extend(dependencies(workspace)?);
    problems.extend(manifests(workspace, files)?);
    for name in WITHOUT_UNSAFE {
        let lib = format!("crates/{name}/src/lib.rs");
        if !workspace.read(&lib)?.contains("\n#![forbid(unsafe_code)]\n") {
            problems.push(format!("{lib}: has to say `#![forbid(unsafe_code)]`"));
        }
    }
    Ok(problems)
}

fn testdata(workspace: &Workspace, files: &[PathBuf]) -> Result<Option<String>> {
    let mut bytes = 0;
    for file in files.iter().filter(|file| file.starts_with("testdata")) {
        let meta = workspace.root.join(file).metadata();
        bytes += meta.with_context(|| format!("cannot read {}", file.display()))?.len();
    }
    let over = bytes > TESTDATA_BYTES;
    Ok(over.then(|| format!("testdata: {bytes} bytes, at most {TESTDATA_BYTES}")))
}

/// Every dependency of ours has a row in the decisions, and every row has its dependency.
fn dependencies(workspace: &Workspace) -> Result<Vec<String>> {
    let used: BTreeSet<&str> = workspace
        .members()
        .flat_map(|package| &package.dependencies)
        .filter(|dependency| dependency.external)
        .map(|dependency| dependency.name.as_str())
        .collect();
    let text = workspace.read(DEPENDENCY_DECISIONS)?;
    let told = rows(&text);
    let manifest = workspace.read("Cargo.toml")?;
    let idle = shared(&manifest).filter(|name| !used.contains(name));
    let idle = idle.map(|name| format!("Cargo.toml: nobody uses the shared dependency `{name}`"));
    let missing = used.difference(&told).map(|name| format!("no row for the dependency `{name}`"));
    let stale = told.difference(&used).map(|name| format!("a row for `{name}`, which nobody uses"));
    let told = missing.chain(stale).map(|what| format!("{DEPENDENCY_DECISIONS}: {what}"));
    Ok(idle.chain(told).collect())
}

/// The names in `[workspace.dependencies]` that come from a registry.
fn shared(manifest: &str) -> impl Iterator<Item = &str> {
    let (_, section) = manifest.split_once("\n[workspace.dependencies]\n").unwrap_or_default();
    let lines = section.lines().take_while(|line| !line.starts_with('['));
    let lines = lines.filter(|line| !line.contains("path = ") && !line.starts_with('#'));
    lines.filter_map(|line| Some(line.split_once(" = ")?.0))
}

/// The names in the first column of a table: lines that begin with "| `name` |".
fn rows(text: &str) -> BTreeSet<&str> {
    text.lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once("` |"))
        .map(|row| row.0)
        .collect()
}

/// Every package takes the lints of the workspace.
fn manifests(workspace: &Workspace, files: &[PathBuf]) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    let is_package = |file: &Path| {
        file.ends_with("Cargo.toml") && (file.starts_with("crates") || file.starts_with("xtask"))
    };
    for file in files.iter().filter(|file| is_package(file)) {
        if !workspace.read(file)?.contains("[lints]\nworkspace = true\n") {
            problems.push(format!("{}: has to take the workspace's lints", file.display()));
        }
    }
    Ok(problems)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_dependencies_are_those_from_a_registry() {
        let manifest = "[workspace]\n\n[workspace.dependencies]\nunits = { path = \"x\" }\n# why\nlibc = \"0.2\"\n\n[profile.dev]\nopt-level = 1\n";
        assert_eq!(shared(manifest).collect::<Vec<_>>(), ["libc"]);
    }

    #[test]
    fn rows_are_names_in_the_first_column() {
        let table = "| crate | why |\n|---|---|\n| `libc` | calls |\n| `half` | f16, not `f64` |\ntext `x`\n";
        assert_eq!(rows(table), BTreeSet::from(["half", "libc"]));
    }
}

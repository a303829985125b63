//! What a change must pass, as parts that also stand alone.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use anyhow::{Result, bail};

use crate::shell::{Outcome, answers, cargo, run};
use crate::workspace::Workspace;
use crate::{layers, licenses, tidy};

type Chore = fn(&Workspace, &[String]) -> Result<Outcome>;

/// Quick ones first, so that a slip costs seconds.
const PARTS: [(&str, Chore); 9] = [
    ("fmt", fmt),
    ("layers", layers::run),
    ("tidy", tidy::run),
    ("licenses", licenses::run),
    ("data", data),
    ("deny", deny),
    ("clippy", clippy),
    ("test", test),
    ("docs", docs),
];

/// Runs all parts, or the named ones, to the end; then says how each went.
pub(crate) fn check(workspace: &Workspace, names: &[String]) -> Result<Outcome> {
    if let Some(unknown) = names.iter().find(|name| !PARTS.iter().any(|(part, _)| part == name)) {
        let known = PARTS.map(|(part, _)| part).join(" ");
        bail!("no part `{unknown}`; there are: {known}");
    }
    let mut parts = Vec::new();
    for (name, chore) in PARTS {
        if names.is_empty() || names.iter().any(|wanted| wanted == name) {
            parts.push(Part::new(name, move || chore(workspace, &[])));
        }
    }
    sequence(&parts)
}

/// One step of a [`sequence`].
pub(crate) struct Part<'a> {
    name: String,
    run: Box<dyn Fn() -> Result<Outcome> + 'a>,
}

impl<'a> Part<'a> {
    pub(crate) fn new(name: impl Into<String>, run: impl Fn() -> Result<Outcome> + 'a) -> Self {
        Self { name: name.into(), run: Box::new(run) }
    }
}

/// Runs every part even if one fails, then prints a line for each; fails if any did.
pub(crate) fn sequence(parts: &[Part<'_>]) -> Result<Outcome> {
    let mut lines = Vec::new();
    let mut failed = Vec::new();
    for Part { name, run } in parts {
        eprintln!("== {name}");
        let start = Instant::now();
        let result = run();
        let seconds = start.elapsed().as_secs_f64();
        let verdict = match result {
            Ok(Outcome::Done) => "ok".to_owned(),
            Ok(Outcome::Skipped(reason)) => format!("SKIPPED: {reason}"),
            Err(error) => {
                eprintln!("error: {error:#}");
                failed.push(name.as_str());
                "FAILED".to_owned()
            }
        };
        lines.push(format!("  {name:<18} {seconds:>6.1} s  {verdict}"));
    }
    eprintln!("\n{}", lines.join("\n"));
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    Ok(Outcome::Done)
}

/// `cargo fmt --check`.
pub(crate) fn fmt(_: &Workspace, _: &[String]) -> Result<Outcome> {
    run(cargo().args(["fmt", "--all", "--check"]))?;
    run(cargo().args(["fmt", "--check", "--manifest-path", "fuzz/Cargo.toml"]))?;
    Ok(Outcome::Done)
}

/// Clippy over every target of every crate.
pub(crate) fn clippy(_: &Workspace, _: &[String]) -> Result<Outcome> {
    run(cargo().args([
        "clippy",
        "--workspace",
        "--all-targets",
        "--locked",
        "--",
        "-D",
        "warnings",
    ]))?;
    Ok(Outcome::Done)
}

/// All tests (nextest if it is installed), then the documentation's. Arguments go to the runner: `-p quant`, a name.
pub(crate) fn test(_: &Workspace, args: &[String]) -> Result<Outcome> {
    let scope: &[&str] = if args.iter().any(|arg| arg == "-p") { &[] } else { &["--workspace"] };
    if answers(cargo().get_program(), &["nextest", "--version"]) {
        run(cargo().args(["nextest", "run", "--locked", "--no-fail-fast"]).args(scope).args(args))?;
    } else {
        let targets = ["test", "--locked", "--no-fail-fast", "--lib", "--bins", "--tests"];
        run(cargo().args(targets).args(scope).args(args))?;
    }
    if args.is_empty() {
        run(cargo().args(["test", "--locked", "--doc", "--workspace"]))?;
    }
    Ok(Outcome::Done)
}

/// The documentation of every crate, private items too, so that no link is dead.
pub(crate) fn docs(_: &Workspace, _: &[String]) -> Result<Outcome> {
    let flags = ["doc", "--workspace", "--no-deps", "--document-private-items", "--locked"];
    run(cargo().args(flags).env("RUSTDOCFLAGS", "-D warnings"))?;
    Ok(Outcome::Done)
}

/// cargo-deny without its advisories, which need a database from the network.
pub(crate) fn deny(_: &Workspace, _: &[String]) -> Result<Outcome> {
    if !answers(cargo().get_program(), &["deny", "--version"]) {
        return Ok(Outcome::Skipped(
            "no cargo-deny; `cargo install --locked cargo-deny`".to_owned(),
        ));
    }
    let checks = ["bans", "licenses", "sources"];
    run(cargo().args(["deny", "--locked", "--log-level", "warn", "check"]).args(checks))?;
    Ok(Outcome::Done)
}

/// Every file of `testdata/` is in its SHA256SUMS, with that hash.
pub(crate) fn data(workspace: &Workspace, _: &[String]) -> Result<Outcome> {
    let listed = workspace.read("testdata/SHA256SUMS")?;
    let listed: BTreeSet<PathBuf> = listed
        .lines()
        .filter_map(|line| line.split_once("  "))
        .map(|(_, name)| name.into())
        .collect();
    let about = ["README.md", "SHA256SUMS"].map(PathBuf::from);
    let files = workspace.files()?;
    let present = files.iter().filter_map(|file| file.strip_prefix("testdata").ok());
    let present: BTreeSet<PathBuf> =
        present.filter(|file| !about.contains(&(*file).to_owned())).map(PathBuf::from).collect();
    if let Some(file) = listed.symmetric_difference(&present).next() {
        bail!("testdata/{}: in the folder or in SHA256SUMS, but not in both", file.display());
    }
    let tools: [(&str, &[&str]); 2] = [("sha256sum", &[]), ("shasum", &["-a", "256"])];
    let Some((tool, flags)) = tools.iter().find(|(tool, _)| answers(tool, &["--version"])) else {
        return Ok(Outcome::Skipped("neither sha256sum nor shasum is installed".to_owned()));
    };
    let mut check = Command::new(tool);
    check.args(*flags).args(["--check", "--quiet", "SHA256SUMS"]);
    run(check.current_dir(workspace.root.join("testdata")))?;
    Ok(Outcome::Done)
}

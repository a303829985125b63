//! `sakia list` and `sakia rm`: what lies in the store.

use std::io::{BufRead, IsTerminal, Write};
use std::process::ExitCode;

use anyhow::{Result, bail};
use hub::{ModelName, Store};
use serde_json::json;

use crate::args::{ListArgs, RemoveArgs};
use crate::report;

fn store() -> Result<Store> {
    Ok(Store::from_environment(&|name| std::env::var_os(name))?)
}

pub(crate) fn run(args: &ListArgs) -> Result<ExitCode> {
    let store = store()?;
    let (held, unreadable) = store.list()?;
    for broken in &unreadable {
        report::note(&format!("warning: {} is left out: {}", broken.repo, broken.problem));
    }
    if args.json {
        let model = |held: &hub::Held| json!({ "name": held.name, "bytes": held.bytes.0, "sha256": held.digest });
        let models: Vec<_> = held.iter().map(model).collect();
        report::data(&format!("{:#}\n", json!({ "models": models })));
        return Ok(ExitCode::SUCCESS);
    }
    if held.is_empty() {
        let root = store.root().display();
        report::note(&format!("no models in {root}; `sakia pull org/name` gets one"));
    }
    let width = held.iter().map(|held| held.name.len()).max().unwrap_or(0);
    for held in &held {
        report::data(&format!("{:width$}  {}\n", held.name, held.bytes));
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn remove(args: &RemoveArgs) -> Result<ExitCode> {
    let store = store()?;
    let name: ModelName = args.model.parse()?;
    let bytes = store.removable(&name)?;
    if !args.yes && !confirmed(&format!("remove {name} ({bytes})?"))? {
        report::note("nothing was removed");
        return Ok(ExitCode::FAILURE);
    }
    let bytes = store.remove(&name)?;
    report::note(&format!("removed {name}: {bytes}"));
    Ok(ExitCode::SUCCESS)
}

/// Asks at the terminal.
fn confirmed(question: &str) -> Result<bool> {
    if !std::io::stdin().is_terminal() {
        bail!("there is nobody to ask whether to {question}\n\nhint: --yes removes without asking");
    }
    let mut stderr = std::io::stderr().lock();
    write!(stderr, "{question} [y/N] ")?;
    stderr.flush()?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

//! Many runs, each in a process of its own, in turn.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::cache::Cold;
use super::{Work, metrics};
use crate::args::BenchArgs;
use crate::report;

/// Version of a series' layout.
const VERSION: u32 = 1;

pub(crate) fn run(args: &BenchArgs, work: &Work, cold: &Cold<'_>) -> Result<Value> {
    let n_settings = work.settings.len();
    let n_runs = n_settings * usize::from(args.repeat);
    let mut runs: Vec<Vec<Value>> = vec![Vec::new(); n_settings];
    for turn in 0..usize::from(args.repeat) {
        for place in order(n_settings, turn) {
            let dropped = cold.drop();
            let done = runs.iter().map(Vec::len).sum::<usize>();
            let mut receipt = child(place, done == 0)?;
            receipt["bench"]["page_cache_dropped"] = dropped.into();
            report::note(&format!("run {} of {n_runs}: {}", done + 1, metrics::one_line(&receipt)));
            runs[place].push(receipt);
        }
    }
    let settings: Vec<Value> = runs
        .into_iter()
        .map(|runs| {
            let first = &runs[0];
            json!({
                "budget_bytes": first["budget_bytes"],
                "context_tokens": first["context_tokens"],
                "prompt_tokens": first["bench"]["prompt_tokens"],
                "decode_tokens": first["bench"]["decode_tokens"],
                "medians": metrics::spreads(&runs),
                "runs": runs,
            })
        })
        .collect();
    Ok(json!({ "version": VERSION, "series": settings }))
}

/// Every other turn goes backwards, so that nobody always comes after the same one.
fn order(n_settings: usize, turn: usize) -> Vec<usize> {
    let order = 0..n_settings;
    if turn.is_multiple_of(2) { order.collect() } else { order.rev().collect() }
}

/// Runs one setting in another process, which gets this one's flags.
fn child(place: usize, is_first: bool) -> Result<Value> {
    let program = std::env::current_exe().context("finding this program, to run it again")?;
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1)).arg("--only").arg(place.to_string());
    let output = command.stdin(Stdio::null()).output().context("starting a run")?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        let why = said.trim_end();
        bail!("a run failed ({}):\n{}", output.status, why.strip_prefix("error: ").unwrap_or(why));
    }
    // Every run says the same.
    if is_first && !said.trim().is_empty() {
        report::note(said.trim_end());
    }
    serde_json::from_slice(&output.stdout).context("reading what a run printed")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_comes_once_a_turn_and_at_different_places() {
        assert_eq!(order(3, 0), [0, 1, 2]);
        assert_eq!(order(3, 1), [2, 1, 0]);
        assert_eq!(order(3, 2), [0, 1, 2]);
    }
}

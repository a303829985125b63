//! Which crate may use which: the data path of ARCHITECTURE.md as a test.
//!
//! Edges are transitive, `units` is open to all, anything else is refused. A crate that is not in the table fails too,
//! so that a new one is a decision. The record of a run (a receipt) lives in `session`, its only writer.

use std::collections::BTreeSet;

use anyhow::{Result, bail};

use crate::shell::Outcome;
use crate::workspace::Workspace;

/// A crate, and what stands directly to the left of it on the data path.
const LAYERS: [(&str, &[&str]); 14] = [
    ("units", &[]),
    ("quant", &[]),
    ("slot-pool", &[]),
    ("checkpoint", &["quant"]),
    ("memory-plan", &["checkpoint"]),
    ("expert-store", &["checkpoint", "slot-pool"]),
    ("compute", &["quant", "slot-pool"]),
    ("model", &["compute", "expert-store", "checkpoint"]),
    ("session", &["model", "memory-plan"]),
    ("server", &["session"]),
    ("hub", &[]),
    ("prepare", &["expert-store"]),
    ("cli", &["session", "server", "memory-plan", "hub", "prepare"]),
    ("xtask", &[]),
];

/// What only the tests of a crate may use besides.
const TESTS: [(&str, &str); 3] =
    [("checkpoint", "xtask"), ("memory-plan", "xtask"), ("cli", "xtask")];

/// Dependencies that only the named crates may have, and why.
const RESERVED: [(&str, &[&str], &str); 2] = [
    ("anyhow", &["cli", "xtask"], "libraries say what went wrong with an enum of their own"),
    ("clap", &["cli"], "only the command line parses a command line"),
];

/// Checks every edge between our crates, and the reserved dependencies.
pub(crate) fn run(workspace: &Workspace, _: &[String]) -> Result<Outcome> {
    let mut problems = Vec::new();
    let ours: BTreeSet<&str> = workspace.members().map(|package| package.name.as_str()).collect();
    let gone = LAYERS.iter().filter(|(layer, _)| !ours.contains(layer));
    problems
        .extend(gone.map(|(layer, _)| format!("`{layer}` is in the table but not in the tree")));
    for package in workspace.members() {
        let Some(allowed) = reach(&package.name) else {
            problems.push(format!("`{}` has no place in the table of layers", package.name));
            continue;
        };
        for dependency in &package.dependencies {
            let used = dependency.name.as_str();
            let for_tests = dependency.dev && TESTS.contains(&(&package.name, used));
            if ours.contains(used) && !allowed.contains(used) && !for_tests {
                let list = allowed.iter().copied().collect::<Vec<_>>().join(", ");
                problems.push(format!("`{}` uses `{used}`; it may use {list}", package.name));
            }
            if let Some(problem) = reserved(&package.name, used) {
                problems.push(problem);
            }
        }
    }
    if !problems.is_empty() {
        bail!("layers:\n  {}", problems.join("\n  "));
    }
    Ok(Outcome::Done)
}

/// Everything that a crate may use, or `None` for a crate that the table does not know.
fn reach(name: &str) -> Option<BTreeSet<&'static str>> {
    let (_, direct) = LAYERS.iter().find(|(layer, _)| *layer == name)?;
    let mut allowed = BTreeSet::from(["units"]);
    for left in *direct {
        allowed.insert(left);
        allowed.extend(reach(left)?);
    }
    Some(allowed)
}

fn reserved(package: &str, used: &str) -> Option<String> {
    let (_, users, reason) = RESERVED.iter().find(|(dependency, ..)| *dependency == used)?;
    let refused = !users.contains(&package);
    refused
        .then(|| format!("`{package}` uses `{used}`, which is for {}: {reason}", users.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edges_are_transitive_and_point_left() {
        let model = reach("model").unwrap();
        for left in ["units", "quant", "slot-pool", "checkpoint", "expert-store", "compute"] {
            assert!(model.contains(left), "model may use {left}");
        }
        for right in ["session", "cli", "memory-plan", "model"] {
            assert!(!model.contains(right), "model may not use {right}");
        }
        assert!(!reach("compute").unwrap().contains("checkpoint"));
        assert!(!reach("slot-pool").unwrap().contains("quant"));
    }

    #[test]
    fn a_crate_outside_the_table_has_no_reach() {
        assert_eq!(reach("utils"), None);
    }

    #[test]
    fn the_table_names_only_crates_that_stand_above() {
        for (index, (name, direct)) in LAYERS.iter().enumerate() {
            for left in *direct {
                let above = LAYERS[..index].iter().any(|(layer, _)| layer == left);
                assert!(above, "{name} names {left}, which is not above it");
            }
        }
    }

    #[test]
    fn a_library_may_not_use_anyhow() {
        assert!(reserved("model", "anyhow").is_some());
        assert!(reserved("cli", "anyhow").is_none());
    }
}

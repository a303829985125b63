//! Repository chores: `cargo xtask <chore>`. Needs cargo and git; a chore that wants more says so and is skipped.

mod check;
mod cross;
mod fuzz;
mod layers;
mod licenses;
mod sdks;
mod shell;
mod tidy;
mod workspace;

use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use shell::Outcome;
use workspace::Workspace;
use xtask::synth;

/// A thing that `cargo xtask` can do. `check` runs the parts of it that need no more than cargo.
struct Chore {
    name: &'static str,
    about: &'static str,
    run: fn(&Workspace, &[String]) -> Result<Outcome>,
}

const CHORES: [Chore; 14] = [
    Chore { name: "check", about: "Everything a change must pass [PART...]", run: check::check },
    Chore { name: "test", about: "Tests and documentation tests [FILTER...]", run: check::test },
    Chore { name: "fmt", about: "Formatting, as rustfmt would have it", run: check::fmt },
    Chore { name: "clippy", about: "Lints, warnings denied", run: check::clippy },
    Chore { name: "layers", about: "Which crate may use which", run: layers::run },
    Chore { name: "tidy", about: "Sizes, unsafe, leftovers, test data, decisions", run: tidy::run },
    Chore { name: "licenses", about: "Licence and source of every dependency", run: licenses::run },
    Chore { name: "docs", about: "rustdoc, warnings denied", run: check::docs },
    Chore { name: "deny", about: "Duplicates and wildcards, with cargo-deny", run: check::deny },
    Chore { name: "data", about: "Test data against SHA256SUMS", run: check::data },
    Chore {
        name: "cross",
        about: "macOS type check, arm64 tests under qemu [PART...]",
        run: cross::run,
    },
    Chore {
        name: "sdks",
        about: "Official clients against the server [--schemathesis S] [--soak S]",
        run: sdks::sdks,
    },
    Chore { name: "fuzz", about: "Mutated inputs: TARGET [--seconds N]", run: fuzz::run },
    Chore {
        name: "synth",
        about: "Checkpoints of real shapes, empty or random: KIND --out PATH; --help",
        run: |workspace, args| synth::run(&workspace.started_in, args).map(|()| Outcome::Done),
    },
];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match dispatch(&args) {
        Ok(Outcome::Done) => ExitCode::SUCCESS,
        Ok(Outcome::Skipped(reason)) => {
            eprintln!("SKIPPED: {reason}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(args: &[String]) -> Result<Outcome> {
    let Some((name, rest)) = args.split_first() else {
        eprintln!("{}", usage());
        return Ok(Outcome::Done);
    };
    if matches!(name.as_str(), "help" | "-h" | "--help") {
        eprintln!("{}", usage());
        return Ok(Outcome::Done);
    }
    let Some(chore) = CHORES.iter().find(|chore| chore.name == name) else {
        bail!("no chore `{name}`\n\n{}", usage());
    };
    let workspace = Workspace::load()?;
    std::env::set_current_dir(&workspace.root).context("cannot enter the repository")?;
    (chore.run)(&workspace, rest)
}

fn usage() -> String {
    let lines = CHORES.iter().map(|chore| format!("\n  {:<10}{}", chore.name, chore.about));
    format!("Repository chores\n\nUsage: cargo xtask <CHORE>\n{}", lines.collect::<String>())
}

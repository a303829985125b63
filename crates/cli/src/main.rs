//! The `sakia` command: one file per verb.
//!
//! Data goes to stdout, everything else to stderr. Exit codes: 0 done, 1 refused or failed, 2 a comparison found a
//! mismatch (or the command line was wrong), 130 interrupted.

mod args;
mod bench;
mod chat;
mod demo;
mod doctor;
mod hot;
mod inspect;
mod interrupt;
mod launch;
mod list;
mod logits;
mod lookahead;
mod machine;
mod npy;
mod open;
mod output;
mod pack;
mod parity;
mod plan;
mod probe;
mod pull;
mod report;
mod run;
mod selftest;
mod serve;
mod simulate;
mod tokenize;
mod trace;
mod verify;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    memory_plan::give_large_blocks_back();
    let command = args::Cli::parse().command;
    let json_errors = command.json_errors();
    let outcome = match command {
        args::Command::Run(args) => run::run(&args),
        args::Command::Serve(args) => serve::run(&args),
        args::Command::Launch(args) => launch::run(&args),
        args::Command::List(args) => list::run(&args),
        args::Command::Rm(args) => list::remove(&args),
        args::Command::Plan(args) => plan::run(&args),
        args::Command::Pull(args) => pull::run(&args),
        args::Command::Pack(args) => pack::run(&args),
        args::Command::Verify(args) => verify::run(&args),
        args::Command::Inspect(args) => inspect::run(&args),
        args::Command::Tokenize(args) => tokenize::run(&args),
        args::Command::Logits(args) => logits::run(&args),
        args::Command::Parity(args) => parity::run(&args),
        args::Command::Selftest(args) => selftest::run(&args),
        args::Command::Bench(args) => bench::run(&args),
        args::Command::Probe(args) => probe::run(&args),
        args::Command::Doctor(args) => doctor::run(&args),
        args::Command::FitLookahead(args) => lookahead::run(&args),
        args::Command::Trace(args) => trace::run(&args),
        args::Command::Simulate(args) => simulate::run(&args),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            if json_errors {
                report::json_error(&error);
            }
            report::error(&error);
            ExitCode::FAILURE
        }
    }
}

//! `sakia bench`: forced ids, so that two programs (or two settings) route the same tokens.
//!
//! One run is measured in this process. A series is runs of many settings many times, each in a process of its own: peak
//! memory, what the planner takes the process itself to need, and the state of the allocator belong to a process, and
//! none of them may depend on the runs before.

mod cache;
mod compare;
mod metrics;
mod one;
mod series;

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use serde_json::Value;
use units::Bytes;

use crate::args::{BenchArgs, Roofline};
use crate::output::OutputFile;
use crate::{open, output, report};

/// Most runs of a series.
const MOST_RUNS: usize = 10_000;

/// What is measured at one place of a series.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Setting {
    /// The budget, unless it is a share of the machine.
    memory: Option<Bytes>,
    /// Positions, unless they are as many as tokens.
    context: Option<u32>,
    prompt_tokens: usize,
}

/// Ids and settings, checked.
pub(crate) struct Work {
    ids: Vec<u32>,
    decode_tokens: usize,
    /// All combinations of what was given several times.
    settings: Vec<Setting>,
}

pub(crate) fn run(args: &BenchArgs) -> Result<ExitCode> {
    crate::interrupt::quit_at_once();
    if let [a, b] = &args.compare[..] {
        return compare::run(a, b, args.json);
    }
    let work = Work::of(args)?;
    if let Some(only) = args.only {
        let setting = work.settings.get(only).context("there is no such setting")?;
        print(&one::run(args, &work, *setting, args.roofline != Roofline::Off)?);
        return Ok(ExitCode::SUCCESS);
    }
    let files = files(args)?;
    let out = create(args, &files)?;
    let cold = cache::Cold { files: &files, keep: args.keep_cache };
    let is_text = !args.json && (args.out.is_some() || std::io::stdout().is_terminal());
    let receipt = if let ([setting], 1) = (&work.settings[..], args.repeat) {
        let dropped = cold.drop();
        let roofline = match args.roofline {
            Roofline::Auto => is_text,
            Roofline::On => true,
            Roofline::Off => false,
        };
        let mut receipt = one::run(args, &work, *setting, roofline)?;
        receipt["bench"]["page_cache_dropped"] = dropped.into();
        receipt
    } else {
        series::run(args, &work, &cold)?
    };
    if let (Some(mut file), Some(path)) = (out, &args.out) {
        let written = file.write_all(format!("{receipt:#}\n").as_bytes());
        written
            .and_then(|()| file.finish())
            .with_context(|| format!("writing {}", path.display()))?;
    }
    if is_text {
        report::text(&metrics::as_text(&receipt)?);
    } else {
        print(&receipt);
    }
    Ok(ExitCode::SUCCESS)
}

fn print(receipt: &Value) {
    report::data(&format!("{receipt:#}\n"));
}

/// The files of the model. Its vocabulary is not kept: in a series, this process only waits.
fn files(args: &BenchArgs) -> Result<Vec<PathBuf>> {
    let path = open::choose(&args.model)?.path;
    let files = checkpoint::open(&path)?.inputs();
    memory_plan::release_free_memory();
    Ok(files)
}

/// What cannot be written is said before anything is measured.
fn create(args: &BenchArgs, files: &[PathBuf]) -> Result<Option<OutputFile>> {
    let inputs: Vec<PathBuf> = files.iter().chain(&args.ids_file).cloned().collect();
    args.out.as_ref().map(|out| output::create(out, &inputs)).transpose()
}

impl Work {
    fn of(args: &BenchArgs) -> Result<Self> {
        let (Some(ids_file), Some(decode_tokens)) = (&args.ids_file, args.decode_tokens) else {
            unreachable!("clap requires both where nothing is compared");
        };
        let ids = open::read_ids(ids_file)?;
        for prompt_tokens in &args.prompt_tokens {
            check(args, &ids, *prompt_tokens, decode_tokens)?;
        }
        let settings = settings(args);
        let runs = settings.len().saturating_mul(args.repeat.into());
        if runs > MOST_RUNS {
            bail!(
                "{} settings, {} times: at most {MOST_RUNS} runs make a series",
                settings.len(),
                args.repeat
            );
        }
        Ok(Self { ids, decode_tokens, settings })
    }
}

fn check(args: &BenchArgs, ids: &[u32], p: usize, n: usize) -> Result<()> {
    if p == 0 || n < 2 {
        bail!(
            "-p {p} -n {n}: -p needs at least 1 token and -n at least 2, since a rate is taken between tokens"
        );
    }
    let needed = p.saturating_add(n);
    if ids.len() < needed {
        let name = args.ids_file.as_deref().unwrap_or_else(|| "the file".as_ref()).display();
        bail!("{name} holds {} ids; -p {p} -n {n} needs {needed}", ids.len());
    }
    Ok(())
}

/// Every budget with every context and every prompt.
fn settings(args: &BenchArgs) -> Vec<Setting> {
    fn or_none<T: Copy>(given: &[T]) -> Vec<Option<T>> {
        if given.is_empty() { vec![None] } else { given.iter().copied().map(Some).collect() }
    }
    let mut settings = Vec::new();
    for memory in or_none(&args.memory) {
        for context in or_none(&args.context) {
            for &prompt_tokens in &args.prompt_tokens {
                settings.push(Setting { memory, context, prompt_tokens });
            }
        }
    }
    settings
}

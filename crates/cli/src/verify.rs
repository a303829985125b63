//! `sakia verify`: whether a model is whole.

use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use prepare::{Fault, Verdict};
use units::Bytes;

use crate::args::VerifyArgs;
use crate::pack::{Bar, finished};
use crate::{open, report};

pub(crate) fn run(args: &VerifyArgs) -> Result<ExitCode> {
    let chosen = open::choose(&args.model)?;
    let checkpoint = checkpoint::open(&chosen.path)?;
    let model = checkpoint::bind(&checkpoint)?;
    for warning in checkpoint.warnings.iter().chain(&model.warnings) {
        report::note(&format!("warning: {warning}"));
    }
    let total = checkpoint.directory.iter().map(|tensor| tensor.bytes).sum();
    let bar = Bar(report::work_bar("checking", total));
    let verdict = if args.deep {
        prepare::verify_deep(&checkpoint, &bar)
    } else {
        Ok(prepare::verify(&checkpoint))
    };
    bar.0.finish_and_clear();
    finished(verdict, args.json, |verdict| {
        if args.json {
            report::data(&as_json(&chosen.path, verdict));
        } else {
            report::text(&as_text(&chosen.path, verdict));
        }
        if verdict.n_faults == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    })
}

fn as_text(path: &Path, verdict: &Verdict) -> String {
    let Verdict { is_pack, read_bytes, checksums, faults, n_faults } = verdict;
    let read = match (*read_bytes, *checksums) {
        (0, _) => "header, names, shapes and sizes fit".to_owned(),
        (read, 0) => format!("{} read, every value looked at", Bytes(read)),
        (read, sums) => format!("{} read, {sums} checksums compared", Bytes(read)),
    };
    let container = if *is_pack { "pack" } else { "checkpoint" };
    if *n_faults == 0 {
        return format!("{}: whole {container}; {read}\n", path.display());
    }
    let mut text = String::new();
    for Fault { file, what, offset, problem } in faults {
        let place = offset.map(|at| format!(" at byte {at}")).unwrap_or_default();
        let _ = writeln!(text, "{}: {what}{place}: {problem}", file.display());
    }
    let more = n_faults - faults.len() as u64;
    if more > 0 {
        let _ = writeln!(text, "and {more} more");
    }
    let count = report::count(usize::try_from(*n_faults).unwrap_or(usize::MAX), "fault");
    let _ = writeln!(text, "{}: damaged {container}, {count}", path.display());
    text
}

fn as_json(path: &Path, verdict: &Verdict) -> String {
    let Verdict { is_pack, read_bytes, checksums, faults, n_faults } = verdict;
    let fault = |fault: &Fault| {
        serde_json::json!({
            "file": report::lossy(&fault.file),
            "what": fault.what,
            "offset": fault.offset,
            "problem": fault.problem,
        })
    };
    let value = serde_json::json!({
        "path": report::lossy(path),
        "ok": *n_faults == 0,
        "pack": is_pack,
        "read_bytes": read_bytes,
        "checksums": checksums,
        "faults": faults.iter().map(fault).collect::<Vec<_>>(),
        "fault_count": n_faults,
    });
    format!("{value:#}\n")
}

//! `sakia pack`: a model as one file in which every expert is one run of bytes.

use std::fmt::Write as _;
use std::process::ExitCode;

use anyhow::Result;
use indicatif::ProgressBar;
use prepare::{Packed, Packing, PrepareError, Watch};
use units::Bytes;

use crate::args::PackArgs;
use crate::{interrupt, open, report};

/// A bar, and Ctrl-C.
pub(crate) struct Bar(pub(crate) ProgressBar);

impl Watch for Bar {
    fn at(&self, bytes: u64) {
        self.0.set_position(bytes);
    }

    fn stopped(&self) -> bool {
        interrupt::pressed()
    }
}

pub(crate) fn run(args: &PackArgs) -> Result<ExitCode> {
    let chosen = open::choose(&args.model)?;
    let checkpoint = checkpoint::open(&chosen.path)?;
    let model = checkpoint::bind(&checkpoint)?;
    for warning in checkpoint.warnings.iter().chain(&model.warnings) {
        report::note(&format!("warning: {warning}"));
    }
    let packing = Packing::new(checkpoint, &model, &args.out, args.force)?;
    let bar = Bar(report::work_bar("packing", packing.bytes()));
    let packed = packing.run(&bar);
    bar.0.finish_and_clear();
    finished(packed, args.json, |packed| {
        if args.json {
            report::data(&as_json(packed));
        } else {
            report::text(&as_text(packed));
        }
        ExitCode::SUCCESS
    })
}

/// What a long job came to; an interrupted one has an exit code of its own.
pub(crate) fn finished<T>(
    outcome: Result<T, PrepareError>,
    json: bool,
    show: impl FnOnce(&T) -> ExitCode,
) -> Result<ExitCode> {
    match outcome {
        Ok(value) => Ok(show(&value)),
        Err(error @ PrepareError::Stopped) => {
            let error = error.into();
            if json {
                report::json_error(&error);
            }
            report::error(&error);
            Ok(ExitCode::from(130))
        }
        Err(error) => Err(error.into()),
    }
}

fn as_text(packed: &Packed) -> String {
    let Packed { path, file_bytes, units, resumed_units, records, written_bytes } = packed;
    let mut text = format!("{}: {}, {records} expert records", path.display(), Bytes(*file_bytes));
    if *resumed_units > 0 {
        let left = Bytes(*written_bytes);
        let _ = write!(text, "; {resumed_units} of {units} parts were there, {left} written now");
    }
    text.push('\n');
    text
}

fn as_json(packed: &Packed) -> String {
    let Packed { path, file_bytes, units, resumed_units, records, written_bytes } = packed;
    let value = serde_json::json!({
        "path": report::lossy(path),
        "bytes": file_bytes,
        "records": records,
        "checksums": units,
        "resumed": resumed_units,
        "written_bytes": written_bytes,
    });
    format!("{value:#}\n")
}

//! `sakia plan`: the ledger.

use std::process::ExitCode;

use anyhow::Result;
use session::Unknown;

use crate::args::PlanArgs;
use crate::{open, report};

pub(crate) fn run(args: &PlanArgs) -> Result<ExitCode> {
    let chosen = open::choose(&args.model)?;
    let mut options = open::options(&chosen, &args.memory, None)?;
    options.pass_rows = args.pass;
    options.draft = args.draft;
    let opened = open::open(&chosen)?;
    options.speculation = args.speculation.options(opened.model.draft.is_some());
    open::remark(&opened, &options);
    open::find_reads(&opened, &mut options, Unknown::Default);
    let plan = opened.plan(&options)?;
    if args.json {
        report::data(&format!("{:#}\n", serde_json::to_value(&plan)?));
    } else {
        report::data(&format!("{plan}\n"));
    }
    Ok(ExitCode::SUCCESS)
}

//! `sakia bench`: forced ids, so that two programs (or two settings) route the same tokens.

use std::process::ExitCode;

use anyhow::{Result, bail};
use session::{Forced, Reads, receipt};

use crate::args::BenchArgs;
use crate::{lookahead, open, report};

pub(crate) fn run(args: &BenchArgs) -> Result<ExitCode> {
    let ids = open::read_ids(&args.ids_file)?;
    let needed = args.prompt_tokens.saturating_add(args.decode_tokens);
    if args.prompt_tokens == 0 || args.decode_tokens < 2 {
        let (p, n) = (args.prompt_tokens, args.decode_tokens);
        bail!(
            "-p {p} -n {n}: -p needs at least 1 token and -n at least 2, since a rate is taken between tokens"
        );
    }
    if ids.len() < needed {
        bail!(
            "{} holds {} ids; -p {} -n {} needs {needed}",
            args.ids_file.display(),
            ids.len(),
            args.prompt_tokens,
            args.decode_tokens
        );
    }
    let chosen = open::choose(&args.model)?;
    let mut options = open::options(&chosen, &args.memory, Some(&args.speed))?;
    options.context = options.context.or(Some(needed as u32));
    let opened = open::open(&chosen)?;
    lookahead::attach(&args.speed, &opened, &mut options)?;
    if args.simulate_disk.is_some() {
        options.simulate = args.simulate_disk;
        // What is known of this machine's disk does not hold for another.
        options.reads = options.reads.or(Some(Reads::default()));
    }
    options.speculation = args.speculation.options(opened.model.draft.is_some());
    let mut engine = open::load(opened, options)?;
    let mut sequence = engine.open_sequence()?;
    let (prompt, forced) = ids[..needed].split_at(args.prompt_tokens);
    let pass_rows = engine.plan.pass_rows as usize;
    let outcome = Forced { prompt, forced, pass_rows }.run(&mut engine.network, &mut sequence)?;
    let record = receipt::of_forced(&engine, &outcome);
    report::data(&format!("{:#}\n", serde_json::to_value(&record)?));
    Ok(ExitCode::SUCCESS)
}

//! `sakia logits`: every position's logits, for parity with other software.

use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use model::RouteLog;
use session::{LogitsRun, Sequence};

use crate::args::LogitsArgs;
use crate::npy::NpyWriter;
use crate::{open, report};

pub(crate) fn run(args: &LogitsArgs) -> Result<ExitCode> {
    let ids = match (&args.ids, &args.ids_file) {
        (Some(ids), _) => ids.clone(),
        (None, Some(file)) => open::read_ids(file)?,
        (None, None) => unreachable!("clap requires one of the two"),
    };
    if ids.is_empty() {
        bail!("there are no token ids to run");
    }
    let chosen = open::choose(&args.model)?;
    let mut options = open::options(&chosen, &args.memory, Some(&args.speed))?;
    options.context = options.context.or(Some(ids.len() as u32));
    options.logit_rows = LogitsRun::LOGIT_ROWS;
    let mut engine = open::load(open::open(&chosen)?, options)?;
    let (n_vocab, pass_rows) =
        (engine.network.config().vocab as usize, engine.plan.pass_rows as usize);
    if args.routes.is_some() {
        let config = engine.network.config();
        engine.network.routes =
            Some(RouteLog::new(config.n_layers as usize, config.top_k as usize));
    }
    let create = || NpyWriter::create(&args.out, "<f4", &[ids.len(), n_vocab]);
    let mut out = create().with_context(|| format!("creating {}", args.out.display()))?;
    let mut written = Ok(());
    let mut sequence = Sequence::open(&mut engine.network)?;
    let run = LogitsRun { tokens: &ids, pass_rows };
    run.run(&mut engine.network, &mut sequence, &mut |logits| {
        if written.is_ok() {
            written = out.f32s(logits);
        }
    })?;
    written
        .and_then(|()| out.finish())
        .with_context(|| format!("writing {}", args.out.display()))?;
    if let (Some(path), Some(log)) = (&args.routes, &engine.network.routes) {
        let write = || {
            let mut file = NpyWriter::create(path, "<i4", &log.shape())?;
            file.i32s(log.experts())?;
            file.finish()
        };
        write().with_context(|| format!("writing {}", path.display()))?;
    }
    report::note(&format!("{} positions of {n_vocab} logits: {}", ids.len(), args.out.display()));
    Ok(ExitCode::SUCCESS)
}

//! `sakia logits`: every position's logits, for parity with other software.

use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use model::RouteLog;
use session::{LogitsRun, Sequence};

use crate::args::LogitsArgs;
use crate::npy::NpyWriter;
use crate::{interrupt, open, output, report};

pub(crate) fn run(args: &LogitsArgs) -> Result<ExitCode> {
    let ids = match (&args.ids, &args.ids_file) {
        (Some(ids), _) => ids.0.clone(),
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
    let opened = open::open(&chosen)?;
    // What cannot be written is said before gigabytes are loaded.
    let mut inputs = opened.files();
    inputs.extend(args.ids_file.as_deref());
    let out = output::create(&args.out, &inputs)?;
    let routes = match &args.routes {
        Some(path) if path == &args.out => {
            bail!("--out and --routes are both {}; each needs its own file", path.display())
        }
        Some(path) => Some((path, output::create(path, &inputs)?)),
        None => None,
    };
    let mut engine = open::load(opened, options)?;
    let (n_vocab, pass_rows) =
        (engine.network.config().vocab as usize, engine.plan.pass_rows as usize);
    if args.routes.is_some() {
        let config = engine.network.config();
        engine.network.routes =
            Some(RouteLog::new(config.n_layers as usize, config.top_k as usize));
    }
    let writing = || format!("writing {}", args.out.display());
    let mut out = NpyWriter::begin(out, "<f4", &[ids.len(), n_vocab]).with_context(writing)?;
    let mut written = Ok(());
    let mut sequence = Sequence::open(&mut engine.network)?;
    let bar = report::prompt_bar(ids.len());
    let progress = |done: usize, _| {
        bar.set_position(done as u64);
        !interrupt::pressed()
    };
    let run = LogitsRun { tokens: &ids, pass_rows, progress: &progress };
    let phase = run.run(&mut engine.network, &mut sequence, &mut |logits| {
        if written.is_ok() {
            written = out.f32s(logits);
        }
    });
    bar.finish_and_clear();
    if phase?.tokens < ids.len() as u64 {
        report::note("interrupted; nothing was written");
        return Ok(ExitCode::from(130));
    }
    written.and_then(|()| out.finish()).with_context(writing)?;
    if let (Some((path, file)), Some(log)) = (routes, &engine.network.routes) {
        let write = || {
            let mut file = NpyWriter::begin(file, "<i4", &log.shape())?;
            file.i32s(log.experts())?;
            file.finish()
        };
        write().with_context(|| format!("writing {}", path.display()))?;
    }
    report::note(&format!("{} positions of {n_vocab} logits: {}", ids.len(), args.out.display()));
    Ok(ExitCode::SUCCESS)
}

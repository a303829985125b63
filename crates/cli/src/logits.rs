//! `sakia logits`: every position's logits, for parity with other software.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use model::RouteLog;
use session::{Engine, GenerateError, LogitsRun, Phase, Sequence};

use crate::args::LogitsArgs;
use crate::npy::NpyWriter;
use crate::output::OutputFile;
use crate::{interrupt, lookahead, open, output, report};

/// A file that is written, and its name.
type Named = (PathBuf, OutputFile);

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
    options.draft = args.draft.is_some();
    let opened = open::open(&chosen)?;
    lookahead::attach(&args.speed, &opened, &mut options)?;
    // What cannot be written is said before gigabytes are loaded.
    let mut inputs = opened.files();
    inputs.extend(args.ids_file.clone());
    let out = (args.out.clone(), output::create(&args.out, &inputs)?);
    let [routes, draft] = others(args, &inputs)?;
    let mut engine = open::load(opened, options)?;
    if interrupt::pressed() {
        report::note("interrupted; nothing was written");
        return Ok(ExitCode::from(130));
    }
    let n_vocab = engine.network.config().vocab as usize;
    if routes.is_some() {
        let config = engine.network.config();
        engine.network.routes =
            Some(RouteLog::new(config.n_layers as usize, config.top_k as usize));
    }
    let mut out = Rows::begin(out, [ids.len(), n_vocab])?;
    let mut draft = draft.map(|draft| Rows::begin(draft, [ids.len() - 1, n_vocab])).transpose()?;
    if read(&mut engine, &ids, &mut out, draft.as_mut())?.tokens < ids.len() as u64 {
        report::note("interrupted; nothing was written");
        return Ok(ExitCode::from(130));
    }
    out.finish()?;
    draft.map_or(Ok(()), Rows::finish)?;
    if let (Some((path, file)), Some(log)) = (routes, &engine.network.routes) {
        let write = || {
            let mut file = NpyWriter::begin(file, "<i4", &log.shape())?;
            file.i32s(log.experts())?;
            file.finish()
        };
        write().with_context(|| writing(&path))?;
    }
    report::note(&format!("{} positions of {n_vocab} logits: {}", ids.len(), args.out.display()));
    Ok(ExitCode::SUCCESS)
}

/// Files of `--routes` and `--draft`, if they are asked for.
fn others(args: &LogitsArgs, inputs: &[PathBuf]) -> Result<[Option<Named>; 2]> {
    let mut names = vec![("--out", &args.out)];
    let mut files = [None, None];
    for (file, (flag, path)) in
        files.iter_mut().zip([("--routes", &args.routes), ("--draft", &args.draft)])
    {
        let Some(path) = path else { continue };
        if let Some((other, _)) = names.iter().find(|(_, name)| *name == path) {
            bail!("{other} and {flag} are both {}; each needs its own file", path.display());
        }
        names.push((flag, path));
        *file = Some((path.clone(), output::create(path, inputs)?));
    }
    Ok(files)
}

fn read(
    engine: &mut Engine,
    ids: &[u32],
    out: &mut Rows,
    draft: Option<&mut Rows>,
) -> Result<Phase, GenerateError> {
    let mut sequence = Sequence::open(&mut engine.network)?;
    let bar = report::prompt_bar(ids.len());
    let progress = |done: usize, _| {
        bar.set_position(done as u64);
        !interrupt::pressed()
    };
    let pass_rows = engine.plan.pass_rows as usize;
    let run = LogitsRun { tokens: ids, pass_rows, progress: &progress };
    let network = &mut engine.network;
    let sink = &mut |logits: &[f32]| out.push(logits);
    let phase = match draft {
        None => run.run(network, &mut sequence, sink),
        Some(draft) => {
            run.run_with_draft(network, &mut sequence, sink, &mut |logits| draft.push(logits))
        }
    };
    bar.finish_and_clear();
    phase
}

/// Rows of an array as they come. What goes wrong on the way is kept until the end.
struct Rows {
    path: PathBuf,
    writer: NpyWriter,
    written: std::io::Result<()>,
}

impl Rows {
    fn begin((path, file): Named, shape: [usize; 2]) -> Result<Self> {
        let writer = NpyWriter::begin(file, "<f4", &shape).with_context(|| writing(&path))?;
        Ok(Self { path, writer, written: Ok(()) })
    }

    fn push(&mut self, row: &[f32]) {
        if self.written.is_ok() {
            self.written = self.writer.f32s(row);
        }
    }

    fn finish(self) -> Result<()> {
        let Self { path, writer, written } = self;
        written.and_then(|()| writer.finish()).with_context(|| writing(&path))
    }
}

fn writing(path: &Path) -> String {
    format!("writing {}", path.display())
}

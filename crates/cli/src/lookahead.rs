//! `sakia fit-lookahead`, and where what it fits is found again.

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use checkpoint::ModelConfig;
use model::Correction;
use session::{EngineOptions, FitPlan, FitReport, OpenModel, Specials, fit, fitted, hot_set};

use crate::args::{FitArgs, Kv, LookaheadKind, MemoryArgs, SpeedArgs};
use crate::output::OutputFile;
use crate::{hot, open, output, report};

/// Most bytes of a file of text.
const MAX_TEXT_BYTES: u64 = 64 << 20;
/// Bytes of text for a token that are looked at.
const BYTES_PER_TOKEN: usize = 16;

/// The folder of fitted corrections among what is kept of models.
const FOLDER: &str = "lookahead";

pub(crate) fn run(args: &FitArgs) -> Result<ExitCode> {
    crate::interrupt::quit_at_once();
    let chosen = open::choose(&args.model)?;
    let memory = MemoryArgs { memory: args.memory, context: None, kv: Kv::F16, slots: None };
    let mut options = open::options(&chosen, &memory, None)?;
    let opened = open::open(&chosen)?;
    let config = opened.model.config.clone();
    let (texts, held_out) = texts(args, &opened)?;
    let plan = FitPlan::new(&config, texts, held_out, options.budget.bytes)?;
    options.context = Some(plan.context(&config));
    options.fit_bytes = Some(plan.bytes());
    let identity = hot_set::identity(&opened);
    // What cannot be written is said before gigabytes are loaded.
    let (mut file, path) = out_file(args, &opened)?;
    let mut engine = open::load(opened, options)?;
    say_plan(&plan);
    let bar = report::count_bar(plan.work(), "tokens");
    let (correction, found) = fit::fit(&mut engine, &plan, &mut |tokens| bar.inc(tokens))?;
    bar.finish_and_clear();
    file.write_all(&fitted::encode(&correction, identity, &config))
        .and_then(|()| file.finish())
        .with_context(|| format!("writing {}", path.display()))?;
    if args.json {
        report::data(&format!("{:#}\n", serde_json::to_value(&found)?));
    } else {
        report::text(&table(&found));
    }
    report::note(&format!("written: {}", path.display()));
    Ok(ExitCode::SUCCESS)
}

fn say_plan(plan: &FitPlan) {
    let [fit, choose, judge] = plan.tokens();
    report::note(&format!(
        "fitting to {fit} tokens, {choose} choose, {judge} judge; {} at a time in {}, so the text is read {}",
        report::count(plan.layers_at_once() as usize, "layer"),
        plan.bytes(),
        match plan.runs() {
            1 => "once".to_owned(),
            runs => format!("{runs} times"),
        }
    ));
}

/// Texts to fit to, and texts to judge by.
type Texts = (Vec<Vec<u32>>, Vec<Vec<u32>>);

fn texts(args: &FitArgs, opened: &OpenModel) -> Result<Texts> {
    let by_ids = !args.ids_file.is_empty();
    let take = |paths: &[PathBuf]| -> Result<Vec<Vec<u32>>> {
        let mut left = args.tokens as usize;
        let mut texts = Vec::with_capacity(paths.len());
        for path in paths {
            let tokens =
                if by_ids { open::read_ids(path)? } else { tokens_of(path, opened, left)? };
            let end = left.min(tokens.len());
            left -= end;
            texts.push(tokens[..end].to_vec());
        }
        Ok(texts)
    };
    let texts = take(if by_ids { &args.ids_file } else { &args.text_file })?;
    let held_out = take(&args.held_out)?;
    let vocab = opened.model.config.vocab;
    if let Some(token) = texts.iter().chain(&held_out).flatten().find(|token| **token >= vocab) {
        bail!("token id {token} is outside of the model's vocabulary of {vocab}");
    }
    Ok((texts, held_out))
}

/// Tokens of a file of text; of a long one the beginning, which is enough for so many.
fn tokens_of(path: &Path, opened: &OpenModel, most: usize) -> Result<Vec<u32>> {
    let name = path.display();
    let reading = || format!("reading text from {name}");
    let metadata = std::fs::metadata(path).with_context(reading)?;
    if !metadata.is_file() || metadata.len() > MAX_TEXT_BYTES {
        bail!("{name}: needed a regular file of text of at most {MAX_TEXT_BYTES} bytes");
    }
    let text = std::fs::read_to_string(path).with_context(reading)?;
    let end = text.floor_char_boundary(most.saturating_mul(BYTES_PER_TOKEN));
    Ok(opened.tokenizer.encode(&text[..end], Specials::AsText)?)
}

/// The file that was asked for, or the one that runs look for.
fn out_file(args: &FitArgs, opened: &OpenModel) -> Result<(OutputFile, PathBuf)> {
    let path = match &args.out {
        Some(path) => path.clone(),
        None => kept_path(opened).context(
            "neither $SAKIA_HOME nor $HOME is set, so there is no folder for it; name a file with -o",
        )?,
    };
    if args.out.is_none() {
        let folder = path.parent().expect("it is in a folder");
        std::fs::create_dir_all(folder)
            .with_context(|| format!("creating {}", folder.display()))?;
    }
    let mut inputs = opened.files();
    inputs.extend(args.text_file.iter().chain(&args.ids_file).chain(&args.held_out).cloned());
    Ok((output::create(&path, &inputs)?, path))
}

fn kept_path(opened: &OpenModel) -> Option<PathBuf> {
    hot::kept(opened, FOLDER)
}

fn table(found: &FitReport) -> String {
    let percent = |share: f64| format!("{:.1}", 100.0 * share);
    let mut text = String::from(
        "of the chosen experts, named by as many guesses (by twice as many), in percent; of the likelier half, right:\n\
         layer   rank  last token         tap              fitted       half: tap  fitted\n",
    );
    let mut line =
        |name: &str, rank: &str, row: (f64, &session::fit::Quality, &session::fit::Quality)| {
            let (last, tap, fitted) = row;
            let both = |q: &session::fit::Quality| {
                format!("{:>5} ({:>5})", percent(q.recall), percent(q.recall_of_twice))
            };
            let _ = writeln!(
                text,
                "{name:>5}  {rank:>5}  {:>10}  {:>16}  {:>16}  {:>9}  {:>6}",
                percent(last),
                both(tap),
                both(fitted),
                percent(tap.precision_of_half),
                percent(fitted.precision_of_half),
            );
        };
    for layer in &found.layers {
        let (name, rank) = (layer.layer.to_string(), layer.rank.to_string());
        line(&name, &rank, (layer.last_token, &layer.tap, &layer.fitted));
    }
    line("all", "", (found.last_token, &found.tap, &found.fitted));
    text
}

/// Loads what was fitted to this model into options, if flags ask for it. A kept file that is none or another's is said
/// to be ignored; one that was named has to be right.
///
/// # Errors
/// The named file cannot be used.
pub(crate) fn attach(
    speed: &SpeedArgs,
    opened: &OpenModel,
    options: &mut EngineOptions,
) -> Result<()> {
    if speed.lookahead != LookaheadKind::Fitted {
        if let Some(path) = &speed.lookahead_file {
            bail!("--lookahead-file {} goes with --lookahead fitted only", path.display());
        }
        return Ok(());
    }
    let config = &opened.model.config;
    let identity = hot_set::identity(opened);
    if let Some(path) = &speed.lookahead_file {
        let correction = read(path, identity, config).map_err(|why| {
            anyhow::anyhow!(
                "{} is not used: {why}\n\nhint: make one with `sakia fit-lookahead -o FILE`",
                path.display()
            )
        })?;
        options.correction = Some(Arc::new(correction));
        return Ok(());
    }
    let path = kept_path(opened).filter(|path| path.exists());
    match path.map(|path| (read(&path, identity, config), path)) {
        Some((Ok(correction), _)) => options.correction = Some(Arc::new(correction)),
        Some((Err(why), path)) => {
            let path = path.display();
            report::note(&format!("note: the fitted lookahead {path} is ignored: {why}"));
        }
        None => report::note(
            "note: nothing was fitted to this model; --lookahead fitted is --lookahead tap until `sakia fit-lookahead` was run",
        ),
    }
    Ok(())
}

fn read(path: &Path, identity: u64, config: &ModelConfig) -> Result<Correction, String> {
    let metadata = std::fs::metadata(path).map_err(|error| error.to_string())?;
    if !metadata.is_file() {
        return Err("it is no regular file".to_owned());
    }
    // One byte more than it may have tells one that is too long.
    let most = fitted::most_file_bytes(config) + 1;
    let mut bytes = Vec::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(most).read_to_end(&mut bytes));
    read.map_err(|error| error.to_string())?;
    fitted::decode(&bytes, identity, config).map_err(|error| error.to_string())
}

//! From flags to an engine.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use hub::Store;
use memory_plan::Budget;
use session::{Engine, EngineOptions, MirrorOptions, OpenModel, Reads, Unknown};

use crate::args::{MemoryArgs, ModelArgs, SpeedArgs};
use crate::{demo, report};

/// A model file and whether it is the demo.
pub(crate) struct Chosen {
    pub(crate) path: PathBuf,
    pub(crate) is_demo: bool,
}

/// `-m` (a path, or `org/name` of a pulled model), else `$SAKIA_MODEL`, else the demo model.
pub(crate) fn choose(args: &ModelArgs) -> Result<Chosen> {
    // An empty variable is one that is not set, as elsewhere.
    let variable = || std::env::var_os("SAKIA_MODEL").filter(|path| !path.is_empty());
    if let Some(path) = args.model.clone().or_else(|| variable().map(PathBuf::from)) {
        if path.as_os_str().is_empty() {
            bail!("-m is empty: needed the path of a model file");
        }
        return Ok(Chosen { path: find(path)?, is_demo: false });
    }
    match demo::find() {
        Some(path) => Ok(Chosen { path, is_demo: true }),
        None => bail!(
            "no model: the demo model is not beside this program\n\nhint: name one with `-m FILE` or `$SAKIA_MODEL`"
        ),
    }
}

/// A path that exists is taken as it is; else `org/name` is looked up in the store of pulled models.
fn find(path: PathBuf) -> Result<PathBuf> {
    let text = path.to_str().filter(|_| !path.exists());
    match text.map(str::parse::<hub::ModelName>) {
        Some(Ok(name)) => {
            Ok(Store::from_environment(&|name| std::env::var_os(name))?.locate(&name)?)
        }
        // Whoever opens it says what is wrong with it.
        Some(Err(_)) | None => Ok(path),
    }
}

/// Options of an engine for these flags.
pub(crate) fn options(
    chosen: &Chosen,
    memory: &MemoryArgs,
    speed: Option<&SpeedArgs>,
) -> Result<EngineOptions> {
    let demo_budget = chosen.is_demo && memory.memory.is_none();
    let wanted = if demo_budget { Some(demo::MEMORY) } else { memory.memory };
    let mut options =
        EngineOptions::new(Budget::detect(wanted).context("finding out how much memory there is")?);
    options.context = memory.context.or((demo_budget && wanted.is_some()).then_some(demo::CONTEXT));
    options.kv = memory.kv.into();
    options.slots = memory.slots;
    options.notice = Some(report::note);
    if let Some(speed) = speed {
        if let Some(threads) = speed.threads {
            options.threads = usize::from(threads);
        }
        options.pass_rows = speed.pass;
        options.policy = speed.policy.into();
        options.lookahead = speed.lookahead.into();
        options.sweep = !speed.no_sweep;
        options.direct = speed.direct.into();
        options.reads = speed.read_threads.map(|threads| Reads::with_threads(threads.into()));
        options.reader = speed.reader.into();
        let mirror = |folder: &PathBuf| MirrorOptions { folder: folder.clone(), faults: None };
        options.mirrors = speed.mirror.iter().map(mirror).collect();
        options.backend = speed.backend.into();
        options.activations = speed.activations.into();
    }
    Ok(options)
}

/// Reads headers and says what is odd about the file.
pub(crate) fn open(chosen: &Chosen) -> Result<OpenModel> {
    let opened = OpenModel::open(&chosen.path)?;
    let warnings = opened.checkpoint.warnings.iter().chain(&opened.model.warnings);
    for warning in warnings.chain(opened.tokenizer.warnings()) {
        report::note(&format!("warning: {warning}"));
    }
    Ok(opened)
}

/// Says what is odd about options for this model.
pub(crate) fn remark(opened: &OpenModel, options: &EngineOptions) {
    let made_for = opened.model.config.context_length;
    if let Some(context) = options.context
        && context > made_for
    {
        report::note(&format!(
            "warning: --context {context}: the model was made for {made_for} positions; beyond them its answers get worse"
        ));
    }
}

/// How the disk of this model is read, unless a flag says it: as remembered, or measured now.
pub(crate) fn find_reads(opened: &OpenModel, options: &mut EngineOptions, unknown: Unknown) {
    if options.reads.is_none() {
        // Without a home everything works, only nothing is remembered.
        let store = Store::from_environment(&|name| std::env::var_os(name)).ok();
        let folder = store.map(|store| store.root().join("disks"));
        let note = &mut |line: &str| report::note(line);
        options.reads = Some(opened.reads(options, folder.as_deref(), unknown, note));
    }
}

/// Plans and loads, with a bar on a terminal.
pub(crate) fn load(opened: OpenModel, mut options: EngineOptions) -> Result<Engine> {
    find_reads(&opened, &mut options, Unknown::Probe);
    remark(&opened, &options);
    for note in options.budget.notes() {
        report::note(&format!("note: {note}"));
    }
    let bar = report::load_bar(opened.load_bytes(&options));
    let engine = Engine::load(opened, options, &mut |bytes| bar.inc(bytes));
    bar.finish_and_clear();
    Ok(engine?)
}

/// Most bytes of a file of token ids: a million of seven digits and a separator.
const MAX_IDS_BYTES: u64 = 8 << 20;

/// Token ids of a file: numbers separated by space, comma or line.
pub(crate) fn read_ids(path: &Path) -> Result<Vec<u32>> {
    let name = path.display();
    let metadata = std::fs::metadata(path).with_context(|| format!("reading ids from {name}"))?;
    if !metadata.is_file() {
        bail!("{name} is not a regular file; a file of token ids is needed");
    }
    if metadata.len() > MAX_IDS_BYTES {
        bail!(
            "{name} has {} bytes; a file of token ids has at most {MAX_IDS_BYTES}",
            metadata.len()
        );
    }
    let text = std::fs::read_to_string(path).with_context(|| format!("reading ids from {name}"))?;
    ids(&text).map_err(|word| anyhow::anyhow!("`{word}` in {name} is not a token id"))
}

/// Numbers separated by space, comma or line; otherwise the start of the first word that is none.
pub(crate) fn ids(text: &str) -> Result<Vec<u32>, String> {
    const SHOWN: usize = 40;
    let words = text.split(|c: char| c.is_whitespace() || c == ',').filter(|word| !word.is_empty());
    let number = |word: &str| {
        word.parse().map_err(|_| {
            let mut shown: String = word.chars().take(SHOWN).collect();
            if shown.len() < word.len() {
                shown.push_str("...");
            }
            shown
        })
    };
    words.map(number).collect()
}

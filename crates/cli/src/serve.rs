//! `sakia serve`: models over HTTP.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail};
use hub::{ModelName, Store};
use server::{KeepAlive, LoadOptions, Loaded, ModelInfo, Shelf};
use session::scheduler::{DiskOptions, SchedulerOptions, Serving};
use session::{EngineOptions, OpenModel};
use units::Bytes;

use crate::args::ServeArgs;
use crate::open::Chosen;
use crate::{interrupt, lookahead, open, report, run};

/// What the demo model is served in: room for two conversations besides what streams.
const DEMO_MEMORY: Bytes = Bytes::mib(112);
/// Positions of each under that budget.
const DEMO_CONTEXT: u32 = 2048;

/// Memory for bodies and grammars when nothing is said: this share of all, within these bounds.
const REQUEST_SHARE: u64 = 32;
const REQUEST_MEMORY: std::ops::RangeInclusive<Bytes> = Bytes::mib(6)..=Bytes::mib(64);

pub(crate) fn run(args: &ServeArgs) -> Result<ExitCode> {
    let args = Arc::new(args.clone());
    let shelf = Arc::new(LocalShelf::new(&args)?);
    let default = shelf.own.name.clone();
    let (opened, engine) = shelf.prepare(&shelf.own.chosen)?;
    // What cannot be had is said now, and not to the first who asks.
    opened.plan(&engine)?;
    run::sampler(&args.sampling, &opened)?;
    if let Some(folder) = &args.prefix_disk {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("--prefix-disk {} is no folder", folder.display()))?;
    }
    interrupt::clear();
    interrupt::pressed();
    let options = options(&args, default, engine.budget.bytes)?;
    let key = options.api_key.is_some();
    let shown = Arc::clone(&shelf);
    server::serve(options, shelf, &interrupt::pressed, move |address| {
        report::data(&format!("http://{address}\n"));
        report::note(&format!(
            "serving {} at http://{address}/v1 (OpenAI), http://{address} (Anthropic, Ollama){}",
            shown.own.name,
            if key { ", with an API key" } else { "" }
        ));
    })?;
    Ok(ExitCode::SUCCESS)
}

fn request_memory(args: &ServeArgs, budget: Bytes) -> Bytes {
    let share = Bytes(budget.0 / REQUEST_SHARE);
    args.request_memory
        .unwrap_or_else(|| share.clamp(*REQUEST_MEMORY.start(), *REQUEST_MEMORY.end()))
}

fn options(args: &ServeArgs, default_model: String, budget: Bytes) -> Result<server::Options> {
    let from_env = || std::env::var("SAKIA_API_KEY").ok().filter(|key| !key.is_empty());
    Ok(server::Options {
        address: (args.host, args.port).into(),
        api_key: args.api_key.clone().or_else(from_env),
        allow_anyone: args.allow_anyone,
        cors_origins: args.cors_origin.clone(),
        times: server::Times::default(),
        max_body: usize::try_from(args.max_body.0).context("--max-body")?,
        request_memory: usize::try_from(request_memory(args, budget).0)
            .context("--request-memory")?,
        max_connections: usize::from(args.max_connections),
        keep_alive: match seconds(&args.keep_alive, "keep-alive")? {
            None => KeepAlive::Forever,
            Some(time) => KeepAlive::For(time),
        },
        idle_exit: match &args.idle_exit {
            None => None,
            Some(text) => seconds(text, "idle-exit")?,
        },
        default_model: Some(default_model),
        grace: seconds(&args.grace, "grace")?.unwrap_or(Duration::from_hours(1)),
        log: args.log_requests.then_some(report::note as fn(&str)),
    })
}

/// A time like `5m`; less than 0 is none, which is for ever.
fn seconds(text: &str, flag: &str) -> Result<Option<Duration>> {
    match server::duration_seconds(text) {
        Some(seconds) if seconds < 0.0 => Ok(None),
        Some(seconds) if seconds <= 3e9 => Ok(Some(Duration::from_secs_f64(seconds))),
        _ => bail!("--{flag} {text}: a time like 90s, 5m or 1h is needed, or -1 for ever"),
    }
}

/// The model that was named.
struct Own {
    name: String,
    chosen: Chosen,
    bytes: u64,
    modified: SystemTime,
}

/// Models of this machine: the one that was named, and those of the store.
struct LocalShelf {
    own: Own,
    store: Option<Store>,
    args: Arc<ServeArgs>,
}

impl LocalShelf {
    fn new(args: &Arc<ServeArgs>) -> Result<Self> {
        let store = Store::from_environment(&|name| std::env::var_os(name)).ok();
        let store = store.filter(|_| !args.only);
        let chosen = open::choose(&args.model)?;
        // A name of the store stays what it is.
        let named = args.model.model.as_ref().and_then(|model| model.to_str());
        let pulled = named.filter(|name| {
            name.parse::<ModelName>().is_ok() && !std::path::Path::new(name).exists()
        });
        let name = match (&args.name, pulled) {
            (Some(name), _) => name.clone(),
            (None, Some(name)) => name.to_owned(),
            (None, None) => {
                let stem = chosen.path.file_stem().unwrap_or_default();
                stem.to_string_lossy().into_owned()
            }
        };
        let files = OpenModel::open(&chosen.path)?.files();
        let about = files.iter().filter_map(|file| std::fs::metadata(file).ok());
        let (mut bytes, mut modified) = (0, SystemTime::UNIX_EPOCH);
        for file in about {
            bytes += file.len();
            modified = modified.max(file.modified().unwrap_or(modified));
        }
        let own = Own { name, chosen, bytes, modified };
        Ok(Self { own, store, args: Arc::clone(args) })
    }

    /// Headers, and the options of an engine.
    fn prepare(&self, chosen: &Chosen) -> Result<(OpenModel, EngineOptions)> {
        let args = &self.args;
        let mut memory = args.memory.clone();
        if chosen.is_demo && memory.memory.is_none() {
            memory.memory = Some(DEMO_MEMORY);
            memory.context = memory.context.or(Some(DEMO_CONTEXT));
        }
        let mut options = open::options(chosen, &memory, Some(&args.speed))?;
        options.serving = Serving {
            sequences: args.sequences.into(),
            queue: args.queue.into(),
            prefix: args.prefix_memory,
            requests: {
                let connections = server::connection_bytes(args.max_connections.into());
                request_memory(args, options.budget.bytes) + Bytes(connections as u64)
            },
        };
        let opened = open::open(chosen)?;
        lookahead::attach(&args.speed, &opened, &mut options)?;
        Ok((opened, options))
    }

    fn chosen(&self, name: &str) -> Result<Chosen> {
        if self.own.name == name {
            let Chosen { path, is_demo } = &self.own.chosen;
            return Ok(Chosen { path: path.clone(), is_demo: *is_demo });
        }
        let store = self.store.as_ref().context("there is no store of models")?;
        Ok(Chosen { path: store.locate(&name.parse()?)?, is_demo: false })
    }

    fn ready(&self, name: &str) -> Result<Loaded> {
        let (opened, mut engine) = self.prepare(&self.chosen(name)?)?;
        let sampler = run::sampler(&self.args.sampling, &opened)?;
        open::find_reads(&opened, &mut engine, session::Unknown::Probe);
        open::remark(&opened, &engine);
        let disk = self.args.prefix_disk.as_ref().map(|folder| DiskOptions {
            folder: folder.clone(),
            quota: self.args.prefix_disk_quota,
        });
        let scheduler =
            SchedulerOptions { disk, notice: Some(report::note), ..SchedulerOptions::default() };
        let patience = seconds(&self.args.patience, "patience")?;
        let bar = report::load_bar(opened.load_bytes(&engine));
        let options = LoadOptions { engine, scheduler, sampler: Some(sampler), patience };
        let loaded = server::load(opened, options, &mut |bytes| bar.inc(bytes));
        bar.finish_and_clear();
        Ok(loaded?)
    }
}

impl Shelf for LocalShelf {
    fn list(&self) -> Vec<ModelInfo> {
        let own = ModelInfo {
            name: self.own.name.clone(),
            bytes: self.own.bytes,
            modified: self.own.modified,
            digest: None,
        };
        let held = self.store.as_ref().and_then(|store| store.list().ok());
        let held = held.map(|(held, _)| held).unwrap_or_default();
        let others = held.into_iter().map(|held| ModelInfo {
            name: held.name,
            bytes: held.bytes.0,
            modified: held.modified,
            digest: held.digest,
        });
        let is_other = |info: &ModelInfo| self.own.name != info.name;
        std::iter::once(own).chain(others.filter(is_other)).collect()
    }

    fn load(&self, name: &str) -> Result<Loaded, String> {
        let loaded = self.ready(name).map_err(|error| format!("{error:#}"));
        if let Err(error) = &loaded {
            report::note(&format!("{name}: {error}"));
        }
        loaded
    }
}

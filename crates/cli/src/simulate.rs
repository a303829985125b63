//! `sakia simulate`: what pools of other sizes and policies would have read for recorded or made routing.

mod picture;

use std::fmt::Write as _;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::LazyLock;

use anyhow::{Context, Result, bail};
use clap::builder::PossibleValue;
use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use session::{MAX_TRACE_BYTES, Pace, Replay, ReplayPolicy, Synthetic, Tally, Trace, replay};
use units::Bytes;

use crate::args::Policy;
use crate::{output, report};

#[derive(Args)]
#[command(
    group = clap::ArgGroup::new("routing").required(true),
    after_help = "Examples:\n  \
        sakia simulate big.trace --slots 1200,2400 --policy clock,arc,belady\n  \
        sakia simulate --synthetic flash-next,tokens=200 --disk 3GB --layer-ms 2 --recall 0.7\n  \
        sakia simulate big.trace --curves curves.svg --heat-map heat.svg"
)]
pub(crate) struct SimulateArgs {
    /// Record of `sakia trace`
    #[arg(group = "routing", value_name = "TRACE")]
    pub(crate) trace: Option<PathBuf>,
    /// Made routing instead: olmoe, kimi-linear or flash-next, which have the skew and the reuse that was published of
    /// these models, then any of layers, experts, top-k, prompt, tokens, skew, reuse, drift, seed, record as KEY=VALUE
    #[arg(long, group = "routing", value_name = "NAME[,KEY=VALUE...]")]
    pub(crate) synthetic: Option<Made>,
    /// Pool sizes, in slots for any expert [default: eight from one token's experts to all]
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    pub(crate) slots: Vec<u32>,
    /// Who decides which expert leaves [default: all of them]
    #[arg(long, value_enum, value_name = "POLICY,...", value_delimiter = ',')]
    pub(crate) policy: Vec<Who>,
    /// Bytes a second of the disk: adds an estimate of the time that a token waits
    #[arg(long, value_name = "SIZE", help_heading = "Time", requires = "layer_ms")]
    pub(crate) disk: Option<Bytes>,
    /// Milliseconds to compute one layer for one token
    #[arg(long, value_name = "MS", help_heading = "Time", requires = "disk")]
    pub(crate) layer_ms: Option<f64>,
    /// What a forecast one layer ahead would be worth that names this share of the missing experts
    #[arg(long, value_name = "SHARE", help_heading = "Time", requires = "disk")]
    pub(crate) recall: Option<f64>,
    /// Draw megabytes a token over slots, a line for each policy, as SVG
    #[arg(long, value_name = "FILE", help_heading = "Pictures")]
    pub(crate) curves: Option<PathBuf>,
    /// Draw how often each expert of each layer was chosen, as SVG
    #[arg(long, value_name = "FILE", help_heading = "Pictures")]
    pub(crate) heat_map: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Who decides which expert leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Who {
    /// One of the engine's.
    Online(Policy),
    /// Knows the future.
    Belady,
}

impl ValueEnum for Who {
    fn value_variants<'a>() -> &'a [Self] {
        static ALL: LazyLock<Vec<Who>> = LazyLock::new(|| {
            let online = Policy::value_variants().iter().copied().map(Who::Online);
            online.chain([Who::Belady]).collect()
        });
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        match self {
            Self::Online(policy) => policy.to_possible_value(),
            Self::Belady => Some(PossibleValue::new("belady").help("Knows the future: the bound")),
        }
    }
}

impl Who {
    fn policy(self) -> ReplayPolicy {
        match self {
            Self::Online(policy) => ReplayPolicy::Online(policy.into()),
            Self::Belady => ReplayPolicy::Belady,
        }
    }

    fn name(self) -> String {
        let value = self.to_possible_value().expect("no policy is hidden");
        value.get_name().to_owned()
    }
}

/// What made routing is made of.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Made(Synthetic);

impl Made {
    /// The routing.
    pub(crate) fn trace(&self) -> Result<Trace> {
        Ok(self.0.trace()?)
    }
}

impl FromStr for Made {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, settings) = text.split_once(',').unwrap_or((text, ""));
        let mut of = Synthetic::like(name).ok_or_else(|| {
            format!("there is no `{name}`; {} are there", Synthetic::NAMES.join(", "))
        })?;
        for setting in settings.split(',').filter(|setting| !setting.is_empty()) {
            let (key, value) = setting.split_once('=').ok_or(format!("`{setting}` has no `=`"))?;
            set(&mut of, key, value).map_err(|why| format!("`{setting}`: {why}"))?;
        }
        of.check().map_err(|error| error.to_string())?;
        Ok(Self(of))
    }
}

fn set(of: &mut Synthetic, key: &str, value: &str) -> Result<(), String> {
    fn parse<T: FromStr<Err: std::fmt::Display>>(value: &str) -> Result<T, String> {
        value.parse().map_err(|error: T::Err| error.to_string())
    }
    match key {
        "layers" => of.layers = parse(value)?,
        "experts" => of.experts = parse(value)?,
        "top-k" => of.top_k = parse(value)?,
        "prompt" => of.prompt = parse(value)?,
        "tokens" => of.tokens = parse(value)?,
        "skew" => of.skew = parse(value)?,
        "reuse" => of.reuse = parse(value)?,
        "drift" => of.drift = parse(value)?,
        "seed" => of.seed = parse(value)?,
        "record" => of.record_bytes = parse::<Bytes>(value)?.0,
        _ => {
            let keys =
                "layers, experts, top-k, prompt, tokens, skew, reuse, drift, seed and record";
            return Err(format!("there is no such key; there are {keys}"));
        }
    }
    Ok(())
}

/// One pool.
pub(crate) struct Run {
    slots: u32,
    who: Who,
    replay: Replay,
    /// Seconds that a token waits: without a forecast, and with one.
    stall: Option<(f64, Option<f64>)>,
}

pub(crate) fn run(args: &SimulateArgs) -> Result<ExitCode> {
    let pace = pace(args)?;
    let trace = match (&args.trace, &args.synthetic) {
        (Some(file), _) => read(file).with_context(|| format!("reading {}", file.display()))?,
        (None, Some(made)) => made.trace()?,
        (None, None) => unreachable!("clap requires one of the two"),
    };
    let slots = if args.slots.is_empty() { usual_slots(&trace) } else { args.slots.clone() };
    let policies = if args.policy.is_empty() { Who::value_variants() } else { &args.policy[..] };
    // What cannot be written is said before anything is computed.
    let inputs: Vec<PathBuf> = args.trace.iter().cloned().collect();
    let create = |target: &Option<PathBuf>| {
        target.as_ref().map(|target| output::create(target, &inputs)).transpose()
    };
    let (curves, heat_map) = (create(&args.curves)?, create(&args.heat_map)?);
    let bar = report::count_bar((slots.len() * policies.len()) as u64, "pools");
    let mut runs = Vec::new();
    for slots in slots {
        for who in policies {
            let replay = replay(&trace, slots, who.policy())?;
            let stall = pace.map(|pace| {
                let of = |recall| replay.stall_seconds(pace, recall);
                (of(0.0), args.recall.map(of))
            });
            runs.push(Run { slots, who: *who, replay, stall });
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    for (file, path, svg) in [
        (curves, &args.curves, picture::curves as fn(&Trace, &[Run]) -> Result<String>),
        (heat_map, &args.heat_map, |trace, _| picture::heat_map(trace)),
    ] {
        if let (Some(mut file), Some(path)) = (file, path) {
            let svg = svg(&trace, &runs)?;
            let written = file.write_all(svg.as_bytes()).and_then(|()| file.finish());
            written.with_context(|| format!("writing {}", path.display()))?;
        }
    }
    if args.json {
        report::data(&format!("{:#}\n", as_json(&trace, &runs)));
    } else {
        report::text(&as_table(&trace, &runs));
    }
    Ok(ExitCode::SUCCESS)
}

fn pace(args: &SimulateArgs) -> Result<Option<Pace>> {
    let (Some(disk), Some(layer_ms)) = (args.disk, args.layer_ms) else { return Ok(None) };
    if disk.0 == 0 {
        bail!("--disk {disk}: a disk gives at least one byte a second");
    }
    if !(0.0..=1e6).contains(&layer_ms) {
        bail!("--layer-ms {layer_ms}: needed 0 to 1,000,000");
    }
    if let Some(recall) = args.recall.filter(|recall| !(0.0..=1.0).contains(recall)) {
        bail!("--recall {recall}: a share is 0 to 1");
    }
    Ok(Some(Pace { bytes_per_second: disk.0 as f64, layer_seconds: layer_ms / 1e3 }))
}

/// From one token's experts to all experts, closer together where pools are small.
fn usual_slots(trace: &Trace) -> Vec<u32> {
    let [layers, experts, top_k] = trace.shape();
    let all = layers * experts;
    let shares = [16, 8, 5, 4, 3, 2].map(|part| all / part);
    let mut slots: Vec<u32> = [layers * top_k].into_iter().chain(shares).chain([all]).collect();
    slots.retain(|slots| *slots > top_k);
    slots.sort_unstable();
    slots.dedup();
    slots
}

/// A recorded trace.
pub(crate) fn read(path: &Path) -> Result<Trace> {
    let metadata = std::fs::metadata(path)?;
    if !metadata.is_file() {
        bail!("it is not a regular file; a file of `sakia trace -o` is needed");
    }
    if metadata.len() > MAX_TRACE_BYTES {
        bail!("it has {} bytes; a trace has at most {MAX_TRACE_BYTES}", metadata.len());
    }
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_TRACE_BYTES + 1).read_to_end(&mut bytes)?;
    Ok(Trace::decode(&bytes)?)
}

fn as_table(trace: &Trace, runs: &[Run]) -> String {
    let ([layers, experts, top_k], [prompt, decoded]) = (trace.shape(), trace.tokens());
    let mut text = format!(
        "{layers} layers of {experts} experts, {top_k} a token; {prompt} tokens of prompts, {decoded} decoded\n\
         {:>7} {:>6}  {:<9} {:>12} {:>12} {:>12} {:>12}",
        "slots", "of all", "policy", "decode: hits", "MB a token", "prompt: hits", "MB a token"
    );
    if runs.iter().any(|run| run.stall.is_some()) {
        text.push_str("  ms a token waits");
    }
    text.push('\n');
    for Run { slots, who, replay, stall } in runs {
        let share = 100.0 * f64::from(*slots) / (f64::from(layers) * f64::from(experts));
        let hits = |tally: &Tally| format!("{:.1} %", 100.0 * tally.hit_rate());
        let megabytes = |tally: &Tally| format!("{:.3}", tally.bytes_per_token() / 1e6);
        let Replay { prefill, decode, .. } = replay;
        let _ = write!(
            text,
            "{slots:>7} {:>6}  {:<9} {:>12} {:>12} {:>12} {:>12}",
            format!("{share:.0} %"),
            who.name(),
            hits(decode),
            megabytes(decode),
            hits(prefill),
            megabytes(prefill),
        );
        if let Some((alone, forecast)) = stall {
            let _ = write!(text, "  {:.1}", 1e3 * alone);
            if let Some(forecast) = forecast {
                let _ = write!(text, ", {:.1} with the forecast", 1e3 * forecast);
            }
        }
        text.push('\n');
    }
    text
}

fn as_json(trace: &Trace, runs: &[Run]) -> Value {
    let ([layers, experts, top_k], [prompt, decoded]) = (trace.shape(), trace.tokens());
    let tally = |tally: &Tally| {
        let Tally { tokens, lookups, misses, bytes } = *tally;
        json!({
            "tokens": tokens, "lookups": lookups, "misses": misses, "read_bytes": bytes,
            "hit_rate": tally.hit_rate(), "read_bytes_per_token": tally.bytes_per_token(),
        })
    };
    let replays: Vec<Value> = runs
        .iter()
        .map(|Run { slots, who, replay, stall }| {
            let mut value = json!({
                "slots": slots, "policy": who.name(),
                "prefill": tally(&replay.prefill), "decode": tally(&replay.decode),
            });
            if let Some((alone, forecast)) = stall {
                value["stall_us_per_token"] = json!(1e6 * alone);
                if let Some(forecast) = forecast {
                    value["stall_us_per_token_with_forecast"] = json!(1e6 * forecast);
                }
            }
            value
        })
        .collect();
    json!({
        "layers": layers, "experts": experts, "top_k": top_k,
        "prompt_tokens": prompt, "decode_tokens": decoded, "replays": replays,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn made_routing_is_named_and_changed() {
        let made: Made = "olmoe,tokens=5,skew=0.5,record=1MiB".parse().unwrap();
        let like = Synthetic::like("olmoe").unwrap();
        assert_eq!(made.0, Synthetic { tokens: 5, skew: 0.5, record_bytes: 1 << 20, ..like });
        for (text, words) in [
            ("x", "kimi-linear"),
            ("olmoe,tokens", "no `=`"),
            ("olmoe,tokens=-1", "tokens=-1"),
            ("olmoe,speed=1", "no such key"),
            ("olmoe,reuse=2", "reuse is 2"),
        ] {
            let error = text.parse::<Made>().unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn usual_pools_are_in_order_and_possible() {
        for name in Synthetic::NAMES {
            let trace = Synthetic { tokens: 1, ..Synthetic::like(name).unwrap() }.trace().unwrap();
            let slots = usual_slots(&trace);
            let [layers, experts, top_k] = trace.shape();
            assert!(
                slots.is_sorted() && slots[0] > top_k && slots.last() == Some(&(layers * experts))
            );
        }
    }
}

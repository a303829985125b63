//! `sakia trace`: which experts tokens choose, and what other pools would have read for them.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{Read, Write};
use std::ops::ControlFlow;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use model::RouteLog;
use serde_json::{Value, json};
use session::{
    Engine, Forced, Limits, MAX_TRACE_BYTES, OpenModel, Prompt, Replay, Sampler, SamplerConfig,
    Sequence, Specials, Tally, Trace, generate, replay,
};

use crate::args::{Kv, MemoryArgs, TraceArgs, TracePolicy};
use crate::{open, output, report};

pub(crate) fn run(args: &TraceArgs) -> Result<ExitCode> {
    match (&args.replay, &args.out) {
        (Some(file), _) => replay_all(args, file),
        (None, Some(out)) => record(args, out),
        (None, None) => unreachable!("clap requires one of the two"),
    }
}

/// Tokens of a prompt, and those that are decoded whatever the model says; none: the likeliest are.
struct Text {
    prompt: Vec<u32>,
    forced: Option<Vec<u32>>,
}

fn record(args: &TraceArgs, out: &Path) -> Result<ExitCode> {
    let chosen = open::choose(&args.model)?;
    let memory = MemoryArgs { memory: args.memory, context: None, kv: Kv::F16, slots: None };
    let mut options = open::options(&chosen, &memory, None)?;
    let opened = open::open(&chosen)?;
    let text = text(args, &opened)?;
    let tokens = text.prompt.len().saturating_add(args.decode_tokens);
    options.context = Some(u32::try_from(tokens).context("so many tokens fit in no context")?);
    // What cannot be written is said before gigabytes are loaded.
    let mut inputs = opened.files();
    inputs.extend(args.ids_file.clone());
    let mut file = output::create(out, &inputs)?;
    let mut engine = open::load(opened, options)?;
    let config = engine.network.config();
    engine.network.routes = Some(RouteLog::new(config.n_layers as usize, config.top_k as usize));
    run_text(&mut engine, &text, args.decode_tokens)?;
    let trace = Trace::of(&engine);
    file.write_all(&trace.encode())
        .and_then(|()| file.finish())
        .with_context(|| format!("writing {}", out.display()))?;
    let [prompt, decoded] = trace.tokens();
    if args.json {
        let [layers, experts, top_k] = trace.shape();
        let value = json!({
            "layers": layers, "experts": experts, "top_k": top_k,
            "prompt_tokens": prompt, "decode_tokens": decoded,
        });
        report::data(&format!("{value:#}\n"));
    }
    report::note(&format!("{prompt} tokens of a prompt, {decoded} decoded: {}", out.display()));
    Ok(ExitCode::SUCCESS)
}

fn text(args: &TraceArgs, opened: &OpenModel) -> Result<Text> {
    let Some(path) = &args.ids_file else {
        let text = args.prompt.as_deref().expect("clap requires a text or ids");
        let prompt = opened.tokenizer.encode(text, Specials::Parse)?;
        if prompt.is_empty() {
            bail!("the text is empty");
        }
        return Ok(Text { prompt, forced: None });
    };
    let ids = open::read_ids(path)?;
    let decode = args.decode_tokens;
    let prompt = args.prompt_tokens.unwrap_or_else(|| ids.len().saturating_sub(decode));
    if prompt == 0 || ids.len() < prompt.saturating_add(decode) {
        bail!(
            "{} holds {} ids; -p {prompt} -n {decode} needs at least one for the prompt, and {} in all",
            path.display(),
            ids.len(),
            prompt.max(1).saturating_add(decode)
        );
    }
    let forced = ids[prompt..prompt + decode].to_vec();
    Ok(Text { prompt: ids[..prompt].to_vec(), forced: Some(forced) })
}

fn run_text(engine: &mut Engine, text: &Text, decode_tokens: usize) -> Result<()> {
    let pass_rows = engine.plan.pass_rows as usize;
    let mut sequence = Sequence::open(&mut engine.network)?;
    if let Some(forced) = &text.forced {
        let run = Forced { prompt: &text.prompt, forced, pass_rows };
        run.run(&mut engine.network, &mut sequence)?;
        return Ok(());
    }
    let mut sampler = Sampler::new(SamplerConfig { temperature: 0.0, ..Default::default() })?;
    let prompt = Prompt::new(&text.prompt, pass_rows);
    // The last sampled token is not run.
    let limits = Limits {
        max_tokens: decode_tokens.saturating_add(1),
        end_tokens: engine.tokenizer.end_tokens(),
    };
    let on_token = &mut |_| ControlFlow::Continue(());
    generate(&mut engine.network, &mut sequence, &prompt, &mut sampler, &limits, on_token)?;
    Ok(())
}

fn replay_all(args: &TraceArgs, file: &Path) -> Result<ExitCode> {
    let trace = read(file).with_context(|| format!("reading {}", file.display()))?;
    let policies =
        if args.policy.is_empty() { TracePolicy::value_variants() } else { &args.policy[..] };
    let mut replays = Vec::new();
    for slots in &args.slots {
        for policy in policies {
            replays.push((*slots, *policy, replay(&trace, *slots, (*policy).into())?));
        }
    }
    if args.json {
        report::data(&format!("{:#}\n", as_json(&trace, &replays)));
    } else {
        report::text(&as_table(&trace, &replays));
    }
    Ok(ExitCode::SUCCESS)
}

fn read(path: &Path) -> Result<Trace> {
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

fn name(policy: TracePolicy) -> String {
    let value = policy.to_possible_value().expect("no policy is hidden");
    value.get_name().to_owned()
}

fn as_table(trace: &Trace, replays: &[(u32, TracePolicy, Replay)]) -> String {
    let ([layers, experts, top_k], [prompt, decoded]) = (trace.shape(), trace.tokens());
    let mut text = format!(
        "{layers} layers of {experts} experts, {top_k} a token; {prompt} tokens of prompts, {decoded} decoded\n\
         {:>7} {:>6}  {:<7} {:>12} {:>12} {:>12} {:>12}\n",
        "slots", "of all", "policy", "decode: hits", "MB a token", "prompt: hits", "MB a token"
    );
    for (slots, policy, replay) in replays {
        let share = 100.0 * f64::from(*slots) / (f64::from(layers) * f64::from(experts));
        let hits = |tally: &Tally| format!("{:.1} %", 100.0 * tally.hit_rate());
        let megabytes = |tally: &Tally| format!("{:.3}", tally.bytes_per_token() / 1e6);
        let Replay { prefill, decode } = replay;
        let _ = writeln!(
            text,
            "{slots:>7} {:>6}  {:<7} {:>12} {:>12} {:>12} {:>12}",
            format!("{share:.0} %"),
            name(*policy),
            hits(decode),
            megabytes(decode),
            hits(prefill),
            megabytes(prefill),
        );
    }
    text
}

fn as_json(trace: &Trace, replays: &[(u32, TracePolicy, Replay)]) -> Value {
    let ([layers, experts, top_k], [prompt, decoded]) = (trace.shape(), trace.tokens());
    let tally = |tally: &Tally| {
        let Tally { tokens, lookups, misses, bytes } = *tally;
        json!({
            "tokens": tokens, "lookups": lookups, "misses": misses, "read_bytes": bytes,
            "hit_rate": tally.hit_rate(), "read_bytes_per_token": tally.bytes_per_token(),
        })
    };
    let replays: Vec<Value> = replays
        .iter()
        .map(|(slots, policy, replay)| {
            json!({
                "slots": slots, "policy": name(*policy),
                "prefill": tally(&replay.prefill), "decode": tally(&replay.decode),
            })
        })
        .collect();
    json!({
        "layers": layers, "experts": experts, "top_k": top_k,
        "prompt_tokens": prompt, "decode_tokens": decoded, "replays": replays,
    })
}

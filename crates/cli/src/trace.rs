//! `sakia trace`: which experts tokens choose.

use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use model::RouteLog;
use serde_json::json;
use session::{
    Engine, Forced, Limits, OpenModel, Prompt, Sampler, SamplerConfig, Sequence, Specials, Trace,
    generate,
};

use crate::args::{Kv, MemoryArgs, TraceArgs};
use crate::{open, output, report};

/// Tokens of a prompt, and those that are decoded whatever the model says; none: the likeliest are.
struct Text {
    prompt: Vec<u32>,
    forced: Option<Vec<u32>>,
}

pub(crate) fn run(args: &TraceArgs) -> Result<ExitCode> {
    crate::interrupt::quit_at_once();
    let out: &Path = &args.out;
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

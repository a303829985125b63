//! `sakia run`: one answer, or a chat.

use std::io::{IsTerminal, Read};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use session::SamplerConfig;

use crate::args::{RunArgs, SamplingArgs};
use crate::chat::Chat;
use crate::{open, report};

pub(crate) fn run(args: &RunArgs) -> Result<ExitCode> {
    let chosen = open::choose(&args.model)?;
    let options = open::options(&chosen, &args.memory, Some(&args.speed))?;
    if chosen.is_demo && args.memory.memory.is_none() {
        let budget = options.budget.bytes;
        report::note(&format!(
            "demo model in {budget}: fewer than half of its experts fit, so it streams"
        ));
    }
    // A prompt that cannot be had is said before anything is loaded.
    let prompt = match &args.prompt {
        Some(text) => Some(text_or_stdin(text)?),
        None if std::io::stdin().is_terminal() => None,
        None => Some(text_or_stdin("-")?),
    };
    let opened = open::open(&chosen)?;
    let sampler =
        sampling(&args.sampling, &SamplerConfig::from_metadata(&opened.checkpoint.metadata));
    sampler.check()?;
    // Text that the tokenizer cannot read is refused before gigabytes are loaded.
    opened.tokenizer.encode(prompt.as_deref().unwrap_or_default(), session::Specials::Parse)?;
    let mut chat = Chat::open(open::load(opened, options)?, args, sampler)?;
    match prompt {
        Some(text) => chat.answer(&text),
        None => chat.talk(),
    }?;
    if let Some(path) = &args.receipt {
        chat.write_receipt(path)?;
    }
    Ok(if crate::interrupt::pressed() { ExitCode::from(130) } else { ExitCode::SUCCESS })
}

/// The text itself, or stdin for `-`.
pub(crate) fn text_or_stdin(text: &str) -> Result<String> {
    if text != "-" {
        return Ok(text.to_owned());
    }
    let mut text = String::new();
    std::io::stdin().lock().read_to_string(&mut text).context("reading the text from stdin")?;
    let trimmed = text.trim_end_matches(['\n', '\r']);
    if trimmed.is_empty() {
        bail!("stdin holds no text");
    }
    Ok(trimmed.to_owned())
}

/// Flags over the file's own settings.
fn sampling(args: &SamplingArgs, file: &SamplerConfig) -> SamplerConfig {
    SamplerConfig {
        temperature: args.temperature.unwrap_or(file.temperature),
        top_k: args.top_k.map_or(file.top_k, |k| k as usize),
        top_p: args.top_p.unwrap_or(file.top_p),
        min_p: args.min_p.unwrap_or(file.min_p),
        repeat_penalty: args.repeat_penalty.unwrap_or(file.repeat_penalty),
        presence_penalty: args.presence_penalty.unwrap_or(file.presence_penalty),
        frequency_penalty: args.frequency_penalty.unwrap_or(file.frequency_penalty),
        seed: args.seed.unwrap_or_else(seed_from_clock),
    }
}

fn seed_from_clock() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |since| since.as_nanos() as u64)
}

//! `sakia run`: one answer, or a chat.

use std::io::{IsTerminal, Read};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use session::{EngineOptions, OpenModel, SamplerConfig};

use crate::args::{RunArgs, SamplingArgs};
use crate::chat::Chat;
use crate::hot::HotFile;
use crate::{lookahead, open, output, report};

pub(crate) fn run(args: &RunArgs) -> Result<ExitCode> {
    let chosen = open::choose(&args.model)?;
    let mut options = open::options(&chosen, &args.memory, Some(&args.speed))?;
    options.hot_set = !args.no_hot_set;
    if chosen.is_demo && args.memory.memory.is_none() {
        let budget = options.budget.bytes;
        report::note(&format!(
            "demo model in {budget}: fewer than half of its experts fit, so it streams"
        ));
    }
    let opened = open::open(&chosen)?;
    lookahead::attach(&args.speed, &opened, &mut options)?;
    options.speculation = args.speculation.options(opened.model.draft.is_some());
    // What cannot be had is said before gigabytes are loaded: the prompt, settings, the receipt's file.
    let most = longest_text(&opened, &options);
    let prompt = match &args.prompt {
        Some(text) => Some(text_or_stdin(text, most)?),
        None if std::io::stdin().is_terminal() => None,
        None => Some(text_or_stdin("-", most)?),
    };
    if let Some(text) = &prompt {
        opened.tokenizer.encode(text, session::Specials::Parse)?;
    }
    let sampler = sampler(&args.sampling, &opened)?;
    let receipt = match &args.receipt {
        Some(path) => Some((path, output::create(path, &opened.files())?)),
        None => None,
    };
    let hot = if options.hot_set { HotFile::of(&opened) } else { None };
    let mut chat = Chat::open(open::load(opened, options)?, args, sampler, hot)?;
    let outcome = match prompt {
        Some(text) => chat.answer(&text),
        None => chat.talk(),
    };
    chat.keep_hot_set();
    outcome?;
    if let Some((path, file)) = receipt {
        chat.write_receipt(path, file)?;
    }
    Ok(if crate::interrupt::pressed() { ExitCode::from(130) } else { ExitCode::SUCCESS })
}

/// Composition to NFC makes a text shorter, at most by this.
const COMPOSED: u64 = 4;

/// Bytes that no text has which fits in the context: as many of the longest token.
fn longest_text(opened: &OpenModel, options: &EngineOptions) -> usize {
    let longest = opened.tokenizer.longest_token().max(1);
    opened
        .context(options)
        .saturating_mul(COMPOSED * longest as u64)
        .try_into()
        .unwrap_or(usize::MAX)
}

/// The text itself, or stdin for `-`; no more than `most` bytes, so that a pipe without end is an error and not the
/// end of memory.
pub(crate) fn text_or_stdin(text: &str, most: usize) -> Result<String> {
    let too_long = |found: String| {
        anyhow::anyhow!(
            "the text has {found} bytes and at most {most} can fit in the context\n\nhint: shorten it or reserve more with `--context`"
        )
    };
    if text != "-" {
        return if text.len() > most {
            Err(too_long(text.len().to_string()))
        } else {
            Ok(text.to_owned())
        };
    }
    let mut text = Vec::new();
    let mut stdin = std::io::stdin().lock().take(most as u64 + 1);
    stdin.read_to_end(&mut text).context("reading the text from stdin")?;
    if text.len() > most {
        return Err(too_long(format!("more than {most}")));
    }
    let text = String::from_utf8(text).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        anyhow::anyhow!("the text on stdin is not UTF-8: byte {at} begins no character")
    })?;
    let trimmed = text.trim_end_matches(['\n', '\r']);
    if trimmed.is_empty() {
        bail!("stdin holds no text");
    }
    Ok(trimmed.to_owned())
}

/// Flags over the file's own settings, both checked.
pub(crate) fn sampler(args: &SamplingArgs, opened: &OpenModel) -> Result<SamplerConfig> {
    let file = SamplerConfig::from_metadata(&opened.checkpoint.metadata);
    let chosen = sampling(args, &file);
    // A setting of the file that no flag replaces is the file's fault.
    if sampling(args, &SamplerConfig::default()).check().is_ok() {
        chosen.check().with_context(|| {
            format!("{} brings a setting that makes no sense; give the flag", opened.path.display())
        })?;
    }
    chosen.check()?;
    Ok(chosen)
}

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

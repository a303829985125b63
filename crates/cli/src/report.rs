//! What goes to the terminal: errors, notes, the line after an answer.
#![allow(clippy::print_stdout, reason = "this is the one place that prints")]

use std::fmt::Write as _;
use std::io::{IsTerminal, Write};

use anyhow::Error;
use checkpoint::CheckpointError;
use hub::HubError;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use session::{EngineError, Receipt};
use units::Bytes;

/// Prints data.
pub(crate) fn data(text: &str) {
    print!("{text}");
    flush();
}

/// Pushes streamed text out. A closed pipe ends the program quietly, as it does for other filters.
pub(crate) fn flush() {
    if let Err(error) = std::io::stdout().flush()
        && error.kind() == std::io::ErrorKind::BrokenPipe
    {
        std::process::exit(0);
    }
}

/// Prints a remark that is not data.
pub(crate) fn note(text: &str) {
    eprintln!("{text}");
}

/// `error: …` with its causes.
pub(crate) fn error(error: &Error) {
    let mut text = format!("error: {error}");
    for cause in error.chain().skip(1) {
        let cause = cause.to_string();
        // A transparent wrapper repeats its source word for word.
        if !text.contains(&cause) {
            let _ = write!(text, ": {cause}");
        }
    }
    note(&text);
}

/// `{"error": {"class", "message"}}` on stdout.
pub(crate) fn json_error(error: &Error) {
    let value =
        serde_json::json!({ "error": { "class": class(error), "message": error.to_string() } });
    data(&format!("{value:#}\n"));
}

/// The class of an error in the words of the checkpoint reader or of the hub; anything else is `config`.
fn class(error: &Error) -> String {
    let checkpoint = error.chain().find_map(|cause| {
        cause.downcast_ref::<CheckpointError>().or_else(|| {
            match cause.downcast_ref::<EngineError>() {
                Some(EngineError::Checkpoint(inner)) => Some(inner),
                _ => None,
            }
        })
    });
    if let Some(checkpoint) = checkpoint {
        return checkpoint.class().to_string();
    }
    if let Some(hub) = error.chain().find_map(|cause| cause.downcast_ref::<HubError>()) {
        return hub.class().to_owned();
    }
    let engine = error.chain().find_map(|cause| cause.downcast_ref::<EngineError>());
    match engine {
        Some(EngineError::Plan(_) | EngineError::Pool(_)) => "limit",
        Some(EngineError::Store(_) | EngineError::Load(_)) => "io",
        _ => "config",
    }
    .to_owned()
}

/// A bar over the bytes of a load, on a terminal only.
pub(crate) fn load_bar(total: u64) -> ProgressBar {
    let bar = ProgressBar::new(total);
    bar.set_draw_target(if std::io::stderr().is_terminal() {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    });
    let style = ProgressStyle::with_template(
        "loading {bar:30} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec}",
    );
    bar.set_style(style.expect("the template is well formed"));
    bar
}

/// A bar over the bytes of a download, with rate and time left, on a terminal only.
pub(crate) fn pull_bar(total: u64) -> ProgressBar {
    let bar = ProgressBar::new(total);
    bar.set_draw_target(if std::io::stderr().is_terminal() {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    });
    let style = ProgressStyle::with_template(
        "{bar:30} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec}, {eta} left {wide_msg}",
    );
    bar.set_style(style.expect("the template is well formed"));
    bar
}

/// A bar over the tokens of a prompt, on a terminal only.
pub(crate) fn prompt_bar(total: usize) -> ProgressBar {
    let bar = ProgressBar::new(total as u64);
    bar.set_draw_target(if std::io::stderr().is_terminal() {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    });
    let style =
        ProgressStyle::with_template("reading the prompt {bar:30} {pos}/{len} tokens {per_sec}");
    bar.set_style(style.expect("the template is well formed"));
    bar
}

/// The line after an answer.
pub(crate) fn summary(receipt: &Receipt) -> String {
    let (prefill, decode) = (&receipt.prefill, &receipt.decode);
    let lookups = prefill.lookups + decode.lookups;
    let hits = prefill.hits + decode.hits;
    let hit_rate = if lookups == 0 { 0.0 } else { 100.0 * hits as f64 / lookups as f64 };
    format!(
        "[prefill {:.1} tok/s ({} tokens), decode {:.2} tok/s ({} tokens) | {:.0} % hits: {hits} hits, {} misses, {} read | \
         decode: {:.0} % hits, {:.2} MB a token, {:.0} % waiting, {:.1} ms a token without | peak {} of {}, {} B written]",
        prefill.tokens_per_second,
        prefill.tokens,
        decode.tokens_per_second,
        decode.tokens,
        hit_rate,
        prefill.misses + decode.misses,
        Bytes(prefill.read_bytes + decode.read_bytes),
        100.0 * decode.hit_rate,
        decode.read_bytes_per_token / 1e6,
        100.0 * decode.wait_share(),
        decode.compute_ms_per_token(),
        Bytes(receipt.peak_rss_bytes),
        Bytes(receipt.budget_bytes),
        receipt.written_bytes,
    )
}

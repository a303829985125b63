//! What goes to the terminal: errors, notes, the line after an answer.

use std::fmt::Write as _;
use std::io::Write;
use std::path::Path;

use anyhow::Error;
use checkpoint::CheckpointError;
use hub::HubError;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use prepare::PrepareError;
use session::{EngineError, Receipt, SpeculationCounters};
use units::Bytes;

/// Prints data at once. A closed pipe ends the program quietly, as it does for other filters; data that cannot be
/// written otherwise is an error that nothing can be done about.
pub(crate) fn data(text: &str) {
    let mut out = std::io::stdout().lock();
    if let Err(error) = out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        if error.kind() == std::io::ErrorKind::BrokenPipe {
            std::process::exit(0);
        }
        note(&format!("error: writing to stdout: {error}"));
        std::process::exit(1);
    }
}

/// Prints data for people, in which names from files and paths are shown, not obeyed. JSON has its own escapes.
pub(crate) fn text(text: &str) {
    data(&visible(text));
}

/// Prints a remark that is not data. What came from a file may hold control characters, which a terminal would obey:
/// they are shown, not sent.
pub(crate) fn note(text: &str) {
    // With stderr closed there is nobody to tell.
    let _ = writeln!(std::io::stderr(), "{}", visible(text));
}

/// Control characters other than line ends and tabs, and those that turn the direction of writing, as escapes.
fn visible(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        let turns = matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        if turns || c.is_control() && c != '\n' && c != '\t' {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
    }
    out
}

/// `1 file`, `2 files`.
pub(crate) fn count(n: usize, thing: &str) -> String {
    if n == 1 { format!("1 {thing}") } else { format!("{n} {thing}s") }
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
    if let Some(prepare) = error.chain().find_map(|cause| cause.downcast_ref::<PrepareError>()) {
        return prepare.class();
    }
    let engine = error.chain().find_map(|cause| cause.downcast_ref::<EngineError>());
    match engine {
        Some(EngineError::Plan(_) | EngineError::Pool(_)) => "limit",
        Some(EngineError::Store(_) | EngineError::Load(_) | EngineError::Mirror(_)) => "io",
        _ => "config",
    }
    .to_owned()
}

/// A bar on a terminal; nowhere else, which the library sees to.
fn bar(total: u64, template: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template(template);
    bar.set_style(style.expect("the template is well formed"));
    bar
}

/// A bar over the bytes of a load.
pub(crate) fn load_bar(total: u64) -> ProgressBar {
    bar(
        total,
        "loading {bar:30} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec}, {eta} left",
    )
}

/// A bar over the bytes of a download.
pub(crate) fn pull_bar(total: u64) -> ProgressBar {
    bar(
        total,
        "{bar:30} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec}, {eta} left {wide_msg}",
    )
}

/// A bar over so many things.
pub(crate) fn count_bar(total: u64, things: &'static str) -> ProgressBar {
    bar(total, &format!("{{bar:30}} {{pos}}/{{len}} {things}, {{eta}} left"))
}

/// A bar over the bytes of a pack or of a check.
pub(crate) fn work_bar(verb: &'static str, total: u64) -> ProgressBar {
    let bar = pull_bar(total);
    bar.set_message(verb);
    bar
}

/// A bar over the tokens of a prompt.
pub(crate) fn prompt_bar(total: usize) -> ProgressBar {
    bar(total as u64, "reading the prompt {bar:30} {pos}/{len} tokens, {eta} left")
}

/// The line after an answer.
pub(crate) fn summary(receipt: &Receipt) -> String {
    let (prefill, decode) = (&receipt.prefill, &receipt.decode);
    let lookups = prefill.lookups + decode.lookups;
    let hits = prefill.hits + decode.hits;
    let guesses = receipt.speculation.map_or_else(String::new, |counters| {
        let SpeculationCounters { drafted, accepted, verify_passes, plain_passes } = counters;
        let passes = verify_passes + plain_passes;
        format!(" | guesses: {accepted} of {drafted} right, in {verify_passes} of {passes} passes")
    });
    let hit_rate = if lookups == 0 { 0.0 } else { 100.0 * hits as f64 / lookups as f64 };
    let ahead = match prefill.ahead + decode.ahead {
        0 => String::new(),
        ahead => format!(" {ahead} read ahead,"),
    };
    format!(
        "[prefill {:.1} tok/s ({} tokens), decode {:.2} tok/s ({} tokens) | {:.0} % hits: {hits} hits, {} misses,{ahead} {} read | \
         decode: {:.0} % hits, {:.2} MB a token, {:.0} % waiting, {:.1} ms a token without{guesses} | peak {} of {}, {} B written]",
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

/// A path for JSON, which has no other text than Unicode: what is not becomes U+FFFD.
pub(crate) fn lossy(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_shown_and_not_sent() {
        assert_eq!(visible("a\x1b[2J\tb\nc\u{9b}"), "a\\u{1b}[2J\tb\nc\\u{9b}");
    }
}

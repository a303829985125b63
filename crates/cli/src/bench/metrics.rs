//! What is told of runs: numbers by their paths in a receipt, their medians and spreads, and the text.

use std::fmt::Write as _;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use session::{Roofline, Wall};
use units::Bytes;

/// A number of a receipt.
pub(crate) struct Metric {
    /// Where it is; also its name in medians.
    pub(crate) path: &'static str,
    /// For people.
    pub(crate) title: &'static str,
    /// From the receipt's unit to the title's.
    scale: f64,
    decimals: usize,
}

const fn metric(path: &'static str, title: &'static str, scale: f64, decimals: usize) -> Metric {
    Metric { path, title, scale, decimals }
}

pub(crate) const METRICS: [Metric; 14] = [
    metric("prefill.tokens_per_second", "prefill, tok/s", 1.0, 2),
    metric("decode.tokens_per_second", "decode, tok/s", 1.0, 2),
    metric("decode.read_bytes_per_token", "decode, MB read a token", 1e-6, 2),
    metric("decode.hit_rate", "decode, hits in %", 100.0, 1),
    metric("warm.prefill.tokens_per_second", "warm prefill, tok/s", 1.0, 2),
    metric("warm.decode.tokens_per_second", "warm decode, tok/s", 1.0, 2),
    metric("warm.decode.read_bytes_per_token", "warm decode, MB read a token", 1e-6, 2),
    metric("bench.load_us", "loading, s", 1e-6, 2),
    metric("bench.first_token_us", "start to first token, s", 1e-6, 2),
    metric("peak_rss_bytes", "peak memory, MB", 1e-6, 1),
    metric("roofline.resident_tokens_per_second", "all in memory, tok/s", 1.0, 2),
    metric("roofline.ceiling_tokens_per_second", "ceiling, tok/s", 1.0, 2),
    metric("roofline.share", "share of the ceiling in %", 100.0, 1),
    metric("roofline.memory_share", "share of memory's rate in %", 100.0, 1),
];

impl Metric {
    pub(crate) fn of(&self, receipt: &Value) -> Option<f64> {
        self.path.split('.').try_fold(receipt, |value, name| value.get(name))?.as_f64()
    }

    pub(crate) fn show(&self, value: f64) -> String {
        format!("{:.*}", self.decimals, value * self.scale)
    }
}

/// What several runs found of one number.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl Spread {
    /// Nothing of nothing.
    pub(crate) fn of(mut values: Vec<f64>) -> Option<Self> {
        values.sort_by(f64::total_cmp);
        let (min, max) = (*values.first()?, *values.last()?);
        let (low, high) = (values[(values.len() - 1) / 2], values[values.len() / 2]);
        Some(Self { median: f64::midpoint(low, high), min, max })
    }

    /// Whether both have values in common: then a difference of medians may be chance.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        self.min <= other.max && other.min <= self.max
    }
}

/// Every number that all of these runs have.
pub(crate) fn spread(metric: &Metric, runs: &[Value]) -> Option<Spread> {
    Spread::of(runs.iter().map(|run| metric.of(run)).collect::<Option<Vec<f64>>>()?)
}

/// By path, as JSON.
pub(crate) fn spreads(runs: &[Value]) -> Value {
    let of = |metric: &Metric| {
        let spread = spread(metric, runs)?;
        Some((metric.path.to_owned(), serde_json::to_value(spread).ok()?))
    };
    Value::Object(METRICS.iter().filter_map(of).collect())
}

/// Runs of one setting.
pub(crate) struct Setting<'a> {
    pub(crate) runs: &'a [Value],
}

impl Setting<'_> {
    fn number(&self, pointer: &str) -> u64 {
        self.runs.first().and_then(|run| run.pointer(pointer)?.as_u64()).unwrap_or(0)
    }

    /// Budget, positions, tokens of the prompt, and those decoded after the first.
    pub(crate) fn key(&self) -> [u64; 4] {
        ["/budget_bytes", "/context_tokens", "/prefill/tokens", "/decode/tokens"]
            .map(|pointer| self.number(pointer))
    }

    pub(crate) fn title(&self) -> String {
        let [budget, context, prompt, decoded] = self.key();
        format!(
            "{}, context {context}, {prompt} tokens of prompt, {} decoded",
            Bytes(budget),
            decoded + 1
        )
    }
}

/// The settings of a receipt, of a run or of a series.
///
/// # Errors
/// It is neither.
pub(crate) fn settings<'a>(receipt: &'a Value) -> Result<Vec<Setting<'a>>> {
    const WRONG: &str = "it is no receipt of `sakia bench`";
    let is_run = |run: &Value| run["prefill"].is_object() && run["decode"].is_object();
    if is_run(receipt) {
        return Ok(vec![Setting { runs: std::slice::from_ref(receipt) }]);
    }
    let series = receipt["series"].as_array();
    let series = series
        .with_context(|| format!("{WRONG}: no `prefill` and `decode`, nor a `series` of runs"))?;
    let setting = |value: &'a Value| {
        let runs =
            value["runs"].as_array().filter(|runs| !runs.is_empty() && runs.iter().all(is_run));
        runs.map(|runs| Setting { runs })
    };
    let settings: Option<Vec<Setting<'a>>> = series.iter().map(setting).collect();
    settings.with_context(|| format!("{WRONG}: its `series` holds something else than runs"))
}

/// For the progress of a series.
pub(crate) fn one_line(receipt: &Value) -> String {
    let [budget, ..] = Setting { runs: std::slice::from_ref(receipt) }.key();
    let number = |metric: &Metric| metric.of(receipt).map_or("?".to_owned(), |v| metric.show(v));
    let [prefill, decode, megabytes, ..] = &METRICS;
    format!(
        "{}, {} tokens: prefill {} tok/s, decode {} tok/s, {} MB a token",
        Bytes(budget),
        receipt["prefill"]["tokens"],
        number(prefill),
        number(decode),
        number(megabytes)
    )
}

/// A receipt for people.
pub(crate) fn as_text(receipt: &Value) -> Result<String> {
    let mut text = String::new();
    for setting in settings(receipt)? {
        let runs = setting.runs;
        let n_runs = if runs.len() == 1 {
            String::new()
        } else {
            format!(": medians of {} runs", runs.len())
        };
        let _ = writeln!(text, "{}{n_runs}", setting.title());
        for metric in &METRICS {
            let Some(Spread { median, min, max }) = spread(metric, runs) else { continue };
            let _ = write!(text, "  {:<30} {:>10}", metric.title, metric.show(median));
            if runs.len() > 1 {
                let _ = write!(text, "   {} to {}", metric.show(min), metric.show(max));
            }
            text.push('\n');
        }
        let roofline = median_run(runs).and_then(|run| run.get("roofline"));
        if let Some(roofline) = roofline {
            let roofline = Roofline::deserialize(roofline).context("reading a roofline")?;
            text.push_str(&roofline_text(&roofline));
        }
        text.push('\n');
    }
    text.pop();
    Ok(text)
}

/// The run whose decoding was neither fast nor slow.
fn median_run(runs: &[Value]) -> Option<&Value> {
    let mut sorted: Vec<&Value> = runs.iter().collect();
    sorted.sort_by(|a, b| {
        let [a, b] = [a, b].map(|run| METRICS[1].of(run).unwrap_or(0.0));
        a.total_cmp(&b)
    });
    sorted.get(sorted.len().saturating_sub(1) / 2).copied()
}

fn roofline_text(of: &Roofline) -> String {
    let giga = |rate: f64| format!("{:.2} GB/s", rate / 1e9);
    let mut text = String::from("  roofline\n");
    let mut line = |name: &str, content: String| {
        let _ = writeln!(text, "    {name:<8} {content}");
    };
    if let Some(disk) = of.disk_bytes_per_second {
        let mut content =
            format!("{:.2} MB a token at {}", of.read_bytes_per_token / 1e6, giga(disk));
        if let Some(achieved) = of.achieved_bytes_per_second {
            let _ = write!(content, ", in the run {} while any was on its way", giga(achieved));
        }
        if let Some(alone) = of.disk_tokens_per_second {
            let _ = write!(content, ": alone {alone:.2} tok/s");
        }
        line("disk", content);
    }
    line(
        "memory",
        format!(
            "{:.1} MB of weights a token: {} of {} (read from {}), {:.0} %",
            of.weight_bytes_per_token as f64 / 1e6,
            giga(of.weight_bytes_per_token as f64 * of.tokens_per_second),
            giga(of.memory_bytes_per_second),
            Bytes(of.memory_buffer_bytes),
            100.0 * of.memory_share
        ),
    );
    if let Some(resident) = of.resident_tokens_per_second {
        line(
            "compute",
            format!("{resident:.2} tok/s with everything in memory: the last token, repeated"),
        );
    }
    if let (Some(ceiling), Some(wall), Some(share)) =
        (of.ceiling_tokens_per_second, of.wall, of.share)
    {
        let wall = match wall {
            Wall::Disk => "the disk's",
            Wall::Compute => "that of computing",
        };
        line(
            "ceiling",
            format!("{ceiling:.2} tok/s, {wall}; {:.0} % of it reached", 100.0 * share),
        );
    }
    for note in &of.notes {
        line("note", note.clone());
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_spread_is_its_median_and_its_ends() {
        let of = |values: &[f64]| Spread::of(values.to_vec());
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[3.0, 1.0, 2.0]), Some(Spread { median: 2.0, min: 1.0, max: 3.0 }));
        assert_eq!(of(&[4.0, 1.0]), Some(Spread { median: 2.5, min: 1.0, max: 4.0 }));
        let spread = |min, max| Spread { median: 0.0, min, max };
        assert!(spread(1.0, 2.0).overlaps(&spread(2.0, 3.0)));
        assert!(!spread(1.0, 2.0).overlaps(&spread(2.1, 3.0)));
        assert!(!spread(2.1, 3.0).overlaps(&spread(1.0, 2.0)));
    }

    #[test]
    fn what_one_run_lacks_has_no_median() {
        let runs = [
            json!({ "decode": { "tokens_per_second": 2.0, "hit_rate": 0.5 } }),
            json!({ "decode": { "tokens_per_second": 4.0 } }),
        ];
        let medians = spreads(&runs);
        assert_eq!(medians["decode.tokens_per_second"]["median"], 3.0);
        assert_eq!(medians.get("decode.hit_rate"), None);
    }

    #[test]
    fn what_is_no_receipt_is_refused() {
        for value in
            [json!({}), json!([1]), json!({ "series": [{ "runs": [] }] }), json!({ "series": [1] })]
        {
            assert!(settings(&value).is_err(), "{value}");
        }
        assert_eq!(settings(&json!({ "series": [] })).unwrap().len(), 0);
    }
}

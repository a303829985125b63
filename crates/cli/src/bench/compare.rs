//! Two receipts side by side.

use std::fmt::Write as _;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde_json::Value;

use super::metrics::{METRICS, Metric, Setting, Spread, settings, spread};
use crate::report;

/// Most bytes of a receipt: ten thousand runs of a thousand tokens each.
const MOST_BYTES: u64 = 256 << 20;

/// A setting that both have.
#[derive(Serialize)]
struct Pair {
    setting: String,
    runs: [usize; 2],
    ratios: Vec<Measure>,
}

#[derive(Serialize)]
struct Measure {
    metric: &'static str,
    a: Spread,
    b: Spread,
    /// Of the medians, a over b; nothing where b is 0.
    ratio: Option<f64>,
    /// Whether the spreads have values in common.
    overlap: bool,
}

pub(crate) fn run(a: &Path, b: &Path, json: bool) -> Result<ExitCode> {
    let [a_receipt, b_receipt] = [a, b].map(read);
    let (a_receipt, b_receipt) = (a_receipt?, b_receipt?);
    let of = |path: &Path, receipt| settings(receipt).with_context(|| path.display().to_string());
    let (a_settings, b_settings) = (of(a, &a_receipt)?, of(b, &b_receipt)?);
    let met = meet(&a_settings, &b_settings);
    let pairs: Vec<Pair> = met.iter().map(|(a, b)| pair(a, b)).collect();
    if pairs.is_empty() {
        bail!(
            "{} and {} have no budget, context and number of tokens in common, and more than one setting each",
            a.display(),
            b.display()
        );
    }
    let notes = notes(&met);
    if json {
        let value = serde_json::json!({ "a": report::lossy(a), "b": report::lossy(b), "pairs": pairs, "notes": notes });
        report::data(&format!("{value:#}\n"));
    } else {
        report::text(&as_text([a, b], &pairs, &notes));
    }
    Ok(ExitCode::SUCCESS)
}

fn read(path: &Path) -> Result<Value> {
    let name = || format!("reading the receipt {}", path.display());
    let mut text = String::new();
    let file = File::open(path).with_context(name)?;
    file.take(MOST_BYTES + 1).read_to_string(&mut text).with_context(name)?;
    if text.len() as u64 > MOST_BYTES {
        bail!("{}: a receipt has at most {MOST_BYTES} bytes", path.display());
    }
    serde_json::from_str(&text).with_context(name)
}

/// A setting of each.
type Met<'a> = (&'a Setting<'a>, &'a Setting<'a>);

/// Settings of the same key; the only ones of both whatever their keys.
fn meet<'a>(a: &'a [Setting<'a>], b: &'a [Setting<'a>]) -> Vec<Met<'a>> {
    if let ([a], [b]) = (a, b) {
        return vec![(a, b)];
    }
    let same = |a: &'a Setting<'a>| b.iter().find(|b| b.key() == a.key()).map(|b| (a, b));
    a.iter().filter_map(same).collect()
}

fn pair(a: &Setting<'_>, b: &Setting<'_>) -> Pair {
    let ratio = |metric: &Metric| {
        let (a, b) = (spread(metric, a.runs)?, spread(metric, b.runs)?);
        let ratio = (b.median != 0.0).then(|| a.median / b.median);
        Some(Measure { metric: metric.path, a, b, ratio, overlap: a.overlaps(&b) })
    };
    let [from, to] = [a.title(), b.title()];
    let setting = if from == to { from } else { format!("A: {from}; B: {to}") };
    let ratios = METRICS.iter().filter_map(ratio).collect();
    Pair { setting, runs: [a.runs.len(), b.runs.len()], ratios }
}

/// What makes a comparison one of something else than it seems.
fn notes(met: &[Met<'_>]) -> Vec<String> {
    let same = |what: &str, pointer: &str| {
        let values = |runs: &mut dyn Iterator<Item = &Value>| {
            let mut values: Vec<String> = runs
                .filter_map(|run| run.pointer(pointer))
                .map(|value| value.as_str().map_or_else(|| value.to_string(), str::to_owned))
                .collect();
            values.sort_unstable();
            values.dedup();
            values.join(", ")
        };
        let a = values(&mut met.iter().flat_map(|(a, _)| a.runs));
        let b = values(&mut met.iter().flat_map(|(_, b)| b.runs));
        (!a.is_empty() && !b.is_empty() && a != b).then(|| format!("{what}: A {a}; B {b}"))
    };
    [
        same("other models", "/model"),
        same("other ids", "/bench/ids_hash"),
        same("other processors", "/bench/machine/cpu"),
        same("other kernels", "/bench/machine/kernels"),
        same("other threads", "/threads"),
        same("the page cache was not always emptied", "/bench/page_cache_dropped"),
        same("other outputs", "/output_hash"),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn as_text([a, b]: [&Path; 2], pairs: &[Pair], notes: &[String]) -> String {
    let mut text = format!("A  {}\nB  {}\n", a.display(), b.display());
    for note in notes {
        let _ = writeln!(text, "note: {note}");
    }
    for Pair { setting, runs: [a_runs, b_runs], ratios } in pairs {
        let _ = writeln!(text, "\n{setting}; {a_runs} and {b_runs} runs");
        let _ = writeln!(text, "  {:<30} {:>10} {:>10} {:>8}", "", "A", "B", "A/B");
        for of in ratios {
            let metric = METRICS.iter().find(|metric| metric.path == of.metric);
            let metric = metric.expect("ratios are of these metrics");
            let ratio = of.ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.3}"));
            let (a, b) = (metric.show(of.a.median), metric.show(of.b.median));
            let _ = write!(text, "  {:<30} {a:>10} {b:>10} {ratio:>8}", metric.title);
            text.push_str(if of.a == of.b {
                ""
            } else if *a_runs.min(b_runs) == 1 {
                "  one run has no spread"
            } else if of.overlap {
                "  spreads overlap"
            } else {
                ""
            });
            text.push('\n');
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn run(budget: u64, rate: f64) -> Value {
        json!({
            "budget_bytes": budget, "context_tokens": 9, "threads": 2,
            "prefill": { "tokens": 4 }, "decode": { "tokens": 3, "tokens_per_second": rate },
        })
    }

    fn series(runs: &[(u64, &[f64])]) -> Value {
        let setting = |(budget, rates): &(u64, &[f64])| {
            let runs: Vec<Value> = rates.iter().map(|rate| run(*budget, *rate)).collect();
            json!({ "runs": runs })
        };
        json!({ "series": runs.iter().map(setting).collect::<Vec<_>>() })
    }

    fn compared(a: &Value, b: &Value) -> Vec<Pair> {
        meet(&settings(a).unwrap(), &settings(b).unwrap()).iter().map(|(a, b)| pair(a, b)).collect()
    }

    #[test]
    fn settings_meet_by_what_they_are_and_overlap_is_said() {
        let a = series(&[(5, &[1.0, 2.0, 3.0]), (8, &[8.0, 9.0]), (9, &[1.0])]);
        let b = series(&[(8, &[4.0, 5.0]), (5, &[3.0, 4.0, 5.0])]);
        let pairs = compared(&a, &b);
        assert_eq!(pairs.len(), 2);
        let [five, eight] = [&pairs[0].ratios[0], &pairs[1].ratios[0]];
        assert_eq!((five.ratio, five.overlap), (Some(0.5), true));
        assert_eq!((eight.ratio, eight.overlap), (Some(8.5 / 4.5), false));
        let text = as_text([Path::new("a"), Path::new("b")], &pairs, &[]);
        assert_eq!(text.matches("spreads overlap").count(), 1, "{text}");
    }

    #[test]
    fn single_runs_meet_whatever_they_are() {
        let pairs = compared(&run(5, 1.0), &run(8, 2.0));
        assert_eq!(pairs[0].ratios[0].ratio, Some(0.5));
        assert!(pairs[0].setting.contains("A: 5 B"), "{}", pairs[0].setting);
        assert!(compared(&series(&[(5, &[1.0]), (6, &[1.0])]), &run(8, 1.0)).is_empty());
    }

    #[test]
    fn other_work_is_said() {
        let (mut a, mut b) = (run(5, 1.0), run(5, 1.0));
        (a["model"], b["model"]) = ("x".into(), "y".into());
        let notes = notes(&meet(&settings(&a).unwrap(), &settings(&b).unwrap()));
        assert_eq!(notes, ["other models: A x; B y"]);
    }
}

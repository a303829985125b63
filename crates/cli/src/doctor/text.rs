//! What is told, for people.

use std::fmt::Write as _;

use units::Bytes;

use super::Report;
use super::facts::{Facts, or_unknown};
use super::findings::{Finding, Kind};
use super::models::ModelFacts;
use crate::report::count;

pub(super) fn of(report: &Report) -> String {
    let Report { facts, disks, models, findings, .. } = report;
    let mut text = machine(facts);
    for disk in disks {
        let how = if disk.direct { "past the page cache" } else { "through the page cache" };
        let free =
            disk.free_bytes.map_or_else(String::new, |free| format!("; {} free", Bytes(free)));
        line(
            &mut text,
            "disk",
            &format!(
                "of {}: reads of {} {how}: {:.2} GB/s with {} at once; alone {:.2} ms, 1 % over {:.2} ms{free}",
                disk.model,
                Bytes(disk.read_bytes),
                disk.bytes_per_second / 1e9,
                disk.at_once,
                disk.alone_p50_us / 1e3,
                disk.alone_p99_us / 1e3
            ),
        );
    }
    if !models.is_empty() {
        text.push('\n');
        text.push_str(&table(models));
    }
    text.push('\n');
    if findings.is_empty() {
        text.push_str("nothing found that would be slow\n");
    }
    for finding in findings {
        text.push_str(&told(finding));
    }
    text
}

fn line(text: &mut String, name: &str, content: &str) {
    let _ = writeln!(text, "{name:<11}{content}");
}

fn machine(facts: &Facts) -> String {
    let Facts { sakia, debug_build, system, cpu, memory, io_uring } = facts;
    let mut text = String::new();
    let build = if *debug_build { " (debug build)" } else { "" };
    line(&mut text, "sakia", &format!("{sakia}{build}, {system}"));
    let cores = cpu
        .physical_cores
        .map_or_else(String::new, |cores| format!(" on {}", count(cores, "core")));
    let load = cpu.load_average.map_or_else(String::new, |load| format!("; load {load:.1}"));
    let name = cpu.name.as_deref().unwrap_or("unknown");
    let threads = count(cpu.usable_threads, "thread");
    line(&mut text, "processor", &format!("{name}, {threads}{cores}{load}"));
    let having = |wanted: bool| {
        let names = cpu.features.iter().filter(|(_, has)| **has == wanted).map(|(name, _)| *name);
        let names: Vec<&str> = names.collect();
        if names.is_empty() { "nothing".to_owned() } else { names.join(" ") }
    };
    let features =
        format!("{}; the processor has {}, not {}", cpu.kernels, having(true), having(false));
    line(&mut text, "kernels", &features);
    let rate = memory.bytes_per_second;
    let rate = rate.map_or_else(String::new, |rate| format!(", read at {:.1} GB/s", rate / 1e9));
    let swap = match (memory.swap_used_bytes, memory.swap_bytes) {
        (Some(used), Some(all)) if all > 0 => {
            format!("; {} of {} swap used", Bytes(used), Bytes(all))
        }
        (Some(_), Some(_)) => "; no swap".to_owned(),
        _ => String::new(),
    };
    let (total, available) = (or_unknown(memory.total_bytes), or_unknown(memory.available_bytes));
    line(&mut text, "memory", &format!("{total}, {available} available{rate}{swap}"));
    let group = memory.group_limit_bytes.map_or_else(
        || "no control group limits it".to_owned(),
        |limit| format!("control groups limit it to {}", Bytes(limit)),
    );
    let budget = or_unknown(memory.default_budget_bytes);
    line(&mut text, "budget", &format!("{budget} without --memory; {group}"));
    let huge = memory.huge_pages.as_deref().unwrap_or("unknown");
    let lock = memory
        .lockable_bytes
        .map_or_else(|| "no limit".to_owned(), |bytes| Bytes(bytes).to_string());
    let page = Bytes(memory.page_bytes as u64);
    line(&mut text, "pages", &format!("{page}, huge pages {huge}; lockable: {lock}"));
    let uring = io_uring
        .why_not
        .as_deref()
        .map_or_else(|| "allowed".to_owned(), |why| format!("not possible: {why}"));
    line(&mut text, "io_uring", &uring);
    text
}

fn table(models: &[ModelFacts]) -> String {
    let width = models.iter().map(|model| model.name.chars().count()).max().unwrap_or(0).max(5);
    let mut text = format!(
        "{:<width$} {:>10} {:>10} {:>8} {:>16} {:>8} {:>14}\n",
        "model", "size", "budget", "context", "slots", "resident", "MB a token"
    );
    for model in models {
        let _ = write!(text, "{:<width$} {:>10}", model.name, Bytes(model.file_bytes));
        let megabytes = model.expert_bytes_per_token as f64 / 1e6;
        match &model.plan {
            Some(plan) => {
                let _ = writeln!(
                    text,
                    " {:>10} {:>8} {:>16} {:>6.0} % {megabytes:>14.1}",
                    Bytes(plan.budget_bytes),
                    plan.context_tokens,
                    format!("{} of {}", plan.slots, plan.experts),
                    100.0 * plan.share
                );
            }
            None => text.push_str("  does not fit; see below\n"),
        }
    }
    text
}

fn told(finding: &Finding) -> String {
    let kind = match finding.kind {
        Kind::Broken => "broken",
        Kind::Slow => "slow",
        Kind::Note => "note",
        Kind::Unknown => "unknown",
    };
    let Finding { what, why, change, .. } = finding;
    let why = why.replace('\n', "\n         ");
    let change =
        change.as_ref().map_or_else(String::new, |change| format!("         change: {change}\n"));
    format!("{kind:<8} {what}\n         why: {why}\n{change}")
}

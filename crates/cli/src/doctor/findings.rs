//! What would be slow, why, and what to change. Nothing here asks the system.

use serde::Serialize;
use units::Bytes;

use super::disks::Disk;
use super::facts::Facts;
use super::models::ModelFacts;

/// How much it matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Kind {
    /// A model cannot run.
    Broken,
    /// Something will be slower than it could be.
    Slow,
    /// Worth knowing.
    Note,
    /// It could not be found out.
    Unknown,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    pub(super) kind: Kind,
    pub(super) what: String,
    pub(super) why: String,
    /// What to do about it, if anything can be done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) change: Option<String>,
}

impl Finding {
    fn new(kind: Kind, what: impl Into<String>, why: impl Into<String>) -> Self {
        Self { kind, what: what.into(), why: why.into(), change: None }
    }

    fn change(self, change: impl Into<String>) -> Self {
        Self { change: Some(change.into()), ..self }
    }

    /// It could not be found out.
    pub(super) fn unknown(what: &str, why: &str) -> Self {
        Self::new(Kind::Unknown, format!("{what}: not known"), why)
    }

    /// A model that cannot run here.
    pub(super) fn unusable(name: &str, why: &str) -> Self {
        let (why, hint) = why.split_once("\n\nhint: ").unwrap_or((why, ""));
        let finding = Self::new(Kind::Broken, format!("{name} cannot run"), why);
        if hint.is_empty() { finding } else { finding.change(hint) }
    }
}

/// Tokens a second below which a person waits.
const SLOW_RATE: f64 = 3.0;

/// Reads alone that take longer than this are those of a disk that turns, or of a network.
const SLOW_READ_US: f64 = 5000.0;

/// Swap in use that is worth a word.
const SOME_SWAP: u64 = 256 << 20;

/// What follows from the facts.
pub(super) fn judge(
    facts: &Facts,
    disks: &[Disk],
    models: &[ModelFacts],
    findings: &mut Vec<Finding>,
) {
    findings.extend(of_program(facts));
    findings.extend(of_memory(facts));
    findings.extend(disks.iter().flat_map(of_disk));
    for model in models {
        findings.extend(of_model(model, disks));
    }
    if models.is_empty() && findings.iter().all(|finding| finding.kind != Kind::Broken) {
        let none = Finding::new(
            Kind::Note,
            "no model is here",
            "neither the demo nor a pulled one was found",
        );
        findings.push(none.change("`sakia pull org/name`, or name a file with -m"));
    }
    findings.sort_by_key(|finding| finding.kind as u8);
}

fn of_program(facts: &Facts) -> Vec<Finding> {
    let mut found = Vec::new();
    let cpu = &facts.cpu;
    if facts.debug_build {
        let why = "checks are on and the compiler optimised little";
        found.push(
            Finding::new(Kind::Slow, "this is a debug build", why)
                .change("`cargo build --release`"),
        );
    }
    if cpu.kernels == "scalar" {
        let why = "kernels are written for AVX2 with FMA and F16C, and for arm64 with dot products; this processor lacks them";
        let finding =
            Finding::new(Kind::Slow, "portable kernels are used, several times slower", why);
        found.push(
            finding.change(
                "another processor; in a virtual machine, one whose processor is not masked",
            ),
        );
    }
    let managed = |driver: &str| driver.starts_with("intel_") || driver.starts_with("amd-pstate");
    if cpu.frequency_governor.as_deref() == Some("powersave")
        && !cpu.frequency_driver.as_deref().is_some_and(managed)
    {
        let why = "the governor `powersave` keeps the clock at its lowest";
        found.push(
            Finding::new(Kind::Slow, "the processor is kept slow", why)
                .change("choose `performance` or `schedutil`"),
        );
    }
    if let Some(load) = cpu.load_average.filter(|load| *load > 0.5 * cpu.usable_threads as f64) {
        let what = "other programs use the processor";
        let why = format!(
            "{load:.1} processes wanted to run over the last minute, and {} can",
            cpu.usable_threads
        );
        found.push(Finding::new(Kind::Slow, what, why).change("end them, or give fewer --threads"));
    }
    if let Some(cores) = cpu.physical_cores.filter(|cores| cpu.usable_threads < *cores) {
        let why = format!(
            "{cores} cores are there and this process may use {} threads",
            cpu.usable_threads
        );
        found.push(
            Finding::new(Kind::Slow, "not all cores may be used", why)
                .change("raise the quota or affinity of the container"),
        );
    }
    if let Some(why) = &facts.io_uring.why_not {
        found.push(Finding::new(
            Kind::Note,
            "`--reader io_uring` is not possible; pread is the default anyway",
            why,
        ));
    }
    found
}

fn of_memory(facts: &Facts) -> Vec<Finding> {
    let mut found = Vec::new();
    let memory = &facts.memory;
    if let (Some(budget), Some(available)) = (memory.default_budget_bytes, memory.available_bytes)
        && budget > available
    {
        let what = "less memory is free than a command without --memory takes";
        let why = format!(
            "{} of {}: the system will swap or end a process",
            Bytes(available),
            Bytes(budget)
        );
        let change = format!("end other programs, or --memory {}MiB", (available >> 20) * 9 / 10);
        found.push(Finding::new(Kind::Slow, what, why).change(change));
    }
    if let (Some(limit), Some(total)) = (memory.group_limit_bytes, memory.total_bytes)
        && limit < total
    {
        let why = format!("its control group may have {} of {}", Bytes(limit), Bytes(total));
        found.push(Finding::new(Kind::Note, "this process may not use all memory", why));
    }
    if let Some(used) = memory.swap_used_bytes.filter(|used| *used > SOME_SWAP) {
        let why = format!(
            "{} lie there; what a model needs of that comes back page by page",
            Bytes(used)
        );
        found.push(
            Finding::new(Kind::Note, "swap is in use", why)
                .change("end other programs, or a smaller --memory"),
        );
    }
    if let Some(lockable) = memory.lockable_bytes
        && facts.io_uring.allowed
        && memory.default_budget_bytes.is_some_and(|budget| lockable < budget)
    {
        let why = format!(
            "{} may be locked, so `--reader io_uring` prepares that much of the slots and no more",
            Bytes(lockable)
        );
        found.push(
            Finding::new(Kind::Note, "locked memory is limited", why)
                .change("`ulimit -l`, if io_uring is used"),
        );
    }
    if memory.huge_pages.as_deref() == Some("always") {
        let why = "transparent huge pages are always on: memory that was touched once counts in steps of 2 MiB";
        found.push(
            Finding::new(Kind::Note, "the process may look larger than it is", why)
                .change("`madvise` instead of `always`"),
        );
    }
    found
}

fn of_disk(disk: &Disk) -> Vec<Finding> {
    let mut found = Vec::new();
    if !disk.direct {
        let what = format!("{} is read through the page cache", disk.model);
        let why = "its file system has no direct reads: every byte is copied once more";
        found.push(
            Finding::new(Kind::Slow, what, why)
                .change("a local file system like ext4, xfs or btrfs"),
        );
    }
    if disk.alone_p50_us > SLOW_READ_US {
        let what = format!("the disk of {} is slow to answer", disk.model);
        let why =
            format!("a read of {} takes {:.1} ms", Bytes(disk.read_bytes), disk.alone_p50_us / 1e3);
        found.push(Finding::new(Kind::Slow, what, why).change("an SSD in this machine"));
    }
    found
}

fn of_model(model: &ModelFacts, disks: &[Disk]) -> Vec<Finding> {
    let mut found = Vec::new();
    let Some(plan) = &model.plan else { return found };
    let slowest = disks.iter().map(|disk| disk.bytes_per_second).reduce(f64::min);
    let disk = disks.iter().find(|disk| disk.model == model.name);
    let rate = disk.map(|disk| disk.bytes_per_second).or(slowest);
    if let (Some(rate), true) = (rate, plan.share < 1.0) {
        let missing = model.expert_bytes_per_token as f64 * (1.0 - plan.share);
        let tokens = rate / missing;
        if tokens < SLOW_RATE {
            let what = format!("{} may be held up by the disk", model.name);
            let why = format!(
                "{:.0} % of its experts fit; were all equally likely, a token would read {:.0} MB: {tokens:.1} tok/s at {:.2} GB/s; faster where experts repeat",
                100.0 * plan.share,
                missing / 1e6,
                rate / 1e9
            );
            found.push(Finding::new(Kind::Slow, what, why).change("more --memory, a faster disk, a copy on a second one (--mirror), or a smaller quantisation"));
        }
    }
    if model.put_together {
        let what = format!("experts of {} are put together from many reads", model.name);
        let why = format!("each lies in {} pieces, with scales apart from values", model.pieces);
        found.push(
            Finding::new(Kind::Slow, what, why).change("`sakia pack` makes every expert one read"),
        );
    }
    found
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::facts::{Cpu, IoUring, Memory};
    use super::super::models::Planned;
    use super::*;

    /// A machine that nothing is wrong with.
    fn fine() -> Facts {
        Facts {
            sakia: "0.0.0",
            debug_build: false,
            system: "Linux 6 x86_64".to_owned(),
            cpu: Cpu {
                name: None,
                usable_threads: 8,
                physical_cores: Some(4),
                kernels: "avx2",
                features: [("avx2", true)].into(),
                frequency_driver: None,
                frequency_governor: None,
                load_average: Some(0.1),
            },
            memory: Memory {
                total_bytes: Some(32 << 30),
                available_bytes: Some(30 << 30),
                swap_bytes: Some(1 << 30),
                swap_used_bytes: Some(0),
                group_limit_bytes: None,
                default_budget_bytes: Some(22 << 30),
                page_bytes: 4096,
                huge_pages: Some("madvise".to_owned()),
                lockable_bytes: None,
                bytes_per_second: None,
            },
            io_uring: IoUring { allowed: true, why_not: None },
        }
    }

    fn disk() -> Disk {
        Disk {
            model: "x".to_owned(),
            direct: true,
            read_bytes: 1 << 20,
            at_once: 4,
            bytes_per_second: 2e9,
            alone_p50_us: 300.0,
            alone_p99_us: 900.0,
            free_bytes: None,
        }
    }

    fn model() -> ModelFacts {
        ModelFacts {
            name: "x".to_owned(),
            file_bytes: 18 << 30,
            expert_bytes_per_token: 1 << 30,
            pieces: 3,
            put_together: false,
            plan: Some(Planned {
                budget_bytes: 8 << 30,
                smallest_budget_bytes: 2 << 30,
                context_tokens: 8192,
                pass_rows: 512,
                slots: 80,
                experts: 100,
                share: 0.8,
            }),
        }
    }

    fn judged(facts: &Facts, disks: &[Disk], models: &[ModelFacts]) -> Vec<Finding> {
        let mut findings = Vec::new();
        judge(facts, disks, models, &mut findings);
        findings
    }

    #[test]
    fn nothing_is_found_where_nothing_is_wrong() {
        assert_eq!(judged(&fine(), &[disk()], &[model()]), []);
    }

    /// Changes one thing and expects one finding about it.
    fn check(change: impl Fn(&mut Facts), kind: Kind, words: &str) {
        let mut facts = fine();
        change(&mut facts);
        let found = judged(&facts, &[disk()], &[model()]);
        let [finding] = &found[..] else { panic!("{words}: {found:?}") };
        assert_eq!(finding.kind, kind);
        assert!(format!("{} {}", finding.what, finding.why).contains(words), "{finding:?}");
    }

    #[test]
    fn each_fact_has_its_finding() {
        check(|f| f.debug_build = true, Kind::Slow, "debug build");
        check(|f| f.cpu.kernels = "scalar", Kind::Slow, "portable kernels");
        check(|f| f.cpu.load_average = Some(4.5), Kind::Slow, "4.5 processes");
        check(|f| f.cpu.usable_threads = 2, Kind::Slow, "not all cores");
        check(|f| f.cpu.frequency_governor = Some("powersave".to_owned()), Kind::Slow, "lowest");
        check(|f| f.memory.available_bytes = Some(10 << 30), Kind::Slow, "10.00 GiB of 22.00 GiB");
        check(|f| f.memory.group_limit_bytes = Some(4 << 30), Kind::Note, "4.00 GiB of 32.00 GiB");
        check(|f| f.memory.swap_used_bytes = Some(1 << 29), Kind::Note, "512.0 MiB");
        check(|f| f.memory.lockable_bytes = Some(8 << 20), Kind::Note, "8.0 MiB may be locked");
        check(|f| f.memory.huge_pages = Some("always".to_owned()), Kind::Note, "2 MiB");
        check(|f| f.io_uring.why_not = Some("forbidden".to_owned()), Kind::Note, "forbidden");
    }

    #[test]
    fn a_managed_clock_may_be_called_powersave() {
        let mut facts = fine();
        facts.cpu.frequency_governor = Some("powersave".to_owned());
        facts.cpu.frequency_driver = Some("intel_pstate".to_owned());
        assert_eq!(judged(&facts, &[disk()], &[model()]), []);
    }

    #[test]
    fn slow_disks_and_models_that_wait_for_them_are_named() {
        let found = |disk: Disk, model: ModelFacts| {
            let found = judged(&fine(), &[disk], &[model]);
            let [finding] = &found[..] else { panic!("{found:?}") };
            format!("{} {}", finding.what, finding.why)
        };
        assert!(
            found(Disk { direct: false, ..disk() }, model()).contains("through the page cache")
        );
        assert!(found(Disk { alone_p50_us: 9000.0, ..disk() }, model()).contains("9.0 ms"));
        let slow = found(Disk { bytes_per_second: 1e8, ..disk() }, model());
        assert!(slow.contains("0.5 tok/s at 0.10 GB/s"), "{slow}");
        assert!(found(disk(), ModelFacts { put_together: true, ..model() }).contains("3 pieces"));
    }

    #[test]
    fn what_is_worst_comes_first_and_hints_become_changes() {
        let mut facts = fine();
        facts.debug_build = true;
        let mut findings = vec![
            Finding::unknown("the disk", "broken"),
            Finding::unusable("x", "too little\n\nhint: use more"),
        ];
        judge(&facts, &[], &[], &mut findings);
        let kinds: Vec<Kind> = findings.iter().map(|finding| finding.kind).collect();
        assert_eq!(kinds, [Kind::Broken, Kind::Slow, Kind::Unknown]);
        assert_eq!(findings[0].change.as_deref(), Some("use more"));
    }

    #[test]
    fn a_machine_without_a_model_is_told_where_to_get_one() {
        let found = judged(&fine(), &[], &[]);
        assert!(found.len() == 1 && found[0].change.as_deref().unwrap().contains("sakia pull"));
    }
}

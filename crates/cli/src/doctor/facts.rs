//! What the system tells of this machine.

use std::collections::BTreeMap;

use compute::cpu::isa;
use expert_store::ReaderKind;
use memory_plan::limits;
use serde::Serialize;
use units::Bytes;

use super::findings::Finding;
use crate::machine;

/// Read to measure memory, if there is so much to spare.
const MEMORY_BYTES: u64 = 512 << 20;
const MEMORY_ROUNDS: usize = 3;

#[derive(Debug, Clone, Serialize)]
pub(super) struct Facts {
    /// Of this program.
    pub(super) sakia: &'static str,
    /// Whether it was built for tests.
    pub(super) debug_build: bool,
    pub(super) system: String,
    pub(super) cpu: Cpu,
    pub(super) memory: Memory,
    pub(super) io_uring: IoUring,
}

#[derive(Debug, Clone, Serialize)]
pub(super) struct Cpu {
    pub(super) name: Option<String>,
    /// Threads that may run at once, as far as this process may.
    pub(super) usable_threads: usize,
    pub(super) physical_cores: Option<usize>,
    /// The instruction set of the kernels that are used.
    pub(super) kernels: &'static str,
    pub(super) features: BTreeMap<&'static str, bool>,
    /// Who chooses the clock rate, and by which rule.
    pub(super) frequency_driver: Option<String>,
    pub(super) frequency_governor: Option<String>,
    pub(super) load_average: Option<f64>,
}

#[derive(Debug, Clone, Serialize)]
pub(super) struct Memory {
    pub(super) total_bytes: Option<u64>,
    pub(super) available_bytes: Option<u64>,
    pub(super) swap_bytes: Option<u64>,
    pub(super) swap_used_bytes: Option<u64>,
    /// The smallest limit of a control group, if any binds.
    pub(super) group_limit_bytes: Option<u64>,
    /// What a command without `--memory` takes.
    pub(super) default_budget_bytes: Option<u64>,
    pub(super) page_bytes: usize,
    /// `always`, `madvise`, `never`.
    pub(super) huge_pages: Option<String>,
    /// What a process may lock; absent without a limit.
    pub(super) lockable_bytes: Option<u64>,
    /// What all threads together read from memory in a second.
    pub(super) bytes_per_second: Option<f64>,
}

#[derive(Debug, Clone, Serialize)]
pub(super) struct IoUring {
    pub(super) allowed: bool,
    pub(super) why_not: Option<String>,
}

impl Facts {
    pub(super) fn gather(probe: bool, findings: &mut Vec<Finding>) -> Self {
        let check = ReaderKind::IoUring.check();
        let why_not = check.as_ref().err().map(ToString::to_string);
        let cpu = Cpu::gather();
        let mut memory = Memory::gather(findings);
        let spare = memory.available_bytes.or(memory.total_bytes).unwrap_or(0) / 4;
        let spare = memory.group_limit_bytes.map_or(spare, |limit| spare.min(limit / 4));
        if probe {
            let bytes = MEMORY_BYTES.min(spare);
            let found = compute::read_bandwidth(cpu.usable_threads, bytes, MEMORY_ROUNDS);
            memory.bytes_per_second = Some(found.bytes_per_second);
            limits::release_free_memory();
        }
        Self {
            sakia: env!("CARGO_PKG_VERSION"),
            debug_build: cfg!(debug_assertions),
            system: machine::system(),
            cpu,
            memory,
            io_uring: IoUring { allowed: why_not.is_none(), why_not },
        }
    }
}

impl Cpu {
    fn gather() -> Self {
        let of_frequency =
            |name| machine::first_word(&format!("/sys/devices/system/cpu/cpu0/cpufreq/{name}"));
        Self {
            name: machine::cpu_name(),
            usable_threads: machine::usable_threads(),
            physical_cores: machine::physical_cores(),
            kernels: isa::Isa::best().name(),
            features: isa::features().into_iter().collect(),
            frequency_driver: of_frequency("scaling_driver"),
            frequency_governor: of_frequency("scaling_governor"),
            load_average: machine::load_average(),
        }
    }
}

impl Memory {
    fn gather(findings: &mut Vec<Finding>) -> Self {
        let mut of = |what: &str, error: std::io::Error| {
            findings.push(Finding::unknown(what, &error.to_string()));
        };
        let machine = limits::memory().map_err(|error| of("the machine's memory", error)).ok();
        let all = limits::of_this_machine().map_err(|error| of("limits of memory", error));
        let limits = all.unwrap_or_default();
        // The first is the physical memory.
        let group = limits.iter().skip(1).map(|limit| limit.bytes.0).min();
        let budget = memory_plan::Budget::detect(None).ok().map(|budget| budget.bytes.0);
        let swap = machine.and_then(|memory| memory.swap);
        let lockable = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
        Self {
            total_bytes: machine.map(|memory| memory.total.0),
            available_bytes: machine.and_then(|memory| memory.available).map(|bytes| bytes.0),
            swap_bytes: swap.map(|(total, _)| total.0),
            swap_used_bytes: swap.map(|(total, free)| total.saturating_sub(free).0),
            group_limit_bytes: group,
            default_budget_bytes: budget,
            page_bytes: rustix::param::page_size(),
            huge_pages: std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled")
                .ok()
                .and_then(|text| chosen(&text)),
            lockable_bytes: lockable,
            bytes_per_second: None,
        }
    }
}

/// `always [madvise] never`: the one in brackets.
fn chosen(text: &str) -> Option<String> {
    let (_, rest) = text.split_once('[')?;
    rest.split_once(']').map(|(word, _)| word.to_owned())
}

/// A number of bytes that may not be known.
pub(super) fn or_unknown(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "unknown".to_owned(), |bytes| Bytes(bytes).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chosen_one_is_in_brackets() {
        assert_eq!(chosen("always [madvise] never\n").as_deref(), Some("madvise"));
        assert_eq!(chosen("always madvise"), None);
    }

    #[test]
    fn this_machine_tells_something() {
        let mut findings = Vec::new();
        let facts = Facts::gather(false, &mut findings);
        assert!(findings.is_empty(), "{findings:?}");
        assert!(facts.memory.page_bytes >= 4096 && facts.cpu.usable_threads > 0);
        assert_eq!(facts.memory.bytes_per_second, None, "nothing was measured");
        assert!(facts.memory.default_budget_bytes < facts.memory.total_bytes);
    }
}

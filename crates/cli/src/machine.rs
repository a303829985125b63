//! What this machine is and does now, as far as the system tells without being measured. What it does not tell is absent.

use std::collections::BTreeSet;
use std::fs;

use compute::cpu::isa::Isa;
use serde_json::{Value, json};

/// Processes that ran or wanted to, averaged over the last minute.
pub(crate) fn load_average() -> Option<f64> {
    first_word("/proc/loadavg")?.parse().ok()
}

/// The first word of a small file.
pub(crate) fn first_word(path: &str) -> Option<String> {
    fs::read_to_string(path).ok()?.split_whitespace().next().map(str::to_owned)
}

/// What the processor calls itself.
pub(crate) fn cpu_name() -> Option<String> {
    name_in(&fs::read_to_string("/proc/cpuinfo").ok()?)
}

fn name_in(cpuinfo: &str) -> Option<String> {
    let names = ["model name", "Model", "Processor", "cpu"];
    names.into_iter().find_map(|name| {
        let mut lines = cpuinfo.lines().filter_map(|line| line.split_once(':'));
        let (_, value) = lines.find(|(key, _)| key.trim() == name)?;
        Some(value.trim().to_owned()).filter(|value| !value.is_empty())
    })
}

/// Processor cores, each once however many threads of it there are.
pub(crate) fn physical_cores() -> Option<usize> {
    cores_in(&fs::read_to_string("/proc/cpuinfo").ok()?)
}

fn cores_in(cpuinfo: &str) -> Option<usize> {
    let mut cores = BTreeSet::new();
    for block in cpuinfo.split("\n\n") {
        let of = |name: &str| {
            let mut lines = block.lines().filter_map(|line| line.split_once(':'));
            lines.find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim())
        };
        if let (Some(package), Some(core)) = (of("physical id"), of("core id")) {
            cores.insert((package, core));
        }
    }
    Some(cores.len()).filter(|n| *n > 0)
}

/// Threads that may run at once, as far as this process may.
pub(crate) fn usable_threads() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// For receipts.
pub(crate) fn brief() -> Value {
    let memory = memory_plan::limits::memory().ok();
    json!({
        "cpu": cpu_name(),
        "usable_threads": usable_threads(),
        "kernels": Isa::best().name(),
        "memory_bytes": memory.map(|memory| memory.total.0),
        "system": system(),
    })
}

/// `Linux 6.1.0 x86_64`.
pub(crate) fn system() -> String {
    let name = rustix::system::uname();
    let word = |text: &std::ffi::CStr| text.to_string_lossy().into_owned();
    format!("{} {} {}", word(name.sysname()), word(name.release()), word(name.machine()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CPUINFO: &str = "\
processor\t: 0
model name\t: Some CPU @ 2.00GHz
physical id\t: 0
core id\t\t: 0

processor\t: 1
model name\t: Some CPU @ 2.00GHz
physical id\t: 0
core id\t\t: 0

processor\t: 2
physical id\t: 0
core id\t\t: 1
";

    #[test]
    fn threads_of_a_core_are_one_core() {
        assert_eq!(cores_in(CPUINFO), Some(2));
        assert_eq!(cores_in("processor : 0\n"), None);
    }

    #[test]
    fn the_processor_has_the_name_that_it_gives() {
        assert_eq!(name_in(CPUINFO).as_deref(), Some("Some CPU @ 2.00GHz"));
        assert_eq!(name_in("processor : 0\nmodel name :\n"), None);
        assert_eq!(name_in(""), None);
    }

    #[test]
    fn this_system_has_a_name() {
        assert!(system().split(' ').count() >= 3, "{}", system());
    }
}

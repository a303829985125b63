//! What the machine and its control groups allow, and what this process uses. The one module that asks the system.
#![allow(unsafe_code, reason = "sysctl, proc_pidinfo, getrusage and malloc_trim are C functions")]

use std::io;

use units::Bytes;

use crate::cgroup;

/// An upper bound and where it comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limit {
    /// For messages.
    pub name: String,
    /// The bound.
    pub bytes: Bytes,
}

/// Physical memory and every cgroup limit on the path of this process.
///
/// # Errors
/// The system does not tell its physical memory.
pub fn of_this_machine() -> io::Result<Vec<Limit>> {
    let mut limits = vec![Limit { name: "physical memory".to_owned(), bytes: physical()? }];
    if cfg!(target_os = "linux") {
        limits.extend(cgroup_limits());
    }
    Ok(limits)
}

/// Memory of the machine as it is now, whatever this process may have of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MachineMemory {
    /// All of it.
    pub total: Bytes,
    /// What could be had without swapping, if the system tells.
    pub available: Option<Bytes>,
    /// Swap, and what is free of it, if the system tells.
    pub swap: Option<(Bytes, Bytes)>,
}

/// Asks for the memory of the machine.
///
/// # Errors
/// The system does not tell its physical memory.
pub fn memory() -> io::Result<MachineMemory> {
    let total = physical()?;
    #[cfg(target_os = "linux")]
    {
        let text = std::fs::read_to_string("/proc/meminfo")?;
        let swap = kib_line(&text, "SwapTotal:").zip(kib_line(&text, "SwapFree:"));
        Ok(MachineMemory { total, available: kib_line(&text, "MemAvailable:"), swap })
    }
    #[cfg(not(target_os = "linux"))]
    Ok(MachineMemory { total, available: None, swap: None })
}

/// Limits of the control groups of this process; what cannot be read does not bind.
fn cgroup_limits() -> Vec<Limit> {
    let read = |name: &str| std::fs::read_to_string(name).unwrap_or_default();
    let files = cgroup::limit_files(&read("/proc/self/cgroup"), &read("/proc/self/mountinfo"));
    let limit = |file: cgroup::LimitFile| {
        let text = std::fs::read_to_string(&file.path).ok()?;
        let bytes = cgroup::limit_in(&text, file.form)?;
        Some(Limit { name: format!("the limit in {}", file.path.display()), bytes })
    };
    files.into_iter().filter_map(limit).collect()
}

#[cfg(target_os = "linux")]
fn physical() -> io::Result<Bytes> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    kib_line(&text, "MemTotal:").ok_or_else(|| io::Error::other("/proc/meminfo has no MemTotal"))
}

#[cfg(target_os = "macos")]
fn physical() -> io::Result<Bytes> {
    let mut bytes: u64 = 0;
    let mut size = size_of::<u64>();
    // SAFETY: the name is a C string, `bytes` has room for the `size` bytes announced, and nothing is set.
    let outcome = unsafe {
        libc::sysctlbyname(
            c"hw.memsize".as_ptr(),
            (&raw mut bytes).cast(),
            &raw mut size,
            std::ptr::null_mut(),
            0,
        )
    };
    if outcome == 0 { Ok(Bytes(bytes)) } else { Err(io::Error::last_os_error()) }
}

/// What the process occupies now. Zero if the system does not tell.
#[cfg(target_os = "linux")]
pub fn current_rss() -> Bytes {
    status("VmRSS:")
}

/// The most that the process has occupied so far. Zero if the system does not tell.
#[cfg(target_os = "linux")]
pub fn peak_rss() -> Bytes {
    status("VmHWM:")
}

#[cfg(target_os = "linux")]
fn status(name: &str) -> Bytes {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    kib_line(&text, name).unwrap_or_default()
}

/// `Name:  123 kB` in a file of such lines.
#[cfg(target_os = "linux")]
fn kib_line(text: &str, name: &str) -> Option<Bytes> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024).map(Bytes)
}

/// What the process occupies now. Zero if the system does not tell.
#[cfg(target_os = "macos")]
pub fn current_rss() -> Bytes {
    let size = size_of::<libc::proc_taskinfo>() as libc::c_int;
    // SAFETY: all-zero bytes are a valid `proc_taskinfo`, a struct of integers.
    let mut info: libc::proc_taskinfo = unsafe { std::mem::zeroed() };
    // SAFETY: `info` has room for the `size` bytes announced; the process asks about itself.
    let filled = unsafe {
        libc::proc_pidinfo(libc::getpid(), libc::PROC_PIDTASKINFO, 0, (&raw mut info).cast(), size)
    };
    if filled == size { Bytes(info.pti_resident_size) } else { Bytes::ZERO }
}

/// The most that the process has occupied so far. Zero if the system does not tell.
#[cfg(target_os = "macos")]
pub fn peak_rss() -> Bytes {
    // SAFETY: all-zero bytes are a valid `rusage`, a struct of integers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is a `rusage` to be filled.
    let outcome = unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) };
    // Bytes here, unlike on Linux.
    if outcome == 0 { Bytes(usage.ru_maxrss.unsigned_abs()) } else { Bytes::ZERO }
}

/// Largest block that comes from the allocator's own heaps, in bytes.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const MOST_FROM_HEAPS: libc::c_int = 128 << 10;

/// Keeps the allocator from hoarding: large blocks are mapped for themselves and given back when they are freed, however
/// many there were before. Otherwise a few large requests raise that limit to 32 MiB, and what is freed later stays in holes of heaps.
/// To be called before anything large is allocated.
pub fn give_large_blocks_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it takes no pointer; a value that it does not like changes nothing.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MOST_FROM_HEAPS);
    }
}

/// Gives memory that was freed back to the system, where the allocator keeps it.
pub fn release_free_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it takes no pointer and touches free memory of the allocator only.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel counts pages per processor and adds them up now and then.
    const COUNTING: Bytes = Bytes::mib(1);

    #[test]
    fn this_process_occupies_something_and_the_machine_has_more() {
        let physical = of_this_machine().unwrap()[0].bytes;
        let current = current_rss();
        assert!(Bytes::ZERO < current && current <= peak_rss() + COUNTING);
        assert!(peak_rss() < physical);
    }

    #[test]
    fn the_machine_has_what_is_available_and_more() {
        let MachineMemory { total, available, swap } = memory().unwrap();
        assert_eq!(total, of_this_machine().unwrap()[0].bytes);
        assert!(available.is_none_or(|available| Bytes::ZERO < available && available < total));
        assert!(swap.is_none_or(|(all, free)| free <= all));
        assert!(cfg!(not(target_os = "linux")) || (available.is_some() && swap.is_some()));
    }

    #[test]
    fn memory_that_is_touched_is_occupied() {
        let before = current_rss();
        let touched = vec![1_u8; 64 << 20];
        let grown = current_rss().saturating_sub(before);
        assert_eq!(std::hint::black_box(touched).len(), 64 << 20);
        // Other tests of this binary come and go, but not by this much.
        assert!(grown >= Bytes::mib(56), "{grown}");
        assert!(peak_rss() + COUNTING >= before + grown, "what was given back stays in the peak");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_line_that_is_no_size_is_none() {
        let text =
            "VmPeak:\t  900 kB\nVmRSS:\t  120 kB\nVmHWM: lots\nVmSwap: 99999999999999999 kB\n";
        assert_eq!(kib_line(text, "VmRSS:"), Some(Bytes::kib(120)));
        assert_eq!(kib_line(text, "VmHWM:"), None);
        assert_eq!(kib_line(text, "VmSwap:"), None);
        assert_eq!(kib_line(text, "VmStk:"), None);
    }
}

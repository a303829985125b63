//! What the machine and its control groups allow, and what this process uses. The one module that asks the system.
#![allow(unsafe_code, reason = "sysctl, getrusage and malloc_trim are C functions")]

use std::io;
use std::path::{Path, PathBuf};

use units::Bytes;

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
        limits.extend(cgroup_limits(Path::new("/proc/self")));
    }
    Ok(limits)
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
    // SAFETY: the name is a C string; the output is a u64 whose size is passed along; nothing is written to the system.
    let outcome = unsafe {
        libc::sysctlbyname(c"hw.memsize".as_ptr(), (&raw mut bytes).cast(), &raw mut size, std::ptr::null_mut(), 0)
    };
    if outcome == 0 { Ok(Bytes(bytes)) } else { Err(io::Error::last_os_error()) }
}

/// `Name:  123 kB` in a file of such lines.
fn kib_line(text: &str, name: &str) -> Option<Bytes> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse().ok().map(Bytes::kib)
}

/// Limits of the control groups that `proc/cgroup` names, version 1 and 2, from the group itself up to the root.
fn cgroup_limits(proc: &Path) -> Vec<Limit> {
    let read = |name: &str| std::fs::read_to_string(proc.join(name)).unwrap_or_default();
    let folders = cgroup_folders(&read("cgroup"), &read("mountinfo"));
    let files = folders.iter().flat_map(|(folder, files)| files.iter().map(|file| folder.join(file)));
    files
        .filter_map(|file| {
            let bytes = limit_of(&std::fs::read_to_string(&file).ok()?)?;
            Some(Limit { name: format!("the cgroup limit {}", file.display()), bytes })
        })
        .collect()
}

/// A limit file's value; nothing for `max` and for the "no limit" number of version 1.
fn limit_of(text: &str) -> Option<Bytes> {
    let bytes: u64 = text.trim().parse().ok()?;
    (bytes < 1 << 60).then_some(Bytes(bytes))
}

const V1_FILES: &[&str] = &["memory.limit_in_bytes"];
const V2_FILES: &[&str] = &["memory.max", "memory.high"];

/// Folders with limits, and the names of their limit files.
fn cgroup_folders(cgroup: &str, mountinfo: &str) -> Vec<(PathBuf, &'static [&'static str])> {
    let mut folders = Vec::new();
    for line in cgroup.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else { continue };
        let v2 = controllers.is_empty();
        if !v2 && !controllers.split(',').any(|c| c == "memory") {
            continue;
        }
        let files = if v2 { V2_FILES } else { V1_FILES };
        for (root, mount) in mounts(mountinfo, v2) {
            // Inside a container the mount may show only a part of the tree, named by its root.
            let inside = Path::new(path).strip_prefix(&root).unwrap_or(Path::new(""));
            let group = mount.join(inside.strip_prefix("/").unwrap_or(inside));
            folders.extend(group.ancestors().take_while(|f| f.starts_with(&mount)).map(|f| (f.to_owned(), files)));
        }
    }
    folders
}

/// `(root, mount point)` of the memory hierarchy.
fn mounts(mountinfo: &str, v2: bool) -> Vec<(String, PathBuf)> {
    let of_line = |line: &str| {
        let (place, kind) = line.split_once(" - ")?;
        let place: Vec<&str> = place.split(' ').collect();
        let kind: Vec<&str> = kind.split(' ').collect();
        let matches = match *kind.first()? {
            "cgroup2" => v2,
            "cgroup" => !v2 && kind.last()?.split(',').any(|option| option == "memory"),
            _ => false,
        };
        matches.then(|| Some(((*place.get(3)?).to_owned(), PathBuf::from(place.get(4)?))))?
    };
    mountinfo.lines().filter_map(of_line).collect()
}

/// Memory that the process occupies now.
pub fn current_rss() -> Bytes {
    #[cfg(target_os = "linux")]
    return status("VmRSS:");
    #[cfg(not(target_os = "linux"))]
    peak_rss()
}

/// The most that the process has occupied so far.
pub fn peak_rss() -> Bytes {
    #[cfg(target_os = "linux")]
    return status("VmHWM:");
    #[cfg(not(target_os = "linux"))]
    {
        // SAFETY: getrusage fills the zeroed struct that it is given.
        let usage = unsafe {
            let mut usage: libc::rusage = std::mem::zeroed();
            libc::getrusage(libc::RUSAGE_SELF, &raw mut usage);
            usage
        };
        Bytes(usage.ru_maxrss.max(0).cast_unsigned() as u64)
    }
}

#[cfg(target_os = "linux")]
fn status(name: &str) -> Bytes {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    kib_line(&text, name).unwrap_or_default()
}

/// Gives memory that was freed back to the system, where the allocator keeps it.
pub fn release_free_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: malloc_trim only returns free pages; it takes no pointers.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(cgroup: &str, mountinfo: &str) -> Vec<String> {
        let folders = cgroup_folders(cgroup, mountinfo);
        folders.iter().flat_map(|(folder, files)| files.iter().map(|f| folder.join(f).display().to_string())).collect()
    }

    #[test]
    fn version_2_takes_every_ancestor() {
        let mountinfo = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n";
        assert_eq!(
            paths("0::/user.slice/app\n", mountinfo),
            [
                "/sys/fs/cgroup/user.slice/app/memory.max",
                "/sys/fs/cgroup/user.slice/app/memory.high",
                "/sys/fs/cgroup/user.slice/memory.max",
                "/sys/fs/cgroup/user.slice/memory.high",
                "/sys/fs/cgroup/memory.max",
                "/sys/fs/cgroup/memory.high",
            ]
        );
    }

    #[test]
    fn version_1_takes_the_memory_hierarchy_only() {
        let cgroup = "12:cpu,cpuacct:/a\n5:memory:/a/b\n1:name=systemd:/x\n";
        let mountinfo = "40 23 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
                         41 23 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";
        assert_eq!(
            paths(cgroup, mountinfo),
            [
                "/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes",
                "/sys/fs/cgroup/memory/a/memory.limit_in_bytes",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            ]
        );
    }

    #[test]
    fn a_container_sees_its_own_part_of_the_tree() {
        let mountinfo = "41 23 0:31 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";
        assert_eq!(paths("5:memory:/docker/abc\n", mountinfo), ["/sys/fs/cgroup/memory/memory.limit_in_bytes"]);
    }

    #[test]
    fn no_limit_is_no_limit() {
        assert_eq!(limit_of("max\n"), None);
        assert_eq!(limit_of("9223372036854771712\n"), None);
        assert_eq!(limit_of("1073741824\n"), Some(Bytes::gib(1)));
    }

    #[test]
    fn this_process_occupies_something_and_the_machine_has_more() {
        let physical = of_this_machine().unwrap()[0].bytes;
        assert!(Bytes::ZERO < current_rss() && current_rss() <= peak_rss() && peak_rss() < physical);
    }
}

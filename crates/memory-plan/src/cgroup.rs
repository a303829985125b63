//! Where the limits of a process's control groups are: text of `/proc` in, paths out.
//!
//! A limit anywhere between the group and the root binds, so every ancestor is named. Both versions may be mounted at
//! once; the one that controls memory counts. Formats: cgroups(7), `proc_pid_mountinfo(5)`.

use std::path::{Component, Path, PathBuf};

use units::Bytes;

/// A file with a limit in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LimitFile {
    pub(crate) path: PathBuf,
    pub(crate) form: Form,
}

/// How the limit is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// A number, or `max`.
    Plain,
    /// The line `hierarchical_memory_limit` of version 1: also counts ancestors that a container cannot see.
    Hierarchical,
}

const V1_FILES: [(&str, Form); 2] =
    [("memory.limit_in_bytes", Form::Plain), ("memory.stat", Form::Hierarchical)];
// Over `memory.high` a process is throttled to a crawl instead of killed: a limit all the same.
const V2_FILES: [(&str, Form); 2] = [("memory.max", Form::Plain), ("memory.high", Form::Plain)];

/// The limit files of a process, from its own group up to the root of each hierarchy.
///
/// `cgroup` and `mountinfo` are the texts of the files of that name in `/proc/self`.
pub(crate) fn limit_files(cgroup: &str, mountinfo: &str) -> Vec<LimitFile> {
    let mut found = Vec::new();
    for line in cgroup.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let v2 = controllers.is_empty();
        if !v2 && controllers.split(',').all(|controller| controller != "memory") {
            continue;
        }
        let files = if v2 { V2_FILES } else { V1_FILES };
        for mount in mountinfo.lines().filter_map(|line| Mount::of_line(line, v2)) {
            let group = mount.folder_of(Path::new(path));
            let folders = group.ancestors().take_while(|folder| folder.starts_with(&mount.point));
            for folder in folders {
                let file = |(name, form)| LimitFile { path: folder.join(name), form };
                found.extend(files.into_iter().map(file));
            }
        }
    }
    found
}

/// A mounted hierarchy, or the part of it that a container may see.
struct Mount {
    /// The group that is seen at `point`.
    root: PathBuf,
    point: PathBuf,
}

impl Mount {
    /// `36 35 98:0 ROOT POINT OPTIONS [FIELDS] - TYPE SOURCE SUPER_OPTIONS`, if it has the memory controller.
    fn of_line(line: &str, v2: bool) -> Option<Self> {
        let (place, kind) = line.split_once(" - ")?;
        let mut kind = kind.split(' ');
        let (kind, options) = (kind.next()?, kind.nth(1)?);
        let has_memory = match kind {
            "cgroup2" => v2,
            "cgroup" => !v2 && options.split(',').any(|option| option == "memory"),
            _ => false,
        };
        let mut place = place.split(' ').skip(3);
        let (root, point) = (unescape(place.next()?), unescape(place.next()?));
        has_memory.then_some(Self { root, point })
    }

    /// The folder of a group; the mount itself if the group lies outside of what is mounted.
    fn folder_of(&self, group: &Path) -> PathBuf {
        let inside = group.strip_prefix(&self.root).unwrap_or(Path::new(""));
        // Seen from another cgroup namespace, a group may be `/../other`.
        let plain = inside.components().all(|part| part != Component::ParentDir);
        let inside = if plain { inside.strip_prefix("/").unwrap_or(inside) } else { Path::new("") };
        if inside.as_os_str().is_empty() { self.point.clone() } else { self.point.join(inside) }
    }
}

/// Blanks, tabs, newlines and backslashes are written as three octal digits.
fn unescape(field: &str) -> PathBuf {
    let mut text = field.to_owned();
    for (code, plain) in [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")] {
        text = text.replace(code, plain);
    }
    PathBuf::from(text)
}

/// From here on a number means "no limit": version 1 writes the largest multiple of a page.
const NO_LIMIT: u64 = 1 << 60;

/// The limit in a file's text; nothing if there is none.
pub(crate) fn limit_in(text: &str, form: Form) -> Option<Bytes> {
    let number = match form {
        Form::Plain => text.trim(),
        Form::Hierarchical => {
            text.lines().find_map(|line| line.strip_prefix("hierarchical_memory_limit "))?.trim()
        }
    };
    let bytes: u64 = number.parse().ok()?;
    (bytes < NO_LIMIT).then_some(Bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Paths of plain limits: those of `memory.stat` lie beside those of version 1.
    fn check(cgroup: &str, mountinfo: &str, expected: &[&str]) {
        let files = limit_files(cgroup, mountinfo);
        let plain = files.iter().filter(|file| file.form == Form::Plain);
        let paths: Vec<String> = plain.map(|file| file.path.display().to_string()).collect();
        assert_eq!(paths, expected);
    }

    #[test]
    fn version_2_takes_every_ancestor() {
        check(
            "0::/user.slice/app.scope\n",
            "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n",
            &[
                "/sys/fs/cgroup/user.slice/app.scope/memory.max",
                "/sys/fs/cgroup/user.slice/app.scope/memory.high",
                "/sys/fs/cgroup/user.slice/memory.max",
                "/sys/fs/cgroup/user.slice/memory.high",
                "/sys/fs/cgroup/memory.max",
                "/sys/fs/cgroup/memory.high",
            ],
        );
    }

    #[test]
    fn version_1_takes_the_memory_hierarchy_only() {
        let cgroup = "12:cpu,cpuacct:/a\n5:memory:/a/b\n1:name=systemd:/x\n";
        let mountinfo = "40 23 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
                         41 23 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";
        let expected = [
            "/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/a/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        ];
        check(cgroup, mountinfo, &expected);
        let stat = LimitFile {
            path: "/sys/fs/cgroup/memory/a/b/memory.stat".into(),
            form: Form::Hierarchical,
        };
        assert!(limit_files(cgroup, mountinfo).contains(&stat));
    }

    #[test]
    fn a_hybrid_machine_is_asked_in_both_versions() {
        check(
            "4:memory:/box\n0::/\n",
            "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n\
             41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n",
            &[
                "/sys/fs/cgroup/memory/box/memory.limit_in_bytes",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes",
                "/sys/fs/cgroup/unified/memory.max",
                "/sys/fs/cgroup/unified/memory.high",
            ],
        );
    }

    #[test]
    fn a_container_sees_its_own_part_of_the_tree() {
        let docker = "41 23 0:31 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
        let root = ["/sys/fs/cgroup/memory/memory.limit_in_bytes"];
        check("5:memory:/docker/abc\n", docker, &root);
        let nested = ["/sys/fs/cgroup/memory/job/memory.limit_in_bytes", root[0]];
        check("5:memory:/docker/abc/job\n", docker, &nested);
        // The host's path of a group that is mounted as a root, as old container runtimes leave it.
        let hidden = "41 23 0:31 / /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
        let hidden_group = [
            "/sys/fs/cgroup/memory/kubepods/pod1/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/kubepods/memory.limit_in_bytes",
            root[0],
        ];
        check("5:memory:/kubepods/pod1\n", hidden, &hidden_group);
    }

    #[test]
    fn a_group_outside_of_the_namespace_falls_back_to_the_mount() {
        check(
            "0::/../other\n",
            "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            &["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.high"],
        );
    }

    #[test]
    fn a_mount_point_with_a_blank_is_unescaped() {
        let mountinfo = "30 23 0:26 / /my\\040groups rw - cgroup2 cgroup2 rw\n";
        check("0::/\n", mountinfo, &["/my groups/memory.max", "/my groups/memory.high"]);
    }

    #[test]
    fn text_that_makes_no_sense_has_no_limits() {
        check("", "", &[]);
        check("0::/\n", "30 23 0:26 - cgroup2\nnonsense\n - - -\n", &[]);
        check("nonsense\n5\n5:memory\n", "30 23 0:26 / /x rw - cgroup cgroup rw,memory\n", &[]);
    }

    #[test]
    fn no_limit_is_no_limit() {
        assert_eq!(limit_in("max\n", Form::Plain), None);
        assert_eq!(limit_in("9223372036854771712\n", Form::Plain), None);
        assert_eq!(limit_in("1073741824\n", Form::Plain), Some(Bytes::gib(1)));
        assert_eq!(limit_in("", Form::Plain), None);
        let stat = "cache 12\nrss 5\nhierarchical_memory_limit 2147483648\ntotal_rss 5\n";
        assert_eq!(limit_in(stat, Form::Hierarchical), Some(Bytes::gib(2)));
        assert_eq!(limit_in("cache 12\n", Form::Hierarchical), None);
    }
}

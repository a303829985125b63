//! Where the source of this compiler's standard library is, or can be had.
//!
//! First the toolchain's own `rust-src` component, then what an earlier run unpacked, then Debian's package of exactly
//! this version. That package is fetched with apt under settings of its own and unpacked, never installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::shell::{answers, capture, run};

/// Suites of Debian that carry recent compilers, the stable one first.
const SUITES: [&str; 3] = ["trixie-backports", "forky", "sid"];

/// Signs the lists of all of them.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// The answer.
pub(super) enum StandardLibrary {
    /// The folder `library` of the source.
    At(PathBuf),
    /// It cannot be had here, and why.
    Missing(String),
}

/// Finds the source, fetching it into `cache` if it must.
pub(super) fn find(cache: &Path) -> Result<StandardLibrary> {
    let version = compiler_version()?;
    let sysroot = capture(Command::new("rustc").args(["--print", "sysroot"]))?;
    let component = Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library");
    let unpacked = cache.join(format!("rust-src-{version}"));
    let from_debian = unpacked.join(format!("usr/src/rustc-{version}/library"));
    for library in [&component, &from_debian] {
        if is_library(library) {
            return Ok(StandardLibrary::At(library.clone()));
        }
    }
    let missing = |reason: &str| {
        Ok(StandardLibrary::Missing(format!(
            "no source of the standard library of rustc {version} ({reason}); `rustup component add rust-src` brings it"
        )))
    };
    if !answers("apt-get", &["--version"]) || !answers("dpkg", &["--version"]) {
        return missing("not in the toolchain, and this is no Debian");
    }
    let Some(mirror) = debian_mirror()? else {
        return missing("not in the toolchain, and apt knows no Debian mirror");
    };
    for suite in SUITES {
        let apt = Apt::new(&cache.join("apt").join(suite), &mirror, suite)?;
        match apt.fetch(&version, &unpacked) {
            Ok(true) if is_library(&from_debian) => return Ok(StandardLibrary::At(from_debian)),
            Ok(true) => eprintln!("rust-src of {suite} has no {}", from_debian.display()),
            Ok(false) => eprintln!("{suite} has no rust-src {version}"),
            Err(error) => eprintln!("{suite}: {error:#}"),
        }
    }
    missing(&format!("not in the toolchain, nor in Debian's {}", SUITES.join(", ")))
}

fn is_library(folder: &Path) -> bool {
    folder.join("std/Cargo.toml").is_file()
}

/// `1.95.0` of `rustc 1.95.0 (… 2026-04-14)`.
fn compiler_version() -> Result<String> {
    let line = capture(Command::new("rustc").arg("--version"))?;
    let version = line.split_whitespace().nth(1);
    Ok(version.with_context(|| format!("`rustc --version` says {line}"))?.to_owned())
}

/// The mirror that this machine's own apt uses for Debian.
fn debian_mirror() -> Result<Option<String>> {
    let mut apt = Command::new("apt-get");
    apt.args(["indextargets", "--format", "$(LABEL) $(REPO_URI)", "Created-By: Packages"]);
    let targets = capture(&mut apt)?;
    Ok(targets.lines().find_map(|line| line.strip_prefix("Debian ")).map(str::to_owned))
}

/// apt with lists and caches of its own: it neither reads nor changes what the machine has installed.
struct Apt {
    folder: PathBuf,
    options: Vec<String>,
}

impl Apt {
    fn new(folder: &Path, mirror: &str, suite: &str) -> Result<Self> {
        let folder = folder.to_owned();
        for sub in ["lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(folder.join(sub)).context("cannot make a folder for apt")?;
        }
        let list = folder.join("sources.list");
        let line = format!("deb [signed-by={KEYRING}] {mirror} {suite} main\n");
        fs::write(&list, line).with_context(|| format!("cannot write {}", list.display()))?;
        let settings = [
            format!("Dir::Etc::SourceList={}", list.display()),
            "Dir::Etc::SourceParts=/dev/null".to_owned(),
            format!("Dir::State::Lists={}", folder.join("lists").display()),
            format!("Dir::Cache={}", folder.join("cache").display()),
            "Acquire::Languages=none".to_owned(),
            // Downloads go to a folder that apt's own user may not write.
            "APT::Sandbox::User=root".to_owned(),
        ];
        let options = settings.into_iter().flat_map(|setting| ["-o".to_owned(), setting]);
        Ok(Self { folder, options: options.collect() })
    }

    /// Fetches and unpacks `rust-src` of this version; `false` if the suite has another one.
    fn fetch(&self, version: &str, unpacked: &Path) -> Result<bool> {
        run(self.command("apt-get").args(["--quiet", "--quiet", "update"]))?;
        let known = capture(self.command("apt-cache").args(["madison", "rust-src"]))?;
        let Some(package_version) = matching(&known, version) else {
            return Ok(false);
        };
        let mut download = self.command("apt-get");
        download.args(["--quiet", "--quiet", "download", &format!("rust-src={package_version}")]);
        run(download.current_dir(&self.folder))?;
        let files = fs::read_dir(&self.folder).context("cannot list what apt fetched")?;
        let mut files = files.filter_map(|entry| Some(entry.ok()?.path()));
        let package = files.find(|file| file.extension().is_some_and(|ending| ending == "deb"));
        let package = package.context("apt fetched no package")?;
        run(Command::new("dpkg").arg("-x").arg(&package).arg(unpacked))?;
        fs::remove_file(&package).context("cannot remove the unpacked package")?;
        Ok(true)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.args(&self.options);
        command
    }
}

/// The package version of a compiler version in lines like `rust-src | 1.95.0+dfsg1-2~bpo13+1 | …`.
fn matching<'a>(madison: &'a str, version: &str) -> Option<&'a str> {
    madison.lines().filter_map(|line| line.split('|').nth(1)).map(str::trim).find(|package| {
        let rest = package.strip_prefix(version);
        rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_digit() || c == '.'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_package_is_of_exactly_this_compiler() {
        let lines = " rust-src | 1.96.0+dfsg1-1 | x\n rust-src | 1.95.0+dfsg1-2~bpo13+1 | x\n";
        assert_eq!(matching(lines, "1.95.0"), Some("1.95.0+dfsg1-2~bpo13+1"));
        assert_eq!(matching(lines, "1.95"), None);
        assert_eq!(matching("", "1.95.0"), None);
    }
}

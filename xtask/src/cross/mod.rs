//! Other platforms without their hardware: lints for Apple silicon, tests for arm64 Linux under qemu.
//!
//! Both build the standard library from source, since only the host's is installed. What is fetched or built lies in
//! `target/cross`, apart from the ordinary build: `RUSTC_BOOTSTRAP` changes what build scripts find.

mod sources;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};

use crate::check::{Part, sequence};
use crate::shell::{Outcome, answers, cargo, run as run_command};
use crate::workspace::Workspace;
use sources::StandardLibrary;

const MACOS: &str = "aarch64-apple-darwin";
const ARM64: &str = "aarch64-unknown-linux-gnu";

/// Where Debian's cross packages put the arm64 libraries, and the packages.
const ARM64_ROOT: &str = "/usr/aarch64-linux-gnu";
const ARM64_PACKAGES: &str = "gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user";

/// What is tested on arm64: arithmetic, and bookkeeping that nothing else runs there.
///
/// Unit tests compare every kernel, and every operation of a backend, with its definition. Tests of whole passes, and
/// those that enumerate states of the pool, take minutes on a processor that another one plays, and are about no
/// processor in particular.
const ARM64_TESTS: &[&[&str]] = &[
    &["--lib", "--tests", "--package", "units", "--package", "quant"],
    &["--lib", "--package", "slot-pool", "--", "tests::promises::", "tests::model::"],
    &["--lib", "--package", "compute"],
];

/// The processor that qemu plays: one with `sdot`.
const ARM64_CPU: &str = "neoverse-n1";

/// One without: there the products of `compute` must do without it.
const ARM64_BASELINE_CPU: &str = "cortex-a72";
const ARM64_BASELINE_TESTS: &[&[&str]] =
    &[&["--lib", "--package", "compute", "--", "cpu::dot::", "cpu::packed::"]];

/// Runs all parts, or those of the named platforms (`macos`, `arm64`).
pub(crate) fn run(workspace: &Workspace, names: &[String]) -> Result<Outcome> {
    if let Some(unknown) = names.iter().find(|name| !["macos", "arm64"].contains(&name.as_str())) {
        bail!("no platform `{unknown}`; there are: macos arm64");
    }
    let folder = workspace.target.join("cross");
    let source = match sources::find(&folder)? {
        StandardLibrary::At(source) => source,
        StandardLibrary::Missing(reason) => {
            return Ok(Outcome::Skipped(format!("no part of `cross` ran: {reason}")));
        }
    };
    let cross = &Cross { folder: folder.join("build"), source };
    let wanted = |platform: &str| names.is_empty() || names.iter().any(|name| name == platform);
    let mut parts = Vec::new();
    if wanted("macos") {
        parts.push(Part::new("macos lints", || cross.macos()));
    }
    if wanted("arm64") {
        parts.push(Part::new("arm64", || cross.arm64(ARM64_CPU, ARM64_TESTS)));
        parts.push(Part::new("arm64 baseline", || {
            cross.arm64(ARM64_BASELINE_CPU, ARM64_BASELINE_TESTS)
        }));
    }
    sequence(&parts)
}

struct Cross {
    /// What cargo builds into.
    folder: PathBuf,
    /// The standard library's source: the folder `library`.
    source: PathBuf,
}

impl Cross {
    /// Lints every crate as a Mac would compile it. Nothing is linked, so no Apple file is needed.
    fn macos(&self) -> Result<Outcome> {
        let mut clippy = self.cargo("clippy", MACOS);
        run_command(clippy.args(["--workspace", "--all-targets", "--", "-D", "warnings"]))?;
        Ok(Outcome::Done)
    }

    /// Tests on arm64 with the extensions of `cpu` and no others: an instruction it lacks ends the test.
    fn arm64(&self, cpu: &str, tests: &[&[&str]]) -> Result<Outcome> {
        let qemu = ["qemu-aarch64", "qemu-aarch64-static"]
            .into_iter()
            .find(|q| answers(q, &["--version"]));
        let linker = "aarch64-linux-gnu-gcc";
        let (Some(qemu), true, true) =
            (qemu, answers(linker, &["--version"]), Path::new(ARM64_ROOT).is_dir())
        else {
            return Ok(Outcome::Skipped(format!(
                "needs qemu and a linker: apt-get install {ARM64_PACKAGES}"
            )));
        };
        let runner = format!("{qemu} -L {ARM64_ROOT} -cpu {cpu}");
        for arguments in tests {
            let mut test = self.cargo("test", ARM64);
            test.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", linker);
            test.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", &runner);
            run_command(test.arg("--no-fail-fast").args(*arguments))?;
        }
        Ok(Outcome::Done)
    }

    fn cargo(&self, verb: &str, target: &str) -> Command {
        let mut cargo = cargo();
        cargo.args([verb, "--locked", "-Zbuild-std=std,panic_abort", "--target", target]);
        cargo.arg("--target-dir").arg(&self.folder);
        // Building std is an unstable option of cargo. `tidy` refuses unstable features in our own code.
        cargo.env("RUSTC_BOOTSTRAP", "1").env("__CARGO_TESTS_ONLY_SRC_ROOT", &self.source);
        cargo
    }
}

//! Hostile inputs, guided by coverage: libFuzzer over the targets in `fuzz/`, seeded from `testdata/`.
//!
//! The stable compiler instruments code as libFuzzer wants it; only the address sanitizer is an unstable option. So
//! neither a nightly toolchain nor cargo-fuzz is needed, though the layout is theirs. New inputs are kept in
//! `target/fuzz/<target>/corpus`, and an input that fails beside it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::shell::{Outcome, capture, cargo, run as run_command};
use crate::workspace::Workspace;

/// A program in `fuzz/`.
struct Target {
    name: &'static str,
    features: &'static str,
    /// What it starts from.
    kind: Seed,
    /// Where that is.
    seeds: &'static [&'static str],
}

/// What a seed is made of.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Seed {
    /// The first bytes of a file with this ending.
    File(&'static str),
    /// A folder's `config.json` and the headers of its safetensors files, with a zero byte between them.
    Folder,
}

const TARGETS: [Target; 7] = [
    Target {
        name: "gguf",
        features: "",
        kind: Seed::File("gguf"),
        seeds: &["testdata/fixtures/bad/gguf", "testdata/fixtures/models"],
    },
    Target {
        name: "safetensors",
        features: "",
        kind: Seed::File("safetensors"),
        seeds: &["testdata/fixtures/bad/safetensors", "testdata/fixtures/models"],
    },
    Target {
        name: "folder_config",
        features: "",
        kind: Seed::Folder,
        seeds: &["testdata/fixtures/bad/folders", "testdata/fixtures/models"],
    },
    Target {
        name: "tokenizer_json",
        features: "session",
        kind: Seed::File("json"),
        seeds: &["fuzz/seeds", "testdata/fixtures/bad/folders/tokenizer_bad"],
    },
    Target {
        // Seeds are GGUF files: the target makes packs of those that it can.
        name: "pack",
        features: "",
        kind: Seed::File("gguf"),
        seeds: &["testdata/fixtures/bad/gguf", "testdata/fixtures/models"],
    },
    Target {
        name: "tokenizer_template",
        features: "session",
        kind: Seed::File("gguf"),
        seeds: &["testdata/fixtures/models/tok-tiny", "testdata/fixtures/bad/gguf"],
    },
    Target {
        name: "trace",
        features: "session",
        kind: Seed::File("trace"),
        seeds: &["fuzz/seeds"],
    },
];

/// Longest input. Model files are cut to this: their headers are shorter, and weights are not read.
const INPUT_BYTES: usize = 32 << 10;

const DEFAULT_SECONDS: u64 = 60;

/// What one input may cost before it counts as a failure. Seconds are those of the clock, and the machine may be busy:
/// the slowest inputs take one or two of the processor's.
const LIMITS: [&str; 3] = ["-timeout=60", "-rss_limit_mb=2048", "-malloc_limit_mb=256"];

/// Coverage as libFuzzer reads it, checks that a release build leaves out, and the address sanitizer.
const FLAGS: [&str; 9] = [
    "--cfg=fuzzing",
    "-Cdebug-assertions",
    "-Ccodegen-units=1",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Zsanitizer=address",
];

/// `fuzz TARGET [--seconds N]`.
pub(crate) fn run(workspace: &Workspace, args: &[String]) -> Result<Outcome> {
    let (name, seconds) = arguments(args)?;
    let Some(target) = TARGETS.iter().find(|target| target.name == name) else {
        let known = TARGETS.map(|target| target.name).join(" ");
        bail!("no fuzz target `{name}`; there are: {known}");
    };
    let folder = workspace.target.join("fuzz");
    let program = build(workspace, target, &folder.join("build"))?;
    let own = folder.join(target.name);
    let seeds = gather(workspace, target, &own.join("seeds"))?;
    let corpus = own.join("corpus");
    fs::create_dir_all(&corpus).context("cannot make the corpus folder")?;
    let mut fuzz = Command::new(program);
    fuzz.arg(&corpus).arg(&seeds).args(LIMITS).arg("-print_final_stats=1");
    fuzz.arg(format!("-max_len={INPUT_BYTES}")).arg(format!("-max_total_time={seconds}"));
    fuzz.arg(format!("-artifact_prefix={}/", own.display()));
    run_command(&mut fuzz)?;
    Ok(Outcome::Done)
}

fn arguments(args: &[String]) -> Result<(&str, u64)> {
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match words[..] {
        [target] => Ok((target, DEFAULT_SECONDS)),
        [target, "--seconds", seconds] => {
            let seconds =
                seconds.parse().with_context(|| format!("`{seconds}` is no number of seconds"))?;
            Ok((target, seconds))
        }
        _ => bail!("usage: cargo xtask fuzz TARGET [--seconds N]"),
    }
}

/// Builds one target and gives its program.
fn build(workspace: &Workspace, target: &Target, folder: &Path) -> Result<PathBuf> {
    let version = capture(Command::new("rustc").arg("-vV"))?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    let host = host.context("`rustc -vV` names no host")?;
    let mut build = cargo();
    build.args([
        "build",
        "--release",
        "--locked",
        "--bin",
        target.name,
        "--features",
        target.features,
    ]);
    build.arg("--manifest-path").arg(workspace.root.join("fuzz/Cargo.toml"));
    // With a target named, build scripts and macros are not instrumented.
    build.args(["--target", host]).arg("--target-dir").arg(folder);
    run_command(build.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", FLAGS.join(" ")))?;
    Ok(folder.join(host).join("release").join(target.name))
}

/// Puts what a target starts from into one folder.
fn gather(workspace: &Workspace, target: &Target, seeds: &Path) -> Result<PathBuf> {
    fs::create_dir_all(seeds).context("cannot make the folder of seeds")?;
    let files = workspace.files()?;
    for file in &files {
        if !target.seeds.iter().any(|folder| file.starts_with(folder)) {
            continue;
        }
        let seed = match target.kind {
            Seed::File(ending) if file.extension().is_some_and(|e| e == ending) => {
                read(workspace, file)?
            }
            Seed::Folder if file.file_name().is_some_and(|name| name == "config.json") => {
                folder(workspace, file, &files)?
            }
            _ => continue,
        };
        let name = file.to_string_lossy().replace('/', "-");
        let seed = &seed[..seed.len().min(INPUT_BYTES)];
        fs::write(seeds.join(name), seed).context("cannot write a seed")?;
    }
    Ok(seeds.to_owned())
}

fn read(workspace: &Workspace, file: &Path) -> Result<Vec<u8>> {
    let bytes = fs::read(workspace.root.join(file));
    bytes.with_context(|| format!("cannot read {}", file.display()))
}

/// A model folder as one seed.
fn folder(workspace: &Workspace, config: &Path, files: &[PathBuf]) -> Result<Vec<u8>> {
    let mut seed = read(workspace, config)?;
    let weights = files.iter().filter(|file| {
        let ending = file.extension().is_some_and(|ending| ending == "safetensors");
        ending && file.parent() == config.parent()
    });
    for file in weights {
        let bytes = read(workspace, file)?;
        let header = bytes.split_first_chunk().and_then(|(length, rest)| {
            rest.get(..usize::try_from(u64::from_le_bytes(*length)).ok()?)
        });
        seed.push(0);
        seed.extend(header.unwrap_or_default());
    }
    Ok(seed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn a_target_is_needed_and_seconds_are_a_number() {
        assert_eq!(arguments(&words(&["gguf"])).unwrap(), ("gguf", DEFAULT_SECONDS));
        assert_eq!(arguments(&words(&["gguf", "--seconds", "600"])).unwrap(), ("gguf", 600));
        for wrong in [&[][..], &["gguf", "--seconds"], &["gguf", "--seconds", "x"], &["a", "b"]] {
            assert!(arguments(&words(wrong)).is_err(), "{wrong:?}");
        }
    }
}

//! The hot set as a user meets it: a file that is written, read, and ignored with one line when it is not what it
//! should be.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

fn run(home: &Path, more: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sakia"));
    command.args(["run", "What is a compiler?", "--temperature", "0", "-n", "12"]).args(more);
    command.env_remove("SAKIA_MODEL").env("SAKIA_HOME", home);
    command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The answer, and lines about a hot set.
fn answer(home: &Path, more: &[&str]) -> (String, Vec<String>) {
    let output = run(home, more);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let stderr = text(&output.stderr);
    let lines = stderr.lines().filter(|line| line.contains("hot set")).map(str::to_owned);
    (text(&output.stdout), lines.collect())
}

fn files(home: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(home.join("hot-sets")) else { return Vec::new() };
    entries.map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn what_a_run_used_is_kept_and_read_by_the_next() {
    let home = tempfile::tempdir().unwrap();
    let receipt = home.path().join("receipt.json");
    let with_receipt = ["--receipt", receipt.to_str().unwrap()];
    let hot_set = || {
        let value: Value = serde_json::from_slice(&std::fs::read(&receipt).unwrap()).unwrap();
        value["hot_set"].clone()
    };
    let first = answer(home.path(), &with_receipt);
    assert_eq!(hot_set()["issued"], 0);
    let [file] = files(home.path()).try_into().unwrap();
    assert!(file.file_name().unwrap().to_str().unwrap().starts_with("sakia-demo-Q4_K_M-"));
    let written = std::fs::read(&file).unwrap();
    let second = answer(home.path(), &with_receipt);
    assert!(hot_set()["issued"].as_u64().unwrap() > 0, "{}", hot_set());
    assert_eq!(first, second);
    assert!(second.1.is_empty(), "{second:?}");
    assert_eq!(files(home.path()), std::slice::from_ref(&file), "no partial file is left");
    assert_ne!(std::fs::read(&file).unwrap(), written, "uses of both runs are in it");
    let without = answer(home.path(), &[&with_receipt[..], &["--no-hot-set"]].concat());
    assert_eq!((without, hot_set()), (first, Value::Null));
}

#[test]
fn without_a_hot_set_nothing_is_written() {
    let home = tempfile::tempdir().unwrap();
    answer(home.path(), &["--no-hot-set"]);
    assert!(std::fs::read_dir(home.path()).unwrap().next().is_none());
}

#[test]
fn a_file_that_is_no_hot_set_of_this_model_is_ignored_with_one_line_and_replaced() {
    let home = tempfile::tempdir().unwrap();
    let (expected, _) = answer(home.path(), &[]);
    let [file] = files(home.path()).try_into().unwrap();
    let good = std::fs::read(&file).unwrap();
    let changed = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] ^= byte;
        bytes
    };
    for (bytes, words) in [
        (changed(200, 0xFF), "checksum"),
        (good[..good.len() / 2].to_vec(), "bytes"),
        (Vec::new(), "no hot set of this program"),
        (b"GGUF is something else".to_vec(), "no hot set of this program"),
        (changed(8, 3), "version 2"),
        (changed(12, 1), "other files"),
        ([&good[..], &[0; 1000]].concat(), "bytes"),
    ] {
        std::fs::write(&file, bytes).unwrap();
        let (got, lines) = answer(home.path(), &[]);
        assert_eq!(got, expected);
        let [line] = lines.try_into().unwrap();
        assert!(line.contains("is ignored") && line.contains(words), "{line}");
        assert_eq!(answer(home.path(), &[]), (expected.clone(), Vec::new()), "{words}: replaced");
    }
}

#[test]
fn a_folder_that_cannot_be_written_is_a_note_and_no_error() {
    let home = tempfile::tempdir().unwrap();
    std::fs::write(home.path().join("hot-sets"), "a file where a folder is needed").unwrap();
    let (_, lines) = answer(home.path(), &[]);
    assert!(!lines.is_empty() && lines.iter().all(|line| line.starts_with("note: ")), "{lines:?}");
}

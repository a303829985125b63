//! `sakia fit-lookahead`, and what `--lookahead fitted` makes of its files.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

fn sakia(home: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sakia"));
    command.args(args).env_remove("SAKIA_MODEL").env("SAKIA_HOME", home);
    command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", stderr(output));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn ids(folder: &Path, len: u32) -> String {
    let ids: Vec<String> = (0..len).map(|i| (i * i * 37 % 8000).to_string()).collect();
    let file = folder.join("ids.txt");
    std::fs::write(&file, ids.join(" ")).unwrap();
    file.to_str().unwrap().to_owned()
}

fn bench<'a>(ids: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let bench = ["bench", "--ids-file", ids, "-p", "32", "-n", "20", "--memory", "200MiB"];
    [&bench[..], &["--slots", "120"], more].concat()
}

/// Lines about what was fitted.
fn notes(output: &Output) -> Vec<String> {
    let stderr = stderr(output);
    stderr.lines().filter(|line| line.contains("fitted")).map(str::to_owned).collect()
}

#[test]
fn what_was_fitted_is_found_again_and_changes_no_answer() {
    let home = tempfile::tempdir().unwrap();
    let ids = ids(home.path(), 52);
    let fit =
        ["fit-lookahead", "--text-file", "ARCHITECTURE.md", "-n", "1200", "--memory", "200MiB"];
    let run = |args: &[&str]| sakia(home.path(), args);
    let plain = run(&bench(&ids, &["--lookahead", "fitted"]));
    assert_eq!(notes(&plain).len(), 1, "nothing was fitted: {}", stderr(&plain));
    let plain = json(&plain);
    assert_eq!(plain["lookahead"]["kind"], "tap");

    let found = run(&[&fit[..], &["--json"]].concat());
    let report = json(&found);
    assert!(
        stderr(&found).contains("fitting to 960 tokens, 120 choose, 120 judge"),
        "{}",
        stderr(&found)
    );
    assert_eq!(report["layers"].as_array().unwrap().len(), 7);
    let [tap, fitted] = ["tap", "fitted"].map(|of| report[of]["recall"].as_f64().unwrap());
    assert!(tap > 0.4 && fitted > tap - 0.02, "{report:#}");
    let kept = std::fs::read_dir(home.path().join("lookahead")).unwrap();
    let [kept] =
        kept.map(|entry| entry.unwrap().path()).collect::<Vec<PathBuf>>().try_into().unwrap();
    let good = std::fs::read(&kept).unwrap();

    let corrected = run(&bench(&ids, &["--lookahead", "fitted"]));
    assert!(notes(&corrected).is_empty(), "{}", stderr(&corrected));
    let corrected = json(&corrected);
    assert_eq!(corrected["lookahead"]["kind"], "fitted");
    assert_eq!(corrected["output_hash"], plain["output_hash"]);

    // One that is damaged is ignored with one line, unless it was named.
    let mut bad = good.clone();
    bad[good.len() / 2] ^= 1;
    std::fs::write(&kept, &bad).unwrap();
    let ignored = run(&bench(&ids, &["--lookahead", "fitted"]));
    let [line] = notes(&ignored).try_into().unwrap();
    assert!(line.contains("is ignored: its checksum"), "{line}");
    assert_eq!(json(&ignored)["lookahead"]["kind"], "tap");
    let kept = kept.to_str().unwrap();
    let named = run(&bench(&ids, &["--lookahead", "fitted", "--lookahead-file", kept]));
    assert!(!named.status.success() && stderr(&named).contains("checksum"), "{}", stderr(&named));
    std::fs::write(kept, &good).unwrap();
    let named = run(&bench(&ids, &["--lookahead", "fitted", "--lookahead-file", kept]));
    assert_eq!(json(&named)["lookahead"]["kind"], "fitted");
    let useless = run(&bench(&ids, &["--lookahead", "tap", "--lookahead-file", kept]));
    assert!(!useless.status.success() && stderr(&useless).contains("--lookahead fitted"));
}

#[test]
fn a_table_is_printed_and_a_file_of_that_name_written() {
    let home = tempfile::tempdir().unwrap();
    let (ids, out) = (ids(home.path(), 200), home.path().join("fitted"));
    let out = out.to_str().unwrap();
    let fit = ["fit-lookahead", "--ids-file", &ids, "--held-out", &ids, "-o", out];
    let fitted = sakia(home.path(), &[&fit[..], &["--memory", "200MiB"]].concat());
    assert!(fitted.status.success(), "{}", stderr(&fitted));
    let table = String::from_utf8(fitted.stdout).unwrap();
    // Two lines of heads, seven layers, all of them.
    assert_eq!(table.lines().count(), 10, "{table}");
    assert!(table.lines().last().unwrap().trim_start().starts_with("all "), "{table}");
    assert!(std::fs::read(out).unwrap().starts_with(b"SAKIAFIT"));
    assert!(!home.path().join("lookahead").exists());
}

#[test]
fn texts_that_cannot_be_fitted_to_are_refused_by_name() {
    let home = tempfile::tempdir().unwrap();
    let short = ids(home.path(), 40);
    for (args, words) in [
        (&["--ids-file", short.as_str()][..], "at least 64 are needed"),
        (&["--text-file", "no/such.txt"], "no/such.txt"),
        (&["--text-file", "ARCHITECTURE.md", "--memory", "30MiB"], "too little memory"),
        (&["--text-file", "README.md", "-o", "README.md"], "read by this very command"),
    ] {
        let refused = sakia(home.path(), &[&["fit-lookahead"], args].concat());
        assert!(!refused.status.success());
        assert!(stderr(&refused).contains(words), "{}", stderr(&refused));
    }
}

#[test]
fn a_simulated_disk_is_said_in_the_receipt() {
    let home = tempfile::tempdir().unwrap();
    let ids = ids(home.path(), 52);
    let disk = ["--simulate-disk", "latency=0.1ms,rate=2GB/s"];
    let receipt = json(&sakia(home.path(), &bench(&ids, &disk)));
    assert_eq!(receipt["simulated_disk"]["latency_us"], 100);
    assert_eq!(receipt["simulated_disk"]["bytes_per_second"], 2_000_000_000_u64);
    let plain = json(&sakia(home.path(), &bench(&ids, &[])));
    assert_eq!(plain["simulated_disk"], Value::Null);
    assert_eq!(plain["output_hash"], receipt["output_hash"]);
}

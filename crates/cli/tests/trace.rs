//! `sakia trace` and `sakia simulate`: what is recorded is what the engine did, and what is replayed is what it would do.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn sakia(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sakia"));
    command.args(args).env_remove("SAKIA_MODEL");
    command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", stderr(output));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn ids(folder: &Path) -> String {
    let ids: Vec<String> = (0..120).map(|i| (i * i * 37 % 8000).to_string()).collect();
    let file = folder.join("ids.txt");
    std::fs::write(&file, ids.join(" ")).unwrap();
    file.to_str().unwrap().to_owned()
}

#[test]
fn a_replay_reads_what_the_engine_read() {
    let folder = tempfile::tempdir().unwrap();
    let (ids, trace) = (ids(folder.path()), folder.path().join("demo.trace"));
    let trace = trace.to_str().unwrap();
    let range = ["--ids-file", &ids, "-p", "70", "-n", "50", "--memory", "200MiB"];
    let recorded = sakia(&[&["trace", "-o", trace, "--json"], &range[..]].concat());
    assert_eq!(json(&recorded)["decode_tokens"], 50);
    for slots in ["40", "100", "200"] {
        let policies = ["clock", "lru", "segmented", "frequency", "s3-fifo", "arc", "per-layer"];
        let replayed = sakia(&["simulate", trace, "--slots", slots, "--json"]);
        let replayed = json(&replayed);
        for (at, policy) in policies.into_iter().enumerate() {
            if slots != "100" && at > 1 {
                continue;
            }
            let bench = ["bench", "--slots", slots, "--policy", policy, "--pass", "1024"];
            let receipt = json(&sakia(&[&bench[..], &range[..]].concat()));
            let replay = &replayed["replays"][at];
            assert_eq!(replay["policy"], policy);
            assert_eq!(replay["prefill"]["misses"], receipt["prefill"]["misses"], "{slots}");
            // The receipt leaves out the first decoded token.
            let [replayed, engine] = [replay, &receipt].map(|of| of["decode"]["misses"].as_u64());
            let (replayed, engine) = (replayed.unwrap(), engine.unwrap());
            let first = replayed.checked_sub(engine).unwrap();
            let most = replay["decode"]["lookups"].as_u64().unwrap() / 50;
            assert!(first <= most, "{slots} {policy}: {replayed} and {engine} misses");
        }
        let misses = |at: usize| {
            let of = |part| replayed["replays"][at][part]["misses"].as_u64().unwrap();
            of("prefill") + of("decode")
        };
        let bound = misses(policies.len());
        assert!((0..policies.len()).all(|at| bound <= misses(at)), "Belady is the bound");
    }
}

#[test]
fn a_text_is_continued_and_a_table_is_printed() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("demo.trace");
    let trace = trace.to_str().unwrap();
    let recorded = sakia(&["trace", "The wheel", "-n", "8", "-o", trace]);
    assert!(recorded.status.success(), "{}", stderr(&recorded));
    let replayed = sakia(&["simulate", trace, "--slots", "60,120", "--policy", "lru"]);
    assert!(replayed.status.success(), "{}", stderr(&replayed));
    let table = String::from_utf8(replayed.stdout).unwrap();
    let rows: Vec<&str> = table.lines().skip(2).collect();
    assert_eq!(rows.len(), 2, "{table}");
    assert!(rows.iter().all(|row| row.contains(" lru ")), "{table}");
}

#[test]
fn what_is_no_trace_is_named_and_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.trace");
    for (bytes, words) in [
        (&b"GGUF"[..], "does not begin with"),
        (b"SAKIATRC\x09\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", "version 9"),
        (b"SAKIATRC\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", "0 layers"),
        (b"SAKIATRC\x01\0", "bytes"),
    ] {
        std::fs::write(&file, bytes).unwrap();
        let output = sakia(&["simulate", file.to_str().unwrap(), "--slots", "9"]);
        assert_eq!(output.status.code(), Some(1));
        let error = stderr(&output);
        assert!(error.contains(words) && error.contains("x.trace"), "{error}");
    }
    let folder = folder.path().to_str().unwrap();
    let output = sakia(&["simulate", folder, "--slots", "9"]);
    assert!(stderr(&output).contains("not a regular file"), "{}", stderr(&output));
    assert_eq!(sakia(&["simulate"]).status.code(), Some(2), "routing is needed");
    assert_eq!(sakia(&["trace", "text"]).status.code(), Some(2), "a file is needed");
}

#[test]
fn made_routing_is_timed_and_drawn() {
    let folder = tempfile::tempdir().unwrap();
    let [curves, heat_map] = ["curves.svg", "heat.svg"].map(|name| folder.path().join(name));
    let pictures = ["--curves", curves.to_str().unwrap(), "--heat-map", heat_map.to_str().unwrap()];
    let made = ["simulate", "--synthetic", "olmoe,layers=4,tokens=40", "--slots", "40,80,256"];
    let time = ["--disk", "1GB", "--layer-ms", "1", "--recall", "0.7", "--json"];
    let value = json(&sakia(&[&made[..], &pictures[..], &time[..]].concat()));
    let replays = value["replays"].as_array().unwrap();
    assert_eq!(replays.len(), 3 * 8);
    for replay in replays {
        let [alone, forecast] = ["stall_us_per_token", "stall_us_per_token_with_forecast"]
            .map(|name| replay[name].as_f64().unwrap());
        let read = replay["decode"]["read_bytes_per_token"].as_f64().unwrap();
        assert!((alone - read / 1e3).abs() < 1.0, "a byte takes a nanosecond: {replay}");
        assert!(forecast < alone, "{replay}");
    }
    let curves = std::fs::read_to_string(curves).unwrap();
    assert!(curves.starts_with("<svg") && curves.contains("belady"), "{curves}");
    let heat_map = std::fs::read_to_string(heat_map).unwrap();
    assert!(heat_map.matches("<rect").count() >= 4 * 64);
    for (flags, words) in [
        (&["--recall", "2", "--disk", "1GB", "--layer-ms", "1"][..], "0 to 1"),
        (&["--disk", "0", "--layer-ms", "1"], "at least one byte"),
        (&["--slots", "3"], "too few"),
        (&["--curves", "/nowhere/x.svg"], "/nowhere/x.svg"),
    ] {
        let output = sakia(&[&made[..3], flags].concat());
        assert_eq!(output.status.code(), Some(1), "{flags:?}");
        assert!(stderr(&output).contains(words), "{}", stderr(&output));
    }
}

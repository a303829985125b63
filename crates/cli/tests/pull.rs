//! `sakia pull` as a user runs it: output, exit codes, and processes that are killed.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../../hub/tests/server/mod.rs"]
mod server;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use server::{COMMIT, Reply, Repository, Server, noise};

fn command(home: &Path, server: &Server, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sakia"));
    command.args(args).env("SAKIA_HOME", home).env("HF_ENDPOINT", server.url());
    command.env("HF_HOME", home.join("none"));
    for variable in ["SAKIA_MODEL", "HF_TOKEN", "HF_TOKEN_PATH", "SSL_CERT_FILE"] {
        command.env_remove(variable);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn sakia(home: &Path, server: &Server, args: &[&str]) -> Output {
    command(home, server, args).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The files under their final names.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let files = entries.filter(|entry| entry.path().is_file());
    files
        .map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap()))
        .collect()
}

fn model() -> Repository {
    Repository::new(&[
        ("config.json", b"{}\n".to_vec()),
        ("model-00001-of-00002.safetensors", noise(1, 700_000)),
        ("model-00002-of-00002.safetensors", noise(2, 500_000)),
        ("model.safetensors.index.json", noise(5, 900)),
        ("tokenizer.json", noise(3, 40_000)),
    ])
}

/// About 400 kB/s over four connections.
fn slow() -> Server {
    let model = model();
    Server::start(move |asked| Reply {
        piece: 2000,
        pause: Duration::from_millis(20),
        ..model.reply(asked)
    })
}

#[test]
fn twenty_kills_at_random_points_leave_no_trace_in_the_result() {
    let (server, home) = (slow(), tempfile::tempdir().unwrap());
    let folder = home.path().join("models/org/name");
    let wanted = model().files;
    let random = noise(42, 20);
    let (mut killed, mut with_bytes) = (0, 0);
    for byte in random {
        let mut child = command(home.path(), &server, &["pull", "org/name"]).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(60 + 3 * u64::from(byte)));
        killed += u32::from(child.try_wait().unwrap().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
        for (name, content) in files(&folder) {
            assert!(wanted[&name] == content, "{name} has its final name and is not whole");
        }
        let partial = folder.join(".sakia/incoming/model-00001-of-00002.safetensors.partial.json");
        let record = fs::read_to_string(partial).unwrap_or_default();
        with_bytes +=
            u32::from(record.contains("\"done\"") && !record.contains("\"done\": [\n    0\n"));
        if folder.join(".sakia/snapshot.json").exists() {
            assert!(files(&folder) == wanted, "a model that is recorded is whole");
            fs::remove_dir_all(&folder).unwrap();
        }
    }
    assert!(killed >= 15, "{killed} of 20 were still at work");
    assert!(with_bytes >= 5, "{with_bytes} of 20 left something to go on from");
    let fast = Server::of(model());
    let output = sakia(home.path(), &fast, &["pull", "org/name"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(files(&folder) == wanted);
    assert!(!folder.join(".sakia/incoming").exists(), "nothing unfinished is left");
}

#[test]
fn ctrl_c_says_how_far_it_came_and_the_next_run_goes_on() {
    let (server, home) = (slow(), tempfile::tempdir().unwrap());
    let child = command(home.path(), &server, &["pull", "org/name"]).spawn().unwrap();
    let start = Instant::now();
    while server.bytes() < 150_000 {
        assert!(start.elapsed() < Duration::from_secs(30));
        std::thread::sleep(Duration::from_millis(5));
    }
    let kill = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(kill.success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    let text = stderr(&output);
    assert!(
        text.contains("stopped with") && text.contains("hint: run the same command again"),
        "{text}"
    );
    let fast = Server::of(model());
    let output = sakia(home.path(), &fast, &["pull", "--json", "org/name"]);
    let pulled: Value = serde_json::from_str(&stdout(&output)).unwrap();
    let total: usize = model().files.values().map(Vec::len).sum();
    assert!(pulled["fetched_bytes"].as_u64().unwrap() < total as u64 - 100_000, "{pulled:#}");
    assert!(files(&home.path().join("models/org/name")) == model().files);
}

#[test]
fn a_dry_run_lists_files_and_fetches_nothing() {
    let (server, home) = (Server::of(model()), tempfile::tempdir().unwrap());
    let output = sakia(home.path(), &server, &["pull", "--dry-run", "org/name"]);
    let text = stdout(&output);
    assert!(output.status.success(), "{}", stderr(&output));
    let words =
        [COMMIT, "model-00001-of-00002.safetensors", "683.6 KiB", "total", "1.2 MiB to fetch"];
    for word in words {
        assert!(text.contains(word), "{word}: {text}");
    }
    let output = sakia(home.path(), &server, &["pull", "--dry-run", "--json", "org/name"]);
    let plan: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(plan["files"].as_array().unwrap().len(), 5);
    assert_eq!(plan["total_bytes"], 700_000 + 500_000 + 40_000 + 900 + 3);
    assert_eq!(plan["remaining_bytes"], plan["total_bytes"]);
    assert_eq!(plan["revision"], COMMIT);
    assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0);
}

#[test]
fn a_pipe_gets_one_line_and_errors_have_classes() {
    let (server, home) = (Server::of(model()), tempfile::tempdir().unwrap());
    let output = sakia(home.path(), &server, &["pull", "org/name"]);
    assert_eq!(stdout(&output), format!("{}\n", home.path().join("models/org/name").display()));
    assert_eq!(stderr(&output).lines().count(), 1, "{}", stderr(&output));
    let gone = Server::start(|_| Reply::new(404, ""));
    for (server, args, class, words) in [
        (&gone, &["pull", "--json", "org/name"][..], "not-found", "spelling"),
        (&server, &["pull", "--json", "name"][..], "config", "org/name"),
        (&server, &["pull", "--json", "org/name:Q4_0"][..], "unsupported", "GGUF"),
        (&server, &["pull", "--json", "--include", "*.onnx", "org/name"][..], "config", "*.onnx"),
    ] {
        let output = sakia(home.path(), server, args);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        let error: Value = serde_json::from_str(&stdout(&output)).unwrap();
        assert_eq!(error["error"]["class"], class, "{args:?}: {error:#}");
        assert!(stderr(&output).contains(words), "{args:?}: {}", stderr(&output));
    }
}

#[test]
fn a_pulled_model_is_opened_by_its_name() {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let demo = fs::read(root.join("models/sakia-demo-Q4_K_M.gguf")).unwrap();
    let server = Server::of(Repository::new(&[("demo-Q4_K_M.gguf", demo)]));
    let home = tempfile::tempdir().unwrap();
    let output = sakia(home.path(), &server, &["inspect", "-m", "org/name"]);
    assert!(stderr(&output).contains("hint: sakia pull org/name"), "{}", stderr(&output));
    let output = sakia(home.path(), &server, &["pull", "org/name"]);
    assert!(output.status.success(), "{}", stderr(&output));
    for name in ["org/name", "org/name:Q4_K_M", stdout(&output).trim()] {
        let output = sakia(home.path(), &server, &["inspect", "--json", "-m", name]);
        assert!(output.status.success(), "{name}: {}", stderr(&output));
    }
    let output = sakia(home.path(), &server, &["inspect", "-m", "org/name:Q8_0"]);
    assert!(stderr(&output).contains("Q4_K_M"), "{}", stderr(&output));
}

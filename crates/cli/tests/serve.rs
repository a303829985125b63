//! `sakia serve` as a process, with the demo model; and what goes with it.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

const QUESTION: &str = "What is a compiler?";

fn sakia() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sakia"));
    command.env_remove("SAKIA_MODEL").env_remove("SAKIA_API_KEY");
    command.env("SAKIA_HOME", env!("CARGO_TARGET_TMPDIR"));
    command
}

struct Server {
    process: Child,
    address: String,
}

impl Server {
    fn start(args: &[&str]) -> Self {
        let mut process = sakia()
            .args(["serve", "--only", "--port", "0", "--threads", "1"])
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("http://").expect("it says where it is").to_owned();
        Self { process, address }
    }

    fn request(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let (host, length) = (&self.address, body.len());
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
        let body = answer.split_once("\r\n\r\n").unwrap().1;
        (status, serde_json::from_str(body).unwrap_or(Value::String(body.to_owned())))
    }

    fn ask(&self, question: &str) -> String {
        let body = json!({ "messages": [{ "role": "user", "content": question }],
                           "temperature": 0, "max_tokens": 16, "reasoning_effort": "none" });
        let (status, answer) = self.request("POST", "/v1/chat/completions", &body.to_string());
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn an_answer_over_http_is_the_one_at_the_terminal_whoever_else_asks() {
    let at_terminal = sakia()
        .args(["run", QUESTION, "--temperature", "0", "-n", "16", "--quiet", "--threads", "1"])
        .output()
        .unwrap();
    let expected = String::from_utf8(at_terminal.stdout).unwrap().trim_end().to_owned();
    let server = Server::start(&[]);
    assert_eq!(server.ask(QUESTION).trim_end(), expected);
    let others = ["Name a colour.", QUESTION, "What is a whale?", QUESTION];
    let answers: Vec<String> = std::thread::scope(|scope| {
        let asked: Vec<_> = others.iter().map(|text| scope.spawn(|| server.ask(text))).collect();
        asked.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!((answers[1].trim_end(), answers[3].trim_end()), (&*expected, &*expected));
    let (_, metrics) = server.request("GET", "/metrics", "");
    assert!(metrics.as_str().unwrap().contains("\nsakia_jobs_finished_total 5\n"), "{metrics}");
}

#[test]
fn a_server_that_cannot_be_is_refused_at_once_with_a_hint() {
    for (args, needed) in [
        (&["--host", "0.0.0.0"][..], "hint: `--api-key KEY`"),
        (&["--memory", "8MiB"], "too little memory"),
        (&["--api-key", "a key"], "visible ASCII"),
        (&["--keep-alive", "soon"], "--keep-alive soon"),
    ] {
        let output = sakia().args(["serve", "--port", "0"]).args(args).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {stderr}");
        assert!(stderr.contains(needed), "{args:?}: {stderr}");
    }
}

#[test]
fn a_server_that_nobody_asks_ends_when_it_was_told_to() {
    let mut server = Server::start(&["--idle-exit", "0s"]);
    assert!(server.process.wait().unwrap().success());
}

#[test]
fn an_agent_is_wired_by_environment_and_arguments() {
    let dry = |agent: &str| {
        let args = ["launch", agent, "--dry-run", "--model", "org/name", "--", "--version"];
        let output = sakia().args(args).output().unwrap();
        (output.status.success(), String::from_utf8(output.stdout).unwrap())
    };
    let (done, text) = dry("claude");
    assert!(done && text.contains("ANTHROPIC_BASE_URL=http://127.0.0.1:8484\n"), "{text}");
    assert!(
        text.contains("ANTHROPIC_MODEL=org/name\n") && text.ends_with("claude --version\n"),
        "{text}"
    );
    assert!(!dry("nobody").0);
}

#[test]
fn an_empty_store_is_listed_and_nothing_is_removed_from_it_unasked() {
    let home = tempfile::tempdir().unwrap();
    let store = |args: &[&str]| sakia().env("SAKIA_HOME", home.path()).args(args).output().unwrap();
    let list = store(&["list", "--json"]);
    assert_eq!(serde_json::from_slice::<Value>(&list.stdout).unwrap(), json!({ "models": [] }));
    let removed = store(&["rm", "org/name", "--yes"]);
    assert_eq!(removed.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&removed.stderr).contains("org/name"));
}

//! `sakia serve` as a process, with the demo model; and what goes with it.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::net::TcpStream;
use std::path::Path;
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
        request(&self.address, "", method, path, body)
    }

    fn ask(&self, question: &str) -> String {
        let body = json!({ "messages": [{ "role": "user", "content": question }],
                           "temperature": 0, "max_tokens": 16, "reasoning_effort": "none" });
        let (status, answer) = self.request("POST", "/v1/chat/completions", &body.to_string());
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
    }
}

fn request(address: &str, headers: &str, method: &str, path: &str, body: &str) -> (u16, Value) {
    let mut stream = TcpStream::connect(address).unwrap();
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n{headers}content-length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
    let body = answer.split_once("\r\n\r\n").unwrap().1;
    (status, serde_json::from_str(body).unwrap_or(Value::String(body.to_owned())))
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

/// The file of the model breaks while it is being served, and comes back.
#[test]
fn a_read_that_fails_is_told_to_who_waits_for_it_and_the_next_answer_is_whole() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("demo.gguf");
    let original = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/sakia-demo-Q4_K_M.gguf");
    std::fs::copy(original, &model).unwrap();
    let bytes = std::fs::read(&model).unwrap();
    let size = ["--memory", "64MiB", "--context", "512", "--sequences", "1"];
    let small = ["--max-connections", "8", "--request-memory", "2MiB", "--queue", "4"];
    let from = ["-m", model.to_str().unwrap()];
    let server = Server::start(&[&from[..], &size, &small].concat());
    let expected = server.ask(QUESTION);
    let modified = std::fs::metadata(&model).unwrap().modified().unwrap();
    let mut file = std::fs::File::options().write(true).open(&model).unwrap();
    file.set_len(bytes.len() as u64 / 8).unwrap();
    let about = |n: usize, path: &str, stream: bool| {
        let body = json!({ "model": "demo", "max_tokens": 16, "temperature": 0, "stream": stream,
            "messages": [{ "role": "user", "content": format!("Name {n} colours of the sea and the sky.") }] });
        server.request("POST", path, &body.to_string())
    };
    // Experts that are there still answer: another question needs others.
    let broken = |path: &str, stream: bool| {
        let mut answers = (0..50).map(|n| about(n, path, stream));
        answers.find(|(_, answer)| answer.to_string().contains("broke off")).expect("a read fails")
    };
    for path in ["/v1/chat/completions", "/v1/messages"] {
        let (status, answer) = broken(path, false);
        assert_eq!(status, 500, "{answer}");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains("broke off") && message.contains("demo.gguf"), "{message}");
        let (status, events) = broken(path, true);
        let events = events.as_str().unwrap();
        assert!(status == 200 && events.contains("broke off"), "{events}");
    }
    // That is no reason to end.
    assert_eq!(server.request("GET", "/health", "").1["status"], "ok");
    // A fault that passes is over when it has passed.
    let mut put_back = || {
        file.seek(SeekFrom::Start(0)).unwrap();
        file.write_all(&bytes).unwrap();
        file.sync_all().unwrap();
        file.set_len(bytes.len() as u64).unwrap();
    };
    put_back();
    let opened = std::fs::File::options().write(true).open(&model).unwrap();
    opened.set_modified(modified).unwrap();
    assert_eq!(about(0, "/v1/chat/completions", false).0, 200);
    assert_eq!(server.ask(QUESTION), expected);
    // A file that somebody has changed is another one, until it is opened again.
    opened.set_len(bytes.len() as u64 / 8).unwrap();
    broken("/v1/chat/completions", false);
    put_back();
    let (status, answer) = broken("/v1/chat/completions", false);
    let message = answer["error"]["message"].as_str().unwrap_or_default();
    assert!(status == 500 && message.contains("changed while it was in use"), "{answer}");
    let unload = json!({ "model": "demo", "keep_alive": 0 }).to_string();
    assert_eq!(server.request("POST", "/api/generate", &unload).0, 200);
    assert_eq!(server.ask(QUESTION), expected);
}

/// A long beginning, in a dialect, and how much of it did not have to be read again.
fn cached(server: &Server, path: &str, beginning: &str) -> (u64, String) {
    let text = beginning.repeat(40);
    let mut body = json!({ "model": "default", "temperature": 0, "max_tokens": 8 });
    if path.ends_with("responses") {
        body = json!({ "temperature": 0, "max_output_tokens": 8, "input": text,
                       "reasoning": { "effort": "none" } });
    } else {
        body["messages"] = json!([{ "role": "user", "content": text }]);
        if path.ends_with("completions") {
            body["reasoning_effort"] = "none".into();
        }
    }
    let (status, answer) = server.request("POST", path, &body.to_string());
    assert_eq!(status, 200, "{answer}");
    let usage = &answer["usage"];
    let (cached, prompt, said) = if path.ends_with("messages") {
        let cached = usage["cache_read_input_tokens"].as_u64().unwrap();
        let prompt = cached + usage["input_tokens"].as_u64().unwrap();
        (cached, prompt, &answer["content"][0]["text"])
    } else if path.ends_with("responses") {
        let details = &usage["input_tokens_details"];
        let said = &answer["output"][0]["content"][0]["text"];
        (details["cached_tokens"].as_u64().unwrap(), usage["input_tokens"].as_u64().unwrap(), said)
    } else {
        let details = &usage["prompt_tokens_details"];
        let said = &answer["choices"][0]["message"]["content"];
        (details["cached_tokens"].as_u64().unwrap(), usage["prompt_tokens"].as_u64().unwrap(), said)
    };
    assert!(prompt > 200, "the beginning is long enough: {answer}");
    assert!(cached == 0 || cached == (prompt - 1) / 64 * 64, "{cached} of {prompt}");
    (cached, said.as_str().unwrap().to_owned())
}

#[cfg(unix)]
#[test]
fn what_was_read_of_a_prompt_is_kept_in_memory_and_after_a_restart_and_every_dialect_tells() {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().to_str().unwrap();
    let paths = ["/v1/chat/completions", "/v1/messages", "/v1/responses"];
    let start = || {
        let size = ["--memory", "224MiB", "--context", "1024", "--sequences", "1"];
        let prefix = ["--prefix-memory", "96MiB", "--prefix-disk", disk, "--grace", "1h"];
        Server::start(&[&size[..], &prefix].concat())
    };
    let (one, other) = ("The sea is blue, the sky is too. ", "Seven cats sat on a mat. ");
    let mut server = start();
    let (read, said) = cached(&server, paths[0], one);
    assert_eq!(read, 0, "nothing was there");
    for path in paths {
        // Another text takes the sequence.
        cached(&server, path, other);
        let (read, again) = cached(&server, path, one);
        assert!(read > 192, "{path}: {read}");
        assert_eq!(again, said, "{path}");
    }
    let id = server.process.id().to_string();
    assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    assert!(server.process.wait().unwrap().success());
    for path in paths {
        let server = start();
        let (read, again) = cached(&server, path, one);
        assert!(read > 192, "{path} after a restart: {read}");
        assert_eq!(again, said, "{path} after a restart");
    }
}

/// The program that the next test takes for an agent, which is this one.
const AGENT: &str = "SAKIA_TEST_AGENT_TELLS";

#[test]
fn an_agent_that_was_launched_asks_the_server() {
    let Some(told) = std::env::var_os(AGENT) else { return };
    let set = |name: &str| std::env::var(name).unwrap_or_default();
    let address = set("ANTHROPIC_BASE_URL");
    let headers = format!(
        "authorization: Bearer {}\r\nanthropic-version: 2023-06-01\r\n",
        set("ANTHROPIC_AUTH_TOKEN")
    );
    let body = json!({ "model": set("ANTHROPIC_MODEL"), "max_tokens": 4,
                       "messages": [{ "role": "user", "content": "Hello" }] });
    let address = address.strip_prefix("http://").unwrap();
    let answer = request(address, &headers, "POST", "/v1/messages", &body.to_string());
    let args: Vec<String> = std::env::args().skip(1).collect();
    let tells = json!({ "args": args, "status": answer.0, "answer": answer.1,
                        "context": set("CLAUDE_CODE_MAX_CONTEXT_TOKENS") });
    std::fs::write(Path::new(&told), tells.to_string()).unwrap();
}

#[cfg(unix)]
#[test]
fn a_launched_agent_finds_the_server_by_its_environment() {
    let folder = tempfile::tempdir().unwrap();
    let told = folder.path().join("told.json");
    std::os::unix::fs::symlink(std::env::current_exe().unwrap(), folder.path().join("claude"))
        .unwrap();
    let server = Server::start(&["--api-key", "secret", "--context", "512"]);
    let args = ["--exact", "an_agent_that_was_launched_asks_the_server", "--nocapture"];
    let launch = |key: &str| {
        let mut command = sakia();
        command.args(["launch", "claude", "--server", &server.address, "--api-key", key, "--"]);
        command.args(args).env("PATH", folder.path()).env(AGENT, &told).output().unwrap()
    };
    let output = launch("secret");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert!(stderr.contains("wants a context of"), "512 tokens are too few: {stderr}");
    let tells: Value = serde_json::from_slice(&std::fs::read(&told).unwrap()).unwrap();
    assert_eq!(tells["args"], json!(args));
    assert_eq!((&tells["status"], &tells["context"]), (&json!(200), &json!("512")), "{tells}");
    assert_eq!(tells["answer"]["role"], "assistant", "{tells}");
    let refused = launch("wrong");
    assert!(!refused.status.success());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("API key is wrong"));
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

//! The server as clients meet it, over sockets, with answers that are written down.

mod anthropic;
mod clients;
mod golden;
mod http;
mod ollama;
mod openai;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::Value;

use crate::chat::KeepAlive;
use crate::listen::{Options, ServeError, Times, serve};
use crate::testing::{DEMO, Line, Script, Scripts};

/// A server with a script; ends when it is dropped.
struct Server {
    address: SocketAddr,
    script: Arc<Script>,
    shelf: Arc<Scripts>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<(), ServeError>>>,
}

/// What came back.
#[derive(Debug)]
struct Reply {
    status: u16,
    head: String,
    body: String,
}

impl Reply {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    }

    /// The data of server-sent events, those that are JSON; comments and `[DONE]` are left out.
    fn events(&self) -> Vec<Value> {
        let data = self.body.lines().filter_map(|line| line.strip_prefix("data: "));
        data.filter(|data| *data != "[DONE]")
            .map(|data| serde_json::from_str(data).unwrap())
            .collect()
    }

    fn lines(&self) -> Vec<Value> {
        self.body.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

impl Server {
    fn start(lines: impl IntoIterator<Item = Line>) -> Self {
        Self::with(lines, |_| {})
    }

    fn with(lines: impl IntoIterator<Item = Line>, change: impl FnOnce(&mut Options)) -> Self {
        let mut options = Options {
            address: ([127, 0, 0, 1], 0).into(),
            api_key: None,
            allow_anyone: false,
            cors_origins: Vec::new(),
            max_body: 64 << 10,
            request_memory: 8 << 20,
            times: Times::default(),
            max_connections: 16,
            keep_alive: KeepAlive::Forever,
            idle_exit: None,
            default_model: Some(DEMO.to_owned()),
            grace: Duration::ZERO,
            log: None,
        };
        change(&mut options);
        let script = Script::new(lines);
        let shelf = Arc::new(Scripts::new(&script));
        let stop = Arc::new(AtomicBool::new(false));
        let (sender, receiver) = std::sync::mpsc::channel();
        let (own_shelf, own_stop) = (Arc::clone(&shelf), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            let stop = || own_stop.load(Ordering::Relaxed);
            serve(options, own_shelf, &stop, |address| sender.send(address).unwrap())
        });
        let address = receiver.recv().unwrap();
        Self { address, script, shelf, stop, thread: Some(thread) }
    }

    fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).unwrap()
    }

    /// Sends bytes as they are and reads what comes back to its end.
    fn raw(&self, request: &[u8]) -> Reply {
        let mut stream = self.connect();
        // Whoever is refused early may not read all of it.
        let _ = stream.write_all(request);
        read_reply(&mut stream)
    }

    fn request(&self, method: &str, path: &str, headers: &str, body: &str) -> Reply {
        self.raw(self.text(method, path, headers, body).as_bytes())
    }

    fn text(&self, method: &str, path: &str, headers: &str, body: &str) -> String {
        let (host, length) = (self.address, body.len());
        format!(
            "{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n{headers}content-length: {length}\r\n\r\n{body}"
        )
    }

    fn get(&self, path: &str) -> Reply {
        self.request("GET", path, "", "")
    }

    fn post(&self, path: &str, body: &Value) -> Reply {
        self.request("POST", path, "content-type: application/json\r\n", &body.to_string())
    }

    /// How it ended, when it has.
    fn ended(mut self) -> Result<(), ServeError> {
        self.thread.take().unwrap().join().unwrap()
    }

    /// The prompts that reached the model.
    fn prompts(&self) -> Vec<String> {
        self.script.prompts.lock().unwrap().clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let Some(thread) = self.thread.take() else { return };
        let ended = thread.join();
        let is_fine = matches!(ended, Ok(Ok(())));
        assert!(std::thread::panicking() || is_fine, "the server ended with {ended:?}");
    }
}

fn read_reply(stream: &mut TcpStream) -> Reply {
    let mut bytes = Vec::new();
    // A connection that is cut ends the text as well.
    let _ = stream.read_to_end(&mut bytes);
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
    let is_chunked = head.contains("transfer-encoding: chunked");
    let body = if is_chunked { unchunked(body) } else { body.to_owned() };
    Reply { status, head: head.to_owned(), body }
}

fn unchunked(mut body: &str) -> String {
    let mut out = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size.trim(), 16).unwrap_or(0);
        if size == 0 || rest.len() < size {
            break;
        }
        out.push_str(&rest[..size]);
        body = rest[size..].trim_start_matches("\r\n");
    }
    out
}

//! A host in a thread: HTTP/1.1 over plain sockets, so that it can do everything that a real one should not.
#![allow(dead_code, reason = "each test program uses its own part of it")]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sha1::Sha1;
use sha2::{Digest, Sha256};

pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Files from this size on are in large file storage.
const LARGE: usize = 1000;

/// What a client asked for.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub(crate) path: String,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) range: Option<Range<u64>>,
}

/// What the host says. Lies are allowed.
#[derive(Debug, Clone)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
    pub(crate) length: Length,
    /// Hang up after so many bytes of the body.
    pub(crate) cut: Option<usize>,
    /// Bytes between two pauses.
    pub(crate) piece: usize,
    pub(crate) pause: Duration,
    /// Go on sending the body for ever.
    pub(crate) endless: bool,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Length {
    True,
    Lie(u64),
    /// The end of the connection is the end of the body.
    Unsaid,
    Chunked,
}

impl Reply {
    pub(crate) fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self {
            status,
            headers: Vec::new(),
            body: body.into(),
            length: Length::True,
            cut: None,
            piece: 64 << 10,
            pause: Duration::ZERO,
            endless: false,
        }
    }

    pub(crate) fn header(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.push((name.to_owned(), value.into()));
        self
    }

    pub(crate) fn redirect(to: impl Into<String>) -> Self {
        Self::new(302, "").header("Location", to)
    }

    /// A file, or the range of it that was asked for.
    pub(crate) fn file(content: &[u8], range: Option<Range<u64>>) -> Self {
        let size = content.len() as u64;
        let tag = format!("\"{}\"", sha256(content));
        match range {
            Some(range) if range.start >= size => {
                Self::new(416, "").header("Content-Range", format!("bytes */{size}"))
            }
            Some(range) => {
                let end = range.end.min(size);
                let body = &content[range.start as usize..end as usize];
                let value = format!("bytes {}-{}/{size}", range.start, end - 1);
                Self::new(206, body).header("Content-Range", value).header("ETag", tag)
            }
            None => Self::new(200, content).header("ETag", tag),
        }
    }
}

/// A repository as a well-behaved host has it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Repository {
    pub(crate) files: BTreeMap<String, Vec<u8>>,
}

impl Repository {
    pub(crate) fn new(files: &[(&str, Vec<u8>)]) -> Self {
        let files = files.iter().map(|(path, content)| ((*path).to_owned(), content.clone()));
        Self { files: files.collect() }
    }

    /// The answer to `/api/models/…?blobs=true`.
    pub(crate) fn listing(&self) -> String {
        let mut entries = Vec::new();
        for (path, content) in &self.files {
            let (size, blob) = (content.len(), git_blob(content));
            let mut entry =
                format!(r#"{{"rfilename": "{path}", "size": {size}, "blobId": "{blob}""#);
            if size >= LARGE {
                let hash = sha256(content);
                let _ = write!(
                    entry,
                    r#", "lfs": {{"sha256": "{hash}", "size": {size}, "pointerSize": 130}}"#
                );
            }
            entries.push(entry + "}");
        }
        format!(r#"{{"id": "org/name", "sha": "{COMMIT}", "siblings": [{}]}}"#, entries.join(","))
    }

    pub(crate) fn reply(&self, asked: &Asked) -> Reply {
        if asked.path.starts_with("/api/models/org/name/revision/") {
            return Reply::new(200, self.listing()).header("Content-Type", "application/json");
        }
        let front = format!("/org/name/resolve/{COMMIT}/");
        match asked.path.strip_prefix(&front).and_then(|path| self.files.get(path)) {
            Some(content) => Reply::file(content, asked.range.clone()),
            None => Reply::new(404, "no such file"),
        }
    }
}

/// A running host. Its threads end with the test program.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    pub(crate) asked: Arc<Mutex<Vec<Asked>>>,
    /// Bytes of bodies that went out.
    pub(crate) sent: Arc<AtomicU64>,
}

impl Server {
    pub(crate) fn start(reply: impl Fn(&Asked) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let (asked, sent) = (Arc::<Mutex<Vec<Asked>>>::default(), Arc::<AtomicU64>::default());
        let (log, counter) = (Arc::clone(&asked), Arc::clone(&sent));
        let reply = Arc::new(reply);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (log, counter, reply) =
                    (Arc::clone(&log), Arc::clone(&counter), Arc::clone(&reply));
                // A client that goes away is no error of the host's.
                std::thread::spawn(move || {
                    stream.and_then(|stream| talk(&stream, &log, &counter, &*reply))
                });
            }
        });
        Self { address, asked, sent }
    }

    pub(crate) fn of(repository: Repository) -> Self {
        Self::start(move |asked| repository.reply(asked))
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn log(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.sent.load(Ordering::SeqCst)
    }
}

fn talk(
    stream: &TcpStream,
    log: &Mutex<Vec<Asked>>,
    counter: &AtomicU64,
    reply: &dyn Fn(&Asked) -> Reply,
) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream);
    while let Some(asked) = read(&mut reader)? {
        log.lock().unwrap().push(asked.clone());
        let said = reply(&asked);
        if !send(stream, &said, counter)? {
            return Ok(());
        }
    }
    Ok(())
}

pub(crate) fn read(reader: &mut impl BufRead) -> std::io::Result<Option<Asked>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 || line.trim().is_empty() {
            break;
        }
        if let Some((name, value)) = line.trim().split_once(':') {
            headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
        }
    }
    let range = headers.get("range").and_then(|value| {
        let (first, last) = value.strip_prefix("bytes=")?.split_once('-')?;
        Some(first.parse().ok()?..last.parse::<u64>().ok()? + 1)
    });
    Ok(Some(Asked { path, headers, range }))
}

/// Whether the connection may be used again.
pub(crate) fn send(
    mut stream: impl Write,
    said: &Reply,
    counter: &AtomicU64,
) -> std::io::Result<bool> {
    let mut head = format!("HTTP/1.1 {} Word\r\n", said.status);
    for (name, value) in &said.headers {
        let _ = write!(head, "{name}: {value}\r\n");
    }
    match said.length {
        Length::True => {
            let _ = write!(head, "Content-Length: {}\r\n", said.body.len());
        }
        Length::Lie(length) => {
            let _ = write!(head, "Content-Length: {length}\r\n");
        }
        Length::Unsaid => head += "Connection: close\r\n",
        Length::Chunked => head += "Transfer-Encoding: chunked\r\n",
    }
    stream.write_all(head.as_bytes())?;
    stream.write_all(b"\r\n")?;
    loop {
        let body = &said.body[..said.cut.unwrap_or(said.body.len()).min(said.body.len())];
        for piece in body.chunks(said.piece) {
            match said.length {
                Length::Chunked => {
                    write!(stream, "{:x}\r\n", piece.len())?;
                    stream.write_all(piece)?;
                    stream.write_all(b"\r\n")?;
                }
                _ => stream.write_all(piece)?,
            }
            stream.flush()?;
            counter.fetch_add(piece.len() as u64, Ordering::SeqCst);
            if !said.pause.is_zero() {
                std::thread::sleep(said.pause);
            }
        }
        if !said.endless {
            break;
        }
    }
    if matches!(said.length, Length::Chunked) && said.cut.is_none() {
        stream.write_all(b"0\r\n\r\n")?;
    }
    stream.flush()?;
    Ok(said.cut.is_none() && matches!(said.length, Length::True | Length::Chunked))
}

/// Bytes without a short period.
pub(crate) fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    });
    next.take(length).collect()
}

pub(crate) fn sha256(content: &[u8]) -> String {
    hex(&Sha256::digest(content))
}

pub(crate) fn git_blob(content: &[u8]) -> String {
    let mut hash = Sha1::new_with_prefix(format!("blob {}\0", content.len()));
    hash.update(content);
    hex(&hash.finalize())
}

fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    digits.map(|digit| char::from(DIGITS[usize::from(digit)])).collect()
}

use std::io::ErrorKind::{TimedOut, WouldBlock};
use std::io::{Read, Write};
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::json;

use super::{Reply, ServeError, Server, read_reply};
use crate::Times;
use crate::testing::{Line, PANIC};

const CHAT: &str = "/v1/chat/completions";
const STREAM: &str = r#"{"messages":[{"role":"user","content":"x"}],"stream":true}"#;
const FOR_EVER: Duration = Duration::from_hours(1);
const WHOLE: &str = r#"{"messages":[{"role":"user","content":"x"}]}"#;

/// Sends a request, waits for a text in what comes back, and hangs up.
fn hang_up_after(server: &Server, body: &str, text: Option<&str>) {
    let mut stream = server.connect();
    stream.write_all(server.text("POST", CHAT, "", body).as_bytes()).unwrap();
    let (mut seen, mut buffer) = (String::new(), [0; 512]);
    while let Some(text) = text
        && !seen.contains(text)
    {
        let n = stream.read(&mut buffer).unwrap();
        assert!(n > 0, "it ended: {seen}");
        seen.push_str(&String::from_utf8_lossy(&buffer[..n]));
    }
}

#[test]
fn who_hangs_up_cancels_the_answer() {
    let server = Server::start([Line::Babbles("blah"), Line::Reads]);
    hang_up_after(&server, STREAM, Some("content\":\"b"));
    server.script.wait_for_cancelled(1);
    let steps = server.script.steps.load(Ordering::Relaxed);
    assert!(steps < 900, "{steps} steps: it did not run to the end of the context");
    hang_up_after(&server, STREAM, Some(": prefill"));
    server.script.wait_for_cancelled(2);
}

#[test]
fn who_hangs_up_without_a_stream_cancels_the_answer_too() {
    let server = Server::start([Line::Reads]);
    let mut stream = server.connect();
    stream.write_all(server.text("POST", CHAT, "", WHOLE).as_bytes()).unwrap();
    while server.prompts().is_empty() {
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(stream);
    server.script.wait_for_cancelled(1);
}

#[test]
fn what_is_known_is_told_while_an_answer_is_made() {
    let server = Server::start([Line::Reads]);
    let mut stream = server.connect();
    stream.write_all(server.text("POST", CHAT, "", STREAM).as_bytes()).unwrap();
    while server.prompts().is_empty() {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(
        server.get("/health").json(),
        json!({ "status": "ok", "model": "demo", "active": 1 })
    );
    assert_eq!(server.get("/v1/models").json()["data"][0]["id"], "demo");
    assert_eq!(server.get("/v1/models/org/other:Q4_K_M").json()["id"], "org/other:Q4_K_M");
    assert_eq!(server.get("/v1/models/gone").status, 404);
    let metrics = server.get("/metrics").body;
    assert!(metrics.contains("\nsakia_generations_active 1\n"), "{metrics}");
    for line in metrics.lines().filter(|line| !line.starts_with('#')) {
        assert!(line.rsplit(' ').next().unwrap().parse::<u64>().is_ok(), "{line}");
    }
    drop(stream);
    server.script.wait_for_cancelled(1);
}

#[test]
fn bodies_that_are_no_request_are_refused_in_words() {
    let server = Server::start([]);
    let json = "content-type: application/json\r\n";
    for (headers, body, status) in [
        (json, "", 400),
        (json, "{", 400),
        (json, "[]", 400),
        (json, "null", 400),
        (json, "{\"messages\": 5}", 400),
        (json, "\u{0}", 400),
        (json, &"[".repeat(1000), 400),
        (json, &format!("[{}0]", "0,".repeat(30_000)), 400),
        (json, &"x".repeat(70_000), 413),
        ("content-type: text/plain\r\n", "{}", 415),
        ("content-type: multipart/form-data; boundary=x\r\n", "{}", 415),
    ] {
        let reply = server.request("POST", CHAT, headers, body);
        assert_eq!(reply.status, status, "{body:.40}: {}", reply.body);
        assert!(reply.json()["error"]["message"].is_string());
    }
    assert_eq!(server.get("/nothing").status, 404);
    assert_eq!(server.get(CHAT).status, 405);
    assert_eq!(server.get(&format!("/{}", "x".repeat(4000))).status, 400);
    assert_eq!(server.get("/..%2f..%2fetc/passwd").status, 404);
}

#[test]
fn requests_that_could_be_two_are_refused() {
    let server = Server::start([]);
    let host = server.address;
    for head in [
        "content-length: 5\r\ncontent-length: 6\r\n",
        "content-length: 5\r\ntransfer-encoding: chunked\r\n",
        "transfer-encoding: gzip\r\n",
        "content-length: -1\r\n",
        "content-length : 5\r\n",
        "content-length: 5\r\n folded: x\r\n",
        "bad header\r\n",
    ] {
        let smuggled = "GET /health HTTP/1.1\r\nhost: x\r\n\r\n";
        let text = format!("POST {CHAT} HTTP/1.1\r\nhost: {host}\r\n{head}\r\n0\r\n\r\n{smuggled}");
        let mut stream = server.connect();
        stream.write_all(text.as_bytes()).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let reply = read_reply(&mut stream);
        assert!(reply.status == 400 || reply.status == 0, "{head:?}: {}", reply.head);
        assert!(
            !reply.body.contains("\"status\":\"ok\""),
            "{head:?}: the second request was answered"
        );
    }
    let long =
        format!("GET /health HTTP/1.1\r\nhost: {host}\r\nx: {}\r\n\r\n", "y".repeat(100_000));
    assert!(matches!(server.raw(long.as_bytes()).status, 431 | 0));
    let many = format!("GET /health HTTP/1.1\r\nhost: {host}\r\n{}\r\n", "x: y\r\n".repeat(500));
    assert!(matches!(server.raw(many.as_bytes()).status, 431 | 400 | 0));
}

#[test]
fn keys_names_and_origins_are_looked_at_before_anything_else() {
    let server = Server::with([], |options| options.api_key = Some("secret".to_owned()));
    let refused = server.get("/v1/models");
    assert_eq!((refused.status, refused.header("www-authenticate")), (401, Some("Bearer")));
    assert_eq!(
        server.post("/v1/messages", &json!({})).json()["error"]["type"],
        "authentication_error"
    );
    assert_eq!(server.get("/health").status, 200);
    let key = "authorization: Bearer secret\r\n";
    assert_eq!(server.request("GET", "/v1/models", key, "").status, 200);
    let open = Server::start([]);
    let page = open.request("POST", CHAT, "origin: http://evil.example\r\n", WHOLE);
    assert_eq!((page.status, page.header("access-control-allow-origin")), (403, None));
    let named =
        open.raw(b"GET /health HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n");
    assert_eq!(named.status, 403);
    let page = Server::with([Line::Says("x")], |options| {
        options.cors_origins = vec!["http://page.example".to_owned()];
    });
    let origin = "origin: http://page.example\r\n";
    let preflight = page.request("OPTIONS", CHAT, origin, "");
    assert_eq!(
        (preflight.status, preflight.header("access-control-allow-origin")),
        (204, Some("http://page.example"))
    );
    let reply = page.request("POST", CHAT, origin, WHOLE);
    assert_eq!(
        (reply.status, reply.header("access-control-allow-origin")),
        (200, Some("http://page.example"))
    );
}

#[test]
fn connections_beyond_the_limit_are_told_so() {
    let server = Server::with([], |options| options.max_connections = 2);
    let held = [server.connect(), server.connect()];
    // They count once they are accepted.
    loop {
        let reply = server.get("/health");
        if reply.status == 503 {
            assert_eq!(reply.header("retry-after"), Some("1"));
            break;
        }
    }
    drop(held);
    while server.get("/health").status != 200 {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Writes byte after byte until the other side has had enough; what it said.
fn drip(server: &Server, head: &str, byte: u8) -> String {
    let mut stream = server.connect();
    stream.write_all(head.as_bytes()).unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
    let (mut said, mut buffer) = (Vec::new(), [0; 512]);
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => said.extend_from_slice(&buffer[..n]),
            Err(error) if matches!(error.kind(), WouldBlock | TimedOut) => {
                if stream.write_all(&[byte]).is_err() {
                    break;
                }
            }
            // A connection that is gone.
            Err(_) => break,
        }
    }
    String::from_utf8_lossy(&said).into_owned()
}

#[test]
fn nobody_waits_for_a_client_that_is_slow_on_purpose() {
    let times = Times {
        head: Duration::from_millis(200),
        pause: Duration::from_millis(100),
        body: Duration::from_millis(300),
        ..Times::default()
    };
    let server = Server::with([], |options| (options.times, options.max_connections) = (times, 4));
    let host = server.address;
    // A head whose lines never end, and one of which nothing more comes.
    let head = drip(&server, "GET /health HTTP/1.1\r\nx: ", b'y');
    assert!(head.is_empty() || head.starts_with("HTTP/1.1 408"), "{head}");
    let mut silent = server.connect();
    silent.write_all(b"GET /hea").unwrap();
    let mut said = String::new();
    let _ = silent.read_to_string(&mut said);
    assert!(said.is_empty() || said.starts_with("HTTP/1.1 408"), "{said}");
    // The same of bodies: one that stops, one that trickles.
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: {host}\r\ncontent-length: 60000\r\n\r\n");
    let mut stopped = server.connect();
    stopped.write_all(format!("{head}{{").as_bytes()).unwrap();
    let reply = read_reply(&mut stopped);
    assert_eq!(reply.status, 408, "{}", reply.head);
    let trickled = drip(&server, &head, b' ');
    assert!(trickled.starts_with("HTTP/1.1 408"), "{trickled}");
    // Four such clients took every connection, and gave all of them back.
    assert_eq!(server.get("/health").status, 200);
    assert!(server.get("/metrics").body.contains("\nsakia_connections_refused_total 0\n"));
}

#[test]
fn requests_take_no_more_memory_than_there_is_for_all_of_them() {
    let server = Server::with([Line::Waits, Line::Waits, Line::Waits, Line::Waits], |options| {
        options.request_memory = 100 << 10;
    });
    let body = |n: usize, bytes: usize| {
        json!({ "messages": [{ "role": "user", "content": "x" }], "stream": true, "n": n,
                "user": "u".repeat(bytes) })
        .to_string()
    };
    let post = |body: &str| server.request("POST", CHAT, "", body);
    // Six copies of it are more than there is.
    assert_eq!(post(&body(1, 20 << 10)).status, 413);
    // One that gets as far as being read has a mistake.
    let is_full = || {
        let reply = post(&body(0, 10 << 10));
        assert!(matches!(reply.status, 400 | 503), "{}", reply.body);
        assert!(reply.status == 400 || reply.header("retry-after") == Some("2"));
        reply.status == 503
    };
    assert!(!is_full());
    let text = server.text("POST", CHAT, "", &body(1, 10 << 10));
    let (now, later) = text.split_at(text.len() - 9);
    let mut held = vec![server.connect()];
    held[0].write_all(now.as_bytes()).unwrap();
    while !is_full() {
        std::thread::sleep(Duration::from_millis(1));
    }
    held[0].write_all(later.as_bytes()).unwrap();
    // What is being answered counts too, but once.
    for answers in 1..=4 {
        while server.prompts().len() < answers {
            std::thread::sleep(Duration::from_millis(1));
        }
        if answers < 4 {
            held.push(server.connect());
            held[answers].write_all(text.as_bytes()).unwrap();
        }
    }
    assert!(is_full(), "four are being answered");
    drop(held);
    server.script.wait_for_cancelled(4);
    while is_full() {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn grammars_take_their_share_of_the_memory() {
    let lines = [Line::Babbles("x"), Line::Babbles("x")];
    let server = Server::with(lines, |options| options.request_memory = 700 << 10);
    let ask = |n: usize| {
        json!({ "messages": [{ "role": "user", "content": "x" }], "n": n, "max_tokens": 4,
                "response_format": { "type": "json_object" } })
    };
    assert_eq!(server.post(CHAT, &ask(1)).status, 200);
    let refused = server.post(CHAT, &ask(2));
    assert_eq!(refused.status, 413, "{}", refused.body);
    assert_eq!(server.post(CHAT, &ask(1)).status, 200, "it was given back");
}

#[test]
fn a_request_that_panics_is_answered_and_others_are_too() {
    let server = Server::start([Line::Says("x"), Line::Says("x")]);
    assert_eq!(server.request("POST", CHAT, "", WHOLE).status, 200);
    server.script.has_bug.store(true, Ordering::Relaxed);
    let reply = server.get("/api/ps");
    assert_eq!(reply.status, 500, "{}", reply.head);
    assert!(reply.json()["error"].as_str().unwrap().contains("this is a bug"));
    server.script.has_bug.store(false, Ordering::Relaxed);
    assert_eq!(server.request("POST", CHAT, "", WHOLE).status, 200);
}

/// What a panic of the engine is to those who are being answered, who wait, and who come later.
#[test]
fn an_engine_that_panics_is_told_to_everybody_in_their_own_words_and_ends_the_server() {
    let paths = [CHAT, "/v1/responses", "/v1/messages", "/api/chat"];
    for path in paths {
        let lines = [Line::Waits, Line::Dies("Hello")];
        let server = Server::with(lines, |options| options.times.last_words = FOR_EVER);
        let body = |stream: bool| {
            let field = if path.ends_with("responses") { "input" } else { "messages" };
            let mut body = json!({ "model": "demo", "stream": stream,
                                   field: [{ "role": "user", "content": "x" }] });
            if path == "/v1/messages" {
                body["max_tokens"] = 9.into();
            }
            body
        };
        let waits = std::thread::scope(|scope| {
            let waits = scope.spawn(|| server.post(path, &body(false)));
            while server.prompts().is_empty() {
                std::thread::sleep(Duration::from_millis(1));
            }
            let told = server.post(path, &body(true));
            assert_eq!(told.status, 200);
            assert!(told.body.contains("Hel") && told.body.contains(PANIC), "{}", told.body);
            waits.join().unwrap()
        });
        let late = server.post(path, &body(true));
        let error = |reply: &Reply| {
            let error = reply.json()["error"].clone();
            error.as_str().or_else(|| error["message"].as_str()).unwrap().to_owned()
        };
        for reply in [&waits, &late] {
            assert_eq!(reply.status, 500, "{path}: {}", reply.body);
            assert!(error(reply).contains(PANIC), "{path}: {}", reply.body);
        }
        let health = server.get("/health");
        assert_eq!((health.status, &health.json()["status"]), (503, &json!("failed")));
        assert!(health.body.contains(PANIC), "{}", health.body);
        server.stop.store(true, Ordering::Relaxed);
        let ended = server.ended().unwrap_err().to_string();
        assert!(ended.contains(PANIC), "{ended}");
    }
    let dies = Server::with([Line::Dies("x")], |options| options.times.last_words = Duration::ZERO);
    assert_eq!(dies.request("POST", CHAT, "", WHOLE).status, 500);
    // Nobody tells it to end.
    assert!(matches!(dies.ended(), Err(ServeError::EngineStopped(message)) if message == PANIC));
}

#[test]
fn an_idle_server_ends_and_a_broken_model_is_told() {
    let server = Server::with([], |options| options.idle_exit = Some(Duration::from_millis(1)));
    while !server.thread.as_ref().unwrap().is_finished() {
        std::thread::sleep(Duration::from_millis(10));
    }
    let server = Server::start([]);
    server.shelf.is_broken.store(true, Ordering::Relaxed);
    let reply = server.request("POST", CHAT, "", WHOLE);
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (500, &json!("load_failed")));
}

#[test]
fn the_description_names_every_path() {
    let server = Server::start([]);
    let document = server.get("/openapi.json").json();
    assert_eq!(document["openapi"], "3.1.0");
    for (path, methods) in document["paths"].as_object().unwrap() {
        for method in methods.as_object().unwrap().keys().filter(|method| *method != "parameters") {
            let reply = server.request(&method.to_uppercase(), path, "", "{}");
            assert!(!matches!(reply.status, 0 | 405 | 500..), "{method} {path}: {}", reply.status);
        }
    }
    for path in [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/api/chat",
        "/api/generate",
        "/api/tags",
        "/api/show",
        "/api/ps",
        "/api/version",
        "/health",
        "/metrics",
    ] {
        assert!(document["paths"].get(path).is_some(), "{path}");
    }
}

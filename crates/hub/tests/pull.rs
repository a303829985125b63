//! Pulls from hosts of every kind: good, slow, forgetful, lying, and hostile.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod server;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use hub::{Host, Hub, HubError, Progress, Pulled, Request, Silent, Stop, Store, Token, Tuning};
use server::{Asked, COMMIT, Length, Reply, Repository, Server, noise};

/// A pull of `org/name` into a folder, with chunks small enough that a few kilobytes are many.
struct Puller {
    home: tempfile::TempDir,
    token: Option<Token>,
    include: Vec<String>,
    stop: Stop,
}

impl Puller {
    fn new() -> Self {
        Self {
            home: tempfile::tempdir().unwrap(),
            token: None,
            include: Vec::new(),
            stop: Stop::new(|| false),
        }
    }

    fn hub(&self, url: &str) -> Hub {
        let tuning =
            Tuning { connections: 3, chunk: 10_000, first_pause: Duration::from_millis(1) };
        let host: Host = url.parse().unwrap();
        let store = Store::at(self.home.path());
        Hub::new(host, self.token.as_ref(), None, store, tuning, &self.stop).unwrap()
    }

    fn request(&self, name: &str) -> Request {
        let (name, revision) = (name.parse().unwrap(), "main".to_owned());
        Request { name, revision, include: self.include.clone() }
    }

    fn run(&self, server: &Server, progress: &dyn Progress) -> Result<Pulled, HubError> {
        let hub = self.hub(&server.url());
        hub.pull(&hub.plan(&self.request("org/name"))?, progress)
    }

    fn pull(&self, server: &Server) -> Result<Pulled, HubError> {
        self.run(server, &Silent)
    }

    fn folder(&self) -> std::path::PathBuf {
        self.home.path().join("models/org/name")
    }

    /// Everything under a final name.
    fn files(&self) -> BTreeMap<String, Vec<u8>> {
        let mut files = BTreeMap::new();
        walk(&self.folder(), &self.folder(), &mut files);
        files.into_iter().filter(|(path, _)| !path.starts_with(".sakia")).collect()
    }
}

fn walk(base: &Path, folder: &Path, into: &mut BTreeMap<String, Vec<u8>>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.path().is_dir() {
            walk(base, &entry.path(), into);
        } else {
            let name = entry.path().strip_prefix(base).unwrap().to_str().unwrap().to_owned();
            into.insert(name, fs::read(entry.path()).unwrap());
        }
    }
}

/// Small and large files, an empty one, and one whose length is a multiple of the chunk.
fn model() -> Repository {
    Repository::new(&[
        ("config.json", b"{\"model_type\": \"x\"}\n".to_vec()),
        ("merges.txt", Vec::new()),
        ("model-00001-of-00002.safetensors", noise(1, 73_456)),
        ("model-00002-of-00002.safetensors", noise(2, 30_000)),
        ("model.safetensors.index.json", b"{}".to_vec()),
        ("tokenizer.json", noise(3, 1500)),
        ("README.md", b"# not needed".to_vec()),
        ("pytorch_model.bin", noise(4, 5000)),
    ])
}

fn needed() -> BTreeMap<String, Vec<u8>> {
    let unneeded = ["README.md", "pytorch_model.bin"];
    model().files.into_iter().filter(|(path, _)| !unneeded.contains(&path.as_str())).collect()
}

/// A host that is good but for what `twist` makes of its replies to requests for files.
fn twisted(twist: impl Fn(&Asked, Reply) -> Reply + Send + Sync + 'static) -> Server {
    let model = model();
    Server::start(move |asked| {
        let reply = model.reply(asked);
        if asked.path.starts_with("/api/") { reply } else { twist(asked, reply) }
    })
}

#[track_caller]
fn check_whole(puller: &Puller, server: &Server) -> Pulled {
    let pulled = puller.pull(server).unwrap();
    assert!(puller.files() == needed(), "the files are those of the host");
    pulled
}

#[track_caller]
fn check_refused(server: &Server, words: &[&str]) {
    let puller = Puller::new();
    let error = puller.pull(server).unwrap_err().to_string();
    for word in words {
        assert!(error.contains(word), "`{word}` in: {error}");
    }
    let needed = needed();
    for (path, content) in puller.files() {
        assert!(needed.get(&path) == Some(&content), "{path} has its final name and is wrong");
    }
    let store = Store::at(puller.home.path());
    assert!(store.locate(&"org/name".parse().unwrap()).is_err(), "the model counts as pulled");
    let home = fs::read_dir(puller.home.path()).unwrap().count();
    assert!(home <= 1, "something was written beside the models");
}

#[test]
fn a_pull_brings_the_needed_files_and_a_second_one_nothing() {
    let (server, puller) = (Server::of(model()), Puller::new());
    let pulled = check_whole(&puller, &server);
    assert_eq!(pulled.model, puller.folder());
    assert_eq!(pulled.snapshot.revision, COMMIT);
    assert_eq!(pulled.snapshot.files.len(), 6);
    let large = pulled.snapshot.files.iter().find(|file| file.size == 73_456).unwrap();
    assert!(large.hash.to_string().starts_with("sha256:"));
    assert!(large.etag.as_deref().is_some_and(|tag| tag.contains(&large.hash.hex())));
    let chunks = server
        .log()
        .iter()
        .filter(|asked| asked.path.ends_with("00001-of-00002.safetensors"))
        .count();
    assert_eq!(chunks, 8, "73,456 bytes in chunks of 10,000");
    let before = server.bytes();
    let again = check_whole(&puller, &server);
    assert_eq!(again.fetched, 0);
    assert_eq!(server.bytes() - before, model().listing().len() as u64, "only the list came");
    assert!(!puller.folder().join(".sakia/incoming").exists());
}

#[test]
fn what_is_missing_or_changed_is_fetched_again_and_no_more() {
    let (server, puller) = (Server::of(model()), Puller::new());
    check_whole(&puller, &server);
    fs::remove_file(puller.folder().join("config.json")).unwrap();
    fs::write(puller.folder().join("tokenizer.json"), b"cut").unwrap();
    let pulled = check_whole(&puller, &server);
    assert_eq!(pulled.fetched, 20 + 1500);
    // Files without a record are looked at, not fetched.
    fs::remove_file(puller.folder().join(".sakia/snapshot.json")).unwrap();
    fs::write(puller.folder().join("config.json"), b"{\"model_type\": \"y\"}\n").unwrap();
    assert_eq!(check_whole(&puller, &server).fetched, 20);
}

#[test]
fn dropped_connections_are_taken_up_where_they_broke() {
    let count = AtomicU32::new(0);
    let server = twisted(move |_, reply| {
        // Two of three break somewhere in the first 4,000 bytes.
        let n = count.fetch_add(1, Ordering::SeqCst);
        Reply { cut: (!n.is_multiple_of(3)).then_some((n as usize * 977) % 4000), ..reply }
    });
    check_whole(&Puller::new(), &server);
    let resumed =
        server.log().iter().filter_map(|a| a.range.clone()).any(|r| r.start % 10_000 != 0);
    assert!(resumed, "some request began inside a chunk");
}

#[test]
fn a_host_that_always_breaks_off_is_given_up() {
    let server = twisted(|_, reply| Reply { cut: Some(0), ..reply });
    check_refused(&server, &["after 8 tries", "the last one ended with"]);
    let server = Server::start(|_| Reply { cut: Some(3), ..Reply::new(200, "{\"sha\": 1}") });
    check_refused(&server, &["after 4 tries", "list of files of org/name at main"]);
}

#[test]
fn busy_and_broken_servers_are_asked_again() {
    for (status, wait) in
        [(429, Some("0")), (429, None), (500, None), (503, Some("soon")), (502, None)]
    {
        let count = AtomicU32::new(0);
        let server = twisted(move |_, reply| {
            if count.fetch_add(1, Ordering::SeqCst).is_multiple_of(2) {
                let busy = Reply::new(status, "try later");
                return match wait {
                    Some(wait) => busy.header("Retry-After", wait),
                    None => busy,
                };
            }
            reply
        });
        check_whole(&Puller::new(), &server);
    }
    let server = twisted(|_, _| Reply::new(503, ""));
    check_refused(&server, &["after 8 tries", "status 503"]);
}

#[test]
fn a_wish_to_wait_is_met_and_an_absurd_one_is_an_error() {
    let first = AtomicBool::new(true);
    let server = twisted(move |_, reply| {
        if first.swap(false, Ordering::SeqCst) {
            Reply::new(429, "").header("Retry-After", "1")
        } else {
            reply
        }
    });
    let start = Instant::now();
    check_whole(&Puller::new(), &server);
    assert!(start.elapsed() >= Duration::from_secs(1));
    let server = twisted(|_, _| Reply::new(429, "").header("Retry-After", "86400"));
    check_refused(&server, &["86400 s of quiet", "hint"]);
}

#[test]
fn hosts_without_ranges_give_whole_files() {
    for length in [Length::True, Length::Unsaid, Length::Chunked] {
        let drops = AtomicU32::new(0);
        let model = model();
        let server = Server::start(move |asked| {
            let whole = Asked { range: None, ..asked.clone() };
            let mut reply = model.reply(&whole);
            if !asked.path.starts_with("/api/") {
                reply.length = length;
                if asked.path.ends_with("00001-of-00002.safetensors")
                    && drops.fetch_add(1, Ordering::SeqCst) < 4
                {
                    reply.cut = Some(25_000);
                }
            }
            reply
        });
        check_whole(&Puller::new(), &server);
    }
}

#[test]
fn a_host_that_forgets_ranges_halfway_is_no_trouble() {
    let count = AtomicU32::new(0);
    let model = model();
    let server = Server::start(move |asked| {
        let n = count.fetch_add(1, Ordering::SeqCst);
        let range = asked.range.clone().filter(|_| n % 4 != 3);
        model.reply(&Asked { range, ..asked.clone() })
    });
    for _ in 0..5 {
        check_whole(&Puller::new(), &server);
    }
}

#[test]
fn content_that_changes_between_tries_comes_out_right_or_not_at_all() {
    let old = noise(9, 73_456);
    let count = AtomicU32::new(0);
    let stale = move |asked: &Asked, times: u32| {
        let is_it = asked.path.ends_with("00001-of-00002.safetensors");
        (is_it && count.fetch_add(1, Ordering::SeqCst) < times)
            .then(|| Reply::file(&old, asked.range.clone()))
    };
    let stale = Arc::new(stale);
    let mixed = Arc::clone(&stale);
    let remarks = Remarks::default();
    let server = twisted(move |asked, reply| mixed(asked, 3).unwrap_or(reply));
    let puller = Puller::new();
    puller.run(&server, &remarks).unwrap();
    assert!(puller.files() == needed());
    let remarks = remarks.0.into_inner().unwrap();
    assert_eq!(remarks.iter().filter(|text| text.contains("once more")).count(), 1, "{remarks:?}");
    let server = twisted(move |asked, reply| stale(asked, u32::MAX).unwrap_or(reply));
    check_refused(&server, &["model-00001-of-00002.safetensors", "SHA-256 is", "needed"]);
}

#[derive(Default)]
struct Remarks(Mutex<Vec<String>>);

impl Progress for Remarks {
    fn remark(&self, text: &str) {
        self.0.lock().unwrap().push(text.to_owned());
    }
}

#[test]
fn small_files_are_checked_by_gits_hash() {
    let server = twisted(|asked, reply| {
        if asked.path.ends_with("config.json") {
            Reply::file(b"{\"model_type\": \"y\"}\n", asked.range.clone())
        } else {
            reply
        }
    });
    check_refused(&server, &["config.json", "git SHA-1 is"]);
}

#[test]
fn lengths_that_lie_are_errors() {
    // Longer or shorter than the list says, by its header.
    let server = twisted(|asked, _| Reply::file(&noise(1, 80_000), asked.range.clone()));
    check_refused(&server, &["by the list of files"]);
    let server = twisted(|asked, reply| {
        if asked.path.ends_with("tokenizer.json") { Reply::new(200, noise(3, 1400)) } else { reply }
    });
    check_refused(&server, &["tokenizer.json has 1500 bytes", "1400"]);
    // Right by its header, too short in truth.
    let server = twisted(|asked, reply| {
        if asked.path.ends_with("tokenizer.json") {
            Reply { length: Length::Lie(1500), ..Reply::new(200, noise(3, 1400)) }
        } else {
            reply
        }
    });
    check_refused(&server, &["tokenizer.json after 8 tries"]);
    // A range other than the one asked for.
    let server = twisted(|asked, reply| match &asked.range {
        Some(range) => Reply::new(206, reply.body)
            .header("Content-Range", format!("bytes {}-{}/73456", range.start + 1, range.end)),
        None => reply,
    });
    check_refused(&server, &["another range"]);
}

#[test]
fn endless_bodies_end() {
    let endless = |asked: &Asked, length| Reply {
        length,
        endless: true,
        ..Reply::file(&noise(3, 1500), asked.range.clone())
    };
    for length in [Length::Chunked, Length::Unsaid] {
        let server = twisted(move |asked, reply| {
            if asked.path.ends_with("tokenizer.json") { endless(asked, length) } else { reply }
        });
        check_refused(&server, &["tokenizer.json has 1500 bytes", "sends more"]);
    }
    let server = Server::start(|_| Reply {
        length: Length::Chunked,
        endless: true,
        ..Reply::new(200, vec![b' '; 1 << 20])
    });
    check_refused(&server, &["more than 64 MiB"]);
}

#[test]
fn a_hostile_list_writes_nothing() {
    for (path, words) in [
        ("../../../escape.safetensors", "leave the folder"),
        ("/etc/escape.safetensors", "leave the folder"),
        ("a/../../escape.safetensors", "leave the folder"),
        (".sakia/snapshot.json", "our own records"),
        ("a\\\\..\\\\b.safetensors", "backslash"),
    ] {
        let mut repository = model();
        repository.files.insert(path.to_owned(), noise(5, 2000));
        check_refused(&Server::of(repository), &[words]);
    }
    let absurd = |size: &str| {
        let hash = server::sha256(b"");
        let entry = format!(
            r#"{{"rfilename": "m.safetensors", "lfs": {{"sha256": "{hash}", "size": {size}}}}}"#
        );
        let text = format!(r#"{{"sha": "{COMMIT}", "siblings": [{entry}]}}"#);
        Server::start(move |_| Reply::new(200, text.clone()))
    };
    check_refused(&absurd("9223372036854775808"), &["a size that no file has"]);
    check_refused(&absurd("70000000000000"), &["still to be fetched", "has", "free", "SAKIA_HOME"]);
    check_refused(&absurd("\"many\""), &["not the JSON expected"]);
}

#[test]
fn refusals_say_what_to_do() {
    let status = |status: u16, code: &'static str| {
        Server::start(move |_| Reply::new(status, "no").header("X-Error-Code", code))
    };
    check_refused(&status(401, "GatedRepo"), &["its owner decides", "HF_TOKEN"]);
    check_refused(&status(401, "RepoNotFound"), &["no such repository", "HF_TOKEN", "(401)"]);
    check_refused(&status(403, ""), &["(403)", "hint"]);
    check_refused(&status(404, "RevisionNotFound"), &["at main", "--revision"]);
    check_refused(&status(404, "RepoNotFound"), &["spelling"]);
    check_refused(&status(418, ""), &["answered 418"]);
    let mut puller = Puller::new();
    puller.token = Some(Token::new("hf_secret", "a test").unwrap());
    let error = puller.pull(&status(403, "GatedRepo")).unwrap_err();
    let text = format!("{error} {error:?}");
    assert!(
        text.contains("this token's user may not yet") && !text.contains("hf_secret"),
        "{text}"
    );
    let server = twisted(|_, _| Reply::new(404, ""));
    check_refused(&server, &["has no"]);
}

#[test]
fn the_token_goes_to_the_host_and_not_where_it_redirects() {
    let files = model();
    let other = Server::start(move |asked| {
        let path = format!("/org/name/resolve/{COMMIT}{}", asked.path);
        files.reply(&Asked { path, ..asked.clone() })
    });
    let (elsewhere, model) = (other.url(), model());
    let server = Server::start(move |asked| {
        let renamed = asked.path.strip_prefix("/old");
        match (renamed, asked.path.rsplit_once(COMMIT)) {
            (None, Some((_, file))) => Reply::redirect(format!("{elsewhere}{file}")),
            (None, None) => Reply::redirect(format!("/old{}", asked.path)),
            (Some(path), _) => model.reply(&Asked { path: path.to_owned(), ..asked.clone() }),
        }
    });
    let mut puller = Puller::new();
    puller.token = Some(Token::new("hf_secret", "a test").unwrap());
    check_whole(&puller, &server);
    let is_sent = |asked: &Asked| {
        asked.headers.get("authorization").map(String::as_str) == Some("Bearer hf_secret")
    };
    assert!(server.log().iter().all(is_sent), "also after a redirect to the same host");
    assert!(other.log().len() >= 12);
    for asked in other.log() {
        assert!(!format!("{asked:?}").contains("hf_secret"), "{asked:?}");
    }
    assert!(server.log().iter().any(|asked| asked.path.starts_with("/old/api/")));
}

#[test]
fn redirects_end() {
    let server = twisted(|asked, _| Reply::redirect(asked.path.clone()));
    check_refused(&server, &["more than 8 redirects"]);
    assert!(server.log().len() <= 3 * 9 + 1, "{}", server.log().len());
    check_refused(&twisted(|_, _| Reply::redirect("ftp://x/")), &["http://"]);
    check_refused(&twisted(|_, _| Reply::redirect("http://user:pw@127.0.0.1/")), &["password"]);
    check_refused(&twisted(|_, _| Reply::new(302, "")), &["does not say where to"]);
    check_refused(
        &twisted(|_, _| Reply::redirect("http://x:y/")),
        &["in a way that is not followed"],
    );
}

#[test]
fn stopping_keeps_what_came_and_the_next_pull_goes_on() {
    let slow =
        || twisted(|_, reply| Reply { piece: 500, pause: Duration::from_millis(2), ..reply });
    let server = slow();
    let mut puller = Puller::new();
    let (sent, asked_at) = (Arc::clone(&server.sent), Instant::now());
    puller.stop = Stop::new(move || sent.load(Ordering::SeqCst) > 40_000);
    let error = puller.pull(&server).unwrap_err();
    assert!(matches!(error, HubError::Stopped { .. }), "{error}");
    assert!(asked_at.elapsed() < Duration::from_secs(10));
    assert!(puller.files().is_empty(), "nothing has a final name yet");
    puller.stop = Stop::new(|| false);
    let pulled = check_whole(&puller, &Server::of(model()));
    let total: usize = needed().values().map(Vec::len).sum();
    assert!(pulled.fetched < total as u64 - 20_000, "{} of {total}", pulled.fetched);
}

#[test]
fn a_stop_does_not_wait_for_a_silent_host() {
    let silent = twisted(|_, reply| Reply { piece: 100, pause: Duration::from_secs(20), ..reply });
    let mut puller = Puller::new();
    let start = Instant::now();
    puller.stop = Stop::new(move || start.elapsed() > Duration::from_millis(300));
    let error = puller.pull(&silent).unwrap_err();
    assert!(matches!(error, HubError::Stopped { .. }), "{error}");
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

#[test]
fn two_pulls_of_one_model_do_not_meet() {
    let server = twisted(|_, reply| Reply { piece: 500, pause: Duration::from_millis(5), ..reply });
    let puller = Puller::new();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| puller.pull(&server));
        while !puller.folder().join(".sakia/incoming").exists() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let error = puller.pull(&server).unwrap_err().to_string();
        assert!(error.contains("another pull of org/name is running"), "{error}");
        first.join().unwrap().unwrap();
    });
    assert!(puller.files() == needed());
}

#[test]
fn a_new_revision_replaces_the_old_one_as_a_whole() {
    let puller = Puller::new();
    check_whole(&puller, &Server::of(model()));
    let mut next = Repository::new(&[
        ("config.json", b"{\"model_type\": \"z\"}\n".to_vec()),
        ("model.safetensors", noise(7, 40_000)),
        ("tokenizer.json", noise(3, 1500)),
    ]);
    // While it is on its way, the old one stays whole.
    let broken = {
        let next = next.clone();
        Server::start(move |asked| {
            if asked.path.ends_with("model.safetensors") {
                Reply::new(404, "")
            } else {
                next.reply(asked)
            }
        })
    };
    puller.pull(&broken).unwrap_err();
    assert!(puller.files() == needed());
    let store = Store::at(puller.home.path());
    assert!(store.locate(&"org/name".parse().unwrap()).is_ok());
    let pulled = puller.pull(&Server::of(next.clone())).unwrap();
    assert!(puller.files() == next.files, "shards that are gone are gone");
    assert_eq!(pulled.snapshot.files.len(), 3);
    assert!(pulled.fetched < 41_000, "the tokenizer is kept: {}", pulled.fetched);
    next.files.clear();
    assert!(matches!(puller.pull(&Server::of(next)), Err(HubError::NoModel { .. })));
}

#[test]
fn a_second_quantisation_joins_the_first() {
    let repository = Repository::new(&[
        ("Q8_0/m-Q8_0-00001-of-00002.gguf", noise(1, 30_000)),
        ("Q8_0/m-Q8_0-00002-of-00002.gguf", noise(2, 3_000)),
        ("m-Q4_0.gguf", noise(3, 20_000)),
    ]);
    let (server, puller) = (Server::of(repository.clone()), Puller::new());
    let hub = puller.hub(&server.url());
    let pull = |name: &str| hub.pull(&hub.plan(&puller.request(name))?, &Silent);
    let error = pull("org/name").unwrap_err().to_string();
    assert!(error.contains("Q4_0") && error.contains("in 2 files"), "{error}");
    let first = pull("org/name:q8_0").unwrap();
    assert_eq!(first.model, puller.folder().join("Q8_0/m-Q8_0-00001-of-00002.gguf"));
    assert_eq!(puller.files().len(), 2);
    let second = pull("org/name:Q4_0").unwrap();
    assert_eq!((second.fetched, second.snapshot.files.len()), (20_000, 3));
    assert!(puller.files() == repository.files);
    let store = Store::at(puller.home.path());
    let at = |name: &str| store.locate(&name.parse().unwrap());
    assert_eq!(at("org/name:Q4_0").unwrap(), second.model);
    assert!(matches!(at("org/name"), Err(HubError::Choice { .. })));
}

#[test]
fn a_plan_tells_all_and_writes_nothing() {
    let (server, puller) = (Server::of(model()), Puller::new());
    let hub = puller.hub(&server.url());
    let plan = hub.plan(&puller.request("org/name")).unwrap();
    let total: usize = needed().values().map(Vec::len).sum();
    assert_eq!((plan.total(), plan.present(), plan.commit.as_str()), (total as u64, 0, COMMIT));
    assert_eq!(fs::read_dir(puller.home.path()).unwrap().count(), 0);
    assert_eq!(server.log().len(), 1);
    assert_eq!(server.log()[0].path, "/api/models/org/name/revision/main?blobs=true");
}

//! The socket: who may connect, how many, how slowly; and the end.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};

use crate::access::Access;
use crate::body::Bodies;
use crate::chat::KeepAlive;
use crate::io::Impatient;
use crate::models::{Models, Shelf};
use crate::room::Room;
use crate::router::{self, App};

/// Bytes of a request's head.
const HEAD_BYTES: usize = 32 << 10;
/// Lines of a head.
const HEAD_LINES: usize = 100;
/// How often it is looked whether there is something to do besides.
const TICK: Duration = Duration::from_millis(200);
/// Threads for requests. What takes long runs elsewhere.
const THREADS: usize = 2;
/// Threads for what takes a while: rendering, compiling, loading.
const BLOCKING_THREADS: usize = 4;

/// What a connection may take: what was read of a head, what is to be written, and what goes with it.
const CONNECTION_BYTES: usize = HEAD_BYTES + (32 << 10);

/// What so many connections may take at most.
pub const fn connection_bytes(connections: usize) -> usize {
    connections.saturating_mul(CONNECTION_BYTES)
}

/// How long the server waits for what a client sends: one that is slow on purpose holds a connection no longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Times {
    /// For the head of a request, and between requests.
    pub head: Duration,
    /// Longest pause in a body.
    pub pause: Duration,
    /// For a whole body.
    pub body: Duration,
    /// How long a server whose engine panicked still says so before it ends.
    pub last_words: Duration,
}

impl Default for Times {
    fn default() -> Self {
        Self {
            head: Duration::from_secs(30),
            pause: Duration::from_secs(10),
            body: Duration::from_mins(2),
            last_words: Duration::from_secs(2),
        }
    }
}

/// How to serve.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where to listen.
    pub address: SocketAddr,
    /// What clients have to send.
    pub api_key: Option<String>,
    /// Whether an address that others reach may do without a key.
    pub allow_anyone: bool,
    /// Origins whose pages may ask; `*` for all.
    pub cors_origins: Vec<String>,
    /// Bytes of a request's body.
    pub max_body: usize,
    /// Memory for the bodies of all requests, what is made of them, and grammars.
    pub request_memory: usize,
    /// Patience with clients that send slowly.
    pub times: Times,
    /// Connections at once.
    pub max_connections: usize,
    /// How long a model stays loaded that nobody uses.
    pub keep_alive: KeepAlive,
    /// The server ends when nobody has asked for anything for so long.
    pub idle_exit: Option<Duration>,
    /// For requests that name no model.
    pub default_model: Option<String>,
    /// How long answers may go on when the server is told to end.
    pub grace: Duration,
    /// Told of every request: method, path, status, seconds. Never of what was said.
    pub log: Option<fn(&str)>,
}

/// Why there is no server, or none any more.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Anybody could use it.
    #[error(
        "{0} can be reached from other machines, and no key is asked for\n\nhint: `--api-key KEY` (or `$SAKIA_API_KEY`), or `--allow-anyone` if everybody may use it"
    )]
    Open(SocketAddr),
    /// A key that no header can carry.
    #[error("an API key is 1 to 1024 visible ASCII characters")]
    Key,
    /// The address cannot be had.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// What was asked for.
        address: SocketAddr,
        /// What the system says.
        source: std::io::Error,
    },
    /// The system gives no threads.
    #[error("cannot start the server's threads: {0}")]
    Threads(std::io::Error),
    /// The engine panicked. Nobody knows what state it is in, so its memory cannot be given back and no other can be
    /// loaded beside it; whoever was being answered has been told.
    #[error(
        "the engine stopped: {0}; this is a bug\n\nhint: start the server again; nothing on disk is damaged"
    )]
    EngineStopped(String),
}

impl Options {
    fn check(&self) -> Result<(), ServeError> {
        if let Some(key) = &self.api_key
            && (key.is_empty() || key.len() > 1024 || !key.bytes().all(|b| b.is_ascii_graphic()))
        {
            return Err(ServeError::Key);
        }
        let is_open = !self.address.ip().is_loopback();
        if is_open && self.api_key.is_none() && !self.allow_anyone {
            return Err(ServeError::Open(self.address));
        }
        Ok(())
    }
}

/// Serves until `stop` says so, or nobody asked for long enough.
///
/// - `stop`: looked at several times a second
/// - `ready`: told where it listens
///
/// # Errors
/// [`ServeError`]: all but [`ServeError::EngineStopped`] before anything is served.
pub fn serve(
    options: Options,
    shelf: Arc<dyn Shelf>,
    stop: &dyn Fn() -> bool,
    ready: impl FnOnce(SocketAddr),
) -> Result<(), ServeError> {
    options.check()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_name("server")
        .enable_all()
        .build()
        .map_err(ServeError::Threads)?;
    let outcome = runtime.block_on(run(options, shelf, stop, ready));
    // Nothing that is left has anything to say.
    runtime.shutdown_timeout(Duration::from_secs(1));
    outcome
}

async fn run(
    options: Options,
    shelf: Arc<dyn Shelf>,
    stop: &dyn Fn() -> bool,
    ready: impl FnOnce(SocketAddr),
) -> Result<(), ServeError> {
    let address = options.address;
    let failed = |source| ServeError::Listen { address, source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let models = Arc::new(Models::new(shelf, options.default_model.clone(), options.keep_alive));
    let access = Access {
        key: options.api_key.clone(),
        own_names_only: address.ip().is_loopback() && options.api_key.is_none(),
        origins: options.cors_origins.clone(),
    };
    let room = Room::new(options.request_memory);
    let bodies = Bodies::new(options.max_body, options.times, room);
    let app = Arc::new(App::new(Arc::clone(&models), access, bodies, options.log));
    let (closing, closed) = watch::channel(false);
    let accepting = tokio::spawn(accept(
        listener,
        Connections {
            room: Arc::new(Semaphore::new(options.max_connections)),
            router: router::router(Arc::clone(&app)),
            app,
            closed,
            head: options.times.head,
        },
    ));
    ready(address);
    let mut failure: Option<(String, Instant)> = None;
    loop {
        tokio::time::sleep(TICK).await;
        let is_idle = options.idle_exit.is_some_and(|idle| models.idle() >= idle);
        if failure.is_none() {
            failure = models.failure().map(|message| (message, Instant::now()));
        }
        let is_over =
            failure.as_ref().is_some_and(|(_, since)| since.elapsed() >= options.times.last_words);
        if stop() || is_idle || is_over {
            break;
        }
        models.tend().await;
    }
    accepting.abort();
    // Connections end after the answer that they are at.
    let _ = closing.send(true);
    models.shutdown(options.grace).await;
    let end = Instant::now() + Duration::from_secs(2);
    while closing.receiver_count() > 0 && Instant::now() < end {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    failure.map_or(Ok(()), |(message, _)| Err(ServeError::EngineStopped(message)))
}

/// What every connection gets.
struct Connections {
    room: Arc<Semaphore>,
    router: Router,
    app: Arc<App>,
    closed: watch::Receiver<bool>,
    /// See [`Times::head`].
    head: Duration,
}

async fn accept(listener: TcpListener, connections: Connections) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            // No more file descriptors, most likely: some will be free soon.
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let Ok(permit) = Arc::clone(&connections.room).try_acquire_owned() else {
            connections.app.metrics.refused_connection();
            tokio::spawn(refuse(stream));
            continue;
        };
        let router = connections.router.clone();
        let app = Arc::clone(&connections.app);
        let (closed, head) = (connections.closed.clone(), connections.head);
        tokio::spawn(async move {
            let _connected = app.metrics.connected();
            talk(stream, router, head, closed).await;
            drop(permit);
        });
    }
}

/// Says that there are too many, and no more.
async fn refuse(mut stream: TcpStream) {
    const TEXT: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\n\
        content-type: application/json\r\ncontent-length: 42\r\n\r\n{\"error\":{\"message\":\"too many clients\"}}\r\n";
    let say = async {
        stream.write_all(TEXT).await?;
        stream.shutdown().await?;
        // What was sent meanwhile is read: else the other side would see a broken connection and no answer.
        let mut buffer = [0; 1024];
        while stream.read(&mut buffer).await? > 0 {}
        std::io::Result::Ok(())
    };
    let _ = tokio::time::timeout(Duration::from_secs(1), say).await;
}

async fn talk(
    stream: TcpStream,
    router: Router,
    head: Duration,
    mut closed: watch::Receiver<bool>,
) {
    // Tokens are small and wanted at once.
    let _ = stream.set_nodelay(true);
    let service = TowerToHyperService::new(router);
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(head)
        .max_buf_size(HEAD_BYTES)
        .max_headers(HEAD_LINES)
        .serve_connection(TokioIo::new(Impatient::new(stream)), service);
    let mut connection = std::pin::pin!(connection);
    let is_closed = async {
        // The sender is gone: that is the end too.
        let _ = closed.wait_for(|closed| *closed).await;
    };
    let mut is_closed = std::pin::pin!(is_closed);
    let mut is_closing = false;
    let done: Result<(), Infallible> = std::future::poll_fn(|cx| {
        if !is_closing && is_closed.as_mut().poll(cx).is_ready() {
            is_closing = true;
            connection.as_mut().graceful_shutdown();
        }
        // What went wrong on a connection is over with it.
        connection.as_mut().poll(cx).map(|_| Ok(()))
    })
    .await;
    let Ok(()) = done;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(address: &str) -> Options {
        Options {
            address: address.parse().unwrap(),
            api_key: None,
            allow_anyone: false,
            cors_origins: Vec::new(),
            max_body: 1 << 20,
            request_memory: 8 << 20,
            times: Times::default(),
            max_connections: 8,
            keep_alive: KeepAlive::Forever,
            idle_exit: None,
            default_model: None,
            grace: Duration::ZERO,
            log: None,
        }
    }

    #[test]
    fn an_address_that_others_reach_needs_a_key_or_the_word_that_it_does_not() {
        assert!(options("127.0.0.1:0").check().is_ok());
        assert!(options("[::1]:0").check().is_ok());
        for address in ["0.0.0.0:0", "[::]:0", "192.168.1.2:80"] {
            let mut options = options(address);
            assert!(matches!(options.check(), Err(ServeError::Open(_))), "{address}");
            options.allow_anyone = true;
            assert!(options.check().is_ok());
            options.api_key = Some("with space".to_owned());
            assert!(matches!(options.check(), Err(ServeError::Key)));
        }
    }
}

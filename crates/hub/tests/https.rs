//! TLS as the program speaks it: who is trusted, and what never leaves an encrypted connection.
#![cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod server;

use std::io::BufReader;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use hub::{Hub, HubError, Request, Silent, Stop, Store, Token, Tuning};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use server::{Asked, Reply, Repository, Server, noise};

fn pem(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/tls")).join(name)
}

/// An encrypted host with the certificate of this folder.
fn start(reply: impl Fn(&Asked) -> Reply + Send + Sync + 'static) -> SocketAddr {
    let certificate = CertificateDer::from_pem_file(pem("server.pem")).unwrap();
    let key = PrivateKeyDer::from_pem_file(pem("server.key")).unwrap();
    let provider = Arc::new(rustls_graviola::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .unwrap();
    let (config, reply) = (Arc::new(config), Arc::new(reply));
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (config, reply) = (Arc::clone(&config), Arc::clone(&reply));
            std::thread::spawn(move || -> std::io::Result<()> {
                let connection = ServerConnection::new(config).map_err(std::io::Error::other)?;
                let mut reader = BufReader::new(StreamOwned::new(connection, stream?));
                while let Some(asked) = server::read(&mut reader)? {
                    let said = reply(&asked);
                    if !server::send(reader.get_mut(), &said, &AtomicU64::new(0))? {
                        break;
                    }
                }
                Ok(())
            });
        }
    });
    address
}

fn pull(url: &str, certificates: Option<&str>) -> Result<Vec<u8>, HubError> {
    let home = tempfile::tempdir().unwrap();
    let tuning = Tuning { connections: 2, chunk: 10_000, first_pause: Duration::from_millis(1) };
    let token = Token::new("hf_secret", "a test").unwrap();
    let store = Store::at(home.path());
    let certificates = certificates.map(pem);
    let stop = Stop::new(|| false);
    let hub = Hub::new(url.parse()?, Some(&token), certificates, store, tuning, &stop)?;
    let (name, revision) = ("org/name".parse()?, "main".to_owned());
    let plan = hub.plan(&Request { name, revision, include: Vec::new() })?;
    let pulled = hub.pull(&plan, &Silent)?;
    Ok(std::fs::read(pulled.model).unwrap())
}

fn model() -> Repository {
    Repository::new(&[("m.gguf", noise(1, 45_000))])
}

#[test]
fn a_trusted_host_serves_a_model() {
    let model = model();
    let address = start(move |asked| model.reply(asked));
    let url = format!("https://localhost:{}", address.port());
    assert!(pull(&url, Some("ca.pem")).unwrap() == noise(1, 45_000));
    let by_number = format!("https://{address}");
    assert!(pull(&by_number, Some("ca.pem")).unwrap() == noise(1, 45_000));
}

#[test]
fn a_host_that_nobody_vouches_for_is_refused_at_once() {
    let address = start(|_| panic!("nothing may be asked"));
    let url = format!("https://localhost:{}", address.port());
    let error = pull(&url, None).unwrap_err();
    assert!(matches!(error, HubError::Connection { .. }), "{error}");
    assert!(error.to_string().contains("certificate"), "{error}");
    let error = pull(&url, Some("README.md")).unwrap_err();
    assert!(matches!(error, HubError::Certificates { .. }), "{error}");
    let error = pull(&url, Some("server.key")).unwrap_err();
    assert!(matches!(error, HubError::Certificates { .. }), "{error}");
}

#[test]
fn a_redirect_may_not_leave_encryption() {
    let plain = Server::of(model());
    let (to, model) = (plain.url(), model());
    let address = start(move |asked| {
        if asked.path.starts_with("/api/") {
            model.reply(asked)
        } else {
            Reply::redirect(format!("{to}{}", asked.path))
        }
    });
    let error = pull(&format!("https://localhost:{}", address.port()), Some("ca.pem")).unwrap_err();
    assert!(error.to_string().contains("not encrypted"), "{error}");
    assert!(plain.log().is_empty());
}

#[test]
fn a_token_may_begin_encrypted_only() {
    // The other way round is allowed, but then the token stays behind.
    let model = model();
    let address = start(move |asked| {
        assert!(!asked.headers.contains_key("authorization"));
        model.reply(asked)
    });
    let plain = Server::start(move |asked| {
        Reply::redirect(format!("https://localhost:{}{}", address.port(), asked.path))
    });
    assert!(pull(&plain.url(), Some("ca.pem")).unwrap() == noise(1, 45_000));
    let sent = plain.log().iter().all(|asked| asked.headers.contains_key("authorization"));
    assert!(sent, "to this machine a token may go in the clear");
}

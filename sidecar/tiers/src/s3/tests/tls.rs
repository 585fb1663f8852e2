//! TLS to a real server whose certificate only a file of ours vouches for.

use super::Server;
use crate::s3::{Options, S3};
use crate::testing::faulty::{Faulty, Reply};
use crate::testing::suite::{Memory, Sample};
use crate::testing::tls::Certificates;
use crate::{Cause, Stored, Tier, TierError};
use kvcachepool_protocol::config;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy, sink};
use tokio::net::TcpListener;

/// A server that speaks TLS by these files.
fn encrypted(files: &Certificates) -> Server {
    let [certificate, key] =
        ["tls.crt", "tls.key"].map(|name| files.path(name).display().to_string());
    Server::start_with(&["--cert", &certificate, "--key", &key])
}

async fn refused(config: &config::S3) -> TierError {
    S3::open(config, Options::default()).await.unwrap_err()
}

#[tokio::test]
async fn a_server_is_trusted_by_the_file_that_vouches_for_it_and_by_no_other() {
    let (right, other) = (Certificates::local(), Certificates::local());
    let server = encrypted(&right);
    let plain = server.config();
    let with = |ca: PathBuf| config::S3 {
        endpoint: plain.endpoint.replace("http://", "https://"),
        ca: Some(ca),
        ..plain.clone()
    };
    let config = with(right.path("ca.crt"));
    let tier = S3::open(&config, Options::default()).await.unwrap();
    let (memory, sample) = (Memory::new(32 << 20), Sample::new(1, 0, &[9 << 20]));
    assert_eq!(tier.put(sample.put(&memory)).await, Ok(Stored::New));
    let get = sample.get_all(&memory);
    tier.get(get.clone()).await.unwrap();
    assert!(sample.lies_in(&get.places));
    let error = refused(&with(other.path("ca.crt"))).await;
    assert_eq!(error.cause, Cause::Config, "{error}");
    assert!(
        error.detail.contains("TLS") && error.detail.contains("s3.ca"),
        "{error}"
    );
    let mut config = with(right.path("ca.crt"));
    config.endpoint = config.endpoint.replace("127.0.0.1", "localhost");
    let error = refused(&config).await;
    assert_eq!(error.cause, Cause::Config, "{error}");
    assert!(error.detail.contains("another host"), "{error}");
}

/// Hears whoever connects, says this to him, and ends. An endpoint without a scheme.
async fn ends_with(words: &'static [u8]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut heard = [0; 16 << 10];
            let _ = stream.read(&mut heard).await;
            let _ = stream.write_all(words).await;
            let _ = stream.shutdown().await;
            // What is left unread would take the words away.
            let _ = copy(&mut stream, &mut sink()).await;
        }
    });
    format!("127.0.0.1:{port}")
}

#[tokio::test]
async fn tls_to_a_plain_port_and_plain_text_to_one_of_tls_have_a_name_and_say_what_to_write() {
    const TLS: &str = "is this a port of TLS (https://)?";
    const PLAIN: &str = "is this a port without TLS (http://)?";
    let files = Certificates::local();
    let (real, silent) = (encrypted(&files), Faulty::start(|_| Reply::Hang).await);
    let told = Faulty::start(|_| {
        let page = "<title>400 The plain HTTP request was sent to HTTPS port</title>";
        Reply::Full(400, vec![], page.into())
    })
    .await;
    // An alert of TLS, as it goes over a connection.
    let alert = ends_with(b"\x15\x03\x01\x00\x02\x02\x46").await;
    let answer = ends_with(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n").await;
    let nothing = ends_with(b"").await;
    let base = config::S3 {
        ca: Some(files.path("ca.crt")),
        ..silent.config()
    };
    let [real, told, silent] = [real.config(), told.config(), base.clone()]
        .map(|config| config.endpoint.replace("http://", ""));
    let cases = [
        ("http", &real, Cause::Unreachable, TLS),
        ("http", &alert, Cause::Unreachable, TLS),
        ("http", &nothing, Cause::Unreachable, TLS),
        ("http", &told, Cause::Config, "use https:// in s3.endpoint"),
        ("https", &answer, Cause::Config, PLAIN),
        ("https", &nothing, Cause::Unreachable, PLAIN),
        ("https", &silent, Cause::Unreachable, PLAIN),
    ];
    let refusals = cases.map(|(scheme, server, ..)| {
        let config = config::S3 {
            endpoint: format!("{scheme}://{server}"),
            ..base.clone()
        };
        async move { refused(&config).await }
    });
    let errors = futures::future::join_all(refusals).await;
    for ((scheme, _, cause, says), error) in cases.into_iter().zip(errors) {
        assert_eq!(error.cause, cause, "{scheme}: {error}");
        assert!(error.detail.contains(says), "{scheme}: {error}");
    }
}

#[tokio::test]
async fn a_server_that_answered_and_breaks_off_later_is_not_taken_for_one_of_tls() {
    let asked = AtomicUsize::new(0);
    let server = Faulty::start(move |_| match asked.fetch_add(1, Relaxed) {
        0 => Reply::status(404),
        _ => Reply::Close,
    })
    .await;
    let (requests, name) = (server.requests().await, Sample::new(1, 0, &[9]).name());
    assert_eq!(requests.size(&name).await, Ok(None));
    let error = requests.size(&name).await.unwrap_err();
    assert_eq!(error.cause, Cause::Unreachable, "{error}");
    assert!(!error.detail.contains("TLS"), "{error}");
}

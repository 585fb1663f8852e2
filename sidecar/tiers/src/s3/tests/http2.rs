//! HTTP/2 with a real server: a front of the test's own speaks TLS, offers versions of HTTP, and hands each request on.

use super::{Server, small_parts};
use crate::s3::S3;
use crate::testing::suite::{Memory, Sample};
use crate::testing::tls::Certificates;
use crate::{Removal, Stored, Tier};
use hyper::body::Incoming;
use hyper::header::{HOST, HeaderValue};
use hyper::service::service_fn;
use hyper::{Request, Response, Uri, Version};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use kvcachepool_protocol::config::{self, HttpVersion};
use parking_lot::Mutex;
use std::sync::Arc;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

type Forward = Client<HttpConnector, Incoming>;

/// A request as it came in: of which connection, by which version, what was asked.
#[derive(Debug, Clone)]
struct Seen {
    connection: usize,
    version: Version,
    asked: String,
}

/// Stands before a server. It ends when it is dropped.
struct Front {
    server: Server,
    files: Certificates,
    port: u16,
    seen: Arc<Mutex<Vec<Seen>>>,
    task: JoinHandle<()>,
}

impl Front {
    async fn start(offers: &[&[u8]]) -> Self {
        let (server, files) = (Server::start(), Certificates::local());
        let behind = server.config().endpoint;
        let tls = files.acceptor(offers);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let seen: Arc<Mutex<Vec<Seen>>> = Arc::default();
        let sees = seen.clone();
        let client: Forward = Client::builder(TokioExecutor::new()).build_http();
        let task = tokio::spawn(async move {
            let mut connection = 0;
            while let Ok((stream, _)) = listener.accept().await {
                connection += 1;
                let (behind, sees, client) = (behind.clone(), sees.clone(), client.clone());
                let answer = move |request: Request<Incoming>| {
                    sees.lock().push(Seen {
                        connection,
                        version: request.version(),
                        asked: format!("{} {}", request.method(), request.uri()),
                    });
                    forward(client.clone(), behind.clone(), request)
                };
                tokio::spawn(serve(tls.clone(), stream, answer));
            }
        });
        Self {
            server,
            files,
            port,
            seen,
            task,
        }
    }

    fn config(&self, http_version: HttpVersion) -> config::S3 {
        config::S3 {
            endpoint: format!("https://127.0.0.1:{}", self.port),
            ca: Some(self.files.path("ca.crt")),
            http_version,
            ..self.server.config()
        }
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn forward(
    client: Forward,
    behind: String,
    mut request: Request<Incoming>,
) -> Result<Response<Incoming>, hyper_util::client::legacy::Error> {
    // What was signed stands in the URI of HTTP/2.
    if let Some(authority) = request.uri().authority() {
        let host = HeaderValue::from_str(authority.as_str()).unwrap();
        request.headers_mut().insert(HOST, host);
    }
    let target = request.uri().path_and_query().unwrap().as_str();
    *request.uri_mut() = format!("{behind}{target}").parse::<Uri>().unwrap();
    *request.version_mut() = Version::HTTP_11;
    client.request(request).await
}

/// Serves a connection by the version that was agreed on. One that ends in any way is the client's business.
async fn serve<A>(
    tls: TlsAcceptor,
    stream: TcpStream,
    answer: impl Fn(Request<Incoming>) -> A + Send + 'static,
) where
    A: Future<Output = Result<Response<Incoming>, hyper_util::client::legacy::Error>>
        + Send
        + 'static,
{
    let Ok(stream) = tls.accept(stream).await else {
        return;
    };
    let both = stream.get_ref().1.alpn_protocol() == Some(b"h2");
    let (stream, answer) = (TokioIo::new(stream), service_fn(answer));
    let _ = match both {
        true => {
            let mut server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
            server
                .max_concurrent_streams(32)
                .serve_connection(stream, answer)
                .await
        }
        false => {
            let server = hyper::server::conn::http1::Builder::new();
            server.serve_connection(stream, answer).await
        }
    };
}

/// All that a tier does, small and large, several at once.
async fn used(config: &config::S3) {
    let tier = S3::open(config, small_parts()).await.unwrap();
    let memory = Memory::new(64 << 20);
    let samples = [
        Sample::new(1, 0, &[5_000, 77]),
        Sample::new(1, 1, &[9 << 20, 3_000_001]),
        Sample::new(1, 2, &[2 << 20]),
    ];
    let puts = samples.iter().map(|sample| tier.put(sample.put(&memory)));
    let stored = futures::future::try_join_all(puts).await.unwrap();
    assert_eq!(stored, [Stored::New; 3]);
    let gets: Vec<_> = samples.iter().map(|s| s.get_all(&memory)).collect();
    let got = gets.iter().map(|get| tier.get(get.clone()));
    futures::future::try_join_all(got).await.unwrap();
    for (sample, get) in samples.iter().zip(&gets) {
        assert!(sample.lies_in(&get.places));
        assert_eq!(tier.head(&sample.name()).await, Ok(sample.object.clone()));
    }
    assert_eq!(tier.put(samples[1].put(&memory)).await, Ok(Stored::Already));
    let listed = tier.list(None, 10).await.unwrap().objects;
    assert_eq!(tier.remove(Removal::Listed(&listed)).await, Ok(3));
}

#[tokio::test]
async fn all_that_a_tier_does_goes_by_the_version_that_both_sides_speak() {
    const BOTH: &[&[u8]] = &[b"h2", b"http/1.1"];
    const OLD: &[&[u8]] = &[b"http/1.1"];
    for (wanted, offers, version) in [
        (HttpVersion::Http2, BOTH, Version::HTTP_2),
        (HttpVersion::Http2, OLD, Version::HTTP_11),
        (HttpVersion::Http2, &[], Version::HTTP_11),
        (HttpVersion::Http1, BOTH, Version::HTTP_11),
        (HttpVersion::Auto, BOTH, Version::HTTP_11),
    ] {
        let front = Front::start(offers).await;
        used(&front.config(wanted)).await;
        let seen = front.seen.lock().clone();
        assert!(
            seen.iter().all(|s| s.version == version),
            "{wanted:?}: {seen:?}"
        );
        let asked = |what: &str| seen.iter().filter(|s| s.asked.contains(what)).count();
        // Parts of the long object, its end, and ranges beyond the first.
        assert_eq!(asked("partNumber="), 3);
        assert!(asked("GET ") > 12, "{seen:?}");
        let connections = seen.iter().map(|s| s.connection).max();
        // Many requests of HTTP/2 share one, each of HTTP/1.1 that runs has its own.
        assert_eq!(
            connections == Some(1),
            version == Version::HTTP_2,
            "{wanted:?}"
        );
    }
}

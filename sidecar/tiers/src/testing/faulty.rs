//! A scripted HTTP server that records its requests, for responses that a real server rarely gives.
#![allow(dead_code, reason = "two programs include it, each uses a part")]

use super::tls::Certificates;
use kvcachepool_protocol::config::S3;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;
use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::Barrier;
use tokio::task::JoinHandle;

/// A received request.
#[derive(Debug, Clone, Default)]
pub struct Asked {
    pub method: String,
    /// Path and query.
    pub target: String,
    pub headers: BTreeMap<String, String>,
    pub body: Vec<u8>,
}

impl Asked {
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }

    /// First and last requested byte.
    pub fn range(&self) -> (usize, usize) {
        let range = self.header("range").strip_prefix("bytes=").unwrap();
        let (first, last) = range.split_once('-').unwrap();
        (first.parse().unwrap(), last.parse().unwrap())
    }
}

/// Longest wait at the barrier of [`Reply::Together`].
const TOGETHER_WITHIN: Duration = Duration::from_secs(20);

/// A scripted response.
#[derive(Debug, Clone)]
pub enum Reply {
    /// Status, headers, body.
    Full(u16, Vec<(&'static str, String)>, Vec<u8>),
    /// The same, but the connection ends after this many bytes of the body.
    Cut(Vec<(&'static str, String)>, Vec<u8>, usize),
    /// The same, but with TLS the end is not announced.
    Torn(Vec<(&'static str, String)>, Vec<u8>, usize),
    /// Headers and body, sent byte by byte with this pause.
    Drip(Vec<(&'static str, String)>, Vec<u8>, Duration),
    /// Raw bytes; true: the connection ends after them.
    Raw(Vec<u8>, bool),
    /// Raw bytes, then after the barrier others.
    Twice(Vec<u8>, Arc<Barrier>, Vec<u8>),
    /// Another response after a delay.
    Later(Duration, Box<Reply>),
    /// Another response, or status 500 if too few requests meet at the barrier.
    Together(Arc<Barrier>, Box<Reply>),
    /// No response.
    Hang,
    /// The connection ends without a response.
    Close,
}

impl Reply {
    /// A response without a body.
    pub fn status(status: u16) -> Self {
        Self::Full(status, Vec::new(), Vec::new())
    }

    /// An error in the format of S3.
    pub fn error(status: u16, code: &str) -> Self {
        let body = format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>{code}</Code><Message>because</Message></Error>"
        );
        Self::Full(
            status,
            vec![("content-type", "application/xml".into())],
            body.into(),
        )
    }

    /// The requested range of an object.
    pub fn part(asked: &Asked, object: &[u8]) -> Self {
        let (headers, body) = range(asked, object);
        Self::Full(206, headers, body)
    }
}

/// Headers and body of the requested range of an object.
pub fn range(asked: &Asked, object: &[u8]) -> (Vec<(&'static str, String)>, Vec<u8>) {
    let (first, last) = asked.range();
    let end = (last + 1).min(object.len());
    let range = format!("bytes {first}-{}/{}", end - 1, object.len());
    let headers = vec![("content-range", range), ("etag", "\"one\"".into())];
    (headers, object[first..end].to_vec())
}

type Script = dyn Fn(&Asked) -> Reply + Send + Sync;

/// Recorded requests.
#[derive(Debug, Default)]
struct Heard {
    asked: Mutex<Vec<Asked>>,
    /// Number of accepted connections.
    connections: AtomicUsize,
    /// Requests in progress, now and at most.
    running: AtomicUsize,
    peak: AtomicUsize,
}

/// The server. It ends on drop.
#[derive(Debug)]
pub struct Faulty {
    heard: Arc<Heard>,
    folder: TempDir,
    tls: Option<Certificates>,
    port: u16,
    task: JoinHandle<()>,
}

impl Faulty {
    pub async fn start(script: impl Fn(&Asked) -> Reply + Send + Sync + 'static) -> Self {
        Self::start_with(None, script).await
    }

    /// With these certificates it speaks TLS.
    pub async fn start_with(
        tls: Option<Certificates>,
        script: impl Fn(&Asked) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let acceptor = tls.as_ref().map(|tls| tls.acceptor());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let heard: Arc<Heard> = Arc::default();
        let (script, hears): (Arc<Script>, _) = (Arc::new(script), heard.clone());
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (script, heard) = (script.clone(), hears.clone());
                heard.connections.fetch_add(1, Relaxed);
                let acceptor = acceptor.clone();
                // The end of a connection is the client's business.
                tokio::spawn(async move {
                    match acceptor {
                        Some(tls) => serve(tls.accept(stream).await?, &*script, &heard).await,
                        None => serve(stream, &*script, &heard).await,
                    }
                });
            }
        });
        let folder = tempfile::tempdir().unwrap();
        for name in ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"] {
            std::fs::write(folder.path().join(name), "any").unwrap();
        }
        Self {
            heard,
            folder,
            tls,
            port,
            task,
        }
    }

    pub fn config(&self) -> S3 {
        let scheme = self.tls.as_ref().map_or("http", |_| "https");
        S3 {
            bucket: "kv-bucket".into(),
            endpoint: format!("{scheme}://127.0.0.1:{}", self.port),
            ca: self.tls.as_ref().map(|tls| tls.path("ca.crt")),
            auth: Some(self.folder.path().into()),
            ..S3::default()
        }
    }

    /// All requests.
    pub fn asked(&self) -> Vec<Asked> {
        self.heard.asked.lock().clone()
    }

    /// Number of requests with this method.
    pub fn count(&self, method: &str) -> usize {
        let asked = self.heard.asked.lock();
        asked.iter().filter(|asked| asked.method == method).count()
    }

    /// Number of accepted connections.
    pub fn connections(&self) -> usize {
        self.heard.connections.load(Relaxed)
    }

    /// Most concurrent requests.
    pub fn peak(&self) -> usize {
        self.heard.peak.load(Relaxed)
    }
}

impl Drop for Faulty {
    fn drop(&mut self) {
        self.task.abort();
    }
}

trait Connection: AsyncRead + AsyncWrite + Unpin {}
impl<T: AsyncRead + AsyncWrite + Unpin> Connection for T {}

async fn serve(mut stream: impl Connection, script: &Script, heard: &Heard) -> io::Result<()> {
    while let Some(asked) = read(&mut stream).await? {
        heard.asked.lock().push(asked.clone());
        let running = heard.running.fetch_add(1, Relaxed) + 1;
        heard.peak.fetch_max(running, Relaxed);
        let head = asked.method == "HEAD";
        let reply = match script(&asked) {
            Reply::Later(pause, reply) => {
                tokio::time::sleep(pause).await;
                *reply
            }
            Reply::Together(barrier, reply) => {
                let met = tokio::time::timeout(TOGETHER_WITHIN, barrier.wait()).await;
                met.map_or(Reply::status(500), |_| *reply)
            }
            reply => reply,
        };
        // The response may be read before the next line runs.
        heard.running.fetch_sub(1, Relaxed);
        match reply {
            Reply::Full(status, headers, body) => {
                write_head(&mut stream, status, &headers, body.len()).await?;
                if !head {
                    stream.write_all(&body).await?;
                }
            }
            Reply::Cut(headers, body, bytes) => {
                write_head(&mut stream, 206, &headers, body.len()).await?;
                stream.write_all(&body[..bytes]).await?;
                return stream.shutdown().await;
            }
            Reply::Torn(headers, body, bytes) => {
                write_head(&mut stream, 206, &headers, body.len()).await?;
                stream.write_all(&body[..bytes]).await?;
                return stream.flush().await;
            }
            Reply::Drip(headers, body, pause) => {
                write_head(&mut stream, 206, &headers, body.len()).await?;
                for byte in body {
                    stream.write_all(&[byte]).await?;
                    stream.flush().await?;
                    tokio::time::sleep(pause).await;
                }
            }
            Reply::Raw(bytes, ends) => {
                stream.write_all(&bytes).await?;
                if ends {
                    return stream.shutdown().await;
                }
            }
            Reply::Twice(first, between, second) => {
                for bytes in [&first, &second] {
                    stream.write_all(bytes).await?;
                    stream.flush().await?;
                    between.wait().await;
                }
            }
            Reply::Hang | Reply::Later(..) | Reply::Together(..) => std::future::pending().await,
            Reply::Close => return Ok(()),
        }
        stream.flush().await?;
    }
    Ok(())
}

async fn write_head(
    stream: &mut impl Connection,
    status: u16,
    headers: &[(&'static str, String)],
    bytes: usize,
) -> io::Result<()> {
    let mut head = format!("HTTP/1.1 {status} Answer\r\n");
    if !headers.iter().any(|(name, _)| *name == "content-length") {
        head += &format!("content-length: {bytes}\r\n");
    }
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    stream.write_all((head + "\r\n").as_bytes()).await
}

/// The next request; `None` at the end of the connection.
async fn read(stream: &mut impl Connection) -> io::Result<Option<Asked>> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        if stream.read(&mut byte).await? == 0 {
            return Ok(None);
        }
        head.push(byte[0]);
    }
    let text = String::from_utf8(head).unwrap();
    let mut lines = text.lines();
    let mut first = lines.next().unwrap().split(' ');
    let headers: BTreeMap<String, String> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_lowercase(), value.trim().to_string()))
        .collect();
    let bytes = headers
        .get("content-length")
        .map_or(0, |n| n.parse().unwrap());
    let mut body = vec![0; bytes];
    stream.read_exact(&mut body).await?;
    Ok(Some(Asked {
        method: first.next().unwrap().to_string(),
        target: first.next().unwrap().to_string(),
        headers,
        body,
    }))
}

/// A raw response with the requested range of an object, one more header, and bytes behind it.
pub fn whole(asked: &Asked, object: &[u8], header: &str, behind: &[u8]) -> Vec<u8> {
    let (own, body) = range(asked, object);
    let mut head = format!(
        "HTTP/1.1 206 Answer\r\ncontent-length: {}\r\n{header}\r\n",
        body.len()
    );
    for (name, value) in own {
        head += &format!("{name}: {value}\r\n");
    }
    [(head + "\r\n").as_bytes(), &body, behind].concat()
}

/// Waits for a condition, with a timeout.
pub async fn until(what: &str, condition: impl Fn() -> bool) {
    let waited = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let waited = tokio::time::timeout(Duration::from_secs(30), waited).await;
    waited.unwrap_or_else(|_| panic!("timed out waiting for {what}"));
}

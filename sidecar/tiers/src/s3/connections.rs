//! HTTP/1.1 connections. A task that waits for a response drives its connection itself: no other task is woken, and received data is still
//! in the cache of the CPU that processes it. Nothing drives an idle connection.

use super::answer::Answer;
use super::connect::{Connector, Failed, Stream};
use aws_sdk_s3::primitives::SdkBody;
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{HOST, HeaderValue};
use hyper::http::uri::{Authority, Parts, Scheme};
use hyper::{Request, Response, Uri};
use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tower_service::Service;

/// Opens connections, and keeps idle ones for reuse.
#[derive(Clone)]
pub struct Connections {
    connector: Connector,
    read_bytes: usize,
    idle: Arc<Idle>,
}

impl Connections {
    /// Without connections yet. Each buffers at most `read_bytes`, and with TLS another buffer. Per server `most` idle connections are
    /// kept, each for at most `idle`.
    pub fn new(connector: Connector, read_bytes: usize, most: usize, idle: Duration) -> Self {
        Self {
            connector,
            read_bytes,
            idle: Arc::new(Idle {
                most,
                longest: idle,
                kept: Mutex::default(),
            }),
        }
    }

    /// Sends a request with an absolute URI. Reading the response's body drives its connection.
    pub async fn request(&self, request: Request<SdkBody>) -> Result<Response<Answer>, Failed> {
        let uri = request.uri().clone();
        let server = Server::of(&uri).ok_or("the request URI has no host")?;
        let mut request = of_server(request, &server)?;
        loop {
            let idle = self.idle.take(&server).await;
            let reused = idle.is_some();
            let mut connection = match idle {
                Some(connection) => connection,
                None => self.connect(uri.clone()).await?,
            };
            match connection.ask(request).await {
                Ok(answer) => {
                    let home = Home {
                        connections: self.clone(),
                        server,
                    };
                    return Ok(Answer::of(answer, connection, home).await);
                }
                Err(mut failed) => match failed.take_message() {
                    // The server closed it while it was idle: nothing was sent.
                    Some(unsent) if reused => request = unsent,
                    _ => return Err(failed.into_error().into()),
                },
            }
        }
    }

    async fn connect(&self, uri: Uri) -> Result<Connection, Failed> {
        let mut connector = self.connector.clone();
        poll_fn(|cx| connector.poll_ready(cx)).await?;
        let stream = connector.call(uri).await?;
        Ok(self.over(stream).await?)
    }

    /// A connection over a stream between two responses.
    async fn over(&self, stream: Stream) -> Result<Connection, hyper::Error> {
        let mut builder = http1::Builder::new();
        let handshake = builder.max_buf_size(self.read_bytes).handshake(stream);
        let (sender, stream) = handshake.await?;
        Ok(Connection {
            sender,
            stream: Some(stream),
        })
    }
}

/// Address of a server.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Server {
    scheme: Scheme,
    authority: Authority,
}

impl Server {
    fn of(uri: &Uri) -> Option<Self> {
        Some(Self {
            scheme: uri.scheme()?.clone(),
            authority: uri.authority()?.clone(),
        })
    }

    /// The Host header as it was signed: without a default port.
    fn host(&self) -> String {
        let name = self.authority.host();
        let usual = match self.scheme == Scheme::HTTPS {
            true => 443,
            false => 80,
        };
        match self.authority.port_u16() {
            Some(port) if port != usual => format!("{name}:{port}"),
            _ => name.to_string(),
        }
    }
}

/// Converts a request to its HTTP/1.1 form: the target without the server, which is in the Host header.
fn of_server(mut request: Request<SdkBody>, server: &Server) -> Result<Request<SdkBody>, Failed> {
    if !request.headers().contains_key(HOST) {
        let host = HeaderValue::try_from(server.host())?;
        request.headers_mut().insert(HOST, host);
    }
    let mut target = Parts::default();
    target.path_and_query = request.uri().path_and_query().cloned();
    *request.uri_mut() = Uri::from_parts(target)?;
    Ok(request)
}

/// A connection; its user drives it.
pub struct Connection {
    sender: SendRequest<SdkBody>,
    /// `None`: it ended. An unsent request is returned only by its drop.
    stream: Option<http1::Connection<Stream, SdkBody>>,
}

impl Connection {
    /// Drives the connection; returns whether it ended.
    pub fn poll_ended(&mut self, cx: &mut Context<'_>) -> bool {
        let moved = self.stream.as_mut().map(|stream| Pin::new(stream).poll(cx));
        if moved.is_some_and(|moved| moved.is_ready()) {
            self.stream = None;
        }
        self.stream.is_none()
    }

    /// Whether it can send another request.
    pub fn is_ready(&self) -> bool {
        self.sender.is_ready()
    }

    /// The library's side of it; `None`: it ended.
    pub fn into_library(self) -> Option<http1::Connection<Stream, SdkBody>> {
        self.stream
    }

    /// Sends a request and waits for the head of its response.
    async fn ask(
        &mut self,
        request: Request<SdkBody>,
    ) -> Result<Response<Incoming>, TrySendError<Request<SdkBody>>> {
        let mut answer = pin!(self.sender.try_send_request(request));
        poll_fn(|cx| {
            self.poll_ended(cx);
            answer.as_mut().poll(cx)
        })
        .await
    }
}

/// Idle connections by server, the most recent last.
struct Idle {
    most: usize,
    longest: Duration,
    kept: Mutex<HashMap<Server, VecDeque<(Instant, Connection)>>>,
}

impl Idle {
    /// A connection that the server has not closed, as far as is known.
    async fn take(&self, server: &Server) -> Option<Connection> {
        loop {
            let mut connection = self.youngest(server)?;
            if !poll_fn(|cx| Poll::Ready(connection.poll_ended(cx))).await {
                return Some(connection);
            }
        }
    }

    fn youngest(&self, server: &Server) -> Option<Connection> {
        let (since, connection) = self.kept.lock().get_mut(server)?.pop_back()?;
        // The others are older.
        (since.elapsed() < self.longest).then_some(connection)
    }

    fn keep(self: Arc<Self>, server: Server, connection: Connection) {
        let mut all = self.kept.lock();
        let first = all.is_empty();
        let kept = all.entry(server).or_default();
        kept.push_back((Instant::now(), connection));
        let oldest = (kept.len() > self.most).then(|| kept.pop_front());
        drop(all);
        drop(oldest);
        if first {
            tokio::spawn(close_old(Arc::downgrade(&self), self.longest));
        }
    }

    /// Closes connections that were idle for too long; returns whether others remain.
    fn sweep(&self) -> bool {
        let (mut old, mut all) = (Vec::new(), self.kept.lock());
        for kept in all.values_mut() {
            let young = |(since, _): &(Instant, Connection)| since.elapsed() < self.longest;
            let first = kept.iter().position(young).unwrap_or(kept.len());
            old.extend(kept.drain(..first));
        }
        all.retain(|_, kept| !kept.is_empty());
        !all.is_empty()
    }
}

/// Runs as long as there are idle connections.
async fn close_old(idle: Weak<Idle>, longest: Duration) {
    loop {
        tokio::time::sleep(longest / 2).await;
        if !idle.upgrade().is_some_and(|idle| idle.sweep()) {
            return;
        }
    }
}

/// Where a connection is returned to.
pub struct Home {
    connections: Connections,
    server: Server,
}

impl Home {
    /// Takes back a stream between two responses.
    pub async fn back(self, stream: Stream) {
        // Cannot fail for a reason of this request; otherwise a new connection is opened later.
        if let Ok(connection) = self.connections.over(stream).await {
            self.keep(connection);
        }
    }

    /// Takes back a connection between two responses.
    pub fn keep(self, connection: Connection) {
        self.connections.idle.clone().keep(self.server, connection);
    }
}

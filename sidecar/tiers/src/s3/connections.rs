//! HTTP/1.1 connections and their responses. A task that waits for a response drives its connection itself: no other task is woken, and
//! received data is still in the cache of the CPU that processes it. Nothing drives an idle connection.
//!
//! The HTTP library reads the head of a response. A body of known length without encoding leaves the library together with its connection
//! ([`Wire`]), so that its bytes are received at their place; the library reads any other body ([`Answer`]).

use super::connect::{Connector, Failed, Stream};
use crate::Span;
use aws_sdk_s3::primitives::SdkBody;
use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{self, HOST, HeaderValue};
use hyper::http::response;
use hyper::http::uri::{Authority, Parts, Scheme};
use hyper::{Request, Response, Uri, Version};
use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};
use tokio::io::AsyncReadExt;
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
struct Connection {
    sender: SendRequest<SdkBody>,
    /// `None`: it ended. An unsent request is returned only by its drop.
    stream: Option<http1::Connection<Stream, SdkBody>>,
}

impl Connection {
    /// Drives the connection; returns whether it ended.
    fn poll_ended(&mut self, cx: &mut Context<'_>) -> bool {
        let moved = self.stream.as_mut().map(|stream| Pin::new(stream).poll(cx));
        if moved.is_some_and(|moved| moved.is_ready()) {
            self.stream = None;
        }
        self.stream.is_none()
    }

    /// Whether it can send another request.
    fn is_ready(&self) -> bool {
        self.sender.is_ready()
    }

    /// The library's side of it; `None`: it ended.
    fn into_library(self) -> Option<http1::Connection<Stream, SdkBody>> {
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
struct Home {
    connections: Connections,
    server: Server,
}

impl Home {
    /// Takes back a stream between two responses.
    async fn back(self, stream: Stream) {
        // Cannot fail for a reason of this request; otherwise a new connection is opened later.
        if let Ok(connection) = self.connections.over(stream).await {
            self.keep(connection);
        }
    }

    /// Takes back a connection between two responses.
    fn keep(self, connection: Connection) {
        self.connections.idle.clone().keep(self.server, connection);
    }
}

/// Size of a piece that is not received at its place.
const PIECE_BYTES: u64 = 16 << 10;

/// A body that the library reads, with its connection. The last byte returns the connection to the idle ones; a drop before it closes the
/// connection.
pub struct Answer {
    body: Incoming,
    // Never locked: it only makes a body `Sync`.
    held: Mutex<Option<Box<(Connection, Home)>>>,
}

impl Answer {
    async fn of(answer: Response<Incoming>, connection: Connection, home: Home) -> Response<Self> {
        let mut answer = answer.map(|body| Self {
            body,
            held: Mutex::new(Some(Box::new((connection, home)))),
        });
        if answer.body().is_end_stream() {
            let body = answer.body_mut();
            poll_fn(|cx| {
                body.ended(cx);
                Poll::Ready(())
            })
            .await;
        }
        answer
    }

    fn ended(&mut self, cx: &mut Context<'_>) {
        // A connection with unsent or surplus data is not reused.
        let held = self.held.get_mut().take();
        if let Some((mut connection, home)) = held.map(|held| *held)
            && !connection.poll_ended(cx)
            && connection.is_ready()
        {
            home.keep(connection);
        }
    }

    /// Bytes that are on their way from the library to a reader. Nothing drives the connection any more, so no others follow.
    fn arrived(&mut self) -> BytesMut {
        let (mut bytes, mut cx) = (BytesMut::new(), Context::from_waker(Waker::noop()));
        while let Poll::Ready(Some(Ok(frame))) = Pin::new(&mut self.body).poll_frame(&mut cx) {
            bytes.extend(frame.into_data());
        }
        bytes
    }

    /// Takes body and connection from the library, if the head of the response allows it and the body has not ended.
    pub async fn into_wire(mut self, head: &response::Parts) -> Result<Wire, Self> {
        let held = self.held.get_mut();
        let Some((length, (connection, home))) =
            plain_length(head).and_then(|length| Some((length, *held.take()?)))
        else {
            return Err(self);
        };
        let Some(connection) = connection.into_library() else {
            return Err(self);
        };
        let mut ahead = self.arrived();
        let library = connection.into_parts();
        ahead.extend_from_slice(&library.read_buf);
        // A connection with bytes behind the response is not reused.
        let keeps = keeps(head) && ahead.len() as u64 <= length;
        ahead.truncate(usize::try_from(length).unwrap_or(usize::MAX));
        let mut wire = Wire {
            left: length - ahead.len() as u64,
            ahead: ahead.freeze(),
            held: Some((library.io, home)),
            keeps,
        };
        wire.received(0).await;
        Ok(wire)
    }
}

/// Length of a body that is on the connection without encoding.
fn plain_length(head: &response::Parts) -> Option<u64> {
    let has = |name| head.headers.contains_key(name);
    let encoded = has(header::TRANSFER_ENCODING) || has(header::CONTENT_ENCODING);
    if !head.status.is_success() || head.version != Version::HTTP_11 || encoded {
        return None;
    }
    let length = head.headers.get(header::CONTENT_LENGTH)?;
    length.to_str().ok()?.parse().ok()
}

/// Whether the server accepts another request on the connection, which is the default.
fn keeps(head: &response::Parts) -> bool {
    let said = head.headers.get_all(header::CONNECTION).into_iter();
    said.map(|said| said.to_str().unwrap_or_default())
        .flat_map(|said| said.split(','))
        .all(|word| word.trim().eq_ignore_ascii_case("keep-alive"))
}

impl Body for Answer {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = &mut *self;
        let mut next = Pin::new(&mut this.body).poll_frame(cx);
        if next.is_pending()
            && let Some(held) = this.held.get_mut()
        {
            let ended = held.0.poll_ended(cx);
            next = Pin::new(&mut this.body).poll_frame(cx);
            if ended {
                *this.held.get_mut() = None;
            }
        }
        if matches!(next, Poll::Ready(None)) || this.body.is_end_stream() {
            this.ended(cx);
        }
        next
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A body and its connection. The last byte returns the connection to the idle ones; a drop before it closes the connection.
pub struct Wire {
    /// First bytes of the body, which the library had read.
    pub ahead: Bytes,
    /// Bytes behind them, still to be received.
    left: u64,
    held: Option<(Stream, Home)>,
    /// The connection can be used again.
    keeps: bool,
}

impl Wire {
    /// Receives bytes behind `ahead` into memory of their own; none after the end of the connection.
    pub async fn read(&mut self) -> io::Result<Bytes> {
        let mut piece = vec![0; self.left.min(PIECE_BYTES) as usize];
        let received = match &mut self.held {
            Some((stream, _)) => stream.io().read(&mut piece).await?,
            None => 0,
        };
        piece.truncate(received);
        self.received(received).await;
        Ok(piece.into())
    }

    /// Receives at most `bytes` bytes behind `ahead` into a span from `at` on; 0 after the end of the connection.
    pub async fn receive_into(&mut self, span: &Span, at: u64, bytes: u64) -> io::Result<u64> {
        let bytes = bytes.min(self.left);
        let received = match &mut self.held {
            Some((stream, _)) => stream.receive_into(span, at, bytes).await?,
            None => 0,
        };
        self.received(received).await;
        Ok(received as u64)
    }

    async fn received(&mut self, bytes: usize) {
        self.left -= bytes as u64;
        if self.left == 0
            && let Some((stream, home)) = self.held.take()
            && self.keeps
        {
            home.back(stream).await;
        }
    }
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Wire({} bytes left)", self.left)
    }
}

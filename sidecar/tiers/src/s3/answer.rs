//! The response of an HTTP/1.1 connection. The HTTP library reads the head. A body of known length without encoding leaves the library
//! together with its connection ([`Wire`]), so that its bytes are received at their place; the library reads any other body ([`Answer`]).

use super::connect::Stream;
use super::connections::{Connection, Home};
use crate::Span;
use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::http::response::Parts;
use hyper::{Response, Version, header};
use parking_lot::Mutex;
use std::fmt;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use tokio::io::AsyncReadExt;

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
    pub async fn of(
        answer: Response<Incoming>,
        connection: Connection,
        home: Home,
    ) -> Response<Self> {
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
    pub async fn into_wire(mut self, head: &Parts) -> Result<Wire, Self> {
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
fn plain_length(head: &Parts) -> Option<u64> {
    let has = |name| head.headers.contains_key(name);
    let encoded = has(header::TRANSFER_ENCODING) || has(header::CONTENT_ENCODING);
    if !head.status.is_success() || head.version != Version::HTTP_11 || encoded {
        return None;
    }
    let length = head.headers.get(header::CONTENT_LENGTH)?;
    length.to_str().ok()?.parse().ok()
}

/// Whether the server accepts another request on the connection, which is the default.
fn keeps(head: &Parts) -> bool {
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

//! Receives a response's bytes from the socket directly into the arena. The HTTP library reads the head. If the body has a known length on
//! a connection without TLS, the socket is taken from the library, and returned after the last byte.

use super::connections::{Answer, Below, Home};
use crate::{Span, raw};
use bytes::Bytes;
use hyper::header::{CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, TRANSFER_ENCODING};
use hyper::{Response, Version};
use parking_lot::Mutex;
use rustix::fd::AsFd;
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, Interest};
use tokio::net::TcpStream;

/// Size of a piece that does not go into the arena.
const PIECE_BYTES: u64 = 16 << 10;

/// Travels with a request whose response may be received directly, and returns the body.
#[derive(Debug, Clone, Default)]
pub struct Way(Arc<Mutex<Option<Direct>>>);

impl Way {
    /// The body that was taken.
    pub fn taken(&self) -> Option<Direct> {
        self.0.lock().take()
    }

    /// Takes the body out of a response, or leaves it.
    pub fn lead(&self, answer: Response<Answer>) -> Response<Option<Answer>> {
        let Some(length) = plain_length(&answer) else {
            return answer.map(Some);
        };
        let keeps = keeps(&answer);
        let (head, body) = answer.into_parts();
        let body = match body.below() {
            Ok(below) => {
                *self.0.lock() = Some(Direct::new(below, length, keeps));
                None
            }
            Err(body) => Some(body),
        };
        Response::from_parts(head, body)
    }
}

/// Whether the server accepts another request on the connection, which is the default.
fn keeps(answer: &Response<Answer>) -> bool {
    let said = answer.headers().get_all(CONNECTION).into_iter();
    said.map(|said| said.to_str().unwrap_or_default())
        .flat_map(|said| said.split(','))
        .all(|word| word.trim().eq_ignore_ascii_case("keep-alive"))
}

/// Length of a body that is on the connection without encoding.
fn plain_length(answer: &Response<Answer>) -> Option<u64> {
    let headers = answer.headers();
    let changed = headers.contains_key(TRANSFER_ENCODING) || headers.contains_key(CONTENT_ENCODING);
    if !answer.status().is_success() || answer.version() != Version::HTTP_11 || changed {
        return None;
    }
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// A body and its socket. A drop before the last byte closes the socket.
pub struct Direct {
    /// Bytes that the library has already read.
    ahead: VecDeque<Bytes>,
    /// Bytes still to be received from the socket.
    left: u64,
    socket: Option<(TcpStream, Home)>,
    /// The server accepts another request on it.
    keeps: bool,
}

impl Direct {
    fn new(below: Below, length: u64, keeps: bool) -> Self {
        let ahead: u64 = below.ahead.iter().map(|bytes| bytes.len() as u64).sum();
        let socket = (below.socket, below.home);
        Self {
            ahead: below.ahead,
            left: length.saturating_sub(ahead),
            socket: Some(socket),
            // A socket with bytes behind the response is not reused.
            keeps: keeps && ahead <= length,
        }
    }

    /// The next bytes in their own memory; `None` at the end.
    pub async fn next(&mut self) -> io::Result<Option<Bytes>> {
        if let Some(bytes) = self.ahead.pop_front() {
            self.came(0).await;
            return Ok(Some(bytes));
        }
        let Some((socket, _)) = self.socket.as_mut().filter(|_| self.left > 0) else {
            return Ok(None);
        };
        let mut piece = vec![0; self.left.min(PIECE_BYTES) as usize];
        let bytes = socket.read(&mut piece).await?;
        piece.truncate(bytes);
        self.came(bytes as u64).await;
        Ok(Some(piece.into()).filter(|_| bytes > 0))
    }

    /// Receives at most `bytes` bytes into a span, from `at` on; `None` if the next ones are already in memory, or none follow.
    pub async fn receive(&mut self, span: &Span, at: u64, bytes: u64) -> io::Result<Option<u64>> {
        let bytes = bytes.min(self.left);
        if bytes == 0 || !self.ahead.is_empty() {
            return Ok(None);
        }
        let Some((socket, _)) = &self.socket else {
            return Ok(None);
        };
        let receive = || raw::receive(socket.as_fd(), span, at, bytes);
        let received = socket.async_io(Interest::READABLE, receive).await? as u64;
        self.came(received).await;
        Ok(Some(received).filter(|bytes| *bytes > 0))
    }

    async fn came(&mut self, bytes: u64) {
        self.left -= bytes;
        let ended = self.left == 0 && self.ahead.is_empty();
        if !ended {
            return;
        }
        if let Some((socket, home)) = self.socket.take()
            && self.keeps
        {
            home.back(socket).await;
        }
    }
}

impl fmt::Debug for Direct {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Direct({} bytes left)", self.left)
    }
}

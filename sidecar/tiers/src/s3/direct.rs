//! An answer's bytes straight from the socket into the arena. The HTTP library reads the head; where the body is nothing but bytes of a
//! known number on a connection without TLS, the socket is taken out from under it, and put under it again when all of them came.

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

/// Bytes of a piece that does not go into the arena.
const PIECE_BYTES: u64 = 16 << 10;

/// Goes with a request whose answer may be taken directly, through all that is between, and brings it back.
#[derive(Debug, Clone, Default)]
pub struct Way(Arc<Mutex<Option<Direct>>>);

impl Way {
    /// What came this way.
    pub fn taken(&self) -> Option<Direct> {
        self.0.lock().take()
    }

    /// Takes the body out of an answer, or leaves it as it is.
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

/// Does the server take another request on the connection? Without a word it does.
fn keeps(answer: &Response<Answer>) -> bool {
    let said = answer.headers().get_all(CONNECTION).into_iter();
    said.map(|said| said.to_str().unwrap_or_default())
        .flat_map(|said| said.split(','))
        .all(|word| word.trim().eq_ignore_ascii_case("keep-alive"))
}

/// Bytes of a body that are on the connection as they are.
fn plain_length(answer: &Response<Answer>) -> Option<u64> {
    let headers = answer.headers();
    let changed = headers.contains_key(TRANSFER_ENCODING) || headers.contains_key(CONTENT_ENCODING);
    if !answer.status().is_success() || answer.version() != Version::HTTP_11 || changed {
        return None;
    }
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// A body, and the socket that it comes from. The socket is closed when this is dropped before the last byte.
pub struct Direct {
    /// What the library had read already.
    ahead: VecDeque<Bytes>,
    /// Bytes that are still to come from the socket.
    left: u64,
    socket: Option<(TcpStream, Home)>,
    /// The server takes another request on it.
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
            // Bytes behind the answer's last are nobody's: such a socket is good for nothing more.
            keeps: keeps && ahead <= length,
        }
    }

    /// The next bytes, in memory of their own; none at the end.
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

    /// Receives at most `bytes` bytes into a span, from `at` on; none where the next ones are in memory already, or none follow.
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

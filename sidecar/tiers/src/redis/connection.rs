//! One connection: sends commands and reads replies in their order. Segments move directly between socket and span.

mod transaction;

pub use transaction::{Open, Words};

use super::fault::{Fault, is_denied, is_of_the_connection, is_of_the_server};
use super::resp::{self, Head, Reader, Reply};
use super::stream::Stream;
use super::tls;
use crate::raw::Around;
use crate::{Cause, Span};
use std::io;
use std::net::IpAddr;
use tokio::time::{Duration, Instant, timeout_at};

/// Bytes per read, except for segments.
const READ_BYTES: usize = 16 << 10;
/// Most buffered bytes of a reply: those of the longest array.
const INPUT_BYTES_MAX: usize = 32 << 20;

/// Segments up to this size are copied into the output buffer behind a previous segment.
pub const COPIED_BYTES: u64 = 16 << 10;
/// Limit of the output buffer for such copies: connections keep its memory.
const OUTPUT_BYTES_MAX: usize = 128 << 10;

/// Unsent bytes of a span.
struct Segment {
    span: Span,
    at: u64,
    bytes: u64,
    /// Bytes of `output` before them.
    before: usize,
}

/// Result of reading a segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fetched {
    /// The segment is in its span.
    Read,
    /// The key does not exist.
    Absent,
    /// The value has another length.
    Length(u64),
}

/// A connection that is ready for commands.
pub struct Connection {
    stream: Stream,
    input: Vec<u8>,
    /// Offset of the first unread byte of `input`.
    start: usize,
    /// Parser of the next reply.
    reader: Reader,
    output: Vec<u8>,
    /// A segment that is sent in the middle of `output`.
    segment: Option<Segment>,
    /// Replies that are still expected.
    pending: u64,
    /// Each command is for a key of a slot that is being moved to this node.
    asking: bool,
    /// Timeout without a byte in either direction; `None`: as long as the caller waits.
    patience: Option<Duration>,
    /// The expected replies must have come by then.
    deadline: Option<Instant>,
    /// Why it cannot be used any more.
    broken: Option<String>,
    /// Idle connections to this server would fail the same way.
    outdated: bool,
    /// Open WATCH commands: a transaction of the next operation would depend on them.
    watches: usize,
    /// A transaction was begun and not ended: the next operation would become part of it.
    in_transaction: bool,
    /// The user may extend the life of objects on this server, as far as is known.
    renews: bool,
    /// Whether the server has sent anything yet.
    spoken: bool,
    since: Instant,
    heard: Instant,
}

impl Connection {
    /// Wraps a stream without earlier traffic. It breaks when the server neither accepts nor sends a byte for `patience`.
    pub fn new(stream: Stream, patience: Option<Duration>) -> Self {
        Self {
            stream,
            input: Vec::new(),
            start: 0,
            reader: Reader::default(),
            output: Vec::new(),
            segment: None,
            pending: 0,
            asking: false,
            patience,
            deadline: None,
            broken: None,
            outdated: false,
            watches: 0,
            in_transaction: false,
            renews: true,
            spoken: false,
            since: Instant::now(),
            heard: Instant::now(),
        }
    }

    /// Address of the server; `None` for a Unix socket.
    pub fn peer(&self) -> Option<IpAddr> {
        self.stream.peer()
    }

    /// Sets whether each command is preceded by ASKING.
    pub fn set_asking(&mut self, asking: bool) {
        self.asking = asking;
    }

    /// Whether each command is preceded by ASKING.
    pub fn is_asking(&self) -> bool {
        self.asking
    }

    /// Sets when the replies to the next commands must have come; `None`: as long as the server is not silent.
    pub fn set_deadline(&mut self, deadline: Option<Instant>) {
        self.deadline = deadline;
    }

    /// Whether another operation can use it.
    pub fn is_clean(&self) -> bool {
        let in_step = self.pending == 0 && self.output.is_empty() && self.unread().is_empty();
        let bound = self.is_watching() || self.in_transaction;
        in_step && self.broken.is_none() && !self.outdated && !bound
    }

    /// Whether the user may extend the life of objects here.
    pub fn renews(&self) -> bool {
        self.renews
    }

    /// Why it broke, if it did.
    pub fn broken(&self) -> Option<&str> {
        self.broken.as_deref()
    }

    /// Whether other connections to this server would fail the same way.
    pub fn is_outdated(&self) -> bool {
        self.outdated
    }

    /// A login was accepted: those that were refused before say nothing about this connection any more.
    pub fn set_logged_in(&mut self) {
        self.outdated = false;
    }

    /// How long an expected reply has been missing.
    pub fn silence(&self) -> Option<Duration> {
        (self.pending > 0).then(|| self.heard.elapsed())
    }

    /// Whether the server closed it while it was idle.
    pub fn is_stale(&mut self) -> bool {
        self.stream.is_stale()
    }

    fn begins(&mut self) {
        if self.pending == 0 {
            self.heard = Instant::now();
        }
        self.pending += 1;
        if self.asking {
            resp::command(&mut self.output, &[b"ASKING"]);
        }
    }

    /// Adds a command; it is sent before the next reply is awaited.
    pub fn command(&mut self, words: &[&[u8]]) {
        self.begins();
        resp::command(&mut self.output, words);
    }

    /// Adds `SET key <bytes of the span>` with an expiry in milliseconds. It is sent as described at [`Self::pair`].
    pub async fn set(
        &mut self,
        key: &str,
        span: &Span,
        at: u64,
        bytes: u64,
        ms: &str,
    ) -> Result<(), Fault> {
        self.begins();
        resp::begin(&mut self.output, 5);
        resp::word(&mut self.output, b"SET");
        self.pair(key, span, at, bytes).await?;
        resp::word(&mut self.output, b"PX");
        resp::word(&mut self.output, ms.as_bytes());
        Ok(())
    }

    /// Adds an MSET of `keys` keys; each follows by [`Self::pair`].
    pub fn begin_pairs(&mut self, keys: usize) {
        self.begins();
        resp::begin(&mut self.output, 1 + 2 * keys);
        resp::word(&mut self.output, b"MSET");
    }

    /// Adds a key and bytes of the span to a command. They are sent before the next reply is awaited, or before another segment.
    pub async fn pair(&mut self, key: &str, span: &Span, at: u64, bytes: u64) -> Result<(), Fault> {
        let short = bytes <= COPIED_BYTES && self.output.len() <= OUTPUT_BYTES_MAX;
        let copied = short && self.segment.is_some();
        if !copied {
            self.flush_segment().await?;
        }
        resp::word(&mut self.output, key.as_bytes());
        resp::length(&mut self.output, bytes);
        let before = self.output.len();
        if copied {
            self.output.resize(before + bytes as usize, 0);
            let (_, to) = self.output.split_at_mut(before);
            if !span.read(at, to) {
                return Err(self.breaks("a place is shorter than its section".into()));
            }
        } else {
            self.segment = Some(Segment {
                span: span.clone(),
                at,
                bytes,
                before,
            });
        }
        self.output.extend_from_slice(b"\r\n");
        Ok(())
    }

    /// Sends the output if it contains a segment.
    pub async fn flush_segment(&mut self) -> Result<(), Fault> {
        match self.segment.take() {
            Some(segment) => self.send_around(&segment).await,
            None => Ok(()),
        }
    }

    pub async fn flush(&mut self) -> Result<(), Fault> {
        self.flush_segment().await?;
        if self.output.is_empty() {
            return Ok(());
        }
        let sent = in_time(self.limit(), self.stream.write(&self.output)).await;
        self.output.clear();
        match sent {
            Ok(()) => Ok(()),
            Err(e) => Err(self.breaks(e.to_string())),
        }
    }

    /// Sends the output with the segment in the middle of it.
    async fn send_around(&mut self, segment: &Segment) -> Result<(), Fault> {
        let output = std::mem::take(&mut self.output);
        let (before, behind) = output.split_at(segment.before);
        let (first, second) = (before.len() as u64, before.len() as u64 + segment.bytes);
        let (mut sent, end) = (0, second + behind.len() as u64);
        while sent < end {
            let inside = sent.clamp(first, second) - first;
            let left = Around {
                before: &before[sent.min(first) as usize..],
                span: &segment.span,
                at: segment.at + inside,
                bytes: segment.bytes - inside,
                behind: &behind[sent.saturating_sub(second) as usize..],
            };
            let moved = in_time(self.limit(), self.stream.write_around(&left)).await;
            sent += self.checked(moved)? as u64;
        }
        self.output = output;
        self.output.clear();
        Ok(())
    }

    /// The next reply, which may be an error.
    pub async fn reply(&mut self) -> Result<Reply, Fault> {
        let reply = self.awaited().await?;
        if let Reply::Error(text) = &reply {
            self.heeds(text);
        }
        Ok(reply)
    }

    /// The next reply to a command that extends an object's life. A user without the right can still read, and does not try again.
    pub async fn renewed(&mut self) -> Result<(), Fault> {
        if let Reply::Error(text) = self.awaited().await?
            && (is_denied(&text) || text.starts_with("READONLY"))
        {
            self.renews = false;
        }
        Ok(())
    }

    /// The next reply to an optional command. A user without the right keeps using this connection.
    pub async fn optional(&mut self) -> Result<Reply, Fault> {
        let reply = self.awaited().await?;
        if let Reply::Error(text) = &reply
            && !is_denied(text)
        {
            self.heeds(text);
        }
        Ok(reply)
    }

    async fn awaited(&mut self) -> Result<Reply, Fault> {
        self.flush().await?;
        if self.asking {
            self.next().await?;
        }
        let reply = self.next().await?;
        self.ended();
        Ok(reply)
    }

    /// Handles errors that affect more than one command.
    fn heeds(&mut self, text: &str) {
        self.outdated |= is_of_the_connection(text);
        if is_of_the_server(text) && self.broken.is_none() {
            self.broken = Some(text.chars().take(200).collect());
        }
    }

    /// The next reply, which must not be an error.
    pub async fn answer(&mut self) -> Result<Reply, Fault> {
        match self.reply().await? {
            Reply::Error(text) => Err(Fault::Refused(text)),
            reply => Ok(reply),
        }
    }

    /// The next reply: bytes for a span, which must have exactly the length `bytes`.
    pub async fn segment(
        &mut self,
        span: &Span,
        mut at: u64,
        bytes: u64,
    ) -> Result<Fetched, Fault> {
        self.flush().await?;
        if self.asking {
            self.next().await?;
        }
        let head = loop {
            match resp::head(self.unread()) {
                Ok(Some((head, used))) => {
                    self.start += used;
                    break head;
                }
                Ok(None) => self.fill().await?,
                Err(e) => return Err(self.misspoke(e)),
            }
        };
        match head {
            Head::Bulk(length) if length == bytes => {}
            // The following bytes are useless and may be many: the connection is not used again.
            Head::Bulk(length) => return Ok(Fetched::Length(length)),
            Head::Whole(Reply::Nil) => {
                self.ended();
                return Ok(Fetched::Absent);
            }
            Head::Whole(Reply::Error(text)) => {
                self.ended();
                self.heeds(&text);
                return Err(Fault::Refused(text));
            }
            Head::Whole(_) | Head::Array(_) => {
                return Err(self.misspoke("expected a bulk string, got another reply"));
            }
        }
        let end = at + bytes;
        let here = self.unread().len().min(bytes as usize);
        if !span.write(at, self.unread().get(..here).unwrap_or_default()) {
            return Err(Fault::Of(
                Cause::Shape,
                "a place is shorter than its section".into(),
            ));
        }
        self.start += here;
        at += here as u64;
        while at < end {
            let read = in_time(self.limit(), self.stream.read_span(span, at, end - at)).await;
            at += self.checked(read)? as u64;
        }
        while self.unread().len() < 2 {
            self.fill().await?;
        }
        if !self.unread().starts_with(b"\r\n") {
            return Err(self.misspoke("a segment does not end at its stated length"));
        }
        self.start += 2;
        self.ended();
        Ok(Fetched::Read)
    }

    async fn next(&mut self) -> Result<Reply, Fault> {
        loop {
            let unread = self.input.get(self.start..).unwrap_or_default();
            match self.reader.read(unread) {
                Ok((reply, used)) => {
                    self.start += used;
                    match reply {
                        Some(reply) => return Ok(reply),
                        None => self.fill().await?,
                    }
                }
                Err(e) => return Err(self.misspoke(e)),
            }
        }
    }

    fn ended(&mut self) {
        self.heard = Instant::now();
        self.pending = self.pending.saturating_sub(1);
    }

    fn unread(&self) -> &[u8] {
        self.input.get(self.start..).unwrap_or_default()
    }

    async fn fill(&mut self) -> Result<(), Fault> {
        self.input.drain(..self.start.min(self.input.len()));
        self.start = 0;
        if self.reader.taken() + self.input.len() > INPUT_BYTES_MAX {
            return Err(self.misspoke("a reply is longer than any expected one"));
        }
        self.input.reserve(READ_BYTES);
        let read = in_time(self.limit(), self.stream.read(&mut self.input)).await;
        self.checked(read)?;
        self.spoken = true;
        Ok(())
    }

    fn checked(&mut self, moved: io::Result<usize>) -> Result<usize, Fault> {
        match moved {
            Ok(0) => Err(self.breaks("the server closed the connection".into())),
            Ok(n) => {
                self.heard = Instant::now();
                Ok(n)
            }
            Err(e) => {
                let fault = self.breaks(e.to_string());
                Err(tls::refusal(&e).unwrap_or(fault))
            }
        }
    }

    /// When the next bytes must have moved.
    fn limit(&self) -> Option<Instant> {
        let silent = self.patience.map(|longest| Instant::now() + longest);
        silent.into_iter().chain(self.deadline).min()
    }

    fn breaks(&mut self, mut why: String) -> Fault {
        let late = self.deadline.is_some_and(|at| Instant::now() >= at);
        if !self.spoken && !self.stream.is_encrypted() && !late {
            why.push_str(" before it sent anything; is this a TLS port (rediss://)?");
        }
        self.broken = Some(why.clone());
        Fault::unreachable(why)
    }

    fn misspoke(&mut self, why: impl ToString) -> Fault {
        self.broken = Some(why.to_string());
        Fault::protocol(format!("{}; is this a Redis server?", why.to_string()))
    }
}

/// Fails when `io` takes longer than until `limit`.
async fn in_time<T>(
    limit: Option<Instant>,
    io: impl Future<Output = io::Result<T>>,
) -> io::Result<T> {
    let Some(limit) = limit else {
        return io.await;
    };
    let silent = |_| {
        let why = "the server does not answer";
        Err(io::Error::new(io::ErrorKind::TimedOut, why))
    };
    timeout_at(limit, io).await.unwrap_or_else(silent)
}

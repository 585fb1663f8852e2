//! The session with the sidecar: one for all remote clients. A connection that ends is replaced; what it held ends with it.

use super::memory::{self, Memory};
use crate::serve::connection::{Connection, Event};
use kvcachepool_engine::sessions::ConnId;
use kvcachepool_memory::arena::Arena;
use kvcachepool_memory::lockfile::HeldLock;
use kvcachepool_protocol::PROTOCOL_VERSION;
use kvcachepool_protocol::frame::{
    FLAG_ERROR, FLAG_FDS, FLAG_PARTIAL, Header, MAX_BODY, Op, frame,
};
use kvcachepool_protocol::message::{
    ErrorBody, ErrorCode, FEATURE_OBJECTS, GrantReply, Hello, HelloReply, Memory as Instruction,
    Role, Sections, decode, encode,
};
use parking_lot::Mutex;
use rustix::fd::OwnedFd;
use serde::Serialize;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::{Semaphore, oneshot, watch};
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

const HELLO_PATIENCE: Duration = Duration::from_secs(30);
const BACKOFF_FIRST: Duration = Duration::from_millis(10);
const BACKOFF_LAST: Duration = Duration::from_secs(2);
const BACKOFF_REFUSED: Duration = Duration::from_secs(30);
/// Requests without a reply, together. Others wait.
const REQUEST_KIB_MAX: usize = 16 << 10;
/// Bytes that the sidecar has not read yet: requests, and messages without a reply. Beyond it the connection ends.
const QUEUE_BYTES_MAX: usize = 64 << 20;

/// A reply of the sidecar, or its error.
pub type Reply = Result<Vec<u8>, ErrorBody>;

/// The connection to the sidecar ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lost;

struct Waiting {
    op: Op,
    reply: oneshot::Sender<Reply>,
}

/// One connection to the sidecar, after HELLO.
pub struct Upstream {
    connection: Arc<Connection>,
    waiting: Mutex<HashMap<u64, Waiting>>,
    tags: Arc<AtomicU64>,
    /// KiB that requests without a reply may still take.
    room: Semaphore,
    ended: watch::Sender<bool>,
    pub memory: Memory,
    pub region: u64,
    pub arena_bytes: u64,
    pub hello: HelloReply,
}

impl Upstream {
    /// Sends a request, and waits for its final reply. Returns the tag, too. Waits while too much is not answered.
    ///
    /// A reply to a GRANT has granted memory, so the caller must not stop waiting.
    pub async fn request<B: Serialize>(&self, op: Op, body: &B) -> Result<(u64, Reply), Lost> {
        let body = encode(body).map_err(|_| Lost)?;
        let kib = u32::try_from(body.len().div_ceil(1 << 10)).unwrap_or(u32::MAX);
        let _room = tokio::select! {
            room = self.room.acquire_many(kib) => room.map_err(|_| Lost)?,
            () = self.ended() => return Err(Lost),
        };
        let tag = self.tags.fetch_add(1, Ordering::Relaxed);
        let (reply, replied) = oneshot::channel();
        self.waiting.lock().insert(tag, Waiting { op, reply });
        if !self.transmit(op, tag, &body) {
            self.waiting.lock().remove(&tag);
            return Err(Lost);
        }
        tokio::select! {
            biased;
            reply = replied => reply.map(|reply| (tag, reply)).map_err(|_| Lost),
            () = self.ended() => Err(Lost),
        }
    }

    /// Sends a one-way message. False: the connection ended, and with it what the message was about.
    pub fn send<B: Serialize>(&self, op: Op, body: &B) -> bool {
        let tag = self.tags.fetch_add(1, Ordering::Relaxed);
        encode(body).is_ok_and(|body| self.transmit(op, tag, &body))
    }

    fn transmit(&self, op: Op, tag: u64, body: &[u8]) -> bool {
        let sent = self
            .connection
            .send(frame(op, 0, tag, body), Vec::new())
            .unwrap_or(false);
        if !sent {
            self.connection.close_now();
        }
        sent
    }

    /// Returns when the connection has ended.
    pub async fn ended(&self) {
        // An error means that the sender, `self`, is gone.
        let _ = self.ended.subscribe().wait_for(|ended| *ended).await;
    }

    /// Ends the connection after a reply that cannot be right: the next HELLO gives everything back.
    pub fn distrust(&self, reason: &str) {
        warn!(
            reason,
            "unexpected reply of the sidecar, reconnecting to it"
        );
        self.connection.close_now();
    }

    /// Reads replies until the connection ends.
    async fn serve(&self) {
        while let Ok(events) = events(&self.connection).await {
            for event in events {
                match event {
                    Event::Frame(header, body, _) => self.replied(header, body),
                    Event::Empty | Event::SurplusFds(_) => {}
                    Event::Ended(_) | Event::Refused(..) | Event::Failed(_) => return,
                }
            }
        }
    }

    fn replied(&self, header: Header, body: Vec<u8>) {
        if header.flags & FLAG_PARTIAL != 0 {
            return;
        }
        let Some(Waiting { op, reply }) = self.waiting.lock().remove(&header.tag) else {
            return;
        };
        let body = match header.flags & FLAG_ERROR {
            0 => Ok(body),
            _ => Err(decode(&body)
                .unwrap_or_else(|e| ErrorBody::later(ErrorCode::Internal, e.to_string()))),
        };
        if let Err(Ok(unread)) = reply.send(body)
            && op == Op::Grant
            && let Ok(GrantReply { refs, region, .. }) = decode(&unread)
        {
            self.send(Op::Abort, &Sections { region, refs });
        }
    }

    /// Ends everything that the connection held. Returns the memory for the next HELLO.
    fn finish(&self) -> Option<Arena> {
        self.connection.close_now();
        self.waiting.lock().clear();
        let arena = self.memory.end();
        self.ended.send_replace(true);
        arena
    }
}

/// Why there is no session now.
#[derive(Debug, thiserror::Error)]
enum NotAttached {
    #[error("{0}")]
    Io(#[from] std::io::Error),
    #[error("the sidecar closed the connection")]
    Closed,
    #[error("the sidecar did not answer HELLO within {} s", HELLO_PATIENCE.as_secs())]
    Silent,
    #[error("the sidecar refused HELLO: {0:?}: {1}")]
    Refused(ErrorCode, String),
    #[error("{0}")]
    Unusable(String),
}

/// What outlives a connection: who this process is to the sidecar, its proof of life, and the memory that it maps.
struct Identity {
    instance: String,
    incarnation: [u8; 16],
    number: u64,
    tags: Arc<AtomicU64>,
    pidfd: Option<Arc<OwnedFd>>,
    lock: Option<HeldLock>,
    arena: Option<Arena>,
}

impl Identity {
    fn new() -> Self {
        let incarnation = std::array::from_fn(|_| fastrand::u8(..));
        let pidfd = rustix::process::pidfd_open(
            rustix::process::getpid(),
            rustix::process::PidfdFlags::empty(),
        );
        Self {
            instance: format!("serve-{:012x}", fastrand::u64(..1 << 48)),
            incarnation,
            number: 0,
            tags: Arc::new(AtomicU64::new(1)),
            // Without one, the sidecar takes the kernel's pidfd of the socket's peer.
            pidfd: pidfd.ok().map(Arc::new),
            lock: None,
            arena: None,
        }
    }

    /// Connects, and sends HELLO until there is memory. `waits` hears why there is none yet.
    async fn attach(
        &mut self,
        path: &PathBuf,
        waits: &watch::Sender<State>,
    ) -> Result<Upstream, NotAttached> {
        let stream = UnixStream::connect(path).await?;
        let connection = Arc::new(Connection::new(
            ConnId(0),
            stream,
            MAX_BODY,
            QUEUE_BYTES_MAX,
        ));
        loop {
            let (hello, fds) = self.hello(&connection).await?;
            if !hello.features.iter().any(|name| name == FEATURE_OBJECTS) {
                let said = format!("the sidecar {} serves no objects", hello.sidecar_version);
                return Err(NotAttached::Unusable(said));
            }
            let mut fds = hello.fds.iter().map(String::as_str).zip(fds);
            match hello.memory {
                Instruction::LockFirst => {
                    let fd = fds.find(|(name, _)| *name == "lock").map(|(_, fd)| fd);
                    let (Some(fd), Some(number)) = (fd, hello.lock) else {
                        let said = "HELLO was answered without the descriptor of the lock file";
                        return Err(NotAttached::Unusable(said.into()));
                    };
                    // The old descriptor first: closing it later would end the new lock.
                    self.lock = None;
                    let held = HeldLock::take(fd, number).map_err(std::io::Error::from)?;
                    self.lock = Some(held);
                    continue;
                }
                Instruction::Unmap => self.arena = None,
                Instruction::None => {}
                Instruction::Held => {}
                Instruction::Sent => {
                    let (mut arena, mut table) = (None, None);
                    for (name, fd) in fds {
                        match name {
                            "arena" => arena = Some(fd),
                            "table" => table = Some(fd),
                            _ => {}
                        }
                    }
                    let (Some(arena), Some(table)) = (arena, table) else {
                        let said = "HELLO was answered without the descriptors of the memory";
                        return Err(NotAttached::Unusable(said.into()));
                    };
                    self.arena = None;
                    let mapped = memory::map(hello.region, arena, table);
                    self.arena = Some(mapped.map_err(NotAttached::Unusable)?);
                }
            }
            let has_memory = matches!(hello.memory, Instruction::Held | Instruction::Sent);
            if has_memory && let (Some(arena), Some(lock)) = (self.arena.take(), &self.lock) {
                return Ok(Upstream {
                    connection,
                    waiting: Mutex::default(),
                    tags: self.tags.clone(),
                    room: Semaphore::new(REQUEST_KIB_MAX),
                    ended: watch::Sender::new(false),
                    region: arena.geometry.region,
                    arena_bytes: arena.capacity_bytes(),
                    memory: Memory::new(arena, lock.number),
                    hello,
                });
            }
            waits.send_replace(State::Waiting(format!(
                "the sidecar has no memory yet: {}",
                hello.reason
            )));
            sleep(Duration::from_millis(hello.retry_ms.max(10))).await;
        }
    }

    /// One HELLO and its reply, with the reply's descriptors.
    async fn hello(
        &mut self,
        connection: &Connection,
    ) -> Result<(HelloReply, Vec<OwnedFd>), NotAttached> {
        self.number += 1;
        let mut named: Vec<(&str, Arc<OwnedFd>)> = Vec::new();
        named.extend(self.pidfd.clone().map(|fd| ("pidfd", fd)));
        if let Some(arena) = &self.arena {
            let [bytes, table] = memory::descriptors(arena);
            named.extend([("arena", bytes), ("table", table)]);
        }
        let hello = Hello {
            version: PROTOCOL_VERSION,
            role: Role::Opaque,
            engine: "remote".into(),
            engine_version: env!("CARGO_PKG_VERSION").into(),
            instance: self.instance.clone(),
            incarnation: self.incarnation.to_vec(),
            number: self.number,
            rank: 0,
            fds: named.iter().map(|(name, _)| (*name).to_owned()).collect(),
            lock: self.lock.as_ref().map(|lock| lock.number),
            region: self.arena.as_ref().map(|arena| arena.geometry.region),
            grants: Vec::new(),
            requests: Vec::new(),
            watches_shrinks: true,
            off: None,
        };
        let body = encode(&hello).map_err(|e| NotAttached::Unusable(e.to_string()))?;
        let fds: Vec<_> = named.into_iter().map(|(_, fd)| fd).collect();
        let flags = if fds.is_empty() { 0 } else { FLAG_FDS };
        let tag = self.tags.fetch_add(1, Ordering::Relaxed);
        let sent = connection.send(frame(Op::Hello, flags, tag, &body), fds);
        if !sent.unwrap_or(false) {
            return Err(NotAttached::Closed);
        }
        let replied = timeout(HELLO_PATIENCE, reply_to(connection, tag)).await;
        let (header, body, fds) = replied.map_err(|_| NotAttached::Silent)??;
        let unusable =
            |e: kvcachepool_protocol::message::BadBody| NotAttached::Unusable(e.to_string());
        if header.flags & FLAG_ERROR != 0 {
            let error: ErrorBody = decode(&body).map_err(unusable)?;
            if error.code == ErrorCode::LockNotHeld {
                // The sidecar takes this process for another one, which holds nothing.
                *self = Self::new();
            }
            return Err(NotAttached::Refused(error.code, error.message));
        }
        Ok((decode(&body).map_err(unusable)?, fds))
    }
}

/// The frame with this tag.
async fn reply_to(
    connection: &Connection,
    tag: u64,
) -> Result<(Header, Vec<u8>, Vec<OwnedFd>), NotAttached> {
    loop {
        for event in events(connection)
            .await
            .map_err(|Lost| NotAttached::Closed)?
        {
            match event {
                Event::Frame(header, body, fds) if header.tag == tag => {
                    return Ok((header, body, fds));
                }
                Event::Frame(header, body, _) if header.flags & FLAG_ERROR != 0 => {
                    // Unsolicited: the sidecar has too many connections, for example.
                    let error: ErrorBody =
                        decode(&body).map_err(|e| NotAttached::Unusable(e.to_string()))?;
                    return Err(NotAttached::Refused(error.code, error.message));
                }
                // Descriptors of other frames are closed.
                Event::Frame(..) | Event::Empty | Event::SurplusFds(_) => {}
                Event::Refused(_, _, e) => return Err(NotAttached::Unusable(e.to_string())),
                Event::Ended(_) | Event::Failed(_) => return Err(NotAttached::Closed),
            }
        }
    }
}

/// Writes what waits, and returns what arrived. Dropping the future loses nothing.
async fn events(connection: &Connection) -> Result<Vec<Event>, Lost> {
    loop {
        if connection.is_closed() {
            return Err(Lost);
        }
        let backlog = connection.has_backlog();
        tokio::select! {
            ready = connection.stream.readable() => {
                ready.map_err(|_| Lost)?;
                let mut events = Vec::new();
                // `WouldBlock` clears the readiness.
                let _ = connection.stream.try_io(Interest::READABLE, || {
                    let empty = connection.drain(|event| {
                        events.push(event);
                        true
                    });
                    match empty {
                        true => Err(std::io::ErrorKind::WouldBlock.into()),
                        false => Ok(()),
                    }
                });
                if !events.is_empty() {
                    return Ok(events);
                }
            }
            ready = connection.stream.writable(), if backlog => {
                if ready.is_err() || connection.flush().is_err() {
                    return Err(Lost);
                }
            }
            () = connection.wake.notified() => {}
        }
    }
}

/// Whether the sidecar can be used.
#[derive(Clone)]
pub enum State {
    /// Not now, for this reason.
    Waiting(String),
    Attached(Arc<Upstream>),
}

impl State {
    pub fn attached(&self) -> Result<Arc<Upstream>, String> {
        match self {
            Self::Attached(upstream) => Ok(upstream.clone()),
            Self::Waiting(reason) => Err(reason.clone()),
        }
    }
}

/// Keeps a connection to the sidecar, without end.
pub async fn keep(path: PathBuf, state: watch::Sender<State>) {
    let mut identity = Identity::new();
    let mut backoff = BACKOFF_FIRST;
    loop {
        let mut longest = BACKOFF_LAST;
        match identity.attach(&path, &state).await {
            Ok(upstream) => {
                backoff = BACKOFF_FIRST;
                let upstream = Arc::new(upstream);
                info!(region = upstream.region, "attached to the sidecar");
                state.send_replace(State::Attached(upstream.clone()));
                upstream.serve().await;
                state.send_replace(State::Waiting("the sidecar is gone".into()));
                identity.arena = upstream.finish();
                warn!("lost the connection to the sidecar");
            }
            Err(e) => {
                if let NotAttached::Refused(..) = e {
                    longest = BACKOFF_REFUSED;
                }
                let said = format!("no sidecar at {}: {e}", path.display());
                if backoff >= BACKOFF_LAST {
                    warn!(error = %e, socket = %path.display(), "cannot attach to the sidecar, retrying");
                }
                state.send_replace(State::Waiting(said));
            }
        }
        sleep(backoff.mul_f64(fastrand::f64() / 2.0 + 0.5)).await;
        backoff = (backoff * 2).min(longest);
    }
}

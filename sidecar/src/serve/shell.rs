//! The lock around the core, and the execution of the core's outputs.

use super::connection::{Connection, Event, SendError};
use super::daemon::Daemon;
use super::descriptors::Descriptors;
use super::host::{Live, Machine};
use super::tiers::Tiers;
use super::watch;
use super::windows::Windows;
use crate::admin::{self, metrics::Metrics};
use kvcachepool_engine::sessions::{
    ConnId, Core, FdFacts, FdKind, Input, Now, Output, ProcessId, WindowId,
};
use kvcachepool_engine::{Completion, Effect};
use kvcachepool_memory::facts;
use kvcachepool_memory::lockfile::{LockFile, LockFileError};
use kvcachepool_memory::verify::{Job, Pool};
use kvcachepool_protocol::config::Config;
use kvcachepool_protocol::frame::{FLAG_ERROR, FLAG_REPLY, FrameError, Header, Op, frame};
use kvcachepool_protocol::message::{ErrorBody, ErrorCode, encode};
use kvcachepool_protocol::table::ROW_BYTES;
use parking_lot::Mutex;
use rustix::fd::{AsFd, OwnedFd};
use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use tracing::{debug, info, warn};

/// Messages from threads of the shell.
#[derive(Debug)]
pub enum Posted {
    /// The arena's first rows are populated.
    Populated { region: u64, rows: u32 },
    /// The kernel refused to populate further pages.
    PopulationFailed {
        at_bytes: u64,
        /// The kernel's error.
        reason: String,
    },
    /// An effect has ended, or a tier went up or down.
    Completed {
        /// Region of the arena that the effect was for; `None` when the completion concerns the tier itself.
        region: Option<u64>,
        completion: Completion,
    },
}

struct Peer {
    connection: Arc<Connection>,
    /// SO_PEERPIDFD, kept while the connection lives.
    pidfd: Option<FdFacts>,
}

struct Inner {
    core: Core<Machine>,
    peers: HashMap<ConnId, Peer>,
    out: Vec<Output>,
    next_conn: u64,
}

/// Everything that connections, timers and threads of the engine process share.
pub struct Shell {
    inner: Mutex<Inner>,
    me: Weak<Shell>,
    pub descriptors: Arc<Descriptors>,
    pub live: Arc<Live>,
    pub metrics: Arc<Metrics>,
    pub(super) daemon: Arc<Daemon>,
    lock: Arc<LockFile>,
    lock_fd: Arc<OwnedFd>,
    digests: Pool,
    pub(super) windows: Windows,
    /// Lower tiers, if any are configured.
    pub tiers: Option<Arc<Tiers>>,
    started: Instant,
}

/// The parts of a shell.
pub struct Parts {
    pub descriptors: Arc<Descriptors>,
    pub live: Arc<Live>,
    pub metrics: Arc<Metrics>,
    pub daemon: Arc<Daemon>,
    pub lock: Arc<LockFile>,
    pub digests: Pool,
    /// Lower tiers, if any are configured.
    pub tiers: Option<Arc<Tiers>>,
    pub started: Instant,
}

impl Shell {
    /// Builds the core with `make` and carries out its first outputs.
    pub fn new(
        parts: Parts,
        make: impl FnOnce(Now, &mut Vec<Output>) -> Core<Machine>,
    ) -> std::io::Result<Arc<Self>> {
        let lock_fd = Arc::new(parts.lock.fd().try_clone_to_owned()?);
        let started = parts.started;
        let mut out = Vec::new();
        let core = make(now(started), &mut out);
        let shell = Arc::new_cyclic(|me| Self {
            inner: Mutex::new(Inner {
                core,
                peers: HashMap::new(),
                out,
                next_conn: 1,
            }),
            me: me.clone(),
            descriptors: parts.descriptors,
            live: parts.live,
            metrics: parts.metrics,
            daemon: parts.daemon,
            lock: parts.lock,
            lock_fd,
            digests: parts.digests,
            windows: Windows::default(),
            tiers: parts.tiers,
            started,
        });
        shell.carry_out(&mut shell.inner.lock());
        Ok(shell)
    }

    /// The current time on the core's clock.
    pub fn now(&self) -> Now {
        now(self.started)
    }

    /// Runs `f` on the core and carries out the resulting outputs before it returns.
    pub fn with_core<R>(
        &self,
        ask: impl FnOnce(&mut Core<Machine>, Now, &mut Vec<Output>) -> R,
    ) -> R {
        let mut inner = self.inner.lock();
        let Inner { core, out, .. } = &mut *inner;
        let answer = ask(core, now(self.started), out);
        self.carry_out(&mut inner);
        answer
    }

    /// Passes one input to the core and carries out the resulting outputs.
    pub fn drive(&self, input: Input<'_>) {
        self.with_core(|core, now, out| core.handle(now, input, out));
    }

    pub fn config(&self) -> Config {
        self.daemon.config().effective
    }

    /// Queued digests: urgent, background.
    pub fn digests_waiting(&self) -> (usize, usize) {
        self.digests.waiting()
    }

    /// Ends this boot on request: it does not count as a boot without health.
    pub fn end_on_request(&self, before: u32) -> Result<(), LockFileError> {
        self.lock.ended_on_request(before)
    }

    pub fn connections(&self) -> Vec<Arc<Connection>> {
        let inner = self.inner.lock();
        inner.peers.values().map(|p| p.connection.clone()).collect()
    }

    pub fn connection_count(&self) -> usize {
        self.inner.lock().peers.len()
    }

    /// The id of a new connection.
    pub fn next_conn(&self) -> ConnId {
        let mut inner = self.inner.lock();
        inner.next_conn += 1;
        ConnId(inner.next_conn)
    }

    /// Registers an accepted connection.
    pub fn connected(&self, connection: Arc<Connection>) {
        let conn = connection.id;
        let pidfd =
            facts::peer_pidfd(connection.stream.as_fd()).map(|fd| self.descriptors.admit(fd));
        let (pid, uid, gid) =
            facts::peer_credentials(connection.stream.as_fd()).unwrap_or_default();
        debug!(conn = conn.0, pid, uid, gid, "connected");
        self.metrics.add("connections_accepted_total", &[], 1);
        self.inner
            .lock()
            .peers
            .insert(conn, Peer { connection, pidfd });
        self.drive(Input::Connected {
            conn,
            peer: pidfd,
            pid: u32::try_from(pid).unwrap_or(0),
        });
    }

    /// Reads and handles what is available on a connection. False: the connection used its share and more may be available.
    pub fn read(&self, connection: &Arc<Connection>) -> bool {
        connection.drain(|event| match event {
            Event::Frame(header, body, fds) => {
                self.frame(connection, header, &body, fds);
                true
            }
            Event::SurplusFds(count) => {
                self.metrics
                    .add("descriptors_surplus_total", &[], count as u64);
                warn!(
                    conn = connection.id.0,
                    count, "closed descriptors that no frame names"
                );
                true
            }
            Event::Empty => true,
            Event::Ended(torn) => {
                if torn {
                    self.named_end(connection, "TornFrame");
                }
                self.lost(connection.id);
                false
            }
            Event::Refused(opcode, tag, error) => {
                self.refuse(connection, opcode, tag, error);
                false
            }
            Event::Failed(error) => {
                debug!(conn = connection.id.0, %error, "failed to read from the connection");
                self.lost(connection.id);
                false
            }
        })
    }

    fn frame(&self, connection: &Arc<Connection>, header: Header, body: &[u8], fds: Vec<OwnedFd>) {
        let op = Op::try_from(header.opcode);
        let name = op.map_or("unknown".into(), |op| format!("{op:?}").to_lowercase());
        self.metrics.add("frames_total", &[&name], 1);
        if op == Ok(Op::Hello) {
            connection.greeted();
        }
        let facts: Vec<FdFacts> = fds
            .into_iter()
            .map(|fd| self.descriptors.admit(fd))
            .collect();
        {
            let mut inner = self.inner.lock();
            // Closed by a frame of another connection a moment ago: the rest is dropped.
            if !connection.is_closed() {
                let Inner { core, out, .. } = &mut *inner;
                core.handle(
                    now(self.started),
                    Input::Frame {
                        conn: connection.id,
                        header,
                        body,
                        fds: &facts,
                    },
                    out,
                );
                // A descriptor or mapping of refused memory is charged to the pod for as long as it exists.
                core.host_mut().handed_back = None;
                self.carry_out(&mut inner);
            }
        }
        self.descriptors.close(&facts);
    }

    /// Replies with an error to bytes that are not a valid frame, and closes the connection.
    fn refuse(&self, connection: &Arc<Connection>, opcode: u8, tag: u64, error: FrameError) {
        let (code, name) = match error {
            FrameError::WrongVersion(_) => (ErrorCode::WrongVersion, "WrongVersion"),
            _ => (ErrorCode::LimitReached, "OversizedFrame"),
        };
        self.named_end(connection, name);
        let op = Op::try_from(opcode).unwrap_or(Op::Hello);
        self.farewell(connection, (op, tag), code, &error.to_string());
        self.lost(connection.id);
    }

    /// Sends an error, as the reply to a request or with tag 0 unsolicited, then closes.
    pub fn farewell(
        &self,
        connection: &Connection,
        (op, tag): (Op, u64),
        code: ErrorCode,
        message: &str,
    ) {
        let body = ErrorBody {
            code,
            message: message.to_owned(),
            retryable: code == ErrorCode::LimitReached && tag == 0,
        };
        if let Ok(body) = encode(&body) {
            // A peer that does not read the error is closed too.
            let _ = connection.send(frame(op, FLAG_REPLY | FLAG_ERROR, tag, &body), Vec::new());
        }
        connection.close_when_sent();
    }

    /// Counts and logs the end of a connection, with its reason.
    pub fn named_end(&self, connection: &Connection, reason: &str) {
        self.metrics.add("connections_closed_total", &[reason], 1);
        info!(conn = connection.id.0, reason, "connection closed");
    }

    pub fn died(&self, process: ProcessId) {
        self.drive(Input::ProcessDied { process });
        self.windows.died(process);
    }

    /// Ends a connection for a reason outside the core, for example a read error.
    pub fn lost(&self, conn: ConnId) {
        let mut inner = self.inner.lock();
        if self.forget(&mut inner, conn) {
            let Inner { core, out, .. } = &mut *inner;
            core.handle(now(self.started), Input::Disconnected { conn }, out);
            self.carry_out(&mut inner);
        }
    }

    fn forget(&self, inner: &mut Inner, conn: ConnId) -> bool {
        let Some(peer) = inner.peers.remove(&conn) else {
            return false;
        };
        self.descriptors.close(&peer.pidfd);
        self.windows.close(conn);
        peer.connection.close_when_sent();
        true
    }

    /// Sends a frame that the core did not build. False: the connection is gone and the peer does not get the frame.
    pub fn send(&self, conn: ConnId, bytes: Vec<u8>, fds: Vec<Arc<OwnedFd>>) -> bool {
        let connection = match self.inner.lock().peers.get(&conn) {
            Some(peer) => peer.connection.clone(),
            None => return false,
        };
        match connection.send(bytes, fds) {
            Ok(sent) => sent,
            Err(e) => {
                if e == SendError::SlowReader {
                    self.named_end(&connection, "SlowReader");
                }
                connection.close_now();
                self.lost(conn);
                false
            }
        }
    }

    /// Handles a message from a thread of the shell.
    pub fn posted(&self, posted: Posted) {
        let live = |region| {
            self.live
                .get()
                .is_some_and(|arena| arena.geometry.region == region)
        };
        match posted {
            Posted::Populated { region, rows } if live(region) => {
                self.drive(Input::Populated { rows });
            }
            Posted::Completed { region, completion } if region.is_none_or(live) => {
                self.drive(Input::Completed(completion));
            }
            Posted::Populated { .. } | Posted::Completed { .. } => {}
            Posted::PopulationFailed { at_bytes, reason } => {
                self.metrics.add("population_failures_total", &[], 1);
                let message = format!(
                    "the kernel refused pages at offset {at_bytes} of the arena ({reason}); the arena does not grow further"
                );
                self.daemon.degrade("PopulationFailed", message);
            }
        }
    }

    fn carry_out(&self, inner: &mut Inner) {
        while !inner.out.is_empty() {
            for output in std::mem::take(&mut inner.out) {
                self.one(inner, output);
            }
        }
    }

    fn one(&self, inner: &mut Inner, output: Output) {
        match output {
            Output::Send {
                conn,
                op,
                flags,
                tag,
                body,
                fds,
            } => {
                let Some(peer) = inner.peers.get(&conn) else {
                    return;
                };
                let fds = fds
                    .into_iter()
                    .filter_map(|kind| self.outgoing(kind))
                    .collect();
                if let Err(e) = peer.connection.send(frame(op, flags, tag, &body), fds) {
                    if e == SendError::SlowReader {
                        self.named_end(&peer.connection, "SlowReader");
                    }
                    peer.connection.close_now();
                    self.forget(inner, conn);
                    let Inner { core, out, .. } = inner;
                    core.handle(now(self.started), Input::Disconnected { conn }, out);
                }
            }
            Output::Close { conn, reason } => {
                if let Some(peer) = inner.peers.get(&conn) {
                    self.named_end(&peer.connection, reason);
                }
                self.forget(inner, conn);
            }
            Output::WatchProcess { process, fd } => match self.descriptors.take(fd) {
                Some(pidfd) => watch::process(self.me.clone(), process, pidfd),
                None => warn!(process = process.0, "missing pidfd of a process to watch"),
            },
            Output::Effect(Effect::Digest(work)) => {
                let Some(arena) = self.live.get() else {
                    return;
                };
                self.digests.push(Job {
                    bytes: arena.bytes,
                    region: arena.geometry.region,
                    offset: u64::from(work.slot) * ROW_BYTES,
                    work,
                });
            }
            Output::OpenWindow {
                conn,
                process,
                tag,
                device_uuid,
                bytes,
            } => {
                let window = WindowId { conn, tag };
                let live = self.live.get();
                self.windows
                    .open(&self.me, live, window, process, device_uuid, bytes);
            }
            Output::ConfirmWindow { conn, tag } => {
                self.windows.confirm(&self.me, WindowId { conn, tag });
            }
            Output::Admin { conn, tag, request } => {
                // `answer` takes the lock that is held here, so it runs as a task.
                if let (Some(shell), daemon) = (self.me.upgrade(), self.daemon.clone()) {
                    tokio::spawn(async move {
                        admin::socket::answer(&daemon, &shell, conn, tag, &request);
                    });
                }
            }
            Output::Effect(effect) => {
                if let Some(tiers) = &self.tiers {
                    tiers.carry_out(effect);
                }
            }
            Output::Log { event, detail } => {
                self.metrics.add("events_total", &[event], 1);
                info!(event, detail, "core event");
            }
        }
    }

    fn outgoing(&self, kind: FdKind) -> Option<Arc<OwnedFd>> {
        match kind {
            FdKind::Lock => Some(self.lock_fd.clone()),
            FdKind::Arena => self.live.get().map(|arena| arena.arena_fd),
            FdKind::Table => self.live.get().map(|arena| arena.table_fd),
        }
    }
}

fn now(started: Instant) -> Now {
    Now {
        mono_ms: started.elapsed().as_millis() as u64,
        unix_s: SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_secs()),
    }
}

//! The lock around the core, and what its outputs make happen.

use super::connection::{Connection, Event, SendError};
use super::daemon::Daemon;
use super::descriptors::Descriptors;
use super::host::{Live, Machine};
use super::tiers::Tiers;
use super::watch;
use super::windows::Windows;
use crate::admin::{self, metrics::Metrics};
use kvcachepool_engine::Report;
use kvcachepool_engine::sessions::{
    ConnId, Core, FdFacts, FdKind, Input, Now, Output, ProcessId, WindowId,
};
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

/// What threads of the shell report.
#[derive(Debug)]
pub enum Posted {
    /// The arena's first rows are populated.
    Populated {
        /// Region of the arena.
        region: u64,
        /// Rows.
        rows: u32,
    },
    /// The kernel gave no more pages.
    PopulationFailed {
        /// Offset in the arena.
        at_bytes: u64,
        /// What the kernel said.
        reason: String,
    },
    /// A digest was taken.
    Digest {
        /// Region of the arena.
        region: u64,
        /// First row of the slot.
        slot: u32,
        /// As asked for.
        generation: u32,
        /// As asked for.
        check: u64,
        /// xxh3-128, `None` when the range is none.
        digest: Option<[u8; 16]>,
    },
    /// What became of a tier below memory, or of an order for one.
    Tier {
        /// Region of the arena that the order was for; none where it is about the tier.
        region: Option<u64>,
        /// What.
        report: Report,
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
    /// Descriptors that came in.
    pub descriptors: Arc<Descriptors>,
    /// The live memory.
    pub live: Arc<Live>,
    /// Counters and gauges of the shell.
    pub metrics: Arc<Metrics>,
    pub(super) daemon: Arc<Daemon>,
    lock: Arc<LockFile>,
    lock_fd: Arc<OwnedFd>,
    digests: Pool,
    pub(super) windows: Windows,
    /// Tiers below memory, where there are any.
    pub tiers: Option<Arc<Tiers>>,
    started: Instant,
}

/// What a shell is made of.
pub struct Parts {
    /// Descriptors that came in.
    pub descriptors: Arc<Descriptors>,
    /// The live memory.
    pub live: Arc<Live>,
    /// Counters and gauges of the shell.
    pub metrics: Arc<Metrics>,
    /// What the whole process knows.
    pub daemon: Arc<Daemon>,
    /// Lock file.
    pub lock: Arc<LockFile>,
    /// Digest threads.
    pub digests: Pool,
    /// Tiers below memory, where there are any.
    pub tiers: Option<Arc<Tiers>>,
    /// Start of the process.
    pub started: Instant,
}

impl Shell {
    /// Takes the core that `make` makes and carries out its first outputs.
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

    /// Time as the core counts it.
    pub fn now(&self) -> Now {
        now(self.started)
    }

    /// Looks at or asks the core something; what it wants done is done before this returns.
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

    /// Gives the core one input and carries out what it wants.
    pub fn drive(&self, input: Input<'_>) {
        self.with_core(|core, now, out| core.handle(now, input, out));
    }

    /// The config in effect.
    pub fn config(&self) -> Config {
        self.daemon.config().effective
    }

    /// Digests that wait for a thread: urgent, background.
    pub fn digests_waiting(&self) -> (usize, usize) {
        self.digests.waiting()
    }

    /// This boot ends because it was asked to: it does not count as one without health.
    pub fn end_on_request(&self, before: u32) -> Result<(), LockFileError> {
        self.lock.ended_on_request(before)
    }

    /// Open connections.
    pub fn connections(&self) -> Vec<Arc<Connection>> {
        let inner = self.inner.lock();
        inner.peers.values().map(|p| p.connection.clone()).collect()
    }

    /// Number of open connections.
    pub fn connection_count(&self) -> usize {
        self.inner.lock().peers.len()
    }

    /// A number for a new connection.
    pub fn next_conn(&self) -> ConnId {
        let mut inner = self.inner.lock();
        inner.next_conn += 1;
        ConnId(inner.next_conn)
    }

    /// Takes in an accepted connection.
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

    /// Reads all that waits on a connection and handles it. False = it took its share and more may wait.
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
                    count, "descriptors came with no frame that names them; closed"
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
                debug!(conn = connection.id.0, %error, "reading failed");
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
            // Closed by another party's frame a moment ago: what is left of it is dropped.
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
                // Memory that was refused is charged to the pod for as long as a descriptor or mapping of it lives.
                core.host_mut().handed_back = None;
                self.carry_out(&mut inner);
            }
        }
        self.descriptors.close(&facts);
    }

    /// Answers what cannot be a frame by name and ends the connection.
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

    /// Sends an error, as the answer to a question or with tag 0 to none, then closes.
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
            // A peer that does not read its own refusal is closed all the same.
            let _ = connection.send(frame(op, FLAG_REPLY | FLAG_ERROR, tag, &body), Vec::new());
        }
        connection.close_when_sent();
    }

    /// Counts and logs the end of a connection that has a name.
    pub fn named_end(&self, connection: &Connection, reason: &str) {
        self.metrics.add("connections_closed_total", &[reason], 1);
        info!(conn = connection.id.0, reason, "connection closed");
    }

    /// A watched process has ended.
    pub fn died(&self, process: ProcessId) {
        self.drive(Input::ProcessDied { process });
        self.windows.died(process);
    }

    /// The connection is over for a reason that the core did not give.
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

    /// Sends a frame that the core did not make; a connection that is gone by now needs none. False: the peer never sees it.
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

    /// What a thread of the shell reported.
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
            Posted::Digest {
                region,
                slot,
                generation,
                check,
                digest,
            } if live(region) => self.drive(Input::DigestDone {
                slot,
                generation,
                check,
                digest,
            }),
            Posted::Tier { region, report } if region.is_none_or(live) => {
                self.drive(Input::Tier(report));
            }
            Posted::Populated { .. } | Posted::Digest { .. } | Posted::Tier { .. } => {}
            Posted::PopulationFailed { at_bytes, reason } => {
                self.metrics.add("population_failures_total", &[], 1);
                let message = format!(
                    "the kernel gave no page at {at_bytes} bytes of the arena ({reason}); it stays as large as it is"
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
                None => warn!(process = process.0, "a pidfd to watch is not there"),
            },
            Output::Digest {
                slot,
                generation,
                check,
                length,
                urgent,
            } => {
                let Some(arena) = self.live.get() else {
                    return;
                };
                self.digests.push(Job {
                    bytes: arena.bytes,
                    region: arena.geometry.region,
                    slot,
                    generation,
                    check,
                    offset: u64::from(slot) * ROW_BYTES,
                    length,
                    urgent,
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
                // A status takes the lock that is held here.
                if let (Some(shell), daemon) = (self.me.upgrade(), self.daemon.clone()) {
                    tokio::spawn(async move {
                        admin::socket::answer(&daemon, &shell, conn, tag, &request);
                    });
                }
            }
            Output::Tier(order) => {
                if let Some(tiers) = &self.tiers {
                    tiers.carry_out(order);
                }
            }
            Output::Log { event, detail } => {
                self.metrics.add("events_total", &[event], 1);
                info!(event, detail);
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

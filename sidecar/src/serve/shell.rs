//! The lock around the driver, and the devices that it acts on.

use super::connection::{Connection, Event, SendError};
use super::daemon::Daemon;
use super::descriptors::Descriptors;
use super::host::{Live, Machine};
use super::tiers::Tiers;
use super::watch;
use super::windows::Windows;
use crate::admin::{self, metrics::Metrics};
use kvcachepool_engine::driver::{self, Broken, Devices, Driver};
use kvcachepool_engine::sessions::{
    ConnId, Core, FdFacts, FdId, FdKind, Frame, Input, Now, Output, ProcessId, WindowId, WindowJob,
};
use kvcachepool_engine::{Completion, Effect};
use kvcachepool_memory::facts;
use kvcachepool_memory::lockfile::{LockFile, LockFileError};
use kvcachepool_memory::verify::{Job, Pool};
use kvcachepool_protocol::config::Config;
use kvcachepool_protocol::frame::{FLAG_ERROR, FLAG_REPLY, FrameError, Header, Op, frame};
use kvcachepool_protocol::message::{Admin, ErrorBody, ErrorCode, encode};
use kvcachepool_protocol::table::ROW_BYTES;
use parking_lot::{Mutex, MutexGuard};
use rustix::fd::{AsFd, OwnedFd};
use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use tracing::{debug, info, warn};

/// Messages from threads of the shell.
#[derive(Debug)]
pub enum Posted {
    /// The arena's first rows are populated.
    Populated { rows: u32 },
    /// The kernel refused to populate further pages.
    PopulationFailed {
        at_bytes: u64,
        /// The kernel's error.
        reason: String,
    },
    /// An effect has ended, or a tier went up or down.
    Completed(Completion),
}

struct Inner {
    driver: Driver<Machine>,
    connections: HashMap<ConnId, Arc<Connection>>,
    next_conn: u64,
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

/// Everything that connections, timers and threads of the engine process share.
pub struct Shell {
    inner: Mutex<Inner>,
    me: Weak<Shell>,
    parts: Parts,
    lock_fd: Arc<OwnedFd>,
    pub(super) windows: Windows,
}

impl std::ops::Deref for Shell {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.parts
    }
}

impl Shell {
    /// Builds the driver with `make`, and carries out its first outputs.
    pub fn new(
        parts: Parts,
        make: impl FnOnce(Now) -> Driver<Machine>,
    ) -> std::io::Result<Arc<Self>> {
        let lock_fd = Arc::new(parts.lock.fd().try_clone_to_owned()?);
        let driver = make(now(parts.started));
        let shell = Arc::new_cyclic(|me| Self {
            inner: Mutex::new(Inner {
                driver,
                connections: HashMap::new(),
                next_conn: 1,
            }),
            me: me.clone(),
            parts,
            lock_fd,
            windows: Windows::default(),
        });
        driver::carry_out(&mut shell.devices());
        Ok(shell)
    }

    /// Takes the lock.
    pub(super) fn devices(&self) -> Locked<'_> {
        Locked {
            shell: self,
            inner: self.inner.lock(),
        }
    }

    /// Runs `ask` on the core and carries out the resulting outputs before it returns.
    pub fn with_core<R>(
        &self,
        ask: impl FnOnce(&mut Core<Machine>, Now, &mut Vec<Output>) -> R,
    ) -> R {
        driver::with_core(&mut self.devices(), ask)
    }

    /// Passes one input to the core and carries out the resulting outputs.
    pub fn drive(&self, input: Input<'_>) {
        driver::handle(&mut self.devices(), input);
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
        self.inner.lock().connections.values().cloned().collect()
    }

    pub fn connection_count(&self) -> usize {
        self.inner.lock().driver.connections()
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
        let mut devices = self.devices();
        devices.inner.connections.insert(conn, connection);
        driver::connected(&mut devices, conn, pidfd, u32::try_from(pid).unwrap_or(0));
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
                    count, "closed descriptors that a connector passed without naming them"
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
        driver::frame(&mut self.devices(), connection.id, header, body, &facts);
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
            retryable: code == ErrorCode::LimitReached && tag == 0,
            ..ErrorBody::new(code, message)
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

    /// Ends a connection for a reason outside the core, for example a read error.
    pub fn lost(&self, conn: ConnId) {
        driver::lost(&mut self.devices(), conn);
    }

    /// Handles a message from a thread of the shell.
    pub fn posted(&self, posted: Posted) {
        match posted {
            Posted::Populated { rows } => self.drive(Input::Populated { rows }),
            Posted::Completed(completion) => self.drive(Input::Completed(completion)),
            Posted::PopulationFailed { at_bytes, reason } => {
                self.metrics.add("population_failures_total", &[], 1);
                let message = format!(
                    "the kernel refused pages at offset {at_bytes} of the arena ({reason}); the arena does not grow further: give the pod or the node more memory"
                );
                self.daemon.degrade("PopulationFailed", message);
            }
        }
    }
}

/// The shell's devices, with the lock held.
pub(super) struct Locked<'a> {
    shell: &'a Shell,
    inner: MutexGuard<'a, Inner>,
}

impl Devices for Locked<'_> {
    type Host = Machine;
    type Fd = Arc<OwnedFd>;

    fn driver(&mut self) -> &mut Driver<Machine> {
        &mut self.inner.driver
    }

    fn now(&self) -> Now {
        now(self.shell.started)
    }

    fn send(&mut self, conn: ConnId, sent: Frame, fds: Vec<Self::Fd>) -> Result<bool, Broken> {
        let Some(connection) = self.inner.connections.get(&conn) else {
            return Ok(false);
        };
        let bytes = frame(sent.op, sent.flags, sent.tag, &sent.body);
        connection.send(bytes, fds).map_err(|e| {
            if e == SendError::SlowReader {
                self.shell.named_end(connection, "SlowReader");
            }
            connection.close_now();
            Broken
        })
    }

    fn close(&mut self, conn: ConnId, reason: Option<&'static str>) {
        if let Some(connection) = self.inner.connections.remove(&conn) {
            if let Some(reason) = reason {
                self.shell.named_end(&connection, reason);
            }
            connection.close_when_sent();
        }
    }

    fn descriptor(&self, kind: FdKind) -> Option<Self::Fd> {
        match kind {
            FdKind::Lock => Some(self.shell.lock_fd.clone()),
            FdKind::Arena => self.shell.live.get().map(|arena| arena.arena_fd),
            FdKind::Table => self.shell.live.get().map(|arena| arena.table_fd),
        }
    }

    fn close_descriptors(&mut self, fds: &[FdFacts]) {
        self.shell.descriptors.close(fds);
    }

    fn watch(&mut self, process: ProcessId, fd: FdId) {
        match self.shell.descriptors.take(fd) {
            Some(pidfd) => watch::process(self.shell.me.clone(), process, pidfd),
            None => warn!(
                process = process.0,
                "cannot watch a vLLM process for its end: its pidfd is missing"
            ),
        }
    }

    fn start(&mut self, effect: Effect) {
        match effect {
            Effect::Digest(work) => {
                if let Some(arena) = self.shell.live.get() {
                    self.shell.digests.push(Job {
                        bytes: arena.bytes,
                        offset: u64::from(work.slot) * ROW_BYTES,
                        work,
                    });
                }
            }
            effect => {
                if let Some(tiers) = &self.shell.tiers {
                    tiers.carry_out(effect);
                }
            }
        }
    }

    fn open_window(&mut self, job: WindowJob) -> Result<(), String> {
        let live = self.shell.live.get();
        let opened = self.shell.windows.open(&self.shell.me, live, job);
        opened.map_err(|none| none.to_string())
    }

    fn confirm_window(&mut self, window: WindowId) -> bool {
        self.shell.windows.confirm(window)
    }

    fn close_window(&mut self, conn: ConnId) {
        self.shell.windows.close(conn);
    }

    fn unmapped(&mut self, process: ProcessId) {
        self.shell.windows.unmapped(process);
    }

    fn admin(&mut self, conn: ConnId, tag: u64, request: Admin) {
        // `answer` takes the lock that is held here, so it runs as a task.
        if let (Some(shell), daemon) = (self.shell.me.upgrade(), self.shell.daemon.clone()) {
            tokio::spawn(async move {
                if let Some(answer) = admin::socket::answer(&daemon, &shell, tag, &request) {
                    driver::send(&mut shell.devices(), conn, answer, Vec::new());
                }
            });
        }
    }

    fn log(&mut self, event: &'static str, detail: String) {
        self.shell.metrics.add("events_total", &[event], 1);
        info!(event, detail, "sidecar event");
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

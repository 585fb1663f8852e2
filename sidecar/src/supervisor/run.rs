//! The supervisor's loop.

use super::backoff::Backoff;
use super::child::{EXIT_RESTART, describe, spawn};
use super::heartbeat::Heartbeat;
use super::listen;
use super::messages::{Boot, Claim, FromEngine, ToEngine};
use super::signals::{self, Signal};
use super::standby::Standby;
use crate::config_file::{self, Files};
use kvcachepool_memory::link::{self, LinkError};
use kvcachepool_memory::lockfile::{LockFile, LockFileError};
use kvcachepool_protocol::config::Config;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::{self, Pid, WaitOptions};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{Duration, Instant};
use tracing::{error, info, warn};

/// An engine that lived this long did not fail at its start: the next restart is immediate.
const STABLE: Duration = Duration::from_secs(60);
/// After SIGTERM, an engine that neither ended nor reported a flush for this long is killed.
const STOP_DEADLINE: Duration = Duration::from_secs(5);
/// How long a dying sidecar may still hold the lock or the socket.
const TAKEOVER_PATIENCE: Duration = Duration::from_secs(1);

/// Errors that end the supervisor. Everything else is a state that it reports.
#[derive(Debug, thiserror::Error)]
pub enum SupervisorError {
    #[error(
        "SocketTaken: another running sidecar holds {0}; stop it, or set another `socket` in the config"
    )]
    SocketTaken(PathBuf),
    /// An elementary system call failed.
    #[error("the supervisor cannot start: {step} failed: {source}")]
    Kernel {
        step: &'static str,
        /// The kernel's error.
        source: Errno,
    },
}

struct Engine {
    pid: Pid,
    link: OwnedFd,
    since: Instant,
    /// The engine answers on the admin port.
    serving: bool,
    heartbeat: Heartbeat,
    /// Why the supervisor ended it.
    ended_for: Option<String>,
}

struct Held {
    region: u64,
    arena: OwnedFd,
    table: OwnedFd,
}

struct Supervisor {
    config: Files,
    claim: Claim,
    /// Keeps the byte of `claim` locked.
    lock: Option<LockFile>,
    claims: Backoff,
    started: Instant,
    engine: Option<Engine>,
    starts: Backoff,
    held: Option<Held>,
    admin: Option<TcpListener>,
    admin_address: Option<SocketAddr>,
    admin_error: String,
    listens: Backoff,
    standby: Standby,
    /// Deadline after SIGTERM: an engine that still runs then is killed.
    stopping: Option<Instant>,
}

/// Runs until SIGTERM or SIGINT. Returns when the engine has ended afterwards.
pub fn run(config: &Files) -> Result<(), SupervisorError> {
    let kernel = |step| move |source| SupervisorError::Kernel { step, source };
    let signals = signals::open().map_err(kernel("signalfd"))?;
    let mut this = Supervisor::new(config, Instant::now());
    this.claim_at_start()?;
    loop {
        this.claim_if_due();
        this.listen_if_due();
        this.start_if_due();
        this.wait(signals.as_fd());
        this.hear_engine(Instant::now());
        while let Some(signal) = signals::next(&signals) {
            match signal {
                Signal::Terminate => this.terminate(),
                Signal::Reload => this.tell_engine(process::Signal::HUP),
                Signal::Child => {}
            }
        }
        this.reap();
        if this.engine.as_ref().is_none_or(|e| !e.serving)
            && let Some(listener) = &this.admin
        {
            this.standby.answer(listener);
        }
        if let Some(kill_at) = this.stopping {
            if this.engine.is_none() {
                return Ok(());
            }
            if Instant::now() >= kill_at {
                this.tell_engine(process::Signal::KILL);
                warn!("killing the engine process: it did not end in time after SIGTERM");
                this.stopping = Some(Instant::now() + STOP_DEADLINE);
            }
        }
    }
}

impl Supervisor {
    fn new(config: &Files, now: Instant) -> Self {
        Self {
            config: config.clone(),
            claim: Claim::NoConfig,
            lock: None,
            claims: Backoff::new(now),
            started: now,
            engine: None,
            starts: Backoff::new(now),
            held: None,
            admin: None,
            admin_address: None,
            admin_error: String::new(),
            listens: Backoff::new(now),
            standby: Standby::default(),
            stopping: None,
        }
    }

    /// The only point at which a taken socket ends this process, so that its starter sees the reason. A folder that cannot be written
    /// is a state that the engine reports.
    fn claim_at_start(&mut self) -> Result<(), SupervisorError> {
        let deadline = Instant::now() + TAKEOVER_PATIENCE;
        loop {
            self.claim();
            match &self.claim {
                Claim::SocketTaken(socket) if Instant::now() >= deadline => {
                    return Err(SupervisorError::SocketTaken(socket.clone()));
                }
                Claim::SocketTaken(_) => std::thread::sleep(Duration::from_millis(20)),
                _ => return Ok(()),
            }
        }
    }

    /// Locks the sidecar's byte of the lock file beside the socket in the current config file. After a success, lock and socket stay the
    /// same for all engines until the container ends.
    fn claim(&mut self) {
        let Some(socket) = config_file::socket(self.config.pod.as_deref()) else {
            self.claim = Claim::NoConfig;
            return;
        };
        self.claim = match try_claim(&socket) {
            Ok(Some(lock)) => {
                self.lock = Some(lock);
                Claim::Held(socket)
            }
            Ok(None) => Claim::SocketTaken(socket),
            Err(e) => Claim::LockFileUnusable(e.to_string()),
        };
    }

    fn claims_again(&self) -> bool {
        self.lock.is_none() && self.stopping.is_none()
    }

    /// Claims the socket. When the claim changes, the running engine is ended, and a new one starts with the current claim.
    fn claim_if_due(&mut self) {
        let now = Instant::now();
        if !self.claims_again() || now < self.claims.due() {
            return;
        }
        let before = self.claim.clone();
        self.claim();
        self.claims.failed(now);
        if self.claim != before {
            info!(claim = ?self.claim, "the sidecar's claim on its socket changed");
            self.end_engine("the sidecar's claim on its socket changed".into());
        }
    }

    fn start_if_due(&mut self) {
        if self.engine.is_some() || self.stopping.is_some() || Instant::now() < self.starts.due() {
            return;
        }
        self.follow_admin_address();
        match self.start() {
            Ok(engine) => self.engine = Some(engine),
            Err(e) => {
                error!(error = %e, "cannot start the engine process; retrying");
                self.standby.last_exit = e.to_string();
                self.starts.failed(Instant::now());
            }
        }
    }

    fn start(&mut self) -> std::io::Result<Engine> {
        let (ours, theirs) = link::pair()?;
        let pid = spawn(&self.config, theirs)?;
        self.standby.starts += 1;
        let boot = Boot {
            claim: self.claim.clone(),
            starts: self.standby.starts,
            last_exit: self.standby.last_exit.clone(),
            container_uptime_s: self.started.elapsed().as_secs(),
            admin: self.admin.is_some(),
            admin_error: self.admin_error.clone(),
            region: self.held.as_ref().map(|h| h.region),
        };
        let mut fds: Vec<BorrowedFd<'_>> = Vec::new();
        fds.extend(self.admin.iter().map(AsFd::as_fd));
        if let Some(held) = &self.held {
            fds.extend([held.arena.as_fd(), held.table.as_fd()]);
        }
        send_boot(pid, &ours, &boot, &fds)?;
        info!(
            pid = pid.as_raw_nonzero().get(),
            starts = self.standby.starts,
            region = boot.region,
            "engine process started"
        );
        let now = Instant::now();
        Ok(Engine {
            pid,
            link: ours,
            since: now,
            serving: false,
            heartbeat: Heartbeat::new(now),
            ended_for: None,
        })
    }

    /// A new engine uses the current config: a changed admin address replaces the previous one. A file that cannot be read, for example
    /// while it is swapped, changes nothing.
    fn follow_admin_address(&mut self) {
        let address = config_file::admin_listen(self.config.pod.as_deref())
            .or(self.admin_address)
            .unwrap_or(Config::default().admin.listen);
        if self.admin_address != Some(address) {
            self.admin = None;
            self.admin_address = Some(address);
            self.listens = Backoff::new(Instant::now());
            self.listen_if_due();
        }
    }

    /// Opens the admin port while there is none, and passes it to the running engine.
    fn listen_if_due(&mut self) {
        let now = Instant::now();
        let (None, Some(address)) = (&self.admin, self.admin_address) else {
            return;
        };
        if self.stopping.is_some() || now < self.listens.due() {
            return;
        }
        match listen::open(address) {
            Ok(listener) => {
                info!(%address, "admin port open");
                self.admin_error.clear();
                let sent = self
                    .engine
                    .as_ref()
                    .map(|engine| link::send(&engine.link, &ToEngine::Admin, &[listener.as_fd()]));
                self.admin = Some(listener);
                if let Some(Err(e)) = sent {
                    self.end_engine(format!(
                        "cannot pass the admin port to the engine process: {e}"
                    ));
                }
            }
            Err(e) => {
                let error = format!("cannot listen on {address} (admin.listen): {e}");
                if error != self.admin_error {
                    error!(error, "cannot open the admin port; retrying");
                }
                self.admin_error = error;
                self.listens.failed(now);
            }
        }
    }

    fn wait(&self, signals: BorrowedFd<'_>) {
        let now = Instant::now();
        let mut until = None;
        let mut sooner = |at: Instant| {
            let wait = at.saturating_duration_since(now);
            until = Some(until.map_or(wait, |other: Duration| other.min(wait)));
        };
        match &self.engine {
            Some(engine) => sooner(engine.heartbeat.next_look()),
            None if self.stopping.is_none() => sooner(self.starts.due()),
            None => {}
        }
        if self.claims_again() {
            sooner(self.claims.due());
        }
        if self.admin.is_none() && self.stopping.is_none() {
            sooner(self.listens.due());
        }
        if let Some(kill_at) = self.stopping {
            sooner(kill_at);
        }
        let mut set = vec![PollFd::from_borrowed_fd(signals, PollFlags::IN)];
        if let Some(engine) = &self.engine {
            set.push(PollFd::new(&engine.link, PollFlags::IN));
        }
        if self.engine.as_ref().is_none_or(|e| !e.serving)
            && let Some(listener) = &self.admin
        {
            set.push(PollFd::new(listener, PollFlags::IN));
        }
        let timeout = until.and_then(|wait| Timespec::try_from(wait).ok());
        // A spurious wakeup is harmless; an error other than EINTR cannot happen to a set of open descriptors.
        let _ = poll(&mut set, timeout.as_ref());
    }

    /// Reads the engine's messages, and ends an engine that has been silent for too long.
    fn hear_engine(&mut self, now: Instant) {
        let Some(engine) = &mut self.engine else {
            return;
        };
        engine.heartbeat.look(now);
        if self.take_messages() {
            // Its end is seen by reaping. Until then the supervisor answers on the admin port, and the dead link must not spin the loop.
            self.reap_after_hangup();
            return;
        }
        if let Some(engine) = &mut self.engine
            && let Some(silence) = engine.heartbeat.too_long()
        {
            engine.heartbeat = Heartbeat::new(now);
            let silence = silence.as_secs();
            self.end_engine(format!("EngineSilent: no heartbeat for {silence} s"));
        }
    }

    /// Reads all messages of the engine. True: it closed the link.
    fn take_messages(&mut self) -> bool {
        let Some(engine) = &mut self.engine else {
            return false;
        };
        loop {
            match link::receive::<FromEngine>(&engine.link, false) {
                Ok(None) => return false,
                Ok(Some((FromEngine::Serving, _))) => engine.serving = true,
                Ok(Some((FromEngine::Alive, _))) => engine.heartbeat.heard(),
                Ok(Some((FromEngine::Reads { rows, chunks }, _))) => {
                    engine.heartbeat.reads(rows, chunks);
                }
                Ok(Some((FromEngine::LetGo, _))) => self.held = None,
                Ok(Some((FromEngine::Flushing, _))) => {
                    let later = Instant::now() + STOP_DEADLINE;
                    self.stopping = self.stopping.map(|kill_at| kill_at.max(later));
                }
                Ok(Some((FromEngine::Keep { region }, fds))) => {
                    match <[OwnedFd; 2]>::try_from(fds) {
                        Ok([arena, table]) => {
                            self.held = Some(Held {
                                region,
                                arena,
                                table,
                            });
                        }
                        Err(fds) => warn!(
                            got = fds.len(),
                            "the engine process passed its memory without its 2 descriptors; a restart may lose the chunks"
                        ),
                    }
                }
                Err(LinkError::Ended) => {
                    engine.serving = false;
                    return true;
                }
                Err(e) => {
                    warn!(error = %e, "ignored an invalid message of the engine process");
                    return false;
                }
            }
        }
    }

    /// Kills the running engine, if any. Its end is seen by reaping; until then the supervisor answers on the admin port. The log line
    /// comes last, because its reader may be slow.
    fn end_engine(&mut self, reason: String) {
        self.tell_engine(process::Signal::KILL);
        if let Some(engine) = &mut self.engine {
            engine.serving = false;
            warn!(reason, "killing the engine process");
            engine.ended_for = Some(reason);
        }
    }

    /// The engine closed its link: it is dying or dead. Its exit follows at once; an engine that lingers is killed.
    fn reap_after_hangup(&mut self) {
        let deadline = Instant::now() + Duration::from_millis(200);
        while self.engine.is_some() && Instant::now() < deadline {
            self.reap();
            if self.engine.is_some() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        self.tell_engine(process::Signal::KILL);
    }

    fn reap(&mut self) {
        while let Ok(Some((pid, status))) = process::wait(WaitOptions::NOHANG) {
            if self.engine.as_ref().is_some_and(|e| e.pid == pid) {
                self.ended(ExitStatus::from_raw(status.as_raw()));
            }
        }
    }

    fn ended(&mut self, status: ExitStatus) {
        // Its last messages count: the next engine gets the memory that they name.
        self.take_messages();
        let Some(engine) = self.engine.take() else {
            return;
        };
        let lived = engine.since.elapsed();
        self.standby.last_exit = engine.ended_for.unwrap_or_else(|| describe(status));
        if self.stopping.is_some() {
            info!(reason = %self.standby.last_exit, "engine process ended");
            return;
        }
        if lived >= STABLE {
            self.starts.reset();
        }
        let now = Instant::now();
        match status.code() {
            Some(EXIT_RESTART) => self.starts.at_once(now),
            _ => self.starts.failed(now),
        }
        warn!(
            reason = %self.standby.last_exit,
            lived_ms = lived.as_millis() as u64,
            memory_kept = self.held.is_some(),
            restart_in_ms = self.starts.due().saturating_duration_since(now).as_millis() as u64,
            "engine process ended"
        );
    }

    fn terminate(&mut self) {
        if self.stopping.is_none() {
            info!("received SIGTERM or SIGINT; stopping");
            self.stopping = Some(Instant::now() + STOP_DEADLINE);
        }
        self.tell_engine(process::Signal::TERM);
    }

    fn tell_engine(&self, signal: process::Signal) {
        if let Some(engine) = &self.engine {
            // It may have ended a moment ago; then reaping reports it.
            let _ = process::kill_process(engine.pid, signal);
        }
    }
}

/// Sends the boot message. An engine that does not get it would wait for ever, so it is killed; its end is seen by reaping.
fn send_boot(
    engine: Pid,
    link: &OwnedFd,
    boot: &Boot,
    fds: &[BorrowedFd<'_>],
) -> std::io::Result<()> {
    link::send(link, boot, fds).map_err(|e| {
        // It may have ended already, so that the message could not be sent.
        let _ = process::kill_process(engine, process::Signal::KILL);
        std::io::Error::other(format!(
            "cannot send the boot message to the engine process: {e}"
        ))
    })
}

/// The lock file with the sidecar's byte locked; `None` while another sidecar runs.
fn try_claim(socket: &Path) -> Result<Option<LockFile>, LockFileError> {
    let lock = LockFile::open(&config_file::lock_path(socket))?;
    if !lock.claim_sidecar()? {
        return Ok(None);
    }
    // An engine whose supervisor was killed is being killed too; another listener is foreign and must not be replaced.
    Ok((!somebody_listens(socket)).then_some(lock))
}

/// Whether a socket at this path accepts connections. Never blocks: a listener whose backlog is full counts too.
pub fn somebody_listens(path: &Path) -> bool {
    let connected = SocketAddrUnix::new(path).and_then(|address| {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &address)
    });
    matches!(connected, Ok(()) | Err(Errno::AGAIN))
}

#[cfg(test)]
#[path = "run_tests.rs"]
mod tests;

//! The supervisor's loop.

use super::child::{EXIT_RESTART, describe, spawn};
use super::link::{self, Boot, FromEngine};
use super::signals::{self, Signal};
use super::standby::Standby;
use crate::config_file;
use crate::shm::lockfile::{LockFile, LockFileError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::process::{self, Pid, WaitOptions};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{Duration, Instant};
use tracing::{error, info, warn};

/// An engine that lived this long did not die of its start: the next restart is immediate again.
const STABLE: Duration = Duration::from_secs(60);
/// First wait after the second failure in a row; doubles.
const BACKOFF_FIRST: Duration = Duration::from_millis(10);
/// Longest wait between two starts.
const BACKOFF_MAX: Duration = Duration::from_secs(5);
/// After SIGTERM an engine that has not ended is killed.
const STOP_DEADLINE: Duration = Duration::from_secs(5);
/// A dying sidecar may hold lock or socket for this long.
const TAKEOVER_PATIENCE: Duration = Duration::from_secs(1);

/// Why the supervisor does not run. All else is a state that it reports.
#[derive(Debug, thiserror::Error)]
pub enum SupervisorError {
    /// Another sidecar lives on this socket.
    #[error(
        "SocketTaken: a live sidecar holds {0}; stop it, or set another `socket` in the config"
    )]
    SocketTaken(PathBuf),
    /// The kernel refused something elementary.
    #[error("supervisor: {step}: {source}")]
    Kernel {
        /// What was tried.
        step: &'static str,
        /// What the kernel said.
        source: Errno,
    },
}

struct Engine {
    pid: Pid,
    link: OwnedFd,
    since: Instant,
    serving: bool,
}

struct Held {
    region: u64,
    arena: OwnedFd,
    table: OwnedFd,
}

struct Supervisor {
    config: Option<PathBuf>,
    lock: Option<LockFile>,
    started: Instant,
    engine: Option<Engine>,
    start_at: Instant,
    failures: u32,
    held: Option<Held>,
    admin: Option<TcpListener>,
    admin_address: Option<SocketAddr>,
    admin_error: String,
    standby: Standby,
    /// Told to end; an engine that lives on at this moment is killed.
    stopping: Option<Instant>,
}

/// Runs until SIGTERM or SIGINT. Returns when the engine has ended after it.
pub fn run(config: Option<&Path>) -> Result<(), SupervisorError> {
    let kernel = |step| move |source| SupervisorError::Kernel { step, source };
    let signals = signals::open().map_err(kernel("signalfd"))?;
    let now = Instant::now();
    let mut this = Supervisor {
        config: config.map(Path::to_owned),
        lock: None,
        started: now,
        engine: None,
        start_at: now,
        failures: 0,
        held: None,
        admin: None,
        admin_address: None,
        admin_error: String::new(),
        standby: Standby::default(),
        stopping: None,
    };
    this.claim()?;
    loop {
        this.start_if_due();
        this.wait(signals.as_fd());
        this.hear_engine();
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
                warn!("the engine did not end in time and is killed");
                this.tell_engine(process::Signal::KILL);
                this.stopping = Some(Instant::now() + STOP_DEADLINE);
            }
        }
    }
}

impl Supervisor {
    /// Takes the sidecar's byte of the lock file. A folder that cannot be written is no reason to die: the engine reports it.
    fn claim(&mut self) -> Result<(), SupervisorError> {
        let (socket, _) = config_file::addresses(self.config.as_deref());
        let deadline = Instant::now() + TAKEOVER_PATIENCE;
        loop {
            match try_claim(&socket) {
                Ok(Some(lock)) => {
                    self.lock = Some(lock);
                    return Ok(());
                }
                Ok(None) if Instant::now() >= deadline => {
                    return Err(SupervisorError::SocketTaken(socket));
                }
                Ok(None) => std::thread::sleep(Duration::from_millis(20)),
                Err(e) => {
                    error!(error = %e, "no lock file, the engine will report it");
                    return Ok(());
                }
            }
        }
    }

    fn start_if_due(&mut self) {
        if self.engine.is_some() || self.stopping.is_some() || Instant::now() < self.start_at {
            return;
        }
        if self.lock.is_none() && self.claim().is_err() {
            error!("another sidecar took the socket while this one had no lock file");
        }
        self.listen();
        match self.start() {
            Ok(engine) => self.engine = Some(engine),
            Err(e) => {
                error!(error = %e, "the engine cannot be started");
                self.standby.last_exit = e.to_string();
                self.back_off();
            }
        }
    }

    fn start(&mut self) -> std::io::Result<Engine> {
        let (ours, theirs) = link::pair()?;
        let pid = spawn(self.config.as_deref(), theirs)?;
        self.standby.starts += 1;
        let boot = Boot {
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
        // A failure shows as the engine's end.
        if let Err(e) = link::send(&ours, &boot, &fds) {
            warn!(error = %e, "the engine got no boot message");
        }
        info!(
            pid = pid.as_raw_nonzero().get(),
            starts = self.standby.starts,
            region = boot.region,
            "engine started"
        );
        Ok(Engine {
            pid,
            link: ours,
            since: Instant::now(),
            serving: false,
        })
    }

    /// Opens the admin port, or another one after the config changed.
    fn listen(&mut self) {
        let (_, address) = config_file::addresses(self.config.as_deref());
        if self.admin.is_some() && self.admin_address == Some(address) {
            return;
        }
        self.admin = None;
        let opened = TcpListener::bind(address).and_then(|listener| {
            listener.set_nonblocking(true)?;
            Ok(listener)
        });
        match opened {
            Ok(listener) => {
                self.admin = Some(listener);
                self.admin_address = Some(address);
                self.admin_error.clear();
            }
            Err(e) => {
                self.admin_error = format!("admin.listen {address}: {e}");
                error!(error = %self.admin_error, "no admin port");
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
        if self.engine.is_none() && self.stopping.is_none() {
            sooner(self.start_at);
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
        // Woken for nothing is harmless; an error other than EINTR cannot happen to a set of open descriptors.
        let _ = poll(&mut set, timeout.as_ref());
    }

    fn hear_engine(&mut self) {
        let Some(engine) = &mut self.engine else {
            return;
        };
        loop {
            match link::receive::<FromEngine>(&engine.link, false) {
                Ok(None) => return,
                Ok(Some((FromEngine::Serving, _))) => engine.serving = true,
                Ok(Some((FromEngine::LetGo, _))) => self.held = None,
                Ok(Some((FromEngine::Keep { region }, fds))) => {
                    match <[OwnedFd; 2]>::try_from(fds) {
                        Ok([arena, table]) => {
                            self.held = Some(Held {
                                region,
                                arena,
                                table,
                            });
                        }
                        Err(fds) => warn!(got = fds.len(), "memory to keep came without its files"),
                    }
                }
                Err(link::LinkError::Ended) => {
                    // Its end is seen by reaping. Until then the admin port is ours again, and the dead link must not spin the loop.
                    engine.serving = false;
                    self.reap_after_hangup();
                    return;
                }
                Err(e) => {
                    warn!(error = %e, "unreadable message of the engine");
                    return;
                }
            }
        }
    }

    /// The engine closed its link: it is dying, or already dead. Its exit follows at once; one that lingers is killed.
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
        let lived = self
            .engine
            .take()
            .map_or(Duration::ZERO, |e| e.since.elapsed());
        self.standby.last_exit = describe(status);
        if self.stopping.is_some() {
            info!(how = %self.standby.last_exit, "engine ended");
            return;
        }
        if status.code() == Some(EXIT_RESTART) || lived >= STABLE {
            self.failures = 0;
        }
        self.back_off();
        warn!(
            how = %self.standby.last_exit,
            lived_ms = lived.as_millis() as u64,
            memory_kept = self.held.is_some(),
            restart_in_ms = self.start_at.saturating_duration_since(Instant::now()).as_millis() as u64,
            "engine ended"
        );
    }

    /// The first failure restarts at once, later ones wait longer each.
    fn back_off(&mut self) {
        let wait = match self.failures {
            0 => Duration::ZERO,
            n => BACKOFF_FIRST
                .saturating_mul(1u32 << (n - 1).min(16))
                .min(BACKOFF_MAX),
        };
        self.failures = self.failures.saturating_add(1);
        self.start_at = Instant::now() + wait;
    }

    fn terminate(&mut self) {
        if self.stopping.is_none() {
            info!("told to end");
            self.stopping = Some(Instant::now() + STOP_DEADLINE);
        }
        self.tell_engine(process::Signal::TERM);
    }

    fn tell_engine(&self, signal: process::Signal) {
        if let Some(engine) = &self.engine {
            // It may have ended a moment ago; then reaping tells.
            let _ = process::kill_process(engine.pid, signal);
        }
    }
}

/// The lock file with our byte locked; `None` while another sidecar lives.
fn try_claim(socket: &Path) -> Result<Option<LockFile>, LockFileError> {
    let lock = LockFile::open(&config_file::lock_path(socket))?;
    if !lock.claim_sidecar()? {
        return Ok(None);
    }
    // An engine whose supervisor was killed is being killed too; something else that listens there is not ours to replace.
    Ok(UnixStream::connect(socket).is_err().then_some(lock))
}

//! The life of the engine process, from start to end.

use super::boot::{Handover, Link};
use super::daemon::{Daemon, VERSION};
use super::descriptors::Descriptors;
use super::host::{Live, Machine};
use super::shell::{Parts, Posted, Shell};
use super::tiers::Tiers;
use super::{exit, listener, reload, watch};
use crate::config_file::{self, Files, Loaded};
use crate::supervisor::child::EXIT_RESTART;
use crate::supervisor::messages::Claim;
use crate::{admin, log};
use kvcachepool_engine::Completion;
use kvcachepool_engine::config::Config as CoreConfig;
use kvcachepool_engine::driver::{Driver, EarlierMemory, HEALTHY_AFTER_MS};
use kvcachepool_engine::sessions::{Input, Start};
use kvcachepool_memory::arena::Arena;
use kvcachepool_memory::lockfile::LockFile;
use kvcachepool_memory::populate::Population;
use kvcachepool_memory::verify::{Pace, Pool};
use kvcachepool_protocol::env_reference;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;
use tracing::{error, info, warn};

/// Interval of the heartbeat to the supervisor.
const BEAT: Duration = Duration::from_secs(1);
/// After SIGTERM, wait this long for the notice that the last vLLM ended.
const NOTICED: Duration = Duration::from_millis(100);
/// After SIGTERM without an attached vLLM, wait this long for digests.
const DRAIN: Duration = Duration::from_secs(1);
/// Retry interval after a failure with an external cause.
const RETRY: Duration = Duration::from_secs(1);

/// Errors that prevent the engine from running and from reporting a state.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A user called the hidden subcommand.
    #[error("only `kvcachepool-sidecar run` starts the engine process: {0}")]
    NoSupervisor(String),
    #[error("the engine process cannot run: {0}")]
    Io(#[from] std::io::Error),
}

/// Runs until SIGTERM (returns 0) or until a restart is needed (returns [`EXIT_RESTART`]).
pub fn run(config_files: &Files) -> Result<i32, EngineError> {
    let started = Instant::now();
    let loaded = config_files.load();
    let config = loaded
        .as_ref()
        .map(|l| l.config.clone())
        .unwrap_or_default();
    log::start(&config.log);
    die_of_panics();
    let link = Arc::new(Link::of_stdin()?);
    let Handover { boot, admin, arena } = link
        .handover()
        .map_err(|e| EngineError::NoSupervisor(e.to_string()))?;
    let daemon = Arc::new(Daemon::new(config_files.clone(), config, boot, started));
    if let Some(missing) = missing_environment() {
        daemon.degrade("EnvMissing", missing);
    }
    match admin {
        Some(listener) => serve_admin(&daemon, &link, listener)?,
        None => await_admin(daemon.clone(), link.clone())?,
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let code = runtime.block_on(async {
        tokio::spawn(beat(daemon.clone(), link.clone()));
        let mut term = signal(SignalKind::terminate())?;
        let mut int = signal(SignalKind::interrupt())?;
        let hangup = signal(SignalKind::hangup())?;
        tokio::select! {
            code = serve(&daemon, loaded, link.clone(), arena, hangup) => code,
            _ = term.recv() => drain(&daemon, &link).await,
            _ = int.recv() => drain(&daemon, &link).await,
        }
    })?;
    exit::now(code)
}

/// Variables of `sidecar.env` that the kubelet could not resolve when it created this container.
fn missing_environment() -> Option<String> {
    let list = std::env::var(env_reference::VARIABLE).ok()?;
    let missing: Vec<String> = env_reference::parse(&list)
        .filter(|reference| std::env::var_os(reference.variable).is_none())
        .map(|r| {
            format!(
                "{}: {} {} has no key {}",
                r.variable, r.kind, r.object, r.key
            )
        })
        .collect();
    let text = missing.join("; ");
    (!missing.is_empty()).then(|| {
        format!("{text}. Create the missing objects and delete the pod: the environment is set when a container is created")
    })
}

fn serve_admin(daemon: &Arc<Daemon>, link: &Link, listener: TcpListener) -> std::io::Result<()> {
    admin::http::start(daemon.clone(), listener)?;
    link.serving();
    Ok(())
}

/// Waits for the admin port when the supervisor could not open it before the start.
fn await_admin(daemon: Arc<Daemon>, link: Arc<Link>) -> std::io::Result<()> {
    daemon.degrade("NoAdminPort", daemon.boot.admin_error.clone());
    std::thread::Builder::new()
        .name("await-admin".into())
        .spawn(move || {
            let served = link
                .admin()
                .map_err(|e| e.to_string())
                .and_then(|listener| {
                    serve_admin(&daemon, &link, listener).map_err(|e| e.to_string())
                });
            match served {
                Ok(()) => daemon.recovered("NoAdminPort"),
                Err(e) => daemon.degrade("NoAdminPort", e),
            }
        })?;
    Ok(())
}

/// Sends a heartbeat to the supervisor once a second, after taking the lock that all work takes. So a stuck lock holder stops the
/// heartbeat, and so does a blocked runtime thread.
async fn beat(daemon: Arc<Daemon>, link: Arc<Link>) {
    let mut every = tokio::time::interval(BEAT);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        every.tick().await;
        if let Some(shell) = daemon.shell.get() {
            shell.with_core(|_, _, _| ());
        }
        link.alive();
    }
}

/// A panic on any thread ends the process: the supervisor restarts it and keeps the memory. A half-dead engine would be worse.
fn die_of_panics() {
    std::panic::set_hook(Box::new(|info| {
        error!(panic = %info, "the engine process panicked");
        std::process::abort();
    }));
}

async fn serve(
    daemon: &Arc<Daemon>,
    loaded: Result<Loaded, config_file::ConfigFileError>,
    link: Arc<Link>,
    arena: Option<Arena>,
    hangup: Signal,
) -> std::io::Result<i32> {
    let loaded = match loaded {
        Ok(loaded) => loaded,
        Err(e) => {
            daemon.degrade(e.code(), e.to_string());
            daemon.change_config(|state| state.error = e.to_string());
            reload::usable(daemon).await;
            return Ok(EXIT_RESTART);
        }
    };
    let Some(socket) = claimed_socket(daemon) else {
        // The supervisor retries, and starts an engine with the new claim.
        return std::future::pending().await;
    };
    let mut config = loaded.config.clone();
    config.socket = socket;
    let waiting = config.changes(&loaded.config).restart;
    reload::in_effect(daemon, config.clone(), waiting);
    info!(version = VERSION, config = %effective_line(&config), "engine process starting");
    reload::unknown_keys(daemon, &loaded);
    reload::pool_file(daemon, &loaded);
    let lock = Arc::new(lock_file(daemon, &config_file::lock_path(&config.socket)).await);
    let before = count_boot(daemon, &lock);
    // This is the only place that sets it.
    let _ = daemon.unhealthy_boots.set(before);
    let earlier = EarlierMemory::after(before);
    let arena = arena.filter(|_| earlier != EarlierMemory::Dropped);
    if daemon.boot.region.is_some() && arena.is_none() {
        error!(
            boots = before,
            "dropping the memory of earlier engine processes: it is unusable, or too many of them failed in a row"
        );
        return let_go(&link, &lock, before);
    }

    let (post, mut posts) = mpsc::unbounded_channel();
    let descriptors = Arc::new(Descriptors::default());
    let live = Arc::new(Live::default());
    let mut machine = Machine {
        lock: lock.clone(),
        descriptors: descriptors.clone(),
        live: live.clone(),
        link,
        memory: config.memory.clone(),
        extras_bytes: config.extras_bytes(),
        daemon: daemon.clone(),
        post: post.clone(),
        handed_back: None,
        takes_back: earlier != EarlierMemory::Dropped,
        population: Population::default(),
    };
    let found = arena.map(|arena| machine.install(arena));
    let pace = Pace {
        threads: config.memory.verify_threads as usize,
        background_bytes_per_s: config.memory.verify_bytes_per_second.0,
    };
    let tiers = Tiers::start(&config, daemon.boot_token, live.clone(), post.clone())?;
    let digests = Pool::start(pace, move |job, digest| {
        // A closed channel means that the process ends.
        let _ = post.send(Posted::Completed(Completion::Digest {
            slot: job.work.slot,
            generation: job.work.generation,
            check: job.work.check,
            digest,
        }));
    })?;
    let parts = Parts {
        descriptors,
        live,
        metrics: daemon.metrics.clone(),
        daemon: daemon.clone(),
        lock: lock.clone(),
        digests,
        tiers,
        started: daemon.started,
    };
    let start = Start {
        boot: daemon.boot_token,
        version: VERSION.into(),
        found,
        cold: earlier != EarlierMemory::Warm,
    };
    let core = CoreConfig::from(&config);
    let shell = Shell::new(parts, |now| Driver::new(core, machine, start, now))?;
    let _ = daemon.shell.set(shell.clone());

    let socket = bind(daemon, &config.socket).await;
    info!(socket = %config.socket.display(), "serving");
    tokio::spawn(listener::accept(shell.clone(), socket, daemon.clone()));
    tokio::spawn(watch::ticks(shell.clone()));
    tokio::spawn({
        let shell = shell.clone();
        async move {
            while let Some(posted) = posts.recv().await {
                shell.posted(posted);
            }
        }
    });
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(HEALTHY_AFTER_MS)).await;
        if let Err(e) = lock.healthy() {
            error!(error = %e, "cannot record in the lock file that this boot is healthy; it counts as a failed one");
        }
    });
    reload::watch(daemon, hangup).await;
    Ok(0)
}

/// Ends this boot, which does not count: the next one creates new memory while no process here holds the old. Both together could
/// exceed the container's limit. The next boot gets no memory handed over and does not come here.
fn let_go(link: &Link, lock: &LockFile, before: u32) -> std::io::Result<i32> {
    link.let_go();
    if let Err(e) = lock.ended_on_request(before) {
        error!(error = %e, "cannot record in the lock file that this boot ended on request; it counts as a failed one");
    }
    Ok(EXIT_RESTART)
}

/// The socket that the supervisor claimed; without one, the reason is reported.
fn claimed_socket(daemon: &Daemon) -> Option<PathBuf> {
    match &daemon.boot.claim {
        Claim::Held(socket) => return Some(socket.clone()),
        Claim::LockFileUnusable(error) => daemon.degrade("LockFileUnusable", error.clone()),
        Claim::SocketTaken(socket) => daemon.degrade(
            "SocketTaken",
            format!(
                "another running sidecar holds {}; stop it, or set another `socket` in the config",
                socket.display()
            ),
        ),
        // The file became readable a moment ago.
        Claim::NoConfig => {}
    }
    None
}

/// The effective config on one line. It contains paths of secret files, but no secrets.
fn effective_line(config: &kvcachepool_protocol::config::Config) -> String {
    let entries: Vec<String> = config
        .entries()
        .into_iter()
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    entries.join(" ")
}

async fn lock_file(daemon: &Daemon, path: &Path) -> LockFile {
    loop {
        match LockFile::open(path) {
            Ok(lock) => {
                daemon.recovered("LockFileUnusable");
                return lock;
            }
            Err(e) => daemon.degrade("LockFileUnusable", e.to_string()),
        }
        tokio::time::sleep(RETRY).await;
    }
}

fn count_boot(daemon: &Daemon, lock: &LockFile) -> u32 {
    match lock.begin_boot() {
        Ok(before) => before,
        Err(e) => {
            daemon.degrade("LockFileUnusable", e.to_string());
            0
        }
    }
}

async fn bind(daemon: &Daemon, path: &Path) -> tokio::net::UnixListener {
    loop {
        match listener::bind(path) {
            Ok(listener) => {
                daemon.recovered("SocketBindFailed");
                return listener;
            }
            Err(e) => daemon.degrade(
                "SocketBindFailed",
                format!("cannot create the socket {}: {e}", path.display()),
            ),
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// Handles SIGTERM. With an attached vLLM the process ends at once: an upgrade must be short, and the memory is kept. Otherwise
/// pending digests get a moment, and chunks that exist only in memory are flushed to lower tiers, and objects removed there, until done or
/// killed.
async fn drain(daemon: &Daemon, link: &Link) -> std::io::Result<i32> {
    daemon.set_draining();
    let Some(shell) = daemon.shell.get() else {
        return Ok(0);
    };
    // The notice of a vLLM that ended just before SIGTERM may not have arrived yet.
    let attached = || shell.with_core(|core, _, _| core.attached());
    let noticed = Instant::now() + NOTICED;
    while attached() && Instant::now() < noticed {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    shell.drive(Input::Drain);
    let attached = attached();
    let until = Instant::now() + DRAIN;
    let mut said = Instant::now();
    let open = || {
        let digests = shell.digests_waiting() != (0, 0) && Instant::now() < until;
        digests || shell.with_core(|core, _, _| core.flushes() || core.removes())
    };
    while !attached && open() {
        if said.elapsed() >= BEAT {
            said = Instant::now();
            link.flushing();
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    for left in shell.with_core(|core, _, _| core.unwritten()) {
        let (tier, chunks, bytes) = (left.tier.name(), left.chunks, left.bytes);
        if attached || chunks == 0 {
            info!(tier, chunks, bytes, "chunks not known to be in the tier");
        } else {
            warn!(
                tier,
                chunks, bytes, "chunks lost with the memory: not written to the tier"
            );
        }
    }
    for (tier, objects) in shell.with_core(|core, _, _| core.unremoved()) {
        let tier = tier.name();
        if attached {
            info!(tier, objects, "removals that the tier has not confirmed");
        } else {
            warn!(
                tier,
                objects, "removals lost with the memory: not confirmed by the tier"
            );
        }
    }
    if let Some(before) = daemon.unhealthy_boots.get()
        && let Err(e) = shell.end_on_request(*before)
    {
        error!(error = %e, "cannot record in the lock file that this boot ended on request; it counts as a failed one");
    }
    info!(attached, "engine process stopping");
    Ok(0)
}

//! All parts put together: who is started, what they share, and how they end.

use crate::canary::{self, Canary, Seen};
use crate::defaults::Defaults;
use crate::health::{self, Readiness, SERVING};
use crate::http::{Bounds, Port, bind, serve};
use crate::leader::{self, Leadership, Timing, run::Election};
use crate::metrics::{self, Metrics};
use crate::pki::{self, Lifetimes, Mode, Upkeep};
use crate::reconcile;
use crate::shutdown::{Phase, Shutdown};
use crate::webhook::decide::Decider;
use crate::webhook::pools::{self, Pools};
use crate::webhook::router::{Limits, router};
use crate::webhook::tls::{Served, acceptor};
use jiff::SignedDuration;
use kube::{Api, Client, Config};
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tracing::{error, info};

/// Longest wait for the parts at the very end, beyond what each of them allows its own work.
const END_TIME_MAX: Duration = Duration::from_secs(8);

/// What the flags amount to.
#[derive(Debug, Clone)]
pub struct Parts {
    /// Name of this process in the Lease.
    pub me: String,
    /// Name of this replica, for events.
    pub name: String,
    /// Pods may be patched, so that sidecars can be updated in place.
    pub allow_pod_patch: bool,
    /// Sidecars are asked, and counts in the status of a pool are written, at most once in this time.
    pub status_interval: Duration,
    /// What the operator brings where a pool says nothing.
    pub defaults: Defaults,
    /// Address of the webhook.
    pub webhook_listen: SocketAddr,
    /// Names in its certificate; API servers call the first.
    pub webhook_names: Vec<String>,
    /// Its MutatingWebhookConfiguration.
    pub webhook_configuration: String,
    /// Address of health and metrics.
    pub health_listen: SocketAddr,
    /// Where its certificate comes from.
    pub pki_mode: Mode,
    /// How long certificates last.
    pub lifetimes: Lifetimes,
    /// Between two looks at certificates.
    pub pki_interval: Duration,
    /// Name of the Lease.
    pub lease: String,
    /// Times of the election.
    pub timing: Timing,
    /// How long to serve on after SIGTERM.
    pub drain: Duration,
}

/// Why the operator does not run.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Flags that do not go together.
    #[error("{0}")]
    Flags(String),
    /// A port that cannot be had.
    #[error(
        "cannot listen on {address}: {source}; another process has it, or choose another by {flag}"
    )]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The flag that sets it.
        flag: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// No runtime or no signals.
    #[error("the process cannot be set up: {0}")]
    Process(#[from] io::Error),
    /// No way to an API server.
    #[error("no API server: {0}; set KUBECONFIG, or run in a pod with a service account")]
    Kube(#[from] kube::Error),
    /// TLS that this build cannot do.
    #[error("TLS: {0}")]
    Tls(#[from] rustls::Error),
    /// A part ended by itself.
    #[error("part {0} ended; a restart is the cure")]
    Ended(String),
}

/// Runs until SIGTERM or SIGINT, then leaves in order.
pub async fn run(parts: Parts) -> Result<(), StartError> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let (phase, shutdown) = Shutdown::new();
    let metrics = Arc::new(metrics::registry());
    let readiness = Readiness::new(metrics.clone());
    let mut tasks = JoinSet::new();
    start(&parts, &mut tasks, &shutdown, &metrics, &readiness).await?;
    metrics.set("operator_build_info", &[&parts.defaults.version], 1.0);
    readiness.set(SERVING, Ok(()));
    info!(
        version = parts.defaults.version,
        me = parts.me,
        image = parts.defaults.image,
        "running"
    );

    let ended = tokio::select! {
        _ = terminate.recv() => None,
        _ = interrupt.recv() => None,
        ended = tasks.join_next() => Some(match ended {
            Some(Ok(name)) => name.to_owned(),
            Some(Err(e)) => e.to_string(),
            None => "all".to_owned(),
        }),
    };
    readiness.set(SERVING, Err("on its way out".to_owned()));
    phase.send_replace(Phase::Leaving);
    if let Some(ended) = ended {
        error!(part = ended, "a part ended by itself");
        phase.send_replace(Phase::Stopping);
        finish(tasks).await;
        return Err(StartError::Ended(ended));
    }
    info!(drain = ?parts.drain, "leaving");
    sleep(parts.drain).await;
    phase.send_replace(Phase::Stopping);
    info!(in_time = finish(tasks).await, "ended");
    Ok(())
}

/// Waits for all parts; false when one of them took too long.
async fn finish(mut tasks: JoinSet<&'static str>) -> bool {
    let all = async { while tasks.join_next().await.is_some() {} };
    timeout(END_TIME_MAX, all).await.is_ok()
}

/// A task by its name.
async fn named(name: &'static str, work: impl Future<Output = ()>) -> &'static str {
    work.await;
    name
}

async fn listen(address: SocketAddr, flag: &'static str) -> Result<TcpListener, StartError> {
    bind(address).await.map_err(|source| StartError::Listen {
        address,
        flag,
        source,
    })
}

/// A client without retries of its own: those of an eviction that a disruption budget refuses take minutes, and nobody looks at the
/// pool meanwhile. What fails here is tried again by the queue.
async fn client() -> Result<Client, kube::Error> {
    let mut config = Config::infer().await.map_err(kube::Error::InferConfig)?;
    config.default_retry = false;
    Client::try_from(config)
}

async fn start(
    parts: &Parts,
    tasks: &mut JoinSet<&'static str>,
    shutdown: &Shutdown,
    metrics: &Arc<Metrics>,
    readiness: &Arc<Readiness>,
) -> Result<(), StartError> {
    let defaults = Arc::new(parts.defaults.clone());
    let namespace = &defaults.namespace;
    let health = listen(parts.health_listen, "--health-listen").await?;
    let webhook = listen(parts.webhook_listen, "--webhook-listen").await?;
    let address = webhook.local_addr()?;
    let client = client().await?;

    let port = Port {
        name: "health",
        bounds: Bounds {
            connections_max: 64,
            ..Bounds::default()
        },
        tls: None,
        router: health::router(readiness.clone(), metrics.clone()),
        metrics: metrics.clone(),
    };
    tasks.spawn(named("health", serve(health, port, shutdown.clone())));

    let (store, watching) = pools::watch(client.clone(), readiness.clone(), metrics.clone());
    tasks.spawn(named("pools", {
        let mut shutdown = shutdown.clone();
        async move {
            shutdown.unless(Phase::Stopping, watching).await;
        }
    }));
    let pools = Pools::new(store, client.clone(), defaults.clone(), metrics.clone());
    let served = Arc::new(Served::default());
    let port = Port {
        name: "webhook",
        bounds: Bounds {
            request_time_max: Duration::from_millis(2500),
            ..Bounds::default()
        },
        tls: Some(acceptor(served.clone())?),
        router: router(Decider::new(pools), Limits::default(), metrics.clone()),
        metrics: metrics.clone(),
    };
    tasks.spawn(named("webhook", serve(webhook, port, shutdown.clone())));

    let (leads, leadership) = Leadership::new();
    let election = Election {
        lease: Api::namespaced(client.clone(), namespace),
        name: parts.lease.clone(),
        me: parts.me.clone(),
        timing: parts.timing,
        metrics: metrics.clone(),
    };
    let upkeep = Upkeep {
        mode: parts.pki_mode.clone(),
        lifetimes: parts.lifetimes,
        interval: parts.pki_interval,
        names: parts.webhook_names.clone(),
        address,
        configuration: parts.webhook_configuration.clone(),
        namespace: namespace.clone(),
        client: client.clone(),
        served,
        leadership: leadership.clone(),
        readiness: readiness.clone(),
        metrics: metrics.clone(),
    };
    tasks.spawn(named("pki", pki::run(upkeep, shutdown.clone())));

    let (seen, canary_seen) = watch::channel(Seen::default());
    let context = reconcile::Context {
        client: client.clone(),
        defaults: defaults.clone(),
        metrics: metrics.clone(),
        canary: canary_seen,
        name: parts.name.clone(),
        allow_pod_patch: parts.allow_pod_patch,
        status_interval: SignedDuration::try_from(parts.status_interval)
            .unwrap_or(SignedDuration::MAX),
    };
    let work = move || reconcile::run(context.clone());
    tasks.spawn(named(
        "reconcile",
        lead(leadership.clone(), shutdown.clone(), work),
    ));
    let canary = Canary {
        pods: Api::namespaced(client, namespace),
        defaults: defaults.clone(),
        seen,
        metrics: metrics.clone(),
    };
    tasks.spawn(named(
        "canary",
        lead(leadership, shutdown.clone(), move || {
            canary::run(canary.clone())
        }),
    ));
    tasks.spawn(named("leader", {
        let mut shutdown = shutdown.clone();
        async move {
            leader::run(election, leads, shutdown.clone()).await;
            // The value stays until the end, for those who look at it still.
            shutdown.reached(Phase::Stopping).await;
        }
    }));
    Ok(())
}

/// Work of the leader alone, anew for every term.
async fn lead<F: Future<Output = ()>>(
    leadership: Leadership,
    mut shutdown: Shutdown,
    work: impl FnMut() -> F,
) {
    shutdown
        .unless(Phase::Stopping, leadership.during(work))
        .await;
    shutdown.reached(Phase::Stopping).await;
}

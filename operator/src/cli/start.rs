//! Assembles the parts of the operator: starts them, connects them, and stops them in order.

use super::Args;
use crate::canary::{self, Canary, CanaryResult};
use crate::defaults::Defaults;
use crate::health::{self, Readiness, SERVING};
use crate::http::{Bounds, Port, bind, serve};
use crate::leader::{self, Leadership, Timing, run::Election};
use crate::metrics::{self, Metrics};
use crate::pki::{self, Lifetimes, Mode, Upkeep};
use crate::reconcile;
use crate::scope::Scope;
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

/// Longest wait for the parts at the end, beyond their own timeouts.
const END_TIME_MAX: Duration = Duration::from_secs(8);

/// The checked flags, and what is computed from them.
#[derive(Debug, Clone)]
pub struct Parts {
    pub args: Args,
    /// Name of this process in the Lease.
    pub identity: String,
    /// Namespaces of pools.
    pub scope: Scope,
    /// Defaults for fields that a pool does not set.
    pub defaults: Defaults,
    /// Names in the webhook's certificate. API servers call the first.
    pub webhook_names: Vec<String>,
    /// Source of the webhook's certificate.
    pub pki_mode: Mode,
    pub lifetimes: Lifetimes,
    /// Times of the leader election.
    pub timing: Timing,
}

/// Why the operator cannot run.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Flags that contradict each other.
    #[error("{0}")]
    Flags(String),
    /// A port that cannot be opened.
    #[error(
        "cannot listen on {address}: {source}; stop the process that uses it, or choose another address with {flag}"
    )]
    Listen {
        address: SocketAddr,
        /// The flag that sets the address.
        flag: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// The runtime or the signal handlers cannot be created.
    #[error("the runtime or the signal handlers cannot be created: {0}")]
    Process(#[from] io::Error),
    /// No API server can be reached.
    #[error(
        "cannot connect to an API server: {0}; set KUBECONFIG, or run in a pod with a service account"
    )]
    Kube(#[from] kube::Error),
    /// An unsupported TLS configuration.
    #[error("unsupported TLS configuration: {0}")]
    Tls(#[from] rustls::Error),
    /// A part ended unexpectedly.
    #[error("part {0} ended unexpectedly; restart the operator")]
    Ended(String),
}

/// Runs until SIGTERM or SIGINT, then shuts down in order.
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
        identity = parts.identity,
        image = parts.defaults.image,
        "operator started"
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
    readiness.set(SERVING, Err("shutting down".to_owned()));
    phase.send_replace(Phase::Leaving);
    if let Some(ended) = ended {
        error!(part = ended, "part ended unexpectedly");
        phase.send_replace(Phase::Stopping);
        finish(tasks).await;
        return Err(StartError::Ended(ended));
    }
    info!(drain = ?parts.args.drain, "shutting down");
    sleep(parts.args.drain).await;
    phase.send_replace(Phase::Stopping);
    info!(in_time = finish(tasks).await, "operator stopped");
    Ok(())
}

/// Waits for all parts. Returns false if one of them exceeded its time.
async fn finish(mut tasks: JoinSet<&'static str>) -> bool {
    let all = async { while tasks.join_next().await.is_some() {} };
    timeout(END_TIME_MAX, all).await.is_ok()
}

/// A task that returns its name.
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

/// The config of a client without its own retries. Retries of an eviction that a disruption budget refuses take minutes, during which the pool would not
/// be reconciled. The queue retries failed passes.
async fn config() -> Result<Config, kube::Error> {
    let mut config = Config::infer().await.map_err(kube::Error::InferConfig)?;
    config.default_retry = false;
    Ok(config)
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
    let health = listen(parts.args.health_listen, "--health-listen").await?;
    let webhook = listen(parts.args.webhook_listen, "--webhook-listen").await?;
    let address = webhook.local_addr()?;
    let config = config().await?;
    let client = Client::try_from(config.clone())?;

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

    let (store, watching) = pools::watch(&client, &parts.scope, readiness.clone(), metrics.clone());
    tasks.spawn(named("pools", {
        let mut shutdown = shutdown.clone();
        async move {
            shutdown.unless(Phase::Stopping, watching).await;
        }
    }));
    let scope = &parts.scope;
    let pools = Pools::new(
        store,
        client.clone(),
        scope.clone(),
        defaults.clone(),
        metrics.clone(),
    );
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
        name: parts.args.lease.clone(),
        identity: parts.identity.clone(),
        timing: parts.timing,
        metrics: metrics.clone(),
    };
    let upkeep = Upkeep {
        mode: parts.pki_mode.clone(),
        lifetimes: parts.lifetimes,
        interval: parts.args.pki_interval,
        names: parts.webhook_names.clone(),
        address,
        configuration: parts.args.webhook_configuration.clone(),
        namespace: namespace.clone(),
        client: client.clone(),
        served,
        leadership: leadership.clone(),
        readiness: readiness.clone(),
        metrics: metrics.clone(),
    };
    tasks.spawn(named("pki", pki::run(upkeep, shutdown.clone())));

    let (canary_tx, canary_rx) = watch::channel(CanaryResult::default());
    let context = reconcile::Context {
        client: client.clone(),
        scope: scope.clone(),
        defaults: defaults.clone(),
        metrics: metrics.clone(),
        canary: canary_rx,
        webhook_configuration: parts.args.webhook_configuration.clone(),
        name: parts.args.name.clone(),
        allow_pod_patch: parts.args.allow_pod_patch,
        status_interval: SignedDuration::try_from(parts.args.status_interval)
            .unwrap_or(SignedDuration::MAX),
    };
    let work = reconcile::run(context, leadership.clone());
    tasks.spawn(named("reconcile", until_stopping(shutdown.clone(), work)));
    let canary = Canary {
        config,
        defaults: defaults.clone(),
        result: canary_tx,
        metrics: metrics.clone(),
    };
    tasks.spawn(named(
        "canary",
        until_stopping(
            shutdown.clone(),
            leadership.during(move || canary::run(canary.clone())),
        ),
    ));
    tasks.spawn(named("leader", {
        let mut shutdown = shutdown.clone();
        async move {
            leader::run(election, leads, shutdown.clone()).await;
            // The value stays until the end, for parts that still read it.
            shutdown.reached(Phase::Stopping).await;
        }
    }));
    Ok(())
}

/// Work that ends with the process. A part that has nothing left to do does not end before.
async fn until_stopping(mut shutdown: Shutdown, work: impl Future<Output = ()>) {
    shutdown.unless(Phase::Stopping, work).await;
    shutdown.reached(Phase::Stopping).await;
}

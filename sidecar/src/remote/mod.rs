//! Remote access: serves opaque objects of the sidecar beside this process to clients over TLS (`kvcachepool-sidecar serve`).
//!
//! The process is a client of the sidecar's Unix socket like any other (`upstream`), and maps the same memory (`memory`). Remote clients
//! send the messages of the socket, and bytes in place of references (`client`). Another transport takes the place of the TLS stream.

mod client;
mod keys;
mod memory;
mod metrics;
mod objects;
mod settings;
mod tls;
mod upstream;

use crate::admin::listen::{Bounds, serve as serve_http};
use crate::supervisor::listen;
use crate::terminated::terminated;
use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use client::{BUFFER_BYTES, End};
use kvcachepool_metrics::Metrics;
pub use metrics::REMOTE;
pub use settings::Settings;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, SemaphorePermit, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tracing::{debug, info, warn};
use upstream::State;

/// Connections before the end of HELLO.
const GREETINGS_MAX: usize = 256;
/// Longest time for TLS and HELLO together.
const HELLO_PATIENCE: Duration = Duration::from_secs(10);
/// Pause after an accept that failed for lack of descriptors or memory.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// How long running requests may take after SIGTERM.
const DRAIN: Duration = Duration::from_secs(5);
/// A peer that is gone without a word is noticed after about a minute.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_PROBES: u32 = 3;

/// Why the server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    #[error(transparent)]
    Key(#[from] keys::KeyError),
    #[error(transparent)]
    Tls(#[from] tls::TlsError),
    #[error("cannot listen on {address}: {source}")]
    Listen {
        address: SocketAddr,
        source: std::io::Error,
    },
    #[error("cannot write the address file {path}: {source}")]
    AddressFile {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("the server cannot start: {0}")]
    Io(#[from] std::io::Error),
}

/// What all connections share.
struct Server {
    key_file: PathBuf,
    upstream: watch::Receiver<State>,
    stop: watch::Receiver<bool>,
    /// Buffers of [`BUFFER_BYTES`] for values on their way.
    free: Semaphore,
    requests: AtomicU64,
    served: AtomicUsize,
    connections_max: usize,
    metrics: Arc<Metrics>,
}

/// The place of a client after HELLO, until it is dropped.
struct Place<'a>(&'a AtomicUsize);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Server {
    /// The id of a request at the sidecar.
    fn new_request(&self) -> String {
        self.requests.fetch_add(1, Ordering::Relaxed).to_string()
    }

    /// A place for a client whose key is right; `None`: all are taken.
    fn place(&self) -> Option<Place<'_>> {
        let place = Place(&self.served);
        let others = self.served.fetch_add(1, Ordering::Relaxed);
        (others < self.connections_max).then_some(place)
    }

    /// Waits for this many buffers.
    async fn buffers(&self, count: usize) -> Result<SemaphorePermit<'_>, End> {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        // The semaphore is never closed.
        self.free
            .acquire_many(count)
            .await
            .map_err(|_| End::Stopping)
    }
}

/// Serves until SIGTERM or SIGINT.
pub fn run(settings: Settings) -> Result<(), RemoteError> {
    let keys = keys::load(&settings.key_file)?.len();
    let certificate =
        tls::Certificate::load(settings.certificate.clone(), settings.private_key.clone())?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let listener = bind(settings.listen)?;
        let address = listener.local_addr()?;
        let (state, upstream) = watch::channel(State::Waiting("not connected yet".into()));
        let (stop, stopped) = watch::channel(false);
        let buffers = usize::try_from(settings.buffers.0).unwrap_or(usize::MAX) / BUFFER_BYTES;
        let server = Arc::new(Server {
            key_file: settings.key_file.clone(),
            upstream,
            stop: stopped,
            free: Semaphore::new(buffers.min(Semaphore::MAX_PERMITS)),
            requests: AtomicU64::new(1),
            served: AtomicUsize::new(0),
            connections_max: settings.connections as usize,
            metrics: Arc::new(metrics::registry()),
        });
        let http = bind(settings.admin)?;
        let metrics = server.metrics.clone();
        tokio::spawn(serve_http(
            http,
            router(server.clone()),
            Bounds::default(),
            metrics,
        ));
        tokio::spawn(certificate.clone().watch());
        tokio::spawn(upstream::keep(settings.socket.clone(), state));
        if let Some(path) = &settings.address_file {
            std::fs::write(path, format!("{address}\n")).map_err(|source| {
                RemoteError::AddressFile {
                    path: path.clone(),
                    source,
                }
            })?;
        }
        info!(%address, keys, socket = %settings.socket.display(), "serving objects over TLS");
        let mut open = JoinSet::new();
        tokio::select! {
            () = accept(&server, &listener, certificate.acceptor()?, &mut open) => {}
            ended = terminated() => ended?,
        }
        info!(connections = open.len(), "stopping");
        stop.send_replace(true);
        // What is left ends with the process, and the sidecar takes back what it held.
        let _ = timeout(DRAIN, open.join_all()).await;
        Ok(())
    })
}

/// Within a runtime.
fn bind(address: SocketAddr) -> Result<TcpListener, RemoteError> {
    listen::open(address)
        .and_then(TcpListener::from_std)
        .map_err(|source| RemoteError::Listen { address, source })
}

/// Accepts without end. Connections before the end of HELLO have few places, and a new one takes that of the oldest: who has no key
/// cannot keep others out.
async fn accept(
    server: &Arc<Server>,
    listener: &TcpListener,
    tls: TlsAcceptor,
    open: &mut JoinSet<()>,
) {
    let mut greetings: VecDeque<oneshot::Sender<()>> = VecDeque::new();
    loop {
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(e) => {
                warn!(error = %e, "failed to accept a remote client");
                server.metrics.add("accept_failures_total", &[], 1);
                tokio::time::sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        while open.try_join_next().is_some() {}
        greetings.retain(|greeting| !greeting.is_closed());
        if greetings.len() >= GREETINGS_MAX
            && let Some(oldest) = greetings.pop_front()
        {
            // An error means that its HELLO has just ended.
            let _ = oldest.send(());
        }
        let (displace, displaced) = oneshot::channel();
        greetings.push_back(displace);
        open.spawn(serve(server.clone(), stream, peer, tls.clone(), displaced));
    }
}

/// One connection, from its TLS handshake to its end.
async fn serve(
    server: Arc<Server>,
    stream: TcpStream,
    peer: SocketAddr,
    tls: TlsAcceptor,
    displaced: oneshot::Receiver<()>,
) {
    keep_alive(&stream);
    let greeting = async {
        let mut stream = tls.accept(stream).await.map_err(|e| {
            debug!(%peer, error = %e, "TLS handshake failed");
            End::TlsFailed
        })?;
        let (upstream, place) = client::greet(&server, &mut stream).await?;
        Ok((stream, upstream, place))
    };
    let greeted = tokio::select! {
        greeted = timeout(HELLO_PATIENCE, greeting) => greeted.unwrap_or(Err(End::TooSlow)),
        _ = displaced => Err(End::Displaced),
    };
    let end = match greeted {
        Ok((stream, upstream, _place)) => client::serve(&server, stream, upstream).await,
        Err(end) => end,
    };
    let reason = format!("{end:?}");
    server.metrics.add("remote_closed_total", &[&reason], 1);
    debug!(%peer, reason, "remote client ended");
}

/// Requests are small, so they are sent at once. A refusal of the kernel is harmless.
fn keep_alive(stream: &TcpStream) {
    use rustix::net::sockopt;
    let _ = stream.set_nodelay(true);
    let _ = sockopt::set_socket_keepalive(stream, true);
    let _ = sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE);
    let _ = sockopt::set_tcp_keepintvl(stream, KEEPALIVE_INTERVAL);
    let _ = sockopt::set_tcp_keepcnt(stream, KEEPALIVE_PROBES);
}

fn router(server: Arc<Server>) -> Router {
    let ready = server.clone();
    Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route(
            "/readyz",
            get(async move || match ready.upstream.borrow().attached() {
                Ok(_) => (StatusCode::OK, "ready\n".to_owned()),
                Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
            }),
        )
        .route(
            "/metrics",
            get(async move || {
                let attached = server.upstream.borrow().attached().is_ok();
                let served = server.served.load(Ordering::Relaxed);
                server.metrics.set("remote_connections", &[], served as f64);
                server
                    .metrics
                    .set("remote_attached", &[], f64::from(u8::from(attached)));
                server.metrics.text()
            }),
        )
}

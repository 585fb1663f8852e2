//! A port: its limits and its accept loop.

use super::connection;
use super::open::{Activity, Open};
use crate::metrics::Metrics;
use crate::shutdown::{Phase, Shutdown};
use axum::Router;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::yield_now;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tracing::warn;

/// Wait after an accept that failed for lack of descriptors or memory.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Limits for clients.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Maximum connections. A further one replaces an idle one, or is refused while all have a request in progress.
    pub connections_max: usize,
    /// Longest TLS handshake.
    pub handshake_time_max: Duration,
    /// Longest wait for the next request's head. The API server closes idle connections after 90 s. The value is larger, so that no request
    /// meets a connection that is being closed.
    pub idle_time_max: Duration,
    /// Longest request, from its head to its answer.
    pub request_time_max: Duration,
    /// Maximum bytes of request line and headers.
    pub head_bytes_max: usize,
    /// Longest wait for running requests at shutdown.
    pub drain_time_max: Duration,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            connections_max: 256,
            handshake_time_max: Duration::from_secs(2),
            idle_time_max: Duration::from_secs(120),
            request_time_max: Duration::from_secs(10),
            head_bytes_max: 64 << 10,
            drain_time_max: Duration::from_secs(5),
        }
    }
}

/// A port and its handler.
pub struct Port {
    /// Name in metrics and logs.
    pub name: &'static str,
    pub bounds: Bounds,
    /// `None` for plain HTTP.
    pub tls: Option<TlsAcceptor>,
    pub router: Router,
    pub metrics: Arc<Metrics>,
}

impl Port {
    /// Counts a connection that the server ended.
    pub(super) fn ended(&self, reason: &str) {
        self.metrics
            .add("http_connections_ended_total", &[self.name, reason], 1);
    }
}

/// Listens. On a machine without IPv6, `[::]` means every IPv4 address.
pub async fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    match TcpListener::bind(address).await {
        Err(e)
            if address.is_ipv6()
                && address.ip().is_unspecified()
                && e.kind() != io::ErrorKind::AddrInUse =>
        {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, address.port())).await
        }
        bound => bound,
    }
}

/// Serves until `Phase::Stopping`, then finishes running requests.
pub async fn serve(listener: TcpListener, port: Port, mut shutdown: Shutdown) {
    let port = Arc::new(port);
    let mut open = Open::default();
    while let Some(stream) = accept(&listener, &port, &mut shutdown).await {
        if open.sweep() >= port.bounds.connections_max {
            if !open.make_room() {
                port.ended("full");
                continue;
            }
            port.ended("displaced");
        }
        let activity = Activity::new();
        let run = connection::run(stream, port.clone(), activity.clone(), shutdown.clone());
        open.push(activity, tokio::spawn(run));
        port.metrics
            .set("http_connections", &[port.name], open.sweep() as f64);
        // Running requests are answered before more connections are accepted from a full backlog.
        yield_now().await;
    }
    drop(listener);
    let _all = timeout(port.bounds.drain_time_max, open.finish()).await;
}

async fn accept(listener: &TcpListener, port: &Port, shutdown: &mut Shutdown) -> Option<TcpStream> {
    loop {
        let accepted = tokio::select! {
            () = shutdown.reached(Phase::Stopping) => return None,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) => return Some(stream),
            Err(e) => {
                warn!(port = port.name, reason = %e, "accept failed");
                sleep(ACCEPT_RETRY).await;
            }
        }
    }
}

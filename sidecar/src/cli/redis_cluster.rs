//! `redis-cluster`: keeps Redis servers one cluster.

use super::log_args::LogArgs;
use crate::admin::listen::{Bounds, serve as serve_http};
use crate::supervisor::listen;
use crate::terminated::terminated;
use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use kvcachepool_tiers::redis::manage::{Manager, Settings, State};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tracing::info;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// All servers, each as HOST:PORT.
    #[arg(value_name = "SERVER", required = true, value_parser = server)]
    servers: Vec<(String, u16)>,
    /// Masters. The other servers are their replicas, as many of each.
    #[arg(long, value_name = "N")]
    shards: usize,
    /// ACL user of the manager. Default: the default user.
    #[arg(long, value_name = "NAME")]
    user: Option<String>,
    /// File with the user's password. Default: the servers need none.
    #[arg(long, value_name = "FILE")]
    password_file: Option<PathBuf>,
    /// Certificates of the authorities that are trusted for the servers, in PEM. With it, connections use TLS.
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Address and port of /healthz and /readyz, over HTTP.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9797")]
    listen: SocketAddr,
    #[command(flatten)]
    log: LogArgs,
}

fn server(text: &str) -> Result<(String, u16), String> {
    let parsed = text.rsplit_once(':').and_then(|(host, port)| {
        let host = host.trim_matches(['[', ']']);
        Some((host.to_owned(), port.parse().ok()?))
    });
    let parsed = parsed.filter(|(host, _)| !host.is_empty());
    parsed.ok_or_else(|| "expected HOST:PORT".to_owned())
}

pub fn main(args: Args) -> Result<ExitCode, String> {
    args.log.start();
    let (manager, state) = Manager::new(Settings {
        servers: args.servers,
        shards: args.shards,
        user: args.user,
        password: args.password_file,
        ca: args.ca,
    })?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| format!("cannot start: {e}"))?;
    runtime.block_on(async {
        let address = args.listen;
        let listener = listen::open(address)
            .and_then(TcpListener::from_std)
            .map_err(|e| format!("cannot listen on {address}: {e}"))?;
        let metrics = Arc::new(crate::admin::metrics::registry());
        tokio::spawn(serve_http(
            listener,
            router(state),
            Bounds::default(),
            metrics,
        ));
        // A move of a slot that is cut off is finished by the next manager.
        tokio::select! {
            () = manager.run() => {}
            ended = terminated() => ended.map_err(|e| format!("cannot wait for signals: {e}"))?,
        }
        info!("stopping");
        Ok(ExitCode::SUCCESS)
    })
}

fn router(state: watch::Receiver<State>) -> Router {
    let ready = async move || {
        let State { ready, message } = state.borrow().clone();
        let status = match ready {
            true => StatusCode::OK,
            false => StatusCode::SERVICE_UNAVAILABLE,
        };
        (status, format!("{message}\n"))
    };
    Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(ready))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_a_host_and_a_port() {
        let parsed = |text| server(text).map(|(host, port)| format!("{host} {port}"));
        assert_eq!(parsed("kv-0.kv:6379"), Ok("kv-0.kv 6379".to_owned()));
        assert_eq!(parsed("[fd00::1]:7"), Ok("fd00::1 7".to_owned()));
        for text in ["kv-0", ":6379", "kv-0:", "kv-0:x", "kv-0:65536"] {
            assert_eq!(parsed(text), Err("expected HOST:PORT".to_owned()), "{text}");
        }
    }
}

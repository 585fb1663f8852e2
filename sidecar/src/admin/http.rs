//! The admin HTTP server. It has its own thread and runtime, so a slow scrape never delays the socket.

use super::listen::{Bounds, serve};
use super::token::{Access, check};
use crate::serve::daemon::{Daemon, serves};
use axum::extract::{Query, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router, middleware};
use kvcachepool_engine::sessions::AdminError;
use serde::Serialize;
use std::collections::HashMap;
use std::net::TcpListener;
use std::sync::Arc;

/// Starts the server on a non-blocking listener.
pub fn start(daemon: Arc<Daemon>, listener: TcpListener) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    std::thread::Builder::new()
        .name("admin".into())
        .spawn(move || {
            runtime.block_on(async {
                let metrics = daemon.metrics.clone();
                match tokio::net::TcpListener::from_std(listener) {
                    Ok(listener) => {
                        serve(listener, router(daemon), Bounds::default(), metrics).await;
                    }
                    Err(e) => tracing::error!(error = %e, "cannot serve HTTP on the admin port"),
                }
            });
        })?;
    Ok(())
}

fn router(daemon: Arc<Daemon>) -> Router {
    let guarded = Router::new()
        .route("/v1/config", get(config))
        .route("/v1/objects", get(objects))
        .route_layer(from_fn_with_state(daemon.clone(), guard));
    Router::new()
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .route("/v1/status", get(status))
        .merge(guarded)
        .fallback(not_found)
        .layer(middleware::from_fn_with_state(daemon.clone(), count))
        .with_state(daemon)
}

#[derive(Serialize)]
struct Refusal {
    error: &'static str,
    message: String,
}

fn refuse(status: StatusCode, error: &'static str, message: impl Into<String>) -> Response {
    let body = Refusal {
        error,
        message: message.into(),
    };
    (status, Json(body)).into_response()
}

async fn count(State(daemon): State<Arc<Daemon>>, request: Request, next: Next) -> Response {
    // Only known paths become labels: a scanner must not grow the metric.
    let path = match request.uri().path() {
        known @ ("/healthz" | "/readyz" | "/metrics" | "/v1/status" | "/v1/config"
        | "/v1/objects") => known.to_owned(),
        _ => "other".to_owned(),
    };
    let response = next.run(request).await;
    daemon.metrics.add(
        "admin_requests_total",
        &[&path, response.status().as_str()],
        1,
    );
    response
}

async fn guard(State(daemon): State<Arc<Daemon>>, request: Request, next: Next) -> Response {
    let presented = request
        .headers()
        .get(header::AUTHORIZATION)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.strip_prefix("Bearer "));
    let file = daemon.config().effective.admin.token_file;
    match check(file.as_deref(), presented) {
        Access::Granted => next.run(request).await,
        Access::Off => refuse(
            StatusCode::NOT_FOUND,
            "AdminOff",
            "this path is off: set admin.tokenFile in the config to a file with a bearer token",
        ),
        Access::NoToken => refuse(
            StatusCode::FORBIDDEN,
            "NoToken",
            "the file of admin.tokenFile is missing or empty",
        ),
        Access::Wrong => refuse(
            StatusCode::FORBIDDEN,
            "Unauthorized",
            "send the token of admin.tokenFile as `Authorization: Bearer <token>`",
        ),
    }
}

async fn not_found() -> Response {
    refuse(
        StatusCode::NOT_FOUND,
        "NotFound",
        "paths: /healthz /readyz /metrics /v1/status /v1/config /v1/objects",
    )
}

/// Liveness: 200 as long as the process answers. A degraded state is not reported here, because a restart would not fix it.
async fn healthz() -> &'static str {
    "ok\n"
}

async fn readyz(State(daemon): State<Arc<Daemon>>) -> Response {
    let (state, reasons) = daemon.health();
    let (status, word) = match serves(state) {
        true => (StatusCode::OK, "ready".to_owned()),
        false => (
            StatusCode::SERVICE_UNAVAILABLE,
            format!("{state:?}").to_lowercase(),
        ),
    };
    let reasons: String = reasons
        .iter()
        .map(|r| format!("{}: {}\n", r.code, r.message))
        .collect();
    (status, format!("{word}\n{reasons}")).into_response()
}

async fn metrics(State(daemon): State<Arc<Daemon>>) -> Response {
    daemon.collect_metrics();
    (
        [(
            header::CONTENT_TYPE,
            "text/plain; version=0.0.4; charset=utf-8",
        )],
        daemon.metrics.text(),
    )
        .into_response()
}

async fn status(State(daemon): State<Arc<Daemon>>) -> Response {
    Json(daemon.status()).into_response()
}

/// The effective config as YAML, without secrets.
async fn config(State(daemon): State<Arc<Daemon>>) -> Response {
    (
        [(header::CONTENT_TYPE, "application/yaml")],
        daemon.config().effective.shown_yaml(),
    )
        .into_response()
}

/// `?key=<hex>`, repeated or separated by commas: reports which of these chunks exist.
async fn objects(
    State(daemon): State<Arc<Daemon>>,
    Query(query): Query<HashMap<String, String>>,
) -> Response {
    let keys: Vec<String> = query
        .get("key")
        .map(|keys| keys.split(',').map(str::to_owned).collect())
        .unwrap_or_default();
    match daemon.lookup(&keys) {
        Ok(found) => Json(found).into_response(),
        Err(e @ AdminError::BadKey(_)) => refuse(StatusCode::BAD_REQUEST, "BadKey", e.to_string()),
        Err(e) => refuse(StatusCode::SERVICE_UNAVAILABLE, "NoArena", e.to_string()),
    }
}

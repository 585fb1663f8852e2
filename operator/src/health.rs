//! The plain HTTP port: liveness, readiness, metrics. Readiness is the conjunction of named parts, each set by its owner.

use crate::metrics::Metrics;
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Part of readiness: a certificate that the API server trusts.
pub const CERTIFICATE: &str = "certificate";
/// Part of readiness: the pools are in the cache.
pub const POOLS: &str = "pools";
/// Part of readiness: the process is not shutting down.
pub const SERVING: &str = "serving";

/// The readiness of the replica.
pub struct Readiness {
    parts: Mutex<BTreeMap<&'static str, Result<(), String>>>,
    metrics: Arc<Metrics>,
}

impl Readiness {
    /// Starts with no part ready.
    pub fn new(metrics: Arc<Metrics>) -> Arc<Self> {
        let readiness = Self {
            parts: Mutex::default(),
            metrics,
        };
        for part in [CERTIFICATE, POOLS, SERVING] {
            readiness.set(part, Err("starting".to_owned()));
        }
        Arc::new(readiness)
    }

    /// Sets the state of a part. Returns true if it changed.
    pub fn set(&self, part: &'static str, state: Result<(), String>) -> bool {
        let value = if state.is_ok() { 1.0 } else { 0.0 };
        self.metrics.set("operator_ready", &[part], value);
        self.parts.lock().insert(part, state.clone()) != Some(state)
    }

    /// One line per part that is not ready.
    pub fn reasons(&self) -> Vec<String> {
        let parts = self.parts.lock();
        parts
            .iter()
            .filter_map(|(part, state)| Some(format!("{part}: {}", state.as_ref().err()?)))
            .collect()
    }
}

#[derive(Clone)]
struct Shown {
    readiness: Arc<Readiness>,
    metrics: Arc<Metrics>,
}

/// The routes of the plain HTTP port.
pub fn router(readiness: Arc<Readiness>, metrics: Arc<Metrics>) -> Router {
    Router::new()
        // Shows only that the process answers: a restart would not fix anything else.
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .route("/metrics", get(text))
        .fallback(|| async { (StatusCode::NOT_FOUND, "paths: /healthz /readyz /metrics\n") })
        .with_state(Shown { readiness, metrics })
}

async fn readyz(State(shown): State<Shown>) -> Response {
    let reasons = shown.readiness.reasons();
    if reasons.is_empty() {
        return "ready\n".into_response();
    }
    let body = format!("not ready\n{}\n", reasons.join("\n"));
    (StatusCode::SERVICE_UNAVAILABLE, body).into_response()
}

async fn text(State(shown): State<Shown>) -> Response {
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], shown.metrics.text()).into_response()
}

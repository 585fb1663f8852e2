//! The metrics of remote access.

use kvcachepool_metrics::{Metric, Metrics, counter, gauge};

pub fn registry() -> Metrics {
    Metrics::of(REMOTE).with_process()
}

/// All metrics of `kvcachepool-sidecar serve`.
pub const REMOTE: &[Metric] = &[
    gauge(
        "remote_attached",
        &[],
        "1 while the server uses a sidecar; 0 while it refuses clients.",
    ),
    gauge(
        "remote_connections",
        &[],
        "Open connections of remote clients, after HELLO.",
    ),
    counter(
        "remote_connections_total",
        &[],
        "Connections of remote clients that were served, with a key.",
    ),
    counter(
        "remote_closed_total",
        &["reason"],
        "Connections of remote clients that ended, by reason.",
    ),
    counter(
        "remote_requests_total",
        &["op", "result"],
        "Requests of remote clients, by operation and result.",
    ),
    counter(
        "remote_bytes_total",
        &["direction"],
        "Bytes of objects that remote clients have read and written.",
    ),
    counter("accept_failures_total", &[], "Failed accept() calls."),
    counter(
        "admin_displaced_total",
        &[],
        "Connections of the admin port that were closed for a newer one.",
    ),
    counter(
        "admin_timeouts_total",
        &[],
        "Connections of the admin port that took too long.",
    ),
];

//! Every metric there is: the one list that the registry is built from and that `docs/operator-metrics.md` is checked against.
//! Names carry the prefix `kvcachepool_` on the wire.

/// Kind of a metric.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// Only grows while the process lives.
    Counter,
    /// Goes both ways.
    Gauge,
    /// Histogram of seconds, with these upper bounds.
    Seconds(&'static [f64]),
}

impl Kind {
    /// As Prometheus names it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Seconds(_) => "histogram",
        }
    }
}

/// One metric family.
#[derive(Debug, Clone, Copy)]
pub struct Metric {
    /// Name without prefix.
    pub name: &'static str,
    /// Kind.
    pub kind: Kind,
    /// Label names, in the order of their values.
    pub labels: &'static [&'static str],
    /// For people.
    pub help: &'static str,
}

const fn metric(
    kind: Kind,
    name: &'static str,
    labels: &'static [&'static str],
    help: &'static str,
) -> Metric {
    Metric {
        name,
        kind,
        labels,
        help,
    }
}

use Kind::{Counter, Gauge, Seconds};

/// Prefix of every name.
pub const PREFIX: &str = "kvcachepool_";

/// Around the bar of 10 ms, and up to the timeout of the API server.
const HANDLER: &[f64] = &[
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0,
];

/// From a look without a write to one that waits for the API server again and again.
const RECONCILE: &[f64] = &[
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];

/// All families.
#[rustfmt::skip]
pub const ALL: &[Metric] = &[
    metric(Gauge, "operator_build_info", &["version"], "Always 1; the label names the running binary."),
    metric(Gauge, "operator_ready", &["part"], "1 for every part of /readyz that says yes: certificate, pools, serving."),
    metric(Counter, "injections_total", &["result", "reason"], "Admission reviews answered, by what became of the pod: Injected, Unchanged, Refused, Skipped; and why. Dry runs are not counted."),
    metric(Seconds(HANDLER), "injection_seconds", &[], "Time from the last byte of an admission review to its answer."),
    metric(Counter, "webhook_unreadable_total", &["reason"], "Requests to the webhook's port that could not be answered as an admission review, by reason."),
    metric(Counter, "webhook_pool_reads_total", &["result"], "Pools that the cache did not hold and that were read from the API server: found, missing, failed."),
    metric(Gauge, "pools_invalid", &[], "Stored pools that this version cannot read; their pods start without a sidecar."),
    metric(Gauge, "pools", &[], "Pools in the cache of the webhook."),
    metric(Counter, "watch_errors_total", &["kind"], "Watches that broke and were started again, by kind of the object."),
    metric(Gauge, "http_connections", &["port"], "Open connections of a port: webhook or health."),
    metric(Counter, "http_connections_ended_total", &["port", "reason"], "Connections that the operator ended or refused: full, displaced, handshake, request_time."),
    metric(Gauge, "certificate_expiry_timestamp_seconds", &["certificate"], "Unix time at which a certificate of the webhook ends: leaf, authority."),
    metric(Counter, "certificate_rotations_total", &["certificate"], "Certificates made or read anew: leaf, authority."),
    metric(Counter, "certificate_errors_total", &["step"], "Steps of the certificate's upkeep that failed and are tried again: secret, configuration, sign, files, call."),
    metric(Gauge, "leader", &[], "1 while this replica holds the lease."),
    metric(Counter, "leader_transitions_total", &["to"], "Times that this replica became the leader, or stopped to be: leading, following."),
    metric(Counter, "canary_checks_total", &["result"], "Dry runs of a labelled pod by the leader: Injected, WebhookUnreachable, Unknown."),
    metric(Counter, "reconciles_total", &["result"], "Looks at a pool by the leader: done, failed."),
    metric(Seconds(RECONCILE), "reconcile_seconds", &[], "Time of one look at a pool, its writes included."),
    metric(Counter, "status_writes_total", &[], "Statuses of pools that were written."),
    metric(Counter, "evictions_total", &["result"], "Pods without their sidecar that were asked to go (`onMissed: Evict`): evicted, refused."),
    metric(Counter, "sidecar_questions_total", &["result"], "Sidecars that were asked for their numbers: answered, failed."),
];

//! Every metric of the operator: the one list that the registry is built from and that `docs/reference/operator-metrics.md` is checked against.

pub use kvcachepool_metrics::Metrics;
use kvcachepool_metrics::{Metric, counter, gauge, seconds};

/// A registry with every family of the table.
pub fn registry() -> Metrics {
    Metrics::of(ALL)
}

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
    gauge("operator_build_info", &["version"], "Always 1; the label names the running binary."),
    gauge("operator_ready", &["part"], "1 for every part of /readyz that says yes: certificate, pools, serving."),
    counter("injections_total", &["result", "reason"], "Admission reviews answered, by what became of the pod: Injected, Unchanged, Refused, Skipped; and why, or what an injected one lacks. Dry runs are not counted."),
    seconds(HANDLER, "injection_seconds", &[], "Time from the last byte of an admission review to its answer."),
    counter("webhook_unreadable_total", &["reason"], "Requests to the webhook's port that could not be answered as an admission review, by reason."),
    counter("webhook_pool_reads_total", &["result"], "Pools that the cache did not hold and that were read from the API server: found, missing, failed."),
    gauge("pools_invalid", &[], "Stored pools that this version cannot read; their pods start without a sidecar."),
    gauge("pools", &[], "Pools in the cache of the webhook."),
    counter("watch_errors_total", &["kind"], "Watches that broke and were started again, by kind of the object."),
    gauge("http_connections", &["port"], "Open connections of a port: webhook or health."),
    counter("http_connections_ended_total", &["port", "reason"], "Connections that the operator ended or refused: full, displaced, handshake, request_time."),
    gauge("certificate_expiry_timestamp_seconds", &["certificate"], "Unix time at which a certificate of the webhook ends: leaf, authority."),
    counter("certificate_rotations_total", &["certificate"], "Certificates made or read anew: leaf, authority."),
    counter("certificate_errors_total", &["step"], "Steps of the certificate's upkeep that failed and are tried again: secret, configuration, sign, files, call."),
    gauge("leader", &[], "1 while this replica holds the lease."),
    counter("leader_transitions_total", &["to"], "Times that this replica became the leader, or stopped to be: leading, following."),
    counter("canary_checks_total", &["result"], "Dry runs of a labelled pod by the leader: Injected, WebhookUnreachable, Unknown."),
    counter("reconciles_total", &["result"], "Looks at a pool by the leader: done, failed."),
    seconds(RECONCILE, "reconcile_seconds", &[], "Time of one look at a pool, its writes included."),
    counter("status_writes_total", &[], "Statuses of pools that were written."),
    counter("evictions_total", &["result"], "Pods without their sidecar that were asked to go (`onMissed: Evict`): evicted, refused."),
    counter("injection_pauses_total", &["reason"], "Owners of pods for which the leader paused injection, because what it adds kept a pod from running, by cause."),
    counter("replacements_total", &["result"], "Hung pods that the leader replaced, so that their owner makes one that starts without a sidecar: evicted, deleted, refused."),
    counter("sidecar_questions_total", &["result"], "Sidecars that were asked for their numbers: answered, failed."),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stand_once_and_help_texts_are_sentences() {
        let names: std::collections::HashSet<_> = ALL.iter().map(|m| m.name).collect();
        assert_eq!(names.len(), ALL.len());
        assert!(ALL.iter().all(|m| m.help.ends_with('.')));
    }
}

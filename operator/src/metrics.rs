//! The table of the operator's metrics. The registry is built from it, and `docs/reference/operator-metrics.md` is generated from it.

pub use kvcachepool_metrics::{Gauge, Metrics};
use kvcachepool_metrics::{Metric, counter, gauge, seconds};

/// A registry with every family of the table.
pub fn registry() -> Metrics {
    Metrics::of(ALL).with_process()
}

/// Around the target of 10 ms, and up to the API server's timeout.
const HANDLER: &[f64] = &[
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0,
];

/// From a pass without a write to one that waits for the API server repeatedly.
const RECONCILE: &[f64] = &[
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];

#[rustfmt::skip]
pub const ALL: &[Metric] = &[
    gauge("operator_build_info", &["version"], "Always 1; the label names the running binary."),
    gauge("operator_ready", &["part"], "1 if this part of /readyz is ready: certificate, pools, serving."),
    counter("injections_total", &["result", "reason"], "Answered admission reviews by result (injected, unchanged, refused, skipped) and reason: why the pod was not injected, or what an injected pod lacks. Dry runs are not counted."),
    seconds(HANDLER, "injection_seconds", &[], "Time from the last byte of an admission review to its answer."),
    counter("webhook_unreadable_total", &["reason"], "Requests to the webhook's port that were not a readable admission review, by reason."),
    counter("webhook_pool_reads_total", &["result"], "Reads of pools that were not in the webhook's cache: found, missing, failed."),
    gauge("pools_invalid", &[], "Stored pools that this version cannot read. Their pods start without a sidecar."),
    gauge("pools", &[], "Pools in the cache of the webhook."),
    counter("watch_errors_total", &["kind"], "Watches that failed and were restarted, by kind of the object."),
    gauge("http_connections", &["port"], "Open connections of a port: webhook or health."),
    counter("http_connections_ended_total", &["port", "reason"], "Connections that the operator closed or refused: full, displaced, handshake, request_time."),
    gauge("certificate_expiry_timestamp_seconds", &["certificate"], "Unix time at which a certificate of the webhook expires: leaf, authority."),
    counter("certificate_rotations_total", &["certificate"], "Certificates that were created or reloaded: leaf, authority."),
    counter("certificate_errors_total", &["step"], "Failed steps of certificate maintenance, which are retried: secret, configuration, sign, files, call."),
    gauge("leader", &[], "1 while this replica holds the lease."),
    counter("leader_transitions_total", &["to"], "Changes of this replica's leadership, by its new state: leading, following."),
    counter("canary_checks_total", &["result"], "Dry runs of a labelled pod by the leader: injected, webhook_unreachable, unknown."),
    counter("reconciles_total", &["result"], "Reconcile passes of a pool by the leader: done, failed."),
    seconds(RECONCILE, "reconcile_seconds", &[], "Duration of a reconcile pass, including its writes."),
    counter("status_writes_total", &[], "Writes of pools' statuses."),
    counter("evictions_total", &["result"], "Evictions of missed pods (`onMissed: Evict`): evicted, refused."),
    counter("injection_pauses_total", &["reason"], "Pauses of injection for an owner of pods, by cause. The leader pauses injection if the sidecar keeps pods from running."),
    counter("replacements_total", &["result"], "Replacements of pods that hang because of injection, so that their owner creates one without a sidecar: evicted, deleted, refused."),
    gauge("pool_condition", &["namespace", "pool", "condition"], "A condition of the pool, such as ready: 1 for True, 0 for False, no series for Unknown. Only the leader exports this and the other gauges of pools."),
    gauge("pool_injection_paused", &["namespace", "pool"], "Owners of pods for which injection is paused. A pause of the whole pool counts as 1."),
    gauge("pool_pods", &["namespace", "pool", "state"], "Pods of the pool, as in its status: matched, injected, attached, skipped, missed, outdated."),
    gauge("pool_pods_skipped", &["namespace", "pool", "reason"], "Pods without a sidecar by the ten most frequent reasons. Unknown reasons are other."),
    gauge("pool_hit_rate_ratio", &["namespace", "pool"], "Part of the requested tokens that came from the cache, from 0 to 1, within the window of the status. No series without requests."),
    gauge("pool_tier_ready", &["namespace", "pool", "tier"], "1 if the tier serves in all queried pods, 0 if it is degraded or unavailable, no series while its state is unknown."),
    gauge("pool_managed_servers", &["namespace", "pool", "state"], "Servers of `shared.redis.managed`: desired, ready."),
    counter("sidecar_questions_total", &["result"], "Queries of sidecars for their status: answered, failed."),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_help_texts_are_sentences() {
        let names: std::collections::HashSet<_> = ALL.iter().map(|m| m.name).collect();
        assert_eq!(names.len(), ALL.len());
        assert!(ALL.iter().all(|m| m.help.ends_with('.')));
    }
}

//! The gauges of a pool, from its status.

use crate::api::{KVCachePoolStatus, TierState};
use crate::inject::Reason;
use crate::metrics::{Gauge, Metrics};
use crate::pods::PoolRef;

/// Label value of reasons that this version does not know. Anybody can write the annotation of a pod.
const OTHER: &str = "other";

/// Replaces the gauges of a pool.
pub fn export(metrics: &Metrics, pool: &PoolRef, status: &KVCachePoolStatus) {
    metrics.replace_group(&pool.to_string(), &gauges(pool, status));
}

fn gauges<'a>(pool: &'a PoolRef, status: &'a KVCachePoolStatus) -> Vec<Gauge<'a>> {
    let mut gauges = Vec::new();
    let mut set = |name, label: Option<&'a str>, value: f64| {
        let labels = [&*pool.namespace, &*pool.name].into_iter().chain(label);
        gauges.push((name, labels.collect(), value));
    };
    for condition in &status.conditions {
        let value = match &*condition.status {
            "True" => 1.0,
            "False" => 0.0,
            _ => continue,
        };
        set("pool_condition", Some(&condition.type_), value);
    }
    let paused = status.injection_paused.as_ref();
    // A pause of the whole pool lists no owner.
    let paused = paused.map_or(0, |paused| paused.owners.len().max(1));
    set("pool_injection_paused", None, paused as f64);
    let pods = &status.pods;
    for (state, count) in [
        ("matched", pods.matched),
        ("injected", pods.injected),
        ("attached", pods.attached),
        ("skipped", pods.skipped),
        ("missed", pods.missed),
        ("outdated", pods.outdated),
    ] {
        set("pool_pods", Some(state), count as f64);
    }
    let mut unknown = 0;
    for skipped in &status.skipped {
        match Reason::ALL.iter().find(|r| r.name() == skipped.reason) {
            Some(reason) => set(
                "pool_pods_skipped",
                Some(reason.name()),
                skipped.count as f64,
            ),
            None => unknown += skipped.count,
        }
    }
    if unknown > 0 {
        set("pool_pods_skipped", Some(OTHER), unknown as f64);
    }
    if let Some(percent) = status.hit_rate_percent {
        set("pool_hit_rate_ratio", None, percent as f64 / 100.0);
    }
    for tier in &status.tiers {
        let value = match tier.state {
            TierState::Ready => 1.0,
            TierState::Degraded | TierState::Unavailable => 0.0,
            TierState::Stale | TierState::Unknown => continue,
        };
        set("pool_tier_ready", Some(&tier.name), value);
    }
    if let Some(servers) = &status.managed_servers {
        set(
            "pool_managed_servers",
            Some("desired"),
            servers.desired as f64,
        );
        set("pool_managed_servers", Some("ready"), servers.ready as f64);
    }
    gauges
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::registry;
    use serde_json::{Value, json};

    /// The exported lines of pool `n/p` with this status, without the labels of the pool.
    fn exported(status: Value) -> Vec<String> {
        let (metrics, pool) = (registry(), PoolRef::new("n", "p"));
        let status = serde_json::from_value(status).unwrap();
        export(&metrics, &pool, &status);
        let text = metrics.text();
        let lines = text
            .lines()
            .filter_map(|line| line.strip_prefix("kvcachepool_pool_"));
        lines
            .map(|line| {
                line.replace("{namespace=\"n\",pool=\"p\"", "{")
                    .replace("{,", "{")
            })
            .collect()
    }

    #[test]
    fn everything_that_the_status_says_is_exported() {
        let condition = |type_: &str, status: &str| json!({"type": type_, "status": status, "reason": "R", "message": "", "lastTransitionTime": "2026-01-02T03:04:05Z"});
        let lines = exported(json!({
            "conditions": [condition("Ready", "False"), condition("SharedTiersReady", "Unknown"), condition("Accepted", "True")],
            "injectionPaused": {"since": "2026-01-02T03:04:05Z"},
            "pods": {"matched": 9, "injected": 5, "attached": 4, "skipped": 3, "missed": 1, "outdated": 2},
            "skipped": [{"reason": "PortTaken", "count": 1}, {"reason": "x1", "count": 1}, {"reason": "x2", "count": 1}],
            "tiers": [{"name": "memory", "state": "Ready"}, {"name": "redis", "state": "Unavailable"}, {"name": "s3", "state": "Unknown"}],
            "managedServers": {"desired": 3, "ready": 2},
            "hitRatePercent": 25,
        }));
        insta::assert_yaml_snapshot!(lines);
    }

    #[test]
    fn a_pool_without_pods_has_no_rate_and_no_servers() {
        let lines = exported(json!({}));
        assert!(lines.iter().all(|line| line.ends_with(" 0")), "{lines:?}");
        assert_eq!(lines.len(), 7);
    }
}

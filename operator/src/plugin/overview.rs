//! Formats pools as text and JSON. Pure.

use super::read::Pools;
use super::table::table;
use crate::api::{KVCachePool, KVCachePoolStatus};
use crate::pods::{Pod, SidecarState};
use crate::status::{READY, condition};
use kube::ResourceExt;
use serde_json::{Value, json};

/// All pools, or one in detail.
pub fn text(seen: &Pools) -> String {
    if seen.pools.is_empty() && seen.broken.is_empty() {
        return "no KVCachePools found; -A lists those of all namespaces".to_owned();
    }
    let head = [
        "NAMESPACE",
        "NAME",
        "READY",
        "REASON",
        "PODS",
        "ATTACHED",
        "SKIPPED",
        "MISSED",
        "OUTDATED",
        "HIT-RATE",
    ];
    let mut rows: Vec<Vec<String>> = seen.pools.iter().map(row).collect();
    rows.extend(seen.broken.iter().map(|(name, error)| {
        vec![
            "?".to_owned(),
            name.clone(),
            "False".to_owned(),
            format!("Malformed: {error}"),
        ]
    }));
    let mut text = table(&head, &rows);
    if let (Some(pods), [pool]) = (&seen.pods, &*seen.pools) {
        details(pool, pods, &mut text);
    }
    text
}

/// The stored pools, and the state of their pods.
pub fn json(seen: &Pools) -> Value {
    let broken = seen
        .broken
        .iter()
        .map(|(name, error)| json!({"name": name, "error": error}));
    let mut out = json!({"pools": seen.pools, "malformed": broken.collect::<Vec<_>>()});
    if let Some(pods) = &seen.pods {
        let pods = pods
            .iter()
            .map(|p| json!({"name": p.name, "sidecar": sidecar(p), "reason": reason(p)}));
        out["pods"] = pods.collect();
    }
    out
}

fn status_of(pool: &KVCachePool) -> KVCachePoolStatus {
    pool.status.clone().unwrap_or_default()
}

fn row(pool: &KVCachePool) -> Vec<String> {
    let status = status_of(pool);
    let (ready, reason) = condition(&status.conditions, READY).map_or(
        (
            "Unknown",
            "no status yet; check that the operator runs and watches this namespace",
        ),
        |c| (&c.status, &c.reason),
    );
    let pods = &status.pods;
    vec![
        pool.namespace().unwrap_or_default(),
        pool.name_any(),
        ready.to_owned(),
        reason.to_owned(),
        pods.injected.to_string(),
        pods.attached.to_string(),
        pods.skipped.to_string(),
        pods.missed.to_string(),
        pods.outdated.to_string(),
        status
            .hit_rate_percent
            .map_or("-".to_owned(), |p| format!("{p}%")),
    ]
}

fn details(pool: &KVCachePool, pods: &[Pod], text: &mut String) {
    let status = status_of(pool);
    let mut part = |head: &[&str], rows: Vec<Vec<String>>| {
        if !rows.is_empty() {
            text.push('\n');
            text.push_str(&table(head, &rows));
        }
    };
    let conditions = status.conditions.iter();
    part(
        &["CONDITION", "STATUS", "REASON", "MESSAGE"],
        conditions
            .map(|c| {
                vec![
                    c.type_.clone(),
                    c.status.clone(),
                    c.reason.clone(),
                    c.message.clone(),
                ]
            })
            .collect(),
    );
    let size =
        |q: &Option<crate::api::Size>| q.as_ref().map_or("-".to_owned(), ToString::to_string);
    let tiers = status.tiers.iter();
    part(
        &["TIER", "STATE", "REASON", "USED", "CAPACITY"],
        tiers
            .map(|t| {
                vec![
                    t.name.clone(),
                    format!("{:?}", t.state),
                    t.reason.clone(),
                    size(&t.used),
                    size(&t.capacity),
                ]
            })
            .collect(),
    );
    let versions = status.versions.iter();
    part(
        &["VERSION", "PODS"],
        versions
            .map(|v| vec![v.version.clone(), v.pods.to_string()])
            .collect(),
    );
    part(
        &["POD", "SIDECAR", "REASON"],
        pods.iter()
            .map(|p| {
                vec![
                    p.name.to_string(),
                    sidecar(p).to_owned(),
                    reason(p).to_owned(),
                ]
            })
            .collect(),
    );
}

fn sidecar(pod: &Pod) -> &'static str {
    match pod.sidecar.as_ref().map(|s| &s.state) {
        None => "none",
        Some(SidecarState::Unseen) => "pending",
        Some(SidecarState::Waiting { .. }) => "waiting",
        Some(SidecarState::Running { .. }) => "running",
        Some(SidecarState::Terminated { .. }) => "ended",
    }
}

fn reason(pod: &Pod) -> &str {
    pod.fault()
        .map(|f| f.reason)
        .or(pod.refusal())
        .or(pod.shortfall())
        .unwrap_or_default()
}

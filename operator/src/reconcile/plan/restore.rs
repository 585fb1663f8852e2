//! Restores the state of an earlier leader from the pool's status, and detects statuses of other writers.

use crate::api::{KVCachePool, KVCachePoolStatus};
use crate::pods::{Breaker, Goal, Owner, StoredPause, Update};
use crate::status::{self, Reason};
use kube::ResourceExt;

/// The breaker of the previous leader. A pause for other settings is ignored.
pub fn restore_breaker(pool: &KVCachePool, hash: &str) -> Breaker {
    let paused = pool
        .status
        .as_ref()
        .and_then(|s| s.injection_paused.as_ref());
    let Some(paused) = paused.filter(|paused| paused.hash == hash) else {
        return Breaker::restored(hash, None, []);
    };
    let failures = |probes: i64| u32::try_from(probes).unwrap_or(0);
    let pool_pause = paused.owners.is_empty().then(|| StoredPause {
        owner: None,
        reason: "".into(),
        message: paused.message.as_str().into(),
        since: paused.since.0,
        probing: paused.trial,
        failures: failures(paused.failed_probes),
    });
    let owners = paused.owners.iter().map(|one| StoredPause {
        owner: (!one.uid.is_empty()).then(|| Owner {
            api_version: one.api_version.as_str().into(),
            kind: one.kind.as_str().into(),
            name: one.name.as_str().into(),
            uid: one.uid.as_str().into(),
        }),
        reason: one.reason.as_str().into(),
        message: one.message.as_str().into(),
        since: one.since.as_ref().unwrap_or(&paused.since).0,
        probing: one.trial,
        failures: failures(one.failed_probes),
    });
    Breaker::restored(hash, pool_pause, owners)
}

/// The current status: the last written one, or the stored one if it is newer.
pub fn current_status(
    written: Option<&(KVCachePoolStatus, String)>,
    pool: &KVCachePool,
) -> KVCachePoolStatus {
    let version = |text: &str| text.parse::<u64>().ok();
    let stored = || pool.status.clone().unwrap_or_default();
    let Some((written, at)) = written else {
        return stored();
    };
    match (
        version(&pool.resource_version().unwrap_or_default()),
        version(at),
    ) {
        (Some(stored_at), Some(at)) if stored_at >= at => stored(),
        _ => written.clone(),
    }
}

/// The update of the previous leader. Its rollback counts as long as the pool has not changed.
pub fn restore_update(pool: &KVCachePool, goal: &Goal<'_>) -> Update {
    let conditions = pool
        .status
        .as_ref()
        .map(|s| &*s.conditions)
        .unwrap_or_default();
    match status::condition(conditions, status::SIDECARS_READY) {
        Some(c)
            if c.reason == Reason::UpdateRolledBack.name()
                && c.observed_generation == pool.metadata.generation =>
        {
            Update::rolled_back(goal, &c.message)
        }
        _ => Update::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pods::Position;
    use serde_json::{Value, json};

    fn pool(version: &str, status: Value) -> KVCachePool {
        serde_json::from_value(json!({
            "apiVersion": "kvcachepool.io/v1alpha1", "kind": "KVCachePool",
            "metadata": {"name": "p", "namespace": "n", "resourceVersion": version},
            "spec": {"local": {"memory": {"perPod": "1Gi"}}},
            "status": status,
        }))
        .unwrap()
    }

    #[test]
    fn a_pause_is_restored_for_the_same_settings_only() {
        let since = "2026-01-01T00:00:00Z";
        let paused = |owners: Value, trial: bool| {
            let paused = json!({"hash": "h", "since": since, "trial": trial, "message": "m", "owners": owners});
            restore_breaker(&pool("7", json!({"injectionPaused": paused})), "h")
        };
        let pool_wide = paused(json!([]), true);
        assert_eq!(pool_wide.pool_pause().unwrap().position, Position::Probing);
        let owner = json!([{"kind": "Job", "name": "j", "uid": "u", "reason": "PodsRefused", "failedProbes": 2, "since": since}]);
        let one = paused(owner, false);
        assert!(one.pool_pause().is_none());
        let pause = one.owners()[0];
        assert_eq!(pause.position, Position::Paused { proven: true });
        assert_eq!((pause.failures, &*pause.cause.reason), (2, "PodsRefused"));
        assert_eq!(&*pause.owner.as_ref().unwrap().uid, "u");
        let status = json!({"injectionPaused": {"hash": "h", "since": since, "message": "m"}});
        assert!(restore_breaker(&pool("7", status), "edited").is_closed());
        assert!(restore_breaker(&pool("7", json!({})), "h").is_closed());
    }

    #[test]
    fn a_newer_stored_status_replaces_the_last_written_one() {
        let stored = pool("12", json!({"observedPods": 1}));
        let written_at = |version: &str| {
            let written = KVCachePoolStatus {
                observed_pods: Some(2),
                ..KVCachePoolStatus::default()
            };
            (written, version.to_owned())
        };
        for (written, observed) in [
            (None, 1),
            (Some(written_at("9")), 1),
            (Some(written_at("13")), 2),
            (Some(written_at("x")), 2),
        ] {
            assert_eq!(
                current_status(written.as_ref(), &stored).observed_pods,
                Some(observed)
            );
        }
    }
}

//! What is taken from the status of a pool: what the last leader knew, and what somebody else wrote.

use crate::api::{KVCachePool, KVCachePoolStatus};
use crate::pods::{Breaker, Goal, Update};
use crate::status::{self, Reason};
use kube::ResourceExt;

/// The breaker as the last leader left it in the status; other settings are no worse for what those of then were.
pub fn restored(pool: &KVCachePool, hash: &str) -> Breaker {
    let paused = pool
        .status
        .as_ref()
        .and_then(|s| s.injection_paused.as_ref());
    match paused {
        Some(paused) if paused.hash == hash => {
            Breaker::shut_since(paused.since.0, hash, paused.trial)
        }
        _ => Breaker::default(),
    }
}

/// The status as it stands: as it was written, or as the store has it since somebody else wrote it.
pub fn last(
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

/// The update as the last leader left it in the status, if the pool is still the same.
pub fn rolled_back(pool: &KVCachePool, goal: &Goal<'_>) -> Update {
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
    use crate::pods::Door;
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
    fn a_door_stays_shut_for_the_settings_that_shut_it() {
        let paused = |trial: bool| {
            let since = "2026-01-01T00:00:00Z";
            let paused = json!({"hash": "h", "since": since, "trial": trial, "message": "m"});
            pool("7", json!({"injectionPaused": paused}))
        };
        let door = |pool: &KVCachePool, hash: &str| restored(pool, hash).door().clone();
        assert!(matches!(door(&paused(false), "h"), Door::Shut(_)));
        assert!(matches!(door(&paused(true), "h"), Door::Ajar(_)));
        assert_eq!(door(&paused(false), "edited"), Door::Open);
        assert_eq!(door(&pool("7", json!({})), "h"), Door::Open);
    }

    #[test]
    fn what_somebody_else_wrote_counts_and_what_is_older_than_our_own_does_not() {
        let stored = pool("12", json!({"observedPods": 1}));
        let ours = |version: &str| {
            let written = KVCachePoolStatus {
                observed_pods: Some(2),
                ..KVCachePoolStatus::default()
            };
            (written, version.to_owned())
        };
        for (written, observed) in [
            (None, 1),
            (Some(ours("9")), 1),
            (Some(ours("13")), 2),
            (Some(ours("x")), 2),
        ] {
            assert_eq!(
                last(written.as_ref(), &stored).observed_pods,
                Some(observed)
            );
        }
    }
}

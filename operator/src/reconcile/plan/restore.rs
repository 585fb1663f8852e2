//! Reads back from the status of a pool what an earlier leader knew, and what somebody else wrote.

use crate::api::{KVCachePool, KVCachePoolStatus};
use crate::pods::{Breaker, Goal, Kept, Owner, Update};
use crate::status::{self, Reason};
use kube::ResourceExt;

/// The breaker as the last leader left it in the status; a pause for other settings does not count.
pub fn restored(pool: &KVCachePool, hash: &str) -> Breaker {
    let paused = pool
        .status
        .as_ref()
        .and_then(|s| s.injection_paused.as_ref());
    let Some(paused) = paused.filter(|paused| paused.hash == hash) else {
        return Breaker::restored(hash, None, []);
    };
    let failures = |probes: i64| u32::try_from(probes).unwrap_or(0);
    let whole = paused.owners.is_empty().then(|| Kept {
        owner: None,
        reason: "".into(),
        message: paused.message.as_str().into(),
        since: paused.since.0,
        probing: paused.trial,
        failures: failures(paused.failed_probes),
    });
    let owners = paused.owners.iter().map(|one| Kept {
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
    Breaker::restored(hash, whole, owners)
}

/// The current status: the written one, or the stored one if somebody else wrote it since.
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
    fn a_pause_outlives_its_leader_for_the_settings_that_it_is_for() {
        let since = "2026-01-01T00:00:00Z";
        let paused = |owners: Value, trial: bool| {
            let paused = json!({"hash": "h", "since": since, "trial": trial, "message": "m", "owners": owners});
            restored(&pool("7", json!({"injectionPaused": paused})), "h")
        };
        let whole = paused(json!([]), true);
        assert_eq!(whole.whole().unwrap().position, Position::Probing);
        let owner = json!([{"kind": "Job", "name": "j", "uid": "u", "reason": "PodsRefused", "failedProbes": 2, "since": since}]);
        let one = paused(owner, false);
        assert!(one.whole().is_none());
        let pause = one.owners()[0];
        assert_eq!(pause.position, Position::Paused { proven: true });
        assert_eq!((pause.failures, &*pause.cause.reason), (2, "PodsRefused"));
        assert_eq!(&*pause.owner.as_ref().unwrap().uid, "u");
        let status = json!({"injectionPaused": {"hash": "h", "since": since, "message": "m"}});
        assert!(restored(&pool("7", status), "edited").is_closed());
        assert!(restored(&pool("7", json!({})), "h").is_closed());
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

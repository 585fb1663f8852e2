//! The injection breaker, as the webhook sees it. The leader opens and shuts it by watching pods; every replica learns of its position
//! from the condition `InjectionReady` of the pool in its cache.

use crate::api::KVCachePool;
use crate::status::{INJECTION_READY, Reason};
use kube::ResourceExt;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Between two pods that this replica lets through on trial: long enough for the leader to see the first one and to say so.
const TRIAL_EVERY: Duration = Duration::from_secs(60);

/// What this replica has let through.
#[derive(Debug, Default)]
pub struct Breaker {
    /// By namespace and name of the pool.
    tried: Mutex<HashMap<(String, String), Instant>>,
}

impl Breaker {
    /// Why this pod of the pool is not injected; `None`: it is. A dry run uses no trial up.
    pub fn refuses(&self, pool: &KVCachePool, dry_run: bool, now: Instant) -> Option<String> {
        let conditions = &pool.status.as_ref()?.conditions;
        let closed = conditions
            .iter()
            .find(|c| c.type_ == INJECTION_READY && c.status == "False")?;
        if closed.reason == Reason::SidecarCannotStart.name() {
            return Some(closed.message.clone());
        }
        if closed.reason != Reason::TryingOnePod.name() {
            return None;
        }
        let mut tried = self.tried.lock();
        tried.retain(|_, at| now.duration_since(*at) < TRIAL_EVERY);
        let pool = (pool.namespace().unwrap_or_default(), pool.name_any());
        if tried.contains_key(&pool) {
            return Some(format!("one pod is on trial; {}", closed.message));
        }
        if !dry_run {
            tried.insert(pool, now);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pool(status: &str, reason: &str) -> KVCachePool {
        serde_json::from_value(json!({
            "apiVersion": "kvcachepool.io/v1alpha1",
            "kind": "KVCachePool",
            "metadata": {"name": "p", "namespace": "n"},
            "spec": {"local": {"memory": {"perPod": "1Gi"}}},
            "status": {"conditions": [{
                "type": "InjectionReady", "status": status, "reason": reason, "message": "no such image",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }]},
        }))
        .unwrap()
    }

    #[test]
    fn only_the_breaker_keeps_pods_from_injection() {
        let (breaker, now) = (Breaker::default(), Instant::now());
        let shut = pool("False", "SidecarCannotStart");
        assert_eq!(breaker.refuses(&shut, false, now).unwrap(), "no such image");
        for (status, reason) in [
            ("True", "WebhookAnswers"),
            ("False", "WebhookUnreachable"),
            ("Unknown", "CanaryPending"),
        ] {
            assert_eq!(
                breaker.refuses(&pool(status, reason), false, now),
                None,
                "{reason}"
            );
        }
    }

    #[test]
    fn on_trial_one_pod_passes_a_minute_and_dry_runs_do_not_count() {
        let (breaker, now) = (Breaker::default(), Instant::now());
        let ajar = pool("False", "TryingOnePod");
        assert_eq!(breaker.refuses(&ajar, true, now), None);
        assert_eq!(breaker.refuses(&ajar, false, now), None);
        assert!(
            breaker
                .refuses(&ajar, false, now)
                .unwrap()
                .contains("one pod is on trial")
        );
        assert!(breaker.refuses(&ajar, true, now).is_some());
        assert_eq!(breaker.refuses(&ajar, false, now + TRIAL_EVERY), None);
    }
}

//! The injection breaker, as the webhook sees it. The leader opens and shuts it by watching pods; every replica learns of its position
//! from `status.injectionPaused` of the pool in its cache.

use crate::api::{InjectionPaused, KVCachePool};
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
    /// Why a pod of the pool that would get settings of this hash is not injected; `None`: it is.
    pub fn refuses(
        &self,
        pool: &KVCachePool,
        hash: impl FnOnce() -> String,
        now: Instant,
    ) -> Option<String> {
        let paused = paused(pool)?;
        if paused.hash != hash() {
            return None;
        }
        if !paused.trial {
            return Some(paused.message.clone());
        }
        let mut tried = self.tried.lock();
        tried.retain(|_, at| now.duration_since(*at) < TRIAL_EVERY);
        tried
            .contains_key(&key(pool))
            .then(|| format!("one pod is on trial; {}", paused.message))
    }

    /// A pod of the pool was injected, and will be stored.
    pub fn injected(&self, pool: &KVCachePool, now: Instant) {
        if paused(pool).is_some_and(|p| p.trial) {
            self.tried.lock().insert(key(pool), now);
        }
    }
}

fn paused(pool: &KVCachePool) -> Option<&InjectionPaused> {
    pool.status.as_ref()?.injection_paused.as_ref()
}

fn key(pool: &KVCachePool) -> (String, String) {
    (pool.namespace().unwrap_or_default(), pool.name_any())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A pool whose condition tells of something else, as it does while the webhook cannot be reached either.
    fn pool(paused: serde_json::Value) -> KVCachePool {
        serde_json::from_value(json!({
            "apiVersion": "kvcachepool.io/v1alpha1",
            "kind": "KVCachePool",
            "metadata": {"name": "p", "namespace": "n"},
            "spec": {"local": {"memory": {"perPod": "1Gi"}}},
            "status": {
                "conditions": [{
                    "type": "InjectionReady", "status": "False", "reason": "WebhookUnreachable", "message": "",
                    "lastTransitionTime": "2026-01-01T00:00:00Z",
                }],
                "injectionPaused": paused,
            },
        }))
        .unwrap()
    }

    fn paused(trial: bool) -> KVCachePool {
        pool(
            json!({"hash": "h", "since": "2026-01-01T00:00:00Z", "trial": trial, "message": "no such image"}),
        )
    }

    #[test]
    fn only_the_breaker_keeps_pods_of_the_same_settings_from_injection() {
        let (breaker, now) = (Breaker::default(), Instant::now());
        let shut = paused(false);
        let of = |hash: &str| hash.to_owned();
        let refused = breaker.refuses(&shut, || of("h"), now);
        assert_eq!(refused.unwrap(), "no such image");
        let edited = breaker.refuses(&shut, || of("other"), now);
        assert_eq!(edited, None);
        let open = pool(json!(null));
        assert_eq!(breaker.refuses(&open, || of("h"), now), None);
    }

    #[test]
    fn on_trial_one_pod_that_is_injected_passes_a_minute() {
        let (breaker, now) = (Breaker::default(), Instant::now());
        let ajar = paused(true);
        for _ in 0..2 {
            let refused = breaker.refuses(&ajar, || "h".to_owned(), now);
            assert_eq!(refused, None, "none was injected yet");
        }
        breaker.injected(&ajar, now);
        let said = breaker.refuses(&ajar, || "h".to_owned(), now).unwrap();
        assert!(said.contains("one pod is on trial"), "{said}");
        assert_eq!(
            breaker.refuses(&ajar, || "h".to_owned(), now + TRIAL_EVERY),
            None
        );
        breaker.injected(&pool(json!(null)), now);
        assert_eq!(breaker.tried.lock().len(), 0, "only trials are remembered");
    }
}

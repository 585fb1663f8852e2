//! The breaker in the webhook. The leader pauses and resumes injection based on pods. Every replica reads the pauses from
//! `status.injectionPaused` of the cached pool.

use crate::api::{InjectionPaused, KVCachePool};
use kube::ResourceExt;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Minimum interval between two probes of one owner by this replica. It is long enough for the leader to see the first one and update the
/// status.
const PROBE_EVERY: Duration = Duration::from_secs(60);

/// The probes that this replica has injected.
#[derive(Debug, Default)]
pub struct Breaker(Mutex<HashMap<Key, Instant>>);

/// Namespace and name of the pool, and uid of the owner; empty for the whole pool and for pods without an owner.
type Key = (String, String, String);

/// The pause of an owner in the status.
struct Paused<'a> {
    trial: bool,
    message: &'a str,
    owner: &'a str,
}

impl Breaker {
    /// Why a pod of this owner with settings of this hash is not injected. `None` if it is.
    pub fn refuses(
        &self,
        pool: &KVCachePool,
        owner: &str,
        hash: impl FnOnce() -> String,
        now: Instant,
    ) -> Option<String> {
        let status = status(pool)?;
        let paused = paused(status, owner)?;
        if status.hash != hash() {
            return None;
        }
        if !paused.trial {
            return Some(paused.message.to_owned());
        }
        let mut probes = self.0.lock();
        probes.retain(|_, at| now.duration_since(*at) < PROBE_EVERY);
        probes
            .contains_key(&key(pool, &paused))
            .then(|| format!("another pod is the probe; {}", paused.message))
    }

    /// Records that a pod of this owner was injected and will be stored.
    pub fn injected(&self, pool: &KVCachePool, owner: &str, now: Instant) {
        let paused = status(pool).and_then(|status| paused(status, owner));
        if let Some(paused) = paused.filter(|p| p.trial) {
            self.0.lock().insert(key(pool, &paused), now);
        }
    }
}

fn status(pool: &KVCachePool) -> Option<&InjectionPaused> {
    pool.status.as_ref()?.injection_paused.as_ref()
}

fn paused<'a>(status: &'a InjectionPaused, owner: &str) -> Option<Paused<'a>> {
    if status.owners.is_empty() {
        return Some(Paused {
            trial: status.trial,
            message: &status.message,
            owner: "",
        });
    }
    let found = status.owners.iter().find(|one| one.uid == owner)?;
    Some(Paused {
        trial: found.trial,
        message: &found.message,
        owner: &found.uid,
    })
}

fn key(pool: &KVCachePool, paused: &Paused<'_>) -> Key {
    let namespace = pool.namespace().unwrap_or_default();
    (namespace, pool.name_any(), paused.owner.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A pool whose condition reports another reason, as it does while the webhook is unreachable.
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
    fn a_pause_applies_only_to_the_same_settings() {
        let (breaker, now) = (Breaker::default(), Instant::now());
        let shut = paused(false);
        let refused = breaker.refuses(&shut, "r", || "h".to_owned(), now);
        assert_eq!(refused.unwrap(), "no such image");
        let edited = breaker.refuses(&shut, "r", || "other".to_owned(), now);
        assert_eq!(edited, None);
        let open = pool(json!(null));
        assert_eq!(breaker.refuses(&open, "r", || "h".to_owned(), now), None);
    }

    #[test]
    fn a_pause_of_one_owner_applies_only_to_its_pods() {
        let (breaker, now) = (Breaker::default(), Instant::now());
        let since = "2026-01-01T00:00:00Z";
        let one = pool(
            json!({"hash": "h", "since": since, "message": "m", "owners": [
                {"kind": "ReplicaSet", "name": "web", "uid": "r", "since": since, "message": "no such image"},
                {"kind": "Job", "name": "j", "uid": "j", "since": since, "trial": true, "message": "exceeded quota"},
            ]}),
        );
        let refused = |owner: &str| breaker.refuses(&one, owner, || "h".to_owned(), now);
        assert_eq!(refused("r").unwrap(), "no such image");
        assert_eq!(
            (refused("j"), refused("other"), refused("")),
            (None, None, None)
        );
        breaker.injected(&one, "j", now);
        breaker.injected(&one, "other", now);
        assert!(refused("j").unwrap().contains("another pod is the probe"));
        assert_eq!(refused("other"), None);
    }

    #[test]
    fn one_probe_per_minute_is_injected() {
        let (breaker, now) = (Breaker::default(), Instant::now());
        let trial = paused(true);
        for _ in 0..2 {
            let refused = breaker.refuses(&trial, "r", || "h".to_owned(), now);
            assert_eq!(refused, None, "none was injected yet");
        }
        breaker.injected(&trial, "r", now);
        let message = breaker
            .refuses(&trial, "s", || "h".to_owned(), now)
            .unwrap();
        assert!(message.contains("another pod is the probe"), "{message}");
        assert_eq!(
            breaker.refuses(&trial, "r", || "h".to_owned(), now + PROBE_EVERY),
            None
        );
        breaker.injected(&pool(json!(null)), "r", now);
        assert_eq!(breaker.0.lock().len(), 0, "only probes are remembered");
    }
}

//! Upgrades of managed servers that the operator itself causes, such as by another default image. A replaced server loses its chunks, so only
//! one pool at a time gets its upgrade, and its StatefulSet replaces one server at a time. An upgrade that does not succeed stops those of
//! other pools. All state is in the StatefulSets, so the next leader continues.

use super::backoff::jitter;
use crate::names;
use crate::pods::PoolRef;
use crate::scope::Scope;
use k8s_openapi::api::apps::v1::StatefulSet;
use kube::api::ListParams;
use kube::{Client, ResourceExt};
use std::time::{Duration, Instant};
use tokio::sync::{Mutex, MutexGuard};
use tracing::info;

/// Interval between two lists of all servers while an upgrade is in progress.
const CHECK_INTERVAL: Duration = Duration::from_secs(3);
/// Longest time until a waiting pool asks again.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// Serializes upgrades. Holds the time of the last list that found one in progress.
#[derive(Debug, Default)]
pub struct Upgrades(Mutex<Option<Instant>>);

/// Whether a pool may upgrade its servers now.
#[derive(Debug)]
pub enum Turn<'a> {
    /// It may, while this is held.
    Now(MutexGuard<'a, Option<Instant>>),
    /// Another pool upgrades. Ask again after this time.
    Later(Duration),
}

impl Upgrades {
    /// The turn of a pool. Errors: the StatefulSets cannot be listed.
    pub async fn turn(
        &self,
        pool: &PoolRef,
        client: &Client,
        scope: &Scope,
    ) -> Result<Turn<'_>, kube::Error> {
        let later = || Turn::Later(jitter(WAIT_MAX));
        let Ok(mut checked) = self.0.try_lock() else {
            return Ok(later());
        };
        if checked.is_some_and(|at| at.elapsed() < CHECK_INTERVAL) {
            return Ok(later());
        }
        let labels = format!("app.kubernetes.io/managed-by={}", names::FIELD_MANAGER);
        let params = ListParams::default().labels(&labels);
        for api in scope.apis::<StatefulSet>(client) {
            let sets = api.list(&params).await?;
            let mut others = sets.items.iter().filter(|set| !is_of(set, pool));
            if let Some(set) = others.find(|set| is_upgrading(set)) {
                let (namespace, name) = (set.namespace().unwrap_or_default(), set.name_any());
                info!(%pool, %namespace, name, reason = "another pool's servers are being replaced", "upgrade of managed servers waits");
                *checked = Some(Instant::now());
                return Ok(later());
            }
        }
        *checked = None;
        Ok(Turn::Now(checked))
    }
}

fn is_of(set: &StatefulSet, pool: &PoolRef) -> bool {
    let name = set.labels().get(names::POOL).map(String::as_str);
    set.namespace().as_deref() == Some(&*pool.namespace) && name == Some(&*pool.name)
}

/// Whether the servers of a StatefulSet are being replaced: its controller has not seen the last change, or not all servers that it replaced
/// are ready.
fn is_upgrading(set: &StatefulSet) -> bool {
    let Some(status) = &set.status else {
        return true;
    };
    status.observed_generation < set.metadata.generation
        || status.current_revision != status.update_revision
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn set(status: Value) -> StatefulSet {
        let labels = json!({"kvcachepool.io/pool": "demo"});
        let metadata = json!({"name": "kvcachepool-demo", "namespace": "n", "generation": 3, "labels": labels});
        serde_json::from_value(json!({"metadata": metadata, "status": status})).unwrap()
    }

    #[test]
    fn servers_are_being_replaced_until_all_of_the_last_revision_are_ready() {
        let of = |observed: i64, current: &str, update: &str| {
            let revisions = json!({"currentRevision": current, "updateRevision": update});
            let mut status = revisions;
            status["observedGeneration"] = observed.into();
            status["replicas"] = 2.into();
            is_upgrading(&set(status))
        };
        assert!(!of(3, "a", "a"));
        assert!(of(2, "a", "a"), "the controller has not seen the change");
        assert!(of(3, "a", "b"), "a server is not replaced, or not ready");
        assert!(is_upgrading(&set(Value::Null)));
    }

    #[test]
    fn a_pools_own_servers_do_not_keep_it_from_its_turn() {
        let set = set(json!({"replicas": 0}));
        assert!(is_of(&set, &PoolRef::new("n", "demo")));
        assert!(!is_of(&set, &PoolRef::new("m", "demo")));
        assert!(!is_of(&set, &PoolRef::new("n", "other")));
    }
}

//! The managed servers of a pool: standalone, each with its part of the chunks, without persistence. Sidecars reach them by the stable
//! names of a StatefulSet's pods. The loss of a server loses its part. The wire protocol is not part of this module.

mod disruption_budget;
mod network_policy;
mod password;
mod service;
mod stateful_set;

pub use password::{CERTIFICATE, password, secret_name};

use super::object;
use crate::api::{KVCachePool, ManagedRedis};
use crate::defaults::Defaults;
use crate::names;
use k8s_openapi::Resource;
use kube::ResourceExt;
use kube::api::{DynamicObject, TypeMeta};
use serde_json::{Value, json};

pub const PORT: u16 = 6379;
const PORT_NAME: &str = "redis";

/// The objects of a pool's servers, except the password, which is created once.
pub(super) fn objects(
    pool: &KVCachePool,
    redis: &ManagedRedis,
    defaults: &Defaults,
) -> Vec<DynamicObject> {
    vec![
        service::service(pool),
        network_policy::network_policy(pool),
        disruption_budget::disruption_budget(pool),
        stateful_set::stateful_set(pool, redis, defaults),
    ]
}

/// The managed servers of this pool, if any.
pub fn managed(pool: &KVCachePool) -> Option<&ManagedRedis> {
    pool.spec.shared.redis.as_ref()?.managed.as_ref()
}

/// Addresses of the servers. Chunks are spread by these names, so adding or removing a server moves only its own part.
pub(super) fn urls(pool: &KVCachePool, redis: &ManagedRedis) -> Vec<String> {
    let (name, domain) = (name(pool), domain(pool));
    let scheme = if redis.tls { "rediss" } else { "redis" };
    (0..redis.shards)
        .map(|shard| format!("{scheme}://{name}-{shard}.{domain}:{PORT}"))
        .collect()
}

/// Domain of the servers' names. Without the cluster's domain, which is in every pod's search list.
fn domain(pool: &KVCachePool) -> String {
    let (name, namespace) = (name(pool), pool.namespace().unwrap_or_default());
    format!("{name}.{namespace}.svc")
}

/// Names in the servers' certificate.
fn server_names(pool: &KVCachePool) -> Vec<String> {
    vec![format!("*.{}", domain(pool))]
}

/// Name of all objects. With a pool's longest name it is as long as the name of a StatefulSet may be, whose pods have it with a hash in a
/// label.
fn name(pool: &KVCachePool) -> String {
    format!("kvcachepool-{}", pool.name_any())
}

/// Labels of the servers' pods. They exclude the pool's own label, which would cause injection.
fn selector(pool: &KVCachePool) -> Value {
    json!({
        (names::NAME): names::SERVERS,
        (names::INSTANCE): pool.name_any(),
    })
}

fn child<K: Resource>(pool: &KVCachePool, spec: Value) -> DynamicObject {
    let types = TypeMeta {
        api_version: K::API_VERSION.to_string(),
        kind: K::KIND.to_string(),
    };
    object(pool, types, name(pool), json!({"spec": spec}))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desired::desired;
    use crate::desired::tests::{defaults, pool};

    /// The pool with these keys of `managed`.
    pub fn managing(managed: Value) -> KVCachePool {
        let mut redis = json!({"managed": {"memoryPerShard": "16Gi"}});
        json_patch::merge(&mut redis["managed"], &managed);
        pool(json!({"shared": {"redis": redis}}))
    }

    pub fn of(pool: &KVCachePool, kind: &str) -> DynamicObject {
        let objects = desired(pool, &defaults()).unwrap();
        let is = |object: &DynamicObject| object.types.as_ref().unwrap().kind == kind;
        objects.into_iter().find(is).unwrap()
    }

    #[test]
    fn shards_have_stable_names() {
        let of = |shards: i64| {
            let pool = managing(json!({"shards": shards}));
            urls(&pool, managed(&pool).unwrap())
        };
        assert_eq!(
            of(1),
            ["redis://kvcachepool-llama-0.kvcachepool-llama.serving.svc:6379"]
        );
        assert_eq!(of(3)[..2], of(2));
        let pool = managing(json!({"tls": true}));
        assert_eq!(
            urls(&pool, managed(&pool).unwrap()),
            ["rediss://kvcachepool-llama-0.kvcachepool-llama.serving.svc:6379"]
        );
    }

    #[test]
    fn another_number_of_shards_changes_only_the_replicas() {
        let [one, three] = [1, 3].map(|shards| managing(json!({"shards": shards})));
        for kind in ["Service", "NetworkPolicy", "PodDisruptionBudget"] {
            assert_eq!(of(&one, kind), of(&three, kind));
        }
        let mut set = of(&one, "StatefulSet");
        set.data["spec"]["replicas"] = 3.into();
        assert_eq!(set, of(&three, "StatefulSet"));
    }

    #[test]
    fn managed_servers_have_no_pool_label() {
        let pool = managing(json!({}));
        let labels = &of(&pool, "StatefulSet").data["spec"]["template"]["metadata"]["labels"];
        assert_eq!(
            labels.get(crate::names::POOL),
            None,
            "they would be injected"
        );
    }

    #[test]
    fn the_longest_pool_name_leaves_room_for_suffixes_of_kubernetes() {
        let mut pool = managing(json!({}));
        pool.metadata.name = Some("a".repeat(40));
        let set = name(&pool);
        assert!(
            format!("{set}-0123456789").len() <= 63,
            "a label of its pods"
        );
        assert!(format!("{set}-255").len() <= 63, "a pod's name in DNS");
    }
}

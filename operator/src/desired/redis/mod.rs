//! The managed servers of a pool: standalone, each with its part of the chunks, or one Redis Cluster with a manager pod. Sidecars reach them by the stable names of a StatefulSet's pods. The wire protocol is not part of this module.

mod disruption_budget;
mod manager;
mod network_policy;
mod password;
mod server;
mod service;
mod stateful_set;

pub use password::{CERTIFICATE, Random, password, secret_name};
pub use stateful_set::with_servers;

use super::object;
use crate::api::{KVCachePool, ManagedRedis, RedisMode};
use crate::defaults::Defaults;
use crate::inject::Settings;
use crate::names;
use k8s_openapi::Resource;
use kube::ResourceExt;
use kube::api::{DynamicObject, TypeMeta};
use serde_json::{Value, json};

pub const PORT: u16 = 6379;
const PORT_NAME: &str = "redis";
/// Port of the servers' own traffic in a cluster: always 10,000 above.
const BUS_PORT: u16 = PORT + 10_000;
/// Port of an exporter's metrics, and its name.
const METRICS_PORT: u16 = 9121;
pub(super) const METRICS_PORT_NAME: &str = "metrics";
/// User of the manager, and of servers that log in to each other.
const MANAGER: &str = "manager";
/// Servers of a cluster in a sidecar's config. The sidecar learns the others from them. Few, so that most changes of `shards` do not change
/// the config, and that the longest names fit into a URL.
const SEEDS: i64 = 5;

/// The objects of a pool's servers, except the password, which is created once.
pub(super) fn objects(
    pool: &KVCachePool,
    redis: &ManagedRedis,
    settings: &Settings,
    defaults: &Defaults,
) -> Vec<DynamicObject> {
    let mut objects = vec![
        service::service(pool),
        network_policy::network_policy(pool, redis),
        disruption_budget::disruption_budget(pool),
        stateful_set::stateful_set(pool, redis, defaults),
    ];
    objects.extend(is_cluster(redis).then(|| manager::manager(pool, redis, settings)));
    objects
}

/// Sets these fields of a pod as the pool has them, and the pull secrets.
fn set_given(spec: &mut Value, redis: &ManagedRedis, keys: &[&str], pull_secrets: &[String]) {
    // Fields that the pool does not set are absent.
    let given = json!(redis);
    for key in keys {
        if let Some(value) = given.get(key) {
            spec[*key] = value.clone();
        }
    }
    if !pull_secrets.is_empty() {
        let secrets = pull_secrets.iter().map(|name| json!({"name": name}));
        spec["imagePullSecrets"] = secrets.collect();
    }
}

/// The metadata of a pod. The pool cannot change what the operator sets.
fn pod_metadata(redis: &ManagedRedis, own: Value) -> Value {
    let mut metadata = json!(redis.metadata);
    json_patch::merge(&mut metadata, &own);
    metadata
}

/// The security context of a container that writes nothing to its image.
fn security_context() -> Value {
    json!({
        "allowPrivilegeEscalation": false,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": true,
    })
}

/// The managed servers of this pool, if any.
pub fn managed(pool: &KVCachePool) -> Option<&ManagedRedis> {
    pool.spec.shared.redis.as_ref()?.managed.as_ref()
}

/// Whether the servers form a cluster.
pub fn is_cluster(redis: &ManagedRedis) -> bool {
    redis.mode == RedisMode::Cluster
}

/// Number of servers, with replicas.
pub fn servers(redis: &ManagedRedis) -> i64 {
    redis.shards * (1 + redis.replicas_per_shard)
}

/// The shape that a manager gives its cluster: shards, and servers of each.
pub fn shape(redis: &ManagedRedis) -> String {
    format!("{}x{}", redis.shards, 1 + redis.replicas_per_shard)
}

/// Name of the manager's Deployment. Kubernetes shortens the names of its pods if needed.
pub fn manager_name(pool: &KVCachePool) -> String {
    format!("{}-cluster", name(pool))
}

/// URLs of the servers. Chunks are spread over standalone servers by these names, so adding or removing a server moves only its own part.
pub(super) fn urls(pool: &KVCachePool, redis: &ManagedRedis) -> Vec<String> {
    if is_cluster(redis) {
        let seeds: Vec<String> = addresses(pool, servers(redis).min(SEEDS)).collect();
        let tls = if redis.tls { "?tls=true" } else { "" };
        return vec![format!("redis-cluster://{}{tls}", seeds.join(","))];
    }
    let scheme = if redis.tls { "rediss" } else { "redis" };
    addresses(pool, redis.shards)
        .map(|address| format!("{scheme}://{address}"))
        .collect()
}

/// Host and port of the first servers.
fn addresses(pool: &KVCachePool, number: i64) -> impl Iterator<Item = String> {
    let (name, domain) = (name(pool), domain(pool));
    (0..number).map(move |server| format!("{name}-{server}.{domain}:{PORT}"))
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
pub(super) fn selector(pool: &KVCachePool) -> Value {
    json!({
        (names::NAME): names::SERVERS,
        (names::INSTANCE): pool.name_any(),
    })
}

/// Labels of the manager's pod.
fn manager_selector(pool: &KVCachePool) -> Value {
    json!({
        (names::NAME): names::MANAGER,
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

    /// The pool with a cluster of this shape.
    pub fn cluster(shards: i64, replicas: i64) -> KVCachePool {
        managing(json!({"mode": "Cluster", "shards": shards, "replicasPerShard": replicas}))
    }

    #[test]
    fn sidecars_get_a_few_servers_of_a_cluster_whatever_its_size() {
        let urls = |pool: &KVCachePool| urls(pool, managed(pool).unwrap());
        let host = |n: u8| format!("kvcachepool-llama-{n}.kvcachepool-llama.serving.svc:6379");
        let hosts = [0, 1, 2].map(host).join(",");
        assert_eq!(urls(&cluster(3, 0)), [format!("redis-cluster://{hosts}")]);
        assert_eq!(urls(&cluster(3, 1)), urls(&cluster(64, 3)));
        let mut pool = managing(json!({"mode": "Cluster", "shards": 9, "tls": true}));
        pool.metadata.name = Some("a".repeat(40));
        pool.metadata.namespace = Some("b".repeat(63));
        let url = &urls(&pool)[0];
        assert!(url.ends_with(".svc:6379?tls=true"));
        assert!(url.len() <= kvcachepool_protocol::config::URL_BYTES);
    }

    #[test]
    fn another_number_of_shards_changes_the_servers_and_the_manager_only() {
        let [three, four] = [3, 4].map(|shards| cluster(shards, 1));
        for kind in ["Service", "NetworkPolicy", "PodDisruptionBudget"] {
            assert_eq!(of(&three, kind), of(&four, kind));
        }
        let set = |pool| of(pool, "StatefulSet").data["spec"]["template"].clone();
        assert_eq!(set(&three), set(&four), "no server is restarted");
        assert_eq!(of(&four, "StatefulSet").data["spec"]["replicas"], 8);
        assert_ne!(of(&three, "Deployment"), of(&four, "Deployment"));
    }

    #[test]
    fn standalone_servers_have_no_manager() {
        let objects = desired(&managing(json!({"shards": 3})), &defaults()).unwrap();
        let kinds = objects
            .iter()
            .map(|o| o.types.as_ref().unwrap().kind.as_str());
        assert!(!kinds.into_iter().any(|kind| kind == "Deployment"));
    }

    #[test]
    fn managed_servers_have_no_pool_label_and_the_manager_is_no_server() {
        let pool = cluster(3, 1);
        let labels = |kind: &str| {
            let mut object = of(&pool, kind);
            object.data["spec"]["template"]["metadata"]["labels"].take()
        };
        for kind in ["StatefulSet", "Deployment"] {
            assert_eq!(
                labels(kind).get(crate::names::POOL),
                None,
                "they would be injected"
            );
        }
        assert_ne!(labels("StatefulSet"), labels("Deployment"));
    }

    #[test]
    fn all_pods_get_the_labels_and_annotations_of_the_pool_besides_those_of_the_operator() {
        let keys = json!({"team": "search", "sidecar.istio.io/inject": "false"});
        let given = json!({"labels": keys, "annotations": keys});
        let pool = managing(json!({"mode": "Cluster", "shards": 3, "metadata": given}));
        for kind in ["StatefulSet", "Deployment"] {
            let metadata =
                |pool: &KVCachePool| of(pool, kind).data["spec"]["template"]["metadata"].take();
            let mut expected = given.clone();
            json_patch::merge(&mut expected, &metadata(&cluster(3, 0)));
            assert_eq!(metadata(&pool), expected);
        }
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
        assert!(manager_name(&pool).len() <= 63);
    }
}

//! The servers: Valkey or Redis, admitted by Pod Security `restricted`, with a memory limit that they keep by evicting.

use super::password::secret_name;
use super::server::{self, DATA_PATH, EXPORTER_PATH, NODE_NAME, POD_NAME, RUN_PATH, SECRET_PATH};
use super::{
    METRICS_PORT, METRICS_PORT_NAME, child, is_cluster, name, pod_metadata, security_context,
    selector, servers, set_given,
};
use crate::api::{Exporter, KVCachePool, ManagedRedis, Persistence};
use crate::defaults::Defaults;
use crate::desired::settings::image_pull_secrets;
use crate::inject::Quantity;
use crate::names;
use k8s_openapi::api::apps::v1::StatefulSet;
use kube::ResourceExt;
use kube::api::DynamicObject;
use serde_json::{Value, json};

const CONTAINER: &str = "redis";
const SECRET_VOLUME: &str = "secret";
const RUN_VOLUME: &str = "run";
const DATA_VOLUME: &str = "data";
const EXPORTER_CONTAINER: &str = "exporter";
const EXPORTER_VOLUME: &str = "exporter";
/// Memory besides the data: the process, and buffers of connections that write large values.
const SPARE_BYTES: u64 = 128 << 20;
/// As above, for a server that forks: also buffers between the servers of a cluster.
const FORK_SPARE_BYTES: u64 = 384 << 20;
/// Default cpu request of a server.
const CPU: &str = "500m";

/// The servers, with replicas. They need no order, so all are started and stopped at once.
pub(super) fn stateful_set(
    pool: &KVCachePool,
    redis: &ManagedRedis,
    defaults: &Defaults,
) -> DynamicObject {
    let mut spec = json!({
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        "terminationGracePeriodSeconds": server::seconds_to_stop(redis),
        "securityContext": {
            "runAsNonRoot": true,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": containers(pool, redis, defaults),
        "volumes": volumes(pool, redis),
        "topologySpreadConstraints": spread(pool, redis),
    });
    // The images name no suitable user, and the servers need no particular one.
    if let Some(user) = defaults.redis_run_as_user {
        spec["securityContext"]["runAsUser"] = user.into();
        spec["securityContext"]["runAsGroup"] = user.into();
        if redis.persistence.is_some() {
            spec["securityContext"]["fsGroup"] = user.into();
            spec["securityContext"]["fsGroupChangePolicy"] = "OnRootMismatch".into();
        }
    }
    let keys = [
        "nodeSelector",
        "tolerations",
        "affinity",
        "priorityClassName",
    ];
    let secrets = image_pull_secrets(pool, defaults);
    set_given(&mut spec, redis, &keys, &secrets);
    let mut set = child::<StatefulSet>(
        pool,
        json!({
            "serviceName": name(pool),
            "replicas": redis.shards,
            "podManagementPolicy": "Parallel",
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": selector(pool)},
            "template": {"metadata": pod_metadata(redis, json!({"labels": selector(pool)})), "spec": spec},
        }),
    );
    if let Some(persistence) = &redis.persistence {
        set.data["spec"]["volumeClaimTemplates"] = json!([claim(persistence)]);
        // Another server has the chunks of a removed one, and a deleted pool none.
        set.data["spec"]["persistentVolumeClaimRetentionPolicy"] =
            json!({"whenDeleted": "Delete", "whenScaled": "Delete"});
    }
    match is_cluster(redis) {
        true => with_servers(&set, servers(redis)),
        false => set,
    }
}

/// The StatefulSet of a cluster with this number of servers. The annotation tells the operator the number, because it watches only the
/// metadata of its objects.
pub fn with_servers(set: &DynamicObject, number: i64) -> DynamicObject {
    let mut set = set.clone();
    set.data["spec"]["replicas"] = number.into();
    let annotation = (names::REPLICAS.to_owned(), number.to_string());
    set.annotations_mut().extend([annotation]);
    set
}

/// The claim of each server's volume.
fn claim(persistence: &Persistence) -> Value {
    let mut spec = json!({
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": persistence.size}},
    });
    if !persistence.storage_class_name.is_empty() {
        spec["storageClassName"] = json!(persistence.storage_class_name);
    }
    json!({"metadata": {"name": DATA_VOLUME}, "spec": spec})
}

/// The Secret, memory volumes for what the start script writes, and the working folder of a cluster's servers.
fn volumes(pool: &KVCachePool, redis: &ManagedRedis) -> Vec<Value> {
    let memory =
        |name: &str| json!({"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}});
    let mut volumes = vec![
        json!({"name": SECRET_VOLUME, "secret": {"secretName": secret_name(pool)}}),
        memory(RUN_VOLUME),
    ];
    volumes.extend(is_cluster(redis).then(|| json!({"name": DATA_VOLUME, "emptyDir": {}})));
    volumes.extend(redis.exporter.is_some().then(|| memory(EXPORTER_VOLUME)));
    volumes
}

fn mounts(redis: &ManagedRedis) -> Vec<Value> {
    let mut mounts = vec![
        json!({"name": SECRET_VOLUME, "mountPath": SECRET_PATH, "readOnly": true}),
        json!({"name": RUN_VOLUME, "mountPath": RUN_PATH}),
    ];
    let works = is_cluster(redis) || redis.persistence.is_some();
    mounts.extend(works.then(|| json!({"name": DATA_VOLUME, "mountPath": DATA_PATH})));
    let mount = || json!({"name": EXPORTER_VOLUME, "mountPath": EXPORTER_PATH});
    mounts.extend(redis.exporter.is_some().then(mount));
    mounts
}

/// The pool's constraints, or by default a spread over nodes if possible.
fn spread(pool: &KVCachePool, redis: &ManagedRedis) -> Value {
    if !redis.topology_spread_constraints.is_empty() {
        return json!(redis.topology_spread_constraints);
    }
    json!([{
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selector(pool)},
    }])
}

fn containers(pool: &KVCachePool, redis: &ManagedRedis, defaults: &Defaults) -> Vec<Value> {
    let exporter = redis.exporter.as_ref();
    let exporter = exporter.map(|spec| exporter_container(redis, spec, defaults));
    std::iter::once(container(pool, redis, defaults))
        .chain(exporter)
        .collect()
}

/// After the server, which writes its login.
fn exporter_container(redis: &ManagedRedis, exporter: &Exporter, defaults: &Defaults) -> Value {
    let resources = match exporter.resources == Default::default() {
        true => {
            json!({"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "128Mi"}})
        }
        false => json!(exporter.resources),
    };
    json!({
        "name": EXPORTER_CONTAINER,
        "image": image(&exporter.image, &defaults.redis_exporter_image),
        "args": server::exporter_arguments(redis),
        "ports": [{"name": METRICS_PORT_NAME, "containerPort": METRICS_PORT, "protocol": "TCP"}],
        "resources": resources,
        "securityContext": security_context(),
        "volumeMounts": [{"name": EXPORTER_VOLUME, "mountPath": EXPORTER_PATH, "readOnly": true}],
    })
}

/// The image of the pool, if it names one.
fn image<'a>(own: &'a str, default: &'a str) -> &'a str {
    if own.is_empty() { default } else { own }
}

fn container(pool: &KVCachePool, redis: &ManagedRedis, defaults: &Defaults) -> Value {
    let maxmemory = server::maxmemory(redis);
    let [ready, alive] = server::probes(redis);
    let mut container = json!({
        "name": CONTAINER,
        "image": image(&redis.image, &defaults.redis_image),
        "command": server::command(redis),
        "args": server::arguments(pool, redis, maxmemory),
        "ports": server::ports(redis),
        "resources": resources(redis, maxmemory),
        "readinessProbe": ready,
        "livenessProbe": alive,
        "securityContext": security_context(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts(redis),
    });
    if let Some(hook) = server::before_stop(redis) {
        container["lifecycle"] = hook;
    }
    if is_cluster(redis) {
        let variable = |name: &str, path: &str| json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}});
        container["env"] = json!([
            variable(POD_NAME, "metadata.name"),
            variable(NODE_NAME, "spec.nodeName"),
        ]);
    }
    container
}

/// The pool's resources, but at least the memory that the data needs, with the allocator's fragmentation. In a cluster also with what a fork
/// for the synchronization of a replica copies, and with what is written meanwhile. A fork for a snapshot lasts as long as the volume takes,
/// and a busy cache replaces everything meanwhile.
fn resources(redis: &ManagedRedis, maxmemory: u64) -> Value {
    let snapshots = redis.persistence.as_ref();
    let memory = if snapshots.is_some_and(|one| one.snapshot_interval.is_some()) {
        2 * maxmemory + FORK_SPARE_BYTES
    } else if is_cluster(redis) {
        maxmemory + maxmemory / 2 + FORK_SPARE_BYTES
    } else {
        maxmemory + maxmemory / 4 + SPARE_BYTES
    };
    let memory = Quantity::bytes(memory);
    let mut resources = json!(redis.resources);
    for kind in ["requests", "limits"] {
        let requested = resources[kind]["memory"].as_str().and_then(Quantity::parse);
        let memory = requested.map_or(memory, |requested| requested.max(memory));
        resources[kind]["memory"] = memory.to_string().into();
    }
    let cpu = ["requests", "limits"].map(|kind| resources[kind].get("cpu").is_some());
    if cpu == [false, false] {
        resources["requests"]["cpu"] = CPU.into();
    }
    resources
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desired::redis::tests::{cluster, managing, of};

    fn pod(pool: &KVCachePool) -> Value {
        of(pool, "StatefulSet").data["spec"]["template"]["spec"].clone()
    }

    fn args(container: &Value) -> Vec<&str> {
        let args = container["args"].as_array().unwrap();
        args.iter().filter_map(Value::as_str).collect()
    }

    #[test]
    fn the_smallest_pool_has_one_server_that_a_restricted_namespace_admits() {
        insta::assert_yaml_snapshot!(of(&managing(json!({})), "StatefulSet"));
    }

    #[test]
    fn a_cluster_has_replicas_and_room_for_their_synchronization() {
        insta::assert_yaml_snapshot!(of(&cluster(3, 1), "StatefulSet"));
    }

    #[test]
    fn a_cluster_with_tls_has_no_port_without_it() {
        let keys = json!({"mode": "Cluster", "shards": 3, "tls": true});
        let pod = pod(&managing(keys));
        let parts = ["command", "args", "readinessProbe", "ports"];
        let container = parts.map(|part| (part, pod["containers"][0][part].clone()));
        insta::assert_yaml_snapshot!(container);
    }

    #[test]
    fn the_platform_can_assign_the_user() {
        let defaults = Defaults {
            redis_run_as_user: None,
            ..crate::desired::tests::defaults()
        };
        for keys in [json!({}), json!({"persistence": {"size": "40Gi"}})] {
            let pool = managing(keys);
            let redis = crate::desired::redis::managed(&pool).unwrap();
            let set = stateful_set(&pool, redis, &defaults);
            let context = &set.data["spec"]["template"]["spec"]["securityContext"];
            assert_eq!(
                *context,
                json!({"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}})
            );
        }
    }

    #[test]
    fn every_field_of_a_pool_is_applied() {
        let given = json!({
            "shards": 3, "image": "mine:1", "nodeSelector": {"disk": "none"}, "priorityClassName": "cache",
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
            "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}],
            "resources": {"requests": {"cpu": "2", "memory": "1Gi"}, "limits": {"cpu": "4", "memory": "64Gi"}},
        });
        let pool = managing(given.clone());
        assert_eq!(of(&pool, "StatefulSet").data["spec"]["replicas"], 3);
        let pod = pod(&pool);
        for key in [
            "nodeSelector",
            "priorityClassName",
            "tolerations",
            "affinity",
            "topologySpreadConstraints",
        ] {
            assert_eq!(pod[key], given[key], "{key}");
        }
        let container = &pod["containers"][0];
        assert_eq!(container["image"], "mine:1");
        assert_eq!(
            container["resources"],
            json!({"requests": {"cpu": "2", "memory": "20608Mi"}, "limits": {"cpu": "4", "memory": "64Gi"}}),
            "no less than the data needs"
        );
    }

    #[test]
    fn snapshots_survive_the_pod_but_not_the_pool() {
        let persistence =
            json!({"size": "40Gi", "storageClassName": "nvme", "snapshotInterval": "90m"});
        let set = of(
            &managing(json!({"persistence": persistence})),
            "StatefulSet",
        );
        let spec = &set.data["spec"];
        let pod = &spec["template"]["spec"];
        let container = ["args", "lifecycle", "resources", "volumeMounts"];
        let container = container.map(|key| (key, &pod["containers"][0][key]));
        let claims = [
            "volumeClaimTemplates",
            "persistentVolumeClaimRetentionPolicy",
        ];
        let claims = claims.map(|key| (key, &spec[key]));
        let stops = &pod["terminationGracePeriodSeconds"];
        insta::assert_yaml_snapshot!((claims, &pod["securityContext"], stops, container));
        let set = of(
            &managing(json!({"persistence": {"size": "40Gi"}})),
            "StatefulSet",
        );
        let container = &set.data["spec"]["template"]["spec"]["containers"][0];
        assert_eq!(
            container["resources"]["limits"]["memory"], "20608Mi",
            "it does not fork"
        );
        let claim = &set.data["spec"]["volumeClaimTemplates"][0]["spec"];
        assert_eq!(claim.get("storageClassName"), None, "the cluster's default");
    }

    #[test]
    fn an_exporter_reads_only_its_own_login() {
        let pod = pod(&managing(json!({"tls": true, "exporter": {}})));
        insta::assert_yaml_snapshot!(pod["containers"][1]);
        let given = json!({"image": "mine:1", "resources": {"limits": {"memory": "1Gi"}}});
        let container = self::pod(&managing(json!({"exporter": given})))["containers"][1].clone();
        for (key, value) in given.as_object().unwrap() {
            assert_eq!(container[key], *value);
        }
        let arguments = container["args"].to_string();
        assert!(arguments.contains("=redis://localhost:6379") && !arguments.contains("tls"));
    }

    #[test]
    fn maxmemory_is_below_the_containers_limit() {
        for size in ["64Mi", "1Gi", "16Gi", "1Ti"] {
            let pod = pod(&managing(json!({"memoryPerShard": size})));
            let container = &pod["containers"][0];
            let args = args(container);
            let at = args.iter().position(|arg| *arg == "--maxmemory").unwrap();
            let maxmemory = Quantity::parse(args[at + 1]).unwrap();
            assert_eq!(Some(maxmemory), Quantity::parse(size));
            let limit =
                Quantity::parse(container["resources"]["limits"]["memory"].as_str().unwrap());
            assert!(limit.unwrap() > maxmemory, "{size}");
        }
    }
}

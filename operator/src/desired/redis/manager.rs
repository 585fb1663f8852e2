//! The Deployment that forms, repairs and resizes the servers' cluster (`kvcachepool-sidecar redis-cluster`). The operator itself has no
//! credentials and connects to no server.

use super::password::{CERTIFICATE, MANAGER_PASSWORD, PASSWORD};
use super::server::SECRET_PATH;
use super::{
    MANAGER, addresses, child, manager_name, manager_selector, pod_metadata, secret_name,
    security_context, set_given, shape,
};
use crate::api::{KVCachePool, ManagedRedis};
use crate::inject::{PROGRAM, Settings};
use crate::names;
use k8s_openapi::api::apps::v1::Deployment;
use kube::api::DynamicObject;
use serde_json::{Value, json};

const CONTAINER: &str = "manager";
const VOLUME: &str = "secret";
/// How long the manager stays on a node that is not reachable. By default it would be five minutes, without repairs.
const LOST_NODE_SECONDS: u32 = 30;

/// One pod. On a node that is cut off another one may still run, which acts only while it sees most servers. It is ready while the cluster has exactly the shape that its pod's annotation names.
pub(super) fn manager(
    pool: &KVCachePool,
    redis: &ManagedRedis,
    settings: &Settings,
) -> DynamicObject {
    let labels = manager_selector(pool);
    let annotations = json!({names::SHAPE: shape(redis)});
    let mut object = child::<Deployment>(
        pool,
        json!({
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "revisionHistoryLimit": 1,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": pod_metadata(redis, json!({"labels": labels, "annotations": annotations})),
                "spec": pod(pool, redis, settings),
            },
        }),
    );
    object.metadata.name = Some(manager_name(pool));
    object
}

fn pod(pool: &KVCachePool, redis: &ManagedRedis, settings: &Settings) -> Value {
    let lost = ["not-ready", "unreachable"].map(|taint| {
        json!({
            "key": format!("node.kubernetes.io/{taint}"),
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": LOST_NODE_SECONDS,
        })
    });
    let tolerations = redis.tolerations.iter().map(|t| json!(t)).chain(lost);
    let mut files = vec![json!({"key": MANAGER_PASSWORD, "path": PASSWORD})];
    files.extend(
        redis
            .tls
            .then(|| json!({"key": CERTIFICATE, "path": CERTIFICATE})),
    );
    let mut spec = json!({
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        "terminationGracePeriodSeconds": 10,
        "securityContext": {"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}},
        "tolerations": tolerations.collect::<Vec<_>>(),
        "containers": [container(pool, redis, settings)],
        "volumes": [{"name": VOLUME, "secret": {"secretName": secret_name(pool), "items": files}}],
    });
    let keys = ["nodeSelector", "priorityClassName"];
    set_given(&mut spec, redis, &keys, &settings.image_pull_secrets);
    spec
}

fn container(pool: &KVCachePool, redis: &ManagedRedis, settings: &Settings) -> Value {
    let probe = |path: &str, seconds: u32, failures: u32| {
        json!({
            "httpGet": {"path": path, "port": names::ADMIN_PORT},
            "periodSeconds": seconds,
            "failureThreshold": failures,
        })
    };
    let mut container = json!({
        "name": CONTAINER,
        "image": settings.image,
        "command": command(pool, redis),
        "ports": [{"name": names::ADMIN_PORT_NAME, "containerPort": names::ADMIN_PORT, "protocol": "TCP"}],
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "128Mi"}},
        "readinessProbe": probe("/readyz", 2, 1),
        "livenessProbe": probe("/healthz", 10, 6),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": security_context(),
        "volumeMounts": [{"name": VOLUME, "mountPath": SECRET_PATH, "readOnly": true}],
    });
    if let Some(policy) = &settings.image_pull_policy {
        container["imagePullPolicy"] = json!(policy);
    }
    container
}

fn command(pool: &KVCachePool, redis: &ManagedRedis) -> Vec<String> {
    let shards = redis.shards.to_string();
    let password = format!("{SECRET_PATH}/{PASSWORD}");
    let certificate = format!("{SECRET_PATH}/{CERTIFICATE}");
    let listen = format!("[::]:{}", names::ADMIN_PORT);
    let mut command = vec![PROGRAM, "redis-cluster", "--shards", &shards];
    command.extend(["--user", MANAGER, "--password-file", &password]);
    if redis.tls {
        command.extend(["--ca", &certificate]);
    }
    command.extend(["--listen", &listen]);
    let command = command.into_iter().map(str::to_owned);
    command
        .chain(addresses(pool, super::servers(redis)))
        .collect()
}

#[cfg(test)]
mod tests {
    use crate::desired::redis::tests::{cluster, managing, of};
    use serde_json::{Value, json};

    fn pod(keys: Value) -> Value {
        let mut cluster = json!({"mode": "Cluster", "shards": 3, "replicasPerShard": 1});
        json_patch::merge(&mut cluster, &keys);
        of(&managing(cluster), "Deployment").data["spec"]["template"]["spec"].take()
    }

    #[test]
    fn a_cluster_has_one_manager_that_a_restricted_namespace_admits() {
        insta::assert_yaml_snapshot!(of(&cluster(3, 1), "Deployment"));
    }

    #[test]
    fn the_manager_trusts_the_servers_certificate_and_has_no_key() {
        let pod = pod(json!({"tls": true}));
        let command = pod["containers"][0]["command"].as_array().unwrap();
        let at = command.iter().position(|arg| arg == "--ca").unwrap();
        assert_eq!(command[at + 1], "/etc/kvcachepool/tls.crt");
        let items = pod["volumes"][0]["secret"]["items"].to_string();
        assert!(items.contains("tls.crt") && !items.contains("tls.key"));
    }

    #[test]
    fn the_manager_runs_where_the_servers_may() {
        let given = json!({
            "nodeSelector": {"disk": "none"}, "priorityClassName": "cache",
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
        });
        let pod = pod(given.clone());
        assert_eq!(pod["nodeSelector"], given["nodeSelector"]);
        assert_eq!(pod["priorityClassName"], "cache");
        let tolerations = pod["tolerations"].as_array().unwrap();
        assert_eq!(tolerations[0], given["tolerations"][0]);
        assert_eq!(tolerations.len(), 3, "two of lost nodes");
    }
}

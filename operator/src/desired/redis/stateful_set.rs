//! The servers: Valkey or Redis, admitted by Pod Security `restricted`, with a memory limit that they keep by evicting.

use super::password::{CERTIFICATE, KEY, USERS, secret_name};
use super::{PORT, PORT_NAME, child, name, selector};
use crate::api::{KVCachePool, ManagedRedis};
use crate::defaults::Defaults;
use crate::desired::settings::image_pull_secrets;
use crate::inject::Quantity;
use k8s_openapi::api::apps::v1::StatefulSet;
use kube::api::DynamicObject;
use serde_json::{Value, json};

const CONTAINER: &str = "redis";
const VOLUME: &str = "users";
const PATH: &str = "/etc/kvcachepool";
/// Memory besides the data: the process, and buffers of connections that write large values.
const SPARE_BYTES: u64 = 128 << 20;
/// Default cpu request of a server.
const CPU: &str = "500m";
/// The program has one of two names, depending on the image.
const SERVER: &str = r#"exec "$(command -v valkey-server || command -v redis-server)" "$@""#;
/// Uses the password that is mounted now, so that a server with an older password (the Secret was created again) is restarted.
const PING: &str = r#"REDISCLI_AUTH="$(cat /etc/kvcachepool/password)" "$(command -v valkey-cli || command -v redis-cli)" -p 6379 "$@" ping | grep -q PONG"#;

/// One server per shard. They are independent, so all are started and stopped at once.
pub(super) fn stateful_set(
    pool: &KVCachePool,
    redis: &ManagedRedis,
    defaults: &Defaults,
) -> DynamicObject {
    let secrets = image_pull_secrets(pool, defaults);
    let secrets: Vec<Value> = secrets.iter().map(|name| json!({"name": name})).collect();
    let mut spec = json!({
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        "terminationGracePeriodSeconds": 10,
        "securityContext": {
            "runAsNonRoot": true,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container(redis, defaults)],
        "volumes": [{"name": VOLUME, "secret": {"secretName": secret_name(pool)}}],
        "topologySpreadConstraints": spread(pool, redis),
    });
    // The images name no suitable user, and the servers need no particular one.
    if let Some(user) = defaults.redis_run_as_user {
        spec["securityContext"]["runAsUser"] = user.into();
        spec["securityContext"]["runAsGroup"] = user.into();
    }
    let mut set = |key: &str, value: Value, is_set: bool| {
        if is_set {
            spec[key] = value;
        }
    };
    set("imagePullSecrets", json!(secrets), !secrets.is_empty());
    set(
        "nodeSelector",
        json!(redis.node_selector),
        !redis.node_selector.is_empty(),
    );
    set(
        "tolerations",
        json!(redis.tolerations),
        !redis.tolerations.is_empty(),
    );
    set(
        "affinity",
        json!(redis.affinity),
        redis.affinity != Default::default(),
    );
    let class = &redis.priority_class_name;
    set("priorityClassName", json!(class), !class.is_empty());
    child::<StatefulSet>(
        pool,
        json!({
            "serviceName": name(pool),
            "replicas": redis.shards,
            "podManagementPolicy": "Parallel",
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": selector(pool)},
            "template": {"metadata": {"labels": selector(pool)}, "spec": spec},
        }),
    )
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

fn container(redis: &ManagedRedis, defaults: &Defaults) -> Value {
    let image = match redis.image.as_str() {
        "" => &defaults.redis_image,
        image => image,
    };
    let maxmemory = redis.memory_per_shard.bytes().map_or(0, |bytes| bytes.0);
    let ping: Vec<String> = match redis.tls {
        false => ["sh", "-c", PING].map(str::to_owned).to_vec(),
        true => ["sh", "-c", PING, "ping", "--tls", "--cacert"]
            .map(str::to_owned)
            .into_iter()
            .chain([format!("{PATH}/{CERTIFICATE}")])
            .collect(),
    };
    let probe = |seconds: u32, failures: u32| {
        json!({
            "exec": {"command": ping},
            "periodSeconds": seconds,
            "timeoutSeconds": 5,
            "failureThreshold": failures,
        })
    };
    json!({
        "name": CONTAINER,
        "image": image,
        "command": ["sh", "-c", SERVER, "redis"],
        "args": arguments(maxmemory, redis.tls),
        "ports": [{"name": PORT_NAME, "containerPort": PORT, "protocol": "TCP"}],
        "resources": resources(redis, maxmemory),
        "readinessProbe": probe(5, 2),
        "livenessProbe": probe(10, 6),
        "securityContext": {
            "allowPrivilegeEscalation": false,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": true,
        },
        "volumeMounts": [{"name": VOLUME, "mountPath": PATH, "readOnly": true}],
    })
}

/// Cache settings: least recently used values are evicted, and nothing is written to disk.
fn arguments(maxmemory: u64, tls: bool) -> Vec<String> {
    let port = match tls {
        false => vec![("--port", PORT.to_string())],
        // Sidecars prove who they are by the password.
        true => vec![
            ("--port", "0".to_string()),
            ("--tls-port", PORT.to_string()),
            ("--tls-cert-file", format!("{PATH}/{CERTIFICATE}")),
            ("--tls-key-file", format!("{PATH}/{KEY}")),
            ("--tls-auth-clients", "no".to_string()),
        ],
    };
    let rest = [
        ("--aclfile", format!("{PATH}/{USERS}")),
        ("--maxmemory", maxmemory.to_string()),
        ("--maxmemory-policy", "allkeys-lru".to_string()),
        ("--save", String::new()),
        ("--appendonly", "no".to_string()),
        ("--lazyfree-lazy-eviction", "yes".to_string()),
        ("--tcp-keepalive", "60".to_string()),
    ];
    port.into_iter()
        .chain(rest)
        .flat_map(|(key, value)| [key.to_string(), value])
        .collect()
}

/// The pool's resources, but at least the memory that the data needs, with the allocator's fragmentation.
fn resources(redis: &ManagedRedis, maxmemory: u64) -> Value {
    let memory = Quantity::bytes(maxmemory + maxmemory / 4 + SPARE_BYTES);
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
    use crate::desired::redis::password::PASSWORD;
    use crate::desired::redis::tests::{managing, of};

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
    fn the_platform_can_assign_the_user() {
        let defaults = Defaults {
            redis_run_as_user: None,
            ..crate::desired::tests::defaults()
        };
        let pool = managing(json!({}));
        let redis = crate::desired::redis::managed(&pool).unwrap();
        let set = stateful_set(&pool, redis, &defaults);
        let context = &set.data["spec"]["template"]["spec"]["securityContext"];
        assert_eq!(
            *context,
            json!({"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}})
        );
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
    fn with_tls_there_is_no_port_without_it() {
        let pod = pod(&managing(json!({"tls": true})));
        let container = &pod["containers"][0];
        let args = args(container);
        let wanted = [
            "--port",
            "0",
            "--tls-port",
            "6379",
            "--tls-cert-file",
            "/etc/kvcachepool/tls.crt",
            "--tls-key-file",
            "/etc/kvcachepool/tls.key",
            "--tls-auth-clients",
            "no",
        ];
        assert_eq!(args[..wanted.len()], wanted);
        let ping = &container["livenessProbe"]["exec"]["command"];
        assert_eq!(ping[4], "--tls");
        assert_eq!(ping[6], "/etc/kvcachepool/tls.crt");
        assert_eq!(container["ports"][0]["containerPort"], 6379);
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

    #[test]
    fn no_command_contains_a_password() {
        let text = of(&managing(json!({})), "StatefulSet").data.to_string();
        assert!(!text.contains("requirepass") && PING.contains(&format!("{PATH}/{PASSWORD}")));
        assert!(PING.contains(&format!("-p {PORT}")));
    }
}

//! The desired state of a pool, as pure functions: the settings of injection and the objects besides the pods. One builder per kind of
//! object, each in its file with its test. The reconciler checks which kinds the cluster has, and which objects exist.

mod config_map;
mod files;
pub mod job;
mod placed;
mod pod_monitor;
pub mod redis;
mod settings;

pub use config_map::config_map_name;
pub use settings::settings;

use crate::api::{KVCachePool, Problem};
use crate::defaults::Defaults;
use crate::inject::Settings;
use crate::names;
use kube::api::{DynamicObject, ObjectMeta, TypeMeta};
use kube::{Resource, ResourceExt};
use serde_json::Value;
use std::collections::BTreeMap;

/// The objects of a pool, or all violations of its spec.
pub fn desired(
    pool: &KVCachePool,
    defaults: &Defaults,
) -> Result<Vec<DynamicObject>, Vec<Problem>> {
    Ok(objects(pool, &settings(pool, defaults)?, defaults))
}

/// The objects of a valid pool. PodMonitors are included if the pool requests them, even if the cluster does not have that kind.
fn objects(pool: &KVCachePool, settings: &Settings, defaults: &Defaults) -> Vec<DynamicObject> {
    let config_map = config_map::config_map(pool, settings);
    let monitoring = &pool.spec.monitoring;
    let pod_monitor = monitoring.pod_monitor.as_ref();
    let pod_monitors = pod_monitor.map(|spec| pod_monitor::pod_monitors(pool, spec));
    let redis = redis::managed(pool).map(|spec| redis::objects(pool, spec, settings, defaults));
    std::iter::once(config_map)
        .chain(pod_monitors.into_iter().flatten())
        .chain(redis.into_iter().flatten())
        .collect()
}

/// Labels of all objects of a pool. The operator finds objects to delete by these labels and by the owner.
pub fn labels(pool: &KVCachePool) -> BTreeMap<String, String> {
    let labels = [
        ("app.kubernetes.io/name", "kvcachepool".to_string()),
        (
            "app.kubernetes.io/managed-by",
            names::FIELD_MANAGER.to_string(),
        ),
        (names::POOL, pool.name_any()),
    ];
    labels
        .into_iter()
        .map(|(key, value)| (key.to_string(), value))
        .collect()
}

/// An object of a pool: named, labelled, and owned by the pool.
fn object(pool: &KVCachePool, types: TypeMeta, name: String, data: Value) -> DynamicObject {
    DynamicObject {
        types: Some(types),
        metadata: ObjectMeta {
            name: Some(name),
            namespace: pool.namespace(),
            labels: Some(labels(pool)),
            owner_references: pool.controller_owner_ref(&()).map(|owner| vec![owner]),
            ..ObjectMeta::default()
        },
        data,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::policy::Policy;
    use serde_json::json;

    /// The pool of these tests: the smallest valid pool, with `spec` merged into it.
    pub fn pool(spec: Value) -> KVCachePool {
        let mut pool = json!({
            "apiVersion": "kvcachepool.io/v1alpha1",
            "kind": "KVCachePool",
            "metadata": {"name": "llama", "namespace": "serving", "uid": "0a1b2c3d-0000-4000-8000-000000000000", "generation": 7},
            "spec": {"local": {"memory": {"perPod": "64Gi"}}},
        });
        json_patch::merge(&mut pool["spec"], &spec);
        serde_json::from_value(pool).unwrap()
    }

    pub fn defaults() -> Defaults {
        Defaults {
            image: "registry.example/kvcachepool:0.1.0".to_string(),
            version: "0.1.0".to_string(),
            namespace: "kvcachepool-system".to_string(),
            redis_image: "docker.io/valkey/valkey:8.1".to_string(),
            redis_exporter_image: "docker.io/oliver006/redis_exporter:v1".to_string(),
            redis_run_as_user: Some(65532),
            image_pull_secrets: Vec::new(),
            policy: Policy::default(),
        }
    }

    #[test]
    fn every_object_is_labelled_and_owned_by_its_pool() {
        let pool = pool(json!({"monitoring": {"podMonitor": {}}}));
        let objects = desired(&pool, &defaults()).unwrap();
        assert_eq!(objects.len(), 2);
        for object in objects {
            let owner = &object.owner_references()[0];
            assert_eq!(
                (owner.kind.as_str(), owner.name.as_str()),
                ("KVCachePool", "llama")
            );
            assert_eq!(owner.controller, Some(true));
            assert_eq!(object.namespace().as_deref(), Some("serving"));
            assert_eq!(object.labels()[names::POOL], "llama");
            assert_eq!(
                object.labels()["app.kubernetes.io/managed-by"],
                names::FIELD_MANAGER
            );
        }
    }

    #[test]
    fn defaults_of_all_pools_reach_sidecars_and_servers() {
        let secret = json!({"name": "own"});
        let managed = json!({"memoryPerShard": "1Gi"});
        let pool = pool(
            json!({"sidecar": {"imagePullSecrets": [secret]}, "shared": {"redis": {"managed": managed}}}),
        );
        let defaults = Defaults {
            redis_image: "mirror/valkey@sha256:00".to_string(),
            image_pull_secrets: vec!["own".to_string(), "mirror".to_string()],
            ..defaults()
        };
        let sidecar = settings(&pool, &defaults).unwrap();
        assert_eq!(sidecar.image_pull_secrets, ["own", "mirror"]);
        let objects = desired(&pool, &defaults).unwrap();
        let is_set = |o: &&DynamicObject| o.types.as_ref().unwrap().kind == "StatefulSet";
        let servers = objects.iter().find(is_set).unwrap();
        let spec = &servers.data["spec"]["template"]["spec"];
        assert_eq!(spec["containers"][0]["image"], "mirror/valkey@sha256:00");
        assert_eq!(
            spec["imagePullSecrets"],
            json!([{"name": "own"}, {"name": "mirror"}])
        );
    }

    #[test]
    fn a_pool_that_contradicts_the_policy_has_no_objects() {
        let mut defaults = defaults();
        defaults.policy.images = vec!["registry.corp/*".to_string()];
        let pool = pool(json!({"sidecar": {"image": "elsewhere/sidecar"}}));
        let problems = desired(&pool, &defaults).unwrap_err();
        assert_eq!(problems[0].reason, crate::api::Reason::PolicyViolated);
    }

    #[test]
    fn a_pool_that_is_not_accepted_has_no_objects() {
        let pool = pool(json!({"cache": {"chunkTokens": 0}}));
        assert_eq!(desired(&pool, &defaults()).unwrap_err().len(), 1);
    }
}

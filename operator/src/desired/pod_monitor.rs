//! The PodMonitor of the Prometheus operator for the sidecars of a pool.

use super::object;
use crate::api::{KVCachePool, PodMonitor};
use crate::names;
use kube::ResourceExt;
use kube::api::{DynamicObject, TypeMeta};
use serde_json::json;

/// Scrapes the admin port of every pod of the pool.
pub(super) fn pod_monitor(pool: &KVCachePool, settings: &PodMonitor) -> DynamicObject {
    let types = TypeMeta {
        api_version: "monitoring.coreos.com/v1".to_string(),
        kind: "PodMonitor".to_string(),
    };
    let name = pool.name_any();
    let data = json!({"spec": {
        "selector": {"matchLabels": {names::POOL: name}},
        "podTargetLabels": [names::POOL],
        "podMetricsEndpoints": [{"port": names::ADMIN_PORT_NAME, "path": "/metrics"}],
    }});
    let mut monitor = object(pool, types, format!("kvcachepool-{name}"), data);
    // A user may set the labels that a Prometheus selects, but not those by which the operator finds its objects.
    let labels = monitor.metadata.labels.get_or_insert_default();
    for (key, value) in &settings.labels {
        labels.entry(key.clone()).or_insert_with(|| value.clone());
    }
    monitor
}

#[cfg(test)]
mod tests {
    use crate::desired::desired;
    use crate::desired::tests::{defaults, pool};
    use crate::names;
    use kube::ResourceExt;
    use serde_json::json;

    #[test]
    fn the_sidecars_of_a_pool_are_scraped() {
        let labels = json!({"release": "prom", names::POOL: "another"});
        let pool = pool(json!({"monitoring": {"podMonitor": {"labels": labels}}}));
        let objects = desired(&pool, &defaults()).unwrap();
        insta::assert_yaml_snapshot!(objects[1]);
        assert_eq!(objects[1].labels()[names::POOL], "llama");
    }

    #[test]
    fn a_pool_without_monitoring_has_no_pod_monitor() {
        let objects = desired(&pool(json!({})), &defaults()).unwrap();
        assert_eq!(objects.len(), 1);
    }
}

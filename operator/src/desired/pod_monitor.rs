//! The PodMonitors of the Prometheus operator: for the sidecars of a pool, and for the exporters of its managed servers.

use super::{object, redis};
use crate::api::{KVCachePool, PodMonitor};
use crate::names;
use kube::ResourceExt;
use kube::api::{DynamicObject, TypeMeta};
use serde_json::{Value, json};

/// Scrapes the admin port of every pod of the pool, and the exporter of every server.
pub(super) fn pod_monitors(pool: &KVCachePool, settings: &PodMonitor) -> Vec<DynamicObject> {
    let name = pool.name_any();
    let sidecars = json!({
        "selector": {"matchLabels": {names::POOL: name}},
        "podTargetLabels": [names::POOL],
        "podMetricsEndpoints": [endpoint(settings, names::ADMIN_PORT_NAME, None)],
    });
    // The pods have the name of the pool in another label. Their metrics get it in the label that those of sidecars have.
    let of_pool = json!({
        "sourceLabels": ["__meta_kubernetes_pod_label_app_kubernetes_io_instance"],
        "targetLabel": "kvcachepool_io_pool",
    });
    let servers = json!({
        "selector": {"matchLabels": redis::selector(pool)},
        "podMetricsEndpoints": [endpoint(settings, redis::METRICS_PORT_NAME, Some(of_pool))],
    });
    let exported = redis::managed(pool).is_some_and(|redis| redis.exporter.is_some());
    // No pool's name has a dot, so the name is that of no other pool's PodMonitor.
    let mut monitors = vec![monitor(pool, settings, "", sidecars)];
    monitors.extend(exported.then(|| monitor(pool, settings, ".servers", servers)));
    monitors
}

/// An endpoint as the pool has it. Its own relabeling is the first.
fn endpoint(settings: &PodMonitor, port: &str, own: Option<Value>) -> Value {
    let mut endpoint = json!(settings);
    json_patch::merge(
        &mut endpoint,
        &json!({"labels": null, "port": port, "path": "/metrics"}),
    );
    let given = settings.relabelings.iter().map(|one| json!(one));
    let relabelings: Vec<_> = own.into_iter().chain(given).collect();
    if !relabelings.is_empty() {
        endpoint["relabelings"] = relabelings.into();
    }
    endpoint
}

fn monitor(pool: &KVCachePool, settings: &PodMonitor, suffix: &str, spec: Value) -> DynamicObject {
    let types = TypeMeta {
        api_version: "monitoring.coreos.com/v1".to_string(),
        kind: "PodMonitor".to_string(),
    };
    let name = format!("kvcachepool-{}{suffix}", pool.name_any());
    let mut monitor = object(pool, types, name, json!({"spec": spec}));
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
    fn the_exporters_of_managed_servers_are_scraped_too() {
        let managed = json!({"memoryPerShard": "1Gi", "exporter": {}});
        let mut spec =
            json!({"monitoring": {"podMonitor": {}}, "shared": {"redis": {"managed": managed}}});
        let objects = desired(&pool(spec.clone()), &defaults()).unwrap();
        insta::assert_yaml_snapshot!(objects[2]);
        spec["shared"]["redis"]["managed"]["exporter"].take();
        let names = |spec: &serde_json::Value| {
            let objects = desired(&pool(spec.clone()), &defaults()).unwrap();
            let is = |o: &&kube::api::DynamicObject| o.types.as_ref().unwrap().kind == "PodMonitor";
            objects
                .iter()
                .filter(is)
                .map(|o| o.name_any())
                .collect::<Vec<_>>()
        };
        assert_eq!(names(&spec), ["kvcachepool-llama"]);
    }

    #[test]
    fn both_are_scraped_as_the_pool_says() {
        let keep = json!({"action": "keep", "sourceLabels": ["__meta_kubernetes_pod_phase"]});
        let mut given = json!({
            "interval": "15s", "scrapeTimeout": "10s", "relabelings": [keep],
            "metricRelabelings": [{"action": "labeldrop", "regex": "instance"}],
        });
        let managed = json!({"memoryPerShard": "1Gi", "exporter": {}});
        let spec =
            json!({"monitoring": {"podMonitor": given}, "shared": {"redis": {"managed": managed}}});
        let objects = desired(&pool(spec), &defaults()).unwrap();
        let endpoint = |object: usize| &objects[object].data["spec"]["podMetricsEndpoints"][0];
        given["path"] = "/metrics".into();
        given["port"] = "kvcachepool".into();
        assert_eq!(*endpoint(1), given);
        assert_eq!(endpoint(2)["relabelings"][1], keep, "after the pool's name");
    }

    #[test]
    fn a_pool_without_monitoring_has_no_pod_monitor() {
        let objects = desired(&pool(json!({})), &defaults()).unwrap();
        assert_eq!(objects.len(), 1);
    }
}

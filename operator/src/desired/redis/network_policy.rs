//! The NetworkPolicy of the servers. It selects only them: a policy that selected pods of vLLM would block all their other traffic.

use super::{BUS_PORT, METRICS_PORT, PORT, child, is_cluster, manager_selector, selector};
use crate::api::{KVCachePool, ManagedRedis};
use crate::names;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::ResourceExt;
use kube::api::DynamicObject;
use serde_json::{Value, json};

/// Only pods of the pool, and those of its tools, reach the port; in a cluster also its servers and its manager. Everybody reaches the
/// metrics of an exporter, because Prometheus can be anywhere. Only the servers of a cluster open connections. Egress is left to Kubernetes.
pub(super) fn network_policy(pool: &KVCachePool, redis: &ManagedRedis) -> DynamicObject {
    let pods = |labels: Value| json!({"podSelector": {"matchLabels": labels}});
    let port = |port: u16| json!([{"protocol": "TCP", "port": port}]);
    let mut clients = [names::POOL, names::TOOL]
        .map(|label| pods(json!({label: pool.name_any()})))
        .to_vec();
    let mut bus = None;
    if is_cluster(redis) {
        let servers = pods(selector(pool));
        clients.extend([servers.clone(), pods(manager_selector(pool))]);
        bus = Some(json!({"from": [servers], "ports": port(BUS_PORT)}));
    }
    let client = json!({"from": clients, "ports": port(PORT)});
    let metrics = redis
        .exporter
        .is_some()
        .then(|| json!({"ports": port(METRICS_PORT)}));
    let ingress: Vec<Value> = std::iter::once(client).chain(bus).chain(metrics).collect();
    child::<NetworkPolicy>(
        pool,
        json!({
            "podSelector": {"matchLabels": selector(pool)},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        }),
    )
}

#[cfg(test)]
mod tests {
    use crate::desired::redis::tests::{cluster, managing, of};
    use serde_json::json;

    #[test]
    fn only_the_pools_pods_reach_the_servers() {
        insta::assert_yaml_snapshot!(of(&managing(json!({})), "NetworkPolicy"));
    }

    #[test]
    fn metrics_have_no_password_and_everybody_reaches_them() {
        let policy = of(&managing(json!({"exporter": {}})), "NetworkPolicy");
        let ingress = policy.data["spec"]["ingress"].as_array().unwrap();
        let metrics = json!({"ports": [{"protocol": "TCP", "port": 9121}]});
        assert_eq!(ingress[1..], [metrics]);
    }

    #[test]
    fn servers_of_a_cluster_reach_each_other_and_the_manager_reaches_them() {
        insta::assert_yaml_snapshot!(of(&cluster(3, 1), "NetworkPolicy").data);
    }
}

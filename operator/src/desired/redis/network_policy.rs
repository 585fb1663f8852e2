//! The NetworkPolicy of the servers. It selects only them: a policy that selected pods of vLLM would block all their other traffic.

use super::{PORT, child, selector};
use crate::api::KVCachePool;
use crate::names;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::ResourceExt;
use kube::api::DynamicObject;
use serde_json::json;

/// Only pods of the pool, and those of its tools, reach the port. Egress is left to the cluster, because the servers open no connections.
pub(super) fn network_policy(pool: &KVCachePool) -> DynamicObject {
    let labelled = |label: &str| json!({"podSelector": {"matchLabels": {label: pool.name_any()}}});
    child::<NetworkPolicy>(
        pool,
        json!({
            "podSelector": {"matchLabels": selector(pool)},
            "policyTypes": ["Ingress"],
            "ingress": [{
                "from": [labelled(names::POOL), labelled(names::TOOL)],
                "ports": [{"protocol": "TCP", "port": PORT}],
            }],
        }),
    )
}

#[cfg(test)]
mod tests {
    use crate::desired::redis::tests::{managing, of};
    use serde_json::json;

    #[test]
    fn only_the_pools_pods_reach_the_servers() {
        insta::assert_yaml_snapshot!(of(&managing(json!({})), "NetworkPolicy"));
    }
}

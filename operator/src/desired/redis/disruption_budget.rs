//! The PodDisruptionBudget of the servers.

use super::{child, selector};
use crate::api::KVCachePool;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::DynamicObject;
use serde_json::json;

/// One server at a time, because each loses its part of the chunks. A server that is not ready does not block others.
pub(super) fn disruption_budget(pool: &KVCachePool) -> DynamicObject {
    child::<PodDisruptionBudget>(
        pool,
        json!({
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": selector(pool)},
        }),
    )
}

#[cfg(test)]
mod tests {
    use crate::desired::redis::tests::{managing, of};
    use serde_json::json;

    #[test]
    fn servers_are_drained_one_at_a_time() {
        insta::assert_yaml_snapshot!(of(&managing(json!({})), "PodDisruptionBudget"));
    }
}

//! The headless Service with one DNS name per server.

use super::{PORT, PORT_NAME, child, selector};
use crate::api::KVCachePool;
use k8s_openapi::api::core::v1::Service;
use kube::api::DynamicObject;
use serde_json::json;

/// Headless, because a sidecar connects to each server. Servers that are not ready have names too: resolvers would cache a missing name.
pub(super) fn service(pool: &KVCachePool) -> DynamicObject {
    child::<Service>(
        pool,
        json!({
            "clusterIP": "None",
            "publishNotReadyAddresses": true,
            "selector": selector(pool),
            "ports": [{"name": PORT_NAME, "port": PORT, "targetPort": PORT_NAME, "protocol": "TCP"}],
        }),
    )
}

#[cfg(test)]
mod tests {
    use crate::desired::redis::tests::{managing, of};
    use serde_json::json;

    #[test]
    fn every_server_has_a_name() {
        insta::assert_yaml_snapshot!(of(&managing(json!({})), "Service"));
    }
}

//! The canary's pod. It requests no resources, and the strictest pod security level admits it.

use crate::names::{CANARY_POOL, INIT_CONTAINER, POOL, SIDECAR_CONTAINER};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

/// The pod that is sent to the API server. Its image is never pulled.
pub fn canary_pod(image: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": format!("{CANARY_POOL}-"),
            "labels": {POOL: CANARY_POOL},
        },
        "spec": {
            "automountServiceAccountToken": false,
            "restartPolicy": "Never",
            "securityContext": {"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{
                "name": "canary",
                "image": image,
                "resources": {
                    "requests": {"cpu": "1m", "memory": "1Mi"},
                    "limits": {"cpu": "1m", "memory": "1Mi"},
                },
                "securityContext": {
                    "allowPrivilegeEscalation": false,
                    "capabilities": {"drop": ["ALL"]},
                    "readOnlyRootFilesystem": true,
                },
            }],
        },
    })
}

/// Whether the webhook has injected the pod.
pub fn injected(pod: &Pod) -> bool {
    let containers = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.init_containers.as_ref());
    let has = |name: &str| containers.is_some_and(|all| all.iter().any(|c| c.name == name));
    has(SIDECAR_CONTAINER) && has(INIT_CONTAINER)
}

//! Tiers that every injected pod has for itself: memory and disk.

use super::{Size, schema};
use kvcachepool_protocol::config::{EvictionPolicy, HugePages};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Tiers that every pod has for itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Local {
    /// The memory tier.
    pub memory: Memory,
    /// The disk tier.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<Disk>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Memory {
    /// Size of the memory tier of each pod. The sidecar's memory request and limit are this size plus an overhead. A pod can override
    /// it with the annotation kvcachepool.io/memory. With the chart value allowPodPatch and Kubernetes 1.33 or newer, running pods get
    /// another size without a restart, unless they have huge pages or a transfer window.
    pub per_pod: Size,
    /// Page size of the memory tier. The node must have reserved pages of 2Mi or 1Gi.
    #[serde(default)]
    #[schemars(schema_with = "schema::choice::<HugePages>")]
    pub huge_pages: HugePages,
    /// Order of eviction.
    #[serde(default)]
    #[schemars(schema_with = "schema::choice::<EvictionPolicy>")]
    pub eviction_policy: EvictionPolicy,
}

/// The disk tier: exactly one of `emptyDir` and `ephemeral`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Disk {
    /// Bytes of the tier's objects on the disk of each pod.
    pub per_pod: Size,
    /// Use the node's own disk. It counts as ephemeral storage of the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub empty_dir: Option<NodeDirectory>,
    /// Use a volume that is created and deleted with the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ephemeral: Option<Ephemeral>,
}

/// The node's own disk. It has no fields.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NodeDirectory {}

/// A volume that is created and deleted with the pod.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Ephemeral {
    /// Name of the storage class.
    #[schemars(schema_with = "schema::object_name")]
    pub storage_class_name: String,
}

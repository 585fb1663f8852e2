//! Tiers of which every injected pod has its own: memory and disk.

use super::{Quantity, schema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Tiers of which every pod has its own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Local {
    /// The memory tier.
    pub memory: Memory,
    /// The disk tier.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<Disk>,
}

/// The memory tier.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Memory {
    /// Bytes of cache in each pod's memory. The sidecar's memory request and limit are this and what stands beside it. A pod can say another size by the annotation kvcachepool.io/memory.
    pub per_pod: Quantity,
    /// Page size; the node must have reserved pages of 2Mi or 1Gi.
    #[serde(default)]
    pub huge_pages: HugePages,
    /// What goes first when room is needed.
    #[serde(default)]
    pub eviction_policy: EvictionPolicy,
}

/// Page size of the memory tier.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum HugePages {
    /// Normal pages.
    #[default]
    None,
    /// 2 MiB pages.
    #[serde(rename = "2Mi")]
    Size2Mi,
    /// 1 GiB pages.
    #[serde(rename = "1Gi")]
    Size1Gi,
}

/// What goes first when room is needed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum EvictionPolicy {
    /// Three FIFO queues: resists scans.
    #[default]
    #[serde(rename = "S3FIFO")]
    S3Fifo,
    /// Least recently used.
    #[serde(rename = "LRU")]
    Lru,
    /// Least frequently used.
    #[serde(rename = "LFU")]
    Lfu,
    /// First in, first out.
    #[serde(rename = "FIFO")]
    Fifo,
}

/// The disk tier: exactly one of `emptyDir` and `ephemeral`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Disk {
    /// Bytes of cache on each pod's disk.
    pub per_pod: Quantity,
    /// On the node's own disk, counted as the pod's ephemeral storage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub empty_dir: Option<NodeDirectory>,
    /// On a volume that is made with the pod and goes with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ephemeral: Option<Ephemeral>,
}

/// The node's own disk; there is nothing to set.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NodeDirectory {}

/// A volume that is made with the pod and goes with it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Ephemeral {
    /// The storage class.
    #[schemars(schema_with = "schema::object_name")]
    pub storage_class_name: String,
}

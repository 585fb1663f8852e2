//! The resource itself, and the sections that belong to no tier.

use super::{
    Duration, Injection, KVCachePoolStatus, Local, Shared, Sidecar,
    schema::{self, is_default},
};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What the pods of one model share as their KV cache.
#[expect(
    clippy::duplicated_attributes,
    reason = "each printed column says its type"
)]
#[derive(CustomResource, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "kvcachepool.io",
    version = "v1alpha1",
    kind = "KVCachePool",
    plural = "kvcachepools",
    shortname = "kvpool",
    category = "kvcachepool",
    namespaced,
    status = "KVCachePoolStatus",
    derive = "PartialEq",
    doc = "A pool of KV cache for vLLM: pods with the label kvcachepool.io/pool get a cache of their own and share what the pool has.",
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status"
    ),
    printcolumn(name = "Pods", type_ = "integer", json_path = ".status.pods.injected"),
    printcolumn(
        name = "Attached",
        type_ = "integer",
        json_path = ".status.pods.attached",
        description = "Pods whose vLLM uses the cache."
    ),
    printcolumn(
        name = "Hit-Rate",
        type_ = "integer",
        json_path = ".status.hitRatePercent",
        description = "Percent of the requested tokens that came from the cache."
    ),
    printcolumn(
        name = "Memory",
        type_ = "string",
        json_path = ".status.tiers[?(@.name==\"memory\")].state"
    ),
    printcolumn(
        name = "Redis",
        type_ = "string",
        json_path = ".status.tiers[?(@.name==\"redis\")].state"
    ),
    printcolumn(
        name = "S3",
        type_ = "string",
        json_path = ".status.tiers[?(@.name==\"s3\")].state"
    ),
    printcolumn(
        name = "Reason",
        type_ = "string",
        priority = 1,
        json_path = ".status.conditions[?(@.type==\"Ready\")].reason"
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct KVCachePoolSpec {
    /// What is cached, and when a hit is taken.
    #[serde(default)]
    pub cache: Cache,
    /// Tiers of which every pod has its own.
    pub local: Local,
    /// Tiers that all pods of the pool share.
    #[serde(default, skip_serializing_if = "is_default")]
    pub shared: Shared,
    /// What goes to lower tiers, and how.
    #[serde(default)]
    pub write: Write,
    /// How pods get their sidecar.
    #[serde(default)]
    pub injection: Injection,
    /// The sidecar container.
    #[serde(default)]
    pub sidecar: Sidecar,
    /// Objects for a monitoring stack.
    #[serde(default, skip_serializing_if = "is_default")]
    pub monitoring: Monitoring,
    /// What becomes of what the pool stored in its bucket and its external Redis when it is deleted: Retain keeps it, Delete has a Job
    /// remove it, but for what another pool shares. Needs the chart value `allowPurge`.
    #[serde(default)]
    pub deletion_policy: DeletionPolicy,
}

/// What is cached, and when a hit is taken.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Cache {
    /// Least tokens of a chunk; rounded up to whole blocks of vLLM. Another value is another domain: the cache starts cold.
    pub chunk_tokens: i64,
    /// What of a request is stored: its prompt, or also what was generated.
    pub save: Save,
    /// Hits shorter than this many tokens are recomputed instead of loaded.
    pub min_load_tokens: i64,
    /// Longest wait of a request for a load; after it the prompt is computed.
    pub load_timeout: Duration,
}

impl Default for Cache {
    fn default() -> Self {
        Self {
            chunk_tokens: 256,
            save: Save::Prompt,
            min_load_tokens: 512,
            load_timeout: Duration("2s".to_string()),
        }
    }
}

/// What of a request is stored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Save {
    /// The prompt.
    #[default]
    Prompt,
    /// The prompt and what was generated.
    PromptAndDecode,
}

/// What goes to lower tiers, and how.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Write {
    /// When a chunk goes to lower tiers: as soon as it is complete, a minute later or sooner where much waits, or never.
    pub policy: WritePolicy,
    /// Which chunks go there: all, or those that were hit once.
    pub admission: Admission,
    /// How chunks are encoded there. FP8, INT8, INT4 and CacheGen lose precision: to or from one of them is another domain, the cache starts cold.
    pub codec: Codec,
}

/// When a chunk goes to lower tiers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum WritePolicy {
    /// When it is complete.
    #[default]
    WriteThrough,
    /// A minute after it is complete, sooner where much waits, and all at a flush; what leaves memory before that is lost.
    WriteBack,
    /// Never.
    None,
}

/// Which chunks go to lower tiers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Admission {
    /// All.
    #[default]
    All,
    /// Those that were hit.
    Reused,
}

/// How chunks are encoded in lower tiers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Codec {
    /// As vLLM holds them.
    #[default]
    None,
    /// Compressed, exact.
    Lossless,
    /// 8-bit floats.
    #[serde(rename = "FP8")]
    Fp8,
    /// 8-bit integers by group.
    #[serde(rename = "INT8")]
    Int8,
    /// 4-bit integers by group.
    #[serde(rename = "INT4")]
    Int4,
    /// Quantised and entropy coded.
    CacheGen,
}

/// Objects for a monitoring stack.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Monitoring {
    /// A PodMonitor of the Prometheus operator for the sidecars; made where the cluster knows that kind. Needs the chart value
    /// `allowPodMonitors`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod_monitor: Option<PodMonitor>,
}

/// A PodMonitor for the sidecars.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct PodMonitor {
    /// Labels of the PodMonitor, by which a Prometheus selects it.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "schema::labels")]
    pub labels: BTreeMap<String, String>,
}

/// What becomes of the stored chunks when the pool is deleted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum DeletionPolicy {
    /// They stay.
    #[default]
    Retain,
    /// This pool's objects are purged.
    Delete,
}

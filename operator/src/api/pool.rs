//! The resource itself, and the sections that do not belong to a tier.

use super::{
    Duration, Injection, KVCachePoolStatus, Local, Shared, Sidecar,
    schema::{self, is_default},
};
use kube::CustomResource;
use kvcachepool_protocol::config::{self, Admission, Codec, WritePolicy};
use kvcachepool_protocol::message::Save;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// The KV cache that the pods of one model use.
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
    doc = "A pool of KV cache for vLLM. Pods with the label kvcachepool.io/pool get a sidecar with a cache, and share the tiers of the pool.",
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
    /// What is cached, and when a hit is used.
    #[serde(default)]
    pub cache: Cache,
    /// Tiers that every pod has for itself.
    pub local: Local,
    /// Tiers that all pods of the pool share.
    #[serde(default, skip_serializing_if = "is_default")]
    pub shared: Shared,
    /// What is written to lower tiers, and when.
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
    /// What happens to the pool's objects in its bucket, its file system and its external Redis when the pool is deleted. Retain keeps them.
    /// Delete runs a Job that removes them, except in tiers that another pool shares; it needs the chart value `allowPurge`.
    #[serde(default)]
    pub deletion_policy: DeletionPolicy,
}

/// What is cached, and when a hit is used.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Cache {
    /// Minimum tokens per chunk, rounded up to whole blocks of vLLM. Another value is another domain: the cache starts cold.
    pub chunk_tokens: i64,
    /// What is stored of a request: its prompt, also the generated tokens, or nothing. None: requests only load.
    #[schemars(schema_with = "schema::choice::<Save>")]
    pub save: Save,
    /// The last tokens of every prompt, and with more than 0 everything generated, are not stored.
    pub skip_last_tokens: i64,
    /// Shorter hits are recomputed instead of loaded.
    pub min_load_tokens: i64,
    /// Longest wait of a request for a load. Then vLLM computes the prompt.
    pub load_timeout: Duration,
}

impl Default for Cache {
    fn default() -> Self {
        let of_sidecar = config::Cache::default();
        Self {
            chunk_tokens: of_sidecar.chunk_tokens.into(),
            save: of_sidecar.save,
            skip_last_tokens: of_sidecar.skip_last_tokens.into(),
            min_load_tokens: of_sidecar.min_load_tokens.into(),
            load_timeout: Duration(of_sidecar.load_timeout.to_string()),
        }
    }
}

/// What is written to lower tiers, and when.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Write {
    /// When chunks are written to lower tiers: as soon as they are complete, a minute later (earlier if much waits), or never.
    #[schemars(schema_with = "schema::choice::<WritePolicy>")]
    pub policy: WritePolicy,
    /// Which chunks are written to lower tiers: all, or those that had a hit.
    #[schemars(schema_with = "schema::choice::<Admission>")]
    pub admission: Admission,
    /// How chunks are packed in lower tiers. FP8, INT8, INT4 and CacheGen lose precision. Each of them is its own domain: after a change to
    /// or from one of them the cache starts cold.
    #[schemars(schema_with = "schema::choice::<Codec>")]
    pub codec: Codec,
}

/// Objects for a monitoring stack.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Monitoring {
    /// PodMonitors of the Prometheus operator for the sidecars, and for the exporters of managed servers. They are created if the cluster
    /// has that kind, and need the chart value `allowPodMonitors`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod_monitor: Option<PodMonitor>,
}

/// PodMonitors for the sidecars and the exporters.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct PodMonitor {
    /// Labels of the PodMonitors, with which a Prometheus selects them.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "schema::labels")]
    pub labels: BTreeMap<String, String>,
    /// Time between scrapes. Default: that of the Prometheus.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interval: Option<Duration>,
    /// Longest duration of a scrape. Default: that of the Prometheus.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scrape_timeout: Option<Duration>,
    /// Changes of a target's labels before a scrape, as in a PodMonitor.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::objects")]
    pub relabelings: Vec<Map<String, Value>>,
    /// Changes of the labels of each scraped series, as in a PodMonitor.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::objects")]
    pub metric_relabelings: Vec<Map<String, Value>>,
}

/// What happens to the stored chunks when the pool is deleted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum DeletionPolicy {
    /// They are kept.
    #[default]
    Retain,
    /// They are deleted.
    Delete,
}

//! The status of a pool. It has no floats and no growing counters, so that it is written only if something changed.

use super::{Duration, Size, schema};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The state of a pool, as the operator observed it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct KVCachePoolStatus {
    /// Generation of the spec that this status describes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Accepted, SharedTiersReady, InjectionReady, SidecarsReady and Ready.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
    /// While the breaker is open: the owners whose new pods start without a sidecar, and why. Absent = none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub injection_paused: Option<InjectionPaused>,
    /// Number of pods by state.
    pub pods: Pods,
    /// Reasons why pods run without a sidecar, the most frequent first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 10))]
    pub skipped: Vec<Skipped>,
    /// Servers of `shared.redis.managed`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub managed_servers: Option<ManagedServers>,
    /// Tiers of the pool.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    pub tiers: Vec<Tier>,
    /// Percent of the requested tokens that came from the cache, within the window.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hit_rate_percent: Option<i64>,
    /// Length of the window of the hit rate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hit_rate_window: Option<Duration>,
    /// Number of pods whose counters are part of hit rate and usage.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_pods: Option<i64>,
    /// Versions of running sidecars, the most frequent first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 10))]
    pub versions: Vec<Version>,
}

/// Injection is paused: for which owners, since when and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct InjectionPaused {
    /// Hash of the settings that keep pods from running. Pods that would get other settings are injected.
    #[serde(default)]
    #[schemars(schema_with = "schema::short")]
    pub hash: String,
    /// Start of the pause, or time when a probe became due. With owners: that of the oldest.
    #[schemars(schema_with = "schema::time")]
    pub since: Time,
    /// The next pod of the pool gets a sidecar as a probe. False if owners are listed: each has its own probe.
    #[serde(default)]
    pub trial: bool,
    /// Number of consecutive failed probes. The pause between two probes doubles with each.
    #[serde(default)]
    pub failed_probes: i64,
    /// Why pods do not run, and what happens to new ones.
    #[serde(default)]
    #[schemars(schema_with = "schema::message")]
    pub message: String,
    /// Owners (controllers of pods) for which injection is paused. Empty = it is paused for every pod of the pool.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub owners: Vec<PausedOwner>,
}

/// An owner whose new pods start without a sidecar.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct PausedOwner {
    /// API version of the owner; empty for pods without an owner.
    #[schemars(schema_with = "schema::short")]
    pub api_version: String,
    /// Kind of the owner, such as ReplicaSet.
    #[schemars(schema_with = "schema::short")]
    pub kind: String,
    /// Name of the owner.
    #[schemars(schema_with = "schema::object_name")]
    pub name: String,
    /// Uid of the owner.
    #[schemars(schema_with = "schema::short")]
    pub uid: String,
    /// Name of the cause. The page Troubleshooting of the documentation explains those that are not Kubernetes' own.
    #[schemars(schema_with = "schema::short")]
    pub reason: String,
    /// Start of the pause, or time when a probe became due.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::time")]
    pub since: Option<Time>,
    /// The next pod gets a sidecar as a probe.
    pub trial: bool,
    /// Number of consecutive failed probes.
    pub failed_probes: i64,
    /// Why pods do not run.
    #[schemars(schema_with = "schema::message")]
    pub message: String,
}

/// Number of pods by state.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Pods {
    /// Pods with the pool's label.
    pub matched: i64,
    /// Pods with a sidecar.
    pub injected: i64,
    /// Pods whose vLLM has registered with its sidecar and is connected.
    pub attached: i64,
    /// Pods without a sidecar because injection refused them, with a named reason.
    pub skipped: i64,
    /// Pods without a sidecar because the webhook was not called.
    pub missed: i64,
    /// Pods whose sidecar has older settings than the pool.
    pub outdated: i64,
}

/// Pods that run without a sidecar for one reason.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Skipped {
    /// Name of the reason. The page Troubleshooting of the documentation explains it.
    #[schemars(schema_with = "schema::short")]
    pub reason: String,
    /// Number of pods.
    pub count: i64,
    /// Name of one of these pods.
    #[schemars(schema_with = "schema::object_name")]
    pub example_pod: String,
}

/// Number of managed servers by state.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ManagedServers {
    /// Servers that the pool wants.
    pub desired: i64,
    /// Servers of these that answer their readiness probe.
    pub ready: i64,
}

/// State of one tier.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Tier {
    /// memory, disk, redis, filesystem or s3.
    #[schemars(schema_with = "schema::short")]
    pub name: String,
    /// State of the tier.
    pub state: TierState,
    /// Why the tier is not Ready.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(schema_with = "schema::short")]
    pub reason: String,
    /// Bytes in use, in the observed pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used: Option<Size>,
    /// Capacity in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<Size>,
}

/// State of a tier.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum TierState {
    /// The tier serves.
    Ready,
    /// Some pods report an error of the tier.
    Degraded,
    /// No pod reaches the tier.
    Unavailable,
    /// No sidecar has answered recently.
    Stale,
    /// No sidecar has reported or opened the tier yet.
    #[default]
    Unknown,
}

/// Pods with one version of the sidecar.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Version {
    /// Version of the sidecar.
    #[schemars(schema_with = "schema::short")]
    pub version: String,
    /// Number of pods.
    pub pods: i64,
}

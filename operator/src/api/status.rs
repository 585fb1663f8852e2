//! What the operator says of a pool. No floats, no counters that grow: it is written only when something changed.

use super::{Duration, Quantity, schema};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What the operator says of a pool.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct KVCachePoolStatus {
    /// Generation of the spec that this speaks of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Accepted, SharedTiersReady, InjectionReady, SidecarsReady and Ready.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
    /// While the breaker is open: whose new pods start without a sidecar, and why. Absent = nobody's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub injection_paused: Option<InjectionPaused>,
    /// Counts of pods.
    pub pods: Pods,
    /// Why pods run without a sidecar, by reason, the most frequent first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 10))]
    pub skipped: Vec<Skipped>,
    /// The tiers that the pool has.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    pub tiers: Vec<Tier>,
    /// Percent of the requested tokens that came from the cache, within the window.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hit_rate_percent: Option<i64>,
    /// Time over which the hit rate is taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hit_rate_window: Option<Duration>,
    /// Pods whose numbers went into hit rate and use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_pods: Option<i64>,
    /// Versions of the sidecar that run, the most frequent first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 10))]
    pub versions: Vec<Version>,
}

/// Whose new pods get no sidecar for the time being, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct InjectionPaused {
    /// Hash of the settings that keep pods from running; pods that would get others are injected.
    #[serde(default)]
    #[schemars(schema_with = "schema::short")]
    pub hash: String,
    /// Since when injection is paused, or a probe is due. With owners: of the oldest.
    #[schemars(schema_with = "schema::time")]
    pub since: Time,
    /// The next pod of the pool gets a sidecar as a probe. False where owners are listed: each has its own probe.
    #[serde(default)]
    pub trial: bool,
    /// Probes that failed one after the other; the pause between two probes doubles with each.
    #[serde(default)]
    pub failed_probes: i64,
    /// What keeps pods from running, and what happens to new ones.
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
    /// Name of the cause; docs/guides/troubleshooting.md explains those that are not Kubernetes' own.
    #[schemars(schema_with = "schema::short")]
    pub reason: String,
    /// Since when injection is paused, or a probe is due.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::time")]
    pub since: Option<Time>,
    /// The next pod gets a sidecar as a probe.
    pub trial: bool,
    /// Probes that failed one after the other.
    pub failed_probes: i64,
    /// What keeps pods from running.
    #[schemars(schema_with = "schema::message")]
    pub message: String,
}

/// Counts of pods.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Pods {
    /// With the pool's label.
    pub matched: i64,
    /// With a sidecar.
    pub injected: i64,
    /// Whose vLLM has said hello to its sidecar and is connected.
    pub attached: i64,
    /// Without a sidecar, for a reason that injection named.
    pub skipped: i64,
    /// Without a sidecar, because injection was not asked.
    pub missed: i64,
    /// With a sidecar of an older spec that waits for a restart.
    pub outdated: i64,
}

/// Pods that run without a sidecar for one reason.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Skipped {
    /// The reason, as docs/guides/troubleshooting.md explains it.
    #[schemars(schema_with = "schema::short")]
    pub reason: String,
    /// Number of pods.
    pub count: i64,
    /// One of them.
    #[schemars(schema_with = "schema::object_name")]
    pub example_pod: String,
}

/// One tier.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Tier {
    /// memory, disk, redis or s3.
    #[schemars(schema_with = "schema::short")]
    pub name: String,
    /// How it is.
    pub state: TierState,
    /// Why, where it is not Ready.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(schema_with = "schema::short")]
    pub reason: String,
    /// Bytes held, of the pods that were observed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used: Option<Quantity>,
    /// Bytes that there is room for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<Quantity>,
}

/// How a tier is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum TierState {
    /// It serves.
    Ready,
    /// Some pods have trouble with it.
    Degraded,
    /// No pod reaches it.
    Unavailable,
    /// Nobody could be asked of late.
    Stale,
    /// Nobody was asked yet, or none has opened it yet.
    #[default]
    Unknown,
}

/// Pods that run one version of the sidecar.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Version {
    /// The version.
    #[schemars(schema_with = "schema::short")]
    pub version: String,
    /// Number of pods.
    pub pods: i64,
}

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
    /// While sidecars of the present settings cannot start: what keeps new pods from getting one. Absent = nothing does.
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

/// Why new pods get no sidecar for the time being.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct InjectionPaused {
    /// Hash of the settings that do not start; others are injected.
    #[serde(default)]
    #[schemars(schema_with = "schema::short")]
    pub hash: String,
    /// Since when it is so, or a pod is tried.
    #[schemars(schema_with = "schema::time")]
    pub since: Time,
    /// The next pod gets a sidecar, to see whether it starts.
    #[serde(default)]
    pub trial: bool,
    /// What hangs, and what becomes of new pods.
    #[serde(default)]
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
    /// The reason, as docs/troubleshooting.md explains it.
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

//! The sidecar container.

use super::schema::{self, is_default};
use k8s_openapi::api::core::v1::{EnvVar, LocalObjectReference, ResourceRequirements};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The sidecar container.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Sidecar {
    /// Image, instead of the operator's own.
    #[serde(skip_serializing_if = "String::is_empty")]
    #[schemars(schema_with = "schema::image")]
    pub image: String,
    /// When the image is pulled.
    pub image_pull_policy: ImagePullPolicy,
    /// Secrets to pull the image with; added to those of the pod.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::bounded::<Vec<LocalObjectReference>>")]
    pub image_pull_secrets: Vec<LocalObjectReference>,
    /// Resources of the container: cpu, ephemeral-storage, and in limits those with a domain. Memory is reckoned from
    /// local.memory.perPod and not taken from here.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(schema_with = "schema::bounded::<ResourceRequirements>")]
    pub resources: ResourceRequirements,
    /// Who moves bytes between vLLM and the cache: vLLM's own worker, or the sidecar by a window, which for GPUs needs gpuAccess.
    pub transfer: Transfer,
    /// How the sidecar sees the GPUs of vLLM's container: not at all, by NVIDIA_VISIBLE_DEVICES, which the node's container runtime
    /// must heed, or by the resource claims of that container. A pod that has none gets a sidecar without; docs/guides/gpus.md says more.
    pub gpu_access: GpuAccess,
    /// Least level that is logged.
    pub log_level: LogLevel,
    /// Environment of the container.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::bounded::<Vec<EnvVar>>")]
    pub env: Vec<EnvVar>,
    /// Any other key of the sidecar's config file, in the file's own form.
    #[serde(skip_serializing_if = "Map::is_empty")]
    #[schemars(schema_with = "schema::settings")]
    pub settings: Map<String, Value>,
    /// How running pods get a new version of the sidecar.
    pub update_strategy: UpdateStrategy,
}

/// When an image is pulled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ImagePullPolicy {
    /// When the node has none.
    #[default]
    IfNotPresent,
    /// At every start.
    Always,
    /// Never.
    Never,
}

/// Who moves bytes between GPU and cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Transfer {
    /// What is known to be better on the machine: so far the worker.
    #[default]
    Auto,
    /// vLLM's worker.
    Engine,
    /// The sidecar, by a window of device memory; of host memory where vLLM runs on CPUs.
    CudaWindow,
}

/// How the sidecar sees the GPUs of vLLM's container.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum GpuAccess {
    /// Not at all.
    #[default]
    None,
    /// By NVIDIA_VISIBLE_DEVICES, which the node's container runtime must heed: all GPUs of the node, or those that vLLM's container
    /// names itself.
    VisibleDevices,
    /// By the resource claims that vLLM's container has: the same GPUs and no others.
    ResourceClaim,
}

/// Least level that is logged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// Errors.
    Error,
    /// And warnings.
    Warn,
    /// And what changes.
    #[default]
    Info,
    /// And sessions in detail.
    Debug,
    /// And frames.
    Trace,
}

/// How running pods get a new version of the sidecar.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct UpdateStrategy {
    /// When the pod restarts, or at once by exchanging the image in place while vLLM runs on.
    #[serde(rename = "type")]
    pub kind: UpdateStrategyType,
}

/// When running pods get a new version of the sidecar.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum UpdateStrategyType {
    /// When the pod restarts.
    #[default]
    OnPodRestart,
    /// At once, vLLM runs on. The operator must be allowed to patch pods.
    InPlace,
}

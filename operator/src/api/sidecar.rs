//! `spec.sidecar`: the sidecar container.

use super::choices::GpuAccess;
use super::schema::{self, is_default};
use k8s_openapi::api::core::v1::{EnvVar, LocalObjectReference, ResourceRequirements};
use kvcachepool_protocol::config::{LogLevel, TransferMode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The sidecar container.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Sidecar {
    /// Image of the sidecar. Default: the operator's own image.
    #[serde(skip_serializing_if = "String::is_empty")]
    #[schemars(schema_with = "schema::image")]
    pub image: String,
    /// When the image is pulled.
    pub image_pull_policy: ImagePullPolicy,
    /// Secrets to pull the image with, in addition to those of the pod.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::bounded::<Vec<LocalObjectReference>>")]
    pub image_pull_secrets: Vec<LocalObjectReference>,
    /// Resources of the container: cpu, ephemeral-storage, and in limits resources with a domain. Memory is computed from
    /// local.memory.perPod and ignored here.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(schema_with = "schema::resources")]
    pub resources: ResourceRequirements,
    /// Which process copies between vLLM and the cache: Engine (vLLM's worker) or CudaWindow (the sidecar, through a window). A window on a
    /// GPU needs gpuAccess. Auto is Engine.
    #[schemars(schema_with = "schema::choice::<TransferMode>")]
    pub transfer: TransferMode,
    /// How the sidecar gets access to the GPUs of vLLM's container: not at all, by NVIDIA_VISIBLE_DEVICES, which the node's container
    /// runtime must support, or by the resource claims of that container. In a pod without GPUs the sidecar has none.
    /// The page GPUs of the documentation says more.
    pub gpu_access: GpuAccess,
    /// Minimum level of log lines.
    #[schemars(schema_with = "schema::choice::<LogLevel>")]
    pub log_level: LogLevel,
    /// Environment of the container.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::bounded::<Vec<EnvVar>>")]
    pub env: Vec<EnvVar>,
    /// Other keys of the sidecar's config file, in the form of the file.
    #[serde(skip_serializing_if = "Map::is_empty")]
    #[schemars(schema_with = "schema::settings")]
    pub settings: Map<String, Value>,
    /// How running pods get a new version of the sidecar.
    pub update_strategy: UpdateStrategy,
}

/// When an image is pulled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ImagePullPolicy {
    /// If the node does not have it.
    #[default]
    IfNotPresent,
    /// At every start of a pod.
    Always,
    /// Never.
    Never,
}

/// How running pods get a new version of the sidecar.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct UpdateStrategy {
    /// OnPodRestart updates a pod when it is created again. InPlace changes the image of running sidecars while vLLM keeps running.
    #[serde(rename = "type")]
    pub kind: UpdateStrategyType,
}

/// When running pods get a new version of the sidecar.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum UpdateStrategyType {
    /// When the pod is created again.
    #[default]
    OnPodRestart,
    /// Immediately, while vLLM keeps running. The operator needs the permission to patch pods.
    InPlace,
}

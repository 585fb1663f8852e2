//! `spec.injection`: whether and how pods get a sidecar.

use super::choices::{ExistingConnector, Mode};
use super::{Size, schema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How pods get their sidecar.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Injection {
    /// Whether pods with the pool's label get a sidecar.
    pub mode: Mode,
    /// Name of the container that runs vLLM. Default: the only container, or the only one with an accelerator.
    #[serde(skip_serializing_if = "String::is_empty")]
    #[schemars(schema_with = "schema::label_name")]
    pub container: String,
    /// What to do if vLLM has a connector of its own: Refuse leaves the pod alone, Compose adds kvcachepool beside a connector that
    /// transfers KV from prefill to decode.
    pub existing_connector: ExistingConnector,
    /// Largest memory tier that a pod may request with the annotation kvcachepool.io/memory. Default: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_max: Option<Size>,
    /// What to do with pods that were created without a sidecar while the operator was down: Report counts them, Evict also evicts them one
    /// at a time.
    pub on_missed: OnMissed,
}

/// What to do with pods that were created without a sidecar.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum OnMissed {
    /// Count them and report them in the status.
    #[default]
    Report,
    /// Evict them one at a time, as their disruption budgets allow.
    Evict,
}

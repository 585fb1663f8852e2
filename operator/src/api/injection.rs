//! How pods get their sidecar.

use super::{Quantity, schema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How pods get their sidecar.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Injection {
    /// Whether pods with the pool's label get a sidecar.
    pub mode: Mode,
    /// Name of the container that runs vLLM; absent = the only one, or the only one with an accelerator.
    #[serde(skip_serializing_if = "String::is_empty")]
    #[schemars(schema_with = "schema::label_name")]
    pub container: String,
    /// What to do where vLLM has a connector of its own: leave the pod alone, or put ours beside a transport between prefill and decode.
    pub existing_connector: ExistingConnector,
    /// Most bytes that a pod may ask for by the annotation kvcachepool.io/memory; absent = no bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_max: Option<Quantity>,
    /// What to do with pods that started without a sidecar while the operator was away: count them, or also evict them one at a time.
    pub on_missed: OnMissed,
}

/// Whether pods get a sidecar.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Mode {
    /// They do.
    #[default]
    Enabled,
    /// New pods do not.
    Disabled,
}

/// What to do where vLLM has a connector of its own.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ExistingConnector {
    /// Leave the pod alone.
    #[default]
    Refuse,
    /// Put ours beside it, where it is a transport.
    Compose,
}

/// What to do with pods that started without a sidecar.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum OnMissed {
    /// Count them.
    #[default]
    Report,
    /// Evict them, one at a time, as their disruption budgets allow.
    Evict,
}

//! Choices of a pool that decide how a pod is injected. The fuzz target of injection includes this file, which needs nothing else of the API.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Whether new pods get a sidecar.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Mode {
    /// New pods get a sidecar.
    #[default]
    Enabled,
    /// New pods get no sidecar.
    Disabled,
}

/// What to do if vLLM has a connector of its own.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ExistingConnector {
    /// Leave the pod alone.
    #[default]
    Refuse,
    /// Add kvcachepool beside it, if it transfers KV from prefill to decode.
    Compose,
}

/// How the sidecar gets access to the GPUs of vLLM's container.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum GpuAccess {
    /// Not at all.
    #[default]
    None,
    /// By NVIDIA_VISIBLE_DEVICES, which the node's container runtime must support: all GPUs of the node, or those that vLLM's container
    /// names itself.
    VisibleDevices,
    /// By the resource claims of vLLM's container: exactly the same GPUs.
    ResourceClaim,
}

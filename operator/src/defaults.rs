//! Defaults for fields that a pool does not set, and limits of fields that it sets.

use crate::policy::Policy;

/// Defaults of the running operator, the same for every pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Defaults {
    /// Image of sidecars whose pool names none: the operator's own image, which nodes with an operator have already pulled.
    pub image: String,
    /// Version of this operator, used in annotations and labels.
    pub version: String,
    /// Namespace of the operator and the canary.
    pub namespace: String,
    /// Image of managed servers whose pool names none.
    pub redis_image: String,
    /// Image of exporters of managed servers whose pool names none.
    pub redis_exporter_image: String,
    /// User and group of managed servers. `None` = the platform assigns them.
    pub redis_run_as_user: Option<u32>,
    /// Secrets for pulling the images of every pool, besides the pool's own.
    pub image_pull_secrets: Vec<String>,
    /// What pools may set.
    pub policy: Policy,
}

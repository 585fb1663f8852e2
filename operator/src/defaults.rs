//! Defaults for fields that a pool does not set.

/// Defaults of the running operator, the same for every pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Defaults {
    /// Image of sidecars whose pool names none: the operator's own image, which nodes with an operator have already pulled.
    pub image: String,
    /// Version of this operator, used in annotations and labels.
    pub version: String,
    /// Namespace of the operator and the canary.
    pub namespace: String,
}

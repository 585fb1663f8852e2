//! What the operator itself brings where a pool says nothing.

/// Of the running operator; the same for every pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Defaults {
    /// Image of sidecars whose pool names none: the operator's own, which every node with an operator has already proved to be pullable.
    pub image: String,
    /// Version of this operator, which stands in annotations and labels.
    pub version: String,
    /// Namespace of the operator: where the canary lives.
    pub namespace: String,
}

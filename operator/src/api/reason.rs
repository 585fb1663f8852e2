//! Why a pool is accepted or not.

/// Reason of the condition `Accepted`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reason {
    /// The spec is in order.
    Accepted,
    /// A rule of the schema does not hold.
    InvalidSpec,
    /// A key of `sidecar.settings` cannot be used.
    InvalidSettings,
    /// A field asks for something that this version does not do.
    NotYetSupported,
    /// The stored object cannot be read.
    Malformed,
}

impl Reason {
    /// All, for the docs.
    pub const ALL: [Reason; 5] = [
        Reason::Accepted,
        Reason::InvalidSpec,
        Reason::InvalidSettings,
        Reason::NotYetSupported,
        Reason::Malformed,
    ];

    /// As conditions and docs write it.
    pub fn name(self) -> &'static str {
        match self {
            Reason::Accepted => "Accepted",
            Reason::InvalidSpec => "InvalidSpec",
            Reason::InvalidSettings => "InvalidSettings",
            Reason::NotYetSupported => "NotYetSupported",
            Reason::Malformed => "Malformed",
        }
    }

    /// What it means and what to do, for the docs.
    pub fn about(self) -> &'static str {
        match self {
            Reason::Accepted => "The pool's spec is in order.",
            Reason::InvalidSpec => {
                "A field has a value that it cannot have; the message names the field and says what to write. The object was stored before the rule existed."
            }
            Reason::InvalidSettings => {
                "A key of `spec.sidecar.settings` is unknown, has a wrong value, or belongs to another field of the pool; the message names it."
            }
            Reason::NotYetSupported => {
                "A field asks for something that this version does not do; the message names it. Remove the field or set it to its default."
            }
            Reason::Malformed => {
                "The stored object cannot be read by this version: a field has another type than the schema says, or a value that only a newer version knows. Write the pool anew, or update the operator."
            }
        }
    }
}

//! Operations of a tier, as a value.

/// One per operation of [`crate::Tier`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    Lookup,
    Head,
    Get,
    Put,
    Remove,
    Usage,
    List,
}

impl Op {
    pub const ALL: [Self; 7] = [
        Self::Lookup,
        Self::Head,
        Self::Get,
        Self::Put,
        Self::Remove,
        Self::Usage,
        Self::List,
    ];

    /// Name in metrics and status.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lookup => "lookup",
            Self::Head => "head",
            Self::Get => "get",
            Self::Put => "put",
            Self::Remove => "remove",
            Self::Usage => "usage",
            Self::List => "list",
        }
    }

    /// Whether the operation changes the tier's content.
    pub fn writes(self) -> bool {
        matches!(self, Self::Put | Self::Remove)
    }
}

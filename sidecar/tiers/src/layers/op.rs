//! Operations of a tier, as a value.

kvcachepool_engine::named! {
    /// One per operation of [`crate::Tier`].
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum Op {
        Lookup = "lookup",
        Head = "head",
        Get = "get",
        Put = "put",
        Remove = "remove",
        Usage = "usage",
        List = "list",
    }
}

impl Op {
    /// Whether the operation changes the tier's content.
    pub fn writes(self) -> bool {
        matches!(self, Self::Put | Self::Remove)
    }
}

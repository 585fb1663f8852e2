//! What goes wrong in a tier, by name: whose fault it is and whether it is worth trying again.

use super::{Cause, Kind};

/// An operation of a tier failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{tier}: {}: {detail}{}", cause.name(), object.as_ref().map(|o| format!(" (object {o})")).unwrap_or_default())]
pub struct TierError {
    /// Which tier.
    pub tier: Kind,
    /// Why.
    pub cause: Cause,
    /// The object, where it is about one.
    pub object: Option<String>,
    /// For people: what happened and, where there is something, what to do.
    pub detail: String,
    /// It is about one of several servers of the tier: the others serve on, and the tier as a whole is no worse.
    pub of_a_part: bool,
}

impl TierError {
    /// About the tier as a whole.
    pub fn new(tier: Kind, cause: Cause, detail: impl Into<String>) -> Self {
        Self {
            tier,
            cause,
            object: None,
            detail: detail.into(),
            of_a_part: false,
        }
    }

    /// It says something about the tier as a whole: the breaker counts it.
    pub fn of_the_tier(&self) -> bool {
        self.cause.of_the_tier() && !self.of_a_part
    }

    /// About one object.
    #[must_use]
    pub fn about(self, object: impl Into<String>) -> Self {
        Self {
            object: Some(object.into()),
            ..self
        }
    }
}

//! Errors of tiers: the cause, and whether a retry can help.

use super::{Cause, Kind};

/// A failed operation of a tier.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{tier}: {}: {detail}{}", cause.name(), object.as_ref().map(|o| format!(" (object {o})")).unwrap_or_default())]
pub struct TierError {
    pub tier: Kind,
    pub cause: Cause,
    /// The object that the error concerns, if any.
    pub object: Option<String>,
    /// What happened and, if possible, what to do.
    pub detail: String,
    /// The error concerns one of several servers of the tier: the others still serve, and the tier as a whole is unaffected.
    pub of_a_part: bool,
}

impl TierError {
    /// An error of the tier as a whole.
    pub fn new(tier: Kind, cause: Cause, detail: impl Into<String>) -> Self {
        Self {
            tier,
            cause,
            object: None,
            detail: detail.into(),
            of_a_part: false,
        }
    }

    /// Whether it concerns the tier as a whole: then the breaker counts it.
    pub fn of_the_tier(&self) -> bool {
        self.cause.of_the_tier() && !self.of_a_part
    }

    /// Whether it may concern one object alone, so that the same is worth trying for others.
    pub fn of_one_object(&self) -> bool {
        self.object.is_some() && matches!(self.cause, Cause::Denied | Cause::Io)
    }

    /// Sets the object that the error concerns.
    #[must_use]
    pub fn about(self, object: impl Into<String>) -> Self {
        Self {
            object: Some(object.into()),
            ..self
        }
    }
}

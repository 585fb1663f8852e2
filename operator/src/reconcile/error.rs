//! Why an object is not as its pool wants it, and why a reconcile pass failed.

use crate::status::Reason;
use std::time::Duration;
use thiserror::Error;

/// Longest reconcile pass: an API server that does not answer must not hold a pool up for ever.
pub const PASS_TIME_MAX: Duration = Duration::from_secs(30);

/// Why an object is not as the pool wants it.
#[derive(Debug, Error)]
pub enum ApplyError {
    /// No password can be made.
    #[error("the operating system gives no random bytes for a password")]
    NoRandom,
    /// The name belongs to an object of another owner.
    #[error("{kind} {name} exists and does not belong to this pool; rename it or the pool")]
    NameTaken { kind: String, name: String },
    /// The API server refused it.
    #[error("{kind} {name} cannot be applied: {source}")]
    Api {
        kind: String,
        name: String,
        #[source]
        source: Box<kube::Error>,
    },
}

impl ApplyError {
    /// The reason in conditions and events.
    pub fn reason(&self) -> Reason {
        match self {
            Self::NameTaken { .. } => Reason::NameTaken,
            Self::Api { .. } | Self::NoRandom => Reason::ApplyFailed,
        }
    }
}

/// Why a reconcile pass failed.
#[derive(Debug, Error)]
pub enum PassError {
    /// An object could not be applied; all else was done.
    #[error("{source}")]
    Object {
        source: ApplyError,
        /// When the next pass is due for other reasons.
        within: Duration,
    },
    #[error("the status cannot be written: {0}")]
    Status(#[source] Box<kube::Error>),
    /// The finalizer of a deleted pool.
    #[error("the finalizer cannot be taken away: {0}")]
    Released(#[source] Box<kube::Error>),
    /// The API server did not answer.
    #[error("it took longer than {:?}", PASS_TIME_MAX)]
    TimedOut,
}

impl PassError {
    /// Longest pause before the next pass.
    pub fn within(&self) -> Duration {
        match self {
            Self::Object { within, .. } => *within,
            Self::Status(_) | Self::Released(_) | Self::TimedOut => Duration::MAX,
        }
    }
}

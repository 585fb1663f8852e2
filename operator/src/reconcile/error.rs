//! Errors of applying an object, and of a reconcile pass.

use crate::pki::PkiError;
use crate::status::Reason;
use std::time::Duration;
use thiserror::Error;

/// Timeout of a reconcile pass, in case the API server does not respond.
pub const PASS_TIMEOUT: Duration = Duration::from_secs(30);

/// Why an object could not be applied.
#[derive(Debug, Error)]
pub enum ApplyError {
    #[error("the operating system returned no random bytes for a password")]
    NoRandom,
    #[error("no certificate can be made for the managed servers: {0}")]
    NoCertificate(#[from] PkiError),
    /// An object with this name belongs to another owner.
    #[error("{kind} {name} exists and does not belong to this pool; rename it or the pool")]
    NameTaken { kind: String, name: String },
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
            Self::Api { .. } | Self::NoRandom | Self::NoCertificate(_) => Reason::ApplyFailed,
        }
    }
}

/// Why a reconcile pass failed.
#[derive(Debug, Error)]
pub enum PassError {
    /// An object could not be applied. All other steps were executed.
    #[error("{source}")]
    Object {
        source: ApplyError,
        /// Time until the next pass that is due for other reasons.
        within: Duration,
    },
    #[error("the pool cannot be read: {0}")]
    Pool(#[source] Box<kube::Error>),
    #[error("the status cannot be written: {0}")]
    Status(#[source] Box<kube::Error>),
    #[error("the finalizer of the deleted pool cannot be removed: {0}")]
    Finalizer(#[source] Box<kube::Error>),
    #[error("the API server did not respond within {:?}", PASS_TIMEOUT)]
    TimedOut,
}

impl PassError {
    /// Maximum delay of the next pass.
    pub fn within(&self) -> Duration {
        match self {
            Self::Object { within, .. } => *within,
            Self::Pool(_) | Self::Status(_) | Self::Finalizer(_) | Self::TimedOut => Duration::MAX,
        }
    }
}

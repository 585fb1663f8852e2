//! Certificates of the webhook: where they come from, when they change, and whether the API server will believe them.
//! `plan` decides and is pure; `authority` makes certificates; `store`, `configuration`, `files` read and write; `call` asks the own port
//! the way an API server does; `run` goes round. Nothing here reads a Secret other than the operator's own.

mod authority;
mod call;
mod configuration;
mod files;
pub mod plan;
pub mod run;
mod store;
#[cfg(test)]
mod tests;

pub use plan::Lifetimes;
pub use run::{Mode, Upkeep, run};

use std::future::Future;
use std::time::Duration;
use tokio::time::timeout;

/// Longest call of the API server: one that does not answer must not keep the certificate from being looked after.
const CALL_TIME_MAX: Duration = Duration::from_secs(5);

async fn in_time<T>(call: impl Future<Output = Result<T, kube::Error>>) -> Result<T, kube::Error> {
    match timeout(CALL_TIME_MAX, call).await {
        Ok(answer) => answer,
        Err(late) => Err(kube::Error::Service(Box::new(late))),
    }
}

/// A step of the upkeep that failed; it is tried again.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    /// The Secret with the authorities.
    #[error("Secret {name}: {source}")]
    Secret {
        /// Its name.
        name: String,
        /// What the API server or the client said.
        source: Box<kube::Error>,
    },
    /// The webhook's configuration.
    #[error("MutatingWebhookConfiguration {name}: {source}")]
    Configuration {
        /// Its name.
        name: String,
        /// What the API server or the client said.
        source: Box<kube::Error>,
    },
    /// The webhook's configuration is not there.
    #[error("there is no MutatingWebhookConfiguration {0}: install the chart with its webhook")]
    NoConfiguration(String),
    /// Its caBundle is empty or holds no certificate.
    #[error("caBundle of MutatingWebhookConfiguration {0} is empty: {1}")]
    NoBundle(String, &'static str),
    /// Making or reading a certificate.
    #[error("certificate: {0}")]
    Certificate(String),
    /// Nothing to sign with yet.
    #[error("no certificate yet: the leader has not stored an authority in Secret {0}")]
    NoAuthority(String),
    /// Mounted files.
    #[error("{path}: {message}")]
    Files {
        /// Which.
        path: String,
        /// What is wrong.
        message: String,
    },
    /// The call to the own port.
    #[error("a TLS call to the own port with the caBundle of the configuration failed: {0}")]
    Call(String),
}

impl PkiError {
    /// As metrics name the step.
    pub fn step(&self) -> &'static str {
        match self {
            Self::Secret { .. } | Self::NoAuthority(_) => "secret",
            Self::Configuration { .. } | Self::NoConfiguration(_) | Self::NoBundle(..) => {
                "configuration"
            }
            Self::Certificate(_) => "sign",
            Self::Files { .. } => "files",
            Self::Call(_) => "call",
        }
    }
}

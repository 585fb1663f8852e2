//! Certificates of the webhook: their sources, their rotation, and whether the API server trusts them. `plan` decides and is pure;
//! `authority` creates certificates; `store`, `configuration` and `files` read and write; `call` calls the own port like an API server;
//! `run` repeats all of this. This module reads no Secret except the operator's own.

mod authority;
mod call;
mod configuration;
mod files;
pub mod plan;
pub mod run;
mod store;
#[cfg(test)]
mod tests;

pub use authority::self_signed;
pub use plan::Lifetimes;
pub use run::{Mode, Upkeep, run};

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use std::future::Future;
use std::time::Duration;
use tokio::time::timeout;

/// Timeout of API server calls, so that a silent API server does not stop the maintenance of the certificate.
const CALL_TIME_MAX: Duration = Duration::from_secs(5);

async fn in_time<T>(call: impl Future<Output = Result<T, kube::Error>>) -> Result<T, kube::Error> {
    match timeout(CALL_TIME_MAX, call).await {
        Ok(answer) => answer,
        Err(late) => Err(kube::Error::Service(Box::new(late))),
    }
}

/// Number of certificates in a PEM text, and expiry of the last one that expires, in Unix seconds. `None` without a certificate.
#[must_use]
pub fn last_expiry(pem: &str) -> Option<(usize, u64)> {
    let blocks = authority::blocks(pem);
    let ends = |block: &String| {
        let certificate = CertificateDer::from_pem_slice(block.as_bytes()).ok()?;
        authority::expiry(&[certificate]).ok()
    };
    Some((blocks.len(), blocks.iter().filter_map(ends).max()?))
}

/// A failed step of the maintenance. It is retried.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    /// The Secret with the authorities cannot be read or written.
    #[error("Secret {name} cannot be read or written: {source}")]
    Secret {
        name: String,
        /// The error of the API server or the client.
        source: Box<kube::Error>,
    },
    /// The webhook's configuration cannot be read or written.
    #[error("MutatingWebhookConfiguration {name} cannot be read or written: {source}")]
    Configuration {
        name: String,
        /// The error of the API server or the client.
        source: Box<kube::Error>,
    },
    /// The webhook's configuration does not exist.
    #[error("there is no MutatingWebhookConfiguration {0}: install the chart with its webhook")]
    NoConfiguration(String),
    /// The caBundle is empty or has no certificate.
    #[error("the caBundle of MutatingWebhookConfiguration {0} has no certificate: {1}")]
    NoBundle(String, &'static str),
    /// A certificate cannot be created or read.
    #[error("the webhook's certificate is not usable: {0}")]
    Certificate(String),
    /// No authority is available for signing.
    #[error("no certificate yet: the leader has not stored an authority in Secret {0}")]
    NoAuthority(String),
    /// Mounted files are missing or invalid.
    #[error("{path}: {message}")]
    Files { path: String, message: String },
    /// The call to the own port failed.
    #[error(
        "a TLS call to the webhook's own port that trusts only the configuration's caBundle failed: {0}"
    )]
    Call(String),
}

impl PkiError {
    /// Name of the step in metrics.
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

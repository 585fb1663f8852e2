//! TLS of the webhook's port. The certificate is looked up in every handshake, so that a new one is used without a restart.

use parking_lot::RwLock;
use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use std::sync::Arc;
use tokio_rustls::TlsAcceptor;

/// The current certificate. Without one, handshakes fail.
#[derive(Debug, Default)]
pub struct Served(RwLock<Option<Arc<CertifiedKey>>>);

impl Served {
    /// Sets the certificate for future handshakes.
    pub fn set(&self, certificate: Arc<CertifiedKey>) {
        *self.0.write() = Some(certificate);
    }
    pub fn get(&self) -> Option<Arc<CertifiedKey>> {
        self.0.read().clone()
    }
}

impl ResolvesServerCert for Served {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.get()
    }
}

/// Accepts TLS 1.2 and 1.3, and only HTTP/1.1: over HTTP/2 an API server would send all reviews to one replica through one connection.
pub fn acceptor(served: Arc<Served>) -> Result<TlsAcceptor, rustls::Error> {
    let mut config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_cert_resolver(served);
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

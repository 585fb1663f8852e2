//! TLS of the port. Certificate and private key are files that may be replaced at any time, as cert-manager does.

use parking_lot::RwLock;
use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio_rustls::TlsAcceptor;
use tracing::{error, info};

/// Interval at which the files are read again.
const RELOAD: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("{path}: {message}")]
    File { path: PathBuf, message: String },
    #[error("{certificate} and {private_key}: {message}")]
    Pair {
        certificate: PathBuf,
        private_key: PathBuf,
        message: String,
    },
    #[error("TLS: {0}")]
    Config(#[from] rustls::Error),
}

/// Two files in PEM, and the certificate that handshakes use now.
#[derive(Debug)]
pub struct Certificate {
    certificate: PathBuf,
    private_key: PathBuf,
    used: RwLock<(Vec<u8>, Arc<CertifiedKey>)>,
}

impl Certificate {
    /// Reads both files.
    pub fn load(certificate: PathBuf, private_key: PathBuf) -> Result<Arc<Self>, TlsError> {
        let used = read(&certificate, &private_key)?;
        Ok(Arc::new(Self {
            certificate,
            private_key,
            used: RwLock::new(used),
        }))
    }

    /// Uses changed files from now on. True: they changed. An error leaves the earlier certificate in use.
    pub fn reload(&self) -> Result<bool, TlsError> {
        let read = read(&self.certificate, &self.private_key)?;
        let changed = read.0 != self.used.read().0;
        if changed {
            *self.used.write() = read;
        }
        Ok(changed)
    }

    /// Reloads without end.
    pub async fn watch(self: Arc<Self>) {
        let mut failed = false;
        loop {
            tokio::time::sleep(RELOAD).await;
            let reloaded = self.reload();
            let certificate = self.certificate.display();
            match &reloaded {
                Ok(true) => info!(%certificate, "new certificate in use"),
                // Half a change is resolved at the next check.
                Err(e) if !failed => {
                    error!(error = %e, "cannot load the certificate, keeping the earlier one");
                }
                _ => {}
            }
            failed = reloaded.is_err();
        }
    }

    /// Accepts TLS 1.2 and 1.3.
    pub fn acceptor(self: Arc<Self>) -> Result<TlsAcceptor, TlsError> {
        let config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_cert_resolver(self);
        Ok(TlsAcceptor::from(Arc::new(config)))
    }
}

impl ResolvesServerCert for Certificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.used.read().1.clone())
    }
}

/// The bytes of both files, and what they are.
fn read(certificate: &Path, private_key: &Path) -> Result<(Vec<u8>, Arc<CertifiedKey>), TlsError> {
    let bytes = |path: &Path| {
        std::fs::read(path).map_err(|e| TlsError::File {
            path: path.to_owned(),
            message: e.to_string(),
        })
    };
    let (mut raw, key) = (bytes(certificate)?, bytes(private_key)?);
    let invalid = |path: &Path, message: String| TlsError::File {
        path: path.to_owned(),
        message,
    };
    let chain = CertificateDer::pem_slice_iter(&raw)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|e| invalid(certificate, e.to_string()))?;
    if chain.is_empty() {
        return Err(invalid(
            certificate,
            "expected a certificate in PEM, found none".into(),
        ));
    }
    let private =
        PrivateKeyDer::from_pem_slice(&key).map_err(|e| invalid(private_key, e.to_string()))?;
    let pair = |e: rustls::Error| TlsError::Pair {
        certificate: certificate.to_owned(),
        private_key: private_key.to_owned(),
        message: e.to_string(),
    };
    let certified = CertifiedKey::from_der(chain, private, &default_provider()).map_err(pair)?;
    raw.extend(key);
    Ok((raw, Arc::new(certified)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &Path, name: &str) -> (PathBuf, PathBuf) {
        let made = rcgen::generate_simple_self_signed([name.to_owned()]).unwrap();
        let files = (folder.join("tls.crt"), folder.join("tls.key"));
        std::fs::write(&files.0, made.cert.pem()).unwrap();
        std::fs::write(&files.1, made.signing_key.serialize_pem()).unwrap();
        files
    }

    #[test]
    fn a_changed_certificate_is_used_and_a_broken_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let (certificate, key) = write(folder.path(), "first");
        let served = Certificate::load(certificate.clone(), key.clone()).unwrap();
        let first = served.used.read().1.clone();
        assert!(!served.reload().unwrap());
        write(folder.path(), "second");
        assert!(served.reload().unwrap());
        let second = served.used.read().1.clone();
        assert_ne!(first.cert, second.cert);
        // Half a change: the key of another certificate.
        let other = tempfile::tempdir().unwrap();
        std::fs::copy(write(other.path(), "third").1, &key).unwrap();
        assert!(matches!(served.reload(), Err(TlsError::Pair { .. })));
        std::fs::write(&certificate, "no PEM").unwrap();
        assert!(matches!(served.reload(), Err(TlsError::File { .. })));
        assert_eq!(served.used.read().1.cert, second.cert);
    }

    #[test]
    fn missing_files_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let (certificate, key) = write(folder.path(), "here");
        let absent = folder.path().join("absent");
        for (certificate, key) in [(absent.clone(), key), (certificate, absent)] {
            let error = Certificate::load(certificate, key).unwrap_err().to_string();
            assert!(error.contains("absent: No such file"), "{error}");
        }
    }
}

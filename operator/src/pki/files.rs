//! Certificate and key from mounted files, as written by cert-manager and others. They are reloaded when their bytes change.

use super::PkiError;
use super::authority::certified;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A folder with `tls.crt` and `tls.key`.
pub struct Files {
    folder: PathBuf,
    last: Option<(Vec<u8>, Vec<u8>)>,
}

impl Files {
    pub fn new(folder: PathBuf) -> Self {
        Self { folder, last: None }
    }

    /// The certificate, if it changed since the last call. Half a change, with a key that does not match the certificate, is an error now,
    /// and resolved at the next check.
    pub async fn changed(&mut self) -> Result<Option<Arc<CertifiedKey>>, PkiError> {
        let certificate = read(&self.folder.join("tls.crt")).await?;
        let key = read(&self.folder.join("tls.key")).await?;
        if self.last.as_ref() == Some(&(certificate.clone(), key.clone())) {
            return Ok(None);
        }
        let wrong = |file: &str, message: String| PkiError::Files {
            path: self.folder.join(file).display().to_string(),
            message,
        };
        let chain: Vec<_> = CertificateDer::pem_slice_iter(&certificate)
            .collect::<Result<_, _>>()
            .map_err(|e| wrong("tls.crt", e.to_string()))?;
        let private =
            PrivateKeyDer::from_pem_slice(&key).map_err(|e| wrong("tls.key", e.to_string()))?;
        let served = certified(chain, private).map_err(|e| wrong("tls.key", e.to_string()))?;
        self.last = Some((certificate, key));
        Ok(Some(served))
    }
}

async fn read(path: &Path) -> Result<Vec<u8>, PkiError> {
    tokio::fs::read(path).await.map_err(|e| PkiError::Files {
        path: path.display().to_string(),
        message: e.to_string(),
    })
}

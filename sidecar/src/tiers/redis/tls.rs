//! TLS towards a server: whom to trust is read anew for every connection, so that a file that was exchanged counts.

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use std::io;
use std::path::Path;
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Encrypts a stream to `host`.
pub async fn connect(
    host: &str,
    stream: TcpStream,
    ca: Option<&Path>,
) -> io::Result<TlsStream<TcpStream>> {
    let name = ServerName::try_from(host.to_string()).map_err(io::Error::other)?;
    let roots = roots(ca).await?;
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let connector = TlsConnector::from(Arc::new(config));
    connector.connect(name, stream).await
}

async fn roots(ca: Option<&Path>) -> io::Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    let Some(path) = ca else {
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        return Ok(roots);
    };
    let wrong = |why: &dyn std::fmt::Display| {
        let text = format!("{}: {why}", path.display());
        io::Error::new(io::ErrorKind::InvalidInput, text)
    };
    let pem = tokio::fs::read(path).await.map_err(|e| wrong(&e))?;
    for certificate in CertificateDer::pem_slice_iter(&pem) {
        let certificate = certificate.map_err(|e| wrong(&e))?;
        roots.add(certificate).map_err(|e| wrong(&e))?;
    }
    if roots.is_empty() {
        return Err(wrong(&"there is no certificate in it"));
    }
    Ok(roots)
}

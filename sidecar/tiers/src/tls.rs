//! TLS for all tiers that use it.

use crate::Span;
use rustix::io::Errno;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use rustls_native_certs::load_native_certs;
use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::OnceCell;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Bytes per read: the library reads only 4 KiB at a time, a quarter of a record.
const READ_BYTES: usize = 64 << 10;

/// The certificate authorities of a PEM file, or what is wrong with it.
pub async fn authorities(path: &Path) -> Result<RootCertStore, String> {
    let wrong = |why: &dyn fmt::Display| format!("{}: {why}", path.display());
    let pem = tokio::fs::read(path).await.map_err(|e| wrong(&e))?;
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(&pem) {
        let added = match certificate {
            Ok(certificate) => roots.add(certificate).map_err(|e| e.to_string()),
            Err(e) => Err(e.to_string()),
        };
        added.map_err(|e| wrong(&format!("cannot parse a certificate: {e}")))?;
    }
    match roots.is_empty() {
        true => Err(wrong(&"the file contains no certificate")),
        false => Ok(roots),
    }
}

/// The certificate authorities of the system, which are read once; `None`: it has none.
pub async fn system_authorities() -> Option<Arc<RootCertStore>> {
    static READ: OnceCell<Arc<RootCertStore>> = OnceCell::const_new();
    let read = || {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(load_native_certs().certs);
        (!roots.is_empty()).then(|| Arc::new(roots)).ok_or(())
    };
    let reading = || async { tokio::task::spawn_blocking(read).await.unwrap_or(Err(())) };
    READ.get_or_try_init(reading).await.ok().cloned()
}

/// By what a client proves who it is: a certificate, with those that lead to its authority, and its private key.
pub struct Identity {
    certificates: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

/// The identity in the PEM files `tls.crt` and `tls.key` of a folder, or what is wrong with them.
pub async fn identity(folder: &Path) -> Result<Identity, String> {
    let [certificate, key] = ["tls.crt", "tls.key"].map(|name| folder.join(name));
    let wrong = |path: &Path, why: &dyn fmt::Display| format!("{}: {why}", path.display());
    let pem = async |path: &Path| tokio::fs::read(path).await.map_err(|e| wrong(path, &e));
    let (certificates, private) = (pem(&certificate).await?, pem(&key).await?);
    let certificates: Vec<_> = CertificateDer::pem_slice_iter(&certificates)
        .collect::<Result<_, _>>()
        .map_err(|e| wrong(&certificate, &format!("cannot parse a certificate: {e}")))?;
    if certificates.is_empty() {
        return Err(wrong(&certificate, &"the file contains no certificate"));
    }
    let private = PrivateKeyDer::from_pem_slice(&private);
    let private =
        private.map_err(|e| wrong(&key, &format!("cannot parse the private key: {e}")))?;
    Ok(Identity {
        certificates,
        key: private,
    })
}

/// A client that trusts these authorities, and proves who it is if a server asks.
pub fn client(
    roots: Arc<RootCertStore>,
    identity: Option<Identity>,
) -> Result<ClientConfig, rustls::Error> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let versions = ClientConfig::builder_with_provider(provider);
    let versions = versions.with_safe_default_protocol_versions()?;
    let trusting = versions.with_root_certificates(roots);
    match identity {
        None => Ok(trusting.with_no_client_auth()),
        Some(of) => trusting.with_client_auth_cert(of.certificates, of.key),
    }
}

pub type Encrypted = TlsStream<BufReader<TcpStream>>;

/// Encrypts a stream to the server with this name. Fails with [`TimedOut`](io::ErrorKind::TimedOut) after the timeout.
pub async fn handshake(
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
    stream: TcpStream,
    longest: Duration,
) -> io::Result<Encrypted> {
    let stream = BufReader::with_capacity(READ_BYTES, stream);
    let shaking = TlsConnector::from(config).connect(name, stream);
    timeout(longest, shaking).await.unwrap_or_else(|_| {
        let seconds = longest.as_secs_f64();
        let why = format!("TLS handshake did not finish within {seconds:.1} s");
        Err(io::Error::new(io::ErrorKind::TimedOut, why))
    })
}

/// Reads at most `bytes` bytes into a span from `at` on; 0 after the end of the stream.
pub async fn read_span(
    stream: &mut Encrypted,
    span: &Span,
    at: u64,
    bytes: u64,
) -> io::Result<usize> {
    let received = stream.fill_buf().await?;
    let read = bytes.min(received.len() as u64) as usize;
    if !span.write(at, &received[..read]) {
        return Err(Errno::FAULT.into());
    }
    stream.consume(read);
    Ok(read)
}

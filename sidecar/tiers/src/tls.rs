//! TLS for all tiers that use it.

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::BufReader;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Bytes per read: the library reads only 4 KiB at a time, a quarter of a record.
const READ_BYTES: usize = 64 << 10;

/// The certificate authorities in a PEM text, or what is wrong with it.
pub fn authorities(pem: &[u8]) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(pem) {
        let added = match certificate {
            Ok(certificate) => roots.add(certificate).map_err(|e| e.to_string()),
            Err(e) => Err(e.to_string()),
        };
        added.map_err(|e| format!("cannot parse a certificate: {e}"))?;
    }
    match roots.is_empty() {
        true => Err("the file contains no certificate".into()),
        false => Ok(roots),
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

//! Calls the own port like an API server: TLS that trusts only the caBundle, and the service's name.

use super::PkiError;
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

/// The API server's timeout.
const TIME_MAX: Duration = Duration::from_secs(3);

/// Succeeds if the server at `address` has a certificate for `name` that `bundle` trusts, and answers over HTTP.
pub async fn call(address: SocketAddr, name: &str, bundle: &[String]) -> Result<(), PkiError> {
    match timeout(TIME_MAX, exchange(address, name, bundle)).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(e)) => Err(PkiError::Call(e.to_string())),
        Err(_) => Err(PkiError::Call(format!("no answer within {TIME_MAX:?}"))),
    }
}

async fn exchange(
    address: SocketAddr,
    name: &str,
    bundle: &[String],
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let mut roots = RootCertStore::empty();
    for certificate in bundle {
        // An API server may accept a certificate that this library refuses.
        let _refused = roots.add(CertificateDer::from_pem_slice(certificate.as_bytes())?);
    }
    let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let server = ServerName::try_from(name.to_owned())?;
    let stream = connect(address).await?;
    let mut stream = TlsConnector::from(Arc::new(config))
        .connect(server, stream)
        .await?;
    let request = format!("GET / HTTP/1.1\r\nhost: {name}\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = [0; 8];
    stream.read_exact(&mut answer).await?;
    match answer.starts_with(b"HTTP/1.") {
        true => Ok(()),
        false => Err("the answer is not HTTP".into()),
    }
}

/// Connects to an address. An unspecified address is reached over loopback, IPv6 or IPv4.
async fn connect(address: SocketAddr) -> std::io::Result<TcpStream> {
    let port = address.port();
    match address.ip() {
        IpAddr::V6(ip) if ip.is_unspecified() => {
            match TcpStream::connect((Ipv6Addr::LOCALHOST, port)).await {
                Ok(stream) => Ok(stream),
                Err(_) => TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await,
            }
        }
        IpAddr::V4(ip) if ip.is_unspecified() => {
            TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await
        }
        _ => TcpStream::connect(address).await,
    }
}

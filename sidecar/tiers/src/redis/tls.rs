//! TLS to a server. Its files are read for every connection, so that new ones take effect.

use super::fault::Fault;
use crate::Cause;
use crate::tls::{Encrypted, authorities, client, handshake, identity, system_authorities};
use rustls::pki_types::ServerName;
use rustls::{CertificateError, Error};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;

/// What TLS reads.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// PEM file with the certificate authorities to trust; `None`: those of the system.
    pub ca: Option<PathBuf>,
    /// Folder with `tls.crt` and `tls.key` of the client, for servers that ask for a certificate.
    pub client_certificate: Option<PathBuf>,
}

/// The name that a server's certificate must have.
pub fn name(host: &str) -> Result<ServerName<'static>, Fault> {
    let name = ServerName::try_from(host.to_string());
    name.map_err(|_| wrong(format!("\"{host}\" is not a valid name for a certificate")))
}

/// Encrypts a stream to the server with this name, within a time limit.
pub async fn connect(
    name: ServerName<'static>,
    stream: TcpStream,
    files: &TlsFiles,
    longest: Duration,
) -> Result<Encrypted, Fault> {
    let roots = match &files.ca {
        Some(path) => Arc::new(authorities(path).await.map_err(wrong)?),
        None => system_authorities()
            .await
            .ok_or_else(|| wrong("the system has no certificate authorities; set redis.ca"))?,
    };
    let identity = match &files.client_certificate {
        Some(folder) => Some(identity(folder).await.map_err(wrong)?),
        None => None,
    };
    let config =
        client(roots, identity).map_err(|e| wrong(format!("redis.clientCertificate: {e}")))?;
    let config = Arc::new(config);
    let shaken = handshake(config, name, stream, longest).await;
    shaken.map_err(fault)
}

/// Hint after a handshake without a TLS answer.
const PLAIN: &str = "is this a port without TLS?";

/// The error of a server that ended TLS by an alert: it does not accept this client. It may say so only after the handshake.
pub fn refusal(e: &io::Error) -> Option<Fault> {
    let Some(Error::AlertReceived(_)) = inner(e) else {
        return None;
    };
    Some(untrusted(format!(
        "{e}: the server refused the handshake; if it asks for a certificate, see redis.clientCertificate"
    )))
}

fn inner(e: &io::Error) -> Option<&Error> {
    e.get_ref().and_then(|e| e.downcast_ref())
}

fn untrusted(why: String) -> Fault {
    Fault::Of(Cause::Unauthenticated, format!("TLS: {why}"))
}

/// The error of a handshake.
fn fault(e: io::Error) -> Fault {
    if let Some(refusal) = refusal(&e) {
        return refusal;
    }
    match inner(&e) {
        Some(Error::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        )) => untrusted(format!(
            "{e}; the URL names another host than the certificate"
        )),
        Some(Error::InvalidCertificate(_)) => untrusted(format!("{e}; see redis.ca")),
        Some(Error::InvalidMessage(_)) => Fault::Of(Cause::Config, format!("TLS: {e}; {PLAIN}")),
        Some(_) => Fault::Of(Cause::Protocol, format!("TLS: {e}")),
        None if e.kind() == io::ErrorKind::UnexpectedEof => Fault::unreachable(format!(
            "the server closed the connection in the TLS handshake; {PLAIN}"
        )),
        None if e.kind() == io::ErrorKind::TimedOut => {
            Fault::unreachable(format!("TLS: {e}; {PLAIN}"))
        }
        None => Fault::unreachable(e),
    }
}

fn wrong(why: impl ToString) -> Fault {
    Fault::Of(Cause::Config, why.to_string())
}

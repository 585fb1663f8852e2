//! TLS to a server. A file of authorities is read for every connection, so that a new one takes effect.

use super::fault::Fault;
use crate::Cause;
use crate::tls::{Encrypted, authorities, client, handshake, system_authorities};
use rustls::pki_types::ServerName;
use rustls::{CertificateError, Error};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;

/// The name that a server's certificate must have.
pub fn name(host: &str) -> Result<ServerName<'static>, Fault> {
    let name = ServerName::try_from(host.to_string());
    name.map_err(|_| wrong(format!("\"{host}\" is not a valid name for a certificate")))
}

/// Encrypts a stream to the server with this name, within a time limit.
pub async fn connect(
    name: ServerName<'static>,
    stream: TcpStream,
    ca: Option<&Path>,
    longest: Duration,
) -> Result<Encrypted, Fault> {
    let roots = match ca {
        Some(path) => Arc::new(authorities(path).await.map_err(wrong)?),
        None => system_authorities()
            .await
            .ok_or_else(|| wrong("the system has no certificate authorities; set redis.ca"))?,
    };
    let config = Arc::new(client(roots).map_err(wrong)?);
    let shaken = handshake(config, name, stream, longest).await;
    shaken.map_err(fault)
}

/// Hint after a handshake without a TLS answer.
const PLAIN: &str = "is this a port without TLS?";

/// The error of a handshake.
fn fault(e: io::Error) -> Fault {
    let inner = e.get_ref().and_then(|e| e.downcast_ref::<Error>());
    let untrusted = |why: String| Fault::Of(Cause::Unauthenticated, format!("TLS: {why}"));
    match inner {
        Some(Error::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        )) => untrusted(format!(
            "{e}; the URL names another host than the certificate"
        )),
        Some(Error::InvalidCertificate(_)) => untrusted(format!("{e}; see redis.ca")),
        Some(Error::AlertReceived(_)) => {
            untrusted(format!("{e}: the server refused the handshake"))
        }
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

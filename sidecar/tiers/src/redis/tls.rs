//! TLS to a server. A file of authorities is read for every connection, so that a new one takes effect; the system's authorities are read
//! once.

use super::fault::Fault;
use crate::Cause;
use crate::tls::{Encrypted, authorities, handshake};
use rustls::pki_types::ServerName;
use rustls::{CertificateError, ClientConfig, Error, RootCertStore};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::OnceCell;

/// The system's certificate authorities.
static SYSTEM: OnceCell<Arc<RootCertStore>> = OnceCell::const_new();

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
        Some(path) => Arc::new(of_file(path).await?),
        None => SYSTEM.get_or_init(of_the_system).await.clone(),
    };
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(wrong)?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let shaken = handshake(Arc::new(config), name, stream, longest).await;
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

async fn of_the_system() -> Arc<RootCertStore> {
    let load = || {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        roots
    };
    // Without authorities no server is trusted, and the handshake reports that.
    let loaded = tokio::task::spawn_blocking(load).await;
    Arc::new(loaded.unwrap_or_else(|_| RootCertStore::empty()))
}

async fn of_file(path: &Path) -> Result<RootCertStore, Fault> {
    let of_it = |why: &dyn std::fmt::Display| wrong(format!("{}: {why}", path.display()));
    let pem = tokio::fs::read(path).await.map_err(|e| of_it(&e))?;
    authorities(&pem).map_err(|e| of_it(&e))
}

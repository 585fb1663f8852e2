//! Makes connections: to the server of a URI, by TLS where its scheme says so.

use hyper::Uri;
use hyper::http::uri::Scheme;
use hyper_rustls::MaybeHttpsStream;
use hyper_util::client::legacy::connect::HttpConnector as Tcp;
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use std::error::Error;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tower_service::Service;

/// Why there is no connection.
pub type Failed = Box<dyn Error + Send + Sync>;
/// A connection.
pub type Stream = MaybeHttpsStream<TokioIo<TcpStream>>;

/// What may be wrong where a handshake gets no sensible answer.
pub const PLAIN: &str = "is this a port without TLS (http://)?";

/// A handshake that got no answer of TLS at all: the server closed the connection, or waits for more.
#[derive(Debug, thiserror::Error)]
#[error("TLS: {0}; {hint}", hint = PLAIN)]
pub struct Unshaken(String);

/// How connections are made. Clones are the same.
#[derive(Clone)]
pub struct Connector {
    tcp: Tcp,
    tls: Arc<ClientConfig>,
    handshake: Duration,
}

impl Connector {
    /// By these settings; a handshake that takes longer than `handshake` is given up.
    pub fn new(tcp: Tcp, tls: ClientConfig, handshake: Duration) -> Self {
        Self {
            tcp,
            tls: Arc::new(tls),
            handshake,
        }
    }

    /// Encrypts a stream to this host.
    async fn shake(self, host: &str, stream: TokioIo<TcpStream>) -> Result<Stream, Failed> {
        // Certificates know addresses of IPv6 without the brackets of a URI.
        let name = ServerName::try_from(host.trim_matches(['[', ']']).to_string())?;
        let shaking = TlsConnector::from(self.tls).connect(name, TokioIo::new(stream));
        let shaken = timeout(self.handshake, shaking).await.map_err(|_| {
            let seconds = self.handshake.as_secs_f64();
            Unshaken(format!("no handshake within {seconds:.1} s"))
        })?;
        match shaken {
            Ok(stream) => Ok(stream.into()),
            Err(e) if e.get_ref().is_some_and(|e| e.is::<rustls::Error>()) => Err(e.into()),
            Err(e) => Err(Unshaken(e.to_string()).into()),
        }
    }
}

impl Service<Uri> for Connector {
    type Response = Stream;
    type Error = Failed;
    type Future = Pin<Box<dyn Future<Output = Result<Stream, Failed>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Failed>> {
        self.tcp.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let (this, connecting) = (self.clone(), self.tcp.call(uri.clone()));
        Box::pin(async move {
            let stream = connecting.await?;
            match uri.host() {
                Some(host) if uri.scheme() == Some(&Scheme::HTTPS) => {
                    this.shake(host, stream).await
                }
                _ => Ok(MaybeHttpsStream::Http(stream)),
            }
        })
    }
}

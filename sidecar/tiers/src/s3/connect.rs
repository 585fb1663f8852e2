//! Opens connections to the server of a URI: with TLS if its scheme asks for it, and then through the proxy of the environment.

use crate::tls::{Encrypted, handshake, read_span};
use crate::{Span, raw};
use hyper::Uri;
use hyper::http::uri::Scheme;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::HttpConnector as Tcp;
use hyper_util::client::legacy::connect::proxy::Tunnel;
use hyper_util::client::proxy::matcher::{Intercept, Matcher};
use hyper_util::rt::TokioIo;
use rustix::fd::AsFd;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use std::error::Error;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, Interest};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tower_service::Service;

/// Why there is no connection.
pub type Failed = Box<dyn Error + Send + Sync>;

/// A connection to a server. Nothing outside of this module depends on whether it uses TLS.
pub enum Stream {
    Plain(TokioIo<TcpStream>),
    Tls(Box<TokioIo<Encrypted>>),
}

/// Hint after a handshake without a TLS answer.
pub const PLAIN: &str = "is this a port without TLS (http://)?";

/// A handshake without any TLS answer: the server closed the connection, or waits for more.
#[derive(Debug, thiserror::Error)]
#[error("TLS: {0}; {hint}", hint = PLAIN)]
pub struct Unshaken(String);

/// The proxy of the environment opened no tunnel to the server.
#[derive(Debug, thiserror::Error)]
#[error("no tunnel through the proxy {proxy}; correct HTTPS_PROXY, or name the server in NO_PROXY")]
pub struct NoTunnel {
    /// Host and port.
    proxy: String,
    source: Failed,
}

/// The proxy for servers with TLS: `HTTPS_PROXY`, except for the hosts in `NO_PROXY`.
fn proxies() -> Matcher {
    let variable = |upper: &str| {
        let read = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty());
        read(upper)
            .or_else(|| read(&upper.to_lowercase()))
            .unwrap_or_default()
    };
    let proxies = Matcher::builder().https(variable("HTTPS_PROXY"));
    proxies.no(variable("NO_PROXY")).build()
}

/// Opens connections. Clones share their settings.
#[derive(Clone)]
pub struct Connector {
    tcp: Tcp,
    proxies: Arc<Matcher>,
    tls: Arc<ClientConfig>,
    handshake: Duration,
}

impl Connector {
    /// `handshake` is the time limit of a TLS handshake.
    pub fn new(tcp: Tcp, tls: ClientConfig, handshake: Duration) -> Self {
        Self {
            tcp,
            proxies: Arc::new(proxies()),
            tls: Arc::new(tls),
            handshake,
        }
    }

    /// Opens a tunnel through a proxy to the server, within the time limit of a handshake.
    async fn tunnel(self, via: Intercept, server: Uri) -> Result<TokioIo<TcpStream>, Failed> {
        let opened = async {
            if via.uri().scheme() != Some(&Scheme::HTTP) {
                return Err("only a proxy of http:// can be used".into());
            }
            let mut tunnel = Tunnel::new(via.uri().clone(), self.tcp);
            if let Some(auth) = via.basic_auth() {
                tunnel = tunnel.with_auth(auth.clone());
            }
            Ok(tunnel.call(server).await?)
        };
        let opened = timeout(self.handshake, opened).await;
        let opened: Result<_, Failed> = opened.unwrap_or_else(|e| Err(e.into()));
        opened.map_err(|source| {
            let proxy = via.uri().authority().map(|a| a.to_string());
            let proxy = proxy.unwrap_or_default();
            NoTunnel { proxy, source }.into()
        })
    }

    /// Encrypts a stream to this host.
    async fn shake(self, host: &str, stream: TokioIo<TcpStream>) -> Result<Stream, Failed> {
        // Certificates contain IPv6 addresses without the brackets of a URI.
        let name = ServerName::try_from(host.trim_matches(['[', ']']).to_string())?;
        match handshake(self.tls, name, stream.into_inner(), self.handshake).await {
            Ok(stream) => Ok(Stream::Tls(Box::new(TokioIo::new(stream)))),
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
        let mut this = self.clone();
        Box::pin(async move {
            let stream = match this.proxies.intercept(&uri) {
                Some(via) => this.clone().tunnel(via, uri.clone()).await?,
                None => this.tcp.call(uri.clone()).await?,
            };
            match uri.host() {
                Some(host) if uri.scheme() == Some(&Scheme::HTTPS) => {
                    this.shake(host, stream).await
                }
                _ => Ok(Stream::Plain(stream)),
            }
        })
    }
}

trait Both: Read + Write + Unpin {}
impl<T: Read + Write + Unpin> Both for T {}

impl Stream {
    /// For reads into memory of their own.
    pub fn io(&mut self) -> &mut (dyn AsyncRead + Send + Unpin) {
        match self {
            Self::Plain(stream) => stream.inner_mut(),
            Self::Tls(stream) => stream.inner_mut(),
        }
    }

    /// Receives at most `bytes` bytes into a span from `at` on; 0 after the end of the stream.
    pub async fn receive_into(&mut self, span: &Span, at: u64, bytes: u64) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => {
                let stream = stream.inner();
                let receive = || raw::receive(stream.as_fd(), span, at, bytes);
                stream.async_io(Interest::READABLE, receive).await
            }
            Self::Tls(stream) => read_span(stream.inner_mut(), span, at, bytes).await,
        }
    }

    fn both(self: Pin<&mut Self>) -> Pin<&mut dyn Both> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream),
            Self::Tls(stream) => Pin::new(stream),
        }
    }
}

impl Read for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        self.both().poll_read(cx, into)
    }
}

impl Write for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.both().poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.both().poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.both().poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.both().poll_shutdown(cx)
    }
}

//! The HTTP/1.1 client below the SDK: sets roots, buffers, and timeouts of idle and dead connections. It follows no redirects, retries only
//! requests that were never sent, and knows nothing of S3.

use super::clock;
use super::connect::{Connector, Failed};
use super::connections::{Connections, Wire};
use crate::clock::Clock;
use crate::{Cause, Kind, TierError, tls};
use aws_sdk_s3::config::http::{HttpRequest, HttpResponse};
use aws_sdk_s3::config::{HttpClient, RuntimeComponents};
use aws_sdk_s3::error::ConnectorError;
use aws_sdk_s3::primitives::SdkBody;
use aws_smithy_runtime_api::client::http::{
    HttpConnector, HttpConnectorFuture, HttpConnectorSettings, SharedHttpConnector,
};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::{Body, Bytes};
use hyper::header::RANGE;
use hyper::http::uri::Scheme;
use hyper::{Method, Request, Response};
use hyper_util::client::legacy::connect::HttpConnector as Tcp;
use parking_lot::Mutex;
use rustls::RootCertStore;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// Time limit for opening a connection, and for its handshake.
const CONNECT: Duration = Duration::from_secs(3);
/// Idle connections are closed after this, before load balancers drop them silently.
const IDLE: Duration = Duration::from_secs(20);
/// A connection ends after this long with unacknowledged bytes or probes.
const DEAD: Duration = Duration::from_secs(10);
/// Bytes of a read: the memory of a connection, and its read-ahead.
const READ_BYTES: usize = 256 << 10;
/// Limit of a response that is not an object, and is read as a whole. The longest page of a listing, 1,000 names of 1 KiB, is a quarter.
const WORDS_BYTES: usize = 16 << 20;

/// Connections, shared by all clones.
#[derive(Clone)]
pub struct Http {
    connections: Connections,
    clock: Arc<Clock>,
    /// Whether a server ever answered.
    answered: Arc<AtomicBool>,
}

/// A response that violates HTTP.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Malformed(&'static str);

/// The server that did not answer; errors of name lookups and connections below do not name it.
#[derive(Debug, thiserror::Error)]
#[error("no answer from {server}")]
pub struct Unanswered {
    server: String,
    /// It was contacted without TLS, and no server ever answered.
    pub never: bool,
    source: Failed,
}

impl Http {
    /// Without connections yet. Trusts these authorities. `clock` receives the dates of responses.
    pub fn new(
        roots: impl Into<Arc<RootCertStore>>,
        idle: usize,
        clock: Arc<Clock>,
    ) -> Result<Self, TierError> {
        let mut tcp = Tcp::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(CONNECT));
        tcp.set_keepalive(Some(DEAD));
        tcp.set_keepalive_interval(Some(DEAD / 3));
        tcp.set_keepalive_retries(Some(3));
        tcp.set_tcp_user_timeout(Some(DEAD));
        let tls = tls::client(roots.into(), None)
            .map_err(|e| TierError::new(Kind::S3, Cause::Config, e.to_string()))?;
        let connector = Connector::new(tcp, tls, CONNECT);
        Ok(Self {
            connections: Connections::new(connector, READ_BYTES, idle, IDLE),
            clock,
            answered: Arc::default(),
        })
    }
}

impl fmt::Debug for Http {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Http")
    }
}

/// Carried by a request whose reader takes the body of the response without the SDK, if its connection allows that.
#[derive(Debug, Clone, Default)]
pub struct Bypass(Arc<Mutex<Option<Wire>>>);

impl Bypass {
    /// The body of the response.
    pub fn taken(&self) -> Option<Wire> {
        self.0.lock().take()
    }
}

/// Sends a request on its own connection. A response whose body bypasses the SDK has an empty one.
async fn send(
    connections: &Connections,
    request: Request<SdkBody>,
) -> Result<Response<SdkBody>, Failed> {
    let bypass = request.extensions().get::<Bypass>().cloned();
    let object = asks_for_an_object(&request);
    let (head, mut body) = connections.request(request).await?.into_parts();
    if let Some(bypass) = bypass {
        body = match body.into_wire(&head).await {
            Ok(wire) => {
                *bypass.0.lock() = Some(wire);
                return Ok(Response::from_parts(head, SdkBody::empty()));
            }
            Err(body) => body,
        };
    }
    let body = read_by_the_sdk(body, object && head.status.is_success());
    Ok(Response::from_parts(head, body))
}

/// Whether the response is an object, whose reader counts its bytes.
fn asks_for_an_object<T>(request: &Request<T>) -> bool {
    request.method() == Method::GET && request.headers().contains_key(RANGE)
}

/// A body for the SDK: an object in pieces, anything else as a whole, up to the limit of valid responses.
fn read_by_the_sdk<B>(body: B, object: bool) -> SdkBody
where
    B: Body<Data = Bytes, Error: Into<Failed>> + Send + Sync + 'static,
{
    if object {
        return SdkBody::from_body_1_x(body);
    }
    let limited = Limited::new(body, WORDS_BYTES).map_err(|e| match e.is::<LengthLimitError>() {
        true => Failed::from(Malformed(
            "a response of more than 16 MiB that is not an object",
        )),
        false => e,
    });
    SdkBody::from_body_1_x(limited)
}

impl HttpConnector for Http {
    fn call(&self, request: HttpRequest) -> HttpConnectorFuture {
        let request = match request.try_into_http1x() {
            Ok(request) => request,
            Err(e) => return HttpConnectorFuture::ready(Err(ConnectorError::user(e.into()))),
        };
        let Self {
            connections,
            clock,
            answered,
        } = self.clone();
        let server = request.uri().authority().cloned();
        let plain = request.uri().scheme() == Some(&Scheme::HTTP);
        HttpConnectorFuture::new(async move {
            let answer = send(&connections, request).await.map_err(|source| {
                let server = server.map_or_else(String::new, |server| server.to_string());
                let never = plain && !answered.load(Relaxed);
                let unanswered = Unanswered {
                    server,
                    never,
                    source,
                };
                ConnectorError::io(unanswered.into())
            })?;
            answered.store(true, Relaxed);
            let header = |name| answer.headers().get(name).and_then(|v| v.to_str().ok());
            if let Some(date) = header("date") {
                clock::heard(&clock, date);
            }
            if answer.status() == 206 && header("content-range").is_none() {
                let malformed = Malformed("a partial response without Content-Range");
                return Err(ConnectorError::other(malformed.into(), None));
            }
            HttpResponse::try_from(answer).map_err(|e| ConnectorError::other(e.into(), None))
        })
    }
}

impl HttpClient for Http {
    fn http_connector(
        &self,
        _: &HttpConnectorSettings,
        _: &RuntimeComponents,
    ) -> SharedHttpConnector {
        SharedHttpConnector::new(self.clone())
    }
}

//! Queries one sidecar with a deadline and a size limit, because any pod can have the label.

use crate::names;
use crate::untrusted;
use axum::body::{Body, to_bytes};
use hyper::client::conn::http1;
use hyper::header::{CONNECTION, HOST};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use kvcachepool_protocol::status::Status;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;
use thiserror::Error;
use tokio::net::TcpStream;
use tokio::time::timeout;

/// From the connection to the last byte.
const DEADLINE: Duration = Duration::from_secs(1);
/// Longest response in bytes.
const BODY_BYTES_MAX: usize = 512 << 10;
/// Maximum values of a response: those of some hundred sessions.
pub const STATUS_VALUES_MAX: usize = 10_000;

/// Why there is no response.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum FetchError {
    /// No connection: a NetworkPolicy, strict mTLS, or a closed port.
    #[error("no connection to its port {}", names::ADMIN_PORT)]
    Unreachable,
    #[error("no answer within a second")]
    TimedOut,
    /// The response is not that of a sidecar.
    #[error("the response on port {} is not that of a sidecar", names::ADMIN_PORT)]
    NoStatus,
}

/// Queries the status of the sidecar at `ip`.
pub async fn fetch(ip: IpAddr) -> Result<Status, FetchError> {
    fetch_from(SocketAddr::new(ip, names::ADMIN_PORT), DEADLINE).await
}

async fn fetch_from(at: SocketAddr, deadline: Duration) -> Result<Status, FetchError> {
    timeout(deadline, query(at))
        .await
        .unwrap_or(Err(FetchError::TimedOut))
}

async fn query(at: SocketAddr) -> Result<Status, FetchError> {
    let stream = TcpStream::connect(at)
        .await
        .map_err(|_| FetchError::Unreachable)?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|_| FetchError::Unreachable)?;
    let request = Request::get("/v1/status")
        .header(HOST, at.to_string())
        .header(CONNECTION, "close")
        .body(Body::empty())
        .map_err(|_| FetchError::NoStatus)?;
    let answer = async {
        let response = sender
            .send_request(request)
            .await
            .map_err(|_| FetchError::Unreachable)?;
        if response.status() != StatusCode::OK {
            return Err(FetchError::NoStatus);
        }
        let body = to_bytes(Body::new(response.into_body()), BODY_BYTES_MAX)
            .await
            .map_err(|_| FetchError::NoStatus)?;
        untrusted::from_slice(&body, STATUS_VALUES_MAX).map_err(|_| FetchError::NoStatus)
    };
    // The connection is driven concurrently with the request and ends with it.
    tokio::pin!(answer, connection);
    tokio::select! {
        answer = &mut answer => answer,
        _closed = &mut connection => answer.await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    async fn served(reply: Vec<u8>) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = vec![0; 1024];
            let read = stream.read(&mut request).await.unwrap();
            assert!(request[..read].starts_with(b"GET /v1/status HTTP/1.1\r\n"));
            stream.write_all(&reply).await.unwrap();
            if reply.is_empty() {
                std::future::pending::<()>().await;
            }
        });
        at
    }

    fn ok(body: &str) -> Vec<u8> {
        format!(
            "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
        .into_bytes()
    }

    const LONG: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn a_sidecars_status_is_read() {
        let at = served(ok(r#"{"version":"0.1.0","boot":7,"later":1}"#)).await;
        let status = fetch_from(at, LONG).await.unwrap();
        assert_eq!((status.version.as_str(), status.boot), ("0.1.0", 7));
    }

    #[tokio::test]
    async fn a_server_that_is_no_sidecar_is_reported() {
        let teapot = b"HTTP/1.1 418 no\r\ncontent-length: 0\r\n\r\n".to_vec();
        let huge = ok(&"x".repeat(BODY_BYTES_MAX + 1));
        let swollen = ok(&format!(
            r#"{{"domains":[{}{{}}]}}"#,
            "{},".repeat(STATUS_VALUES_MAX)
        ));
        for reply in [ok("[1]"), ok("<html>"), teapot, huge, swollen] {
            let at = served(reply).await;
            assert_eq!(fetch_from(at, LONG).await, Err(FetchError::NoStatus));
        }
        let at = served(b"SSH-2.0\r\n".to_vec()).await;
        assert_eq!(fetch_from(at, LONG).await, Err(FetchError::Unreachable));
    }

    #[tokio::test]
    async fn silence_and_a_closed_port_are_distinguished() {
        let at = served(Vec::new()).await;
        let short = Duration::from_millis(50);
        assert_eq!(fetch_from(at, short).await, Err(FetchError::TimedOut));
        let closed = TcpListener::bind("127.0.0.1:0")
            .await
            .unwrap()
            .local_addr()
            .unwrap();
        assert_eq!(fetch_from(closed, LONG).await, Err(FetchError::Unreachable));
    }
}

//! One connection: handshake, sequential requests, shutdown.

use super::open::Activity;
use super::serve::{Bounds, Port};
use crate::shutdown::{Phase, Shutdown};
use axum::body::Body;
use axum::http::header::{CONNECTION, HeaderValue};
use axum::http::{Request, Response, StatusCode};
use axum::response::IntoResponse;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tracing::debug;

/// Serves a connection until either side closes it.
pub async fn run(stream: TcpStream, port: Arc<Port>, activity: Arc<Activity>, shutdown: Shutdown) {
    let _nagle = stream.set_nodelay(true);
    let Some(tls) = port.tls.clone() else {
        return requests(stream, port, activity, shutdown).await;
    };
    match timeout(port.bounds.handshake_time_max, tls.accept(stream)).await {
        Ok(Ok(stream)) => requests(stream, port, activity, shutdown).await,
        Ok(Err(e)) => {
            debug!(port = port.name, reason = %e, "handshake failed");
            port.ended("handshake");
        }
        Err(_) => port.ended("handshake"),
    }
}

async fn requests<S>(stream: S, port: Arc<Port>, activity: Arc<Activity>, mut shutdown: Shutdown)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let Bounds {
        idle_time_max,
        head_bytes_max,
        drain_time_max,
        ..
    } = port.bounds;
    let router = TowerToHyperService::new(port.router.clone());
    let phase = shutdown.clone();
    let service = service_fn(|request: Request<Incoming>| {
        activity.begins();
        let answer = router.call(request);
        let (port, activity, phase) = (&port, &activity, &phase);
        async move {
            let mut response = bounded(port, answer).await;
            if phase.phase() > Phase::Running {
                response
                    .headers_mut()
                    .insert(CONNECTION, HeaderValue::from_static("close"));
            }
            activity.ends();
            Ok::<_, Infallible>(response)
        }
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(idle_time_max)
        .max_buf_size(head_bytes_max);
    let mut connection = pin!(http.serve_connection(TokioIo::new(stream), service));
    tokio::select! {
        // A client may disconnect at any time.
        _ended = connection.as_mut() => return,
        () = shutdown.reached(Phase::Stopping) => {}
    }
    connection.as_mut().graceful_shutdown();
    let _ended = timeout(drain_time_max, connection).await;
}

async fn bounded(
    port: &Port,
    answer: impl Future<Output = Result<Response<Body>, Infallible>>,
) -> Response<Body> {
    match timeout(port.bounds.request_time_max, answer).await {
        Ok(Ok(response)) => response,
        Err(_) => {
            port.ended("request_time");
            // The rest of the body is still in transit, so this connection cannot carry another request.
            let close = [(CONNECTION, HeaderValue::from_static("close"))];
            (
                StatusCode::REQUEST_TIMEOUT,
                close,
                "the request took too long\n",
            )
                .into_response()
        }
    }
}

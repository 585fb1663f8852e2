//! Connections of the admin port: a bounded number, one request each, with limits on duration and header size. Request bodies are
//! not read: no path takes one.

use super::metrics::Metrics;
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::{AbortHandle, yield_now};
use tokio::time::{sleep, timeout};
use tracing::warn;

/// Pause after an accept that failed for lack of descriptors or memory.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Limits on clients.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Open connections; a further one closes the oldest.
    pub connections_max: usize,
    /// Longest life of a connection, from its accept to the last byte of its response.
    pub connection_time_max: Duration,
    /// Request line and headers together.
    pub head_bytes_max: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            connections_max: 64,
            connection_time_max: Duration::from_secs(10),
            head_bytes_max: 64 << 10,
        }
    }
}

/// Serves without end. When all places are taken, the oldest connection is closed: a normal request is answered within milliseconds
/// of its accept and is hardly ever the oldest, so idle connections cannot block others.
pub async fn serve(listener: TcpListener, router: Router, bounds: Bounds, metrics: Arc<Metrics>) {
    let mut open: VecDeque<AbortHandle> = VecDeque::new();
    let mut http = http1::Builder::new();
    http.keep_alive(false).max_buf_size(bounds.head_bytes_max);
    let service = TowerToHyperService::new(router);
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(e) => {
                warn!(error = %e, "accept on the admin port failed");
                metrics.add("accept_failures_total", &[], 1);
                sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        open.retain(|connection| !connection.is_finished());
        if open.len() >= bounds.connections_max
            && let Some(oldest) = open.pop_front()
        {
            oldest.abort();
            metrics.add("admin_displaced_total", &[], 1);
        }
        let connection = http.serve_connection(TokioIo::new(stream), service.clone());
        let metrics = metrics.clone();
        let task = tokio::spawn(async move {
            // A client that disconnects is not an error.
            if timeout(bounds.connection_time_max, connection)
                .await
                .is_err()
            {
                metrics.add("admin_timeouts_total", &[], 1);
            }
        });
        open.push_back(task.abort_handle());
        // Answer accepted requests before accepting more from a full backlog.
        yield_now().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::get;
    use std::io::{ErrorKind, Read, Write};
    use std::net::{SocketAddr, TcpStream};
    use std::time::Instant;

    const DEADLINE: Duration = Duration::from_secs(30);

    fn bind() -> (std::net::TcpListener, SocketAddr) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        (listener, address)
    }

    fn start(bounds: Bounds) -> (SocketAddr, Arc<Metrics>) {
        let (listener, address) = bind();
        (address, start_on(listener, bounds))
    }

    /// A server of one path on a thread of its own.
    fn start_on(listener: std::net::TcpListener, bounds: Bounds) -> Arc<Metrics> {
        let metrics = Arc::new(crate::admin::metrics::registry());
        let served = metrics.clone();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async {
                let listener = TcpListener::from_std(listener).unwrap();
                let router = Router::new().route("/", get(|| async { "here" }));
                serve(listener, router, bounds, served).await;
            });
        });
        metrics
    }

    fn connect(address: SocketAddr, says: &str) -> TcpStream {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream.write_all(says.as_bytes()).unwrap();
        stream
    }

    /// All bytes until the server closes; an RST after unread bytes counts as the end too.
    fn rest(mut stream: TcpStream) -> String {
        let mut said = Vec::new();
        match stream.read_to_end(&mut said) {
            Err(e) if e.kind() != ErrorKind::ConnectionReset => panic!("{e}"),
            _ => String::from_utf8(said).unwrap(),
        }
    }

    const GET: &str = "GET / HTTP/1.1\r\nhost: x\r\n\r\n";

    #[test]
    fn clients_that_say_nothing_or_too_little_are_cut_and_others_are_served() {
        let (address, metrics) = start(Bounds {
            connection_time_max: Duration::from_secs(1),
            ..Bounds::default()
        });
        let silent = connect(address, "");
        let slow = connect(address, "GET / HTTP/1.1\r\nhost:");
        let answer = rest(connect(address, GET));
        assert!(
            answer.starts_with("HTTP/1.1 200") && answer.ends_with("here"),
            "{answer}"
        );
        assert_eq!(rest(silent), "");
        assert_eq!(rest(slow), "");
        // A connection may end a moment before it is counted.
        let deadline = Instant::now() + Duration::from_secs(10);
        while !metrics
            .text()
            .contains("kvcachepool_admin_timeouts_total 2")
        {
            assert!(Instant::now() < deadline, "{}", metrics.text());
            std::thread::yield_now();
        }
    }

    #[test]
    fn the_oldest_connection_makes_room_for_one_more_than_allowed() {
        let (address, metrics) = start(Bounds {
            connections_max: 2,
            connection_time_max: DEADLINE,
            ..Bounds::default()
        });
        let oldest = connect(address, "");
        let mut younger = connect(address, "");
        assert!(rest(connect(address, GET)).ends_with("here"));
        assert_eq!(rest(oldest), "");
        younger.write_all(GET.as_bytes()).unwrap();
        assert!(rest(younger).ends_with("here"));
        assert!(
            metrics
                .text()
                .contains("kvcachepool_admin_displaced_total 1")
        );
    }

    #[test]
    fn a_request_among_many_idle_connections_is_answered() {
        let (listener, address) = bind();
        let request = connect(address, GET);
        let _idle: Vec<_> = (0..100).map(|_| connect(address, "")).collect();
        start_on(listener, Bounds::default());
        assert!(rest(request).ends_with("here"));
    }

    #[test]
    fn a_connection_ends_with_its_answer_and_a_body_is_not_waited_for() {
        let (address, _) = start(Bounds::default());
        assert!(rest(connect(address, GET)).contains("connection: close"));
        let head = "GET / HTTP/1.1\r\nhost: x\r\ncontent-length: 1073741824\r\n\r\nbegins";
        assert!(rest(connect(address, head)).ends_with("here"));
    }

    #[test]
    fn a_head_over_the_bound_is_refused() {
        let (address, _) = start(Bounds {
            head_bytes_max: 8 << 10,
            ..Bounds::default()
        });
        let long = format!("GET / HTTP/1.1\r\nhost: {}", "x".repeat(8 << 10));
        let answer = rest(connect(address, &long));
        assert!(answer.starts_with("HTTP/1.1 431"), "{answer}");
    }
}

//! Servers that take a connection and then nothing more: what an operation does with its slot, and what becomes of the connection.

use super::{requests, uploads};
use crate::testing::faulty::{Faulty, Reply, until};
use crate::testing::suite::{Memory, Sample};
use crate::testing::tls::Certificates;
use crate::{Cause, Put};
use futures::FutureExt;
use kvcachepool_protocol::config;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// More than the kernel takes for a connection that nobody reads from.
const BYTES: u64 = 32 << 20;

/// A server that reads nothing, or nothing after the handshake where it speaks TLS. It ends when it is dropped.
struct Deaf {
    files: Certificates,
    port: u16,
    encrypted: bool,
    task: JoinHandle<()>,
}

impl Deaf {
    async fn start(encrypted: bool) -> Self {
        let files = Certificates::local();
        let tls = encrypted.then(|| files.acceptor());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let task = tokio::spawn(async move {
            let mut open = Vec::new();
            while let Ok((stream, _)) = listener.accept().await {
                open.push(match &tls {
                    Some(tls) => Box::new(tls.accept(stream).await) as Box<dyn Send>,
                    None => Box::new(stream),
                });
            }
        });
        for name in ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"] {
            std::fs::write(files.path(name), "any").unwrap();
        }
        Self {
            files,
            port,
            encrypted,
            task,
        }
    }

    fn config(&self) -> config::S3 {
        let scheme = if self.encrypted { "https" } else { "http" };
        config::S3 {
            bucket: "kv-bucket".into(),
            endpoint: format!("{scheme}://127.0.0.1:{}", self.port),
            auth: Some(self.files.path("")),
            ca: self.encrypted.then(|| self.files.path("ca.crt")),
            ..config::S3::default()
        }
    }
}

impl Drop for Deaf {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// An object of one long section, whose bytes are whatever lies there.
fn long(memory: &Memory, hold: &Arc<()>) -> Put {
    let mut object = Sample::new(1, 0, &[9]).object;
    object.sections[0].stored_bytes = BYTES;
    object.sections[0].raw_bytes = BYTES;
    Put {
        object,
        spans: vec![memory.held(BYTES, hold.clone())],
    }
}

#[tokio::test]
async fn a_put_whose_server_reads_no_more_frees_its_slot_when_it_ends() {
    let memory = Memory::new(256 << 20);
    for encrypted in [false, true] {
        let server = Deaf::start(encrypted).await;
        let requests = requests(&server.config()).await;
        let hold = Arc::new(());
        let put = long(&memory, &hold);
        let sent = async move { requests.put(&put, uploads()).await };
        let waited = tokio::time::timeout(Duration::from_millis(500), sent).await;
        assert!(waited.is_err(), "{encrypted}: {waited:?}");
        // Not when the connection ends: at once.
        assert_eq!(Arc::strong_count(&hold), 1, "{encrypted}");
    }
}

#[tokio::test]
async fn what_is_still_sent_when_nobody_waits_for_it_ends_its_connection_by_itself() {
    let server = Deaf::start(false).await;
    let requests = requests(&server.config()).await;
    let memory = Memory::new(64 << 20);
    let put = long(&memory, &Arc::new(()));
    let sent = requests.put(&put, uploads());
    let waited = tokio::time::timeout(Duration::from_millis(500), sent).await;
    assert!(waited.is_err(), "{waited:?}");
    // The kernel gives a connection up on which nobody takes anything.
    let port = format!(":{:04X} ", server.port);
    let open = || {
        let all = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
        // Client's side: the server's port is the remote one, and the state is that of an open connection or one that ends.
        let lines = all.lines().filter(|line| {
            let mut fields = line.split_whitespace().skip(2);
            let remote = fields.next().unwrap_or_default().to_string() + " ";
            let state = fields.next().unwrap_or_default();
            remote.ends_with(&port) && matches!(state, "01" | "04" | "05" | "09")
        });
        lines.count()
    };
    until("the connection's end", || open() == 0).await;
}

#[tokio::test]
async fn a_count_that_never_comes_is_given_up_and_holds_up_no_other_request() {
    let server = Faulty::start(|_| {
        let head = "HTTP/1.1 200 Answer\r\ndate: Sun, 06 Nov 1994 08:49:37 GMT\r\ncontent-length: 40\r\n\r\n";
        Reply::Raw(head.into(), false)
    })
    .await;
    let config = config::S3 {
        max_concurrency: 1,
        ..server.config()
    };
    let requests = requests(&config).await;
    let counted = requests.counted_lately(Duration::from_secs(3_600));
    let counted = tokio::time::timeout(Duration::from_secs(600), counted);
    let stalls = async {
        until("the head", || requests.clock.unix_s().is_some()).await;
        // From now on nothing but time passes.
        tokio::time::pause();
    };
    let (counted, ()) = tokio::join!(counted, stalls);
    let error = counted.expect("it ended").unwrap_err();
    assert_eq!(error.cause, Cause::Timeout, "{error}");
    assert!(requests.bound.question().now_or_never().is_some());
}

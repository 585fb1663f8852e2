//! The webhook through its real port: TLS over loopback, with reviews as an API server sends them.

mod connections;
mod handler;
mod pools;

use super::review::Review;
use super::router::{Decide, Decision, Limits, PATH, router};
use super::tls::{Served, acceptor};
use crate::http::{Bounds, Port, serve};
use crate::metrics::{self, Metrics};
use crate::shutdown::{Phase, Shutdown};
use rcgen::{CertificateParams, KeyPair};
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, RootCertStore};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Labels every pod after the milliseconds in the pod's annotation `wait`, and counts calls.
#[derive(Clone, Default)]
struct Labels(Arc<AtomicUsize>);

impl Decide for Labels {
    async fn decide(&self, review: Review) -> Decision {
        let pod = review.object.unwrap();
        self.0.fetch_add(1, Ordering::SeqCst);
        let wait = pod.pointer("/metadata/annotations/wait");
        if let Some(wait) = wait.and_then(Value::as_u64) {
            tokio::time::sleep(Duration::from_millis(wait)).await;
        }
        let patch = json!([{"op": "add", "path": "/metadata/labels", "value": {"seen": "yes"}}]);
        Decision {
            result: "Injected",
            reason: "",
            patch: Some(serde_json::from_value(patch).unwrap()),
        }
    }
}

/// A self-signed certificate for localhost.
fn certificate() -> (CertificateDer<'static>, Arc<CertifiedKey>) {
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(["localhost".to_owned()]).unwrap();
    let der = params.self_signed(&key).unwrap().der().clone();
    let private = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let certified = CertifiedKey::from_der(vec![der.clone()], private, &default_provider());
    (der, Arc::new(certified.unwrap()))
}

/// Waits until the server has called the decider.
async fn asked(labels: &Labels) {
    let wait = async {
        while labels.0.load(Ordering::SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), wait)
        .await
        .unwrap();
}

/// A running webhook.
struct Rig {
    address: SocketAddr,
    metrics: Arc<Metrics>,
    served: Arc<Served>,
    phase: watch::Sender<Phase>,
    server: JoinHandle<()>,
    trusted: CertificateDer<'static>,
}

async fn start(decide: impl Decide, limits: Limits, bounds: Bounds) -> Rig {
    let metrics = Arc::new(metrics::registry());
    let served = Arc::new(Served::default());
    let (trusted, certified) = certificate();
    served.set(certified);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (phase, shutdown) = Shutdown::new();
    let port = Port {
        name: "webhook",
        bounds,
        tls: Some(acceptor(served.clone()).unwrap()),
        router: router(decide, limits, metrics.clone()),
        metrics: metrics.clone(),
    };
    let server = tokio::spawn(serve(listener, port, shutdown));
    Rig {
        address,
        metrics,
        served,
        phase,
        server,
        trusted,
    }
}

async fn labels() -> Rig {
    start(Labels::default(), Limits::default(), Bounds::default()).await
}

async fn connect(
    address: SocketAddr,
    trusted: &[CertificateDer<'static>],
) -> std::io::Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    for certificate in trusted {
        roots.add(certificate.clone()).unwrap();
    }
    let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let stream = TcpStream::connect(address).await?;
    let name = ServerName::try_from("localhost").unwrap();
    TlsConnector::from(Arc::new(config))
        .connect(name, stream)
        .await
}

fn head(path: &str, bytes: usize) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {bytes}\r\n\r\n"
    )
}

/// One response of a connection: status, head, body.
async fn answer(stream: &mut TlsStream<TcpStream>) -> std::io::Result<(u16, String, Vec<u8>)> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    let head = String::from_utf8(head).unwrap().to_lowercase();
    let value = |name: &str| {
        let line = head.lines().find_map(|line| line.strip_prefix(name));
        line.map(|value| value.trim().to_owned())
    };
    let mut body = vec![0; value("content-length:").unwrap().parse().unwrap()];
    stream.read_exact(&mut body).await?;
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Ok((status, head, body))
}

impl Rig {
    async fn connect(&self) -> TlsStream<TcpStream> {
        connect(self.address, std::slice::from_ref(&self.trusted))
            .await
            .unwrap()
    }

    async fn post(&self, path: &str, body: &[u8]) -> (u16, Vec<u8>) {
        let mut stream = self.connect().await;
        stream
            .write_all(head(path, body.len()).as_bytes())
            .await
            .unwrap();
        // The server may not read a body that it refuses by length.
        let _cut = stream.write_all(body).await;
        let (status, _, body) = answer(&mut stream).await.unwrap();
        (status, body)
    }

    /// The response of an answered review.
    async fn review(&self, path: &str, review: &Value) -> Value {
        let (status, body) = self.post(path, review.to_string().as_bytes()).await;
        assert_eq!(status, 200, "{}", String::from_utf8_lossy(&body));
        let mut answer: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(answer["apiVersion"], "admission.k8s.io/v1");
        assert_eq!(answer["kind"], "AdmissionReview");
        assert_eq!(answer["response"]["uid"], review["request"]["uid"]);
        assert_eq!(answer["response"]["allowed"], true);
        answer["response"].take()
    }

    fn counted(&self, line: &str) -> bool {
        let text = self.metrics.text();
        text.lines()
            .any(|l| l.strip_prefix("kvcachepool_") == Some(line))
    }

    /// Waits until a line is in the metrics.
    async fn until(&self, line: &str) {
        let wait = async {
            while !self.counted(line) {
                tokio::task::yield_now().await;
            }
        };
        let waited = tokio::time::timeout(Duration::from_secs(20), wait).await;
        assert!(waited.is_ok(), "{line} is not in\n{}", self.metrics.text());
    }
}

/// A review as an API server sends it for `kubectl run`.
fn review(pod: Value) -> Value {
    json!({
        "kind": "AdmissionReview",
        "apiVersion": "admission.k8s.io/v1",
        "request": {
            "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "requestKind": {"group": "", "version": "v1", "kind": "Pod"},
            "requestResource": {"group": "", "version": "v1", "resource": "pods"},
            "name": "vllm-0",
            "namespace": "serving",
            "operation": "CREATE",
            "userInfo": {"username": "admin", "groups": ["system:masters", "system:authenticated"]},
            "object": pod,
            "oldObject": null,
            "dryRun": false,
            "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"},
        },
    })
}

fn pod() -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "vllm-0", "namespace": "serving", "labels": {"kvcachepool.io/pool": "p"}},
        "spec": {"containers": [{"name": "vllm", "image": "vllm/vllm-openai", "args": ["--model", "m"]}]},
    })
}

/// The JSON patch of a response.
fn patch(response: &Value) -> Value {
    assert_eq!(response["patchType"], "JSONPatch");
    let bytes: k8s_openapi::ByteString = serde_json::from_value(response["patch"].clone()).unwrap();
    serde_json::from_slice(&bytes.0).unwrap()
}

const INJECT: &str = PATH;

//! A bucket and a token service that are reached through a proxy alone, with certificates of a private authority.

use crate::harness::{Sidecar, self_signed, wait_for};
use crate::s3_identity::Cloud;
use crate::vllm::{Vllm, hashes};
use parking_lot::Mutex;
use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::sync::Arc;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio_rustls::TlsAcceptor;

const STORED: &str = "tier_write_chunks_total{result=\"stored\",tier=\"s3\"}";

/// An HTTP proxy, and what it was asked for: the first line and the credentials of each request.
struct Proxy {
    port: u16,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Proxy {
    /// Answers with this status; opens a tunnel where it is 200.
    async fn start(status: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let asked = Arc::<Mutex<Vec<String>>>::default();
        let hears = asked.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let hears = hears.clone();
                tokio::spawn(async move { tunnel(client, status, &hears).await });
            }
        });
        Self { port, asked }
    }
}

async fn tunnel(
    mut client: TcpStream,
    status: &str,
    asked: &Mutex<Vec<String>>,
) -> std::io::Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(client.read_u8().await?);
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let server = head.split(' ').nth(1).unwrap_or_default().to_owned();
    asked.lock().push(head);
    let answer = format!("HTTP/1.1 {status}\r\n\r\n");
    client.write_all(answer.as_bytes()).await?;
    if status.starts_with("200") {
        let mut server = TcpStream::connect(server).await?;
        copy_bidirectional(&mut client, &mut server).await?;
    }
    Ok(())
}

/// Speaks TLS in front of a server; returns its port.
async fn encrypted(certificate: &[String; 2], server: &str) -> u16 {
    let [chain, key] = certificate
        .each_ref()
        .map(|path| std::fs::read(path).unwrap());
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&chain).collect();
    let provider = Arc::new(aws_lc_rs::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain.unwrap(), PrivateKeyDer::from_pem_slice(&key).unwrap())
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = server.trim_start_matches("http://").to_owned();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let (acceptor, server) = (acceptor.clone(), server.clone());
            tokio::spawn(async move {
                let mut client = acceptor.accept(client).await?;
                let mut server = TcpStream::connect(server).await?;
                copy_bidirectional(&mut client, &mut server).await
            });
        }
    });
    port
}

/// A cloud whose services speak TLS by a certificate of their own.
struct Private {
    cloud: Cloud,
    _folder: TempDir,
    ca: String,
    bucket: u16,
    tokens: u16,
    runtime: Runtime,
}

impl Private {
    fn start() -> Self {
        let (cloud, runtime) = (Cloud::start(), Runtime::new().unwrap());
        cloud.write("the-token");
        cloud.takes("the-token");
        let folder = tempfile::tempdir().unwrap();
        let certificate = self_signed(folder.path(), "cloud");
        let endpoint = cloud.bucket.config().endpoint;
        let bucket = runtime.block_on(encrypted(&certificate, &endpoint));
        let tokens = runtime.block_on(encrypted(&certificate, &cloud.service()));
        let [ca, _] = certificate;
        Self {
            cloud,
            _folder: folder,
            ca,
            bucket,
            tokens,
            runtime,
        }
    }

    fn proxy(&self, status: &'static str) -> Proxy {
        self.runtime.block_on(Proxy::start(status))
    }

    /// A sidecar with a web identity, and these variables in its environment.
    fn sidecar(&self, environment: &str) -> Sidecar {
        let (bucket, ca) = (self.bucket, &self.ca);
        let mut sidecar = Sidecar::prepare(&format!(
            "memory: {{size: 64Mi}}\ncache: {{minLoadTokens: 0}}\n\
             s3: {{bucket: kv-bucket, endpoint: \"https://127.0.0.1:{bucket}\", ca: {ca}}}\n"
        ));
        let tokens = format!("https://127.0.0.1:{}", self.tokens);
        let identity = self.cloud.web_identity(&tokens);
        sidecar.run_by(&format!("export {identity} {environment}; exec \"$@\""));
        sidecar.wait_socket();
        sidecar.wait_populated();
        sidecar
    }
}

fn stores(sidecar: &Sidecar) {
    sidecar.wait_tier("s3", "ready");
    Vllm::attach(&sidecar.socket()).store("r", &hashes(1, 2));
    sidecar.wait_metric(STORED, 2.0);
}

#[test]
fn bucket_and_token_service_are_reached_through_the_proxy_of_the_environment() {
    let private = Private::start();
    let proxy = private.proxy("200 OK");
    stores(&private.sidecar(&format!(
        "HTTPS_PROXY=http://me:secret@127.0.0.1:{}",
        proxy.port
    )));
    let asked = proxy.asked.lock().clone();
    for port in [private.bucket, private.tokens] {
        let line = format!("CONNECT 127.0.0.1:{port} ");
        let head = asked.iter().find(|head| head.starts_with(&line)).unwrap();
        let credentials = "proxy-authorization: Basic bWU6c2VjcmV0";
        assert!(
            head.to_lowercase().contains(&credentials.to_lowercase()),
            "{head}"
        );
    }
}

#[test]
fn hosts_of_no_proxy_are_reached_without_it() {
    let private = Private::start();
    let proxy = private.proxy("200 OK");
    let port = proxy.port;
    stores(&private.sidecar(&format!(
        "https_proxy=http://127.0.0.1:{port} NO_PROXY=127.0.0.1"
    )));
    assert!(proxy.asked.lock().is_empty());
}

#[test]
fn a_proxy_that_opens_no_tunnel_is_named_and_its_password_is_not() {
    let private = Private::start();
    let proxy = private.proxy("407 Proxy Authentication Required");
    let (port, gone) = (proxy.port, "http://me:secret@127.0.0.1:1");
    for (url, wanted) in [
        (
            format!("http://me:secret@127.0.0.1:{port}"),
            "proxy authorization required",
        ),
        (gone.to_owned(), "Connection refused"),
        (
            format!("https://me:secret@127.0.0.1:{port}"),
            "only a proxy of http://",
        ),
    ] {
        let sidecar = private.sidecar(&format!("HTTPS_PROXY={url}"));
        sidecar.wait_tier("s3", "off");
        let said = wait_for(wanted, || {
            let tier = sidecar.tier("s3");
            let said = tier["message"].as_str().unwrap().to_owned();
            (said.contains(wanted) && said.contains("HTTPS_PROXY")).then_some(said)
        });
        assert!(
            !said.contains("secret") && !sidecar.log().contains("secret"),
            "{said}"
        );
    }
}

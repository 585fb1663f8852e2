//! A bucket and a token service that are reached through a proxy alone, with certificates of a private authority.

use crate::harness::{Sidecar, wait_for};
use crate::s3_identity::Cloud;
use crate::testing::tls::Certificates;
use crate::vllm::{Vllm, hashes};
use parking_lot::Mutex;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;

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

/// A cloud whose services speak TLS by a certificate of their own.
struct Private {
    cloud: Cloud,
    certificates: Certificates,
    bucket: u16,
    tokens: u16,
    runtime: Runtime,
}

impl Private {
    fn start() -> Self {
        let (cloud, runtime) = (Cloud::start(), Runtime::new().unwrap());
        cloud.write("the-token");
        cloud.takes("the-token");
        let certificates = Certificates::local();
        let [bucket, tokens] = [cloud.bucket.config().endpoint, cloud.service()].map(|url| {
            let server = url.trim_start_matches("http://");
            runtime.block_on(certificates.front(server))
        });
        Self {
            cloud,
            certificates,
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
        let (bucket, ca) = (self.bucket, self.certificates.path("ca.crt"));
        let mut sidecar = Sidecar::prepare(&format!(
            "memory: {{size: 64Mi}}\ncache: {{minLoadTokens: 0}}\n\
             s3: {{bucket: kv-bucket, endpoint: \"https://127.0.0.1:{bucket}\", ca: {}}}\n",
            ca.display()
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

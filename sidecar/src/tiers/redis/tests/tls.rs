//! TLS to real servers, and every way in which it goes wrong, by name.

use super::rig::{Server, Spot, free_port, open, settings};
use crate::tiers::redis::Redis;
use crate::tiers::suite::Sample;
use crate::tiers::{Cause, Tier, TierError};
use std::path::PathBuf;
use tempfile::TempDir;

/// An authority, and the certificate and key of a server with these names, as files.
pub struct Files {
    folder: TempDir,
}

impl Files {
    pub fn new(names: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let key = rcgen::KeyPair::generate().unwrap();
        let mut authority = rcgen::CertificateParams::new(vec![]).unwrap();
        // OpenSSL takes a certificate whose issuer has its name for one that nobody else signed.
        let name = rcgen::DnType::CommonName;
        authority.distinguished_name.push(name, "authority");
        authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let certificate = authority.self_signed(&key).unwrap();
        let issuer = rcgen::Issuer::new(authority, key);
        let server_key = rcgen::KeyPair::generate().unwrap();
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        let server = rcgen::CertificateParams::new(names).unwrap();
        let server = server.signed_by(&server_key, &issuer).unwrap();
        for (name, text) in [
            ("ca.crt", certificate.pem()),
            ("tls.crt", server.pem()),
            ("tls.key", server_key.serialize_pem()),
        ] {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        Self { folder }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A server with the certificate, and its port for TLS.
    pub fn server(&self, args: &[&str]) -> (Server, u16) {
        self.started(args, Server::start)
    }

    /// What is started with the settings of TLS and these.
    pub fn started(&self, args: &[&str], start: impl Fn(&[&str]) -> Server) -> (Server, u16) {
        let port = free_port();
        let [certificate, key, ca] =
            ["tls.crt", "tls.key", "ca.crt"].map(|name| self.path(name).display().to_string());
        let shown = port.to_string();
        let mut all = vec!["--tls-port", &shown, "--tls-auth-clients", "no"];
        all.extend(["--tls-cert-file", &certificate, "--tls-key-file", &key]);
        all.extend(["--tls-ca-cert-file", &ca]);
        all.extend(args);
        (start(&all), port)
    }
}

pub fn over_tls(url: &str, ca: PathBuf) -> Redis {
    let mut trusting = settings(&[url.to_string()]);
    trusting.ca = Some(ca);
    Redis::open(&trusting).unwrap()
}

async fn refused(tier: Redis) -> TierError {
    tier.usage().await.unwrap_err()
}

#[tokio::test]
async fn bytes_pass_through_tls_as_they_are() {
    let files = Files::new(&["127.0.0.1"]);
    let (server, port) = files.server(&["--requirepass", "right"]);
    let url = format!("rediss://:right@127.0.0.1:{port}/2");
    let spot = Spot::new(over_tls(&url, files.path("ca.crt")));
    let sample = Sample::new(1, 0, &[3_333_333, 1, 1 << 20]);
    spot.put(&sample).await;
    for _ in 0..3 {
        spot.check(&sample).await;
    }
    let keys = server.say(&["--no-auth-warning", "-a", "right", "-n", "2", "DBSIZE"]);
    assert_eq!(keys, "12");
    assert_eq!(spot.tier.remove(&[sample.name()]).await, Ok(1));
}

/// Objects are written and read by this URL, and lie in these servers.
async fn serves(url: &str, files: &Files, servers: &[&Server]) {
    let spot = Spot::new(over_tls(url, files.path("ca.crt")));
    for number in 0..8 {
        let sample = Sample::new(1, number, &[9_000]);
        spot.put(&sample).await;
        spot.check(&sample).await;
    }
    for server in servers {
        assert_ne!(server.say(&["DBSIZE"]), "0");
    }
}

#[tokio::test]
async fn all_nodes_of_a_cluster_are_spoken_to_by_tls() {
    let files = Files::new(&["127.0.0.1"]);
    let node = || {
        let bus = free_port().to_string();
        let args = ["--cluster-enabled", "yes", "--tls-cluster", "yes"];
        let args = [&args[..], &["--cluster-port", &bus]].concat();
        (files.server(&args), bus)
    };
    let (((first, port), bus), ((second, _), _)) = (node(), node());
    first.say(&["CLUSTER", "ADDSLOTSRANGE", "0", "8191"]);
    second.say(&["CLUSTER", "ADDSLOTSRANGE", "8192", "16383"]);
    second.say(&["CLUSTER", "MEET", "127.0.0.1", &port.to_string(), &bus]);
    for node in [&first, &second] {
        node.wait(&["CLUSTER", "INFO"], |info| {
            info.contains("cluster_state:ok") && info.contains("cluster_size:2")
        });
    }
    let url = format!("redis-cluster://127.0.0.1:{port}?tls=true");
    serves(&url, &files, &[&first, &second]).await;
}

#[tokio::test]
async fn sentinels_and_the_master_that_they_name_are_spoken_to_by_tls() {
    let files = Files::new(&["127.0.0.1"]);
    let (master, port) = files.server(&[]);
    let watched = format!("127.0.0.1 {port} 1");
    let (_sentinel, at) = files.started(&["--tls-replication", "yes"], |args| {
        Server::sentinel_of("redis-server", &watched, args)
    });
    let url = format!("redis-sentinel://127.0.0.1:{at}/kv?tls=true");
    serves(&url, &files, &[&master]).await;
}

#[tokio::test]
async fn whom_nobody_vouches_for_and_who_has_another_name_is_not_trusted() {
    let (right, other) = (Files::new(&["127.0.0.1"]), Files::new(&["127.0.0.1"]));
    let (_server, port) = right.server(&[]);
    let url = format!("rediss://127.0.0.1:{port}");
    let unknown = refused(over_tls(&url, other.path("ca.crt"))).await;
    assert_eq!(unknown.cause, Cause::Unauthenticated, "{unknown}");
    assert!(
        unknown.detail.contains("TLS") && unknown.detail.contains("redis.ca"),
        "{unknown}"
    );
    // Without a file only the authorities of the system vouch.
    let system = refused(open(std::slice::from_ref(&url))).await;
    assert_eq!(system.cause, Cause::Unauthenticated, "{system}");
    let named = format!("rediss://localhost:{port}");
    let name = refused(over_tls(&named, right.path("ca.crt"))).await;
    assert_eq!(name.cause, Cause::Unauthenticated, "{name}");
    assert!(name.detail.contains("another host"), "{name}");
    for (file, says) in [("missing", "No such file"), ("tls.key", "no certificate")] {
        let error = refused(over_tls(&url, right.path(file))).await;
        assert_eq!(error.cause, Cause::Config, "{error}");
        assert!(error.detail.contains(says), "{error}");
    }
    let strange = over_tls("rediss://kv..0:1", right.path("ca.crt"));
    let error = refused(strange).await;
    assert_eq!(error.cause, Cause::Config, "{error}");
}

#[tokio::test]
async fn tls_to_a_plain_port_and_plain_text_to_one_of_tls_are_told_apart_from_a_server_that_is_away()
 {
    let files = Files::new(&["127.0.0.1"]);
    let (server, port) = files.server(&[]);
    let to_plain = format!("rediss://127.0.0.1:{}", server.port);
    let error = refused(over_tls(&to_plain, files.path("ca.crt"))).await;
    assert!(error.detail.contains("a port without TLS?"), "{error}");
    let to_tls = open(&[format!("redis://127.0.0.1:{port}")]);
    let error = refused(to_tls).await;
    assert!(error.detail.contains("rediss://"), "{error}");
}

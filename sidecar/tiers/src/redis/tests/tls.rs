//! TLS to real servers, and every way in which it goes wrong, by name.

use crate::redis::Redis;
use crate::redis::pool::Lane;
use crate::testing::free_port;
use crate::testing::redis_server::{Server, Spot, open, settings};
use crate::testing::suite::Sample;
use crate::testing::tls::Certificates;
use crate::{Cause, Removal, Tier, TierError};
use std::path::PathBuf;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::Barrier;

impl Certificates {
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
        let mut all = vec!["--tls-port", &shown];
        if !args.contains(&"--tls-auth-clients") {
            all.extend(["--tls-auth-clients", "no"]);
        }
        all.extend(["--tls-cert-file", &certificate, "--tls-key-file", &key]);
        all.extend(["--tls-ca-cert-file", &ca]);
        all.extend(args);
        (start(&all), port)
    }
}

pub fn over_tls(url: &str, ca: PathBuf) -> Redis {
    let mut trusting = settings(&[url.to_string()]);
    trusting.tls_files.ca = Some(ca);
    Redis::open(&trusting).unwrap()
}

async fn refused(tier: Redis) -> TierError {
    tier.usage().await.unwrap_err()
}

#[tokio::test]
async fn bytes_pass_through_tls_as_they_are() {
    let files = Certificates::local();
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
    assert_eq!(
        spot.tier.remove(Removal::Named(&[sample.name()])).await,
        Ok(1)
    );
}

/// Objects are written and read by this URL, and lie in these servers.
async fn serves(url: &str, files: &Certificates, servers: &[&Server]) {
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
    let files = Certificates::local();
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
    let files = Certificates::local();
    let (master, port) = files.server(&[]);
    let watched = format!("127.0.0.1 {port} 1");
    let (_sentinel, at) = files.started(&["--tls-replication", "yes"], |args| {
        Server::sentinel_of("redis-server", &watched, args)
    });
    let url = format!("redis-sentinel://127.0.0.1:{at}/kv?tls=true");
    serves(&url, &files, &[&master]).await;
}

#[tokio::test]
async fn a_server_that_asks_for_a_certificate_gets_one_that_may_be_replaced() {
    let (files, other) = (Certificates::local(), Certificates::local());
    let (_server, port) = files.server(&["--tls-auth-clients", "yes"]);
    let mut settings = settings(&[format!("rediss://127.0.0.1:{port}")]);
    settings.tls_files.ca = Some(files.path("ca.crt"));
    let none = refused(Redis::open(&settings).unwrap()).await;
    assert_eq!(none.cause, Cause::Unauthenticated, "{none}");
    assert!(none.detail.contains("redis.clientCertificate"), "{none}");
    let folder = tempfile::tempdir().unwrap();
    settings.tls_files.client_certificate = Some(folder.path().into());
    let spot = Spot::new(Redis::open(&settings).unwrap());
    let put = |from: &Certificates, name: &str| {
        std::fs::copy(from.path(name), folder.path().join(name)).unwrap();
    };
    let fails = async |cause: Cause, says: &str| {
        let error = spot.tier.usage().await.unwrap_err();
        assert_eq!(error.cause, cause, "{error}");
        assert!(error.detail.contains(says), "{says}: {error}");
    };
    fails(Cause::Config, "tls.crt: No such file").await;
    put(&files, "tls.crt");
    fails(Cause::Config, "tls.key: No such file").await;
    put(&other, "tls.key");
    fails(Cause::Config, "redis.clientCertificate").await;
    put(&other, "tls.crt");
    fails(Cause::Unauthenticated, "redis.clientCertificate").await;
    put(&files, "tls.crt");
    put(&files, "tls.key");
    let sample = Sample::new(1, 0, &[9_000]);
    spot.put(&sample).await;
    spot.check(&sample).await;
}

#[tokio::test]
async fn whom_nobody_vouches_for_and_who_has_another_name_is_not_trusted() {
    let (right, other) = (Certificates::local(), Certificates::local());
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
    let files = Certificates::local();
    let (server, port) = files.server(&[]);
    let to_plain = format!("rediss://127.0.0.1:{}", server.port);
    let error = refused(over_tls(&to_plain, files.path("ca.crt"))).await;
    assert!(error.detail.contains("a port without TLS?"), "{error}");
    let to_tls = open(&[format!("redis://127.0.0.1:{port}")]);
    let error = refused(to_tls).await;
    assert!(error.detail.contains("rediss://"), "{error}");
}

/// Connections that the server has, by its numbers, without the one that asks.
fn connections(server: &Server) -> Vec<String> {
    let list = server.say(&["CLIENT", "LIST", "TYPE", "normal"]);
    let number = |line: &str| line.split(' ').next().unwrap().replace("id=", "");
    let mut all: Vec<_> = list.lines().map(number).collect();
    all.pop();
    all
}

#[tokio::test]
async fn a_connection_that_was_closed_while_it_was_idle_costs_no_operation_and_no_other_one() {
    for tls in [false, true] {
        let files = Certificates::local();
        let (server, port) = files.server(&[]);
        let url = match tls {
            true => format!("rediss://127.0.0.1:{port}"),
            false => server.tcp(),
        };
        let tier = over_tls(&url, files.path("ca.crt"));
        let node = tier.now().unwrap().servers.known().remove(0);
        let spot = Spot::new(tier);
        let mut three = Vec::new();
        for _ in 0..3 {
            three.push(node.take(Lane::Bytes).await.unwrap());
        }
        // The one that was made last is the next to be used.
        three.into_iter().for_each(drop);
        let mut open = connections(&server);
        assert_eq!(open.len(), 3, "{tls}");
        let last = open.pop().unwrap();
        assert_eq!(server.say(&["CLIENT", "KILL", "ID", &last]), "1");
        for number in 0..2 {
            spot.put(&Sample::new(1, number, &[9_000])).await;
        }
        assert_eq!(connections(&server), open, "{tls}");
    }
}

#[tokio::test]
async fn what_comes_encrypted_and_nobody_asked_for_answers_no_later_question() {
    let files = Certificates::local();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("rediss://{}", listener.local_addr().unwrap());
    let (acceptor, between) = (files.acceptor(), Arc::new(Barrier::new(2)));
    let pause = between.clone();
    let server = tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let mut stream = acceptor.accept(stream).await.unwrap();
            let mut asked = [0; 1_024];
            assert_ne!(stream.read(&mut asked).await.unwrap(), 0);
            for words in [b":1\r\n", b":0\r\n"] {
                stream.write_all(words).await.unwrap();
                stream.flush().await.unwrap();
                pause.wait().await;
            }
            // Until it is given up.
            let _ = stream.read(&mut asked).await;
        }
    });
    let tier = over_tls(&url, files.path("ca.crt"));
    let names = [Sample::new(1, 0, &[1]).name()];
    for _ in 0..3 {
        assert_eq!(tier.lookup(&names).await, Ok(vec![true]));
        between.wait().await;
        between.wait().await;
    }
    server.abort();
}

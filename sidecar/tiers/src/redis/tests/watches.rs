//! What a connection knows of its WATCH, and what it is good for after one that was refused.

use super::cluster::Cluster;
use super::{proxy::Proxy, whole::keys};
use crate::redis::Redis;
use crate::redis::pool::{Lane, Lent};
use crate::redis::resp::Reply;
use crate::testing::redis_server::{Server, Spot, open, settings};
use crate::testing::suite::Sample;
use crate::{Cause, Stored};
use std::time::Duration;

async fn connect(server: &Server) -> Lent {
    let node = open(&[server.unix()])
        .now()
        .unwrap()
        .servers
        .known()
        .remove(0);
    node.take(Lane::Questions).await.unwrap()
}

#[tokio::test]
async fn one_that_is_refused_takes_nothing_from_those_before() {
    let server = Server::start(&[]);
    let mut c = connect(&server).await;
    c.watch(&[b"one"]);
    assert_eq!(c.watched().await, Ok(Reply::Simple("OK".into())));
    // Of no key.
    c.watch(&[]);
    assert!(matches!(c.watched().await, Ok(Reply::Error(_))));
    assert!(c.is_watching() && !c.is_clean());
    server.say(&["SET", "one", "1"]);
    assert_eq!(c.transaction(&[vec![&b"PING"[..]]]).await, Ok(None));
    assert!(!c.is_watching() && c.is_clean());
    c.watch(&[]);
    assert!(matches!(c.watched().await, Ok(Reply::Error(_))));
    assert!(c.is_clean());
}

#[tokio::test]
async fn a_transaction_that_was_begun_is_ended_before_another_operation() {
    let server = Server::start(&[]);
    let mut c = connect(&server).await;
    c.watch(&[b"one"]);
    let mut given_up = c.begin();
    assert_eq!(c.watched().await, Ok(Reply::Simple("OK".into())));
    assert_eq!(c.begun(&mut given_up).await, Ok(()));
    assert_eq!(c.end(given_up, 0).await, Ok(Some(vec![])));
    assert!(!c.is_watching() && c.is_clean());
    server.say(&["SET", "one", "1"]);
    let mut ended = c.begin();
    assert_eq!(c.begun(&mut ended).await, Ok(()));
    assert!(!c.is_watching() && !c.is_clean());
    c.command(&[b"PING"]);
    let replies = c.end(ended, 1).await;
    assert_eq!(replies, Ok(Some(vec![Reply::Simple("PONG".into())])));
    assert!(c.is_clean());
}

#[tokio::test]
async fn a_transaction_whose_slot_goes_to_another_node_has_ended() {
    let cluster = Cluster::start();
    let [from, to] = [&cluster.nodes[0], &cluster.nodes[1]];
    let mut c = connect(from).await;
    let mut open = c.begin();
    assert_eq!(c.begun(&mut open).await, Ok(()));
    // A slot of the first node.
    c.command(&[b"SET", b"{06S}", b"1"]);
    c.flush().await.unwrap();
    from.wait(&["CLIENT", "LIST"], |list| list.contains("multi=1"));
    let slot = from.say(&["CLUSTER", "KEYSLOT", "{06S}"]);
    for node in [to, from] {
        node.say(&["CLUSTER", "SETSLOT", &slot, "NODE", &cluster.id(1)]);
    }
    let moved = c.end(open, 1).await.unwrap_err();
    assert!(moved.redirect().is_some(), "{moved:?}");
    assert!(c.is_clean());
}

#[tokio::test]
async fn a_put_of_what_is_there_keeps_its_connection() {
    let server = Server::start(&[]);
    let spot = Spot::new(open(&[server.unix()]));
    let sample = Sample::new(1, 0, &[3_000]);
    let mut other = sample.clone();
    other.object.created_unix_ms += 1_000;
    spot.put(&sample).await;
    let connections = || -> Vec<String> {
        let list = server.say(&["CLIENT", "LIST"]);
        let ours = list.lines().filter(|line| !line.contains("cmd=client"));
        ours.map(|line| line.split(' ').next().unwrap().to_owned())
            .collect()
    };
    let before = connections();
    for again in [&sample, &other, &sample] {
        let put = spot.tier.put(again.put(&spot.memory)).await;
        assert_eq!(put, Ok(Stored::Already));
    }
    assert_eq!(connections(), before);
    spot.check(&sample).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_taken_back_behind_one_is_bound_to_its_head_only() {
    let server = Server::start(&[]);
    let user = [
        "ACL", "SETUSER", "half", "on", ">half", "~kvcp:*", "+@all", "-exists",
    ];
    server.say(&user);
    let proxy = Proxy::start(server.port).await;
    let url = proxy.url().replace("://", "://half:half@");
    let spot = Spot::new(open(&[url]));
    let sample = Sample::new(1, 0, &[5 << 20]);
    let mut held = proxy.hold_before(b"DEL").await;
    let put = spot.tier.put(sample.put(&spot.memory));
    let evict = async {
        held.reached().await;
        let segment = server.say(&["KEYS", "*:1"]);
        assert_eq!(server.say(&["DEL", &segment]), "1");
        held.go_on();
    };
    let (put, ()) = tokio::join!(put, evict);
    assert_eq!(put.unwrap_err().cause, Cause::Denied);
    assert_eq!(keys(&server).0.len(), 0);
}

#[tokio::test]
async fn who_was_refused_one_for_long_is_asked_for_again() {
    let server = Server::start(&["--requirepass", "right"]);
    let say = |words: &[&str]| {
        let mut all = vec!["--no-auth-warning", "-a", "right"];
        all.extend(words);
        assert_eq!(server.say(&all), "OK");
    };
    say(&[
        "ACL", "SETUSER", "blind", "on", ">blind", "~kvcp:*", "+@all", "-watch",
    ]);
    let auth = tempfile::tempdir().unwrap();
    let login = |user: &str, password: &str| {
        std::fs::write(auth.path().join("username"), user).unwrap();
        std::fs::write(auth.path().join("password"), password).unwrap();
    };
    login("blind", "blind");
    let mut with_files = settings(&[server.unix()]);
    with_files.auth = Some(auth.path().into());
    let spot = Spot::new(Redis::open(&with_files).unwrap());
    let sample = Sample::new(1, 0, &[3_000]);
    let put = async || spot.tier.put(sample.put(&spot.memory)).await;
    assert_eq!(put().await.unwrap_err().cause, Cause::Denied);
    login("default", "right");
    assert_eq!(put().await.unwrap_err().cause, Cause::Denied);
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(31)).await;
    tokio::time::resume();
    assert_eq!(put().await.unwrap_err().cause, Cause::Denied);
    assert_eq!(put().await, Ok(Stored::New));
}

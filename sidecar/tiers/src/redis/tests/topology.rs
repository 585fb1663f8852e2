//! Servers that say themselves who has what: a cluster, and a master that sentinels watch.

use super::cluster::{Cluster, begin_move, migrate};
use crate::redis::Redis;
use crate::testing::redis_server::{PATIENCE, Scripted, Server, Spot, cli, open, settings};
use crate::testing::suite::Sample;
use crate::{Cause, Removal, Stored, Tier};
use rustix::process::{Signal, kill_process};
use std::time::{Duration, Instant};

#[tokio::test]
async fn an_object_is_found_where_its_slot_went() {
    let cluster = Cluster::start();
    let spot = Spot::new(open(&[cluster.url()]));
    let sample = Sample::new(1, 0, &[3 << 20]);
    spot.put(&sample).await;
    let key = sample.name().redis();
    let slot = cluster.nodes[0].say(&["CLUSTER", "KEYSLOT", &key]);
    assert_eq!(slot, super::super::cluster::slot(&key).to_string());
    let holds = |node: &&Server| node.say(&["DBSIZE"]) != "0";
    let from = cluster.nodes.iter().find(holds).unwrap();
    let to = cluster
        .nodes
        .iter()
        .find(|node| node.port != from.port)
        .unwrap();
    begin_move(&slot, from, to);
    // What has not moved yet is read where it is, and what is new in the slot is written where it goes.
    spot.check(&sample).await;
    let mut other = sample.clone();
    other.object.layout.0[0] ^= 1;
    spot.put(&other).await;
    let new = other.name().redis();
    assert_eq!(to.say(&["CLUSTER", "COUNTKEYSINSLOT", &slot]), "8");
    spot.check(&other).await;
    let keys = from.say(&["CLUSTER", "GETKEYSINSLOT", &slot, "100"]);
    for key in keys.lines() {
        migrate(from, to, key);
    }
    assert_eq!(spot.tier.lookup(&[sample.name()]).await, Ok(vec![true]));
    spot.check(&sample).await;
    let id = to.say(&["CLUSTER", "MYID"]);
    for node in [to, from] {
        node.say(&["CLUSTER", "SETSLOT", &slot, "NODE", &id]);
    }
    spot.check(&sample).await;
    assert_eq!(to.say(&["TTL", &new]), "-1", "it stays");
    let both = [sample.name(), other.name()];
    assert_eq!(spot.tier.remove(Removal::Named(&both)).await, Ok(2));
    assert_eq!(to.say(&["DBSIZE"]), "0");
}

#[tokio::test]
async fn nodes_that_say_nothing_cost_the_others_neither_the_map_nor_its_time() {
    let cluster = Cluster::start();
    let mut silent = Vec::new();
    for _ in 0..6 {
        silent.push(Scripted::silent().await);
    }
    let seeds: Vec<String> = silent.iter().map(Scripted::url).collect();
    let seeds = seeds.join(",").replace("redis://", "");
    let url = cluster.url().replace("://", &format!("://{seeds},"));
    let began = Instant::now();
    let spot = Spot::new(open(std::slice::from_ref(&url)));
    let samples: Vec<_> = (0..30).map(|n| Sample::new(1, n, &[2_000])).collect();
    let names: Vec<_> = samples.iter().map(Sample::name).collect();
    assert_eq!(spot.tier.lookup(&names).await, Ok(vec![false; 30]));
    assert!(
        began.elapsed() < Duration::from_secs(2),
        "{:?}",
        began.elapsed()
    );
    for sample in &samples {
        spot.put(sample).await;
    }
    // One that has slots and hangs costs its share.
    kill_process(cluster.nodes[0].pid(), Signal::STOP).unwrap();
    let mut quick = settings(&[url]);
    quick.options.answer = Duration::from_millis(300);
    let late = Spot::new(Redis::open(&quick).unwrap());
    let there = late.tier.lookup(&names).await.unwrap();
    let found = there.iter().filter(|there| **there).count();
    assert!((10..30).contains(&found), "{found} of 30");
    kill_process(cluster.nodes[0].pid(), Signal::CONT).unwrap();
}

#[tokio::test]
async fn who_waits_for_the_map_and_gives_up_does_not_end_what_others_wait_for() {
    let scripted = Scripted::silent().await;
    let mut slow = settings(&[scripted.url().replace("redis", "redis-cluster")]);
    slow.options.answer = Duration::from_millis(300);
    let tier = Redis::open(&slow).unwrap();
    let names = [Sample::new(1, 0, &[1]).name()];
    let early = tokio::time::timeout(Duration::from_millis(50), tier.lookup(&names)).await;
    assert!(early.is_err());
    let began = Instant::now();
    let error = tier.lookup(&names).await.unwrap_err();
    assert_eq!(error.cause, Cause::Unreachable, "{error}");
    assert!(
        began.elapsed() < Duration::from_millis(295),
        "it began anew"
    );
}

/// A sentinel that says always this.
async fn says(port: u16) -> Scripted {
    let port = port.to_string();
    Scripted::start(&format!(
        "*2\r\n$9\r\n127.0.0.1\r\n${}\r\n{port}",
        port.len()
    ))
    .await
}

#[tokio::test]
async fn a_sentinel_that_missed_a_failover_wins_neither_against_most_nor_against_the_server() {
    let (old, new) = (Server::start(&[]), Server::start(&[]));
    let port = new.port.to_string();
    let replica = Server::start(&["--replicaof", "127.0.0.1", &port]);
    let stored = |sentinels: Vec<u16>| async {
        let mut list = Vec::new();
        for port in sentinels {
            list.push(says(port).await);
        }
        let urls: Vec<String> = list.iter().map(Scripted::url).collect();
        let hosts = urls.join(",").replace("redis://", "");
        let spot = Spot::new(open(&[format!("redis-sentinel://{hosts}/kv")]));
        spot.tier
            .put(Sample::new(1, 0, &[2_000]).put(&spot.memory))
            .await
    };
    // The old master does not know yet that it is none.
    for sentinels in [
        [old.port, new.port, new.port],
        [new.port, old.port, new.port],
    ] {
        assert_eq!(stored(sentinels.into()).await, Ok(Stored::New));
        assert_eq!(
            (old.say(&["DBSIZE"]), new.say(&["DBSIZE"])),
            ("0".into(), "2".into())
        );
        new.say(&["FLUSHALL"]);
    }
    // Without a majority the servers say themselves who is a master.
    for sentinels in [
        vec![replica.port, new.port],
        vec![1, replica.port, new.port],
    ] {
        assert_eq!(stored(sentinels).await, Ok(Stored::New));
        assert_eq!(new.say(&["DBSIZE"]), "2");
        new.say(&["FLUSHALL"]);
    }
}

#[tokio::test]
async fn the_master_that_a_sentinel_names_is_used_also_when_it_is_another_one() {
    let mut master = Server::start(&[]);
    let port = master.port.to_string();
    let replica = Server::start(&["--replicaof", "127.0.0.1", &port]);
    replica.wait(&["INFO", "replication"], |info| {
        info.contains("master_link_status:up")
    });
    let sentinel = Server::sentinel(&port);
    let url = format!(
        "redis-sentinel://127.0.0.1:1,127.0.0.1:{}/kv",
        sentinel.port
    );
    let spot = Spot::new(open(&[url]));
    let (before, after) = (Sample::new(1, 0, &[9_000]), Sample::new(1, 1, &[9_000]));
    spot.put(&before).await;
    assert_eq!(master.say(&["DBSIZE"]), "2");
    let at = sentinel.port.to_string();
    let replicas = || cli(&["-p", &at], &["SENTINEL", "replicas", "kv"]);
    let began = Instant::now();
    while !replicas().contains("slave-priority") {
        assert!(began.elapsed() < PATIENCE, "the sentinel knows no replica");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    replica.wait(&["DBSIZE"], |keys| keys == "2");
    master.kill();
    cli(&["-p", &at], &["SENTINEL", "failover", "kv"]);
    let began = Instant::now();
    while spot.tier.put(after.put(&spot.memory)).await.is_err() {
        assert!(began.elapsed() < PATIENCE, "no new master");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    spot.check(&before).await;
    assert_eq!(replica.say(&["DBSIZE"]), "4");
    let unknown = open(&[format!("redis-sentinel://127.0.0.1:{at}/other")]);
    let error = unknown.usage().await.unwrap_err();
    assert!(error.detail.contains("unknown master \"other\""), "{error}");
}

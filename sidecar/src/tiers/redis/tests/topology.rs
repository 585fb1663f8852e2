//! Servers that say themselves who has what: a cluster, and a master that sentinels watch.

use super::rig::{PATIENCE, Server, Spot, cli, free_port, open};
use crate::tiers::Tier;
use crate::tiers::suite::{Opening, Sample, Subject, passes_the_suite};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Three masters, each with a third of the slots.
struct Cluster(Vec<Server>);

impl Cluster {
    fn start() -> Self {
        let nodes: Vec<(Server, String)> = (0..3)
            .map(|_| {
                let bus = free_port().to_string();
                let args = ["--cluster-enabled", "yes", "--cluster-port", &bus];
                (Server::start(&args), bus.clone())
            })
            .collect();
        let (first, bus) = &nodes[0];
        let port = first.port.to_string();
        for ((node, _), (from, to)) in
            nodes
                .iter()
                .zip([("0", "5460"), ("5461", "10922"), ("10923", "16383")])
        {
            node.say(&["CLUSTER", "ADDSLOTSRANGE", from, to]);
            node.say(&["CLUSTER", "MEET", "127.0.0.1", &port, bus]);
        }
        for (node, _) in &nodes {
            node.wait(&["CLUSTER", "INFO"], |info| {
                info.contains("cluster_state:ok") && info.contains("cluster_size:3")
            });
        }
        Self(nodes.into_iter().map(|(node, _)| node).collect())
    }

    fn url(&self) -> String {
        format!("redis-cluster://127.0.0.1:{}", self.0[1].port)
    }
}

impl Subject for Cluster {
    fn empty(&self) -> Opening<'_> {
        Box::pin(async { Arc::new(open(&[self.url()])) as Arc<dyn Tier> })
    }

    fn again(&self) -> Option<Opening<'_>> {
        Some(self.empty())
    }

    fn usage_noise(&self) -> u64 {
        512 << 10
    }
}

mod on_a_cluster {
    use super::*;
    passes_the_suite!(Cluster::start());
}

#[tokio::test]
async fn an_object_is_found_where_its_slot_went() {
    let cluster = Cluster::start();
    let spot = Spot::new(open(&[cluster.url()]));
    let sample = Sample::new(1, 0, &[3 << 20]);
    spot.put(&sample).await;
    let key = sample.name().redis();
    let slot = cluster.0[0].say(&["CLUSTER", "KEYSLOT", &key]);
    assert_eq!(slot, super::super::cluster::slot(&key).to_string());
    let holds = |node: &&Server| node.say(&["DBSIZE"]) != "0";
    let from = cluster.0.iter().find(holds).unwrap();
    let to = cluster
        .0
        .iter()
        .find(|node| node.port != from.port)
        .unwrap();
    let id = |node: &Server| node.say(&["CLUSTER", "MYID"]);
    to.say(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &id(from)]);
    from.say(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &id(to)]);
    // What is new in a slot that moves is written where it goes, and found there.
    spot.check(&sample).await;
    let port = to.port.to_string();
    let keys = from.say(&["CLUSTER", "GETKEYSINSLOT", &slot, "100"]);
    for key in keys.lines() {
        from.say(&["MIGRATE", "127.0.0.1", &port, key, "0", "5000"]);
    }
    assert_eq!(spot.tier.lookup(&[sample.name()]).await, Ok(vec![true]));
    spot.check(&sample).await;
    for node in [to, from] {
        node.say(&["CLUSTER", "SETSLOT", &slot, "NODE", &id(to)]);
    }
    spot.check(&sample).await;
    assert_eq!(spot.tier.remove(&[sample.name()]).await, Ok(1));
    assert_eq!(to.say(&["DBSIZE"]), "0");
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
    assert!(
        error.detail.contains("knows no master \"other\""),
        "{error}"
    );
}

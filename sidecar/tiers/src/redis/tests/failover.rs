//! Masters that die or hang while objects are written and read: nothing wrong is served, nothing that a replica has is lost, and what is
//! said of the servers is so.

use super::cluster::Cluster;
use super::traffic::Rig;
use crate::layers::{Side, State};
use crate::testing::redis_server::{Server, cli, until};
use crate::{Cause, Tier};
use rustix::process::{Signal, kill_process};

/// How a master goes.
#[derive(Clone, Copy, PartialEq)]
enum How {
    Dies,
    /// And goes on when it is none any more.
    Hangs,
}

impl How {
    fn begins(self, server: &mut Server) {
        match self {
            Self::Dies => server.kill(),
            Self::Hangs => kill_process(server.pid(), Signal::STOP).unwrap(),
        }
    }

    fn ends(self, server: &mut Server) {
        match self {
            Self::Dies => server.run_again(),
            Self::Hangs => kill_process(server.pid(), Signal::CONT).unwrap(),
        }
    }
}

fn is_master(role: &str) -> bool {
    role.starts_with("master")
}

/// Objects that are there, and those that come.
async fn loaded(url: String) -> Rig {
    Rig::new(url, 0..30).await
}

/// A master, its replica, and three sentinels of which two must agree that the master is dead.
async fn a_sentinels_master_that_goes(how: How) {
    let mut master = Server::start(&[]);
    let port = master.port.to_string();
    let replica = Server::start(&["--replicaof", "127.0.0.1", &port]);
    replica.wait(&["INFO", "replication"], |info| {
        info.contains("master_link_status:up")
    });
    let watched = format!("127.0.0.1 {port} 2");
    let sentinels = [(); 3].map(|()| Server::sentinel_of("redis-server", &watched, &[]));
    let hosts = sentinels
        .each_ref()
        .map(|s| format!("127.0.0.1:{}", s.port));
    let rig = loaded(format!("redis-sentinel://{}/kv", hosts.join(","))).await;
    let keys = master.say(&["DBSIZE"]);
    replica.wait(&["DBSIZE"], |there| there == keys);
    for sentinel in &sentinels {
        let knows = |words: &[&str]| cli(&["-p", &sentinel.port.to_string()], words);
        until("sentinels that know all", async || {
            let replicas = knows(&["SENTINEL", "replicas", "kv"]);
            replicas.contains("slave-priority")
                && knows(&["SENTINEL", "ckquorum", "kv"]).starts_with("OK 3 usable")
        })
        .await;
    }
    let traffic = rig.begin(1_000..);
    traffic.flows().await;
    how.begins(&mut master);
    if how == How::Dies {
        // There is no other server: it is the tier that is away, by its name.
        let away = |side: Side| {
            side.shut()
                .is_some_and(|why| why.cause == Cause::Unreachable)
        };
        until("the breaker", async || {
            let breaker = &rig.layers.guarded.breaker;
            away(breaker.reads()) && away(breaker.writes())
        })
        .await;
    }
    replica.wait(&["ROLE"], is_master);
    traffic.flows().await;
    assert_eq!(rig.states(), [State::Closed; 2]);
    rig.check(&rig.kept).await;
    how.ends(&mut master);
    master.wait(&["ROLE"], |role| !is_master(role));
    traffic.flows().await;
    traffic.end().await;
    rig.check(&rig.kept).await;
    assert_eq!(replica.say(&["ROLE"]).lines().next(), Some("master"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sentinels_master_that_dies_under_load_costs_what_was_not_replicated() {
    a_sentinels_master_that_goes(How::Dies).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sentinels_master_that_hangs_under_load_is_left_and_not_believed_when_it_goes_on() {
    a_sentinels_master_that_goes(How::Hangs).await;
}

/// One of three masters of a cluster, the only one with a replica; the others serve on.
async fn a_clusters_master_that_goes(how: How) {
    let args = ["--cluster-node-timeout", "1000"];
    let others_serve = ["--cluster-require-full-coverage", "no"];
    let mut cluster = Cluster::of("redis-server", "127.0.0.1", &[args, others_serve].concat());
    let replica = cluster.replica();
    let rig = loaded(cluster.url()).await;
    let keys = cluster.nodes[0].say(&["DBSIZE"]);
    assert_ne!(keys, "0");
    cluster.nodes[replica].wait(&["DBSIZE"], |there| there == keys);
    let name = |node: &Server| format!("127.0.0.1:{}", node.port);
    let [old, new] = [0, replica].map(|number| name(&cluster.nodes[number]));
    let up = || {
        let servers = rig.redis.info().servers.now().into_iter();
        let all: Vec<(String, bool)> = servers.map(|s| (s.name, s.up)).collect();
        all
    };
    let is = |wanted: (&str, bool)| up().iter().any(|(name, up)| (&name[..], *up) == wanted);
    let traffic = rig.begin(1_000..);
    traffic.flows().await;
    assert!(is((&old, true)) && !is((&new, true)), "{:?}", up());
    how.begins(&mut cluster.nodes[0]);
    until("the master to be said to be lost", async || {
        is((&old, false))
    })
    .await;
    traffic.flows().await;
    cluster.nodes[replica].wait(&["ROLE"], is_master);
    until("the replica in its place", async || {
        is((&new, true)) && up().len() == 3
    })
    .await;
    traffic.flows().await;
    assert_eq!(up().iter().filter(|(_, up)| *up).count(), 3, "{:?}", up());
    // What one of several does closes the way to none.
    assert_eq!(rig.states(), [State::Closed; 2]);
    rig.check(&rig.kept).await;
    how.ends(&mut cluster.nodes[0]);
    cluster.nodes[0].wait(&["ROLE"], |role| !is_master(role));
    traffic.flows().await;
    traffic.end().await;
    rig.check(&rig.kept).await;
    assert!(is((&new, true)) && up().len() == 3, "{:?}", up());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clusters_master_that_dies_under_load_costs_its_share_until_its_replica_has_its_place() {
    a_clusters_master_that_goes(How::Dies).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clusters_master_that_hangs_under_load_costs_its_share_until_its_replica_has_its_place() {
    a_clusters_master_that_goes(How::Hangs).await;
}

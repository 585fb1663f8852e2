//! Slots of a cluster that move while objects are written and read: nothing that was stored is lost, and nothing lies in the way of what moves.

use super::cluster::{Cluster, begin_move, migrate};
use super::proxy::Proxy;
use super::traffic::Rig;
use super::whole::stays;
use crate::layers::State;
use crate::redis::cluster::slot;
use crate::testing::redis_server::{Server, Spot, open};
use crate::testing::suite::Sample;
use crate::{Cause, Removal, Stored};
use kvcachepool_protocol::object::REDIS_SEGMENT_BYTES;
use std::process::Command;

/// Slots that move; the tool takes the first ones of a node.
const MOVE: u16 = 300;

fn moves(number: &u64) -> bool {
    slot(&Sample::new(1, *number, &[1]).name().redis()) < MOVE
}

/// An object of so many bytes in a slot that moves, and the slot.
fn moving(bytes: u64) -> (Sample, String) {
    let number = (0..).find(moves).unwrap();
    let sample = Sample::new(1, number, &[bytes]);
    let slot = slot(&sample.name().redis()).to_string();
    (sample, slot)
}

/// Moves the first slots of the first node to the second, as who runs a cluster does.
async fn reshard(cluster: &Cluster) {
    let port = cluster.nodes[0].port;
    let (from, to) = (cluster.id(0), cluster.id(1));
    let mut tool = Command::new("redis-cli");
    tool.args(["--cluster", "reshard", &format!("127.0.0.1:{port}")])
        .args(["--cluster-from", &from, "--cluster-to", &to])
        .args(["--cluster-slots", &MOVE.to_string(), "--cluster-yes"]);
    let said = tokio::task::spawn_blocking(move || tool.output().unwrap());
    let said = said.await.unwrap();
    let text = String::from_utf8_lossy(&said.stdout);
    let end: Vec<&str> = text.lines().rev().take(8).collect();
    assert!(said.status.success(), "{end:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_of_slots_that_move_under_load() {
    let cluster = Cluster::start();
    let rig = Rig::new(cluster.url(), (0..).filter(moves).take(20)).await;
    let traffic = rig.begin((10_000..).filter(moves));
    traffic.flows().await;
    reshard(&cluster).await;
    traffic.flows().await;
    let written = traffic.end().await;
    rig.check(&rig.kept).await;
    rig.check(&written).await;
    assert_eq!(rig.states(), [State::Closed; 2]);
    let keys = cluster.nodes[1].say(&["DBSIZE"]).parse::<usize>().unwrap();
    assert!(keys >= 3 * (20 + written.len()), "{keys}: they moved");
}

#[tokio::test]
async fn what_lies_in_a_slot_that_moves_is_listed_once_and_removed() {
    let cluster = Cluster::start();
    let [from, to] = [&cluster.nodes[0], &cluster.nodes[1]];
    let spot = Spot::new(open(&[cluster.url()]));
    let (sample, slot) = moving(14_000);
    spot.put(&sample).await;
    let before = spot.tier.list(None, 100).await.unwrap();
    begin_move(&slot, from, to);
    migrate_all(from, to);
    let page = spot.tier.list(None, 100).await.unwrap();
    assert_eq!((&page.objects, page.foreign), (&before.objects, 0));
    assert_eq!(page.objects.len(), 1);
    assert_eq!(
        spot.tier.remove(Removal::Named(&[sample.name()])).await,
        Ok(1)
    );
    let page = spot.tier.list(None, 100).await.unwrap();
    assert_eq!((page.objects.len(), page.foreign), (0, 0));
}

#[tokio::test]
async fn nodes_that_send_an_object_to_each_other_are_named_until_they_agree() {
    let cluster = Cluster::start();
    let [from, to] = [&cluster.nodes[0], &cluster.nodes[1]];
    let spot = Spot::new(open(&[cluster.url()]));
    let (sample, slot) = moving(14_000);
    // The old owner knows that it has gone, the new one not yet that it came.
    from.say(&["CLUSTER", "SETSLOT", &slot, "NODE", &cluster.id(1)]);
    let put = spot.tier.put(sample.put(&spot.memory)).await.unwrap_err();
    let get = spot.tier.get(sample.get_all(&spot.memory)).await;
    for error in [put, get.unwrap_err()] {
        assert_eq!(error.cause, Cause::Throttled, "{error}");
        assert!(error.detail.contains("to each other"), "{error}");
    }
    to.say(&["CLUSTER", "SETSLOT", &slot, "NODE", &cluster.id(1)]);
    let put = spot.tier.put(sample.put(&spot.memory)).await;
    assert_eq!(put, Ok(Stored::New));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_whose_slot_begins_to_move_leaves_nothing_in_the_way_of_it() {
    for bytes in [14_000, 5 << 20] {
        let cluster = Cluster::start();
        let [from, to] = [&cluster.nodes[0], &cluster.nodes[1]];
        let proxy = Proxy::start(from.port).await;
        let port = proxy.port().to_string();
        from.say(&["CONFIG", "SET", "cluster-announce-port", &port]);
        for node in &cluster.nodes {
            node.wait(&["CLUSTER", "SLOTS"], |slots| slots.contains(&port));
        }
        let spot = Spot::new(open(&[cluster.url()]));
        let (sample, slot) = moving(bytes);
        let mut held = proxy.hold_before(b"EXEC").await;
        let put = spot.tier.put(sample.put(&spot.memory));
        let begin = async {
            held.reached().await;
            // Where all of it is there, one key is the first to go.
            begin_move(&slot, from, to);
            if bytes > REDIS_SEGMENT_BYTES {
                migrate(from, to, &from.say(&["KEYS", "*:0"]));
            }
            held.go_on();
        };
        let (put, ()) = tokio::join!(put, begin);
        assert_eq!(put, Ok(Stored::New));
        migrate_all(from, to);
        for node in [to, from] {
            node.say(&["CLUSTER", "SETSLOT", &slot, "NODE", &cluster.id(1)]);
        }
        spot.check(&sample).await;
        for key in to.say(&["KEYS", "*"]).lines() {
            assert!(stays(to, key), "{key}");
        }
    }
}

/// Moves all that a node has.
fn migrate_all(from: &Server, to: &Server) {
    let keys = from.say(&["KEYS", "*"]);
    for key in keys.lines().filter(|key| !key.is_empty()) {
        migrate(from, to, key);
    }
}

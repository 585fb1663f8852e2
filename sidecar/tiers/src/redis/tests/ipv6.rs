//! Servers that listen at an IPv6 address and nowhere else.

use super::cluster::Cluster;
use super::tls::over_tls;
use crate::redis::cluster::slot;
use crate::testing::redis_server::{Server, Spot, open};
use crate::testing::suite::Sample;
use crate::testing::tls::Certificates;
use crate::{Cause, Tier};

const ONLY: [&str; 2] = ["--bind", "::1"];

/// Objects are written and read.
async fn serves(spot: &Spot) {
    for number in 0..8 {
        let sample = Sample::new(1, number, &[9_000]);
        spot.put(&sample).await;
        spot.check(&sample).await;
    }
}

#[tokio::test]
async fn a_server_is_reached_at_an_ipv6_address() {
    let server = Server::start(&ONLY);
    let tier = open(&[format!("redis://[::1]:{}", server.port)]);
    assert_eq!(tier.place(), format!("[::1]:{}", server.port));
    serves(&Spot::new(tier)).await;
    let elsewhere = open(&[server.tcp()]).usage().await.unwrap_err();
    assert_eq!(elsewhere.cause, Cause::Unreachable, "{elsewhere}");
}

#[tokio::test]
async fn a_certificate_is_of_an_ipv6_address() {
    let files = Certificates::new(&["::1"]);
    let (_server, port) = files.server(&ONLY);
    let url = format!("rediss://[::1]:{port}");
    serves(&Spot::new(over_tls(&url, files.path("ca.crt")))).await;
    let other = Certificates::local();
    let (_server, port) = other.server(&ONLY);
    let named = over_tls(&format!("rediss://[::1]:{port}"), other.path("ca.crt"));
    let error = named.usage().await.unwrap_err();
    assert_eq!(error.cause, Cause::Unauthenticated, "{error}");
    assert!(error.detail.contains("another host"), "{error}");
}

#[tokio::test]
async fn a_master_is_found_at_the_ipv6_address_that_a_sentinel_names() {
    let master = Server::start(&ONLY);
    let watched = format!("::1 {} 1", master.port);
    let sentinel = Server::sentinel_of("redis-server", &watched, &ONLY);
    let url = format!("redis-sentinel://[::1]:{}/kv", sentinel.port);
    serves(&Spot::new(open(&[url]))).await;
}

#[tokio::test]
async fn nodes_of_a_cluster_name_each_other_by_ipv6_addresses() {
    let cluster = Cluster::of("redis-server", "::1", &ONLY);
    let tier = open(&[cluster.url()]);
    serves(&Spot::new(tier.clone())).await;
    let names = cluster.nodes.iter().map(|n| format!("[::1]:{}", n.port));
    let mut names: Vec<String> = names.collect();
    names.sort();
    let mut known: Vec<String> = tier
        .info()
        .servers
        .now()
        .into_iter()
        .map(|s| s.name)
        .collect();
    known.sort();
    assert_eq!(known, names);
    // One that has a slot no more names by its address who has it now.
    let sample = (100..).map(|n| Sample::new(1, n, &[9_000]));
    let mut of_the_first = sample.filter(|s| slot(&s.name().redis()) < 5_461);
    let sample = of_the_first.next().unwrap();
    let slot = slot(&sample.name().redis()).to_string();
    for node in &cluster.nodes {
        node.say(&["CLUSTER", "SETSLOT", &slot, "NODE", &cluster.id(1)]);
    }
    let spot = Spot::new(tier);
    spot.put(&sample).await;
    spot.check(&sample).await;
    let there = cluster.nodes[1].say(&["CLUSTER", "COUNTKEYSINSLOT", &slot]);
    assert_eq!(there, "2");
}

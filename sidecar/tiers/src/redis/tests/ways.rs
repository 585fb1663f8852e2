//! Servers that go, hang and come back; questions that are asked all at once.

use super::tls::over_tls;
use crate::redis::Redis;
use crate::testing::redis_server::{Scripted, Server, Spot, open, settings, until};
use crate::testing::suite::{Sample, untouched};
use crate::testing::tls::Certificates;
use crate::{Cause, Tier};
use rustix::process::{Signal, kill_process};
use std::time::Duration;

#[tokio::test]
async fn a_server_that_was_started_again_is_used_again_without_a_failure() {
    let files = Certificates::local();
    let (mut server, port) = files.server(&["--save", "3600 1"]);
    for url in [server.tcp(), format!("rediss://127.0.0.1:{port}")] {
        let spot = Spot::layered(over_tls(&url, files.path("ca.crt")));
        let samples: Vec<Sample> = (0..8).map(|n| Sample::new(1, n, &[9_000])).collect();
        for sample in &samples {
            spot.put(sample).await;
        }
        server.say(&["SAVE"]);
        server.kill();
        server.run_again();
        for sample in &samples {
            spot.check(sample).await;
        }
    }
}

/// Objects of which every shard has some.
fn samples() -> Vec<Sample> {
    (0..60).map(|n| Sample::new(1, n, &[2_000])).collect()
}

async fn found(spot: &Spot, samples: &[Sample]) -> Vec<bool> {
    let names: Vec<_> = samples.iter().map(Sample::name).collect();
    spot.tier.lookup(&names).await.unwrap()
}

#[tokio::test]
async fn a_shard_that_is_lost_costs_its_share_and_is_used_again_when_it_is_back() {
    let mut servers = [Server::start(&[]), Server::start(&[]), Server::start(&[])];
    let urls: Vec<String> = servers.iter().map(Server::tcp).collect();
    let spot = Spot::layered(open(&urls));
    let samples = samples();
    for sample in &samples {
        spot.put(sample).await;
    }
    let held: u64 = servers[1].say(&["DBSIZE"]).parse().unwrap();
    let share = held as usize / 2;
    assert!((5..40).contains(&share), "{share} of 60");
    servers[1].kill();
    let there = found(&spot, &samples).await;
    assert_eq!(there.iter().filter(|there| **there).count(), 60 - share);
    // The others serve and are written as if nothing were.
    let (mut read, mut refused) = (0, 0);
    for (sample, there) in samples.iter().zip(&there) {
        if *there {
            spot.check(sample).await;
            read += 1;
        } else {
            let put = spot.tier.put(sample.put(&spot.memory)).await.unwrap_err();
            let expected = matches!(put.cause, Cause::Unreachable | Cause::BreakerOpen);
            assert!(expected, "{put}");
            refused += 1;
        }
    }
    assert_eq!((read, refused), (60 - share, share));
    spot.tier.usage().await.unwrap();
    servers[1].run_again();
    until("the shard", async || {
        let mut all = true;
        for (sample, there) in samples.iter().zip(&there) {
            all &= *there || spot.tier.put(sample.put(&spot.memory)).await.is_ok();
        }
        all
    })
    .await;
    assert!(found(&spot, &samples).await.iter().all(|there| *there));
}

#[tokio::test]
async fn a_shard_that_hangs_holds_up_nobody_for_long() {
    let servers = [Server::start(&[]), Server::start(&[]), Server::start(&[])];
    let urls: Vec<String> = servers.iter().map(Server::tcp).collect();
    let mut quick = settings(&urls);
    quick.options.answer = Duration::from_millis(200);
    quick.options.rest = Duration::from_secs(600);
    let spot = Spot::new(Redis::open(&quick).unwrap());
    let samples = samples();
    for sample in &samples {
        spot.put(sample).await;
    }
    kill_process(servers[2].pid(), Signal::STOP).unwrap();
    let there = found(&spot, &samples).await;
    let lost: Vec<_> = samples
        .iter()
        .zip(&there)
        .filter(|(_, there)| !**there)
        .collect();
    assert!(!lost.is_empty() && lost.len() < 60);
    // From then on it is not even asked.
    for (sample, _) in lost {
        let get = spot
            .tier
            .get(sample.get_all(&spot.memory))
            .await
            .unwrap_err();
        assert_eq!(get.cause, Cause::BreakerOpen, "{get}");
    }
    assert_eq!(found(&spot, &samples).await, there);
    kill_process(servers[2].pid(), Signal::CONT).unwrap();
}

#[tokio::test]
async fn more_and_fewer_shards_move_their_own_share_only() {
    let servers: Vec<Server> = (0..3).map(|_| Server::start(&[])).collect();
    let urls: Vec<String> = servers.iter().map(Server::tcp).collect();
    let samples = samples();
    let two = Spot::new(open(&urls[..2]));
    for sample in &samples {
        two.put(sample).await;
    }
    let three = Spot::new(open(&urls));
    let there = found(&three, &samples).await;
    let kept = there.iter().filter(|there| **there).count();
    assert!(
        (25..60).contains(&kept),
        "{kept} of 60 stay where they were"
    );
    for (sample, there) in samples.iter().zip(&there) {
        if !there {
            three.put(sample).await;
        }
    }
    assert!(
        found(&two, &samples).await.iter().all(|there| *there),
        "none of theirs moved"
    );
}

#[tokio::test]
async fn a_lookup_of_512_names_is_one_round_trip() {
    // It says nothing before it has heard everything.
    let scripted = Scripted::patient(512, ":1").await;
    let tier = open(&[scripted.url()]);
    let names: Vec<_> = (0..512).map(|n| Sample::new(1, n, &[1]).name()).collect();
    let there = tier.lookup(&names).await.unwrap();
    assert!(there.iter().all(|there| *there));
}

#[tokio::test]
async fn a_get_that_is_given_up_closes_its_connection() {
    let scripted = Scripted::silent().await;
    let spot = Spot::new(open(&[scripted.url()]));
    let get = spot
        .tier
        .get(Sample::new(1, 0, &[9_000]).get_all(&spot.memory));
    let hung = tokio::time::timeout(Duration::from_millis(50), get).await;
    assert!(hung.is_err());
    until("the connection's end", async || scripted.open() == 0).await;
}

#[tokio::test]
async fn a_foreign_answer_writes_nothing_behind_a_place() {
    let scripted = Scripted::start("$5\r\nhello").await;
    let spot = Spot::new(open(&[scripted.url()]));
    let get = Sample::new(1, 0, &[5_000]).get_all(&spot.memory);
    let span = get.places[0].span.clone();
    assert_eq!(spot.tier.get(get).await.unwrap_err().cause, Cause::Corrupt);
    assert!(untouched(&span));
}

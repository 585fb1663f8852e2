//! What one of several servers does is its own matter: the tier is asked and written to, and the others serve.

use crate::layers::{Layered, Options, State, layered};
use crate::redis::Redis;
use crate::redis::node::Node;
use crate::redis::pool::Lane;
use crate::testing::redis_server::{PATIENCE, Scripted, Server, open, settings};
use crate::testing::suite::{Memory, Sample};
use crate::{Cause, Tier, TierError};
use rustix::process::{Signal, kill_process};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

struct Rig {
    redis: Redis,
    layers: Layered,
    memory: Memory,
    samples: Vec<Sample>,
}

impl Rig {
    fn new(tier: Redis) -> Self {
        Self {
            layers: layered(Arc::new(tier.clone()), &Options::default()),
            redis: tier,
            memory: Memory::new(1 << 30),
            samples: (0..40).map(|n| Sample::new(1, n, &[20_000])).collect(),
        }
    }

    /// Of servers that may take long beside other tests.
    fn patient(urls: &[String]) -> Self {
        let mut patient = settings(urls);
        patient.options.answer = Duration::from_secs(20);
        patient.options.connect = Duration::from_secs(20);
        Self::new(Redis::open(&patient).unwrap())
    }

    /// Puts all objects at once; how that went.
    async fn put_all(&self) -> Vec<Result<(), TierError>> {
        let mut puts = JoinSet::new();
        for sample in &self.samples {
            let (tier, put) = (self.layers.tier.clone(), sample.put(&self.memory));
            puts.spawn(async move { tier.put(put).await.map(drop) });
        }
        puts.join_all().await
    }

    async fn get_all(&self) -> Vec<Result<(), TierError>> {
        let mut gets = JoinSet::new();
        for sample in &self.samples {
            let (tier, get) = (self.layers.tier.clone(), sample.get_all(&self.memory));
            gets.spawn(async move { tier.get(get).await.map(drop) });
        }
        gets.join_all().await
    }

    fn states(&self) -> [State; 2] {
        let breaker = &self.layers.guarded.breaker;
        [breaker.reads().state, breaker.writes().state]
    }
}

fn failures(ended: &[Result<(), TierError>]) -> Vec<Cause> {
    ended
        .iter()
        .filter_map(|e| Some(e.as_ref().err()?.cause))
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shard_that_is_gone_full_or_read_only_closes_the_way_to_no_other() {
    let mut servers = [Server::start(&[]), Server::start(&[])];
    let urls: Vec<String> = servers.iter().map(Server::tcp).collect();
    let rig = Rig::patient(&urls);
    assert_eq!(failures(&rig.put_all().await), []);
    let share: usize = servers[1].say(&["DBSIZE"]).parse::<usize>().unwrap() / 2;
    assert!((8..32).contains(&share), "{share} of 40");

    // Read only: its writes fail, all at once, and nothing else.
    for server in &servers {
        server.say(&["FLUSHALL"]);
    }
    servers[1].say(&["CONFIG", "SET", "min-replicas-to-write", "1"]);
    let refused = failures(&rig.put_all().await);
    assert_eq!(refused, vec![Cause::ReadOnly; share]);
    let known = rig.redis.info().servers.now();
    assert!(known.iter().all(|server| server.up), "{known:?}");
    let troubles: Vec<bool> = known.iter().map(|s| s.trouble.is_some()).collect();
    assert_eq!(troubles, [false, true], "{known:?}");
    servers[1].say(&["CONFIG", "SET", "min-replicas-to-write", "0"]);
    assert_eq!(failures(&rig.put_all().await), []);

    servers[1].kill();
    for _ in 0..3 {
        let lost = failures(&rig.get_all().await);
        assert_eq!(lost.len(), share);
        let causes = [Cause::Unreachable, Cause::BreakerOpen];
        assert!(lost.iter().all(|cause| causes.contains(cause)), "{lost:?}");
    }
    assert_eq!(rig.states(), [State::Closed; 2]);

    // When none is left it is the tier that is lost.
    servers[0].kill();
    let began = Instant::now();
    while rig.states() != [State::Open; 2] {
        assert!(began.elapsed() < PATIENCE, "{:?}", rig.states());
        rig.get_all().await;
        rig.put_all().await;
    }
    for server in &mut servers {
        server.run_again();
    }
    while !failures(&rig.put_all().await).is_empty() {
        assert!(began.elapsed() < PATIENCE, "it does not come back");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shard_that_hangs_in_the_middle_of_transfers_is_lost_long_before_their_deadline() {
    let servers = [Server::start(&[]), Server::start(&[])];
    let urls: Vec<String> = servers.iter().map(Server::tcp).collect();
    assert_eq!(failures(&Rig::patient(&urls).put_all().await), []);
    let rig = Rig::new(open(&urls));
    kill_process(servers[1].pid(), Signal::STOP).unwrap();
    let began = Instant::now();
    let lost = failures(&rig.get_all().await);
    assert!(!lost.is_empty() && lost.len() < 40);
    assert!(!lost.contains(&Cause::Timeout), "{lost:?}");
    assert!(
        began.elapsed() < Duration::from_secs(5),
        "{:?}",
        began.elapsed()
    );
    assert_eq!(rig.states(), [State::Closed; 2]);
    kill_process(servers[1].pid(), Signal::CONT).unwrap();
}

#[tokio::test]
async fn a_shard_that_loads_its_data_is_left_alone_for_a_while() {
    for line in [
        "-LOADING Redis is loading the dataset in memory",
        "-MASTERDOWN Link with MASTER is down",
        "-CLUSTERDOWN Hash slot not served",
    ] {
        let (server, loading) = (Server::start(&[]), Scripted::start(line).await);
        let tier = open(&[server.tcp(), loading.url()]);
        let names: Vec<_> = (0..40).map(|n| Sample::new(1, n, &[1]).name()).collect();
        assert_eq!(tier.lookup(&names).await, Ok(vec![false; 40]), "{line}");
        let mut rests = 0;
        for name in &names {
            let error = tier.head(name).await.unwrap_err();
            rests += usize::from(error.cause == Cause::BreakerOpen);
            let expected = [Cause::Missing, Cause::BreakerOpen];
            assert!(expected.contains(&error.cause), "{error}");
        }
        assert!((8..32).contains(&rests), "{line}: {rests}");
    }
}

#[tokio::test]
async fn a_question_that_waits_for_its_turn_says_nothing_about_the_server() {
    let servers = [Server::start(&[]), Server::start(&[])];
    let urls: Vec<String> = servers.iter().map(Server::tcp).collect();
    let mut few = settings(&urls);
    few.options.question_connections = 1;
    few.options.answer = Duration::from_millis(200);
    few.options.rest = Duration::from_secs(600);
    let tier = Redis::open(&few).unwrap();
    let samples: Vec<_> = (0..40).map(|n| Sample::new(1, n, &[1_000])).collect();
    let memory = Memory::new(1 << 20);
    for sample in &samples {
        tier.put(sample.put(&memory)).await.unwrap();
    }
    let names: Vec<_> = samples.iter().map(Sample::name).collect();
    let busy = tier.now().unwrap().servers.known().remove(0);
    let lent = busy.take(Lane::Questions).await.unwrap();
    let there = tier.lookup(&names).await.unwrap();
    let found = there.iter().filter(|there| **there).count();
    assert!((8..32).contains(&found), "{found}");
    drop(lent);
    assert_eq!(busy.trouble(false), None);
    assert_eq!(tier.lookup(&names).await, Ok(vec![true; 40]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_servers_are_used_from_now_on_and_nothing_is_missed_but_what_moved() {
    let servers = [Server::start(&[]), Server::start(&[]), Server::start(&[])];
    let urls: Vec<String> = servers.iter().map(Server::tcp).collect();
    let of = |count: usize| {
        let mut patient = settings(&urls[..count]);
        patient.options.answer = Duration::from_secs(20);
        patient.options.connect = Duration::from_secs(20);
        patient
    };
    let rig = Rig::patient(&urls[..1]);
    let held = || {
        let keys = |server: &Server| server.say(&["DBSIZE"]).parse::<usize>().unwrap() / 2;
        servers.each_ref().map(keys)
    };
    let found = async || rig.get_all().await.iter().filter(|got| got.is_ok()).count();
    assert_eq!(failures(&rig.put_all().await), []);
    // Somebody reads all the time: what moved is missed, and nothing else goes wrong.
    let (tier, samples) = (rig.layers.tier.clone(), rig.samples.clone());
    let reader = tokio::spawn(async move {
        for sample in samples.iter().cycle() {
            let memory = Memory::new(1 << 20);
            let get = sample.get_all(&memory);
            match tier.get(get.clone()).await {
                Ok(_) => assert!(sample.lies_in(&get.places)),
                Err(e) => assert_eq!(e.cause, Cause::Missing, "{e}"),
            }
        }
    });

    rig.redis.change(&of(3)).unwrap();
    let stayed = found().await;
    assert!((5..27).contains(&stayed), "{stayed} of 40");
    assert_eq!(failures(&rig.put_all().await), []);
    assert_eq!(found().await, 40);
    let [first, second, third] = held();
    assert_eq!((first, second + third), (40, 40 - stayed));

    let places = || -> Vec<Arc<Node>> {
        let servers = rig.redis.now().unwrap().servers;
        let way = |sample: &Sample| servers.way(&sample.name()).unwrap().node;
        rig.samples.iter().map(way).collect()
    };
    let (before, one) = (places(), rig.redis.now().unwrap().servers.known().remove(0));
    rig.redis.change(&of(2)).unwrap();
    let after = places();
    let moved = before
        .iter()
        .zip(&after)
        .filter(|(a, b)| !Arc::ptr_eq(a, b));
    // The first server still has what it had when it was alone.
    let missed = moved.filter(|(_, now)| !Arc::ptr_eq(now, &one)).count();
    assert_eq!(found().await, 40 - missed);
    assert_eq!(failures(&rig.put_all().await), []);
    assert_eq!(found().await, 40);
    rig.redis.change(&of(3)).unwrap();
    reader.abort();
    assert!(reader.await.is_err_and(|e| e.is_cancelled()));
}

//! The commands over real Redis servers.

use super::{documents, printed};
use crate::testing::redis_server::{Scripted, Server, open};
use crate::testing::suite::{Memory, Sample};
use kvcachepool_tiers::Tier;
use std::time::{Duration, Instant};

/// A server with objects of two domains: seeds 1 (three of them) and 2 (two).
struct Rig {
    server: Server,
    samples: Vec<Sample>,
}

impl Rig {
    fn new(args: &[&str]) -> Self {
        let samples = [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)];
        let sample = |(seed, n): (u64, u64)| Sample::new(seed, n, &[5_000 + n, 1_200_000]);
        let rig = Self {
            server: Server::start(args),
            samples: samples.into_iter().map(sample).collect(),
        };
        let (tier, memory) = (open(&[rig.server.unix()]), Memory::new(16 << 20));
        run(async {
            for sample in &rig.samples {
                tier.put(sample.put(&memory)).await.unwrap();
            }
        });
        rig
    }

    fn there(&self) -> Vec<bool> {
        let names: Vec<_> = self.samples.iter().map(Sample::name).collect();
        let tier = open(&[self.server.unix()]);
        run(tier.lookup(&names)).unwrap()
    }
}

fn run<T>(work: impl Future<Output = T>) -> T {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    runtime.enable_all().build().unwrap().block_on(work)
}

#[test]
fn a_server_is_looked_into_beside_whoever_uses_it() {
    let rig = Rig::new(&[]);
    for url in [rig.server.tcp(), rig.server.unix()] {
        let text = printed(&["inspect", &url, "--objects"]).unwrap();
        assert!(text.contains("redis: 5 objects, "), "{text}");
        for sample in &rig.samples {
            assert!(text.contains(&sample.name().s3("")), "{text}");
        }
        let json = printed(&["inspect", &url, "--output", "json"]).unwrap();
        assert_eq!(documents(&json)[0]["objects"], 5);
        let text = printed(&["verify", &url, "--memory", "2Mi"]).unwrap();
        assert!(text.starts_with("5 objects: 5 ok"), "{text}");
    }
}

#[test]
fn what_is_corrupt_is_named_and_removed_only_when_told() {
    let rig = Rig::new(&[]);
    let (url, name) = (rig.server.unix(), rig.samples[1].name());
    let segment = rig
        .server
        .say(&["KEYS", &format!("{}:*:2", name.redis().replace('{', "[{]"))]);
    rig.server.say(&["SETRANGE", &segment, "9", "xx"]);
    let text = printed(&["verify", &url]).unwrap();
    assert!(
        text.contains("4 ok") && text.contains("1 corrupt"),
        "{text}"
    );
    assert!(text.contains(&name.s3("")), "{text}");
    assert_eq!(rig.there(), [true; 5]);
    let text = printed(&["verify", &url, "--remove-corrupt"]).unwrap();
    assert!(text.contains("(removed)"), "{text}");
    assert_eq!(rig.there(), [true, false, true, true, true]);
    // With all of its segments.
    assert_eq!(rig.server.say(&["DBSIZE"]), "20");
}

#[test]
fn gc_removes_a_domain_with_all_its_segments() {
    let rig = Rig::new(&[]);
    let name = rig.samples[3].name();
    let domain = format!("{}/{}", name.model, name.layout);
    let url = rig.server.tcp();
    let text = printed(&["gc", &url, "--domain", &domain, "--dry-run"]).unwrap();
    assert!(text.starts_with("2 objects would be removed"), "{text}");
    let text = printed(&["gc", &url, "--domain", &domain]).unwrap();
    assert!(text.starts_with("2 objects removed"), "{text}");
    assert_eq!(rig.there(), [true, true, true, false, false]);
    assert_eq!(rig.server.say(&["DBSIZE"]), "15");
}

#[test]
fn gc_removes_what_is_older_and_of_the_domain_with_all_its_segments() {
    let rig = Rig::new(&[]);
    let url = rig.server.unix();
    let gc = |more: &[&str]| {
        let json = printed(&[&["gc", &url, "--output", "json"], more].concat()).unwrap();
        documents(&json).remove(0)
    };
    let report = gc(&["--older-than", "30d"]);
    assert_eq!(
        (&report["removed"], &report["kept"]),
        (&0.into(), &5.into())
    );
    let began = Instant::now();
    // Objects are as old as whole seconds say.
    while gc(&["--older-than", "1s", "--dry-run"])["objects"] != 5 {
        assert!(began.elapsed() < Duration::from_secs(30));
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(rig.there(), [true; 5]);
    let name = rig.samples[3].name();
    let domain = format!("{}/{}", name.model, name.layout);
    let report = gc(&["--older-than", "1s", "--domain", &domain]);
    assert_eq!(
        (&report["removed"], &report["kept"]),
        (&2.into(), &3.into())
    );
    assert_eq!(rig.there(), [true, true, true, false, false]);
    assert_eq!(rig.server.say(&["DBSIZE"]), "15");
}

#[test]
fn passwords_come_from_the_url_or_a_folder_and_are_never_printed() {
    let server = Server::start(&["--requirepass", "right"]);
    let host = format!("127.0.0.1:{}", server.port);
    let auth = tempfile::tempdir().unwrap();
    std::fs::write(auth.path().join("password"), "right\n").unwrap();
    let folder = auth.path().display().to_string();
    let with = |login: &str| format!("redis://{login}{host}");
    for line in [
        vec!["inspect", &with(":right@")],
        vec!["inspect", &with(""), "--auth", &folder],
    ] {
        let text = printed(&line).unwrap();
        assert!(text.starts_with("redis: 0 objects"), "{text}");
    }
    for login in ["", ":secret@", "secret:secret@"] {
        let error = printed(&["inspect", &with(login)]).unwrap_err();
        assert!(error.contains("Unauthenticated"), "{error}");
        assert!(!error.contains("secret"), "{error}");
    }
}

#[test]
fn a_cluster_and_a_master_of_sentinels_are_looked_into_and_who_is_none_is_named() {
    let node = Server::start(&["--cluster-enabled", "yes"]);
    node.say(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    node.wait(&["CLUSTER", "INFO"], |info| {
        info.contains("cluster_state:ok")
    });
    let cluster = node.tcp().replace("redis", "redis-cluster");
    let text = printed(&["inspect", &cluster]).unwrap();
    assert!(text.starts_with("redis: 0 objects"), "{text}");
    let rig = Rig::new(&[]);
    let error = printed(&[
        "inspect",
        &rig.server.tcp().replace("redis", "redis-cluster"),
    ]);
    assert!(error.unwrap_err().contains("redis: Config"));
    let port = rig.server.port.to_string();
    let at = format!("*2\r\n$9\r\n127.0.0.1\r\n${}\r\n{port}", port.len());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let sentinel = runtime.block_on(Scripted::start(&at)).url();
    let sentinel = format!("{}/kv", sentinel.replace("redis", "redis-sentinel"));
    let text = printed(&["inspect", &sentinel]).unwrap();
    assert!(text.starts_with("redis: 5 objects"), "{text}");
    let error = printed(&["inspect", "redis://127.0.0.1:1"]).unwrap_err();
    assert!(error.contains("Unreachable"), "{error}");
}

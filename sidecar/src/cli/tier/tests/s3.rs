//! The commands over a bucket whose server stands in options.

use super::{documents, printed};
use crate::testing::faulty::{Faulty, Reply};
use crate::testing::store::Store;
use crate::testing::suite::{Memory, Sample};
use kvcachepool_tiers::s3::S3;
use kvcachepool_tiers::{PAGE, Tier};
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use tokio::sync::Barrier;

/// More than are read at once.
const OBJECTS: u64 = 100;
/// Heads that are read at once, at least.
const HEADS_AT_ONCE: usize = 20;

/// The hour of its server: ten minutes after all of its objects were written.
const NOW: &str = "Thu, 01 Jan 2026 00:10:00 GMT";

/// How a server of a bucket behaves.
#[derive(Debug, Default)]
struct Behaviour {
    /// It lists what others removed.
    gone: AtomicBool,
    /// It answers this many reads of objects together, and later ones at once.
    together: AtomicUsize,
}

/// A server of a bucket with objects.
async fn bucket(behaviour: Arc<Behaviour>) -> Faulty {
    let (store, barrier) = (Store::default(), Arc::new(Barrier::new(HEADS_AT_ONCE)));
    let server = Faulty::start(move |asked| {
        let reads = asked.method == "GET" && !asked.target.contains("list-type=2");
        let mut reply = match reads && behaviour.gone.load(Ordering::Relaxed) {
            true => Reply::error(404, "NoSuchKey"),
            false => store.answer(asked),
        };
        if let Reply::Full(_, headers, _) = &mut reply {
            headers.push(("date", NOW.into()));
        }
        let waits = |left: usize| left.checked_sub(1);
        let relaxed = Ordering::Relaxed;
        match reads
            && behaviour
                .together
                .fetch_update(relaxed, relaxed, waits)
                .is_ok()
        {
            true => Reply::Together(barrier.clone(), Box::new(reply)),
            false => reply,
        }
    })
    .await;
    let (tier, memory) = (
        S3::open_counted(&server.config()).await.unwrap(),
        Memory::new(16 << 20),
    );
    for number in 0..OBJECTS {
        let sample = Sample::new(number % 2, number, &[5_000]);
        tier.put(sample.put(&memory)).await.unwrap();
    }
    server
}

/// What a command prints of the server's bucket, which only options say.
fn asked_of(server: &Faulty, command: &str, more: &[&str]) -> Vec<Value> {
    let config = server.config();
    let (endpoint, auth) = (config.endpoint, config.auth.unwrap().display().to_string());
    let at = ["--endpoint", &endpoint, "--auth", &auth];
    let as_json = ["--addressing-style", "Path", "--output", "json"];
    let line = [&[command, "s3://kv-bucket"], &at[..], &as_json, more].concat();
    documents(&printed(&line).unwrap())
}

#[test]
fn a_bucket_is_looked_into_verified_and_emptied_by_options_alone() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let behaviour = Arc::new(Behaviour::default());
    let server = runtime.block_on(bucket(behaviour.clone()));
    let ask = |command: &str, more: &[&str]| asked_of(&server, command, more);
    behaviour.together.store(HEADS_AT_ONCE, Ordering::Relaxed);
    let rows = ask("inspect", &["--objects"]);
    let objects: Vec<_> = rows
        .iter()
        .filter(|row| row["object"].is_string())
        .collect();
    assert_eq!(objects.len() as u64, OBJECTS);
    let names: Vec<_> = objects.iter().map(|row| row["object"].as_str()).collect();
    assert!(names.is_sorted(), "in the order of the listing: {names:?}");
    assert!(objects.iter().all(|row| row["head"]["engine"] == "vllm"));
    assert_eq!(ask("verify", &[])[0]["ok"], OBJECTS);
    behaviour.gone.store(true, Ordering::Relaxed);
    let found = &ask("verify", &[])[0];
    assert_eq!(found["gone"], OBJECTS, "others use it, too: {found}");
    assert_eq!(found["problems"], serde_json::json!([]));
    behaviour.gone.store(false, Ordering::Relaxed);
    let other = "0123456789abcdef/fedcba9876543210";
    assert_eq!(
        ask("gc", &["--all-but-domain", other])[0]["removed"],
        OBJECTS
    );
    assert_eq!(ask("inspect", &[])[0]["objects"], 0);
}

#[test]
fn gc_goes_by_the_servers_clock_and_dry_runs_remove_nothing() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let server = runtime.block_on(bucket(Arc::default()));
    let gc = |more: &[&str]| {
        let report = &asked_of(&server, "gc", more)[0];
        ["objects", "removed", "kept"].map(|key| report[key].as_u64().unwrap())
    };
    // By our clock they are older than that.
    assert_eq!(gc(&["--older-than", "11m"]), [0, 0, OBJECTS]);
    let dry = gc(&["--older-than", "9m", "--dry-run"]);
    assert_eq!(dry, [OBJECTS, 0, 0]);
    let removals = server.count("POST") + server.count("DELETE");
    assert_eq!(removals, 0, "{:?}", server.asked());
    let name = Sample::new(1, 1, &[5_000]).name();
    let domain = format!("{}/{}", name.model, name.layout);
    let of_one = gc(&["--older-than", "9m", "--domain", &domain]);
    assert_eq!(of_one, [OBJECTS / 2, OBJECTS / 2, OBJECTS / 2]);
    assert_eq!(asked_of(&server, "inspect", &[])[0]["objects"], OBJECTS / 2);
}

#[test]
fn gc_removes_each_page_before_it_lists_the_next_one_until_nothing_is_left() {
    const MANY: u64 = PAGE as u64 + 7;
    let runtime = tokio::runtime::Runtime::new().unwrap();
    // Its pages end where an object was removed.
    let store = Store::default();
    let server = runtime.block_on(async {
        let server = Faulty::start(move |asked| store.answer(asked)).await;
        let tier = S3::open_uncounted(&server.config()).await.unwrap();
        let memory = Memory::new(16 << 20);
        let samples: Vec<_> = (0..MANY).map(|n| Sample::new(1, n, &[64])).collect();
        let puts = samples.iter().map(|sample| tier.put(sample.put(&memory)));
        futures::future::try_join_all(puts).await.unwrap();
        server
    });
    let before = server.asked().len();
    let other = "0123456789abcdef/fedcba9876543210";
    let report = &asked_of(&server, "gc", &["--all-but-domain", other])[0];
    let counts = ["objects", "removed", "kept"].map(|key| report[key].as_u64().unwrap());
    assert_eq!(counts, [MANY, MANY, 0]);
    let asked = &server.asked()[before..];
    let lists = |at: usize| asked[at].target.contains("list-type=2");
    assert!(lists(0) && !lists(1), "{:?}", &asked[..2]);
    let listed = asked.iter().filter(|a| a.target.contains("list-type=2"));
    assert_eq!(
        listed.count(),
        4,
        "two of the first pass, one each of two more"
    );
}

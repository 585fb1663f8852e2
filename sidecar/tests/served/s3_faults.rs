//! A bucket that goes wrong, as a vLLM sees it: a miss by name in status, metrics and log, while the other tiers serve on, and never
//! bytes that are not those that were stored.

use crate::harness::{Sidecar, wait_for};
use crate::s3::S3;
use crate::testing::faulty::{Asked, Faulty, Reply};
use crate::testing::s3_server::Server;
use crate::testing::store::Store;
use crate::testing::tls::Certificates;
use crate::tiers::{
    FAR, ON_DISK, clear, disk_and_memory_serve, disk_at, disk_serves_beside_misses, filled,
    wait_far,
};
use crate::vllm::{Vllm, hashes};
use kvcachepool_metrics::snake_case;
use kvcachepool_protocol::config;
use kvcachepool_protocol::message::CHUNK_READY;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;
use tokio::runtime::Runtime;

/// What is answered instead of what the bucket would.
type Wrong = fn(&Asked, &Store) -> Reply;

struct Bucket {
    store: Arc<Store>,
    wrong: Arc<Mutex<Wrong>>,
    server: Faulty,
    _runtime: Runtime,
}

impl Bucket {
    /// Nothing goes wrong yet.
    fn start() -> Self {
        let runtime = Runtime::new().unwrap();
        let (store, wrong) = (
            Arc::<Store>::default(),
            Arc::new(Mutex::new(right as Wrong)),
        );
        let (holds, goes) = (store.clone(), wrong.clone());
        let server = Faulty::start(move |asked| {
            let wrong = *goes.lock();
            wrong(asked, &holds)
        });
        let server = runtime.block_on(server);
        Self {
            store,
            wrong,
            server,
            _runtime: runtime,
        }
    }

    fn goes(&self, wrong: Wrong) {
        *self.wrong.lock() = wrong;
    }

    fn config(&self) -> String {
        let config = self.server.config();
        format!(
            "memory: {{size: 64Mi}}\ncache: {{minLoadTokens: 0}}\ns3: {{bucket: {}, endpoint: \"{}\", auth: {}}}\n",
            config.bucket,
            config.endpoint,
            config.auth.unwrap().display()
        )
    }

    fn sidecar(&self, more: &str) -> Sidecar {
        let sidecar = Sidecar::start(&(self.config() + more));
        sidecar.wait_populated();
        sidecar.wait_tier("s3", "ready");
        sidecar
    }

    /// Stores chunks of prompts and waits until the bucket has them.
    fn stored(&self, more: &str, prompts: impl IntoIterator<Item = u64>, count: u32) {
        let sidecar = self.sidecar(more);
        let used = ["s3", "disk"].into_iter();
        let tiers: Vec<_> = used
            .filter(|tier| *tier == "s3" || more.contains(tier))
            .collect();
        // What is stored before a tier is open is never written there.
        for tier in &tiers {
            sidecar.wait_tier(tier, "ready");
        }
        let mut vllm = Vllm::attach(&sidecar.socket());
        let mut chunks = 0.0;
        for prompt in prompts {
            vllm.store("r", &hashes(prompt, count));
            chunks += f64::from(count);
        }
        for tier in tiers {
            let stored = format!("tier_write_chunks_total{{result=\"stored\",tier=\"{tier}\"}}");
            sidecar.wait_metric(&stored, chunks);
        }
    }
}

fn right(asked: &Asked, store: &Store) -> Reply {
    store.answer(asked)
}

/// While somebody asks for what the bucket alone has, and is told of misses, another one loads prompt after prompt from the disk; then
/// `named` says whether the bucket's failure has its name. Afterwards the bucket is right again, and is used.
fn disk_serves_on(wrong: Wrong, named: impl Fn(&Sidecar) -> bool) {
    let (bucket, disk) = (Bucket::start(), TempDir::new().unwrap());
    bucket.stored("", [FAR], 4);
    bucket.stored(&disk_at(disk.path()), ON_DISK, 2);
    let sidecar = bucket.sidecar(&disk_at(disk.path()));
    sidecar.wait_tier("disk", "ready");
    bucket.goes(wrong);
    disk_serves_beside_misses(&sidecar, |_| {
        wait_for("the name of the failure", || named(&sidecar).then_some(()));
    });
    bucket.goes(right);
    wait_far(&sidecar, "s3");
}

/// Is the tier off by this reason, in status, metrics and log?
fn is_off(sidecar: &Sidecar, reason: &str, message: &str) -> bool {
    let tier = sidecar.tier("s3");
    let down = format!("tier_down{{reason=\"{}\",tier=\"s3\"}}", snake_case(reason));
    tier["state"] == "off"
        && tier["reason"] == reason
        && tier["message"].as_str().unwrap().contains(message)
        && sidecar.metric(&down) == 1.0
        && sidecar.warned("s3", reason)
}

/// A sidecar with a filled folder, and a bucket that cannot be opened for this reason, serves from the folder and from memory.
fn is_named_while_the_others_serve(config: &str, disk: &TempDir, reason: &str, message: &str) {
    let sidecar = Sidecar::start(&(config.to_owned() + &disk_at(disk.path())));
    sidecar.wait_populated();
    wait_for(message, || is_off(&sidecar, reason, message).then_some(()));
    disk_and_memory_serve(&sidecar);
    assert!(is_off(&sidecar, reason, message), "{}", sidecar.tier("s3"));
}

#[test]
fn a_storm_of_slow_down_is_named_while_the_disk_serves_on() {
    disk_serves_on(
        |_, _| Reply::error(503, "SlowDown"),
        |sidecar| is_off(sidecar, "Throttled", "SlowDown"),
    );
}

#[test]
fn bodies_that_drip_are_named_while_the_disk_serves_on() {
    let drips = |asked: &Asked, store: &Store| match store.answer(asked) {
        Reply::Full(206, headers, body) => Reply::Drip(headers, body, Duration::from_millis(20)),
        other => other,
    };
    disk_serves_on(drips, |sidecar| {
        let tier = sidecar.tier("s3");
        let message = tier["message"].as_str().unwrap();
        tier["state"] == "degraded"
            && tier["reason"] == "Timeout"
            && message.contains("did not end while a request waited")
            && sidecar.metric("tier_fetch_chunks_total{result=\"cancelled\",tier=\"s3\"}") >= 3.0
            && sidecar.metric("tier_degraded{reason=\"timeout\",tier=\"s3\"}") == 1.0
            && sidecar.warned("s3", "Timeout")
    });
}

#[test]
fn bodies_that_break_off_are_named_while_the_disk_serves_on() {
    let cuts = |asked: &Asked, store: &Store| match store.answer(asked) {
        Reply::Full(206, headers, body) => Reply::Cut(headers, body, 6_000),
        other => other,
    };
    disk_serves_on(cuts, |sidecar| {
        is_off(sidecar, "Unreachable", "ended at byte")
    });
}

#[test]
fn bodies_of_another_length_than_was_asked_for_are_named_while_the_disk_serves_on() {
    let lies = |asked: &Asked, store: &Store| match store.answer(asked) {
        Reply::Full(206, mut headers, body) => {
            headers.push(("content-length", (body.len() - 7).to_string()));
            Reply::Full(206, headers, body)
        }
        other => other,
    };
    disk_serves_on(lies, |sidecar| is_off(sidecar, "Protocol", "bytes, "));
}

#[test]
fn a_bucket_that_lets_nobody_read_any_more_is_named_while_the_disk_serves_on() {
    let denies = |asked: &Asked, store: &Store| match asked.method.as_str() {
        "GET" | "HEAD" => Reply::error(403, "AccessDenied"),
        _ => store.answer(asked),
    };
    disk_serves_on(denies, |sidecar| is_off(sidecar, "Denied", "s3:"));
}

#[test]
fn a_directory_that_is_not_there_or_cannot_be_is_named_while_the_bucket_serves() {
    let bucket = Bucket::start();
    bucket.stored("", [1], 2);
    for (url, reason) in [
        ("redis://127.0.0.1:1", "Unreachable"),
        ("http://127.0.0.1:1", "Config"),
    ] {
        let sidecar = bucket.sidecar(&format!("redis: {{urls: [\"{url}\"]}}\n"));
        sidecar.wait_off("redis", reason);
        let mut vllm = Vllm::attach(&sidecar.socket());
        vllm.finds_below(&hashes(1, 2), 2, S3);
        let unanswered = "tier_events_total{event=\"directory_silent\",tier=\"s3\"}";
        sidecar.wait_metric(unanswered, 1.0);
    }
}

#[test]
fn another_pools_object_under_our_name_is_a_miss_by_name() {
    let bucket = Bucket::start();
    bucket.stored("", [1, 2], 1);
    let names = bucket.store.objects();
    let mut other = Vec::new();
    bucket
        .store
        .change(&names[1], |bytes| other = bytes.clone());
    bucket.store.change(&names[0], |bytes| *bytes = other);
    let sidecar = bucket.sidecar("write: {policy: None}\n");
    let mut vllm = Vllm::attach(&sidecar.socket());
    let mut ready = 0;
    for prompt in [1, 2] {
        let (_, reply) = vllm.probe_below("ask", &hashes(prompt, 1));
        ready += reply.states.iter().filter(|s| **s == CHUNK_READY).count();
        vllm.release("ask");
    }
    assert_eq!(ready, 1);
    for prompt in [1, 2] {
        if vllm.ready("memory", &hashes(prompt, 1)) == 1 {
            vllm.check("memory", &hashes(prompt, 1));
        }
    }
    sidecar.wait_metric(
        "tier_fetch_chunks_total{result=\"foreign\",tier=\"s3\"}",
        1.0,
    );
    assert!(sidecar.warned("s3", "Foreign"));
    let tier = sidecar.tier("s3");
    let message = tier["message"].as_str().unwrap();
    assert!(message.starts_with("Foreign: "), "{message}");
    assert_eq!(tier["state"], "ready");
    assert_eq!(bucket.store.objects(), names, "it is somebody else's");
}

#[test]
fn a_bucket_that_cannot_be_opened_is_named_and_disk_and_memory_serve_on() {
    const REFUSALS: [(Wrong, &str, &str); 5] = [
        (
            |_, _| Reply::error(403, "AccessDenied"),
            "Denied",
            "s3:PutObject denied",
        ),
        (
            |_, _| Reply::error(403, "RequestTimeTooSkewed"),
            "Unauthenticated",
            "RequestTimeTooSkewed",
        ),
        (
            |_, _| Reply::error(404, "NoSuchBucket"),
            "Gone",
            "bucket kv-bucket does not exist",
        ),
        (
            |_, _| Reply::error(503, "SlowDown"),
            "Throttled",
            "SlowDown",
        ),
        (elsewhere, "Config", "eu-west-3; set s3.region"),
    ];
    let disk = filled();
    for (wrong, reason, message) in REFUSALS {
        let bucket = Bucket::start();
        bucket.goes(wrong);
        is_named_while_the_others_serve(&bucket.config(), &disk, reason, message);
    }
}

#[test]
fn a_certificate_that_nobody_vouches_for_and_tls_on_one_side_alone_are_named_and_others_serve_on() {
    let (plain, disk) = (Bucket::start(), filled());
    let (own, other) = (Certificates::local(), Certificates::local());
    let [certificate, key] =
        ["tls.crt", "tls.key"].map(|name| own.path(name).display().to_string());
    let of_tls = Server::start_with(&["--cert", &certificate, "--key", &key]);
    let ca = format!(", ca: {}", other.path("ca.crt").display());
    let by_tls = |config: config::S3| (config.endpoint.replace("http", "https"), ca.as_str());
    for ((endpoint, more), reason, message) in [
        (
            by_tls(of_tls.config()),
            "Config",
            "set s3.ca to the authorities to trust",
        ),
        (
            (of_tls.config().endpoint, ""),
            "Unreachable",
            "is this a port of TLS (https://)?",
        ),
        (
            by_tls(plain.server.config()),
            "Unreachable",
            "is this a port without TLS (http://)?",
        ),
    ] {
        let auth = of_tls.auth().display().to_string();
        let s3 = format!("{{bucket: kv-bucket, endpoint: \"{endpoint}\", auth: {auth}{more}}}");
        let config = format!("memory: {{size: 64Mi}}\ncache: {{minLoadTokens: 0}}\ns3: {s3}\n");
        is_named_while_the_others_serve(&config, &disk, reason, message);
    }
}

/// The bucket of another region, as AWS tells it.
fn elsewhere(_: &Asked, _: &Store) -> Reply {
    let Reply::Full(status, mut headers, body) = Reply::error(301, "PermanentRedirect") else {
        unreachable!()
    };
    headers.push(("x-amz-bucket-region", "eu-west-3".into()));
    Reply::Full(status, headers, body)
}

#[test]
fn a_clear_that_may_not_remove_says_so_by_name_until_it_may() {
    let bucket = Bucket::start();
    bucket.stored("", [1], 3);
    let sidecar = bucket.sidecar("write: {policy: None}\n");
    bucket.goes(|asked, store| match asked.method.as_str() {
        "GET" | "HEAD" => store.answer(asked),
        _ => Reply::error(403, "AccessDenied"),
    });
    let mut vllm = Vllm::attach(&sidecar.socket());
    vllm.finds_below(&hashes(1, 3), 3, S3);
    clear(&sidecar);
    let message = "s3:DeleteObject denied on bucket kv-bucket";
    wait_for("the permission", || {
        is_off(&sidecar, "Denied", message).then_some(())
    });
    sidecar.wait_metric("tier_clears_total{result=\"denied\",tier=\"s3\"}", 2.0);
    assert!(
        is_off(&sidecar, "Denied", message),
        "{}",
        sidecar.tier("s3")
    );
    let (_, reply) = vllm.probe_below("again", &hashes(1, 3));
    assert!(reply.states.iter().all(|s| *s != CHUNK_READY), "{reply:?}");
    bucket.goes(right);
    sidecar.wait_tier("s3", "ready");
    assert_eq!(bucket.store.objects(), Vec::<String>::new());
}

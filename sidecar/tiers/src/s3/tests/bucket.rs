//! What the tier does with a bucket beside the suite: what it costs, what it finds out, what it clears away.

use super::{Server, uploads};
use crate::s3::request::PROBE;
use crate::s3::{Options, Parts, S3};
use crate::testing::faulty::{Asked, Faulty, Reply, until};
use crate::testing::suite::{Memory, Sample};
use crate::{Cause, Stored, Tier};
use kvcachepool_protocol::config;
use kvcachepool_protocol::object::ObjectName;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

pub async fn open(config: &config::S3) -> S3 {
    S3::open(config, Options::default()).await.unwrap()
}

pub fn names(count: u64) -> Vec<ObjectName> {
    (0..count).map(|n| Sample::new(1, n, &[1]).name()).collect()
}

/// What lies in a folder and below it, files only.
pub fn files(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let paths = entries.map(|entry| entry.unwrap().path());
    paths
        .flat_map(|path| {
            if path.is_dir() {
                files(&path)
            } else {
                vec![path]
            }
        })
        .collect()
}

/// A server that has the names for which `there` says so.
async fn holding(there: impl Fn(&Asked) -> bool + Send + Sync + 'static) -> (Faulty, S3) {
    let server = Faulty::start(move |asked| match there(asked) {
        true => Reply::Full(200, vec![("content-length", "4096".into())], vec![]),
        false => Reply::status(404),
    })
    .await;
    let config = server.config();
    let tier = S3::over(
        server.requests().await,
        &config,
        Options::default(),
        &Default::default(),
    );
    (server, tier)
}

#[tokio::test]
async fn all_or_none_of_512_names_cost_at_most_12_requests_and_what_is_known_none() {
    let names = names(512);
    let (server, tier) = holding(|_| false).await;
    assert_eq!(tier.lookup(&names).await, Ok(vec![false; 512]));
    assert!(server.count("HEAD") <= 12, "{}", server.count("HEAD"));
    let (server, tier) = holding(|_| true).await;
    assert_eq!(tier.lookup(&names).await, Ok(vec![true; 512]));
    let asked = server.count("HEAD");
    assert!(asked <= 12, "{asked}");
    assert_eq!(tier.lookup(&names[..1]).await, Ok(vec![true]));
    assert_eq!(server.count("HEAD"), asked, "it is known");
}

#[tokio::test]
async fn a_part_of_a_prefix_is_found_with_few_requests() {
    let names = names(512);
    let there: Vec<String> = names[..300].iter().map(|name| name.s3("")).collect();
    let (server, tier) =
        holding(move |asked| there.iter().any(|key| asked.target.ends_with(key))).await;
    let answers = tier.lookup(&names).await.unwrap();
    assert_eq!(answers.iter().filter(|there| **there).count(), 300);
    assert!(answers[..300].iter().all(|there| *there));
    assert!(server.count("HEAD") <= 32, "{}", server.count("HEAD"));
}

#[tokio::test]
async fn opening_names_the_permission_that_is_missing() {
    for (denied, permission) in [
        ("PUT", "s3:PutObject"),
        ("GET", "s3:GetObject"),
        ("POST", "s3:DeleteObject"),
        ("LIST", "s3:ListBucket"),
        ("ABSENT", "s3:ListBucket"),
    ] {
        let (puts, removed) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let server = Faulty::start(move |asked| {
            let list = asked.target.contains("list-type");
            let absent = asked.method == "GET" && !list && removed.load(Relaxed) > 0;
            let what = match asked.method.as_str() {
                "GET" if list => "LIST",
                "GET" if absent => "ABSENT",
                method => method,
            };
            match what {
                what if what == denied => Reply::error(403, "AccessDenied"),
                "PUT" if puts.fetch_add(1, Relaxed) > 0 => Reply::error(412, "PreconditionFailed"),
                "GET" => Reply::part(
                    asked,
                    b"kvcachepool tries here what it may do. This object can be removed.\n",
                ),
                "ABSENT" => Reply::error(404, "NoSuchKey"),
                "POST" => {
                    removed.fetch_add(1, Relaxed);
                    Reply::Full(200, vec![], b"<DeleteResult/>".to_vec())
                }
                _ => Reply::Full(200, vec![], b"<ListBucketResult/>".to_vec()),
            }
        })
        .await;
        let error = S3::open(&server.config(), Options::default())
            .await
            .unwrap_err();
        assert_eq!(error.cause, Cause::Denied, "{denied}: {error}");
        let wanted = format!("{permission} denied on bucket kv-bucket");
        assert!(error.detail.starts_with(&wanted), "{denied}: {error}");
    }
}

#[tokio::test]
async fn opening_leaves_nothing_behind_and_a_probe_of_another_sidecar_is_not_foreign() {
    let server = Server::start();
    let tier = open(&server.config()).await;
    assert_eq!(files(&server.data()), Vec::<PathBuf>::new());
    std::fs::write(server.data().join(format!("{PROBE}-1")), "x").unwrap();
    std::fs::write(server.data().join("notes.txt"), "x").unwrap();
    let page = tier.list(None, 100).await.unwrap();
    assert_eq!((page.objects.len(), page.foreign), (0, 1));
}

#[tokio::test]
async fn a_bucket_that_is_not_there_is_named_at_opening_and_after() {
    let server = Server::start();
    let config = config::S3 {
        bucket: "no-such-bucket".into(),
        ..server.config()
    };
    let error = S3::open(&config, Options::default()).await.unwrap_err();
    assert_eq!(error.cause, Cause::Gone, "{error}");
    let options = Options {
        reach_every: Duration::ZERO,
        ..Options::default()
    };
    let tier = S3::open(&server.config(), options).await.unwrap();
    assert_eq!(tier.usage().await.unwrap().objects, 0);
    let away = server.data().with_file_name("away-bucket");
    std::fs::rename(server.data(), &away).unwrap();
    assert_eq!(tier.usage().await.unwrap_err().cause, Cause::Gone);
    std::fs::rename(&away, server.data()).unwrap();
    assert!(tier.usage().await.is_ok());
}

#[tokio::test]
async fn usage_asks_nothing_of_a_bucket_that_answered_a_moment_ago() {
    let (server, tier) = holding(|_| false).await;
    for _ in 0..10 {
        tier.usage().await.unwrap();
    }
    assert_eq!(server.asked().len(), 0);
}

#[tokio::test]
async fn usage_finds_out_that_a_bucket_answers_no_more_though_nobody_else_asks() {
    let (server, _) = holding(|_| false).await;
    let options = Options {
        reach_every: Duration::from_millis(100),
        ..Options::default()
    };
    let config = server.config();
    let tier = S3::over(
        server.requests().await,
        &config,
        options,
        &Default::default(),
    );
    drop(server);
    // Asked more often than that, and still.
    for _ in 0..1_000 {
        if tier.usage().await.is_err() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("the server is gone");
}

#[tokio::test]
async fn an_operation_that_was_given_up_makes_usage_ask() {
    let server = Faulty::start(|_| Reply::Hang).await;
    let config = server.config();
    let tier = S3::over(
        server.requests().await,
        &config,
        Options::default(),
        &Default::default(),
    );
    assert!(tier.usage().await.is_ok());
    let short = Duration::from_millis(100);
    assert!(
        tokio::time::timeout(short, tier.lookup(&names(1)))
            .await
            .is_err()
    );
    assert!(
        tokio::time::timeout(short, tier.usage()).await.is_err(),
        "it asks, too"
    );
}

/// A server that does not know a condition: it answers this, or takes no notice.
async fn put_twice(unconditional: Option<Reply>) -> (Faulty, Vec<Stored>) {
    let there = AtomicUsize::new(0);
    let server = Faulty::start(move |asked| {
        let probe = asked.target.contains(PROBE);
        match asked.method.as_str() {
            "PUT" if !asked.header("if-none-match").is_empty() && unconditional.is_some() => {
                unconditional.clone().unwrap()
            }
            "PUT" => {
                there.fetch_add(usize::from(!probe), Relaxed);
                Reply::status(200)
            }
            "HEAD" if there.load(Relaxed) > 0 => {
                Reply::Full(200, vec![("content-length", "9".into())], vec![])
            }
            "HEAD" => Reply::status(404),
            "GET" if asked.target.contains("list-type") => {
                Reply::Full(200, vec![], b"<ListBucketResult/>".to_vec())
            }
            "GET" => Reply::part(
                asked,
                b"kvcachepool tries here what it may do. This object can be removed.\n",
            ),
            _ => Reply::Full(200, vec![], b"<DeleteResult/>".to_vec()),
        }
    })
    .await;
    let requests = server.requests().await;
    // What was removed is still there for this server: that is not what is asked here.
    let _ = requests.probe(true).await;
    let (memory, sample) = (Memory::new(1 << 20), Sample::new(1, 0, &[5_000]));
    let mut stored = Vec::new();
    for _ in 0..3 {
        stored.push(requests.put(&sample.put(&memory), uploads()).await.unwrap());
    }
    (server, stored)
}

#[tokio::test]
async fn a_server_without_conditions_is_found_out_once_and_asked_first_from_then_on() {
    for reply in [None, Some(Reply::error(501, "NotImplemented"))] {
        let (server, stored) = put_twice(reply).await;
        assert_eq!(stored, [Stored::New, Stored::Already, Stored::Already]);
        let asked = server.asked();
        let objects = || asked.iter().filter(|a| !a.target.contains(PROBE));
        let puts: Vec<_> = objects().filter(|a| a.method == "PUT").collect();
        assert_eq!(puts.len(), 1, "{puts:?}");
        assert_eq!(puts[0].header("if-none-match"), "");
        assert_eq!(objects().filter(|a| a.method == "HEAD").count(), 3);
    }
}

#[tokio::test]
async fn a_refusal_for_a_while_does_not_end_conditions_for_good() {
    for reply in [Reply::error(405, "MethodNotAllowed"), Reply::error(501, "")] {
        let refused = AtomicUsize::new(0);
        let server = Faulty::start(move |asked| match asked.method.as_str() {
            "PUT" if refused.fetch_add(1, Relaxed) == 0 => reply.clone(),
            "PUT" => Reply::status(200),
            _ => Reply::status(404),
        })
        .await;
        let requests = server.requests().await;
        let memory = Memory::new(1 << 20);
        for number in 0..2 {
            let put = Sample::new(1, number, &[5_000]).put(&memory);
            assert_eq!(requests.put(&put, uploads()).await, Ok(Stored::New));
        }
        let asked = server.asked();
        let puts = asked.iter().filter(|a| a.method == "PUT");
        let conditions: Vec<&str> = puts.map(|a| a.header("if-none-match")).collect();
        assert_eq!(conditions, ["*", "", "*"]);
        assert!(requests.conditional());
    }
}

#[tokio::test]
async fn a_server_that_removes_one_by_one_is_found_out_once() {
    let server = Faulty::start(|asked| match asked.method.as_str() {
        "POST" => Reply::error(501, "NotImplemented"),
        _ => Reply::status(204),
    })
    .await;
    let requests = server.requests().await;
    let keys: Vec<String> = (0..40).map(|n| n.to_string()).collect();
    requests.delete(&keys).await.unwrap();
    requests.delete(&keys).await.unwrap();
    assert_eq!((server.count("POST"), server.count("DELETE")), (1, 80));
}

#[tokio::test]
async fn keys_that_change_are_taken_without_a_restart_and_a_wrong_one_is_named() {
    let server = Server::start();
    let tier = open(&server.config()).await;
    server.write_auth("kvcachepool-test", "another-secret");
    let (memory, sample) = (Memory::new(1 << 20), Sample::new(1, 0, &[9]));
    let told = async |wanted: Option<Cause>| {
        for _ in 0..500 {
            let stored = tier.put(sample.put(&memory)).await;
            if stored.as_ref().err().map(|e| e.cause) == wanted {
                return stored.err().map(|e| e.to_string()).unwrap_or_default();
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("the files were not read again");
    };
    let wrong = told(Some(Cause::Unauthenticated)).await;
    assert!(!wrong.contains("another-secret"), "{wrong}");
    std::fs::remove_file(server.auth().join("AWS_ACCESS_KEY_ID")).unwrap();
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    let missing = told(Some(Cause::Unauthenticated)).await;
    assert!(missing.contains("AWS_ACCESS_KEY_ID"), "{missing}");
    server.write_right_auth();
    told(None).await;
}

#[tokio::test]
async fn pools_of_two_prefixes_share_a_bucket_and_see_nothing_of_each_other() {
    let server = Server::start();
    let with = |prefix: &str| config::S3 {
        prefix: prefix.into(),
        ..server.config()
    };
    let (a, b) = (open(&with("team/a")).await, open(&with("team/ab")).await);
    let (memory, sample) = (Memory::new(1 << 20), Sample::new(1, 0, &[9]));
    a.put(sample.put(&memory)).await.unwrap();
    assert_eq!(a.list(None, 10).await.unwrap().objects.len(), 1);
    let page = b.list(None, 10).await.unwrap();
    assert_eq!((page.objects.len(), page.foreign), (0, 0));
    assert_eq!(b.lookup(&[sample.name()]).await, Ok(vec![false]));
    assert_eq!(b.put(sample.put(&memory)).await, Ok(Stored::New));
}

#[tokio::test]
async fn an_object_that_is_replaced_while_its_ranges_are_read_is_a_miss() {
    let sample = Sample::new(1, 0, &[400_000]);
    let mut bytes = sample.object.encode().unwrap();
    bytes.extend(&sample.bytes[0]);
    let server = Faulty::start(move |asked| match asked.header("if-match") {
        "" => Reply::part(asked, &bytes),
        "\"one\"" => Reply::error(412, "PreconditionFailed"),
        other => panic!("{other}"),
    })
    .await;
    let few = Parts {
        bytes: 100_000,
        at_once: 2,
    };
    let get = sample.get_all(&Memory::new(1 << 20));
    let error = server.requests().await.get(&get, few).await.unwrap_err();
    assert_eq!(error.cause, Cause::Missing, "{error}");
}

#[tokio::test]
async fn a_head_of_many_tokens_is_read_whole_however_long_it_is() {
    let server = Server::start();
    let tier = open(&server.config()).await;
    let memory = Memory::new(8 << 20);
    let mut sample = Sample::new(1, 0, &[70_000, 9]);
    sample.object.tokens = 20_000;
    sample.object.token_ids = (0..20_000).collect();
    tier.put(sample.put(&memory)).await.unwrap();
    assert_eq!(tier.head(&sample.name()).await, Ok(sample.object.clone()));
    for wanted in [&[0, 1][..], &[1], &[]] {
        let get = sample.get(&memory, wanted);
        assert_eq!(tier.get(get.clone()).await, Ok(sample.object.clone()));
        assert!(sample.lies_in(&get.places));
    }
}

#[tokio::test]
async fn a_put_that_is_refused_early_is_told_and_reads_no_more_of_its_slot() {
    // The server answers before it has read the body, as AWS does.
    let server = Server::start();
    let tier = open(&server.config()).await;
    let (memory, sample) = (Memory::new(64 << 20), Sample::new(1, 0, &[16 << 20]));
    tier.put(sample.put(&memory)).await.unwrap();
    let hold = Arc::new(());
    let mut put = sample.put(&memory);
    put.spans[0] = memory.held(16 << 20, hold.clone());
    assert!(put.spans[0].write(0, &sample.bytes[0]));
    assert_eq!(tier.put(put).await, Ok(Stored::Already));
    until("the slot to be free", || Arc::strong_count(&hold) == 1).await;
}

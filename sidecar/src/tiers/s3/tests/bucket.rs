//! What the tier does with a bucket beside the suite: what it costs, what it finds out, what it clears away.

use super::faulty::{Asked, Faulty, Reply, until};
use super::{Server, uploads};
use crate::tiers::s3::census;
use crate::tiers::s3::request::PROBE;
use crate::tiers::s3::{Options, Parts, S3, Uploads};
use crate::tiers::suite::{Memory, Sample};
use crate::tiers::{Cause, Stored, Tier};
use kvcachepool_protocol::config;
use kvcachepool_protocol::object::ObjectName;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

async fn open(config: &config::S3) -> S3 {
    S3::open(config, Options::default()).await.unwrap()
}

fn names(count: u64) -> Vec<ObjectName> {
    (0..count).map(|n| Sample::new(1, n, &[1]).name()).collect()
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
    let _ = requests.probe().await;
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

/// Objects of 5 MiB and more go in parts.
fn in_parts() -> Uploads {
    Uploads {
        from_bytes: 6 << 20,
        part_bytes: 5 << 20,
        at_once: 2,
    }
}

/// What lies in a folder and below it, files only.
fn files(folder: &Path) -> Vec<PathBuf> {
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

#[tokio::test]
async fn a_long_object_goes_in_parts_and_comes_back_in_ranges() {
    let server = Server::start();
    let options = Options {
        uploads: in_parts(),
        parts: Parts {
            bytes: 1 << 20,
            at_once: 3,
        },
        ..Options::default()
    };
    let tier = S3::open(&server.config(), options).await.unwrap();
    let (memory, sample) = (
        Memory::new(128 << 20),
        Sample::new(1, 0, &[9 << 20, 3_000_001, 77]),
    );
    assert_eq!(tier.put(sample.put(&memory)).await, Ok(Stored::New));
    assert_eq!(tier.put(sample.put(&memory)).await, Ok(Stored::Already));
    let get = sample.get_all(&memory);
    assert_eq!(tier.get(get.clone()).await, Ok(sample.object.clone()));
    assert!(sample.lies_in(&get.places));
    let listed = tier.list(None, 10).await.unwrap();
    assert_eq!(listed.objects[0].bytes, sample.object.total_bytes());
    // One file, and no parts beside it.
    assert_eq!(
        files(&server.data()).len(),
        1,
        "{:?}",
        files(&server.data())
    );
}

#[tokio::test]
async fn an_upload_that_fails_or_that_nobody_waits_for_is_aborted() {
    for hangs in [false, true] {
        let server = Faulty::start(move |asked| match asked.method.as_str() {
            "HEAD" => Reply::status(404),
            "POST" if asked.target.contains("uploads") => {
                let body = "<InitiateMultipartUploadResult><UploadId>the-id</UploadId></InitiateMultipartUploadResult>";
                Reply::Full(200, vec![], body.into())
            }
            "PUT" if asked.target.contains("partNumber=2") && hangs => Reply::Hang,
            "PUT" if asked.target.contains("partNumber=2") => Reply::error(500, "InternalError"),
            _ => Reply::Full(200, vec![("etag", "\"p\"".into())], vec![]),
        })
        .await;
        let requests = server.requests().await;
        let put = Sample::new(1, 0, &[12 << 20]).put(&Memory::new(32 << 20));
        let put = requests.put(&put, in_parts());
        match tokio::time::timeout(Duration::from_millis(if hangs { 500 } else { 60_000 }), put)
            .await
        {
            Ok(failed) => assert_eq!(failed.unwrap_err().cause, Cause::Unreachable),
            Err(_) => assert!(hangs),
        }
        let aborted = |a: &Asked| a.method == "DELETE" && a.target.contains("uploadId=the-id");
        until("the abort", || server.asked().iter().any(aborted)).await;
        let completed = |a: &Asked| a.method == "POST" && a.target.contains("uploadId");
        assert!(!server.asked().iter().any(completed));
    }
}

#[tokio::test]
async fn uploads_of_dead_processes_are_swept_up_and_young_and_foreign_ones_are_not() {
    let server = Server::start();
    let tier = open(&server.config()).await;
    let requests = &tier.live.requests;
    let key = names(1)[0].s3("");
    for key in [key.as_str(), "somebody/else"] {
        let begun = requests
            .client
            .create_multipart_upload()
            .bucket("kv-bucket")
            .key(key);
        begun.send().await.unwrap();
    }
    assert_eq!(requests.sweep(Duration::from_secs(3_600)).await, Ok(0));
    assert_eq!(requests.sweep(Duration::ZERO).await, Ok(1));
    let left = requests.client.list_multipart_uploads().bucket("kv-bucket");
    let left = left.send().await.unwrap();
    let keys: Vec<_> = left.uploads().iter().filter_map(|u| u.key()).collect();
    assert_eq!(keys, ["somebody/else"]);
}

/// A tier that lists at every chance.
async fn watchful(config: &config::S3) -> S3 {
    let census = census::Options {
        bounded_every: Duration::from_millis(50),
        pause: Duration::from_millis(10),
        ..census::Options::default()
    };
    let options = Options {
        census: Some(census),
        known_for: Duration::ZERO,
        ..Options::default()
    };
    S3::open(config, options).await.unwrap()
}

async fn waited(what: &str, tier: &S3, there: impl Fn(&[bool]) -> bool, names: &[ObjectName]) {
    for _ in 0..2_000 {
        let answers: Vec<bool> = {
            let mut answers = Vec::new();
            for name in names {
                answers.extend(tier.lookup(std::slice::from_ref(name)).await.unwrap());
            }
            answers
        };
        if there(&answers) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("waited in vain for {what}");
}

#[tokio::test]
async fn over_its_capacity_the_oldest_objects_go_and_not_what_is_read_here() {
    let server = Server::start();
    let samples: Vec<_> = (0..8).map(|n| Sample::new(1, n, &[100_000])).collect();
    let names: Vec<_> = samples.iter().map(Sample::name).collect();
    let each = samples[0].object.total_bytes();
    let memory = Memory::new(16 << 20);
    let writer = open(&server.config()).await;
    for (age, sample) in samples.iter().enumerate() {
        writer.put(sample.put(&memory)).await.unwrap();
        // The last is the youngest; the server tells ages by the files'.
        let file = server.data().join(sample.name().s3(""));
        let at = std::time::SystemTime::now() - Duration::from_secs(1_000 - 10 * age as u64);
        std::fs::File::open(file).unwrap().set_modified(at).unwrap();
    }
    let config = config::S3 {
        capacity: config::ByteSize(8 * each - 1),
        evict_at_percent: 100,
        evict_to_percent: 60,
        ..server.config()
    };
    // Held before anything is listed: number 1 is the second oldest.
    let tier = S3::open(
        &config,
        Options {
            census: None,
            known_for: Duration::ZERO,
            ..Options::default()
        },
    )
    .await
    .unwrap();
    let held = tier.live.census.hold(&names[1]);
    tier.live.pass().await.unwrap();
    let there =
        |numbers: &'static [usize]| move |a: &[bool]| (0..8).all(|n| a[n] == numbers.contains(&n));
    // To 60 % of 8 the four oldest have to go; one of them is read.
    waited("the oldest to go", &tier, there(&[1, 4, 5, 6, 7]), &names).await;
    assert_eq!(tier.usage().await.unwrap().bytes, 5 * each);
    drop(held);
    tier.live.pass().await.unwrap();
    waited("no more to go", &tier, there(&[1, 4, 5, 6, 7]), &names).await;
}

#[tokio::test]
async fn what_is_put_over_the_capacity_makes_room_by_itself() {
    let server = Server::start();
    let sample = |n| Sample::new(1, n, &[100_000]);
    let each = sample(0).object.total_bytes();
    let config = config::S3 {
        capacity: config::ByteSize(4 * each),
        ..server.config()
    };
    let tier = watchful(&config).await;
    let memory = Memory::new(64 << 20);
    for n in 0..20 {
        tier.put(sample(n).put(&memory)).await.unwrap();
    }
    let names: Vec<_> = (0..20).map(|n| sample(n).name()).collect();
    let few = |a: &[bool]| a.iter().filter(|there| **there).count() <= 3;
    waited("room", &tier, few, &names).await;
}

#[tokio::test]
async fn what_was_written_longer_ago_than_it_may_be_kept_goes() {
    let server = Server::start();
    let (old, young) = (Sample::new(1, 0, &[9]), Sample::new(1, 1, &[9]));
    let memory = Memory::new(1 << 20);
    let config = config::S3 {
        expire_after: config::Duration::from_ms(3_600_000),
        ..server.config()
    };
    let tier = watchful(&config).await;
    for sample in [&old, &young] {
        tier.put(sample.put(&memory)).await.unwrap();
    }
    let at = std::time::SystemTime::now() - Duration::from_secs(7_200);
    let file = server.data().join(old.name().s3(""));
    std::fs::File::open(file).unwrap().set_modified(at).unwrap();
    let names = [old.name(), young.name()];
    waited("the old one to go", &tier, |a| a == [false, true], &names).await;
}

#[tokio::test]
async fn what_others_put_is_counted_when_the_bucket_is_listed() {
    let server = Server::start();
    let (mine, other) = (open(&server.config()).await, open(&server.config()).await);
    let (memory, sample) = (Memory::new(1 << 20), Sample::new(1, 0, &[9_000]));
    other.put(sample.put(&memory)).await.unwrap();
    assert_eq!(mine.usage().await.unwrap().objects, 0);
    mine.live.pass().await.unwrap();
    let usage = mine.usage().await.unwrap();
    assert_eq!(
        (usage.objects, usage.bytes),
        (1, sample.object.total_bytes())
    );
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

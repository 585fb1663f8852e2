//! A directory bucket (S3 Express One Zone): every request but the one for a session is signed by a session, and a listing has no order.

use super::small_parts;
use crate::s3::{Options, S3};
use crate::testing::faulty::{Asked, Faulty, Reply, until};
use crate::testing::store::Store;
use crate::testing::suite::{Memory, Sample};
use crate::{Cause, Removal, Stored, Tier, clear};
use kvcachepool_protocol::config;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A bucket whose sessions are good until a time, and which does not answer some requests.
struct Bucket {
    server: Faulty,
    store: Arc<Store>,
    sessions: Arc<AtomicU64>,
}

impl Bucket {
    async fn start(good_until: &'static str, unanswered: Option<&'static str>) -> Self {
        let (store, sessions) = (Arc::new(Store::directory()), Arc::<AtomicU64>::default());
        let (holds, counts) = (store.clone(), sessions.clone());
        let server = Faulty::start(move |asked| match asked.target.contains("?session") {
            true => session(asked, counts.fetch_add(1, Relaxed) + 1, good_until),
            false if unanswered.is_some_and(|part| asked.target.contains(part)) => Reply::Hang,
            false => taken(asked, counts.load(Relaxed)).unwrap_or_else(|| holds.answer(asked)),
        })
        .await;
        Self {
            server,
            store,
            sessions,
        }
    }

    fn config(&self) -> config::S3 {
        config::S3 {
            bucket: "kv--euw3-az1--x-s3".into(),
            prefix: "prod".into(),
            ..self.server.config()
        }
    }

    async fn open(&self) -> S3 {
        S3::open(&self.config(), small_parts()).await.unwrap()
    }
}

fn signed_by(asked: &Asked) -> (&str, bool) {
    let authorization = asked.header("authorization");
    let id = authorization
        .split("Credential=")
        .nth(1)
        .unwrap_or_default();
    let id = id.split('/').next().unwrap_or_default();
    (id, authorization.contains("/s3express/aws4_request"))
}

/// The one request that is signed by the keys of the config.
fn session(asked: &Asked, number: u64, good_until: &str) -> Reply {
    assert_eq!(signed_by(asked), ("any", true), "{asked:?}");
    assert_eq!(asked.header("x-amz-s3session-token"), "");
    let body = format!(
        "<CreateSessionResult><Credentials><AccessKeyId>id-{number}</AccessKeyId><SecretAccessKey>secret</SecretAccessKey>\
         <SessionToken>session-{number}</SessionToken><Expiration>{good_until}</Expiration></Credentials></CreateSessionResult>"
    );
    Reply::Full(200, vec![], body.into())
}

/// What a directory bucket does not take.
fn taken(asked: &Asked, session: u64) -> Option<Reply> {
    let (id, express) = signed_by(asked);
    let token = asked.header("x-amz-s3session-token");
    if !express || id != format!("id-{session}") || token != format!("session-{session}") {
        return Some(Reply::error(403, "InvalidToken"));
    }
    let wrong = asked.target.contains("start-after")
        || asked.target.contains("prefix=") && !asked.target.contains("prefix=prod%2F")
        || !asked.header("content-md5").is_empty();
    wrong.then(|| Reply::error(400, "InvalidRequest"))
}

const LONG: &str = "2099-01-01T00:00:00Z";

#[tokio::test]
async fn all_that_a_tier_does_goes_by_one_session() {
    let bucket = Bucket::start(LONG, None).await;
    let (tier, memory) = (bucket.open().await, Memory::new(64 << 20));
    let sizes: [&[u64]; 4] = [&[5_000], &[9 << 20, 77], &[9], &[100]];
    let samples: Vec<Sample> = (0..)
        .zip(sizes)
        .map(|(n, sizes)| Sample::new(1, n, sizes))
        .collect();
    for sample in &samples {
        assert_eq!(tier.put(sample.put(&memory)).await, Ok(Stored::New));
        assert_eq!(tier.put(sample.put(&memory)).await, Ok(Stored::Already));
        let get = sample.get_all(&memory);
        assert_eq!(tier.get(get.clone()).await, Ok(sample.object.clone()));
        assert!(sample.lies_in(&get.places));
    }
    let asked = bucket.server.asked();
    let parts = asked.iter().filter(|a| a.target.contains("partNumber="));
    assert_eq!(parts.count(), 2);
    let (mut listed, mut from) = (Vec::new(), None);
    loop {
        let page = tier.list(from.as_deref(), 2).await.unwrap();
        assert_eq!(page.foreign, 0);
        listed.extend(page.objects);
        from = page.next;
        if from.is_none() {
            break;
        }
    }
    assert_eq!(listed.len(), samples.len());
    assert_eq!(tier.lookup(&[samples[0].name()]).await, Ok(vec![true]));
    assert_eq!(
        tier.remove(Removal::Unusable(&samples[0].name())).await,
        Ok(1)
    );
    assert_eq!(
        tier.remove(Removal::Named(&[samples[1].name()])).await,
        Ok(1)
    );
    assert_eq!(clear(&tier, None).await, Ok(2));
    assert_eq!(bucket.store.objects(), Vec::<String>::new());
    assert_eq!(bucket.sessions.load(Relaxed), 1);
}

#[tokio::test]
async fn an_upload_that_nobody_waits_for_is_aborted_by_the_session() {
    let bucket = Bucket::start(LONG, Some("partNumber=2")).await;
    let (tier, memory) = (bucket.open().await, Memory::new(64 << 20));
    let sent = || {
        let asked = bucket.server.asked();
        asked.iter().any(|a| a.target.contains("partNumber=2"))
    };
    tokio::select! {
        _ = tier.put(Sample::new(1, 0, &[12 << 20]).put(&memory)) => panic!("a part has no answer"),
        () = until("the part", sent) => {}
    }
    assert_eq!(bucket.store.uploads(), 1);
    until("the abort", || bucket.store.uploads() == 0).await;
    assert_eq!(bucket.store.objects(), Vec::<String>::new());
}

#[tokio::test]
async fn a_session_that_ends_is_followed_by_another() {
    // Over: each request needs one of its own.
    let bucket = Bucket::start("2020-01-01T00:00:00Z", None).await;
    let (tier, memory) = (bucket.open().await, Memory::new(1 << 20));
    let before = bucket.sessions.load(Relaxed);
    let sample = Sample::new(1, 0, &[5_000]);
    assert_eq!(tier.put(sample.put(&memory)).await, Ok(Stored::New));
    assert_eq!(bucket.sessions.load(Relaxed), before + 1);
    let get = sample.get_all(&memory);
    tier.get(get.clone()).await.unwrap();
    assert!(sample.lies_in(&get.places));
}

#[tokio::test]
async fn a_session_that_is_denied_is_named() {
    let server = Faulty::start(|_| Reply::error(403, "AccessDenied")).await;
    let config = config::S3 {
        bucket: "kv--euw3-az1--x-s3".into(),
        ..server.config()
    };
    let error = S3::open(&config, Options::default()).await.unwrap_err();
    assert_eq!(error.cause, Cause::Denied, "{error}");
    assert!(error.detail.contains("s3express:CreateSession"), "{error}");
}

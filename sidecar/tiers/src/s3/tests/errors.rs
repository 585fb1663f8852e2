//! What each failure of a server, of the way to it or of the settings is called.

use super::{parts, uploads};
use crate::layers::{DeadlineOptions, Options as LayerOptions, RetryOptions, layered};
use crate::s3::{Options, S3};
use crate::testing::faulty::{Faulty, Reply, range};
use crate::testing::suite::{Memory, Sample, untouched};
use crate::{Cause, Get, TierError};
use kvcachepool_protocol::config;
use std::sync::Arc;
use std::time::Duration;

/// An object and its bytes as a server has them.
pub fn stored() -> (Sample, Vec<u8>) {
    let sample = Sample::new(1, 0, &[20_000, 5_000]);
    let mut bytes = sample.object.encode().unwrap();
    for (offset, section) in sample.object.offsets().into_iter().zip(&sample.bytes) {
        bytes.resize(offset as usize, 0);
        bytes.extend(section);
    }
    (sample, bytes)
}

/// What a get of an object is told by a server.
async fn got(
    reply: impl Fn(&crate::testing::faulty::Asked, &[u8]) -> Reply + Send + Sync + 'static,
) -> TierError {
    let (sample, bytes) = stored();
    let server = Faulty::start(move |asked| reply(asked, &bytes)).await;
    let memory = Memory::new(1 << 20);
    let get = sample.get_all(&memory);
    server
        .requests()
        .await
        .get(&get, parts())
        .await
        .unwrap_err()
}

#[tokio::test]
async fn every_answer_that_is_none_has_a_name() {
    for (status, code, cause) in [
        (404, "NoSuchKey", Cause::Missing),
        (404, "NoSuchBucket", Cause::Gone),
        (403, "AccessDenied", Cause::Denied),
        (403, "InvalidAccessKeyId", Cause::Unauthenticated),
        (403, "SignatureDoesNotMatch", Cause::Unauthenticated),
        (403, "RequestTimeTooSkewed", Cause::Unauthenticated),
        (400, "ExpiredToken", Cause::Unauthenticated),
        (400, "InvalidToken", Cause::Unauthenticated),
        (401, "", Cause::Unauthenticated),
        (301, "PermanentRedirect", Cause::Config),
        (307, "TemporaryRedirect", Cause::Config),
        (400, "AuthorizationHeaderMalformed", Cause::Config),
        (412, "PreconditionFailed", Cause::Missing),
        (416, "InvalidRange", Cause::Corrupt),
        (429, "TooManyRequests", Cause::Throttled),
        (503, "SlowDown", Cause::Throttled),
        (503, "", Cause::Throttled),
        (500, "InternalError", Cause::Unreachable),
        (502, "", Cause::Unreachable),
        (400, "RequestTimeout", Cause::Timeout),
        (400, "IncompleteBody", Cause::Unreachable),
        (409, "ConditionalRequestConflict", Cause::Busy),
        (404, "NoSuchUpload", Cause::Busy),
        (507, "", Cause::Full),
        (400, "InvalidArgument", Cause::Protocol),
    ] {
        let error = got(move |_, _| Reply::error(status, code)).await;
        assert_eq!(error.cause, cause, "{status} {code}: {error}");
        assert!(error.object.is_some(), "{error}");
    }
    // A part that does not say which part it is.
    let error = got(|asked, object| {
        let (headers, body) = range(asked, object);
        Reply::Full(206, vec![headers[1].clone()], body)
    })
    .await;
    assert_eq!(error.cause, Cause::Protocol, "{error}");
    // An answer that is no XML at all.
    let error = got(|_, _| Reply::Full(503, vec![], b"<html>busy".to_vec())).await;
    assert_eq!(error.cause, Cause::Throttled, "{error}");
    let error = got(|_, _| Reply::Full(404, vec![], b"not here".to_vec())).await;
    assert_eq!(error.cause, Cause::Missing, "{error}");
}

#[tokio::test]
async fn a_bucket_of_another_region_is_told_where_it_is() {
    let error = got(|_, _| {
        let Reply::Full(status, mut headers, body) = Reply::error(301, "PermanentRedirect") else {
            unreachable!()
        };
        headers.push(("x-amz-bucket-region", "eu-west-3".into()));
        Reply::Full(status, headers, body)
    })
    .await;
    assert_eq!(error.cause, Cause::Config);
    assert!(error.detail.contains("eu-west-3; set s3.region"), "{error}");
}

#[tokio::test]
async fn what_is_denied_is_named_by_its_permission_and_bucket() {
    let server = Faulty::start(|_| Reply::error(403, "AccessDenied")).await;
    let requests = server.requests().await;
    let (memory, sample) = (Memory::new(1 << 20), Sample::new(1, 0, &[9]));
    let names = [sample.name()];
    let told = [
        requests
            .put(&sample.put(&memory), uploads())
            .await
            .map(drop),
        requests
            .get(&sample.get_all(&memory), parts())
            .await
            .map(drop),
        requests.head(&names[0]).await.map(drop),
        requests.size(&names[0]).await.map(drop),
        requests.list(None, 10).await.map(drop),
        requests.delete(&["x".to_string()]).await,
        requests.sweep(Duration::ZERO).await.map(drop),
    ];
    let permissions = [
        "s3:PutObject",
        "s3:GetObject",
        "s3:GetObject",
        "s3:GetObject",
        "s3:ListBucket",
        "s3:DeleteObject",
        "s3:ListBucketMultipartUploads",
    ];
    for (told, permission) in told.into_iter().zip(permissions) {
        let error = told.unwrap_err();
        assert_eq!(error.cause, Cause::Denied, "{error}");
        let wanted = format!("{permission} denied on bucket kv-bucket");
        assert!(error.detail.starts_with(&wanted), "{error}");
    }
}

#[tokio::test]
async fn an_answer_that_is_no_object_and_goes_on_and_on_is_given_up() {
    let page = |status| Reply::Full(status, vec![], vec![b' '; 17 << 20]);
    let server = Faulty::start(move |_| page(200)).await;
    let requests = server.requests().await;
    let error = requests.list(None, 10).await.unwrap_err();
    assert_eq!(error.cause, Cause::Protocol, "{error}");
    assert!(error.detail.contains("more than 16 MiB"), "{error}");
    let error = got(move |_, _| page(500)).await;
    assert_eq!(error.cause, Cause::Unreachable, "{error}");
}

#[tokio::test]
async fn a_removal_that_is_refused_for_one_name_is_an_error() {
    let server = Faulty::start(|_| {
        let body = "<DeleteResult><Error><Key>x</Key><Code>AccessDenied</Code><Message>no</Message></Error></DeleteResult>";
        Reply::Full(200, vec![], body.into())
    })
    .await;
    let error = server
        .requests()
        .await
        .delete(&["x".to_string()])
        .await
        .unwrap_err();
    assert_eq!(error.cause, Cause::Denied);
    assert!(
        error.detail.starts_with("s3:DeleteObject denied"),
        "{error}"
    );
}

#[tokio::test]
async fn a_body_that_breaks_off_or_is_of_another_length_is_no_object() {
    for bytes in [0, 100, 600, 6_000, 25_000] {
        let error = got(move |asked, object| {
            let (headers, body) = range(asked, object);
            Reply::Cut(headers, body, bytes)
        })
        .await;
        assert_eq!(error.cause, Cause::Unreachable, "{bytes}: {error}");
    }
    // The object is shorter or longer than its head says.
    let error = got(|asked, object| Reply::part(asked, &object[..object.len() - 1])).await;
    assert_eq!(error.cause, Cause::Corrupt, "{error}");
    let error = got(|asked, object| Reply::part(asked, &[object, &[0]].concat())).await;
    assert_eq!(error.cause, Cause::Corrupt, "{error}");
    // It says that it is shorter or longer than what was asked for, or nothing of that.
    for more in [-7, 7] {
        let error = got(move |asked, object| {
            let (mut headers, body) = range(asked, object);
            let length = body.len().checked_add_signed(more).unwrap();
            headers.push(("content-length", length.to_string()));
            Reply::Full(206, headers, body)
        })
        .await;
        assert_eq!(error.cause, Cause::Protocol, "{more}: {error}");
    }
    let error = got(|asked, object| {
        let (headers, body) = range(asked, object);
        let (name, value) = &headers[0];
        let head = format!("HTTP/1.1 206 Partial Content\r\n{name}: {value}\r\n\r\n");
        Reply::Raw([head.as_bytes(), &body].concat(), true)
    })
    .await;
    assert_eq!(error.cause, Cause::Protocol, "{error}");
    assert!(error.detail.contains("no Content-Length"), "{error}");
    // Another range than was asked for.
    let error = got(|asked, object| {
        let (mut headers, body) = range(asked, object);
        headers[0].1 = format!("bytes 1-{}/{}", body.len(), object.len());
        Reply::Full(206, headers, body)
    })
    .await;
    assert_eq!(error.cause, Cause::Protocol, "{error}");
    // And one that is none.
    let error = got(|asked, object| {
        let (mut headers, body) = range(asked, object);
        headers[0].1 = "all of it".into();
        Reply::Full(206, headers, body)
    })
    .await;
    assert_eq!(error.cause, Cause::Protocol, "{error}");
}

#[tokio::test]
async fn a_head_that_is_none_or_of_another_object_is_named_and_nothing_is_written() {
    let (sample, bytes) = stored();
    for (at, cause) in [
        (0, Cause::Corrupt),
        (100, Cause::Corrupt),
        (600, Cause::Corrupt),
    ] {
        let mut wrong = bytes.clone();
        wrong[at] ^= 1;
        let error = got(move |asked, _| Reply::part(asked, &wrong)).await;
        assert_eq!(error.cause, cause, "{at}: {error}");
    }
    let error = got(|asked, _| Reply::part(asked, b"a web page")).await;
    assert_eq!(error.cause, Cause::Corrupt, "{error}");
    let other = Sample::new(1, 1, &[20_000, 5_000]);
    let server = Faulty::start(move |asked| Reply::part(asked, &bytes)).await;
    let memory = Memory::new(1 << 20);
    let get = Get {
        name: other.name(),
        ..sample.get_all(&memory)
    };
    let error = server
        .requests()
        .await
        .get(&get, parts())
        .await
        .unwrap_err();
    assert_eq!(error.cause, Cause::Foreign, "{error}");
    assert!(get.places.iter().all(|place| untouched(&place.span)));
}

#[tokio::test]
async fn wrong_content_is_found_removed_and_never_served() {
    let (sample, mut bytes) = stored();
    *bytes.last_mut().unwrap() ^= 1;
    let server = Faulty::start(move |asked| match asked.method.as_str() {
        "GET" => Reply::part(asked, &bytes),
        "HEAD" => Reply::Full(
            200,
            vec![("content-length", bytes.len().to_string())],
            vec![],
        ),
        _ => Reply::Full(200, vec![], b"<DeleteResult/>".to_vec()),
    })
    .await;
    let tier = server.tier().await;
    let layered = layered(tier, &LayerOptions::default());
    let get = sample.get_all(&Memory::new(1 << 20));
    let error = layered.tier.get(get).await.unwrap_err();
    assert_eq!(error.cause, Cause::Corrupt, "{error}");
    let asked = server.asked();
    let removed = asked.iter().find(|asked| asked.method == "DELETE").unwrap();
    assert!(
        removed.target.contains(&sample.name().s3("")),
        "{removed:?}"
    );
    // That very object, and none that was written since.
    assert_eq!(removed.header("if-match"), "\"one\"");
}

#[tokio::test]
async fn a_server_that_hangs_while_the_tier_is_opened_is_named_soon() {
    let server = Faulty::start(|_| Reply::Hang).await;
    let options = Options {
        opening: Duration::from_millis(300),
        ..Options::default()
    };
    let config = server.config();
    let opened = S3::open(&config, options);
    let opened = tokio::time::timeout(Duration::from_secs(30), opened).await;
    let error = opened.expect("sooner than its requests").unwrap_err();
    assert_eq!(error.cause, Cause::Timeout);
    assert!(error.detail.contains("within 0.3 s"), "{error}");
}

#[tokio::test]
async fn a_server_that_hangs_costs_the_deadline_and_holds_no_slot() {
    let server = Faulty::start(|_| Reply::Hang).await;
    let options = LayerOptions {
        deadline: DeadlineOptions {
            question: Duration::from_millis(200),
            transfer: Duration::from_millis(200),
            ..DeadlineOptions::default()
        },
        ..LayerOptions::default()
    };
    let tier = layered(server.tier().await, &options).tier;
    let (memory, sample) = (Memory::new(1 << 20), Sample::new(1, 0, &[20_000]));
    let hold = Arc::new(());
    let mut get = sample.get_all(&memory);
    get.places[0].span = memory.held(20_000, hold.clone());
    let mut put = sample.put(&memory);
    put.spans[0] = memory.held(20_000, hold.clone());
    assert!(put.spans[0].write(0, &sample.bytes[0]));
    let (got, there) = (tier.get(get).await, tier.lookup(&[sample.name()]).await);
    let stored = tier.put(put).await;
    for cause in [got.map(drop), there.map(drop), stored.map(drop)].map(|r| r.map_err(|e| e.cause))
    {
        assert_eq!(cause, Err(Cause::Timeout));
    }
    crate::testing::faulty::until("the slots to be free", || Arc::strong_count(&hold) == 1).await;
}

#[tokio::test]
async fn what_is_throttled_or_breaks_is_tried_again_and_what_is_denied_is_not() {
    let retry = RetryOptions::default();
    for (reply, again) in [
        (Reply::error(503, "SlowDown"), true),
        (Reply::error(500, "InternalError"), true),
        (Reply::Close, true),
        (Reply::error(403, "AccessDenied"), false),
        (Reply::error(404, "NoSuchBucket"), false),
    ] {
        let server = Faulty::start(move |_| reply.clone()).await;
        let options = LayerOptions {
            retry,
            ..LayerOptions::default()
        };
        let tier = layered(server.tier().await, &options).tier;
        tier.list(None, 1).await.unwrap_err();
        assert_eq!(server.count("GET") > 1, again, "{:?}", server.asked());
    }
}

#[tokio::test]
async fn a_server_that_is_not_there_is_named() {
    let server = Faulty::start(|_| Reply::Hang).await;
    let mut config = server.config();
    drop(server);
    let folder = tempfile::tempdir().unwrap();
    for name in ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"] {
        std::fs::write(folder.path().join(name), "any").unwrap();
    }
    config.auth = Some(folder.path().into());
    let open = async |config: &config::S3| S3::open(config, Options::default()).await.unwrap_err();
    for (endpoint, why) in [
        (config.endpoint.clone(), "refused"),
        ("http://no-such-host.invalid".into(), "dns"),
    ] {
        config.endpoint = endpoint.clone();
        let error = open(&config).await;
        assert_eq!(error.cause, Cause::Unreachable, "{error}");
        assert!(error.detail.to_lowercase().contains(why), "{error}");
        // The HTTP client does not say whom it asked.
        let (_, server) = endpoint.split_once("://").unwrap();
        assert!(error.detail.contains(server), "{error}");
    }
    // Only the HTTP client sees that these are none.
    for endpoint in ["http://127.0.0.1:99999", "http://[::1"] {
        config.endpoint = endpoint.into();
        let error = open(&config).await;
        assert_eq!(error.cause, Cause::Config, "{error}");
    }
}

#[tokio::test]
async fn settings_that_cannot_be_right_are_named_before_anything_is_asked() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ca.crt");
    std::fs::write(&file, "no certificate").unwrap();
    let base = config::S3 {
        bucket: "kv-bucket".into(),
        endpoint: "https://127.0.0.1:1".into(),
        auth: Some(folder.path().into()),
        ..config::S3::default()
    };
    let missing = folder.path().join("missing.crt");
    for (config, cause, text) in [
        (
            config::S3 {
                ca: Some(missing),
                ..base.clone()
            },
            Cause::Config,
            "missing.crt",
        ),
        (
            config::S3 {
                ca: Some(file),
                ..base.clone()
            },
            Cause::Config,
            "contains no certificate",
        ),
        (
            config::S3 {
                accelerate: true,
                ..base.clone()
            },
            Cause::Config,
            "s3.accelerate",
        ),
        (
            config::S3 {
                evict_to_percent: 90,
                ..base.clone()
            },
            Cause::Config,
            "s3.evictToPercent",
        ),
        (
            config::S3 {
                endpoint: "http://127.0.0.1:1".into(),
                ..base.clone()
            },
            Cause::Unauthenticated,
            "AWS_ACCESS_KEY_ID",
        ),
    ] {
        let error = S3::open(&config, Options::default()).await.unwrap_err();
        assert_eq!(error.cause, cause, "{error}");
        assert!(error.detail.contains(text), "{error}");
    }
}

//! What is removed, and what is not: objects of other versions, objects that were written since, what a probe leaves.

use super::Server;
use super::bucket::{files, open};
use super::errors::stored;
use super::parts;
use crate::layers::{Options as LayerOptions, layered};
use crate::s3::request::PROBE;
use crate::s3::{Options, S3};
use crate::testing::faulty::{Asked, Faulty, Reply};
use crate::testing::suite::{LATER, Memory, Sample, sealed_again};
use crate::{Cause, Removal, Stored};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// What a probe holds.
const TEXT: &[u8] = b"kvcachepool tries here what it may do. This object can be removed.\n";

fn removes(asked: &Asked) -> bool {
    matches!(asked.method.as_str(), "DELETE" | "POST")
}

#[tokio::test]
async fn an_object_of_another_version_is_foreign_and_stays() {
    let (sample, bytes) = stored();
    let mut version = bytes.clone();
    version[8] += 1;
    let later = LATER.map(|(what, change)| {
        let mut bytes = bytes.clone();
        sealed_again(&mut bytes, change);
        (what, bytes)
    });
    let of_version = "object of version 2; this build reads version 1";
    for (what, bytes) in [(of_version, version)].into_iter().chain(later) {
        let server = Faulty::start(move |asked| match asked.method.as_str() {
            "GET" => Reply::part(asked, &bytes),
            _ => Reply::status(200),
        })
        .await;
        let layered = layered(server.tier().await, &LayerOptions::default());
        let get = sample.get_all(&Memory::new(1 << 20));
        let error = layered.tier.get(get).await.unwrap_err();
        assert_eq!(error.cause, Cause::Foreign, "{error}");
        assert!(error.detail.contains(what), "{error}");
        let error = layered.tier.head(&sample.name()).await.unwrap_err();
        assert_eq!(error.cause, Cause::Foreign, "{error}");
        assert!(!server.asked().iter().any(removes), "{:?}", server.asked());
    }
}

#[tokio::test]
async fn of_a_corrupt_object_only_what_was_read_is_removed() {
    for (replaced, left) in [(false, 0), (true, 1)] {
        let (sample, mut bytes) = stored();
        *bytes.last_mut().unwrap() ^= 1;
        let server = Faulty::start(move |asked| match asked.method.as_str() {
            "GET" => Reply::part(asked, &bytes),
            "HEAD" => {
                let bytes = ("content-length", bytes.len().to_string());
                Reply::Full(200, vec![bytes], vec![])
            }
            "DELETE" if replaced => Reply::error(412, "PreconditionFailed"),
            _ => Reply::status(204),
        })
        .await;
        let s3 = S3::over(
            server.requests().await,
            &server.config(),
            Options::default(),
            &Default::default(),
        );
        s3.live.census.came(bytes_of(&sample));
        let tier = layered(Arc::new(s3), &LayerOptions::default()).tier;
        let get = sample.get_all(&Memory::new(1 << 20));
        let error = tier.get(get).await.unwrap_err();
        assert_eq!(error.cause, Cause::Corrupt, "{error}");
        assert_eq!(tier.usage().await.unwrap().objects, left);
        // The innermost layer did that. Asked for outside of all of them it is the same.
        let removed = tier
            .remove(Removal::Unusable(&sample.name()))
            .await
            .unwrap();
        assert_eq!(removed, u64::from(!replaced));
        let asked = server.asked();
        let deletes: Vec<_> = asked.iter().filter(|a| removes(a)).collect();
        let conditions: Vec<_> = deletes.iter().map(|a| a.header("if-match")).collect();
        assert_eq!(conditions, ["\"one\""; 2]);
    }
}

#[tokio::test]
async fn the_page_of_a_proxy_has_no_object_removed() {
    let (sample, bytes) = stored();
    let between = Arc::new(AtomicBool::new(false));
    let proxy = between.clone();
    let server = Faulty::start(move |asked| match asked.method.as_str() {
        "GET" if proxy.load(Relaxed) => Reply::Full(200, vec![], b"<html>log in first".to_vec()),
        "GET" => Reply::part(asked, &bytes),
        _ => Reply::status(204),
    })
    .await;
    let tier = layered(server.tier().await, &LayerOptions::default()).tier;
    let get = sample.get_all(&Memory::new(1 << 20));
    tier.get(get.clone()).await.unwrap();
    between.store(true, Relaxed);
    let error = tier.get(get.clone()).await.unwrap_err();
    assert_eq!(error.cause, Cause::Corrupt, "{error}");
    assert_eq!(tier.remove(Removal::Unusable(&sample.name())).await, Ok(0));
    assert!(!server.asked().iter().any(removes), "{:?}", server.asked());
    between.store(false, Relaxed);
    tier.get(get).await.unwrap();
}

fn bytes_of(sample: &Sample) -> u64 {
    sample.object.total_bytes()
}

#[tokio::test]
async fn a_corrupt_object_of_a_real_server_is_removed_and_can_be_put_again() {
    let server = Server::start();
    let layered = layered(
        Arc::new(open(&server.config()).await),
        &LayerOptions::default(),
    );
    let (memory, sample) = (Memory::new(1 << 20), Sample::new(1, 0, &[9_000]));
    layered.tier.put(sample.put(&memory)).await.unwrap();
    let file = server.data().join(sample.name().s3(""));
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let get = sample.get_all(&memory);
    let error = layered.tier.get(get.clone()).await.unwrap_err();
    assert_eq!(error.cause, Cause::Corrupt, "{error}");
    assert_eq!(files(&server.data()), Vec::<std::path::PathBuf>::new());
    assert_eq!(layered.tier.put(sample.put(&memory)).await, Ok(Stored::New));
    layered.tier.get(get).await.unwrap();
}

#[tokio::test]
async fn an_object_that_is_another_one_at_a_later_range_is_a_miss() {
    let sample = Sample::new(1, 0, &[400_000]);
    let mut bytes = sample.object.encode().unwrap();
    bytes.extend(&sample.bytes[0]);
    let later = |asked: &Asked| asked.range().0 > 0;
    let other_etag = |asked: &Asked, object: &[u8]| {
        let (mut headers, body) = crate::testing::faulty::range(asked, object);
        headers[1].1 = "\"two\"".into();
        Reply::Full(206, headers, body)
    };
    let longer = |asked: &Asked, object: &[u8]| Reply::part(asked, &[object, &[0]].concat());
    let shorter = |_: &Asked, _: &[u8]| Reply::error(416, "InvalidRange");
    let replies: [fn(&Asked, &[u8]) -> Reply; 3] = [other_etag, longer, shorter];
    for reply in replies {
        let bytes = bytes.clone();
        let server = Faulty::start(move |asked| match later(asked) {
            true => reply(asked, &bytes),
            false => Reply::part(asked, &bytes),
        })
        .await;
        let few = crate::s3::Parts {
            bytes: 100_000,
            ..parts()
        };
        let get = sample.get_all(&Memory::new(1 << 20));
        let error = server.requests().await.get(&get, few).await.unwrap_err();
        assert_eq!(error.cause, Cause::Missing, "{error}");
    }
}

#[tokio::test]
async fn opening_again_and_again_where_nothing_may_be_removed_leaves_one_object() {
    let there = AtomicBool::new(false);
    let server = Faulty::start(move |asked| match asked.method.as_str() {
        "PUT" if there.swap(true, Relaxed) => Reply::error(412, "PreconditionFailed"),
        "GET" => Reply::part(asked, TEXT),
        "POST" => Reply::error(403, "AccessDenied"),
        _ => Reply::status(200),
    })
    .await;
    for _ in 0..3 {
        let opened = S3::open(&server.config(), Options::default()).await;
        let error = opened.unwrap_err();
        assert!(
            error.detail.starts_with("s3:DeleteObject denied"),
            "{error}"
        );
    }
    let asked = server.asked();
    let puts = asked.iter().filter(|asked| asked.method == "PUT");
    let names: BTreeSet<_> = puts.map(|asked| asked.target.clone()).collect();
    assert_eq!(names.len(), 1, "{names:?}");
}

#[tokio::test]
async fn what_an_earlier_try_left_is_removed_and_tells_nothing_of_the_server() {
    let there = AtomicBool::new(true);
    let server = Faulty::start(move |asked| {
        let probe = asked.target.contains(PROBE);
        match asked.method.as_str() {
            "PUT" if there.swap(true, Relaxed) => Reply::error(412, "PreconditionFailed"),
            "POST" => {
                there.store(false, Relaxed);
                Reply::Full(200, vec![], b"<DeleteResult/>".to_vec())
            }
            "GET" if probe && there.load(Relaxed) => Reply::part(asked, TEXT),
            "GET" if probe => Reply::error(404, "NoSuchKey"),
            "GET" => Reply::Full(200, vec![], b"<ListBucketResult/>".to_vec()),
            _ => Reply::status(200),
        }
    })
    .await;
    let tier = S3::open(&server.config(), Options::default()).await;
    assert!(tier.unwrap().live.requests.conditional());
}

#[tokio::test]
async fn a_probe_that_cannot_be_read_is_removed_all_the_same() {
    let server = Faulty::start(|asked| match asked.method.as_str() {
        "GET" => Reply::error(403, "AccessDenied"),
        _ => Reply::Full(200, vec![], b"<DeleteResult/>".to_vec()),
    })
    .await;
    let opened = S3::open(&server.config(), Options::default()).await;
    assert!(
        opened
            .unwrap_err()
            .detail
            .starts_with("s3:GetObject denied")
    );
    assert_eq!(server.count("POST"), 1);
}

#[tokio::test]
async fn a_bucket_that_keeps_what_is_removed_is_remarked_upon() {
    for (version, remarked) in [("3sL4kqtJlcpXroDTDmJ", true), ("null", false), ("", false)] {
        let there = AtomicBool::new(false);
        let server = Faulty::start(move |asked| match asked.method.as_str() {
            "PUT" if there.swap(true, Relaxed) => Reply::error(412, "PreconditionFailed"),
            "PUT" if version.is_empty() => Reply::status(200),
            "PUT" => {
                let version = ("x-amz-version-id", version.to_string());
                Reply::Full(200, vec![version], vec![])
            }
            "POST" => {
                there.store(false, Relaxed);
                Reply::Full(200, vec![], b"<DeleteResult/>".to_vec())
            }
            "GET" if !asked.target.contains(PROBE) => {
                Reply::Full(200, vec![], b"<ListBucketResult/>".to_vec())
            }
            "GET" if there.load(Relaxed) => Reply::part(asked, TEXT),
            _ => Reply::error(404, "NoSuchKey"),
        })
        .await;
        let tier = S3::open(&server.config(), Options::default()).await;
        let remark = tier.unwrap().info.remark.clone();
        let said = remark.is_some_and(|said| said.contains("NoncurrentVersionExpiration"));
        assert_eq!(said, remarked, "{version}");
    }
}

//! Long objects: sent in parts, read in ranges, and nothing left of what did not end.

use super::Server;
use super::bucket::{files, names, open};
use crate::s3::{Options, Parts, S3, Uploads};
use crate::testing::faulty::{Asked, Faulty, Reply, until};
use crate::testing::suite::{Memory, Sample};
use crate::{Cause, Stored, Tier};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// Objects of 5 MiB and more go in parts.
fn in_parts() -> Uploads {
    Uploads {
        from_bytes: 6 << 20,
        part_bytes: 5 << 20,
        at_once: 2,
    }
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
    // The server's date may be a second behind what it writes down.
    let mut swept = 0;
    for _ in 0..500 {
        swept += requests.sweep(Duration::ZERO).await.unwrap();
        if swept > 0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(swept, 1);
    let left = requests.client.list_multipart_uploads().bucket("kv-bucket");
    let left = left.send().await.unwrap();
    let keys: Vec<_> = left.uploads().iter().filter_map(|u| u.key()).collect();
    assert_eq!(keys, ["somebody/else"]);
}

#[tokio::test]
async fn an_error_under_the_status_of_success_is_the_error_that_it_is() {
    for (code, wanted) in [
        ("InternalError", Err(Cause::Unreachable)),
        ("SlowDown", Err(Cause::Throttled)),
        ("PreconditionFailed", Ok(Stored::Already)),
        ("ConditionalRequestConflict", Ok(Stored::New)),
        ("NoSuchUpload", Ok(Stored::New)),
    ] {
        let failed = AtomicBool::new(false);
        let server = Faulty::start(move |asked| match asked.method.as_str() {
            "HEAD" => Reply::status(404),
            "POST" if asked.target.contains("uploads") => {
                let body = "<InitiateMultipartUploadResult><UploadId>the-id</UploadId></InitiateMultipartUploadResult>";
                Reply::Full(200, vec![], body.into())
            }
            "POST" if wanted.is_err() || !failed.swap(true, Relaxed) => Reply::error(200, code),
            "POST" => {
                let body = "<CompleteMultipartUploadResult><ETag>e</ETag></CompleteMultipartUploadResult>";
                Reply::Full(200, vec![], body.into())
            }
            _ => Reply::Full(200, vec![("etag", "\"p\"".into())], vec![]),
        })
        .await;
        let put = Sample::new(1, 0, &[7 << 20]).put(&Memory::new(16 << 20));
        let stored = server.requests().await.put(&put, in_parts()).await;
        assert_eq!(stored.map_err(|e| e.cause), wanted, "{code}");
    }
}

#[tokio::test]
async fn a_long_object_that_is_there_is_not_sent_again() {
    let server =
        Faulty::start(|_| Reply::Full(200, vec![("content-length", "9".into())], vec![])).await;
    let put = Sample::new(1, 0, &[7 << 20]).put(&Memory::new(16 << 20));
    let stored = server.requests().await.put(&put, in_parts()).await;
    assert_eq!(stored, Ok(Stored::Already));
    assert_eq!((server.count("HEAD"), server.asked().len()), (1, 1));
}

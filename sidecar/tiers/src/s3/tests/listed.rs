//! Listings as servers give them: broken off, standing still, without dates, with dates of a server whose clock is not ours.

use super::bucket::names;
use crate::census::Shared;
use crate::s3::{Options, S3};
use crate::testing::faulty::{Asked, Faulty, Reply};
use crate::{Cause, Removal, Tier};
use kvcachepool_protocol::config;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// What a server lists of an object: when it was written, where it says that, and whether it may be removed.
#[derive(Debug, Clone, Default)]
struct Item {
    written: Option<&'static str>,
    locked: bool,
    /// Codes of the errors with which its next removals fail.
    fails: Vec<&'static str>,
}

/// A bucket that a script answers from.
#[derive(Debug, Clone, Default)]
struct Shelf(Arc<Mutex<BTreeMap<String, Item>>>);

impl Shelf {
    /// Objects by number, written so long ago.
    fn new(items: &[(u64, Option<&'static str>)]) -> Self {
        let item = |(number, written): &(u64, Option<&'static str>)| {
            let key = names(number + 1)[*number as usize].s3("");
            let item = Item {
                written: *written,
                ..Item::default()
            };
            (key, item)
        };
        Self(Arc::new(Mutex::new(items.iter().map(item).collect())))
    }

    fn lock(&self, number: u64) {
        let key = names(number + 1)[number as usize].s3("");
        self.0.lock().get_mut(&key).unwrap().locked = true;
    }

    fn fail(&self, number: u64, codes: &[&'static str]) {
        let key = names(number + 1)[number as usize].s3("");
        self.0.lock().get_mut(&key).unwrap().fails = codes.to_vec();
    }

    /// Numbers of the objects that are there.
    fn left(&self) -> Vec<u64> {
        let all = self.0.lock();
        let there = |n: &u64| all.contains_key(&names(*n + 1)[*n as usize].s3(""));
        (0..10).filter(there).collect()
    }

    fn list(&self, date: Option<&str>) -> Reply {
        let item = |(key, item): (&String, &Item)| {
            let written = item.written.map_or(String::new(), |at| {
                format!("<LastModified>{at}</LastModified>")
            });
            format!("<Contents><Key>{key}</Key><Size>1000</Size>{written}</Contents>")
        };
        let items: String = self.0.lock().iter().map(item).collect();
        let body = format!("<ListBucketResult>{items}</ListBucketResult>");
        let date = date.map(|date| ("date", date.to_string()));
        Reply::Full(200, date.into_iter().collect(), body.into())
    }

    fn remove(&self, asked: &Asked) -> Reply {
        let text = String::from_utf8(asked.body.clone()).unwrap();
        let mut errors = String::new();
        self.0.lock().retain(|key, item| {
            if !text.contains(key.as_str()) {
                return true;
            }
            let denied = item.locked.then_some("AccessDenied");
            let code = denied.or_else(|| item.fails.pop());
            if let Some(code) = code {
                errors += &format!("<Error><Key>{key}</Key><Code>{code}</Code></Error>");
            }
            code.is_some()
        });
        let body = format!("<DeleteResult>{errors}</DeleteResult>");
        Reply::Full(200, vec![], body.into())
    }

    async fn serve(&self, date: Option<&'static str>) -> Faulty {
        let this = self.clone();
        Faulty::start(move |asked| match asked.method.as_str() {
            "GET" if asked.target.contains("list-type") => this.list(date),
            "POST" => this.remove(asked),
            _ => Reply::status(404),
        })
        .await
    }
}

async fn tier(server: &Faulty, config: config::S3) -> S3 {
    let options = Options {
        census: None,
        ..Options::default()
    };
    S3::over(
        server.requests().await,
        &config,
        options,
        &Default::default(),
    )
}

fn of_an_hour(server: &Faulty) -> config::S3 {
    config::S3 {
        expire_after: config::Duration::from_ms(3_600_000),
        ..server.config()
    }
}

const OLD: Option<&str> = Some("2001-01-01T00:00:00Z");
const YOUNG: Option<&str> = Some("2001-01-01T05:00:00Z");

#[tokio::test]
async fn ages_are_those_of_the_server_and_not_of_this_nodes_clock() {
    // A quarter of a century ago by the clock of this node. Number 2 has no date: it is not taken for old.
    for (date, left) in [
        ("Mon, 01 Jan 2001 00:30:00 GMT", &[0, 1, 2][..]),
        ("Mon, 01 Jan 2001 05:30:00 GMT", &[1, 2]),
        ("Mon, 01 Jan 2001 07:30:00 GMT", &[2]),
    ] {
        let shelf = Shelf::new(&[(0, OLD), (1, YOUNG), (2, None)]);
        let server = shelf.serve(Some(date)).await;
        let tier = tier(&server, of_an_hour(&server)).await;
        tier.live.pass().await.unwrap();
        assert_eq!(shelf.left(), left, "{date:?}");
        assert!(
            tier.info()
                .unix_s
                .now()
                .is_some_and(|now| now < 1_000_000_000)
        );
    }
    // A server that says no date wrote what it wrote last before now.
    let shelf = Shelf::new(&[(0, OLD), (1, YOUNG)]);
    let server = shelf.serve(None).await;
    let tier = tier(&server, of_an_hour(&server)).await;
    tier.live.pass().await.unwrap();
    assert_eq!(shelf.left(), [1]);
}

#[tokio::test]
async fn uploads_are_as_old_as_the_server_says() {
    let key = names(1)[0].s3("");
    let server = Faulty::start(move |asked| match asked.method.as_str() {
        "GET" => {
            let body = format!(
                "<ListMultipartUploadsResult><Upload><Key>{key}</Key><UploadId>u</UploadId>\
                 <Initiated>2001-01-01T00:00:00Z</Initiated></Upload></ListMultipartUploadsResult>"
            );
            let date = "Mon, 01 Jan 2001 05:00:00 GMT".to_string();
            Reply::Full(200, vec![("date", date)], body.into())
        }
        _ => Reply::status(204),
    })
    .await;
    let requests = server.requests().await;
    let hours = |n: u64| Duration::from_secs(n * 3_600);
    assert_eq!(requests.sweep(hours(6)).await, Ok(0));
    assert_eq!(requests.sweep(hours(4)).await, Ok(1));
}

#[tokio::test]
async fn what_cannot_be_removed_does_not_hold_up_the_rest() {
    let ages: Vec<_> = ["00", "01", "02", "03", "04", "05"]
        .map(|hour| {
            let text: &'static str = format!("2001-01-01T{hour}:00:00Z").leak();
            Some(text)
        })
        .into();
    let items: Vec<_> = (0..).zip(ages).collect();
    let shelf = Shelf::new(&items);
    shelf.lock(0);
    shelf.lock(1);
    let server = shelf.serve(Some("Mon, 01 Jan 2001 06:00:00 GMT")).await;
    let config = config::S3 {
        capacity: config::ByteSize(5_000),
        evict_at_percent: 100,
        evict_to_percent: 80,
        ..server.config()
    };
    let tier = tier(&server, config).await;
    let all = names(6);
    for name in &all {
        tier.live.known.add(name);
    }
    tier.live.pass().await.unwrap();
    assert_eq!(shelf.left(), [0, 1, 4, 5]);
    assert_eq!(tier.usage().await.unwrap().bytes, 4_000);
    assert_eq!(tier.info().counters.now(), [("RemovalRefused", 2)]);
    // What was known to be there is not any more.
    assert!(!tier.live.known.has(&all[2]) && tier.live.known.has(&all[5]));
    // Where nothing at all may be removed, that is told.
    for number in [4, 5] {
        shelf.lock(number);
    }
    let config = config::S3 {
        capacity: config::ByteSize(1_000),
        ..server.config()
    };
    let tier = self::tier(&server, config).await;
    assert_eq!(tier.live.pass().await.unwrap_err().cause, Cause::Denied);
}

#[tokio::test]
async fn what_is_refused_for_a_moment_is_removed_and_no_younger_one_in_its_place() {
    let old = Some("2001-01-01T00:00:00Z");
    let young = Some("2001-01-01T05:00:00Z");
    let shelf = Shelf::new(&[(0, old), (1, old), (2, young), (3, young)]);
    shelf.fail(0, &["SlowDown", "InternalError"]);
    let server = shelf.serve(Some("Mon, 01 Jan 2001 06:00:00 GMT")).await;
    let config = config::S3 {
        capacity: config::ByteSize(4_000),
        evict_at_percent: 60,
        evict_to_percent: 50,
        ..server.config()
    };
    let tier = tier(&server, config).await;
    tier.live.pass().await.unwrap();
    assert_eq!(shelf.left(), [2, 3]);
    assert_eq!(tier.info().counters.now(), [("RemovalRefused", 0)]);
    // What fails again and again holds up nothing.
    shelf.fail(2, &["InternalError"; 100]);
    let left = tier.list(None, 10).await.unwrap().objects;
    let removed = tier.remove(Removal::Listed(&left)).await;
    assert_eq!(removed.unwrap_err().cause, Cause::Unreachable);
    assert_eq!(shelf.left(), [2]);
}

#[tokio::test]
async fn a_page_that_fails_for_a_moment_is_asked_for_again() {
    let shelf = Shelf::new(&[(0, YOUNG), (1, YOUNG)]);
    let (listed, asked) = (shelf.clone(), AtomicUsize::new(0));
    let server = Faulty::start(move |_| match asked.fetch_add(1, Relaxed) {
        0 => Reply::error(503, "SlowDown"),
        1 => Reply::Close,
        _ => listed.list(None),
    })
    .await;
    let tier = tier(&server, server.config()).await;
    tier.live.pass().await.unwrap();
    assert_eq!(tier.usage().await.unwrap().objects, 2);
}

#[tokio::test]
async fn a_listing_that_stands_still_is_told_and_ends() {
    let server = Faulty::start(|_| {
        let body = "<ListBucketResult><IsTruncated>true</IsTruncated>\
                    <NextContinuationToken>again</NextContinuationToken></ListBucketResult>";
        Reply::Full(200, vec![], body.into())
    })
    .await;
    let tier = tier(&server, server.config()).await;
    let error = tier.live.count().await.unwrap_err();
    assert_eq!(error.cause, Cause::Protocol, "{error}");
    assert_eq!(server.count("GET"), 2);
}

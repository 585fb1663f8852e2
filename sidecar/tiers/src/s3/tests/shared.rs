//! What a bucket is asked by one process at once, and by many together.

use super::Server;
use super::bucket::names;
use crate::census::{Shared, Sum, Turn};
use crate::s3::turns::COUNTED;
use crate::s3::{Options, Parts, S3};
use crate::testing::faulty::{Asked, Faulty, Reply};
use crate::testing::suite::{Memory, Sample};
use crate::{Cause, Tier};
use kvcachepool_protocol::config;
use std::time::Duration;

const HOUR: Duration = Duration::from_secs(3_600);
const COUNT: Sum = Sum {
    objects: 7,
    bytes: 7_000,
};

#[tokio::test]
async fn no_more_requests_run_at_once_than_the_settings_say_and_none_waits_for_itself() {
    let sample = Sample::new(1, 0, &[400_000]);
    let mut bytes = sample.object.encode().unwrap();
    bytes.extend(&sample.bytes[0]);
    for most in [1, 2, 5] {
        let bytes = bytes.clone();
        let server = Faulty::start(move |asked| {
            let reply = match asked.method.as_str() {
                "GET" => Reply::part(asked, &bytes),
                _ => Reply::status(404),
            };
            Reply::Later(Duration::from_millis(10), Box::new(reply))
        })
        .await;
        let config = config::S3 {
            max_concurrency: most,
            ..server.config()
        };
        let options = Options {
            parts: Parts {
                bytes: 50_000,
                at_once: 4,
            },
            ..Options::default()
        };
        let requests = super::requests(&config).await;
        let tier = S3::over(requests, &config, options, &Default::default());
        let memory = Memory::new(8 << 20);
        let absent = &names(4)[1..];
        let gets = (0..4).map(|_| tier.get(sample.get_all(&memory)));
        let (gets, there) = tokio::join!(futures::future::join_all(gets), tier.lookup(absent));
        for got in gets {
            assert_eq!(got, Ok(sample.object.clone()));
        }
        assert_eq!(there, Ok(vec![false; 3]));
        let (peak, most) = (server.peak(), most as usize);
        assert!((most.min(2)..=most).contains(&peak), "{peak} of {most}");
    }
}

#[tokio::test]
async fn one_of_all_sidecars_lists_and_the_others_take_over_what_it_counted() {
    let server = Server::start();
    let open = async || {
        let options = Options {
            census: None,
            ..Options::default()
        };
        S3::open(&server.config(), options).await.unwrap()
    };
    let (one, other) = (open().await, open().await);
    let (one, other) = (&one.live.requests, &other.live.requests);
    assert_eq!(one.turn(HOUR).await, Ok(Turn::Mine));
    assert_eq!(other.turn(HOUR).await, Ok(Turn::Counting));
    one.counted(COUNT).await.unwrap();
    assert_eq!(other.turn(HOUR).await, Ok(Turn::Counted(COUNT)));
    // Whose count is too old is not waited for.
    assert_eq!(other.turn(Duration::ZERO).await, Ok(Turn::Mine));
    // Until that is done the last count is what there is.
    assert_eq!(one.turn(HOUR).await, Ok(Turn::Counted(COUNT)));
    let page = one.list(None, 10).await.unwrap();
    assert_eq!((page.objects.len(), page.foreign), (0, 0));
}

#[tokio::test]
async fn what_one_sidecar_listed_is_known_to_another_that_did_not() {
    let server = Server::start();
    let open = async || {
        let options = Options {
            census: None,
            ..Options::default()
        };
        S3::open(&server.config(), options).await.unwrap()
    };
    let (one, other) = (open().await, open().await);
    let (memory, sample) = (Memory::new(1 << 20), Sample::new(1, 0, &[9_000]));
    one.put(sample.put(&memory)).await.unwrap();
    assert_eq!(one.live.look(Duration::ZERO, HOUR).await, Ok(true));
    assert_eq!(other.usage().await.unwrap().objects, 0);
    assert_eq!(other.live.look(HOUR, HOUR).await, Ok(true));
    let usage = other.usage().await.unwrap();
    assert_eq!(
        (usage.objects, usage.bytes),
        (1, sample.object.total_bytes())
    );
}

#[tokio::test]
async fn of_two_that_take_the_turn_at_once_one_gets_it() {
    let counted = "kvcachepool counted here: 7 objects of 7000 bytes (0)";
    for (refusal, wanted) in [
        (
            Reply::error(412, "PreconditionFailed"),
            Some(Turn::Counted(COUNT)),
        ),
        (
            Reply::error(409, "ConditionalRequestConflict"),
            Some(Turn::Counted(COUNT)),
        ),
        (Reply::error(403, "AccessDenied"), None),
    ] {
        let server = Faulty::start(move |asked| match asked.method.as_str() {
            "GET" => Reply::Full(200, vec![("etag", "\"old\"".into())], counted.into()),
            _ => refusal.clone(),
        })
        .await;
        let turn = server.requests().await.turn(HOUR).await;
        match wanted {
            Some(wanted) => assert_eq!(turn, Ok(wanted)),
            None => assert_eq!(turn.unwrap_err().cause, Cause::Denied),
        }
        let asked = server.asked();
        let put = asked.iter().find(|a| a.method == "PUT").unwrap();
        assert!(put.target.contains(COUNTED), "{put:?}");
        assert_eq!(put.header("if-match"), "\"old\"");
    }
}

#[tokio::test]
async fn a_server_that_cannot_say_whose_turn_it_is_is_listed_by_everybody() {
    let server = Faulty::start(|asked: &Asked| match asked.method.as_str() {
        "GET" => Reply::Full(200, vec![], b"a web page".to_vec()),
        _ => Reply::error(501, "NotImplemented"),
    })
    .await;
    assert_eq!(server.requests().await.turn(HOUR).await, Ok(Turn::Mine));
}

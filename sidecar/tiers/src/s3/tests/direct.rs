//! The ways that an answer's bytes take into the arena, and what becomes of their connections.

use super::errors::stored;
use super::requests;
use crate::s3::Parts;
use crate::s3::http::Http;
use crate::s3::request::Requests;
use crate::testing::faulty::{Asked, Faulty, Reply, range, whole};
use crate::testing::suite::{Memory, Sample, bytes_of};
use crate::testing::tls::Certificates;
use crate::{Cause, Get, TierError};
use aws_sdk_s3::primitives::SdkBody;
use aws_smithy_runtime_api::client::http::HttpConnector;
use kvcachepool_protocol::config::{Checksums, S3};
use rustls::RootCertStore;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::{Barrier, Notify};
use tokio::task::coop;

/// Without TLS, and with it.
const BOTH: [bool; 2] = [false, true];

/// A server of one object that answers by a rule, and the object.
async fn served(
    tls: bool,
    reply: impl Fn(&Asked, &[u8]) -> Reply + Send + Sync + 'static,
) -> (Faulty, Sample) {
    let (sample, bytes) = stored();
    let tls = tls.then(Certificates::local);
    let server = Faulty::start_with(tls, move |asked| reply(asked, &bytes)).await;
    (server, sample)
}

/// A get of all sections, whose digests are watched.
fn watched(sample: &Sample, memory: &Memory) -> Get {
    let mut get = sample.get_all(memory);
    for place in &mut get.places {
        place.span = place.span.watched();
    }
    get
}

/// Gets all of it, by ranges of so many bytes; returns for each section whether its digest was seen, which must be right then.
async fn read(requests: &Requests, sample: &Sample, bytes: u64) -> Result<Vec<bool>, TierError> {
    let memory = Memory::new(1 << 20);
    let get = watched(sample, &memory);
    requests.get(&get, Parts { bytes, at_once: 4 }).await?;
    assert!(sample.lies_in(&get.places));
    let spans = get.places.iter().map(|place| &place.span);
    let seen = spans.map(|span| {
        assert!(span.seen().is_none() || span.seen() == span.digest());
        span.seen().is_some()
    });
    Ok(seen.collect())
}

#[tokio::test]
async fn bytes_come_whole_whatever_way_they_take_and_are_seen_where_they_come_in_order() {
    for tls in BOTH {
        let (server, sample) = served(tls, Reply::part).await;
        let sums = S3 {
            checksums: Checksums::WhenSupported,
            ..server.config()
        };
        for config in [server.config(), sums] {
            let requests = requests(&config).await;
            let seen = read(&requests, &sample, 1 << 20).await.unwrap();
            assert_eq!(seen, [true, true]);
            // The first section comes in two ranges, the second one in one.
            let seen = read(&requests, &sample, 16 << 10).await.unwrap();
            assert_eq!(seen, [false, true]);
        }
    }
}

#[tokio::test]
async fn an_answer_without_a_sum_to_check_is_received_from_its_connection_and_another_is_not() {
    for (tls, checksums, direct) in [
        (false, Checksums::WhenRequired, true),
        (true, Checksums::WhenRequired, true),
        (false, Checksums::WhenSupported, false),
        (true, Checksums::WhenSupported, false),
    ] {
        let between = Arc::new(Barrier::new(2));
        let pause = between.clone();
        let (server, sample) = served(tls, move |asked, object| {
            let mut head = whole(asked, object, "x-any: 1", b"");
            let body = head.split_off(head.len() - range(asked, object).1.len());
            Reply::Twice(head, pause.clone(), body)
        })
        .await;
        let requests = requests(&S3 {
            checksums,
            ..server.config()
        })
        .await;
        let key = requests.key(&sample.name());
        let mut stream = requests.range(&key, (0, 100), None).await.unwrap();
        let shown = format!("{stream:?}");
        assert_eq!(shown.contains("Wire(100 bytes left)"), direct, "{shown}");
        between.wait().await;
        between.wait().await;
        let span = Memory::new(1 << 20).span(100);
        let received = stream.receive_into(&span, 0, 100).await.unwrap();
        assert_eq!(received, 100, "{tls} {checksums:?}");
        assert!(stored().1.starts_with(&bytes_of(&span)));
    }
}

#[tokio::test]
async fn an_object_is_read_in_ranges_when_it_is_alone_and_in_one_go_beside_others() {
    let (server, sample) = served(false, |asked, object| {
        let part = Reply::part(asked, object);
        Reply::Later(Duration::from_millis(20), Box::new(part))
    })
    .await;
    let requests = server.requests().await;
    read(&requests, &sample, 16 << 10).await.unwrap();
    let alone = server.count("GET");
    assert!(alone > 1);
    let gets = (0..10).map(|_| read(&requests, &sample, 16 << 10));
    let seen = futures::future::try_join_all(gets).await.unwrap();
    // As many as there may be ranges at once are read as before; they do not know of those that come.
    assert_eq!(server.count("GET"), alone + 4 * alone + 6);
    assert_eq!(seen[9], [true, true]);
    read(&requests, &sample, 16 << 10).await.unwrap();
    assert_eq!(server.count("GET"), 6 * alone + 6);
}

#[tokio::test]
async fn a_body_that_ends_too_soon_is_a_failure_and_what_it_let_be_seen_does_not_count() {
    for (tls, announced) in [(false, true), (true, true), (true, false)] {
        let asked = AtomicUsize::new(0);
        let (server, sample) = served(tls, move |request, object| {
            let (headers, body) = range(request, object);
            match asked.fetch_add(1, Relaxed) {
                // Behind the first section.
                0 if announced => Reply::Cut(headers, body, 26_000),
                0 => Reply::Torn(headers, body, 26_000),
                _ => Reply::Full(206, headers, body),
            }
        })
        .await;
        let (requests, memory) = (server.requests().await, Memory::new(1 << 20));
        let get = watched(&sample, &memory);
        let one = |bytes| requests.get(&get, Parts { bytes, at_once: 4 });
        let error = one(1 << 20).await.unwrap_err();
        assert_eq!(error.cause, Cause::Unreachable, "{error}");
        assert!(get.places[0].span.seen().is_some());
        one(16 << 10).await.unwrap();
        assert!(get.places[0].span.seen().is_none());
        assert!(sample.lies_in(&get.places));
    }
}

#[tokio::test]
async fn a_connection_is_used_again_when_all_of_an_answer_came() {
    for tls in BOTH {
        let (server, sample) = served(tls, Reply::part).await;
        let requests = server.requests().await;
        for _ in 0..5 {
            read(&requests, &sample, 1 << 20).await.unwrap();
            requests.head(&sample.name()).await.unwrap();
        }
        assert_eq!(server.count("GET"), 10);
        assert_eq!(server.connections(), 1, "{tls}");
    }
}

#[tokio::test]
async fn no_whole_object_is_read_for_its_head_where_a_server_knows_no_ranges() {
    let mut object = Sample::new(1, 0, &[9]).object;
    object.sections[0].stored_bytes = 64 << 20;
    object.sections[0].raw_bytes = 64 << 20;
    let (bytes, head) = (object.total_bytes(), object.encode().unwrap());
    let server = Faulty::start(move |_| {
        let answer = format!("HTTP/1.1 200 Answer\r\ncontent-length: {bytes}\r\n\r\n");
        // The rest never comes.
        Reply::Raw([answer.as_bytes(), &head].concat(), false)
    })
    .await;
    let requests = server.requests().await;
    let head = tokio::time::timeout(SOON, requests.head(&object.name())).await;
    assert_eq!(head.expect("it waits for no more"), Ok(object));
}

/// Long enough for anything but a wait that has no end.
const SOON: Duration = Duration::from_secs(10);

#[tokio::test]
async fn a_connection_that_brought_many_bytes_wakes_for_a_short_answer() {
    const BYTES: u64 = 300 << 10;
    for tls in BOTH {
        let tls = tls.then(Certificates::local);
        let server = Faulty::start_with(tls, |asked| match asked.target.contains("/long") {
            true => Reply::part(asked, &[7; BYTES as usize]),
            false => Reply::status(404),
        })
        .await;
        let requests = server.requests().await;
        let mut stream = requests.range("long", (0, BYTES), None).await.unwrap();
        let span = Memory::new(1 << 20).span(BYTES);
        while stream.at < BYTES {
            let at = stream.at;
            assert!(stream.receive_into(&span, at, BYTES).await.unwrap() > 0);
        }
        assert!(bytes_of(&span) == [7; BYTES as usize]);
        let name = stored().0.name();
        let short = tokio::time::timeout(SOON, requests.head(&name)).await;
        let error = short.expect("woken").unwrap_err();
        assert_eq!(error.cause, Cause::Missing, "{error}");
        assert_eq!(server.connections(), 1);
    }
}

#[tokio::test]
async fn a_connection_that_woke_for_many_bytes_wakes_for_the_few_that_are_left() {
    const BYTES: u64 = 300 << 10;
    const LATER: u64 = 20 << 10;
    for tls in BOTH {
        let between = Arc::new(Barrier::new(2));
        let pause = between.clone();
        let tls = tls.then(Certificates::local);
        let server = Faulty::start_with(tls, move |asked| {
            let mut first = whole(asked, &[7; BYTES as usize], "x-any: 1", b"");
            let later = first.split_off(first.len() - LATER as usize);
            Reply::Twice(first, pause.clone(), later)
        })
        .await;
        let requests = server.requests().await;
        let mut stream = requests.range("any", (0, BYTES), None).await.unwrap();
        let span = Memory::new(1 << 20).span(BYTES);
        let received = stream.receive_into(&span, 0, BYTES - LATER).await.unwrap();
        assert!(received > 0);
        let rest = stream.skip_to(u64::MAX);
        let later = async {
            between.wait().await;
            between.wait().await;
        };
        let both = async { tokio::join!(rest, later) };
        let (rest, ()) = tokio::time::timeout(SOON, both).await.expect("woken");
        assert_eq!(rest, Ok(()));
        assert_eq!((stream.at, stream.end), (BYTES, BYTES));
    }
}

#[tokio::test]
async fn a_connection_with_something_behind_an_answer_or_that_shall_end_is_not_used_again_and_others_are()
 {
    const CASES: [(&str, &[u8], usize); 3] = [
        ("connection: close", b"", 3),
        ("x-any: 1", b"more", 3),
        ("connection: keep-alive", b"", 1),
    ];
    let cases = CASES
        .into_iter()
        .flat_map(|case| BOTH.map(|tls| (tls, case)));
    for (tls, (header, behind, connections)) in cases {
        let (server, sample) = served(tls, move |asked, object| {
            let answer = whole(asked, object, header, behind);
            Reply::Raw(answer, false)
        })
        .await;
        let requests = server.requests().await;
        for _ in 0..3 {
            let got = read(&requests, &sample, 1 << 20).await;
            assert!(got.is_ok() || !behind.is_empty(), "{header}: {got:?}");
        }
        assert_eq!(server.connections(), connections, "{header}");
    }
}

#[tokio::test]
async fn a_connection_on_which_more_comes_when_its_answer_was_read_is_not_used_again() {
    for tls in BOTH {
        let (between, asked) = (Arc::new(Barrier::new(2)), AtomicUsize::new(0));
        let pause = between.clone();
        let (server, sample) = served(tls, move |request, object| {
            let answer = whole(request, object, "x-any: 1", b"");
            match asked.fetch_add(1, Relaxed) {
                0 => Reply::Twice(answer, pause.clone(), b"more".to_vec()),
                _ => Reply::Raw(answer, false),
            }
        })
        .await;
        let requests = server.requests().await;
        read(&requests, &sample, 1 << 20).await.unwrap();
        between.wait().await;
        between.wait().await;
        read(&requests, &sample, 1 << 20).await.unwrap();
        assert_eq!(server.connections(), 2);
    }
}

#[tokio::test]
async fn a_connection_that_its_server_closed_while_it_was_idle_costs_no_request() {
    for tls in BOTH {
        let (server, sample) = served(tls, |asked, object| {
            let answer = whole(asked, object, "x-any: 1", b"");
            Reply::Raw(answer, true)
        })
        .await;
        let requests = server.requests().await;
        for _ in 0..20 {
            read(&requests, &sample, 1 << 20).await.unwrap();
        }
        assert_eq!(server.count("GET"), 20);
    }
}

/// Polls a future for the first time with nothing left of the task's budget: sockets seem to have nothing.
async fn exhausted<T>(future: impl Future<Output = T>) -> T {
    let (mut future, mut begun) = (pin!(future), false);
    poll_fn(|cx| {
        while !begun && coop::has_budget_remaining() {
            let _ = pin!(coop::consume_budget()).poll(cx);
        }
        begun = true;
        future.as_mut().poll(cx)
    })
    .await
}

/// Does a client have a connection to this port of which no end was heard yet?
fn established(port: u16) -> bool {
    let (sockets, server) = ("/proc/net/tcp", format!(":{port:04X}"));
    let sockets = std::fs::read_to_string(sockets).unwrap();
    sockets.lines().any(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, _, remote, state, ..] = fields[..] else {
            return false;
        };
        remote.ends_with(&server) && state == "01"
    })
}

/// Answers one request of each connection with nothing, and closes all when it is told to.
async fn fickle(listener: TcpListener, close: Arc<Notify>) {
    while let Ok((mut stream, _)) = listener.accept().await {
        let close = close.clone();
        tokio::spawn(async move {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                stream.read_buf(&mut head).await.unwrap();
            }
            let closed = close.notified();
            let answer = b"HTTP/1.1 200 Answer\r\ncontent-length: 0\r\n\r\n";
            stream.write_all(answer).await.unwrap();
            closed.await;
        });
    }
}

#[tokio::test]
async fn a_request_on_a_connection_that_turns_out_to_be_closed_goes_out_on_another() {
    let (listener, close) = (
        TcpListener::bind("127.0.0.1:0").await.unwrap(),
        Arc::default(),
    );
    let address = listener.local_addr().unwrap();
    let (url, port) = (format!("http://{address}/"), address.port());
    let server = tokio::spawn(fickle(listener, Arc::clone(&close)));
    let http = Http::new(RootCertStore::empty(), 8, Arc::default()).unwrap();
    for _ in 0..20 {
        let request = hyper::Request::get(&url).body(SdkBody::empty()).unwrap();
        let asked = exhausted(http.call(request.try_into().unwrap()));
        let answer = tokio::time::timeout(Duration::from_secs(10), asked).await;
        let answer = answer.expect("it ended").unwrap();
        assert_eq!(answer.status().as_u16(), 200);
        close.notify_waiters();
        // The end of the connection comes, and nobody looks.
        let ended = async {
            while established(port) {
                tokio::task::yield_now().await;
            }
        };
        let ended = tokio::time::timeout(Duration::from_secs(10), ended).await;
        ended.expect("it ended");
    }
    server.abort();
}

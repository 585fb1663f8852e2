//! Marks of another tier's objects: found by whoever asks for that tier, on every shard, and no objects here.

use crate::directory::Marks as _;
use crate::redis::Marks;
use crate::testing::redis_server::{Server, open};
use crate::testing::suite::Sample;
use crate::{Cause, Tier};
use kvcachepool_protocol::object::ObjectName;

fn names(count: u64) -> Vec<ObjectName> {
    let name = |number| Sample::new(1, number, &[1]).name();
    (0..count).map(name).collect()
}

#[tokio::test]
async fn marks_are_found_on_every_shard_and_only_for_their_place() {
    let servers: Vec<Server> = (0..3).map(|_| Server::start(&[])).collect();
    let urls: Vec<String> = servers.iter().map(Server::tcp).collect();
    let (mine, other) = (
        Marks::new(open(&urls), "s3://one"),
        Marks::new(open(&urls), "s3://two"),
    );
    let all = names(100);
    mine.mark(&all[..60]).await.unwrap();
    mine.unmark(&all[..10]).await.unwrap();
    let there = Marks::new(open(&urls), "s3://one").marked(&all).await;
    let expected: Vec<bool> = (0..100).map(|at| (10..60).contains(&at)).collect();
    assert_eq!(there.unwrap(), expected);
    assert_eq!(other.marked(&all).await.unwrap(), [false; 100]);
    for server in &servers {
        assert_ne!(server.say(&["DBSIZE"]), "0", "each has its share");
    }
}

#[tokio::test]
async fn marks_live_for_a_week_and_are_neither_objects_nor_foreign() {
    let server = Server::start(&[]);
    let redis = open(&[server.tcp()]);
    let all = names(3);
    Marks::new(redis.clone(), "s3://one")
        .mark(&all)
        .await
        .unwrap();
    assert_eq!(redis.lookup(&all).await.unwrap(), [false; 3]);
    let page = redis.list(None, 10).await.unwrap();
    assert_eq!((page.objects.len(), page.foreign), (0, 0));
    let key = server.say(&["RANDOMKEY"]);
    let lives: u64 = server.say(&["TTL", &key]).parse().unwrap();
    assert!((604_700..=604_800).contains(&lives), "{key}: {lives}");
}

#[tokio::test]
async fn a_server_that_refuses_says_so() {
    let server = Server::start(&[]);
    server.say(&["CONFIG", "SET", "maxmemory", "1"]);
    let marks = Marks::new(open(&[server.tcp()]), "s3://one");
    assert!(marks.mark(&names(2)).await.is_err());
    assert_eq!(marks.marked(&names(2)).await.unwrap(), [false; 2]);
}

#[tokio::test]
async fn who_may_only_look_for_marks_is_told_so_over_the_same_connection() {
    let server = Server::start(&[]);
    server.say(&[
        "ACL", "SETUSER", "reader", "on", ">rights", "~kvcp:*", "+exists",
    ]);
    let all = names(3);
    let writer = Marks::new(open(&[server.unix()]), "s3://one");
    writer.mark(&all).await.unwrap();
    let url = format!("redis://reader:rights@127.0.0.1:{}", server.port);
    let reader = Marks::new(open(&[url]), "s3://one");
    let connections = || -> Vec<String> {
        let clients = server.say(&["CLIENT", "LIST", "TYPE", "normal"]);
        let readers = clients.lines().filter(|l| l.contains(" user=reader "));
        let id = |line: &str| line.split(' ').next().unwrap().to_string();
        readers.map(id).collect()
    };
    assert_eq!(reader.marked(&all).await, Ok(vec![true; 3]));
    let before = connections();
    assert_eq!(before.len(), 1);
    for _ in 0..3 {
        for refused in [reader.mark(&all).await, reader.unmark(&all).await] {
            let error = refused.unwrap_err();
            assert_eq!(error.cause, Cause::Denied, "{error}");
        }
        assert_eq!(reader.marked(&all).await, Ok(vec![true; 3]));
    }
    assert_eq!(connections(), before);
}

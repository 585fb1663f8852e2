//! What servers refuse, each with its name; and what is left of an operation that was refused.

use crate::redis::Redis;
use crate::redis::pool::Lane;
use crate::testing::redis_server::{Scripted, Server, Spot, open, settings, with_ttl};
use crate::testing::suite::Sample;
use crate::{Cause, Removal, Stored, Tier};

async fn put_fails(spot: &Spot, sample: &Sample) -> Option<Cause> {
    let put = spot.tier.put(sample.put(&spot.memory)).await;
    put.err().map(|e| e.cause)
}

#[tokio::test]
async fn a_full_server_takes_nothing_more_serves_what_it_holds_and_keeps_no_part() {
    let server = Server::start(&["--maxmemory", "8mb", "--maxmemory-policy", "noeviction"]);
    let spot = Spot::new(open(&[server.unix()]));
    let small = Sample::new(1, 0, &[1 << 20]);
    // Of the second one more answers are open when one of them says so.
    let large = [
        Sample::new(1, 1, &[9 << 20]),
        Sample::new(1, 2, &[75_000; 120]),
    ];
    spot.put(&small).await;
    let keys = server.say(&["DBSIZE"]);
    for large in &large {
        let put = spot.tier.put(large.put(&spot.memory)).await.unwrap_err();
        assert_eq!(put.cause, Cause::Full, "{put}");
        assert!(put.detail.contains("maxmemory"), "{put}");
        assert_eq!(
            server.say(&["DBSIZE"]),
            keys,
            "what was written of it is gone"
        );
        spot.check(&small).await;
        assert_eq!(spot.tier.lookup(&[large.name()]).await, Ok(vec![false]));
    }
    // Nothing of what is refused was there at any time, and what is there still is.
    let many: Vec<_> = (3..21)
        .map(|n| Sample::new(1, n, &[1_200_000, 5_000]))
        .collect();
    let mut full = 0;
    for sample in &many {
        let keys = server.say(&["DBSIZE"]);
        match put_fails(&spot, sample).await {
            None => continue,
            cause => assert_eq!(cause, Some(Cause::Full)),
        }
        full += 1;
        assert_eq!(server.say(&["DBSIZE"]), keys);
        assert_eq!(spot.tier.lookup(&[sample.name()]).await, Ok(vec![false]));
    }
    assert!(full > 10, "{full}");
    let mut other = small.clone();
    other.object.created_unix_ms += 1_000;
    let put = spot.tier.put(other.put(&spot.memory)).await;
    assert_eq!(put, Ok(Stored::Already));
    let usage = spot.tier.usage().await.unwrap();
    assert_eq!(usage.capacity_bytes, 8 << 20);
    // With room it is taken.
    server.say(&["CONFIG", "SET", "maxmemory", "64mb"]);
    for large in &large {
        spot.put(large).await;
        spot.check(large).await;
    }
}

#[tokio::test]
async fn a_replica_is_read_and_not_written() {
    let server = Server::start(&[]);
    let spot = Spot::new(open(&[server.unix()]));
    let sample = Sample::new(1, 0, &[5_000]);
    spot.put(&sample).await;
    server.say(&["REPLICAOF", "127.0.0.1", "1"]);
    let other = Sample::new(1, 1, &[5_000]);
    assert_eq!(put_fails(&spot, &other).await, Some(Cause::ReadOnly));
    spot.check(&sample).await;
    // It is the master again: the next operation finds out.
    server.say(&["REPLICAOF", "NO", "ONE"]);
    spot.put(&other).await;
}

#[tokio::test]
async fn what_is_connected_to_a_master_that_is_none_any_more_is_not_used_again() {
    let server = Server::start(&[]);
    let tier = open(&[server.unix()]);
    let node = tier.now().unwrap().servers.known().remove(0);
    let spot = Spot::new(tier);
    let in_use = node.take(Lane::Bytes).await.unwrap();
    server.say(&["REPLICAOF", "127.0.0.1", "1"]);
    let sample = Sample::new(1, 0, &[5_000]);
    assert_eq!(put_fails(&spot, &sample).await, Some(Cause::ReadOnly));
    drop(in_use);
    server.wait(&["CLIENT", "LIST", "TYPE", "normal"], |list| {
        list.lines().count() == 1
    });
    server.say(&["REPLICAOF", "NO", "ONE"]);
    // Those that were made afterwards stay, whatever an older one says late.
    spot.put(&sample).await;
    node.forget_connections(Some(0));
    assert_eq!(
        server
            .say(&["CLIENT", "LIST", "TYPE", "normal"])
            .lines()
            .count(),
        2
    );
}

/// Connections that the server took since it began, with the one that asks.
fn connected(server: &Server) -> u64 {
    let stats = server.say(&["INFO", "stats"]);
    let mut lines = stats
        .lines()
        .filter_map(|l| l.split_once("total_connections_received:"));
    lines.next().unwrap().1.trim().parse().unwrap()
}

#[tokio::test]
async fn who_may_watch_no_key_is_refused_over_the_same_connection() {
    for lacks in [&["-watch"][..], &["-watch", "-multi"]] {
        let server = Server::start(&[]);
        let user = [
            "ACL", "SETUSER", "blind", "on", ">rights", "~kvcp:*", "+@all",
        ];
        server.say(&[&user[..], lacks].concat());
        let spot = Spot::new(open(&[format!(
            "redis://blind:rights@127.0.0.1:{}",
            server.port
        )]));
        let sample = Sample::new(1, 0, &[3_000]);
        let refused = async || {
            let put = spot.tier.put(sample.put(&spot.memory)).await.unwrap_err();
            assert_eq!(put.cause, Cause::Denied, "{put}");
            assert!(put.detail.contains("watch"), "{put}");
        };
        refused().await;
        let before = connected(&server);
        for _ in 0..3 {
            refused().await;
        }
        // Only those that ask.
        assert_eq!(connected(&server), before + 1);
    }
}

#[tokio::test]
async fn who_may_not_let_objects_live_on_reads_over_the_same_connection() {
    let server = Server::start(&[]);
    let user = [
        "ACL",
        "SETUSER",
        "reader",
        "on",
        ">rights",
        "~kvcp:*",
        "+get",
        "+getrange",
    ];
    server.say(&user);
    let sample = Sample::new(1, 0, &[2 << 20]);
    Spot::new(open(&[server.unix()])).put(&sample).await;
    let url = format!("redis://reader:rights@127.0.0.1:{}", server.port);
    let spot = Spot::new(with_ttl(&[url]));
    spot.check(&sample).await;
    let before = connected(&server);
    for _ in 0..3 {
        spot.check(&sample).await;
    }
    // Only those that ask.
    assert_eq!(connected(&server), before + 1);
    let asked = server.say(&["INFO", "commandstats"]);
    let refused = asked
        .lines()
        .find(|l| l.contains("cmdstat_pexpire"))
        .unwrap();
    assert!(refused.contains("rejected_calls=6"), "{refused}");
}

#[tokio::test]
async fn no_password_a_wrong_one_and_too_few_rights_have_their_names() {
    let server = Server::start(&["--requirepass", "right"]);
    let say = |words: &[&str]| {
        let mut all = vec!["--no-auth-warning", "-a", "right"];
        all.extend(words);
        server.say(&all)
    };
    say(&[
        "ACL",
        "SETUSER",
        "reader",
        "on",
        ">rights",
        "~kvcp:*",
        "+get",
        "+getrange",
        "+exists",
        "+info",
    ]);
    say(&[
        "ACL",
        "SETUSER",
        "all",
        "on",
        ">rights",
        "~kvcp:*",
        "+@all",
        "-@dangerous",
        "+info",
    ]);
    let sample = Sample::new(1, 0, &[3 << 20]);
    let host = format!("127.0.0.1:{}", server.port);
    for (login, cause) in [
        ("", Some(Cause::Unauthenticated)),
        (":secret@", Some(Cause::Unauthenticated)),
        ("nobody:secret@", Some(Cause::Unauthenticated)),
        ("reader:rights@", Some(Cause::Denied)),
        ("all:rights@", None),
        (":right@", None),
    ] {
        let spot = Spot::new(open(&[format!("redis://{login}{host}")]));
        let put = spot.tier.put(sample.put(&spot.memory)).await;
        assert_eq!(put.as_ref().err().map(|e| e.cause), cause, "{login}");
        if let Err(e) = put {
            assert!(!e.to_string().contains("secret"), "{e}");
            assert!(e.detail.contains(&host), "{e}");
        }
    }
    // One who may only read does.
    let spot = Spot::new(open(&[format!("redis://reader:rights@{host}")]));
    spot.check(&sample).await;
    // A password where the server wants none.
    let open_server = Server::start(&[]);
    let spot = Spot::new(open(&[open_server.tcp().replace("://", "://:secret@")]));
    let usage = spot.tier.usage().await.unwrap_err();
    assert_eq!(usage.cause, Cause::Unauthenticated, "{usage}");
}

#[tokio::test]
async fn a_password_that_was_changed_is_read_again() {
    let server = Server::start(&["--requirepass", "old"]);
    let auth = tempfile::tempdir().unwrap();
    let mut with_files = settings(&[server.tcp()]);
    with_files.auth = Some(auth.path().into());
    let tier = Redis::open(&with_files).unwrap();
    let missing = tier.usage().await.unwrap_err();
    assert_eq!(missing.cause, Cause::Unauthenticated);
    assert!(
        missing.detail.contains("password: the file does not exist"),
        "{missing}"
    );
    std::fs::write(auth.path().join("password"), "old\n").unwrap();
    tier.usage().await.unwrap();
    let say = |password: &str, words: &[&str]| {
        let mut all = vec!["--no-auth-warning", "-a", password];
        all.extend(words);
        server.say(&all)
    };
    say("old", &["CONFIG", "SET", "requirepass", "new"]);
    // Connections stay; one that is new needs the new password.
    tier.usage().await.unwrap();
    say("new", &["CLIENT", "KILL", "TYPE", "normal"]);
    let refused = tier.usage().await.unwrap_err();
    assert_eq!(refused.cause, Cause::Unauthenticated, "{refused}");
    std::fs::write(auth.path().join("password"), "new").unwrap();
    tier.usage().await.unwrap();
}

#[tokio::test]
async fn a_new_password_may_reach_the_tier_before_its_servers() {
    let servers = [&["--requirepass", "old"]; 2].map(|args| Server::start(args));
    let auth = tempfile::tempdir().unwrap();
    let password = auth.path().join("password");
    std::fs::write(&password, "old").unwrap();
    let mut with_files = settings(&servers.each_ref().map(Server::tcp));
    with_files.auth = Some(auth.path().into());
    let tier = Redis::open(&with_files).unwrap();
    tier.usage().await.unwrap();
    let change = |server: &Server, known: &str, rules: &[&str]| {
        let login = ["--no-auth-warning", "-a", known];
        server.say(&[&login[..], &["ACL", "SETUSER", "default"], rules].concat());
        server.say(&[&login[..], &["CLIENT", "KILL", "TYPE", "normal"]].concat());
    };
    std::fs::write(&password, "new").unwrap();
    for server in &servers {
        change(server, "old", &[]);
    }
    tier.usage().await.unwrap();
    let clients = || {
        servers[0]
            .say(&["--no-auth-warning", "-a", "old", "CLIENT", "LIST"])
            .lines()
            .count()
    };
    assert_eq!(clients(), 2, "the connection is kept besides this one");
    // One server knows both by now, the other still only the old one.
    change(&servers[0], "old", &[">new"]);
    tier.usage().await.unwrap();
    change(&servers[1], "old", &["resetpass", ">new"]);
    change(&servers[0], "new", &["<old"]);
    tier.usage().await.unwrap();
}

#[tokio::test]
async fn a_node_of_a_cluster_a_missing_database_and_no_server_at_all_are_named() {
    let cluster = Server::start(&["--cluster-enabled", "yes"]);
    let sample = Sample::new(1, 0, &[5_000]);
    // It has no slots yet.
    let spot = Spot::new(open(&[cluster.tcp()]));
    let down = put_fails(&spot, &sample).await;
    assert_eq!(down, Some(Cause::Unreachable));
    cluster.say(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    cluster.wait(&["CLUSTER", "INFO"], |info| {
        info.contains("cluster_state:ok")
    });
    let spot = Spot::new(open(&[cluster.tcp()]));
    spot.put(&sample).await;
    let alone = Server::start(&[]);
    let no_cluster = open(&[alone.tcp().replace("redis", "redis-cluster")]);
    let config = no_cluster.usage().await.unwrap_err();
    assert_eq!(config.cause, Cause::Config, "{config}");
    let no_database = open(&[format!("{}/99", alone.tcp())]);
    assert_eq!(no_database.usage().await.unwrap_err().cause, Cause::Gone);
    let database = Spot::new(open(&[format!("{}?db=3", alone.unix())]));
    database.put(&sample).await;
    assert_eq!(alone.say(&["-n", "3", "DBSIZE"]), "2");
    let mut gone = Server::start(&[]);
    let tier = open(&[gone.tcp()]);
    tier.usage().await.unwrap();
    gone.kill();
    assert_eq!(tier.usage().await.unwrap_err().cause, Cause::Unreachable);
}

#[tokio::test]
async fn errors_that_pass_are_told_from_those_that_stay() {
    for (line, cause) in [
        (
            "-LOADING Redis is loading the dataset in memory",
            Cause::Unreachable,
        ),
        ("-MASTERDOWN Link with MASTER is down", Cause::Unreachable),
        ("-CLUSTERDOWN The cluster is down", Cause::Unreachable),
        (
            "-TRYAGAIN Multiple keys request during rehashing",
            Cause::Throttled,
        ),
        ("-BUSY Redis is busy running a script", Cause::Throttled),
        ("-ERR max number of clients reached", Cause::Throttled),
        ("-MOVED 1 127.0.0.1:1", Cause::Config),
        ("-MISCONF Errors writing to the disk", Cause::ReadOnly),
        ("-OOM command not allowed", Cause::Full),
        ("-ERR what", Cause::Protocol),
        ("HTTP/1.1 400 Bad Request", Cause::Protocol),
        ("$99999999999", Cause::Protocol),
        ("*9999999999", Cause::Protocol),
        (":1", Cause::Protocol),
    ] {
        let scripted = Scripted::start(line).await;
        let spot = Spot::new(open(&[scripted.url()]));
        let error = spot
            .tier
            .head(&Sample::new(1, 0, &[1]).name())
            .await
            .unwrap_err();
        assert_eq!(error.cause, cause, "{line}: {error}");
    }
}

#[tokio::test]
async fn what_others_keep_in_the_database_is_left_alone() {
    let server = Server::start(&[]);
    let spot = Spot::new(open(&[server.unix()]));
    let (sample, taken) = (Sample::new(1, 0, &[5_000]), Sample::new(1, 1, &[5_000]));
    spot.put(&sample).await;
    for key in ["theirs", "kvcp", "kvcp:theirs", "kvcp:a:b:c"] {
        server.say(&["SET", key, "value"]);
    }
    // A list under a name of ours.
    server.say(&["RPUSH", &taken.name().redis(), "value"]);
    let page = spot.tier.list(None, 100).await.unwrap();
    assert_eq!((page.objects.len(), page.foreign, page.next), (1, 3, None));
    let get = spot
        .tier
        .get(taken.get_all(&spot.memory))
        .await
        .unwrap_err();
    assert_eq!(get.cause, Cause::Foreign, "{get}");
    let all = [sample.name(), taken.name()];
    assert_eq!(spot.tier.remove(Removal::Named(&all)).await, Ok(1));
    assert_eq!(server.say(&["DBSIZE"]), "5");
    let put = spot.tier.put(taken.put(&spot.memory)).await;
    assert_eq!(put, Ok(Stored::Already));
    assert_eq!(server.say(&["DBSIZE"]), "5");
}

#[tokio::test]
async fn an_object_of_which_a_part_was_evicted_is_missing_and_the_rest_is_taken_away() {
    let server = Server::start(&[]);
    let spot = Spot::new(open(&[server.unix()]));
    let sample = Sample::new(1, 0, &[3 << 20, 5_000]);
    spot.put(&sample).await;
    let segment = server.say(&["KEYS", "*:1"]);
    assert_eq!(server.say(&["DEL", &segment]), "1");
    let get = spot
        .tier
        .get(sample.get_all(&spot.memory))
        .await
        .unwrap_err();
    assert_eq!(get.cause, Cause::Missing, "{get}");
    assert_eq!(server.say(&["DBSIZE"]), "0");
    assert_eq!(
        spot.tier.put(sample.put(&spot.memory)).await,
        Ok(Stored::New)
    );
    spot.check(&sample).await;
}

#[tokio::test]
async fn objects_live_for_their_time_and_reading_them_begins_it_anew() {
    let server = Server::start(&[]);
    let spot = Spot::new(with_ttl(&[server.unix()]));
    let sample = Sample::new(1, 0, &[2 << 20]);
    let keys = || -> Vec<String> {
        let keys = server.say(&["KEYS", "*"]);
        keys.lines().map(str::to_string).collect()
    };
    let lives = |key: &str| server.say(&["TTL", key]).parse::<i64>().unwrap();
    spot.put(&sample).await;
    assert_eq!(keys().len(), 6);
    for key in keys() {
        assert!((900..=1_000).contains(&lives(&key)), "{key}");
        server.say(&["EXPIRE", &key, "10"]);
    }
    assert_eq!(spot.tier.lookup(&[sample.name()]).await, Ok(vec![true]));
    assert!(
        keys().iter().all(|key| lives(key) <= 10),
        "a lookup is no use"
    );
    spot.check(&sample).await;
    assert!(keys().iter().all(|key| lives(key) > 900));
    // Without a time they stay.
    let forever = Spot::new(open(&[server.unix()]));
    forever.put(&Sample::new(1, 1, &[5_000])).await;
    let stay = keys().iter().filter(|key| lives(key) == -1).count();
    assert_eq!(stay, 2);
}

//! Requests to one server of the cluster.

use super::member::members;
use super::plan::Answer;
use crate::redis::auth::Login;
use crate::redis::connection::Connection;
use crate::redis::fault::Fault;
use crate::redis::node::Node;
use crate::redis::pool::{Lane, Lent};
use crate::redis::resp::Reply;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// Longest time of a request, connecting included.
const REQUEST_MAX: Duration = Duration::from_secs(3);
/// Longest time without progress of a transfer of keys. The server that sends them does nothing else meanwhile, and must not seem lost.
const STALL_MAX: &str = "2000";
/// Longest time of the whole transfer.
const TRANSFER_MAX: Duration = Duration::from_secs(10);
/// Keys per transfer. A server does nothing else meanwhile, and a value has up to 512 KiB.
const KEYS_MAX: &str = "16";

/// Sends a command whose reply may be any but an error.
pub async fn request(server: &Arc<Node>, words: &[&str]) -> Result<Reply, Fault> {
    limited(REQUEST_MAX, async {
        let mut lent = server.take(Lane::Questions).await?;
        send(&mut lent, words);
        lent.answer().await
    })
    .await
}

/// What a server says of itself and of the cluster.
pub async fn ask(server: &Arc<Node>) -> Result<Answer, Fault> {
    limited(REQUEST_MAX, async {
        let mut lent = server.take(Lane::Questions).await?;
        send(&mut lent, &["CLUSTER", "NODES"]);
        send(&mut lent, &["CLUSTER", "INFO"]);
        send(&mut lent, &["INFO", "replication"]);
        send(
            &mut lent,
            &["CONFIG", "GET", "cluster-announce-human-nodename"],
        );
        let nodes = text(&mut lent).await?;
        let cluster = text(&mut lent).await?;
        let replication = text(&mut lent).await?;
        let machine = lent.optional().await?;
        let bad = || Fault::protocol("unexpected reply to CLUSTER NODES: expected its members");
        let (own, members) = members(&nodes).ok_or_else(bad)?;
        let field = |of: &str| {
            let mut lines = replication.lines();
            lines.find_map(|line| line.strip_prefix(of)).unwrap_or("")
        };
        Ok(Answer {
            ip: lent.peer(),
            own,
            members,
            serves: cluster.lines().any(|line| line == "cluster_state:ok"),
            in_sync: field("role:") == "master" || field("master_link_status:") == "up",
            offset: field("slave_repl_offset:").parse().unwrap_or(0),
            machine: setting(&machine),
        })
    })
    .await
}

/// Where keys go, and as whom.
#[derive(Debug, Clone, Copy)]
pub struct Target<'a> {
    pub host: &'a str,
    pub port: u16,
    pub login: Option<&'a Login>,
}

/// Sends all keys of a slot to another server.
pub async fn transfer(server: &Arc<Node>, slot: &str, to: Target<'_>) -> Result<(), Fault> {
    loop {
        let keys = request(server, &["CLUSTER", "GETKEYSINSLOT", slot, KEYS_MAX]).await?;
        let Reply::Array(keys) = keys else {
            return Err(Fault::protocol(
                "unexpected reply to CLUSTER GETKEYSINSLOT: expected keys",
            ));
        };
        if keys.is_empty() {
            return Ok(());
        }
        let sent = send_keys(server, &keys, to, false).await;
        match sent {
            // An earlier transfer sent it, and its reply was lost.
            Err(Fault::Refused(text)) if text.contains("BUSYKEY") => {
                send_keys(server, &keys, to, true).await?;
            }
            sent => sent?,
        }
    }
}

async fn send_keys(
    server: &Arc<Node>,
    keys: &[Reply],
    to: Target<'_>,
    replace: bool,
) -> Result<(), Fault> {
    let port = to.port.to_string();
    let mut words: Vec<&[u8]> = vec![b"MIGRATE", to.host.as_bytes(), port.as_bytes(), b"", b"0"];
    words.push(STALL_MAX.as_bytes());
    if replace {
        words.push(b"REPLACE");
    }
    if let Some(login) = to.login {
        match &login.user {
            Some(user) => words.extend([&b"AUTH2"[..], user.as_bytes()]),
            None => words.push(b"AUTH"),
        }
        words.push(login.password.as_bytes());
    }
    words.push(b"KEYS");
    for key in keys {
        let Reply::Bulk(key) = key else {
            return Err(Fault::protocol("unexpected key: expected a bulk string"));
        };
        words.push(key);
    }
    limited(TRANSFER_MAX, async {
        let mut lent = server.take(Lane::Bytes).await?;
        lent.command(&words);
        lent.answer().await.map(drop)
    })
    .await
}

fn send(lent: &mut Lent, words: &[&str]) {
    let words: Vec<&[u8]> = words.iter().map(|word| word.as_bytes()).collect();
    lent.command(&words);
}

async fn text(connection: &mut Connection) -> Result<String, Fault> {
    match connection.answer().await? {
        Reply::Bulk(bytes) => {
            String::from_utf8(bytes).map_err(|_| Fault::protocol("a reply is not valid UTF-8"))
        }
        _ => Err(Fault::protocol("unexpected reply: expected text")),
    }
}

/// The value in a reply to CONFIG GET; empty if the server does not have the setting.
fn setting(reply: &Reply) -> String {
    let Reply::Array(parts) = reply else {
        return String::new();
    };
    match &parts[..] {
        [_, Reply::Bulk(value)] => String::from_utf8_lossy(value).into_owned(),
        _ => String::new(),
    }
}

async fn limited<T>(
    longest: Duration,
    work: impl Future<Output = Result<T, Fault>>,
) -> Result<T, Fault> {
    let late = |_| {
        let seconds = longest.as_secs();
        Err(Fault::unreachable(format!("no reply within {seconds} s")))
    };
    timeout(longest, work).await.unwrap_or_else(late)
}

//! Addresses, users and times of Redis.

use super::super::translation::{Draft, Fate};
use super::{OTHER_ADAPTER, Shared, number, of_adapter, shared, time, whole};
use kvcachepool_protocol::config::URL_BYTES;
use serde_yaml::Value;

/// Longest name of a master of Redis Sentinel.
const NAME_BYTES: usize = 253;
/// How long chunks stay in Redis without a read or a write, as in a new pool.
const TTL: &str = "24h";
const NO_REDIS: Fate = Fate::Automatic("It has no effect without a Redis.");

pub fn redis(draft: &mut Draft<'_>, scheme: &str, rest: &str) -> Fate {
    // A password may contain any character: it ends at the last @.
    let (login, place) = match rest.rsplit_once('@') {
        Some((login, place)) => (Some(login), place),
        None => (None, rest),
    };
    let (place, query) = place.split_once('?').unwrap_or((place, ""));
    let (hosts, path) = place.split_once('/').unwrap_or((place, ""));
    let of_valkey = scheme == "valkey";
    let tls = scheme == "rediss" || of_valkey && draft.flag("tls_enable");
    let of_cluster = draft.flag("cluster_mode") || draft.text("valkey_mode") == Some("cluster");
    let cluster = scheme == "redis-cluster" || of_valkey && of_cluster;
    let several = cluster || scheme == "redis-sentinel";
    if !hosts.split(',').all(is_host)
        || hosts.contains(',') && !several
        || hosts.len() > URL_BYTES / 2
    {
        return Fate::Bad(
            "a host and a port behind the scheme, such as redis://host:6379".to_owned(),
        );
    }
    let options = || query.split('&').filter(|option| !option.is_empty());
    let by_query = options().find_map(|option| option.strip_prefix("db="));
    let by_key = draft
        .get("valkey_database")
        .or_else(|| draft.get("database_id"));
    let database = match by_key.filter(|_| of_valkey) {
        Some(database) => whole(database),
        None => by_query.unwrap_or(path).to_owned(),
    };
    if !several && (database.len() > 4 || !database.bytes().all(|b| b.is_ascii_digit())) {
        return Fate::Bad(
            "the number of a database behind the host, such as redis://host:6379/0".to_owned(),
        );
    }
    let url = if cluster {
        let tls = if tls { "?tls=true" } else { "" };
        format!("redis-cluster://{hosts}{tls}")
    } else if several {
        let master = &draft.read.master;
        let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._".contains(&b);
        if master.is_empty() || master.len() > NAME_BYTES || !master.bytes().all(plain) {
            return Fate::Bad(
                "the master's name as REDIS_SERVICE_NAME, of letters, digits, -, . and _"
                    .to_owned(),
            );
        }
        format!("redis-sentinel://{hosts}/{master}")
    } else {
        let scheme = if tls { "rediss" } else { "redis" };
        let gap = if database.is_empty() { "" } else { "/" };
        format!("{scheme}://{hosts}{gap}{database}")
    };
    if options().any(|option| !option.starts_with("db=")) {
        draft.note(
            "Options behind the ? of remote_url are not taken over. Authorities for TLS are in shared.redis.external.ca."
                .to_owned(),
        );
    }
    draft.set("redis.urls", url);
    if given_ttl(draft).is_none() {
        draft.set("redis.ttl", TTL);
    }
    if login.is_some() {
        secret_of_redis(draft);
    }
    Fate::Translated
}

/// A name or an address, with a port or without one.
fn is_host(text: &str) -> bool {
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !text.ends_with(']') => (host, Some(port)),
        _ => (text, None),
    };
    let plain = |b: u8| b.is_ascii_alphanumeric() || b".-_:[]".contains(&b);
    let is_port = |port: &str| port.parse::<u16>().is_ok_and(|port| port > 0);
    !host.is_empty() && host.bytes().all(plain) && port.is_none_or(is_port)
}

fn secret_of_redis(draft: &mut Draft<'_>) -> Fate {
    let secret = draft.redis_secret.clone();
    draft.note(format!(
        "Create the Secret {secret} with the key password, and username if the server has users. \
         LMCache's config has the values; this command does not print them."
    ));
    draft.set("redis.auth", "")
}

/// A user or a password of Redis.
pub fn login(draft: &mut Draft<'_>, value: &Value) -> Fate {
    if value.as_str().is_some_and(str::is_empty) {
        return Fate::Automatic("The key is empty.");
    }
    match shared(draft) {
        Shared::Redis => secret_of_redis(draft),
        _ => NO_REDIS,
    }
}

/// The time after which objects expire, in seconds.
fn given_ttl<'a>(draft: &'a Draft<'_>) -> Option<&'a Value> {
    let of_valkey = || {
        draft
            .get("valkey_ttl_sec")
            .filter(|_| draft.flag("valkey_enable_ttl"))
    };
    draft.get("ttl_seconds").or_else(of_valkey)
}

pub fn ttl(draft: &mut Draft<'_>, value: &Value) -> Fate {
    match shared(draft) {
        Shared::Redis if given_ttl(draft).is_some() => draft.set("redis.ttl", time(number(value))),
        Shared::Redis => Fate::Automatic("It has no effect without valkey_enable_ttl."),
        _ => NO_REDIS,
    }
}

/// The host of the adapter `resp`.
pub fn resp_host(draft: &mut Draft<'_>, value: &Value) -> Fate {
    if draft.get("spec.l2Backend.raw.type").is_some() && !of_adapter(draft, &["resp"]) {
        return OTHER_ADAPTER;
    }
    let port = draft
        .get("spec.l2Backend.resp.port")
        .or_else(|| draft.get("port"));
    let port = port.map_or("6379".to_owned(), whole);
    let host = value.as_str().unwrap_or_default();
    match host.contains(':') {
        true => redis(draft, "resp", &format!("[{host}]:{port}")),
        false => redis(draft, "resp", &format!("{host}:{port}")),
    }
}

/// The nodes of the adapter `valkey`.
pub fn startup_nodes(draft: &mut Draft<'_>, value: &Value) -> Fate {
    if !of_adapter(draft, &["valkey"]) {
        return OTHER_ADAPTER;
    }
    let node = |node: &Value| {
        if let Some(node) = node.as_str() {
            return Some(node.to_owned());
        }
        let port = node.get("port").map_or("6379".to_owned(), whole);
        Some(format!("{}:{port}", node.get("host")?.as_str()?))
    };
    let nodes: Option<Vec<_>> = match value {
        Value::Sequence(nodes) => nodes.iter().map(node).collect(),
        Value::String(nodes) => Some(
            nodes
                .split(',')
                .map(|node| node.trim().to_owned())
                .collect(),
        ),
        _ => None,
    };
    match nodes.as_deref() {
        Some(nodes) if draft.flag("cluster_mode") => redis(draft, "valkey", &nodes.join(",")),
        Some([first, ..]) => redis(draft, "valkey", first),
        _ => Fate::Bad("a list of nodes with host and port".to_owned()),
    }
}

pub fn secret_name(draft: &mut Draft<'_>, value: &Value) -> Fate {
    draft.redis_secret = value.as_str().unwrap_or_default().to_owned();
    let secret = draft.redis_secret.clone();
    draft.note(format!(
        "The Secret {secret} must be in the pool's namespace, with the key password, and username if the server has users."
    ));
    draft.set("redis.auth", "")
}

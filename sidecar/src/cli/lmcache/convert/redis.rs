//! Addresses, users and times of Redis.

use super::super::translation::{Draft, Fate};
use super::{OTHER_ADAPTER, Shared, number, of_adapter, shared, time, whole};
use kvcachepool_protocol::config::URL_BYTES;
use serde_yaml::Value;
use std::net::Ipv6Addr;

/// Longest name of a master of Redis Sentinel.
const NAME_BYTES: usize = 253;
/// How long chunks stay in Redis without a read or a write, as in a new pool.
const TTL: &str = "24h";
const NO_REDIS: Fate = Fate::Automatic("It has no effect without a Redis.");

pub fn redis(draft: &mut Draft<'_>, scheme: &str, rest: &str) -> Fate {
    // Like redis-py: hosts end at the first of these, and a password at the last @ before them.
    let (authority, tail) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let (login, hosts) = match authority.rsplit_once('@') {
        Some((login, hosts)) => (Some(login), hosts),
        None => (None, authority),
    };
    let tail = tail.split_once('#').map_or(tail, |(tail, _)| tail);
    let (path, query) = tail.split_once('?').unwrap_or((tail, ""));
    let path = path.trim_start_matches('/');
    let of_valkey = scheme == "valkey";
    let tls = scheme == "rediss" || of_valkey && draft.flag("tls_enable");
    let of_cluster = draft.flag("cluster_mode") || draft.text("valkey_mode") == Some("cluster");
    let cluster = scheme == "redis-cluster" || of_valkey && of_cluster;
    let several = cluster || scheme == "redis-sentinel";
    // A part of a password must not be taken for a host.
    let of_one = login.is_none_or(|login| !several || !login.contains('@'));
    if tail.contains('@') || !of_one {
        return Fate::Bad(
            "one user and password before all hosts, with any @ / ? and # in them as %40 %2F %3F and %23".to_owned(),
        );
    }
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
    let by_option = |option: &str| {
        let login = ["username=", "password="];
        login.iter().any(|name| option.starts_with(name))
    };
    let has_login = login.is_some() || options().any(by_option);
    if options().any(|option| !option.starts_with("db=") && !by_option(option)) {
        draft.note(
            "Options behind the ? of remote_url are not taken over. Authorities for TLS are in shared.redis.external.ca."
                .to_owned(),
        );
    }
    if draft.has_other("redis.urls", &url) {
        return Fate::Bad("the address of Redis once: another key has another one".to_owned());
    }
    draft.set("redis.urls", url);
    if given_ttl(draft).is_none() {
        draft.set("redis.ttl", TTL);
    }
    if has_login {
        secret_of_redis(draft);
    }
    Fate::Translated
}

/// A name or an address, with a port or without one.
fn is_host(text: &str) -> bool {
    let is_port = |port: &str| port.parse::<u16>().is_ok_and(|port| port > 0);
    if let Some((address, port)) = text.strip_prefix('[').and_then(|t| t.split_once(']')) {
        let port = port.is_empty() || port.strip_prefix(':').is_some_and(is_port);
        return address.parse::<Ipv6Addr>().is_ok() && port;
    }
    let (host, port) = match text.split_once(':') {
        Some((host, port)) => (host, Some(port)),
        None => (text, None),
    };
    let plain = |b: u8| b.is_ascii_alphanumeric() || b".-_".contains(&b);
    !host.is_empty() && host.bytes().all(plain) && port.is_none_or(is_port)
}

fn secret_of_redis(draft: &mut Draft<'_>) -> Fate {
    let secret = draft.redis_secret.clone();
    draft.note(format!(
        "Create the Secret {secret} with the key password, and username if the server has users. \
         LMCache's config has the values; this command does not print them."
    ));
    draft.set("redis.auth", secret)
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
    let place = match host.parse::<Ipv6Addr>() {
        Ok(_) => format!("[{host}]:{port}"),
        Err(_) => format!("{host}:{port}"),
    };
    match is_host(&place) {
        true => redis(draft, "resp", &place),
        false => Fate::Bad("the name or the address of a host, without a port".to_owned()),
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
    draft.set("redis.auth", secret)
}

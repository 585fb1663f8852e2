//! Parses server URLs. Error messages never contain the URL's user and password.

use super::auth::{Auth, Login};
use std::fmt;
use std::path::PathBuf;

/// Default port of Redis.
const PORT: u16 = 6379;
/// Default port of Sentinel.
const SENTINEL_PORT: u16 = 26379;

/// Address of a server.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Address {
    /// Host name or IP address without brackets, and port.
    Tcp(String, u16),
    Unix(PathBuf),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(host, port) if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp(host, port) => write!(f, "{host}:{port}"),
            Self::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

/// Connection settings of a URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct How {
    pub tls: bool,
    /// Number of the database.
    pub database: u32,
    pub auth: Auth,
}

/// Servers of a list of URLs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Servers {
    /// Independent servers.
    Shards(Vec<(Address, How)>),
    /// The master of this name, according to these sentinels.
    Sentinel(Vec<Address>, String, How),
    /// Some nodes of a cluster.
    Cluster(Vec<Address>, How),
}

/// Parses the URLs of one tier.
pub fn servers(urls: &[String]) -> Result<Servers, String> {
    if let [url] = urls {
        return one(url);
    }
    let mut shards: Vec<(Address, How)> = Vec::new();
    for url in urls {
        match one(url)? {
            Servers::Shards(more) => shards.extend(more),
            _ => {
                return Err(
                    "a redis-sentinel:// or redis-cluster:// URL must be the only one: it names all of its servers"
                        .into(),
                );
            }
        }
    }
    let mut names: Vec<&Address> = shards.iter().map(|(address, _)| address).collect();
    names.sort_unstable();
    if let Some([twice, _]) = names.array_windows().find(|[a, b]| a == b) {
        return Err(format!(
            "{twice} is listed twice; every shard must be a different server"
        ));
    }
    if shards.is_empty() {
        return Err("no URL; write at least one such as redis://host:6379".into());
    }
    Ok(Servers::Shards(shards))
}

fn one(url: &str) -> Result<Servers, String> {
    let (scheme, rest) = url
        .split_once("://")
        .ok_or("no URL; write one such as redis://host:6379")?;
    // The password may contain any character: it ends at the last @.
    let (credentials, rest) = match rest.rsplit_once('@') {
        Some((credentials, rest)) => (Some(credentials), rest),
        None => (None, rest),
    };
    let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
    let mut how = How {
        tls: scheme == "rediss",
        database: 0,
        auth: login(credentials)?,
    };
    let mut sure_of_tls = false;
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        match pair.split_once('=') {
            Some(("db", number)) if scheme == "redis+unix" => how.database = database(number)?,
            Some(("tls", "true")) if scheme.starts_with("redis-") => sure_of_tls = true,
            // The option's text may be part of a password, so it is not repeated.
            _ => {
                return Err(
                    "unknown option after the ?: expected db=<number> for redis+unix, or tls=true for redis-sentinel and redis-cluster; write a ? in a password as %3F"
                        .into(),
                );
            }
        }
    }
    how.tls |= sure_of_tls;
    match scheme {
        "redis+unix" if place.starts_with('/') => Ok(Servers::Shards(vec![(
            Address::Unix(decoded(place)?.into()),
            how,
        )])),
        "redis+unix" => {
            Err("write the whole path of the socket: redis+unix:///run/redis.sock".into())
        }
        "redis" | "rediss" => {
            let (host, number) = place.split_once('/').unwrap_or((place, ""));
            how.database = database(number)?;
            Ok(Servers::Shards(vec![(tcp(host, PORT)?, how)]))
        }
        "redis-sentinel" => {
            let (hosts, master) = place.split_once('/').unwrap_or((place, ""));
            let (master, number) = master.split_once('/').unwrap_or((master, ""));
            how.database = database(number)?;
            if master.is_empty() {
                return Err("write the master's name behind its sentinels: redis-sentinel://host:26379,host:26379/name".into());
            }
            Ok(Servers::Sentinel(
                list(hosts, SENTINEL_PORT)?,
                decoded(master)?,
                how,
            ))
        }
        "redis-cluster" => {
            let hosts = place.strip_suffix('/').unwrap_or(place);
            Ok(Servers::Cluster(list(hosts, PORT)?, how))
        }
        // Not repeated: it may be a misplaced secret.
        _ => Err(
            "the scheme must be redis, rediss, redis+unix, redis-sentinel or redis-cluster".into(),
        ),
    }
}

fn list(hosts: &str, port: u16) -> Result<Vec<Address>, String> {
    hosts.split(',').map(|host| tcp(host, port)).collect()
}

fn tcp(text: &str, port: u16) -> Result<Address, String> {
    let wrong = || "write a host and a port: host:6379, 10.0.0.1:6379 or [::1]:6379".to_string();
    let (host, number) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, behind) = rest.split_once(']').ok_or_else(wrong)?;
            let number = match behind {
                "" => None,
                _ => Some(behind.strip_prefix(':').ok_or_else(wrong)?),
            };
            (host, number)
        }
        None => match text.split_once(':') {
            Some((host, number)) => (host, Some(number)),
            None => (text, None),
        },
    };
    let port = match number {
        Some(number) => number.parse().map_err(|_| wrong())?,
        None => port,
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':' | '%');
    if host.is_empty() || port == 0 || !host.chars().all(plain) {
        return Err(wrong());
    }
    Ok(Address::Tcp(host.into(), port))
}

fn database(text: &str) -> Result<u32, String> {
    match text {
        "" => Ok(0),
        _ => text
            .parse()
            .map_err(|_| "the database is a number: redis://host:6379/0".into()),
    }
}

fn login(text: Option<&str>) -> Result<Auth, String> {
    let Some(text) = text else {
        return Ok(Auth::None);
    };
    let Some((user, password)) = text.split_once(':') else {
        return Err("write user and password as user:password@ or :password@".into());
    };
    let user = decoded(user)?;
    Ok(Auth::Given(Login {
        user: (!user.is_empty()).then_some(user),
        password: decoded(password)?,
    }))
}

/// Decodes `%40` and the like.
fn decoded(text: &str) -> Result<String, String> {
    let wrong = || {
        "two hex digits must follow a % in a URL, and the decoded text must be UTF-8".to_string()
    };
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            out.push(byte);
            continue;
        }
        let mut digit = || char::from(bytes.next()?).to_digit(16);
        let pair = digit().zip(digit()).ok_or_else(wrong)?;
        out.push((pair.0 * 16 + pair.1) as u8);
    }
    String::from_utf8(out).map_err(|_| wrong())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(urls: &[&str]) -> Result<Servers, String> {
        servers(&urls.iter().map(|u| u.to_string()).collect::<Vec<_>>())
    }

    fn host(name: &str, port: u16) -> Address {
        Address::Tcp(name.into(), port)
    }

    fn how() -> How {
        How {
            tls: false,
            database: 0,
            auth: Auth::None,
        }
    }

    #[test]
    fn urls_are_read_as_people_write_them() {
        let login = |user: Option<&str>, password: &str| {
            Auth::Given(Login {
                user: user.map(str::to_string),
                password: password.into(),
            })
        };
        for (url, address, expected) in [
            ("redis://a", host("a", 6379), how()),
            ("redis://a:1/", host("a", 1), how()),
            (
                "redis://10.0.0.1:7/3",
                host("10.0.0.1", 7),
                How {
                    database: 3,
                    ..how()
                },
            ),
            ("redis://[fd00::1]:7", host("fd00::1", 7), how()),
            ("redis://[::1]", host("::1", 6379), how()),
            (
                "rediss://u:p%40%2F@a:1",
                host("a", 1),
                How {
                    tls: true,
                    auth: login(Some("u"), "p@/"),
                    ..how()
                },
            ),
            (
                "redis://:p@ss@a",
                host("a", 6379),
                How {
                    auth: login(None, "p@ss"),
                    ..how()
                },
            ),
            (
                "redis://u:p?s=s/#@a",
                host("a", 6379),
                How {
                    auth: login(Some("u"), "p?s=s/#"),
                    ..how()
                },
            ),
            (
                "redis+unix:///run/r.sock?db=2",
                Address::Unix("/run/r.sock".into()),
                How {
                    database: 2,
                    ..how()
                },
            ),
        ] {
            let read = read(&[url]);
            assert_eq!(
                read,
                Ok(Servers::Shards(vec![(address, expected)])),
                "{url}"
            );
        }
        assert_eq!(
            read(&["redis-sentinel://a,[::1]:2,c:3/the-one?tls=true"]),
            Ok(Servers::Sentinel(
                vec![host("a", 26379), host("::1", 2), host("c", 3)],
                "the-one".into(),
                How { tls: true, ..how() },
            ))
        );
        assert_eq!(
            read(&["redis-cluster://a:1,b:2"]),
            Ok(Servers::Cluster(vec![host("a", 1), host("b", 2)], how()))
        );
        let three = read(&["redis://a:1", "rediss://b:2", "redis+unix:///c"]);
        let Ok(Servers::Shards(three)) = three else {
            panic!("{three:?}");
        };
        assert_eq!(three.len(), 3);
        assert_eq!(host("::1", 7).to_string(), "[::1]:7");
    }

    #[test]
    fn what_is_wrong_is_said_without_what_may_be_secret() {
        for (urls, expected) in [
            (&[][..], "no URL"),
            (&["secret"], "no URL"),
            (&["http://u:secret@a"], "must be redis"),
            (&["redis://u:secret@"], "host and a port"),
            (&["redis://u:secret@a:x"], "host and a port"),
            (&["redis://u:secret@a:0"], "host and a port"),
            (&["redis://u:secret@[::1"], "host and a port"),
            (&["redis://u:secret@[::1]7"], "host and a port"),
            (&["redis://u:secret@a b"], "host and a port"),
            (&["redis://u:secret@a/x"], "number"),
            (&["redis://secret@a"], "user:password@"),
            (&["redis://u:secret%4@a"], "two hex digits"),
            (&["redis://u:secret@a?x=1"], "unknown option"),
            (&["redis://u:p?secret"], "unknown option"),
            (&["redis://u:1?secret=1"], "unknown option"),
            (&["redis://a?secret"], "unknown option"),
            (&["redis://u?secret=1@a"], "user:password@"),
            (&["u:secret@redis://a"], "must be redis"),
            (&["secret://a"], "must be redis"),
            (&["redis+unix://secret"], "whole path"),
            (&["redis-sentinel://u:secret@a"], "master's name"),
            (
                &["redis-cluster://u:secret@a", "redis://b"],
                "must be the only one",
            ),
            (
                &["redis://u:secret@a", "redis://a:6379"],
                "a:6379 is listed twice",
            ),
        ] {
            let error = read(urls).unwrap_err();
            assert!(error.contains(expected), "{urls:?}: {error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn nothing_that_is_printed_shows_a_password() {
        let read = read(&["redis://u:secret@a"]).unwrap();
        assert!(!format!("{read:?}").contains("secret"));
    }

    proptest! {
        #[test]
        fn any_text_gives_addresses_that_are_printed_as_they_are_written_or_an_error(
            scheme in "rediss?|redis\\+unix|redis-(sentinel|cluster)|[a-z]?", rest in "[a-c0-9.:@%/?=,\\[\\]é-]{0,40}",
        ) {
            let addresses: Vec<Address> = match read(&[&format!("{scheme}://{rest}")]) {
                Ok(Servers::Shards(shards)) => shards.into_iter().map(|(address, _)| address).collect(),
                Ok(Servers::Sentinel(addresses, _, _) | Servers::Cluster(addresses, _)) => addresses,
                Err(_) => vec![],
            };
            for address in addresses {
                if let Address::Tcp(..) = address {
                    let again = read(&[&format!("redis://{address}")]);
                    prop_assert_eq!(again, Ok(Servers::Shards(vec![(address, how())])));
                }
            }
        }
    }
}

//! Lists the objects in a server over one connection, and reads its memory use.

use super::connection::Connection;
use super::fault::{Fault, redirect};
use super::marks::is_mark;
use super::objects::exist;
use super::publish::STAGED;
use super::record::{RECORD_BYTES, Record};
use super::resp::Reply;
use crate::{Cause, Kind, Listed, TierError, Usage};
use kvcachepool_protocol::object::{ObjectName, REDIS_PREFIX};
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// Range of keys that the server checks per SCAN.
const COUNTS: std::ops::RangeInclusive<usize> = 100..=1_000;

/// Position of a listing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Place {
    /// Index of the server.
    pub server: usize,
    /// Keys that were found and are not returned yet.
    pub found: Vec<String>,
    /// Cursor of SCAN; `None` after the last key.
    pub cursor: Option<u64>,
}

impl Place {
    /// The beginning of a server.
    pub fn of(server: usize) -> Self {
        Self {
            server,
            found: Vec::new(),
            cursor: Some(0),
        }
    }

    /// Whether this server is finished.
    pub fn is_done(&self) -> bool {
        self.found.is_empty() && self.cursor.is_none()
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cursor = self.cursor.map_or_else(String::new, |at| at.to_string());
        write!(f, "{}/{cursor}/{}", self.server, self.found.join(","))
    }
}

impl FromStr for Place {
    type Err = TierError;

    fn from_str(text: &str) -> Result<Self, TierError> {
        let bad = || TierError::new(Kind::Redis, Cause::Shape, "invalid page token");
        let mut parts = text.splitn(3, '/');
        let mut next = || parts.next().ok_or_else(bad);
        let (server, cursor, found) = (next()?, next()?, next()?);
        let number = |text: &str| text.parse().map_err(|_| bad());
        Ok(Self {
            server: server.parse().map_err(|_| bad())?,
            cursor: match cursor {
                "" => None,
                at => Some(number(at)?),
            },
            found: found
                .split(',')
                .filter(|key| !key.is_empty())
                .map(str::to_string)
                .collect(),
        })
    }
}

/// Finds keys of objects and advances the position. Returns the number of foreign keys with our prefix. Segments without a header get an
/// expiry.
pub async fn find(c: &mut Connection, place: &mut Place, wanted: usize) -> Result<u64, Fault> {
    let Some(cursor) = place.cursor else {
        return Ok(0);
    };
    let (at, pattern) = (cursor.to_string(), format!("{REDIS_PREFIX}*"));
    let count = wanted.clamp(*COUNTS.start(), *COUNTS.end()).to_string();
    c.command(&[
        b"SCAN",
        at.as_bytes(),
        b"MATCH",
        pattern.as_bytes(),
        b"COUNT",
        count.as_bytes(),
    ]);
    let strange = || Fault::protocol("unexpected reply to SCAN: expected keys");
    let Reply::Array(parts) = c.answer().await? else {
        return Err(strange());
    };
    let [Reply::Bulk(next), Reply::Array(keys)] = &parts[..] else {
        return Err(strange());
    };
    let next = std::str::from_utf8(next).ok().and_then(|n| n.parse().ok());
    let next: u64 = next.ok_or_else(strange)?;
    let (mut foreign, mut segments) = (0, BTreeMap::<_, Vec<_>>::new());
    for key in keys {
        let Reply::Bulk(key) = key else {
            return Err(strange());
        };
        let key = String::from_utf8_lossy(key).into_owned();
        match ObjectName::from_redis(&key) {
            Ok((name, true)) => segments.entry(name.redis()).or_default().push(key),
            Ok((_, false)) => place.found.push(key),
            Err(_) if is_mark(&key) => {}
            Err(_) => foreign += 1,
        }
    }
    place.found.sort_unstable();
    place.found.dedup();
    place.cursor = (next != 0).then_some(next);
    expire_lost(c, segments).await?;
    Ok(foreign)
}

/// Lets the segments of absent headers expire. The server evicts keys one by one, and nothing finds what is left of an object without its
/// header. Segments of a write in progress expire sooner, and their expiry is not changed.
async fn expire_lost(
    c: &mut Connection,
    segments: BTreeMap<String, Vec<String>>,
) -> Result<(), Fault> {
    let heads: Vec<String> = segments.keys().cloned().collect();
    let there = exist(c, &heads).await?;
    // While a slot of a cluster moves, a header may be on the other node, which is an error here.
    let lost = segments.into_values().zip(there);
    let lost = lost.filter(|(_, there)| matches!(there, Ok(false)));
    let lost: Vec<String> = lost.flat_map(|(keys, _)| keys).collect();
    // Not shorter than that of segments whose header is not written yet.
    let expiry = STAGED.as_millis().to_string();
    for key in &lost {
        c.command(&[b"PEXPIRE", key.as_bytes(), expiry.as_bytes(), b"LT"]);
    }
    for _ in &lost {
        // Only users who may write can do this, and only servers from version 7 on.
        c.renewed().await?;
    }
    Ok(())
}

/// Describes the objects of these keys. Returns the number of foreign keys.
pub async fn describe(
    c: &mut Connection,
    keys: &[String],
    into: &mut Vec<Listed>,
) -> Result<u64, Fault> {
    let mut elsewhere = Vec::new();
    let foreign = records(c, keys, into, &mut elsewhere).await?;
    if elsewhere.is_empty() {
        return Ok(foreign);
    }
    // A node that a slot is being moved to has some of its keys, and returns them only after ASKING.
    c.set_asking(true);
    let asked = records(c, &elsewhere, into, &mut Vec::new()).await;
    c.set_asking(false);
    Ok(foreign + asked?)
}

/// Like `describe`, without the keys that the server redirects to `elsewhere`.
async fn records(
    c: &mut Connection,
    keys: &[String],
    into: &mut Vec<Listed>,
    elsewhere: &mut Vec<String>,
) -> Result<u64, Fault> {
    let last = (RECORD_BYTES - 1).to_string();
    for key in keys {
        c.command(&[b"GETRANGE", key.as_bytes(), b"0", last.as_bytes()]);
    }
    let mut foreign = 0;
    for key in keys {
        let reply = c.reply().await?;
        let Ok((name, false)) = ObjectName::from_redis(key) else {
            foreign += 1;
            continue;
        };
        match reply {
            // Removed in the meantime.
            Reply::Bulk(value) if value.is_empty() => {}
            Reply::Bulk(value) => {
                // An object with an invalid record is listed too, so that it can be found and removed.
                let record = Record::read(&value);
                into.push(Listed {
                    name,
                    bytes: record.map_or(0, |r| r.bytes.get()),
                    written_unix_s: record.map_or(0, |r| r.written_unix_s.get()),
                });
            }
            Reply::Error(text) if text.starts_with("WRONGTYPE") => foreign += 1,
            Reply::Error(text) if redirect(&text).is_some() => elsewhere.push(key.clone()),
            Reply::Error(text) => return Err(Fault::Refused(text)),
            _ => {
                return Err(Fault::protocol(
                    "unexpected reply to GETRANGE: expected a bulk string",
                ));
            }
        }
    }
    Ok(foreign)
}

/// Used memory and memory limit of a server.
pub async fn memory(c: &mut Connection) -> Result<Usage, Fault> {
    c.command(&[b"INFO", b"memory"]);
    let Reply::Bulk(text) = c.answer().await? else {
        return Err(Fault::protocol("unexpected reply to INFO: expected text"));
    };
    let text = String::from_utf8_lossy(&text);
    let field = |name: &str| {
        let mut lines = text.lines().filter_map(|line| line.split_once(':'));
        let value = lines.find(|(key, _)| *key == name)?.1;
        value.trim().parse::<u64>().ok()
    };
    let bytes = field("used_memory")
        .ok_or_else(|| Fault::protocol("the reply to INFO lacks used_memory"))?;
    Ok(Usage {
        objects: 0,
        bytes,
        capacity_bytes: field("maxmemory").unwrap_or(0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_place_reads_back_and_other_texts_are_none() {
        for place in [
            Place::of(0),
            Place {
                server: 3,
                cursor: Some(u64::MAX),
                found: vec!["kvcp:a:b:{c}.exact".into(), "kvcp:a:b:{d}.exact".into()],
            },
            Place {
                server: 1,
                cursor: None,
                found: vec!["kvcp:a:b:{c}.exact".into()],
            },
        ] {
            assert_eq!(place.to_string().parse(), Ok(place));
        }
        for wrong in ["", "1", "1/2", "x/1/", "1/x/", "1/-1/"] {
            assert!(wrong.parse::<Place>().is_err(), "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_place_that_reads_back_or_an_error(text in "[0-9]{0,3}/?[0-9]{0,21}/?[ -~é,]{0,40}") {
            if let Ok(place) = text.parse::<Place>() {
                prop_assert_eq!(place.to_string().parse(), Ok(place));
            }
        }
    }
}

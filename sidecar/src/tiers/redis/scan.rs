//! Listings and sums: SCAN through one server after the other, INFO of all.

use super::connection::Connection;
use super::fault::Fault;
use super::record::{RECORD_BYTES, Record};
use super::resp::Reply;
use crate::tiers::{Cause, Kind, Listed, TierError, Usage};
use kvcachepool_protocol::object::{ObjectName, REDIS_PREFIX};
use std::fmt;
use std::str::FromStr;

/// Keys that the server looks at for one answer.
const COUNT: &str = "1000";

/// Where a listing goes on.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Place {
    /// Which server.
    pub server: usize,
    /// SCAN's own place in it.
    pub cursor: u64,
    /// Of what the cursor gives, keys up to this one were told.
    pub after: String,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.server, self.cursor, self.after)
    }
}

impl FromStr for Place {
    type Err = TierError;

    fn from_str(text: &str) -> Result<Self, TierError> {
        let bad = || TierError::new(Kind::Redis, Cause::Shape, "no page ended there");
        let mut parts = text.splitn(3, '/');
        let mut next = || parts.next().ok_or_else(bad);
        Ok(Self {
            server: next()?.parse().map_err(|_| bad())?,
            cursor: next()?.parse().map_err(|_| bad())?,
            after: next()?.to_string(),
        })
    }
}

/// What one answer of SCAN gives.
#[derive(Debug, Default)]
pub struct Part {
    /// Objects, in order of their keys.
    pub objects: Vec<Listed>,
    /// Keys with our prefix that are none of ours.
    pub foreign: u64,
    /// SCAN's next place; 0 = there is none.
    pub cursor: u64,
}

/// Objects at a cursor whose keys lie behind `after`.
pub async fn part(c: &mut Connection, cursor: u64, after: &str) -> Result<Part, Fault> {
    let (at, pattern) = (cursor.to_string(), format!("{REDIS_PREFIX}*"));
    c.command(&[
        b"SCAN",
        at.as_bytes(),
        b"MATCH",
        pattern.as_bytes(),
        b"COUNT",
        COUNT.as_bytes(),
    ]);
    let strange = || Fault::protocol("SCAN was answered by no keys");
    let Reply::Array(parts) = c.answer().await? else {
        return Err(strange());
    };
    let [Reply::Bulk(next), Reply::Array(keys)] = &parts[..] else {
        return Err(strange());
    };
    let next = std::str::from_utf8(next).ok().and_then(|n| n.parse().ok());
    let mut part = Part {
        cursor: next.ok_or_else(strange)?,
        ..Part::default()
    };
    let mut heads: Vec<(String, ObjectName)> = Vec::new();
    for key in keys {
        let Reply::Bulk(key) = key else {
            return Err(strange());
        };
        let key = String::from_utf8_lossy(key).into_owned();
        match ObjectName::from_redis(&key) {
            Ok((_, true)) => {}
            Ok((name, false)) if key.as_str() > after => heads.push((key, name)),
            Ok(_) => {}
            // Told once, with what the cursor gives first.
            Err(_) if after.is_empty() => part.foreign += 1,
            Err(_) => {}
        }
    }
    heads.sort_unstable_by(|a, b| a.0.cmp(&b.0));
    heads.dedup_by(|a, b| a.0 == b.0);
    let last = (RECORD_BYTES - 1).to_string();
    for (key, _) in &heads {
        c.command(&[b"GETRANGE", key.as_bytes(), b"0", last.as_bytes()]);
    }
    for (_, name) in heads {
        match c.reply().await? {
            // It went meanwhile.
            Reply::Bulk(value) if value.is_empty() => {}
            Reply::Bulk(value) => {
                // One whose record is none is listed too: so it can be found and removed.
                let record = Record::read(&value);
                part.objects.push(Listed {
                    name,
                    bytes: record.map_or(0, |r| r.bytes.get()),
                    written_unix_s: record.map_or(0, |r| r.written_unix_s.get()),
                });
            }
            Reply::Error(text) if text.starts_with("WRONGTYPE") => part.foreign += 1,
            Reply::Error(text) => return Err(Fault::Refused(text)),
            _ => return Err(strange()),
        }
    }
    Ok(part)
}

/// Memory of a server: what it uses, and what it may.
pub async fn memory(c: &mut Connection) -> Result<Usage, Fault> {
    c.command(&[b"INFO", b"memory"]);
    let Reply::Bulk(text) = c.answer().await? else {
        return Err(Fault::protocol("INFO was answered by no text"));
    };
    let text = String::from_utf8_lossy(&text);
    let field = |name: &str| {
        let mut lines = text.lines().filter_map(|line| line.split_once(':'));
        let value = lines.find(|(key, _)| *key == name)?.1;
        value.trim().parse::<u64>().ok()
    };
    let bytes =
        field("used_memory").ok_or_else(|| Fault::protocol("INFO does not tell used_memory"))?;
    Ok(Usage {
        objects: 0,
        bytes,
        capacity_bytes: field("maxmemory").unwrap_or(0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_reads_back_and_other_texts_are_none() {
        for place in [
            Place::default(),
            Place {
                server: 3,
                cursor: u64::MAX,
                after: "kvcp:a/b".into(),
            },
        ] {
            assert_eq!(place.to_string().parse(), Ok(place));
        }
        for wrong in ["", "1", "1/2", "x/1/", "1/x/", "1/-1/"] {
            assert!(wrong.parse::<Place>().is_err(), "{wrong}");
        }
    }
}

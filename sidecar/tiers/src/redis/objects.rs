//! Finds, reads and removes objects over one connection.

use super::connection::{Connection, Fetched, Words};
use super::fault::Fault;
use super::record::{NAMES_MAX, Piece, RECORD_BYTES, Record, pieces};
use super::resp::Reply;
use super::window::Window;
use crate::{Cause, Get, Running, Span};
use kvcachepool_protocol::object::{
    HEADER_BYTES, MAX_SECTIONS, MAX_TOKENS, Object, ObjectName, digest,
};

/// Longest value that can be a record and a header.
const VALUE_BYTES_MAX: usize =
    RECORD_BYTES + HEADER_BYTES + 64 * MAX_SECTIONS + 36 * MAX_TOKENS as usize + 4096;

/// An object that was found, and its record.
#[derive(Debug, Clone)]
pub struct Found {
    pub object: Object,
    pub record: Record,
}

/// Result of a get without an error.
#[derive(Debug)]
pub enum Got {
    /// All sections are in their places.
    All(Box<Object>),
    /// The header exists and a segment does not: the server evicted or lost it.
    Hole(Record),
}

fn missing() -> Fault {
    Fault::Of(Cause::Missing, "the object does not exist".into())
}

/// Whether each of these keys exists, in order.
pub async fn exist(c: &mut Connection, keys: &[String]) -> Result<Vec<Result<bool, Fault>>, Fault> {
    for key in keys {
        c.command(&[b"EXISTS", key.as_bytes()]);
    }
    let mut there = Vec::with_capacity(keys.len());
    for _ in keys {
        there.push(match c.reply().await? {
            Reply::Integer(n) => Ok(n > 0),
            Reply::Error(text) => Err(Fault::Refused(text)),
            _ => {
                return Err(Fault::protocol(
                    "unexpected reply to EXISTS: expected an integer",
                ));
            }
        });
    }
    Ok(there)
}

/// The header of an object.
pub async fn head(c: &mut Connection, name: &ObjectName) -> Result<Found, Fault> {
    let last = (VALUE_BYTES_MAX - 1).to_string();
    let key = name.redis();
    c.command(&[b"GETRANGE", key.as_bytes(), b"0", last.as_bytes()]);
    let value = match c.answer().await? {
        Reply::Bulk(value) if value.is_empty() => return Err(missing()),
        Reply::Bulk(value) => value,
        Reply::Nil => return Err(missing()),
        _ => {
            return Err(Fault::protocol(
                "unexpected reply to GETRANGE: expected a bulk string",
            ));
        }
    };
    if Record::is_of_another_version(&value) {
        let why = "the object was written by another version of this program";
        return Err(Fault::Of(Cause::Foreign, why.into()));
    }
    let corrupt = |why: String| Fault::Of(Cause::Corrupt, why);
    let record = Record::read(&value)
        .ok_or_else(|| corrupt("the record of the object is invalid".into()))?;
    let bytes = value.get(RECORD_BYTES..).unwrap_or_default();
    if digest(bytes) != record.head {
        return Err(corrupt(
            "the header of the object does not match its record".into(),
        ));
    }
    let object = Object::decode(bytes).map_err(|e| Fault::Of(Cause::of_head(&e), e.to_string()))?;
    if object.name() != *name {
        let detail = format!("the key holds the object {}", object.name().s3(""));
        return Err(Fault::Of(Cause::Foreign, detail));
    }
    if Record::new(&object, bytes, record.written_unix_s.get()) != record {
        return Err(corrupt(
            "the record of the object does not match its header".into(),
        ));
    }
    Ok(Found { object, record })
}

/// Reads sections into their places. With `ttl_ms` the expiry of the object is extended by it.
pub async fn get(c: &mut Connection, get: &Get, ttl_ms: u64) -> Result<Got, Fault> {
    let Found { object, record } = head(c, &get.name).await?;
    let mut wanted: Vec<(String, &Span, Piece)> = Vec::new();
    for place in &get.places {
        let mut sections = object.sections.iter();
        let at = sections.position(|s| (s.group, s.shard) == (place.group, place.shard));
        let section = at.and_then(|at| object.sections.get(at).map(|s| (at, s.stored_bytes)));
        let Some((index, _)) = section.filter(|(_, bytes)| *bytes == place.span.length) else {
            let (group, shard, bytes) = (place.group, place.shard, place.span.length);
            let why = format!("the object has no section {group}.{shard} of {bytes} bytes");
            return Err(Fault::Of(Cause::Shape, why));
        };
        // Forgets the digest of an earlier attempt.
        place.span.saw(None);
        for piece in pieces(&object, index) {
            let key = get.name.redis_segment(&record.head, piece.segment);
            wanted.push((key, &place.span, piece));
        }
    }
    let lives_on = match ttl_ms > 0 && c.renews() {
        true => renew(c, &get.name, &record, ttl_ms).await?,
        false => 0,
    };
    let mut window = Window::default();
    let mut asked = wanted.iter().peekable();
    let mut ask = |c: &mut Connection, window: &mut Window| {
        while let Some((key, _, piece)) = asked.next_if(|(.., piece)| window.has_room(piece.bytes))
        {
            c.command(&[b"GET", key.as_bytes()]);
            window.goes(piece.bytes);
        }
    };
    ask(c, &mut window);
    for _ in 0..lives_on {
        c.renewed().await?;
    }
    let mut running = Running::default();
    for (_, span, piece) in &wanted {
        match c.segment(span, piece.at, piece.bytes).await? {
            Fetched::Read => {
                window.came();
                ask(c, &mut window);
                running.came(span, piece.at, piece.bytes);
            }
            Fetched::Absent => return Ok(Got::Hole(record)),
            Fetched::Length(length) => {
                let (segment, bytes) = (piece.segment, piece.bytes);
                let why = format!("segment {segment} has {length} bytes instead of {bytes}");
                return Err(Fault::Of(Cause::Corrupt, why));
            }
        }
    }
    Ok(Got::All(Box::new(object)))
}

/// Adds the commands that extend an object's expiry, the header no longer than its segments. Returns the number of commands without a
/// reply yet.
async fn renew(
    c: &mut Connection,
    name: &ObjectName,
    record: &Record,
    ttl_ms: u64,
) -> Result<usize, Fault> {
    let (ttl, head) = (ttl_ms.to_string(), name.redis());
    let mut open = 0;
    for key in record.keys(name).chain([head]) {
        if open == NAMES_MAX {
            for _ in 0..open {
                c.renewed().await?;
            }
            open = 0;
        }
        c.command(&[b"PEXPIRE", key.as_bytes(), ttl.as_bytes()]);
        open += 1;
    }
    Ok(open)
}

/// The current record of an object; `None` if there is none, or a foreign value.
pub(super) async fn own_record(
    c: &mut Connection,
    name: &ObjectName,
) -> Result<Option<Record>, Fault> {
    ask_record(c, name);
    match c.reply().await? {
        Reply::Bulk(value) => Ok(Record::read(&value)),
        Reply::Error(text) if !text.starts_with("WRONGTYPE") => Err(Fault::Refused(text)),
        _ => Ok(None),
    }
}

/// Requests the current record of an object.
pub(super) fn ask_record(c: &mut Connection, name: &ObjectName) {
    let last = (RECORD_BYTES - 1).to_string();
    c.command(&[b"GETRANGE", name.redis().as_bytes(), b"0", last.as_bytes()]);
}

/// All keys of an object, the header's first.
pub(super) fn keys(name: &ObjectName, record: &Record) -> Vec<String> {
    [name.redis()]
        .into_iter()
        .chain(record.keys(name))
        .collect()
}

/// `DEL` of these keys in one command, so that no part of an object remains without the others.
pub(super) fn del(keys: &[String]) -> Words<'_> {
    let keys = keys.iter().map(String::as_bytes);
    [&b"DEL"[..]].into_iter().chain(keys).collect()
}

/// Removes these keys of an object if its record is unchanged. False: it changed.
pub async fn remove_if(
    c: &mut Connection,
    name: &ObjectName,
    record: &Record,
    keys: &[String],
) -> Result<bool, Fault> {
    c.watch(&[name.redis().as_bytes()]);
    if let Reply::Error(text) = c.watched().await? {
        return Err(Fault::Refused(text));
    }
    if own_record(c, name).await? != Some(*record) {
        c.unwatch().await?;
        return Ok(false);
    }
    Ok(c.transaction(&[del(keys)]).await?.is_some())
}

/// Removes an incomplete object if its record is unchanged.
pub async fn remove_rest(
    c: &mut Connection,
    name: &ObjectName,
    record: &Record,
) -> Result<bool, Fault> {
    if !record.is_long() {
        return remove_if(c, name, record, &keys(name, record)).await;
    }
    // The header goes last: without it the segments could not be found.
    if remove_segments(c, name, record).await?.is_some() {
        return Ok(false);
    }
    remove_if(c, name, record, &[name.redis()]).await
}

/// Removes segments without the header. Returns the first error reply.
pub(super) async fn remove_segments(
    c: &mut Connection,
    name: &ObjectName,
    record: &Record,
) -> Result<Option<String>, Fault> {
    let mut refused = None;
    for keys in record.batches(name) {
        c.command(&del(&keys));
        if let Reply::Error(text) = c.reply().await? {
            refused.get_or_insert(text);
        }
    }
    Ok(refused)
}

/// Content found under a name.
type Seen = Result<Option<Option<Record>>, Fault>;

/// Removes objects, each with its segments in one command, the header of a long object last. Returns whether each existed, in order.
pub async fn remove(
    c: &mut Connection,
    names: &[ObjectName],
) -> Result<Vec<Result<bool, Fault>>, Fault> {
    for name in names {
        ask_record(c, name);
    }
    let mut found = Vec::with_capacity(names.len());
    for _ in names {
        found.push(there(c.reply().await?));
    }
    for (name, found) in names.iter().zip(&mut found) {
        if let Ok(Some(Some(record))) = found
            && record.is_long()
            && let Some(text) = remove_segments(c, name, record).await?
        {
            *found = Err(Fault::Refused(text));
        }
    }
    let mut removed = Vec::with_capacity(names.len());
    while removed.len() < found.len() {
        let from = removed.len();
        let to = from + together(&found[from..]);
        removed.extend(remove_seen(c, &names[from..to], &found[from..to]).await?);
    }
    Ok(removed)
}

/// Number of keys to delete for an object that was found.
fn keys_of(found: &Seen) -> usize {
    match found {
        Ok(Some(Some(record))) if !record.is_long() => 1 + record.segments.get() as usize,
        Ok(Some(_)) => 1,
        _ => 0,
    }
}

/// How many objects, from the first on, are removed by one command: no more keys than of one object.
fn together(found: &[Seen]) -> usize {
    let mut keys = 0;
    let fit = found.iter().take_while(|found| {
        keys += keys_of(found);
        keys <= NAMES_MAX
    });
    fit.count().max(1)
}

/// Removes the objects found under these names; the segments of long objects are already removed.
async fn remove_seen(
    c: &mut Connection,
    names: &[ObjectName],
    found: &[Seen],
) -> Result<Vec<Result<bool, Fault>>, Fault> {
    for (name, found) in names.iter().zip(found) {
        if let Ok(Some(record)) = found {
            // The current value is removed. If it is another object than was found, its segments have other names.
            ask_record(c, name);
            let record = record.iter().filter(|record| !record.is_long());
            let segments = record.flat_map(|record| record.keys(name));
            let keys: Vec<String> = [name.redis()].into_iter().chain(segments).collect();
            c.command(&del(&keys));
        }
    }
    let (mut removed, mut left) = (Vec::with_capacity(names.len()), Vec::new());
    for (name, found) in names.iter().zip(found) {
        let record = match found {
            Ok(Some(record)) => record,
            Ok(None) => {
                removed.push(Ok(false));
                continue;
            }
            Err(fault) => {
                removed.push(Err(fault.clone()));
                continue;
            }
        };
        let last = there(c.reply().await?);
        let other = last.as_ref().ok().cloned().flatten().flatten();
        left.extend(
            other
                .filter(|other| record.is_none_or(|seen| seen.head != other.head))
                .map(|other| (name, other)),
        );
        removed.push(match c.reply().await? {
            Reply::Integer(_) => last.map(|last| last.is_some()),
            Reply::Error(text) => Err(Fault::Refused(text)),
            _ => {
                return Err(Fault::protocol(
                    "unexpected reply to DEL: expected an integer",
                ));
            }
        });
    }
    for (name, record) in left {
        remove_segments(c, name, &record).await?;
    }
    Ok(removed)
}

/// Parses the reply with a record: whether a value exists, and whether it begins with a record.
pub(super) fn there(reply: Reply) -> Seen {
    match reply {
        Reply::Bulk(value) if value.is_empty() => Ok(None),
        Reply::Bulk(value) => Ok(Some(Record::read(&value))),
        // A value of another type is foreign.
        Reply::Error(text) if text.starts_with("WRONGTYPE") => Ok(None),
        Reply::Error(text) => Err(Fault::Refused(text)),
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::suite::Sample;

    #[test]
    fn objects_are_removed_together_as_long_as_they_have_no_more_keys_than_one_may_have() {
        let object = Sample::new(1, 0, &[1]).object;
        let of = |segments: usize| {
            let mut record = Record::new(&object, b"", 77);
            record.segments = (segments as u32).into();
            Ok(Some(Some(record)))
        };
        let (none, other) = (Ok(None), Ok(Some(None)));
        let half = NAMES_MAX / 2 - 1;
        for (found, first) in [
            (vec![of(half), of(half), of(0), of(1)], 2),
            (vec![of(half), of(half), none.clone()], 3),
            (vec![of(half), of(half), other.clone()], 2),
            (vec![of(NAMES_MAX), of(0)], 1),
            // Of a long object only the header is left.
            (vec![of(NAMES_MAX + 1), of(half), of(half), of(0)], 2),
            (vec![none], 1),
            (vec![other; NAMES_MAX + 1], NAMES_MAX),
        ] {
            assert_eq!(together(&found), first, "{}", found.len());
        }
    }
}

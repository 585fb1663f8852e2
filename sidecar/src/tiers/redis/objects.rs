//! What is said over one connection to read, write and remove objects.

use super::connection::{Connection, Segment};
use super::fault::Fault;
use super::record::{Piece, RECORD_BYTES, Record, pieces};
use super::resp::Reply;
use crate::tiers::{Cause, Get, Put, Span, Stored};
use kvcachepool_protocol::object::{
    HEADER_BYTES, MAX_SECTIONS, MAX_TOKENS, Object, ObjectName, digest,
};
use std::collections::VecDeque;
use std::time::{SystemTime, UNIX_EPOCH};
use zerocopy::IntoBytes;

/// Segments of one object that are under way at once: enough that the server never waits for us, few enough that it holds no more than
/// some MiB of answers for one connection.
const WINDOW: usize = 4;
/// Segments live so long until their head is there, so that those of a writer that died go by themselves.
const STAGED_MS: u64 = 120_000;
/// Times that segments are written of which some are gone before their head is there.
const ATTEMPTS: usize = 3;
/// Longest value that can be a record and a head.
const VALUE_BYTES_MAX: usize =
    RECORD_BYTES + HEADER_BYTES + 64 * MAX_SECTIONS + 36 * MAX_TOKENS as usize + 4096;

/// An object that was found, and its record.
#[derive(Debug, Clone)]
pub struct Found {
    /// Its head.
    pub object: Object,
    /// Its record.
    pub record: Record,
}

/// How a get ended that is neither right nor an error.
#[derive(Debug)]
pub enum Got {
    /// Everything is where it shall be.
    All(Box<Object>),
    /// The head is there and a segment is not: the server evicted or lost it.
    Hole(Record),
}

fn missing() -> Fault {
    Fault::Of(Cause::Missing, "it is not there".into())
}

/// Which of these keys are there: one answer each, in order.
pub async fn exist(c: &mut Connection, keys: &[String]) -> Result<Vec<Result<bool, Fault>>, Fault> {
    for key in keys {
        c.command(&[b"EXISTS", key.as_bytes()]);
    }
    let mut there = Vec::with_capacity(keys.len());
    for _ in keys {
        there.push(match c.reply().await? {
            Reply::Integer(n) => Ok(n > 0),
            Reply::Error(text) => Err(Fault::Refused(text)),
            _ => return Err(Fault::protocol("EXISTS was answered by no number")),
        });
    }
    Ok(there)
}

/// The head of an object.
pub async fn head(c: &mut Connection, name: &ObjectName) -> Result<Found, Fault> {
    let last = (VALUE_BYTES_MAX - 1).to_string();
    let key = name.redis();
    c.command(&[b"GETRANGE", key.as_bytes(), b"0", last.as_bytes()]);
    let value = match c.answer().await? {
        Reply::Bulk(value) if value.is_empty() => return Err(missing()),
        Reply::Bulk(value) => value,
        Reply::Nil => return Err(missing()),
        _ => return Err(Fault::protocol("GETRANGE was answered by no bytes")),
    };
    let corrupt = |why: String| Fault::Of(Cause::Corrupt, why);
    let record = Record::read(&value).ok_or_else(|| corrupt("its record is none".into()))?;
    let bytes = value.get(RECORD_BYTES..).unwrap_or_default();
    if digest(bytes) != record.head {
        return Err(corrupt("its head is not what its record says".into()));
    }
    let object = Object::decode(bytes).map_err(|e| Fault::Of(Cause::of_head(&e), e.to_string()))?;
    if object.name() != *name {
        let detail = format!("{} lies under its name", object.name().s3(""));
        return Err(Fault::Of(Cause::Foreign, detail));
    }
    if Record::new(&object, bytes, record.written_unix_s.get()) != record {
        return Err(corrupt("its record is not that of its head".into()));
    }
    Ok(Found { object, record })
}

/// Reads sections into their places. With a `ttl_ms` the object lives so long from now on.
pub async fn get(c: &mut Connection, get: &Get, ttl_ms: u64) -> Result<Got, Fault> {
    let Found { object, record } = head(c, &get.name).await?;
    let mut wanted: VecDeque<(String, &Span, Piece)> = VecDeque::new();
    for place in &get.places {
        let mut sections = object.sections.iter();
        let at = sections.position(|s| (s.group, s.shard) == (place.group, place.shard));
        let section = at.and_then(|at| object.sections.get(at).map(|s| (at, s.stored_bytes)));
        let Some((index, _)) = section.filter(|(_, bytes)| *bytes == place.span.length) else {
            let (group, shard, bytes) = (place.group, place.shard, place.span.length);
            let why = format!("section {group}.{shard} of {bytes} bytes is none of it");
            return Err(Fault::Of(Cause::Shape, why));
        };
        for piece in pieces(&object, index) {
            let key = get.name.redis_segment(&record.head, piece.segment);
            wanted.push_back((key, &place.span, piece));
        }
    }
    let lives_on = if ttl_ms > 0 {
        renew(c, &get.name, &record, ttl_ms)
    } else {
        0
    };
    let ask = |c: &mut Connection, at: usize| {
        if let Some((key, ..)) = wanted.get(at) {
            c.command(&[b"GET", key.as_bytes()]);
        }
    };
    for at in 0..WINDOW {
        ask(c, at);
    }
    for _ in 0..lives_on {
        // One that may not write reads all the same.
        c.reply().await?;
    }
    for (number, (_, span, piece)) in wanted.iter().enumerate() {
        match c.segment(span, piece.at, piece.bytes).await? {
            Segment::Read => ask(c, number + WINDOW),
            Segment::Absent => return Ok(Got::Hole(record)),
            Segment::Length(length) => {
                let (segment, bytes) = (piece.segment, piece.bytes);
                let why = format!("segment {segment} has {length} bytes instead of {bytes}");
                return Err(Fault::Of(Cause::Corrupt, why));
            }
        }
    }
    Ok(Got::All(Box::new(object)))
}

/// Adds the commands that let an object live `ttl_ms` from now on, its segments longer than its head; returns how many.
fn renew(c: &mut Connection, name: &ObjectName, record: &Record, ttl_ms: u64) -> usize {
    let ttl = ttl_ms.to_string();
    let mut count = 1;
    c.command(&[b"PEXPIRE", name.redis().as_bytes(), ttl.as_bytes()]);
    for key in record.keys(name) {
        c.command(&[b"PEXPIRE", key.as_bytes(), ttl.as_bytes()]);
        count += 1;
    }
    count
}

/// Writes an object: its segments, which go by themselves if nothing follows; then its head, which makes it visible; then they stay.
pub async fn put(c: &mut Connection, put: &Put, ttl_ms: u64) -> Result<Stored, Fault> {
    let (object, name) = (&put.object, put.object.name());
    let key = name.redis();
    let lengths = object.sections.iter().map(|s| s.stored_bytes);
    if !lengths.eq(put.spans.iter().map(|span| span.length)) {
        let why = "the spans are not as long as the sections; nothing was written";
        return Err(Fault::Of(Cause::Shape, why.into()));
    }
    let head = object.encode();
    let head = head.map_err(|e| Fault::Of(Cause::Shape, e.to_string()))?;
    let there = exist(c, std::slice::from_ref(&key)).await?;
    if there.into_iter().next().transpose()? == Some(true) {
        return Ok(Stored::Already);
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let record = Record::new(object, &head, now.map_or(0, |since| since.as_secs()));
    let value = [record.as_bytes(), &head].concat();
    for _ in 0..ATTEMPTS {
        if let Err(fault) = stage(c, put, &name, &record).await {
            if c.broken().is_none() {
                // There is no room: what is of no use any more makes some.
                remove_segments(c, &name, &record).await?;
            }
            return Err(fault);
        }
        if let Some(stored) = publish(c, &name, &record, &value, ttl_ms).await? {
            return Ok(stored);
        }
    }
    let why = "the server evicts what is being written: give it more memory (maxmemory)";
    Err(Fault::Of(Cause::Full, why.into()))
}

async fn stage(
    c: &mut Connection,
    put: &Put,
    name: &ObjectName,
    record: &Record,
) -> Result<(), Fault> {
    let (mut open, mut failed) = (0, None);
    'all: for (section, span) in put.spans.iter().enumerate() {
        for piece in pieces(&put.object, section) {
            let key = name.redis_segment(&record.head, piece.segment);
            c.set(&key, span, piece.at, piece.bytes, STAGED_MS).await?;
            open += 1;
            if open == WINDOW {
                open -= 1;
                if let Reply::Error(text) = c.reply().await? {
                    failed = Some(text);
                    break 'all;
                }
            }
        }
    }
    for _ in 0..open {
        if let Reply::Error(text) = c.reply().await? {
            failed.get_or_insert(text);
        }
    }
    failed.map_or(Ok(()), |text| Err(Fault::Refused(text)))
}

/// Writes the head and lets the segments stay. None: one of them went meanwhile, evicted or removed with an object of the same head, and
/// nothing is visible.
async fn publish(
    c: &mut Connection,
    name: &ObjectName,
    record: &Record,
    value: &[u8],
    ttl_ms: u64,
) -> Result<Option<Stored>, Fault> {
    let (key, ttl) = (name.redis(), ttl_ms.to_string());
    let key = key.as_bytes();
    match ttl_ms {
        0 => c.command(&[b"SET", key, value, b"NX"]),
        _ => c.command(&[b"SET", key, value, b"NX", b"PX", ttl.as_bytes()]),
    }
    let first = match c.answer().await? {
        Reply::Simple(_) => true,
        Reply::Nil => false,
        _ => return Err(Fault::protocol("SET was answered by no status")),
    };
    if !first {
        // Another one was. Its segments are its own, unless it wrote the very same head.
        let same = own_record(c, name).await? == Some(*record);
        if !same {
            remove_segments(c, name, record).await?;
        }
        return Ok(Some(Stored::Already));
    }
    for segment in record.keys(name) {
        c.command(&[b"EXISTS", segment.as_bytes()]);
        match ttl_ms {
            0 => c.command(&[b"PERSIST", segment.as_bytes()]),
            _ => c.command(&[b"PEXPIRE", segment.as_bytes(), ttl.as_bytes()]),
        }
    }
    let mut whole = true;
    for _ in 0..record.segments.get() {
        whole &= c.answer().await? == Reply::Integer(1);
        c.answer().await?;
    }
    if whole || !remove_if(c, name, record).await? {
        // Whole, or whole until somebody removed it.
        return Ok(Some(Stored::New));
    }
    Ok(None)
}

async fn own_record(c: &mut Connection, name: &ObjectName) -> Result<Option<Record>, Fault> {
    ask_record(c, name);
    match c.answer().await? {
        Reply::Bulk(value) => Ok(Record::read(&value)),
        _ => Ok(None),
    }
}

fn ask_record(c: &mut Connection, name: &ObjectName) {
    let last = (RECORD_BYTES - 1).to_string();
    c.command(&[b"GETRANGE", name.redis().as_bytes(), b"0", last.as_bytes()]);
}

/// Removes an object if it is still the one of this record. False: it is not.
pub async fn remove_if(
    c: &mut Connection,
    name: &ObjectName,
    record: &Record,
) -> Result<bool, Fault> {
    let key = name.redis();
    c.command(&[b"WATCH", key.as_bytes()]);
    c.answer().await?;
    if own_record(c, name).await? != Some(*record) {
        c.command(&[b"UNWATCH"]);
        c.answer().await?;
        return Ok(false);
    }
    c.command(&[b"MULTI"]);
    c.command(&[b"DEL", key.as_bytes()]);
    let mut replies = 3;
    for segment in record.keys(name) {
        c.command(&[b"DEL", segment.as_bytes()]);
        replies += 1;
    }
    c.command(&[b"EXEC"]);
    let mut last = Reply::Nil;
    for _ in 0..replies {
        last = c.answer().await?;
    }
    Ok(last != Reply::Nil)
}

async fn remove_segments(
    c: &mut Connection,
    name: &ObjectName,
    record: &Record,
) -> Result<(), Fault> {
    for key in record.keys(name) {
        c.command(&[b"DEL", key.as_bytes()]);
    }
    for _ in 0..record.segments.get() {
        c.reply().await?;
    }
    Ok(())
}

/// Removes objects, each head before its segments. One answer each, in order: was it there?
pub async fn remove(
    c: &mut Connection,
    names: &[ObjectName],
) -> Result<Vec<Result<bool, Fault>>, Fault> {
    for name in names {
        ask_record(c, name);
    }
    let mut found = Vec::with_capacity(names.len());
    for _ in names {
        found.push(match c.reply().await? {
            Reply::Bulk(value) if value.is_empty() => Ok(None),
            Reply::Bulk(value) => Ok(Some(Record::read(&value))),
            // A value of another kind is none of ours.
            Reply::Error(text) if text.starts_with("WRONGTYPE") => Ok(None),
            Reply::Error(text) => Err(Fault::Refused(text)),
            _ => Ok(None),
        });
    }
    for (name, found) in names.iter().zip(&found) {
        if let Ok(Some(record)) = found {
            // What lies there at this moment goes; if it is another one than was seen, its segments have other names.
            ask_record(c, name);
            c.command(&[b"DEL", name.redis().as_bytes()]);
            for key in record.iter().flat_map(|record| record.keys(name)) {
                c.command(&[b"DEL", key.as_bytes()]);
            }
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
                removed.push(Err(fault));
                continue;
            }
        };
        let last = match c.reply().await? {
            Reply::Bulk(value) => Record::read(&value),
            _ => None,
        };
        left.extend(
            last.filter(|last| Some(*last) != record)
                .map(|last| (name, last)),
        );
        removed.push(match c.reply().await? {
            Reply::Integer(n) => Ok(n > 0),
            Reply::Error(text) => Err(Fault::Refused(text)),
            _ => return Err(Fault::protocol("DEL was answered by no number")),
        });
        for _ in 0..record.map_or(0, |record| record.segments.get()) {
            c.reply().await?;
        }
    }
    for (name, record) in left {
        remove_segments(c, name, &record).await?;
    }
    Ok(removed)
}

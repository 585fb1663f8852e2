//! Writes an object over one connection. A short object is written by one transaction. The parts of a longer object have an expiry until
//! all of them exist; then a transaction removes the expiry of header and segments at once. So a writer that dies leaves nothing
//! permanent, and no header outlives its segments.

use super::connection::{COPIED_BYTES, Connection, Open, Words};
use super::fault::Fault;
use super::objects::{ask_record, keys, own_record, remove_if, remove_segments, there};
use super::record::{Record, pieces};
use super::resp::Reply;
use super::window::Window;
use crate::{Cause, Put, Running, Span, Stored};
use kvcachepool_protocol::object::ObjectName;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use zerocopy::IntoBytes;

/// Objects up to this size are written at once.
const AT_ONCE_BYTES: u64 = 4 << 20;
/// Expiry of segments before the object is published.
pub(super) const STAGED: Duration = Duration::from_secs(120);
/// A header expires this much earlier than its first segment until the object is published, so that its finder can still read them.
const MARGIN: Duration = Duration::from_secs(10);
/// Expiry of a header before the object is published: commands that were sent without a reply are executed eventually.
const HEAD_STAGED: Duration = Duration::from_secs(15);
/// Attempts after evicted segments; each but the last writes the segments again.
const EVICTED_MAX: usize = 6;
/// Attempts after concurrent changes of an object that is to be published: readers change it when they extend its expiry.
const CHANGES_MAX: usize = 16;

/// An object that is being written.
struct Draft<'a> {
    put: &'a Put,
    name: ObjectName,
    record: Record,
    /// The value of its main key: record and header.
    value: Vec<u8>,
    /// Keys of header and segments.
    keys: Vec<String>,
    /// TTL in milliseconds; `None` without expiry.
    ttl: Option<String>,
}

/// How segments are sent.
#[derive(Clone, Copy)]
enum Way<'a> {
    /// By one command, without expiry. A reply per segment would cost the server a call, and wake this task while it sends.
    Together,
    /// By one command per segment, with this expiry in milliseconds.
    Staged(&'a str),
}

/// State of the object in the server.
enum There {
    No,
    /// Another header, or a value of another type.
    Other,
    /// Its header, and not all segments.
    InPart,
    Whole,
}

/// Writes an object, unless it exists.
pub async fn put(c: &mut Connection, put: &Put, ttl_ms: u64) -> Result<Stored, Fault> {
    let (object, name) = (&put.object, put.object.name());
    let lengths = object.sections.iter().map(|s| s.stored_bytes);
    if !lengths.eq(put.spans.iter().map(|span| span.length)) {
        let why = "spans and sections differ in length; nothing was written";
        return Err(Fault::Of(Cause::Shape, why.into()));
    }
    let head = object.encode();
    let head = head.map_err(|e| Fault::Of(Cause::Shape, e.to_string()))?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let record = Record::new(object, &head, now.map_or(0, |since| since.as_secs()));
    let draft = Draft {
        put,
        record,
        value: [record.as_bytes(), &head].concat(),
        keys: keys(&name, &record),
        name,
        ttl: (ttl_ms > 0).then(|| ttl_ms.to_string()),
    };
    // A node that a slot is being moved to executes no multi-key command on keys that are not there yet.
    if draft.is_short() && !c.is_asking() {
        return draft.write_at_once(c).await;
    }
    let stored = draft.write(c).await;
    if stored.is_err() && c.broken().is_none() {
        // Frees the room of the useless parts, which would also be in the way when the slot moves.
        let _ = draft.discard(c).await;
    }
    stored
}

impl Draft<'_> {
    fn is_short(&self) -> bool {
        let bytes: u64 = self.put.spans.iter().map(|span| span.length).sum();
        bytes <= AT_ONCE_BYTES
    }

    /// Writes segments and header at once, unless the object exists.
    async fn write_at_once(&self, c: &mut Connection) -> Result<Stored, Fault> {
        for _ in 0..CHANGES_MAX {
            let (there, open) = self.look_and_begin(c).await?;
            let renewed = match there {
                There::No => None,
                // The existing object may be staged: it would expire if its writer died.
                There::InPart => Some(self.name.redis()),
                There::Whole => {
                    // A concurrent change extends its life too, or removes it, which could also happen a moment later.
                    self.stay(c, open).await?;
                    return Ok(Stored::Already);
                }
                There::Other => {
                    c.end(open, 0).await?;
                    return Ok(Stored::Already);
                }
            };
            let ttl = self.ttl.as_deref();
            let (mut commands, right) = self.send(c, Way::Together).await?;
            if !right {
                // The connection is not used again, and its transaction ends with it.
                return Err(wrong_bytes());
            }
            if ttl.is_some() {
                for key in self.keys.iter().skip(1) {
                    c.command(&stay(key, ttl));
                    commands += 1;
                }
            }
            self.set_head(c, ttl);
            commands += 1;
            if let Some(head) = &renewed {
                c.command(&stay(head, ttl));
                commands += 1;
            }
            if c.end(open, commands).await?.is_some() {
                return Ok(Stored::New);
            }
        }
        Err(changes_all_the_time())
    }

    /// Writes the segments, then the header, and then removes their expiry.
    async fn write(&self, c: &mut Connection) -> Result<Stored, Fault> {
        let began = Instant::now();
        ask_record(c, &self.name);
        let stored = match there(c.reply().await?)? {
            // Written by an earlier attempt of this put whose reply was lost.
            Some(Some(record)) if record.head == self.record.head => Stored::Already,
            Some(_) => return Ok(Stored::Already),
            None => {
                self.stage(c).await?;
                self.stage_head(c, left(began)?).await?
            }
        };
        let (mut evicted, mut changed) = (0, 0);
        loop {
            let (there, open) = self.look_and_begin(c).await?;
            match there {
                There::Whole => {
                    if self.stay(c, open).await? {
                        return Ok(stored);
                    }
                    changed += 1;
                    if changed == CHANGES_MAX {
                        return Err(changes_all_the_time());
                    }
                }
                There::InPart => {
                    c.end(open, 0).await?;
                    evicted += 1;
                    if evicted == EVICTED_MAX {
                        let why = "the server evicts the object while it is written: give it more memory (maxmemory)";
                        return Err(Fault::Of(Cause::Full, why.into()));
                    }
                    self.stage(c).await?;
                }
                There::No => {
                    c.end(open, 0).await?;
                    let why = "the object was removed while it was written";
                    return Err(Fault::Of(Cause::Throttled, why.into()));
                }
                // Its segments have their own names, and these are useless.
                There::Other => {
                    c.end(open, 0).await?;
                    remove_segments(c, &self.name, &self.record).await?;
                    return Ok(Stored::Already);
                }
            }
            left(began)?;
        }
    }

    /// Writes the segments with an expiry.
    async fn stage(&self, c: &mut Connection) -> Result<(), Fault> {
        let staged = STAGED.as_millis().to_string();
        let (open, right) = self.send(c, Way::Staged(&staged)).await?;
        match heard(c, open).await? {
            Some(text) => Err(Fault::Refused(text)),
            None if right => Ok(()),
            None => Err(wrong_bytes()),
        }
    }

    /// Writes the header if there is none, to expire after `left` or earlier.
    async fn stage_head(&self, c: &mut Connection, left: Duration) -> Result<Stored, Fault> {
        self.set_head(c, Some(&left.min(HEAD_STAGED).as_millis().to_string()));
        match c.answer().await? {
            Reply::Simple(_) => Ok(Stored::New),
            Reply::Nil => Ok(Stored::Already),
            _ => Err(Fault::protocol(
                "unexpected reply to SET: expected a status",
            )),
        }
    }

    /// Adds the command that sets the header if there is none, with an expiry in milliseconds or without.
    fn set_head(&self, c: &mut Connection, ms: Option<&str>) {
        let key = self.name.redis();
        let mut words: Words<'_> = vec![b"SET", key.as_bytes(), &self.value, b"NX"];
        words.extend(ms.iter().flat_map(|ms| [&b"PX"[..], ms.as_bytes()]));
        c.command(&words);
    }

    /// Sends the segments, and computes their digests while the bytes are in the CPU cache. Returns the number of missing replies, and
    /// whether the bytes match the header.
    async fn send(&self, c: &mut Connection, way: Way<'_>) -> Result<(usize, bool), Fault> {
        let segments = self.keys.len() - 1;
        let open = match way {
            Way::Together if segments > 0 => {
                c.begin_pairs(segments);
                1
            }
            Way::Together | Way::Staged(_) => 0,
        };
        let mut window = Window::default();
        let spans: Vec<Span> = self.put.spans.iter().map(Span::watched).collect();
        let mut digest = Running::default();
        for (section, span) in spans.iter().enumerate() {
            for piece in pieces(&self.put.object, section) {
                if piece.bytes > COPIED_BYTES {
                    // The previous segment is sent while its bytes are in the CPU cache.
                    c.flush_segment().await?;
                }
                digest.came(span, piece.at, piece.bytes);
                let key = self.name.redis_segment(&self.record.head, piece.segment);
                match way {
                    Way::Together => c.pair(&key, span, piece.at, piece.bytes).await?,
                    Way::Staged(ms) => {
                        while !window.has_room(piece.bytes) {
                            window.came();
                            if let Reply::Error(text) = c.reply().await? {
                                heard(c, window.segments()).await?;
                                return Err(Fault::Refused(text));
                            }
                        }
                        c.set(&key, span, piece.at, piece.bytes, ms).await?;
                        window.goes(piece.bytes);
                    }
                }
            }
        }
        let wanted = self.put.object.sections.iter().map(|s| s.stored_digest);
        let found = spans
            .iter()
            .map(|span| span.seen().or_else(|| span.digest()));
        let open = open + window.segments();
        Ok((open, found.eq(wanted.map(Some))))
    }

    /// Requests header and segments, and watches them for changes.
    fn look(&self, c: &mut Connection) {
        let keys: Words<'_> = self.keys.iter().map(String::as_bytes).collect();
        c.watch(&keys);
        ask_record(c, &self.name);
        let segments = keys.into_iter().skip(1);
        let words: Words<'_> = [&b"EXISTS"[..]].into_iter().chain(segments).collect();
        c.command(&words);
    }

    /// Requests the state and begins a transaction in one batch: a separate reply to MULTI would cost the server a call.
    async fn look_and_begin(&self, c: &mut Connection) -> Result<(There, Open), Fault> {
        self.look(c);
        let mut open = c.begin();
        let seen = self.seen(c).await;
        let begun = match c.broken() {
            None => c.begun(&mut open).await,
            Some(why) => Err(Fault::unreachable(why.to_owned())),
        };
        match (seen, begun) {
            (Ok(there), Ok(())) => Ok((there, open)),
            (Err(fault), Ok(())) => {
                // If that fails too, the connection is not used again.
                let _ = c.end(open, 0).await;
                Err(fault)
            }
            (Err(fault), Err(_)) | (Ok(_), Err(fault)) => Err(fault),
        }
    }

    async fn seen(&self, c: &mut Connection) -> Result<There, Fault> {
        let (watched, head, segments) = (c.watched().await?, c.reply().await?, c.reply().await?);
        if let Reply::Error(text) = watched {
            return Err(Fault::Refused(text));
        }
        let taken = matches!(&head, Reply::Error(text) if text.starts_with("WRONGTYPE"));
        let head = there(head)?;
        let segments = match segments {
            Reply::Integer(count) => count + 1 == self.keys.len() as i64,
            Reply::Error(text) => return Err(Fault::Refused(text)),
            _ => {
                return Err(Fault::protocol(
                    "unexpected reply to EXISTS: expected an integer",
                ));
            }
        };
        Ok(match head {
            None if taken => There::Other,
            None => There::No,
            Some(Some(record)) if record.head == self.record.head && segments => There::Whole,
            Some(Some(record)) if record.head == self.record.head => There::InPart,
            Some(_) => There::Other,
        })
    }

    /// Ends the transaction by setting the final expiry, of the segments no shorter than of the header. False: something changed.
    async fn stay(&self, c: &mut Connection, open: Open) -> Result<bool, Fault> {
        for key in &self.keys {
            c.command(&stay(key, self.ttl.as_deref()));
        }
        Ok(c.end(open, self.keys.len()).await?.is_some())
    }

    /// Removes the written parts key by key: while its slot moves, some may be on another node.
    async fn discard(&self, c: &mut Connection) -> Result<(), Fault> {
        if c.is_watching() {
            // Otherwise the removal would depend on the watched keys.
            c.unwatch().await?;
        }
        let (head, segments) = self.keys.split_at(1);
        match remove_if(c, &self.name, &self.record, head).await {
            Ok(true) => {}
            Ok(false) => {
                let there = own_record(c, &self.name).await?;
                if there.is_some_and(|record| record.head == self.record.head) {
                    return Ok(());
                }
            }
            Err(fault) if fault.redirect().is_some() => {}
            Err(fault) => return Err(fault),
        }
        for key in segments {
            c.command(&[b"DEL", key.as_bytes()]);
        }
        for _ in segments {
            c.reply().await?;
        }
        Ok(())
    }
}

/// Reads the replies to segments; returns the first error.
async fn heard(c: &mut Connection, open: usize) -> Result<Option<String>, Fault> {
    let mut failed = None;
    for _ in 0..open {
        if let Reply::Error(text) = c.reply().await? {
            failed.get_or_insert(text);
        }
    }
    Ok(failed)
}

fn wrong_bytes() -> Fault {
    let why = "the bytes in memory do not match the header's digests; nothing was written";
    Fault::Of(Cause::Corrupt, why.into())
}

fn changes_all_the_time() -> Fault {
    let why = "other processes keep changing the object while it is written";
    Fault::Of(Cause::Throttled, why.into())
}

/// How long a header may live whose first segment was written at `began`.
fn left(began: Instant) -> Result<Duration, Fault> {
    let left = STAGED.saturating_sub(began.elapsed() + MARGIN);
    if left < MARGIN {
        let why = "writing took so long that the first segments are about to expire";
        return Err(Fault::Of(Cause::Timeout, why.into()));
    }
    Ok(left)
}

/// The command that sets the expiry of a key in milliseconds, or removes it.
fn stay<'a>(key: &'a str, ttl: Option<&'a str>) -> Words<'a> {
    match ttl {
        None => vec![b"PERSIST", key.as_bytes()],
        Some(ttl) => vec![b"PEXPIRE", key.as_bytes(), ttl.as_bytes()],
    }
}

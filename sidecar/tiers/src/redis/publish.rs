//! What is said over one connection to write an object. A short one is written by one command, if nothing of it is there; by one
//! transaction otherwise, where objects live for a time, and over a connection that has not written yet. Of a longer one everything has an
//! expiry until all of it is there; then a transaction takes that from head and segments at once. So whoever dies in the middle leaves
//! nothing that stays, and no head outlives its segments.

use super::connection::{COPIED_BYTES, Connection, Open, Words};
use super::fault::{Fault, is_denied, is_full};
use super::objects::{ask_record, keys, own_record, remove_if, remove_segments, there};
use super::record::{Record, pieces};
use super::resp::Reply;
use super::window::Window;
use crate::{Cause, Put, Running, Span, Stored};
use kvcachepool_protocol::object::ObjectName;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use zerocopy::IntoBytes;

/// An object of no more bytes is written at once.
const AT_ONCE_BYTES: u64 = 4 << 20;
/// Segments live so long if nothing follows.
const STAGED: Duration = Duration::from_secs(120);
/// A head lives so much shorter than the first of its segments, until all of them stay: who finds it can still read them.
const MARGIN: Duration = Duration::from_secs(10);
/// A head lives so long if nothing follows: what was sent and not heard any more is done some time.
const HEAD_STAGED: Duration = Duration::from_secs(15);
/// Times that segments may be gone before they stay; but for the last, they are written again.
const EVICTED_MAX: usize = 6;
/// Times that others may change what is about to stay: readers do, where objects live on by being read.
const CHANGES_MAX: usize = 16;

/// An object that is being written.
struct Draft<'a> {
    put: &'a Put,
    name: ObjectName,
    record: Record,
    /// What lies under its name: record and head.
    value: Vec<u8>,
    /// Of head and segments.
    keys: Vec<String>,
    /// Milliseconds that it lives for; none = for ever.
    ttl: Option<String>,
}

/// How segments are sent.
#[derive(Clone, Copy)]
enum Way<'a> {
    /// By one command, which has one reply, for ever, with the head that follows, if none of them is there.
    IfNone,
    /// By one command, for ever. A reply to each would cost the server a call and wake us while we send.
    Together,
    /// By a command each, to live for so many milliseconds.
    Staged(&'a str),
}

/// What of it is in the server.
enum There {
    /// No head.
    No,
    /// Another head, or a value of another kind.
    Other,
    /// Its head, and not all segments.
    InPart,
    /// All.
    Whole,
}

/// Writes an object. Who knows that others may have written it asks before: one that is there may be sent in vain.
pub async fn put(c: &mut Connection, put: &Put, ttl_ms: u64) -> Result<Stored, Fault> {
    let (object, name) = (&put.object, put.object.name());
    let lengths = object.sections.iter().map(|s| s.stored_bytes);
    if !lengths.eq(put.spans.iter().map(|span| span.length)) {
        let why = "the spans are not as long as the sections; nothing was written";
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
    // A node that another one hands the slot to does nothing at once with keys that are not there yet.
    if draft.is_short() && !c.is_asking() {
        return draft.write_at_once(c).await;
    }
    let stored = draft.write(c).await;
    if stored.is_err() && c.broken().is_none() {
        // What is of no use any more makes room, and lies in nobody's way where its slot moves.
        let _ = draft.discard(c).await;
    }
    stored
}

impl Draft<'_> {
    fn is_short(&self) -> bool {
        let bytes: u64 = self.put.spans.iter().map(|span| span.length).sum();
        bytes <= AT_ONCE_BYTES
    }

    /// Segments and head at once, unless the object is there.
    async fn write_at_once(&self, c: &mut Connection) -> Result<Stored, Fault> {
        let mut full = None;
        if self.ttl.is_none() && c.writes_at_once() {
            match self.write_if_none(c).await {
                Ok(true) => return Ok(Stored::New),
                Ok(false) => {}
                // The object of another writer, which is there, would be left alone.
                Err(Fault::Refused(text)) if is_full(&text) => full = Some(text),
                Err(Fault::Refused(text)) if is_denied(&text) => c.must_look(),
                Err(fault) => return Err(fault),
            }
        }
        for _ in 0..CHANGES_MAX {
            let (there, open) = self.look_and_begin(c).await?;
            let renewed = match there {
                There::No | There::InPart if full.is_some() => {
                    c.end(open, 0).await?;
                    return Err(Fault::Refused(full.unwrap_or_default()));
                }
                There::No => None,
                // What lies there may be staged: it would go by itself if its writer died.
                There::InPart => Some(self.name.redis()),
                There::Whole => {
                    // Who changes it at this moment lets it live on as well, or takes it away, as may happen a moment later.
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
                // The connection is not used again, and what it began ends with it.
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
                c.wrote();
                return Ok(Stored::New);
            }
        }
        Err(changes_all_the_time())
    }

    /// Segments and head by one command, for ever. False: something of them is there, and nothing was written. A look before it would cost
    /// a round trip, and the server five commands.
    async fn write_if_none(&self, c: &mut Connection) -> Result<bool, Fault> {
        let (_, right) = self.send(c, Way::IfNone).await?;
        if !right {
            // The connection is not used again, and the command never ends.
            return Err(wrong_bytes());
        }
        c.short_pair(&self.name.redis(), &self.value);
        match c.optional().await? {
            Reply::Integer(set) => Ok(set == 1),
            Reply::Error(text) => Err(Fault::Refused(text)),
            _ => Err(Fault::protocol("MSETNX was answered by no number")),
        }
    }

    /// Segments, then the head, and then their expiry taken away.
    async fn write(&self, c: &mut Connection) -> Result<Stored, Fault> {
        let began = Instant::now();
        ask_record(c, &self.name);
        let stored = match there(c.reply().await?)? {
            // Of the same put: its answer was lost.
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
                        let why = "the server evicts what is being written: give it more memory (maxmemory)";
                        return Err(Fault::Of(Cause::Full, why.into()));
                    }
                    self.stage(c).await?;
                }
                There::No => {
                    c.end(open, 0).await?;
                    let why = "it was taken away while it was written";
                    return Err(Fault::Of(Cause::Throttled, why.into()));
                }
                // Its segments have names of their own, and these are of no use.
                There::Other => {
                    c.end(open, 0).await?;
                    remove_segments(c, &self.name, &self.record).await?;
                    return Ok(Stored::Already);
                }
            }
            left(began)?;
        }
    }

    /// Writes the segments, to live until they stay.
    async fn stage(&self, c: &mut Connection) -> Result<(), Fault> {
        let staged = STAGED.as_millis().to_string();
        let (open, right) = self.send(c, Way::Staged(&staged)).await?;
        match heard(c, open).await? {
            Some(text) => Err(Fault::Refused(text)),
            None if right => Ok(()),
            None => Err(wrong_bytes()),
        }
    }

    /// Writes the head if there is none, to live for so long or shorter.
    async fn stage_head(&self, c: &mut Connection, left: Duration) -> Result<Stored, Fault> {
        self.set_head(c, Some(&left.min(HEAD_STAGED).as_millis().to_string()));
        match c.answer().await? {
            Reply::Simple(_) => Ok(Stored::New),
            Reply::Nil => Ok(Stored::Already),
            _ => Err(Fault::protocol("SET was answered by no status")),
        }
    }

    /// Adds the command that sets the head if there is none, to live for so many milliseconds or for ever.
    fn set_head(&self, c: &mut Connection, ms: Option<&str>) {
        let key = self.name.redis();
        let mut words: Words<'_> = vec![b"SET", key.as_bytes(), &self.value, b"NX"];
        words.extend(ms.iter().flat_map(|ms| [&b"PX"[..], ms.as_bytes()]));
        c.command(&words);
    }

    /// Sends the segments, and makes their digests on the way, while the processor has the bytes at hand. Returns how many replies have
    /// not come yet, and whether the bytes are what the head says.
    async fn send(&self, c: &mut Connection, way: Way<'_>) -> Result<(usize, bool), Fault> {
        let segments = self.keys.len() - 1;
        let open = match way {
            Way::IfNone => {
                c.begin_pairs(b"MSETNX", segments + 1);
                1
            }
            Way::Together if segments > 0 => {
                c.begin_pairs(b"MSET", segments);
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
                    // The one before goes out while the processor has its bytes at hand.
                    c.flush_segment().await?;
                }
                digest.came(span, piece.at, piece.bytes);
                let key = self.name.redis_segment(&self.record.head, piece.segment);
                match way {
                    Way::IfNone | Way::Together => {
                        c.pair(&key, span, piece.at, piece.bytes).await?;
                    }
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

    /// Asks for head and segments, and from then on for any change of them.
    fn look(&self, c: &mut Connection) {
        let keys: Words<'_> = self.keys.iter().map(String::as_bytes).collect();
        c.watch(&keys);
        ask_record(c, &self.name);
        let segments = keys.into_iter().skip(1);
        let words: Words<'_> = [&b"EXISTS"[..]].into_iter().chain(segments).collect();
        c.command(&words);
    }

    /// Looks, and begins a transaction; all in one go, for a reply to MULTI alone would cost the server a call while we send.
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
                // Where that fails, too, the connection is not used again.
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
            _ => return Err(Fault::protocol("EXISTS was answered by no number")),
        };
        Ok(match head {
            None if taken => There::Other,
            None => There::No,
            Some(Some(record)) if record.head == self.record.head && segments => There::Whole,
            Some(Some(record)) if record.head == self.record.head => There::InPart,
            Some(_) => There::Other,
        })
    }

    /// Ends the transaction by letting all of it live for its time, the segments no shorter than the head. False: something has changed.
    async fn stay(&self, c: &mut Connection, open: Open) -> Result<bool, Fault> {
        for key in &self.keys {
            c.command(&stay(key, self.ttl.as_deref()));
        }
        Ok(c.end(open, self.keys.len()).await?.is_some())
    }

    /// Takes away what was written of it, key by key: while its slot moves, a part may be elsewhere.
    async fn discard(&self, c: &mut Connection) -> Result<(), Fault> {
        if c.is_watching() {
            // Else it would be bound to all that was looked at.
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

/// Replies to segments; the first that is an error.
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
    let why = "the bytes in memory are not what the head says; nothing was written";
    Fault::Of(Cause::Corrupt, why.into())
}

fn changes_all_the_time() -> Fault {
    let why = "others change the object all the time while it is written";
    Fault::Of(Cause::Throttled, why.into())
}

/// How long a head may live whose first segment was written then.
fn left(began: Instant) -> Result<Duration, Fault> {
    let left = STAGED.saturating_sub(began.elapsed() + MARGIN);
    if left < MARGIN {
        let why = "writing took so long that its first segments are about to go";
        return Err(Fault::Of(Cause::Timeout, why.into()));
    }
    Ok(left)
}

/// The command that lets a key live for so many milliseconds, or for ever.
fn stay<'a>(key: &'a str, ttl: Option<&'a str>) -> Words<'a> {
    match ttl {
        None => vec![b"PERSIST", key.as_bytes()],
        Some(ttl) => vec![b"PEXPIRE", key.as_bytes(), ttl.as_bytes()],
    }
}

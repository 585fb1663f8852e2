//! What is said over one connection to write an object. Everything of it has an expiry until all of it is there; then a transaction takes
//! that from head and segments at once. So whoever dies in the middle leaves nothing that stays, and no head outlives its segments.

use super::connection::{COPIED_BYTES, Connection, Words};
use super::fault::Fault;
use super::objects::{WINDOW, ask_record, keys, own_record, remove_if, remove_segments, there};
use super::record::{Record, pieces};
use super::resp::Reply;
use crate::tiers::{Cause, Put, Running, Span, Stored};
use kvcachepool_protocol::object::ObjectName;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use zerocopy::IntoBytes;

/// Segments live so long if nothing follows.
const STAGED: Duration = Duration::from_secs(120);
/// A head lives so much shorter than the first of its segments, until all of them stay: who finds it can still read them.
const MARGIN: Duration = Duration::from_secs(10);
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

/// What of it is in the server.
enum There {
    /// No head.
    No,
    /// Another head.
    Other,
    /// Its head, and not all segments.
    InPart,
    /// All.
    Whole,
}

/// Writes an object.
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
    let stored = draft.write(c).await;
    if stored.is_err() && c.broken().is_none() {
        // What is of no use any more makes room, and lies in nobody's way where its slot moves.
        let _ = draft.discard(c).await;
    }
    stored
}

impl Draft<'_> {
    /// Segments and head, in one go, and then their expiry taken away.
    async fn write(&self, c: &mut Connection) -> Result<Stored, Fault> {
        let began = Instant::now();
        // Where nothing is awaited before the head is sent, the head says as soon whether the rest was needed.
        let ask = self.keys.len() > WINDOW;
        let Some(open) = self.send(c, ask).await? else {
            return Ok(Stored::Already);
        };
        let (stored, mut there) = match left(began) {
            Ok(left) => self.begin(c, open, left).await?,
            Err(fault) => {
                heard(c, open).await?;
                return Err(fault);
            }
        };
        let (mut evicted, mut changed) = (0, 0);
        loop {
            match there {
                There::Whole => {
                    if c.transaction(&self.stays()).await?.is_some() {
                        return Ok(stored);
                    }
                    changed += 1;
                    if changed == CHANGES_MAX {
                        let why = "others change the object all the time while it is written";
                        return Err(Fault::Of(Cause::Throttled, why.into()));
                    }
                }
                There::InPart => {
                    c.unwatch().await?;
                    evicted += 1;
                    if evicted == EVICTED_MAX {
                        let why = "the server evicts what is being written: give it more memory (maxmemory)";
                        return Err(Fault::Of(Cause::Full, why.into()));
                    }
                    self.stage(c).await?;
                }
                // Removed by somebody, it was there until then. The segments may be those of one who writes the same at this moment.
                There::No => {
                    c.unwatch().await?;
                    return Ok(stored);
                }
                // Its segments have names of their own, and these are of no use.
                There::Other => {
                    c.unwatch().await?;
                    remove_segments(c, &self.name, &self.record).await?;
                    return Ok(stored);
                }
            }
            left(began)?;
            self.look(c);
            there = self.seen(c).await?;
        }
    }

    /// Writes the head behind the last segments, whose replies have not come, if there is none, to live for so long; and looks what is
    /// there then.
    async fn begin(
        &self,
        c: &mut Connection,
        open: usize,
        left: Duration,
    ) -> Result<(Stored, There), Fault> {
        let (key, px) = (self.name.redis(), left.as_millis().to_string());
        let (key, px) = (key.as_bytes(), px.as_bytes());
        c.command(&[b"SET", key, &self.value, b"NX", b"PX", px]);
        self.look(c);
        let failed = heard(c, open).await?;
        let set = c.reply().await?;
        let there = self.seen(c).await;
        if let Some(text) = failed {
            c.unwatch().await?;
            return Err(Fault::Refused(text));
        }
        let there = there?;
        match set {
            Reply::Simple(_) => Ok((Stored::New, there)),
            Reply::Nil => Ok((Stored::Already, there)),
            Reply::Error(text) => Err(Fault::Refused(text)),
            _ => Err(Fault::protocol("SET was answered by no status")),
        }
    }

    /// Writes the segments again.
    async fn stage(&self, c: &mut Connection) -> Result<(), Fault> {
        let open = self.send(c, false).await?.unwrap_or_default();
        match heard(c, open).await? {
            Some(text) => Err(Fault::Refused(text)),
            None => Ok(()),
        }
    }

    /// Sends the segments, and makes their digests on the way, while the processor has the bytes at hand. The digests are right if it
    /// succeeds; returns how many replies have not come yet. Where it is to `ask` whether there is a head, and there is one, only the first
    /// go out; none then.
    async fn send(&self, c: &mut Connection, mut ask: bool) -> Result<Option<usize>, Fault> {
        let (mut open, mut failed) = (0, None);
        if ask {
            c.command(&[b"EXISTS", self.name.redis().as_bytes()]);
        }
        let staged_ms = STAGED.as_millis() as u64;
        let spans: Vec<Span> = self.put.spans.iter().map(Span::watched).collect();
        let mut digest = Running::default();
        'all: for (section, span) in spans.iter().enumerate() {
            for piece in pieces(&self.put.object, section) {
                if piece.bytes > COPIED_BYTES {
                    // The one before goes out while the processor has its bytes at hand.
                    c.flush().await?;
                }
                digest.came(span, piece.at, piece.bytes);
                let key = self.name.redis_segment(&self.record.head, piece.segment);
                c.set(&key, span, piece.at, piece.bytes, staged_ms).await?;
                open += 1;
                if open == WINDOW && std::mem::take(&mut ask) {
                    match c.reply().await? {
                        Reply::Integer(0) => {}
                        Reply::Error(text) => {
                            failed = Some(Fault::Refused(text));
                            break 'all;
                        }
                        _ => {
                            heard(c, open).await?;
                            return Ok(None);
                        }
                    }
                }
                if open == WINDOW {
                    open -= 1;
                    if let Reply::Error(text) = c.reply().await? {
                        failed = Some(Fault::Refused(text));
                        break 'all;
                    }
                }
            }
        }
        if failed.is_none() {
            let wanted = self.put.object.sections.iter().map(|s| s.stored_digest);
            let found = spans
                .iter()
                .map(|span| span.seen().or_else(|| span.digest()));
            if !found.eq(wanted.map(Some)) {
                let why = "the bytes in memory are not what the head says; nothing was written";
                failed = Some(Fault::Of(Cause::Corrupt, why.into()));
            }
        }
        match failed {
            None => Ok(Some(open)),
            Some(fault) => {
                heard(c, open).await?;
                Err(fault)
            }
        }
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

    async fn seen(&self, c: &mut Connection) -> Result<There, Fault> {
        let (watched, head, segments) = (c.reply().await?, c.reply().await?, c.reply().await?);
        if let Reply::Error(text) = watched {
            return Err(Fault::Refused(text));
        }
        let head = there(head)?;
        let segments = match segments {
            Reply::Integer(count) => count + 1 == self.keys.len() as i64,
            Reply::Error(text) => return Err(Fault::Refused(text)),
            _ => return Err(Fault::protocol("EXISTS was answered by no number")),
        };
        Ok(match head {
            None => There::No,
            Some(Some(record)) if record.head == self.record.head && segments => There::Whole,
            Some(Some(record)) if record.head == self.record.head => There::InPart,
            Some(_) => There::Other,
        })
    }

    /// The commands that let all of it live for its time, the segments no shorter than the head.
    fn stays(&self) -> Vec<Words<'_>> {
        let ttl = self.ttl.as_deref();
        self.keys.iter().map(|key| stay(key, ttl)).collect()
    }

    /// Takes away what was written of it, key by key: while its slot moves, a part may be elsewhere.
    async fn discard(&self, c: &mut Connection) -> Result<(), Fault> {
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

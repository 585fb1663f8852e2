//! What is said over one connection to write an object. Everything of it has an expiry until all of it is there; then a transaction takes
//! that from head and segments at once. So whoever dies in the middle leaves nothing that stays, and no head outlives its segments.

use super::connection::{Connection, Words};
use super::fault::Fault;
use super::objects::{WINDOW, exist, keys, own_record, remove_if, remove_segments};
use super::record::{Record, pieces};
use super::resp::Reply;
use crate::tiers::{Cause, Put, Stored};
use kvcachepool_protocol::object::ObjectName;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use zerocopy::IntoBytes;

/// Segments live so long if nothing follows.
const STAGED: Duration = Duration::from_secs(120);
/// A head lives so much shorter than the first of its segments, until all of them stay: who finds it can still read them.
const MARGIN: Duration = Duration::from_secs(10);
/// Times that segments are written of which some are gone before they stay.
const ATTEMPTS: usize = 3;
/// Times that others may change what is about to stay: readers do, where objects live on by being read.
const CHANGES: usize = 16;

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
    let there = exist(c, &[name.redis()]).await?;
    if there.into_iter().next().transpose()? == Some(true) {
        return Ok(Stored::Already);
    }
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
    for _ in 0..ATTEMPTS {
        match draft.write(c).await {
            Ok(None) => {}
            Ok(Some(stored)) => return Ok(stored),
            Err(fault) => {
                // What is of no use any more makes room; elsewhere there is nothing of it.
                if c.broken().is_none() && fault.redirect().is_none() {
                    let _ = draft.discard(c).await;
                }
                return Err(fault);
            }
        }
    }
    let why = "the server evicts what is being written: give it more memory (maxmemory)";
    Err(Fault::Of(Cause::Full, why.into()))
}

impl Draft<'_> {
    /// One attempt. None: a part went meanwhile, and nothing of it is left.
    async fn write(&self, c: &mut Connection) -> Result<Option<Stored>, Fault> {
        let began = Instant::now();
        self.stage(c).await?;
        let left = STAGED.saturating_sub(began.elapsed() + MARGIN);
        if left < MARGIN {
            let why = "writing took so long that its first segments are about to go";
            return Err(Fault::Of(Cause::Timeout, why.into()));
        }
        let key = self.name.redis();
        let px = left.as_millis().to_string();
        c.command(&[
            b"SET",
            key.as_bytes(),
            &self.value,
            b"NX",
            b"PX",
            px.as_bytes(),
        ]);
        self.ask_whole(c);
        let set = c.reply().await?;
        let mut whole = self.hear_whole(c).await?;
        let stored = match set {
            Reply::Simple(_) => Stored::New,
            Reply::Nil => Stored::Already,
            Reply::Error(text) => return Err(Fault::Refused(text)),
            _ => return Err(Fault::protocol("SET was answered by no status")),
        };
        if stored == Stored::Already
            && let Some(other) = own_record(c, &self.name).await?
            && other.head != self.record.head
        {
            c.unwatch().await?;
            return self.beside(c, stored).await;
        }
        for _ in 0..CHANGES {
            if !whole {
                c.unwatch().await?;
                return self.in_part(c, stored).await;
            }
            if c.transaction(&self.stays()).await?.is_some() {
                return Ok(Some(stored));
            }
            self.ask_whole(c);
            whole = self.hear_whole(c).await?;
        }
        let why = "others change the object all the time while it is written";
        Err(Fault::Of(Cause::Throttled, why.into()))
    }

    /// Writes the segments.
    async fn stage(&self, c: &mut Connection) -> Result<(), Fault> {
        let (mut open, mut failed) = (0, None);
        let staged_ms = STAGED.as_millis() as u64;
        'all: for (section, span) in self.put.spans.iter().enumerate() {
            for piece in pieces(&self.put.object, section) {
                let key = self.name.redis_segment(&self.record.head, piece.segment);
                c.set(&key, span, piece.at, piece.bytes, staged_ms).await?;
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

    /// Asks whether head and segments are there, and from then on for any change of them.
    fn ask_whole(&self, c: &mut Connection) {
        let keys: Words<'_> = self.keys.iter().map(String::as_bytes).collect();
        c.watch(&keys);
        let words: Words<'_> = [&b"EXISTS"[..]].into_iter().chain(keys).collect();
        c.command(&words);
    }

    async fn hear_whole(&self, c: &mut Connection) -> Result<bool, Fault> {
        let (watched, there) = (c.reply().await?, c.reply().await?);
        match (watched, there) {
            (Reply::Error(text), _) | (_, Reply::Error(text)) => Err(Fault::Refused(text)),
            (_, Reply::Integer(count)) => Ok(count == self.keys.len() as i64),
            _ => Err(Fault::protocol("EXISTS was answered by no number")),
        }
    }

    /// The commands that let all of it live for its time, the segments no shorter than the head.
    fn stays(&self) -> Vec<Words<'_>> {
        let ttl = self.ttl.as_deref();
        self.keys.iter().map(|key| stay(key, ttl)).collect()
    }

    /// What becomes of an attempt of which not everything is there.
    async fn in_part(&self, c: &mut Connection, stored: Stored) -> Result<Option<Stored>, Fault> {
        match own_record(c, &self.name).await? {
            // Removed by somebody, it was whole until then. Segments may be those of another one who writes the same: they go by themselves.
            None => Ok(Some(stored)),
            Some(record) if record.head == self.record.head => {
                remove_if(c, &self.name, &record).await?;
                Ok(None)
            }
            Some(_) => self.beside(c, stored).await,
        }
    }

    /// The object of another one is there: its segments have names of their own, and these are of no use.
    async fn beside(&self, c: &mut Connection, stored: Stored) -> Result<Option<Stored>, Fault> {
        remove_segments(c, &self.name, &self.record).await?;
        Ok(Some(stored))
    }

    /// Takes away what was written of it.
    async fn discard(&self, c: &mut Connection) -> Result<(), Fault> {
        if remove_if(c, &self.name, &self.record).await? {
            return Ok(());
        }
        let there = own_record(c, &self.name).await?;
        if there.is_none_or(|record| record.head != self.record.head) {
            remove_segments(c, &self.name, &self.record).await?;
        }
        Ok(())
    }
}

/// The command that lets a key live for so many milliseconds, or for ever.
fn stay<'a>(key: &'a str, ttl: Option<&'a str>) -> Words<'a> {
    match ttl {
        None => vec![b"PERSIST", key.as_bytes()],
        Some(ttl) => vec![b"PEXPIRE", key.as_bytes(), ttl.as_bytes()],
    }
}

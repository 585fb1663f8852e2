//! For a measurement only: gets and puts of this tier over the `redis` crate, with the same records, segments and digests.
//! `KVCACHEPOOL_REDIS_CLIENT=<way>[,<segments in flight>]` chooses it for one server with a plain URL. Listings and sums go to our client.
#![allow(unsafe_code)]

use super::connection::COPIED_BYTES;
use super::fault::Fault;
use super::objects::Found;
use super::record::{Piece, RECORD_BYTES, Record, pieces};
use super::{Redis, apart, resp};
use crate::{
    Cause, Get, Kind, Operation, Page, Put, Removal, Running, Span, Stored, Tier, TierError,
    TierInfo, Usage,
};
use ::redis::aio::{ConnectionLike, MultiplexedConnection};
use ::redis::io::tcp::TcpSettings;
use ::redis::{
    AsyncConnectionConfig, Client, Cmd, Connection, IntoConnectionInfo, Pipeline, RedisError,
    Value, cmd, pipe,
};
use futures::stream::{self, StreamExt};
use kvcachepool_protocol::object::{Object, ObjectName, REDIS_SEGMENT_BYTES, digest};
use parking_lot::Mutex;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::{OnceCell, Semaphore};
use zerocopy::IntoBytes;

/// As many as our client has.
const CONNECTIONS: usize = 8;
const AT_ONCE_BYTES: u64 = 4 << 20;
const STAGED_MS: &str = "120000";
const HEAD_STAGED_MS: &str = "15000";
const HEAD_BYTES_MAX: usize = 1 << 20;
/// The default of 500 ms is too short for values that wait behind others.
const ANSWER: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// One `MGET` for all segments.
    Mget,
    /// A `GET` for each segment, some in flight.
    Gets,
    /// As `Gets`, over the blocking connection in a thread, which also takes encoded commands for puts.
    Blocking,
}

struct Inner {
    way: Way,
    window: usize,
    client: Client,
    permits: Arc<Semaphore>,
    idle: Mutex<Vec<MultiplexedConnection>>,
    blocking: Mutex<Vec<Connection>>,
    small: OnceCell<MultiplexedConnection>,
    place: String,
}

pub struct ByCrate {
    info: TierInfo,
    ours: Redis,
    inner: Arc<Inner>,
}

impl fmt::Debug for ByCrate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ByCrate({})", self.inner.place)
    }
}

fn fault(e: RedisError) -> Fault {
    match e.code() {
        Some(code) => Fault::Refused(format!("{code} {}", e.detail().unwrap_or_default())),
        None => Fault::unreachable(e),
    }
}

fn strange() -> Fault {
    Fault::protocol("unexpected reply")
}

/// The words that choose a way, if any.
pub fn chosen() -> Option<String> {
    std::env::var("KVCACHEPOOL_REDIS_CLIENT")
        .ok()
        .filter(|way| way != "ours")
}

impl ByCrate {
    pub fn open(urls: &[String], ours: Redis, way: &str) -> Result<Self, TierError> {
        let wrong = |why: String| TierError::new(Kind::Redis, Cause::Config, why);
        let (way, window) = way.split_once(',').unwrap_or((way, "2"));
        let way = match way {
            "mget" => Way::Mget,
            "gets" => Way::Gets,
            "blocking" => Way::Blocking,
            _ => return Err(wrong(format!("no such way: {way}"))),
        };
        let [url] = urls else {
            return Err(wrong("one URL".into()));
        };
        let info = url.as_str().into_connection_info();
        let info = info.map_err(|e| wrong(e.to_string()))?;
        let info = info.set_tcp_settings(TcpSettings::default().set_nodelay(true));
        let inner = Inner {
            way,
            window: window.parse().map_err(|_| wrong("window".into()))?,
            client: Client::open(info).map_err(|e| wrong(e.to_string()))?,
            permits: Arc::new(Semaphore::new(CONNECTIONS)),
            idle: Mutex::default(),
            blocking: Mutex::default(),
            small: OnceCell::new(),
            place: ours.place(),
        };

        Ok(Self {
            info: ours.info.clone(),
            ours,
            inner: Arc::new(inner),
        })
    }

    fn apart<T: Send + 'static, F>(&self, work: impl FnOnce(Arc<Inner>) -> F) -> Operation<'_, T>
    where
        F: Future<Output = Result<T, (Fault, Option<ObjectName>)>> + Send + 'static,
    {
        let (inner, place) = (self.inner.clone(), self.inner.place.clone());
        let work = work(inner);
        apart(async move {
            work.await
                .map_err(|(fault, name)| fault.error(&place, name.as_ref()))
        })
    }
}

/// What both kinds of connections are asked in the same way.
async fn ask(c: &mut MultiplexedConnection, cmd: &Cmd) -> Result<Value, Fault> {
    c.req_packed_command(cmd).await.map_err(fault)
}

async fn ask_all(c: &mut MultiplexedConnection, all: &Pipeline) -> Result<Vec<Value>, Fault> {
    let count = all.len();
    c.req_packed_commands(all, 0, count).await.map_err(fault)
}

fn missing() -> Fault {
    Fault::Of(Cause::Missing, "the object does not exist".into())
}

fn refused(value: Value) -> Result<Value, Fault> {
    value.extract_error().map_err(fault)
}

fn head_of(name: &ObjectName, value: Value) -> Result<Found, Fault> {
    let value = match refused(value)? {
        Value::BulkString(value) if !value.is_empty() => value,
        Value::BulkString(_) | Value::Nil => return Err(missing()),
        _ => return Err(strange()),
    };
    let corrupt = || Fault::Of(Cause::Corrupt, "the object is invalid".into());
    let record = Record::read(&value).ok_or_else(corrupt)?;
    let bytes = value.get(RECORD_BYTES..).unwrap_or_default();
    let object = Object::decode(bytes).map_err(|_| corrupt())?;
    let same = digest(bytes) == record.head
        && object.name() == *name
        && Record::new(&object, bytes, record.written_unix_s.get()) == record;
    same.then_some(Found { object, record }).ok_or_else(corrupt)
}

fn head_command(name: &ObjectName) -> Cmd {
    let mut get = cmd("GETRANGE");
    get.arg(name.redis()).arg(0).arg(HEAD_BYTES_MAX - 1);
    get
}

/// Keys and places of the segments of all places.
fn wanted(get: &Get, found: &Found) -> Result<Vec<(String, Span, Piece)>, Fault> {
    let mut wanted = Vec::new();
    for place in &get.places {
        let mut sections = found.object.sections.iter();
        let at = sections.position(|s| {
            (s.group, s.shard, s.stored_bytes) == (place.group, place.shard, place.span.length)
        });
        let index = at.ok_or_else(|| Fault::Of(Cause::Shape, "no such section".into()))?;
        place.span.saw(None);
        for piece in pieces(&found.object, index) {
            let key = get.name.redis_segment(&found.record.head, piece.segment);
            wanted.push((key, place.span.clone(), piece));
        }
    }
    Ok(wanted)
}

/// Copies a segment to its place. The parser has no other way to hand it over.
fn store(running: &mut Running, span: &Span, piece: Piece, value: Value) -> Result<(), Fault> {
    match refused(value)? {
        Value::BulkString(bytes) if bytes.len() as u64 == piece.bytes => {
            if !span.write(piece.at, &bytes) {
                return Err(Fault::Of(Cause::Shape, "a place is too short".into()));
            }
            running.came(span, piece.at, piece.bytes);
            Ok(())
        }
        Value::BulkString(_) => Err(Fault::Of(Cause::Corrupt, "length of a segment".into())),
        Value::Nil => Err(missing()),
        _ => Err(strange()),
    }
}

/// The bytes of a piece.
///
/// SAFETY (for a measurement): the span keeps the mapping, and in the benchmark nobody writes to it meanwhile.
fn slice(span: &Span, piece: Piece) -> Result<&[u8], Fault> {
    let start = span.arena.address(span.offset + piece.at, piece.bytes);
    let start = start.ok_or_else(strange)?;
    Ok(unsafe { std::slice::from_raw_parts(start.as_ptr(), piece.bytes as usize) })
}

/// An object that is written.
struct Draft {
    put: Put,
    name: ObjectName,
    record: Record,
    value: Vec<u8>,
    spans: Vec<Span>,
    parts: Vec<(String, usize, Piece)>,
}

impl Draft {
    fn new(put: Put) -> Result<Self, Fault> {
        let (object, name) = (&put.object, put.object.name());
        let head = object.encode();
        let head = head.map_err(|e| Fault::Of(Cause::Shape, e.to_string()))?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let record = Record::new(object, &head, now.map_or(0, |since| since.as_secs()));
        let parts = (0..object.sections.len()).flat_map(|n| {
            let key = |piece: &Piece| name.redis_segment(&record.head, piece.segment);
            pieces(object, n)
                .map(|piece| (key(&piece), n, piece))
                .collect::<Vec<_>>()
        });
        Ok(Self {
            parts: parts.collect(),
            spans: put.spans.iter().map(Span::watched).collect(),
            value: [record.as_bytes(), &head].concat(),
            record,
            name,
            put,
        })
    }

    fn bytes(&self) -> u64 {
        self.spans.iter().map(|span| span.length).sum()
    }

    /// Whether the digests of what was sent are those of the header.
    fn right(&self) -> Result<(), Fault> {
        let wanted = self.put.object.sections.iter().map(|s| s.stored_digest);
        let found = self.spans.iter().map(|s| s.seen().or_else(|| s.digest()));
        match found.eq(wanted.map(Some)) {
            true => Ok(()),
            false => Err(Fault::Of(Cause::Corrupt, "the bytes do not match".into())),
        }
    }

    fn all_at_once(&self, running: &mut Running) -> Result<Cmd, Fault> {
        let bytes = self.bytes() as usize + self.value.len() + 256 * (2 + self.parts.len());
        let mut set = Cmd::with_capacity(3 + 2 * self.parts.len(), bytes);
        set.arg("MSETNX");
        for (key, section, piece) in &self.parts {
            let span = &self.spans[*section];
            running.came(span, piece.at, piece.bytes);
            set.arg(key).arg(slice(span, *piece)?);
        }
        set.arg(self.name.redis()).arg(&self.value);
        self.right()?;
        Ok(set)
    }

    fn staged(&self, running: &mut Running, part: usize) -> Result<Cmd, Fault> {
        let (key, section, piece) = &self.parts[part];
        let span = &self.spans[*section];
        running.came(span, piece.at, piece.bytes);
        let mut set = Cmd::with_capacity(5, piece.bytes as usize + 256);
        set.arg("SET").arg(key).arg(slice(span, *piece)?);
        set.arg("PX").arg(STAGED_MS);
        Ok(set)
    }

    fn head_is_there(&self) -> Cmd {
        let mut get = cmd("GETRANGE");
        get.arg(self.name.redis()).arg(0).arg(RECORD_BYTES - 1);
        get
    }

    fn stage_head(&self) -> Cmd {
        let mut set = cmd("SET");
        set.arg(self.name.redis()).arg(&self.value).arg("NX");
        set.arg("PX").arg(HEAD_STAGED_MS);
        set
    }

    fn keys(&self) -> Vec<String> {
        let segments = self.parts.iter().map(|(key, ..)| key.clone());
        [self.name.redis()].into_iter().chain(segments).collect()
    }

    /// Watches all keys, and asks which exist.
    fn look(&self) -> Pipeline {
        let (keys, mut look) = (self.keys(), pipe());
        look.cmd("WATCH").arg(&keys);
        look.add_command(self.head_is_there());
        look.cmd("EXISTS").arg(&keys[1..]);
        look
    }

    fn is_whole(&self, seen: &[Value]) -> Result<(), Fault> {
        let own = matches!(&seen[1], Value::BulkString(value) if Record::read(value) == Some(self.record));
        let all = matches!(&seen[2], Value::Int(n) if *n as usize == self.parts.len());
        match own && all {
            true => Ok(()),
            false => Err(Fault::Of(Cause::Throttled, "it changed".into())),
        }
    }

    fn stay(&self) -> Pipeline {
        let mut stay = pipe();
        stay.atomic();
        for key in self.keys() {
            stay.cmd("PERSIST").arg(key);
        }
        stay
    }
}

impl Inner {
    async fn take(&self) -> Result<MultiplexedConnection, Fault> {
        if let Some(idle) = self.idle.lock().pop() {
            return Ok(idle);
        }
        self.connect().await
    }

    async fn connect(&self) -> Result<MultiplexedConnection, Fault> {
        let config = AsyncConnectionConfig::new().set_response_timeout(Some(ANSWER));
        let connecting = self
            .client
            .get_multiplexed_async_connection_with_config(&config);
        connecting.await.map_err(fault)
    }

    async fn small(&self) -> Result<MultiplexedConnection, Fault> {
        self.small.get_or_try_init(|| self.connect()).await.cloned()
    }

    /// A blocking connection in a thread of its own.
    async fn blocking<T: Send + 'static>(
        self: Arc<Self>,
        work: impl FnOnce(&mut Connection, usize) -> Result<T, Fault> + Send + 'static,
    ) -> Result<T, Fault> {
        let done = tokio::task::spawn_blocking(move || {
            let idle = self.blocking.lock().pop();
            let mut c = match idle {
                Some(c) => c,
                None => {
                    let c = self.client.get_connection().map_err(fault)?;
                    c.set_read_timeout(Some(ANSWER)).map_err(fault)?;
                    c
                }
            };
            let done = work(&mut c, self.window);
            if matches!(&done, Ok(_) | Err(Fault::Of(Cause::Missing, _))) {
                self.blocking.lock().push(c);
            }
            done
        });
        done.await.map_err(Fault::unreachable)?
    }

    async fn get(self: Arc<Self>, get: Get) -> Result<Object, Fault> {
        let permit = self.permits.clone().acquire_owned().await;
        let _permit = permit.map_err(Fault::unreachable)?;
        if self.way == Way::Blocking {
            return self
                .blocking(move |c, window| get_blocking(c, &get, window))
                .await;
        }
        let mut c = self.take().await?;
        let got = self.get_over(&mut c, &get).await;
        if matches!(&got, Ok(_) | Err(Fault::Of(Cause::Missing, _))) {
            self.idle.lock().push(c);
        }
        got
    }

    async fn get_over(&self, c: &mut MultiplexedConnection, get: &Get) -> Result<Object, Fault> {
        let found = head_of(&get.name, ask(c, &head_command(&get.name)).await?)?;
        let wanted = wanted(get, &found)?;
        let mut running = Running::default();
        if self.way == Way::Mget {
            let mut all = cmd("MGET");
            for (key, ..) in &wanted {
                all.arg(key);
            }
            let Value::Array(values) = ask(c, &all).await? else {
                return Err(strange());
            };
            for ((_, span, piece), value) in wanted.into_iter().zip(values) {
                store(&mut running, &span, piece, value)?;
            }
            return Ok(found.object);
        }
        let gets = wanted.into_iter().map(|(key, span, piece)| {
            let mut c = c.clone();
            async move {
                let mut get = cmd("GET");
                get.arg(key);
                (c.send_packed_command(&get).await, span, piece)
            }
        });
        let mut came = stream::iter(gets).buffered(self.window);
        while let Some((value, span, piece)) = came.next().await {
            store(&mut running, &span, piece, value.map_err(fault)?)?;
        }
        Ok(found.object)
    }

    async fn put(self: Arc<Self>, put: Put) -> Result<Stored, Fault> {
        let permit = self.permits.clone().acquire_owned().await;
        let _permit = permit.map_err(Fault::unreachable)?;
        let draft = Draft::new(put)?;
        if self.way == Way::Blocking {
            return self
                .blocking(move |c, window| put_blocking(c, &draft, window))
                .await;
        }
        let mut c = self.take().await?;
        let stored = self.put_over(&mut c, &draft).await;
        if stored.is_ok() {
            self.idle.lock().push(c);
        }
        stored
    }

    async fn put_over(&self, c: &mut MultiplexedConnection, d: &Draft) -> Result<Stored, Fault> {
        let mut running = Running::default();
        if d.bytes() <= AT_ONCE_BYTES {
            return set_at_once(ask(c, &d.all_at_once(&mut running)?).await?);
        }
        if !matches!(ask(c, &d.head_is_there()).await?, Value::BulkString(v) if v.is_empty()) {
            return Ok(Stored::Already);
        }
        let sets = (0..d.parts.len()).map(|part| {
            let (mut c, set) = (c.clone(), d.staged(&mut running, part));
            async move { c.send_packed_command(&set?).await.map_err(fault) }
        });
        let mut sent = stream::iter(sets).buffered(self.window);
        while let Some(reply) = sent.next().await {
            refused(reply?)?;
        }
        drop(sent);
        d.right()?;
        refused(ask(c, &d.stage_head()).await?)?;
        d.is_whole(&ask_all(c, &d.look()).await?)?;
        let stay = d.stay();
        let stayed = c.req_packed_commands(&stay, stay.len() + 1, 1).await;
        match stayed.map_err(fault)?.first() {
            Some(Value::Array(_)) => Ok(Stored::New),
            _ => Err(Fault::Of(Cause::Throttled, "it changed".into())),
        }
    }

    async fn remove(self: Arc<Self>, names: Vec<ObjectName>) -> Result<u64, Fault> {
        let mut c = self.small().await?;
        let mut look = pipe();
        for name in &names {
            let get = look.cmd("GETRANGE").arg(name.redis());
            get.arg(0).arg(RECORD_BYTES - 1);
        }
        let seen = ask_all(&mut c, &look).await?;
        let (mut removed, mut del) = (0, pipe());
        for (name, value) in names.iter().zip(seen) {
            if let Value::BulkString(value) = value
                && let Some(record) = Record::read(&value)
            {
                let keys: Vec<String> = record.keys(name).chain([name.redis()]).collect();
                del.cmd("DEL").arg(keys);
                removed += 1;
            }
        }
        if removed > 0 {
            ask_all(&mut c, &del).await?;
        }
        Ok(removed)
    }

    async fn lookup(self: Arc<Self>, names: Vec<ObjectName>) -> Result<Vec<bool>, Fault> {
        let mut c = self.small().await?;
        let mut look = pipe();
        for name in &names {
            look.cmd("EXISTS").arg(name.redis());
        }
        let seen = ask_all(&mut c, &look).await?;
        Ok(seen.iter().map(|v| matches!(v, Value::Int(1))).collect())
    }

    async fn head(self: Arc<Self>, name: ObjectName) -> Result<Object, Fault> {
        let mut c = self.small().await?;
        let found = head_of(&name, ask(&mut c, &head_command(&name)).await?)?;
        Ok(found.object)
    }
}

fn set_at_once(reply: Value) -> Result<Stored, Fault> {
    match refused(reply)? {
        Value::Int(1) => Ok(Stored::New),
        Value::Int(_) => Ok(Stored::Already),
        _ => Err(strange()),
    }
}

fn send(c: &mut Connection, bytes: &[u8]) -> Result<(), Fault> {
    c.send_packed_command(bytes).map_err(fault)
}

fn receive(c: &mut Connection) -> Result<Value, Fault> {
    c.recv_response().map_err(fault)
}

fn get_blocking(c: &mut Connection, get: &Get, window: usize) -> Result<Object, Fault> {
    send(c, &head_command(&get.name).get_packed_command())?;
    let found = head_of(&get.name, receive(c)?)?;
    let wanted = wanted(get, &found)?;
    let mut running = Running::default();
    let mut asked = wanted.iter();
    let mut ask = |c: &mut Connection, most: usize| {
        let mut out = Vec::new();
        for (key, ..) in asked.by_ref().take(most) {
            resp::command(&mut out, &[b"GET", key.as_bytes()]);
        }
        match out.is_empty() {
            true => Ok(()),
            false => send(c, &out),
        }
    };
    ask(c, window)?;
    for (_, span, piece) in &wanted {
        let value = receive(c)?;
        ask(c, 1)?;
        store(&mut running, span, *piece, value)?;
    }
    Ok(found.object)
}

/// Sends from the arena: nothing is copied.
fn put_blocking(c: &mut Connection, d: &Draft, window: usize) -> Result<Stored, Fault> {
    let (mut running, mut out) = (Running::default(), Vec::new());
    let at_once = d.bytes() <= AT_ONCE_BYTES;
    if at_once {
        resp::begin(&mut out, 3 + 2 * d.parts.len());
        resp::word(&mut out, b"MSETNX");
    } else {
        send(c, &d.head_is_there().get_packed_command())?;
        if !matches!(refused(receive(c)?)?, Value::BulkString(v) if v.is_empty()) {
            return Ok(Stored::Already);
        }
    }
    let mut open = 0;
    for (key, section, piece) in &d.parts {
        let span = &d.spans[*section];
        running.came(span, piece.at, piece.bytes);
        if !at_once {
            if open == window && piece.bytes == REDIS_SEGMENT_BYTES {
                refused(receive(c)?)?;
                open -= 1;
            }
            resp::begin(&mut out, 5);
            resp::word(&mut out, b"SET");
            open += 1;
        }
        resp::word(&mut out, key.as_bytes());
        resp::length(&mut out, piece.bytes);
        if piece.bytes <= COPIED_BYTES {
            out.extend_from_slice(slice(span, *piece)?);
        } else {
            send(c, &out)?;
            send(c, slice(span, *piece)?)?;
            out.clear();
        }
        out.extend_from_slice(b"\r\n");
        if !at_once {
            resp::word(&mut out, b"PX");
            resp::word(&mut out, STAGED_MS.as_bytes());
        }
    }
    d.right()?;
    if at_once {
        resp::word(&mut out, d.name.redis().as_bytes());
        resp::word(&mut out, &d.value);
        send(c, &out)?;
        return set_at_once(receive(c)?);
    }
    send(c, &out)?;
    for _ in 0..open {
        refused(receive(c)?)?;
    }
    send(c, &d.stage_head().get_packed_command())?;
    refused(receive(c)?)?;
    send(c, &d.look().get_packed_pipeline())?;
    let seen = [receive(c)?, receive(c)?, receive(c)?];
    d.is_whole(&seen)?;
    let stay = d.stay();
    send(c, &stay.get_packed_pipeline())?;
    for _ in 0..=stay.len() {
        refused(receive(c)?)?;
    }
    match receive(c)? {
        Value::Array(_) => Ok(Stored::New),
        _ => Err(Fault::Of(Cause::Throttled, "it changed".into())),
    }
}

impl Tier for ByCrate {
    fn info(&self) -> &TierInfo {
        &self.info
    }

    fn lookup<'a>(&'a self, names: &'a [ObjectName]) -> Operation<'a, Vec<bool>> {
        let names = names.to_vec();
        self.apart(|inner| async move { inner.lookup(names).await.map_err(|e| (e, None)) })
    }

    fn head<'a>(&'a self, name: &'a ObjectName) -> Operation<'a, Object> {
        let name = name.clone();
        let about = Some(name.clone());
        self.apart(|inner| async move { inner.head(name).await.map_err(|e| (e, about)) })
    }

    fn get(&self, get: Get) -> Operation<'_, Object> {
        let about = Some(get.name.clone());
        self.apart(|inner| async move { inner.get(get).await.map_err(|e| (e, about)) })
    }

    fn put(&self, put: Put) -> Operation<'_, Stored> {
        let about = Some(put.object.name());
        self.apart(|inner| async move { inner.put(put).await.map_err(|e| (e, about)) })
    }

    fn remove<'a>(&'a self, removal: Removal<'a>) -> Operation<'a, u64> {
        let names = removal.names().into_owned();
        self.apart(|inner| async move { inner.remove(names).await.map_err(|e| (e, None)) })
    }

    fn usage(&self) -> Operation<'_, Usage> {
        self.ours.usage()
    }

    fn list<'a>(&'a self, from: Option<&'a str>, limit: usize) -> Operation<'a, Page> {
        self.ours.list(from, limit)
    }
}

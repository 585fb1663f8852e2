//! One remote client: reads a request, acts on it through the sidecar's session, and writes the reply, one after the other.

use super::objects::Pieces;
use super::upstream::{Lost, Reply, State, Upstream};
use super::{Place, Server, keys};
use kvcachepool_protocol::PROTOCOL_VERSION;
use kvcachepool_protocol::frame::{
    FLAG_DATA, FLAG_ERROR, FLAG_REPLY, HEADER_BYTES, Header, MAX_BODY, Op,
};
use kvcachepool_protocol::key::EngineHash;
use kvcachepool_protocol::message::{
    BadBody, CHUNK_READY, ErrorBody, ErrorCode, GRANT_GRANTED, Grant, GrantReply, Objects, Pin,
    Probe, ProbeReply, Release, Sections, decode, encode,
};
use kvcachepool_protocol::refs::pack;
use kvcachepool_protocol::remote::{
    self, HELLO_BYTES_MAX, KEYS_MAX, MAP_BYTES_MAX, Parts, ReadReply, WRITE_COMPLETE, WRITE_LOST,
    WRITE_MORE, WriteReply,
};
use serde::Serialize;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::SemaphorePermit;
use tokio::time::{Instant, timeout, timeout_at};

/// A frame must move within this time, and that of its bytes at [`BYTES_PER_S_MIN`]: buffers are held meanwhile.
const FRAME_PATIENCE: Duration = Duration::from_secs(5);
const BYTES_PER_S_MIN: u64 = 1 << 20;
/// A client that has memory to write must go on with it.
const WRITE_PATIENCE: Duration = Duration::from_secs(60);
/// What the sidecar may take for a PROBE beyond the client's budget.
const PROBE_PATIENCE: Duration = Duration::from_secs(10);
/// Requests of one connection that hold leases, and that hold granted memory.
const REQUESTS_MAX: usize = 1024;
/// Pieces of the objects that one connection leases.
const PIECES_MAX: usize = 16_384;
/// The unit of [`Server::buffers`].
pub const BUFFER_BYTES: usize = 64 << 10;

/// Why a connection ended, as the log and the metrics name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The client closed it.
    Closed,
    TlsFailed,
    /// Newer connections took its place before HELLO.
    Displaced,
    TooManyConnections,
    /// The client closed it in the middle of a frame, or the network failed.
    Broken,
    /// A frame that is too long, of another version, or too slow.
    BadFrame,
    TooSlow,
    WrongKey,
    /// There was no sidecar when the client came.
    NoSidecar,
    /// The connection to the sidecar ended.
    SidecarLost,
    /// This process stops.
    Stopping,
}

/// An error reply.
struct Refusal(ErrorBody);

impl Refusal {
    fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self(ErrorBody {
            code,
            message: message.into(),
            retryable: false,
        })
    }
}

impl From<BadBody> for Refusal {
    fn from(e: BadBody) -> Self {
        Self::new(ErrorCode::BadBody, e.to_string())
    }
}

/// What a request leads to, if not to a reply.
enum Failed {
    /// An error, after which the connection goes on.
    Refused(Refusal),
    /// The connection to the sidecar ended.
    Lost,
}

impl From<Refusal> for Failed {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl From<BadBody> for Failed {
    fn from(e: BadBody) -> Self {
        Self::Refused(e.into())
    }
}

impl From<Lost> for Failed {
    fn from(_: Lost) -> Self {
        Self::Lost
    }
}

/// The body of a reply. `data` follows `front`, and its buffer is accounted for until it is sent.
struct Body<'a> {
    front: Vec<u8>,
    data: Option<(Vec<u8>, SemaphorePermit<'a>)>,
}

/// A request. Its buffer is accounted for until it is dropped.
struct Frame<'a> {
    header: Header,
    body: Vec<u8>,
    _buffers: SemaphorePermit<'a>,
}

/// An object whose bytes arrive.
struct Writing {
    pieces: Pieces,
    written: u64,
}

struct Lease {
    /// The id of the request at the sidecar.
    request: String,
    /// By position of the key; `None` for one that is not in memory.
    objects: Vec<Option<Pieces>>,
}

impl Lease {
    fn pieces(&self) -> usize {
        self.objects.iter().flatten().map(|o| o.refs.len()).sum()
    }
}

/// One connection after HELLO, and what it holds.
struct Client<'a> {
    server: &'a Server,
    upstream: Arc<Upstream>,
    leases: HashMap<String, Lease>,
    pieces: usize,
    grants: HashMap<String, Vec<Option<Writing>>>,
    /// When memory was granted or bytes were written last.
    progress: Instant,
}

/// Serves a connection after HELLO until it ends.
pub async fn serve<S>(server: &Server, mut stream: S, upstream: Arc<Upstream>) -> End
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    server.metrics.add("remote_connections_total", &[], 1);
    let mut client = Client {
        server,
        upstream: upstream.clone(),
        leases: HashMap::new(),
        pieces: 0,
        grants: HashMap::new(),
        progress: Instant::now(),
    };
    let mut stop = server.stop.clone();
    loop {
        // A reply of the sidecar may grant memory. Therefore nothing interrupts a request that was begun.
        let frame = tokio::select! {
            frame = client.next(&mut stream) => frame,
            () = upstream.ended() => return End::SidecarLost,
            _ = stop.wait_for(|stop| *stop) => Err(End::Stopping),
        };
        let ended = match frame {
            Ok(Some(frame)) => client.answer(&mut stream, frame.header, &frame.body).await,
            Ok(None) => Err(End::Closed),
            Err(end) => Err(end),
        };
        if let Err(end) = ended {
            return end;
        }
    }
}

/// Reads HELLO, checks the key, and replies. Returns the session with the sidecar, and the client's place among the served ones.
pub async fn greet<'a, S>(
    server: &'a Server,
    stream: &mut S,
) -> Result<(Arc<Upstream>, Place<'a>), End>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut head = [0; HEADER_BYTES];
    stream
        .read_exact(&mut head)
        .await
        .map_err(|_| End::Broken)?;
    let mut tag = [0; 8];
    tag.copy_from_slice(&head[8..]);
    let tag = u64::from_le_bytes(tag);
    let refuse = async |stream: &mut S, end: End, refusal: Refusal| {
        // The connection ends with or without the reply.
        let _ = write_error(stream, Op::Hello as u8, tag, &refusal).await;
        Err(end)
    };
    let header = match Header::decode(&head) {
        Ok(header) => header,
        Err(e) => {
            let refusal = Refusal::new(ErrorCode::WrongVersion, e.to_string());
            return refuse(stream, End::BadFrame, refusal).await;
        }
    };
    if header.opcode != Op::Hello as u8 || header.length as usize > HELLO_BYTES_MAX {
        let said = format!("the first frame must be HELLO, with at most {HELLO_BYTES_MAX} bytes");
        return refuse(
            stream,
            End::BadFrame,
            Refusal::new(ErrorCode::HelloFirst, said),
        )
        .await;
    }
    let mut body = vec![0; header.length as usize];
    stream
        .read_exact(&mut body)
        .await
        .map_err(|_| End::Broken)?;
    let hello: remote::Hello = match decode(&body) {
        Ok(hello) => hello,
        Err(e) => return refuse(stream, End::BadFrame, e.into()).await,
    };
    if let Err(e) = keys::check(&server.key_file, &hello.key) {
        let refusal = Refusal::new(ErrorCode::Unauthorized, e.to_string());
        return refuse(stream, End::WrongKey, refusal).await;
    }
    let Some(place) = server.place() else {
        let refusal = Refusal(ErrorBody {
            code: ErrorCode::LimitReached,
            message: "the server has as many connections as --connections allows".into(),
            retryable: true,
        });
        return refuse(stream, End::TooManyConnections, refusal).await;
    };
    let state: State = server.upstream.borrow().clone();
    let upstream = match state.attached() {
        Ok(upstream) => upstream,
        Err(reason) => {
            let refusal = Refusal(ErrorBody {
                code: ErrorCode::NoArena,
                message: reason,
                retryable: true,
            });
            return refuse(stream, End::NoSidecar, refusal).await;
        }
    };
    let reply = remote::HelloReply {
        version: PROTOCOL_VERSION,
        sidecar_version: upstream.hello.sidecar_version.clone(),
        boot: upstream.hello.boot,
        features: upstream.hello.features.clone(),
        arena_bytes: upstream.arena_bytes,
        load_timeout_ms: upstream.hello.settings.load_timeout_ms,
    };
    let body = Body {
        front: encode(&reply).map_err(|_| End::Broken)?,
        data: None,
    };
    write(stream, Op::Hello as u8, 0, tag, body).await?;
    tracing::debug!(
        engine = hello.engine,
        version = hello.engine_version,
        instance = hello.instance,
        "remote client"
    );
    Ok((upstream, place))
}

impl<'a> Client<'a> {
    /// The next frame; `None` at the end of the stream.
    async fn next<S: AsyncRead + Unpin>(&self, stream: &mut S) -> Result<Option<Frame<'a>>, End> {
        let mut head = [0; HEADER_BYTES];
        let first = stream.read(&mut head);
        let read = match self.grants.is_empty() {
            true => first.await,
            false => timeout_at(self.progress + WRITE_PATIENCE, first)
                .await
                .map_err(|_| End::TooSlow)?,
        };
        let read = read.map_err(|_| End::Broken)?;
        if read == 0 {
            return Ok(None);
        }
        fill(stream, &mut head[read..]).await?;
        let header = Header::decode(&head).map_err(|_| End::BadFrame)?;
        let length = header.length as usize;
        let (most, buffers) = match header.opcode == Op::Write as u8 {
            true => (MAX_BODY, length.div_ceil(BUFFER_BYTES)),
            false => (MAP_BYTES_MAX, 0),
        };
        if length > most {
            return Err(End::BadFrame);
        }
        let buffers = self.server.buffers(buffers).await?;
        let mut body = vec![0; length];
        fill(stream, &mut body).await?;
        Ok(Some(Frame {
            header,
            body,
            _buffers: buffers,
        }))
    }

    /// Acts on a request and replies.
    async fn answer<S: AsyncWrite + Unpin>(
        &mut self,
        stream: &mut S,
        header: Header,
        body: &[u8],
    ) -> Result<(), End> {
        let op = Op::try_from(header.opcode);
        let name = op.map_or("unknown".into(), |op| format!("{op:?}").to_lowercase());
        let outcome = match op {
            Ok(op) => self.act(op, header.flags, body).await,
            Err(e) => Err(Refusal::new(ErrorCode::UnknownOpcode, e.to_string()).into()),
        };
        let result = match &outcome {
            Ok(_) => "ok",
            Err(_) => "error",
        };
        let metrics = &self.server.metrics;
        metrics.add("remote_requests_total", &[&name, result], 1);
        match outcome {
            Ok(body) => {
                let flags = if body.data.is_some() { FLAG_DATA } else { 0 };
                write(stream, header.opcode, flags, header.tag, body).await
            }
            Err(Failed::Refused(refusal)) => {
                write_error(stream, header.opcode, header.tag, &refusal).await
            }
            Err(Failed::Lost) => Err(End::SidecarLost),
        }
    }

    async fn act(&mut self, op: Op, flags: u16, body: &[u8]) -> Result<Body<'a>, Failed> {
        match op {
            Op::Probe => plain(&self.probe(decode(body)?).await?),
            Op::Release => {
                let release: Release = decode(body)?;
                let mut ended = Vec::new();
                for lease in release
                    .requests
                    .iter()
                    .filter_map(|id| self.leases.remove(id))
                {
                    self.pieces -= lease.pieces();
                    ended.push(lease.request);
                }
                self.release(ended);
                plain(&HashMap::<String, u8>::new())
            }
            Op::Grant => plain(&self.grant(decode(body)?).await?),
            Op::Objects => {
                let objects: Objects = decode(body)?;
                let (_, reply) = self.upstream.request(Op::Objects, &objects).await?;
                Ok(Body {
                    front: reply.map_err(Refusal)?,
                    data: None,
                })
            }
            Op::Read => self.read(&decode(body)?).await,
            Op::Write => {
                let (parts, data) = remote::split(flags, body)?;
                plain(&self.write(&parts, data)?)
            }
            op => {
                let said = format!("{op:?} is not served over TCP");
                Err(Refusal::new(ErrorCode::NotServed, said).into())
            }
        }
    }

    /// Looks keys up, and leases what is ready if the client asks for more than existence.
    async fn probe(&mut self, asked: Probe) -> Result<remote::ProbeReply, Failed> {
        let leases = asked.local_tokens.is_some();
        let keys = asked.hashes.len() / size_of::<EngineHash>();
        if keys > KEYS_MAX {
            let said = format!("a PROBE may name {KEYS_MAX} keys, got {keys}");
            return Err(Refusal::new(ErrorCode::LimitReached, said).into());
        }
        if leases {
            free_place(&self.leases, &asked.request)?;
        }
        let id = self.server.new_request();
        // Nothing of vLLM's part of the message is the client's to set.
        let probe = Probe {
            request: id.clone(),
            namespace: asked.namespace,
            hashes: asked.hashes,
            tail_tokens: 0,
            local_tokens: leases.then_some(0),
            budget_ms: asked.budget_ms,
            max_load_tokens: None,
            prefill_tokens_per_s: 0,
            independent: asked.independent,
        };
        let longest = self.upstream.hello.settings.load_timeout_ms;
        let longest = Duration::from_millis(asked.budget_ms.max(longest)) + PROBE_PATIENCE;
        let replied = timeout(longest, self.upstream.request(Op::Probe, &probe)).await;
        let Ok(replied) = replied else {
            self.release(vec![id]);
            return Err(Refusal(ErrorBody {
                code: ErrorCode::NoArena,
                message: "the sidecar did not answer in time".into(),
                retryable: true,
            })
            .into());
        };
        let (tag, reply) = replied?;
        let probed = self.probed(reply, keys, leases);
        let lease = match &probed {
            Ok((_, objects)) if objects.iter().any(Option::is_some) => Lease {
                request: id,
                objects: objects.clone(),
            },
            _ => {
                self.release(vec![id]);
                return probed.map(|(reply, _)| reply);
            }
        };
        let pieces = lease.pieces();
        if self.pieces + pieces > PIECES_MAX {
            self.release(vec![lease.request]);
            let said = format!("a connection may lease {PIECES_MAX} pieces; end some leases");
            return Err(Refusal::new(ErrorCode::LimitReached, said).into());
        }
        let pin = Pin {
            request: lease.request.clone(),
            probe: tag,
            from: 0,
            to: u32::try_from(keys).unwrap_or(u32::MAX),
        };
        self.upstream.send(Op::Pin, &pin);
        self.pieces += pieces;
        self.leases.insert(asked.request, lease);
        probed.map(|(reply, _)| reply)
    }

    /// Reads the reply to a PROBE: what the client hears, and the objects by position of their keys.
    fn probed(
        &self,
        reply: Reply,
        keys: usize,
        leases: bool,
    ) -> Result<(remote::ProbeReply, Vec<Option<Pieces>>), Failed> {
        let mut reply: ProbeReply = decode(&reply.map_err(Refusal)?)?;
        if reply.states.is_empty() && !reply.reason.is_empty() {
            reply.states = vec![0; keys];
        }
        let ready = reply.states.iter().filter(|s| **s == CHUNK_READY).count();
        if reply.states.len() != keys
            || (leases && ready > 0 && reply.region != self.upstream.region)
        {
            return Err(self.distrust("a reply to PROBE for other keys or another memory"));
        }
        let mut objects = Vec::new();
        if leases {
            let found =
                Pieces::of_refs(&reply.refs, ready).map_err(|e| self.distrust(&e.to_string()))?;
            let mut found = found.into_iter();
            let located = reply.states.iter().map(|state| match *state {
                CHUNK_READY => found.next(),
                _ => None,
            });
            objects = located.collect();
        }
        let bytes = objects.iter().flatten().map(|pieces| pieces.bytes);
        let reply = remote::ProbeReply {
            bytes: bytes.collect(),
            states: reply.states,
            reason: reply.reason,
        };
        Ok((reply, objects))
    }

    async fn grant(&mut self, mut grant: Grant) -> Result<remote::GrantReply, Failed> {
        let id = self.server.new_request();
        let asked = std::mem::replace(&mut grant.request, id);
        free_place(&self.grants, &asked)?;
        let (_, reply) = self.upstream.request(Op::Grant, &grant).await?;
        let reply: GrantReply =
            decode(&reply.map_err(Refusal)?).map_err(|e| self.distrust(&e.to_string()))?;
        let granted = |result: &u8| *result == GRANT_GRANTED;
        let count = reply.results.iter().copied().filter(|r| granted(r)).count();
        let fits = reply.results.len() == grant.chunks.len()
            && (count == 0 || reply.region == self.upstream.region);
        let found = Pieces::of_refs(&reply.refs, count);
        let (true, Ok(found)) = (fits, found) else {
            return Err(self.distrust("a reply to GRANT that does not fit the request"));
        };
        let mut found = found.into_iter();
        let mut writing = Vec::new();
        for (chunk, result) in grant.chunks.iter().zip(&reply.results) {
            let pieces = if granted(result) { found.next() } else { None };
            if pieces.as_ref().is_some_and(|p| p.bytes != chunk.bytes) {
                return Err(self.distrust("a GRANT of another length"));
            }
            writing.push(pieces.map(|pieces| Writing { pieces, written: 0 }));
        }
        if count > 0 {
            self.progress = Instant::now();
            self.grants.insert(asked, writing);
        }
        Ok(remote::GrantReply {
            results: reply.results,
        })
    }

    async fn read(&self, read: &Parts) -> Result<Body<'a>, Failed> {
        let Some(bytes) = read.data_bytes().filter(|bytes| *bytes <= DATA_BYTES_MAX) else {
            return Err(too_many(DATA_BYTES_MAX).into());
        };
        let buffers = self.server.buffers(bytes.div_ceil(BUFFER_BYTES)).await;
        let buffers = buffers.map_err(|_| Failed::Lost)?;
        let lease = self.leases.get(&read.request);
        let mut data = vec![0; bytes];
        let mut filled = 0;
        let mut found = Vec::with_capacity(read.parts.len());
        for part in read.iter() {
            let object = lease.and_then(|lease| lease.objects.get(part.index as usize)?.as_ref());
            let end = filled + part.length as usize;
            let copied = match (object, data.get_mut(filled..end)) {
                (Some(pieces), Some(into)) => {
                    if !pieces.contains(part.offset, u64::from(part.length)) {
                        return Err(beyond(pieces).into());
                    }
                    self.upstream.memory.read(pieces, part.offset, into)
                }
                _ => false,
            };
            found.push(u8::from(copied));
            filled = if copied { end } else { filled };
        }
        data.truncate(filled);
        let metrics = &self.server.metrics;
        metrics.add("remote_bytes_total", &["read"], filled as u64);
        Ok(Body {
            front: remote::front(&ReadReply { found })?,
            data: Some((data, buffers)),
        })
    }

    fn write(&mut self, write: &Parts, data: &[u8]) -> Result<WriteReply, Failed> {
        if write.data_bytes() != Some(data.len()) {
            let said = "the parts of a WRITE do not have as many bytes as its data";
            return Err(Refusal::new(ErrorCode::BadBody, said).into());
        }
        let Some(objects) = self.grants.get_mut(&write.request) else {
            let written = vec![WRITE_LOST; write.parts.len()];
            return Ok(WriteReply { written });
        };
        // All parts are checked before the first is copied.
        let mut next: HashMap<u32, u64> = HashMap::new();
        for part in write.iter() {
            let Some(object) = objects.get(part.index as usize) else {
                let said = format!("the GRANT has no object {}", part.index);
                return Err(Refusal::new(ErrorCode::BadBody, said).into());
            };
            let Some(writing) = object else {
                continue;
            };
            let at = next.entry(part.index).or_insert(writing.written);
            if part.offset != *at {
                let said = format!(
                    "expected byte {at} of object {}, got {}",
                    part.index, part.offset
                );
                return Err(Refusal::new(ErrorCode::BadBody, said).into());
            }
            if !writing.pieces.contains(*at, u64::from(part.length)) {
                return Err(beyond(&writing.pieces).into());
            }
            *at += u64::from(part.length);
        }
        let mut rest = data;
        let mut written = Vec::with_capacity(write.parts.len());
        for part in write.iter() {
            let (bytes, left) = rest.split_at(rest.len().min(part.length as usize));
            rest = left;
            let object = objects.get_mut(part.index as usize);
            let Some((object, writing)) = object.and_then(|o| o.take().map(|w| (o, w))) else {
                written.push(WRITE_LOST);
                continue;
            };
            let Writing {
                pieces,
                written: at,
            } = writing;
            let copied = self.upstream.memory.write(&pieces, at, bytes);
            let at = at + u64::from(part.length);
            if copied {
                self.progress = Instant::now();
            }
            if copied && at < pieces.bytes {
                written.push(WRITE_MORE);
                *object = Some(Writing {
                    pieces,
                    written: at,
                });
                continue;
            }
            let op = if copied { Op::Commit } else { Op::Abort };
            let sent = self.upstream.send(op, &sections(&self.upstream, &pieces));
            written.push(match copied && sent {
                true => WRITE_COMPLETE,
                false => WRITE_LOST,
            });
        }
        if objects.iter().all(Option::is_none) {
            self.grants.remove(&write.request);
        }
        let metrics = &self.server.metrics;
        metrics.add("remote_bytes_total", &["written"], data.len() as u64);
        Ok(WriteReply { written })
    }

    fn release(&self, requests: Vec<String>) {
        if !requests.is_empty() {
            self.upstream.send(Op::Release, &Release { requests });
        }
    }

    /// The connection to the sidecar cannot be trusted any more: it ends, and with it everything that it holds.
    fn distrust(&self, reason: &str) -> Failed {
        self.upstream.distrust(reason);
        Failed::Lost
    }
}

/// Gives back what the connection holds.
impl Drop for Client<'_> {
    fn drop(&mut self) {
        let leases = std::mem::take(&mut self.leases).into_values();
        self.release(leases.map(|lease| lease.request).collect());
        let grants = std::mem::take(&mut self.grants).into_values();
        for writing in grants.flatten().flatten() {
            let unwritten = sections(&self.upstream, &writing.pieces);
            self.upstream.send(Op::Abort, &unwritten);
        }
    }
}

/// Longest data of a READ's reply: its map must fit into the frame, too.
const DATA_BYTES_MAX: usize = MAX_BODY - MAP_BYTES_MAX;

fn free_place<V>(held: &HashMap<String, V>, request: &str) -> Result<(), Refusal> {
    if held.contains_key(request) {
        let said = format!("the request {request} still holds memory; use another id");
        return Err(Refusal::new(ErrorCode::BadBody, said));
    }
    if held.len() >= REQUESTS_MAX {
        let said = format!("a connection may have {REQUESTS_MAX} open requests; end some of them");
        return Err(Refusal::new(ErrorCode::LimitReached, said));
    }
    Ok(())
}

fn too_many(most: usize) -> Refusal {
    let said = format!("the parts of one frame may have 1 to {most} bytes together");
    Refusal::new(ErrorCode::BadBody, said)
}

fn beyond(pieces: &Pieces) -> Refusal {
    let said = format!("a part ends after the object's {} bytes", pieces.bytes);
    Refusal::new(ErrorCode::BadBody, said)
}

fn sections(upstream: &Upstream, pieces: &Pieces) -> Sections {
    Sections {
        region: upstream.region,
        refs: pack(&pieces.refs),
    }
}

fn plain<'a, B: Serialize>(body: &B) -> Result<Body<'a>, Failed> {
    Ok(Body {
        front: encode(body)?,
        data: None,
    })
}

/// How long this many bytes may take.
fn patience(bytes: usize) -> Duration {
    FRAME_PATIENCE + Duration::from_millis(bytes as u64 * 1000 / BYTES_PER_S_MIN)
}

async fn fill<S: AsyncRead + Unpin>(stream: &mut S, into: &mut [u8]) -> Result<(), End> {
    match timeout(patience(into.len()), stream.read_exact(into)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(_)) => Err(End::Broken),
        Err(_) => Err(End::TooSlow),
    }
}

async fn write_error<S>(stream: &mut S, opcode: u8, tag: u64, refusal: &Refusal) -> Result<(), End>
where
    S: AsyncWrite + Unpin,
{
    let front = encode(&refusal.0).map_err(|_| End::Broken)?;
    write(stream, opcode, FLAG_ERROR, tag, Body { front, data: None }).await
}

async fn write<S>(
    stream: &mut S,
    opcode: u8,
    flags: u16,
    tag: u64,
    body: Body<'_>,
) -> Result<(), End>
where
    S: AsyncWrite + Unpin,
{
    let Body { mut front, data } = body;
    let data_bytes = data.as_ref().map_or(0, |(data, _)| data.len());
    let header = Header {
        length: u32::try_from(front.len() + data_bytes).unwrap_or(u32::MAX),
        version: PROTOCOL_VERSION,
        opcode,
        flags: flags | FLAG_REPLY,
        tag,
    };
    front.splice(0..0, header.encode());
    let sent = timeout(patience(front.len() + data_bytes), async {
        stream.write_all(&front).await?;
        if let Some((data, _)) = &data {
            stream.write_all(data).await?;
        }
        stream.flush().await
    });
    match sent.await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(_)) => Err(End::Broken),
        Err(_) => Err(End::TooSlow),
    }
}

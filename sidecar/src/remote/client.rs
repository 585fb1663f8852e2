//! One remote client: reads a request, acts on it through the sidecar's session, and writes the reply, one after the other.

use super::objects::Pieces;
use super::upstream::{Lost, Reply, State, Upstream};
use super::{Server, keys};
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
    self, HELLO_BYTES_MAX, Parts, ReadReply, WRITE_COMPLETE, WRITE_LOST, WRITE_MORE, WriteReply,
};
use serde::Serialize;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::SemaphorePermit;
use tokio::time::timeout;

/// Longest body without data.
const MAP_BYTES_MAX: usize = 256 << 10;
/// Longest time for a head or a body to arrive, and for a reply to be sent.
const FRAME_PATIENCE: Duration = Duration::from_secs(30);
/// A client that has memory to write must go on with it.
const WRITE_PATIENCE: Duration = Duration::from_secs(60);
/// Requests of one connection that hold leases, and that hold granted memory.
const REQUESTS_MAX: usize = 1024;
/// The unit of [`Server::buffers`].
pub const BUFFER_BYTES: usize = 64 << 10;

/// Why a connection ended, as the log and the metrics name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The client closed it.
    Closed,
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

/// One connection after HELLO, and what it holds.
struct Client<'a> {
    server: &'a Server,
    upstream: Arc<Upstream>,
    leases: HashMap<String, Lease>,
    grants: HashMap<String, Vec<Option<Writing>>>,
}

/// Serves a connection until it ends. `hello` limits the time up to the end of HELLO.
pub async fn serve<S>(server: &Server, mut stream: S, hello: Duration) -> End
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let greeted = timeout(hello, greet(server, &mut stream)).await;
    let upstream = match greeted.unwrap_or(Err(End::TooSlow)) {
        Ok(upstream) => upstream,
        Err(end) => return end,
    };
    server
        .metrics
        .add("remote_connections_total", &["served"], 1);
    let mut client = Client {
        server,
        upstream: upstream.clone(),
        leases: HashMap::new(),
        grants: HashMap::new(),
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
            client.give_back();
            return end;
        }
    }
}

/// Reads HELLO, checks the key, and replies.
async fn greet<S>(server: &Server, stream: &mut S) -> Result<Arc<Upstream>, End>
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
    Ok(upstream)
}

impl<'a> Client<'a> {
    /// The next frame; `None` at the end of the stream.
    async fn next<S: AsyncRead + Unpin>(&self, stream: &mut S) -> Result<Option<Frame<'a>>, End> {
        let mut head = [0; HEADER_BYTES];
        let first = stream.read(&mut head);
        let read = match self.grants.is_empty() {
            true => first.await,
            false => timeout(WRITE_PATIENCE, first)
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
                let leases = &mut self.leases;
                let ended = release.requests.iter().filter_map(|id| leases.remove(id));
                let ended = ended.map(|lease| lease.request).collect();
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
    async fn probe(&mut self, mut probe: Probe) -> Result<remote::ProbeReply, Failed> {
        let leases = probe.local_tokens.is_some();
        let keys = probe.hashes.len() / size_of::<EngineHash>();
        let id = self.server.new_request();
        let asked = std::mem::replace(&mut probe.request, id.clone());
        if leases {
            free_place(&self.leases, &asked)?;
        }
        let (tag, reply) = self.upstream.request(Op::Probe, &probe).await?;
        match self.probed(reply, keys, leases) {
            Ok((reply, objects)) if leases => {
                let to = u32::try_from(keys).unwrap_or(u32::MAX);
                let pin = Pin {
                    request: id.clone(),
                    probe: tag,
                    from: 0,
                    to,
                };
                self.upstream.send(Op::Pin, &pin);
                let lease = Lease {
                    request: id,
                    objects,
                };
                self.leases.insert(asked, lease);
                Ok(reply)
            }
            done => {
                self.release(vec![id]);
                done.map(|(reply, _)| reply)
            }
        }
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
        let reply: GrantReply = decode(&reply.map_err(Refusal)?)?;
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
        let mut rest = data;
        let mut written = Vec::with_capacity(write.parts.len());
        for part in write.iter() {
            let (bytes, left) = rest.split_at(rest.len().min(part.length as usize));
            rest = left;
            let Some(object) = objects.get_mut(part.index as usize) else {
                let said = format!("the GRANT has no object {}", part.index);
                return Err(Refusal::new(ErrorCode::BadBody, said).into());
            };
            let Some(Writing {
                pieces,
                written: at,
            }) = object
            else {
                written.push(WRITE_LOST);
                continue;
            };
            if part.offset != *at {
                let said = format!(
                    "expected byte {at} of object {}, got {}",
                    part.index, part.offset
                );
                return Err(Refusal::new(ErrorCode::BadBody, said).into());
            }
            if !pieces.contains(*at, u64::from(part.length)) {
                return Err(beyond(pieces).into());
            }
            let copied = self.upstream.memory.write(pieces, *at, bytes);
            *at += u64::from(part.length);
            let complete = *at == pieces.bytes;
            if copied && !complete {
                written.push(WRITE_MORE);
                continue;
            }
            let op = if copied { Op::Commit } else { Op::Abort };
            let sent = self.upstream.send(op, &sections(&self.upstream, pieces));
            *object = None;
            written.push(if copied && sent {
                WRITE_COMPLETE
            } else {
                WRITE_LOST
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

    /// Gives back what the connection holds.
    fn give_back(&mut self) {
        let leases = std::mem::take(&mut self.leases).into_values();
        self.release(leases.map(|lease| lease.request).collect());
        for writing in std::mem::take(&mut self.grants)
            .into_values()
            .flatten()
            .flatten()
        {
            let unwritten = sections(&self.upstream, &writing.pieces);
            self.upstream.send(Op::Abort, &unwritten);
        }
    }

    /// The connection to the sidecar cannot be trusted any more: it ends, and with it everything that it holds.
    fn distrust(&self, reason: &str) -> Failed {
        self.upstream.distrust(reason);
        Failed::Lost
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

async fn fill<S: AsyncRead + Unpin>(stream: &mut S, into: &mut [u8]) -> Result<(), End> {
    match timeout(FRAME_PATIENCE, stream.read_exact(into)).await {
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
    let sent = timeout(FRAME_PATIENCE, async {
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

//! One remote client: reads a request, acts on it through the sidecar's session, and writes the reply, one after the other.

mod frames;
mod requests;

use super::objects::Pieces;
use super::upstream::{State, Upstream};
use super::{Place, Server, keys};
pub use frames::End;
use frames::{Body, Failed, fill, plain, write, write_error};
use kvcachepool_protocol::PROTOCOL_VERSION;
use kvcachepool_protocol::frame::{FLAG_DATA, HEADER_BYTES, Header, MAX_BODY, Op};
use kvcachepool_protocol::message::{ErrorBody, ErrorCode, Objects, Release, decode, encode};
use kvcachepool_protocol::remote::{self, HELLO_BYTES_MAX, MAP_BYTES_MAX};
use requests::sections;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use tokio::sync::SemaphorePermit;
use tokio::time::{Instant, timeout_at};

/// A client that has memory to write must go on with it.
const WRITE_PATIENCE: Duration = Duration::from_secs(60);
/// The unit of [`Server::buffers`].
pub const BUFFER_BYTES: usize = 64 << 10;

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
    let refuse = async |stream: &mut S, end: End, refusal: ErrorBody| {
        // The connection ends with or without the reply.
        let _ = write_error(stream, Op::Hello as u8, tag, &refusal).await;
        Err(end)
    };
    let header = match Header::decode(&head) {
        Ok(header) => header,
        Err(e) => {
            let refusal = ErrorBody::new(ErrorCode::WrongVersion, e.to_string());
            return refuse(stream, End::BadFrame, refusal).await;
        }
    };
    if header.opcode != Op::Hello as u8 || header.length as usize > HELLO_BYTES_MAX {
        let said = format!("the first frame must be HELLO, with at most {HELLO_BYTES_MAX} bytes");
        return refuse(
            stream,
            End::BadFrame,
            ErrorBody::new(ErrorCode::HelloFirst, said),
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
        let refusal = ErrorBody::new(ErrorCode::Unauthorized, e.to_string());
        return refuse(stream, End::WrongKey, refusal).await;
    }
    let Some(place) = server.place() else {
        let refusal = ErrorBody::later(
            ErrorCode::LimitReached,
            "the server has as many connections as --connections allows",
        );
        return refuse(stream, End::TooManyConnections, refusal).await;
    };
    let state: State = server.upstream.borrow().clone();
    let upstream = match state.attached() {
        Ok(upstream) => upstream,
        Err(reason) => {
            let refusal = ErrorBody::later(ErrorCode::NoArena, reason);
            return refuse(stream, End::NoSidecar, refusal).await;
        }
    };
    let reply = remote::HelloReply {
        version: PROTOCOL_VERSION,
        sidecar_version: upstream.hello.sidecar_version.clone(),
        boot: upstream.hello.boot,
        features: upstream.hello.features.clone(),
        arena_bytes: upstream.arena_bytes,
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
            Err(e) => Err(ErrorBody::new(ErrorCode::UnknownOpcode, e.to_string()).into()),
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
                    front: reply?,
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
                Err(ErrorBody::new(ErrorCode::NotServed, said).into())
            }
        }
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

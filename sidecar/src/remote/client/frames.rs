//! Frames of a remote client: what ends a connection, replies and errors, and how long bytes may take.

use super::super::upstream::Lost;
use kvcachepool_protocol::PROTOCOL_VERSION;
use kvcachepool_protocol::frame::{FLAG_ERROR, FLAG_REPLY, Header};
use kvcachepool_protocol::message::{BadBody, ErrorBody, encode};
use serde::Serialize;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::SemaphorePermit;
use tokio::time::timeout;

/// A frame must move within this time, and that of its bytes at [`BYTES_PER_S_MIN`]: buffers are held meanwhile.
const FRAME_PATIENCE: Duration = Duration::from_secs(5);
const BYTES_PER_S_MIN: u64 = 1 << 20;

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

/// What a request leads to, if not to a reply.
pub(super) enum Failed {
    /// An error, after which the connection goes on.
    Refused(ErrorBody),
    /// The connection to the sidecar ended.
    Lost,
}

impl From<ErrorBody> for Failed {
    fn from(refusal: ErrorBody) -> Self {
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
pub(super) struct Body<'a> {
    pub(super) front: Vec<u8>,
    pub(super) data: Option<(Vec<u8>, SemaphorePermit<'a>)>,
}

pub(super) fn plain<'a, B: Serialize>(body: &B) -> Result<Body<'a>, Failed> {
    Ok(Body {
        front: encode(body)?,
        data: None,
    })
}

/// How long this many bytes may take.
fn patience(bytes: usize) -> Duration {
    FRAME_PATIENCE + Duration::from_millis(bytes as u64 * 1000 / BYTES_PER_S_MIN)
}

pub(super) async fn fill<S: AsyncRead + Unpin>(stream: &mut S, into: &mut [u8]) -> Result<(), End> {
    match timeout(patience(into.len()), stream.read_exact(into)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(_)) => Err(End::Broken),
        Err(_) => Err(End::TooSlow),
    }
}

pub(super) async fn write_error<S>(
    stream: &mut S,
    opcode: u8,
    tag: u64,
    refusal: &ErrorBody,
) -> Result<(), End>
where
    S: AsyncWrite + Unpin,
{
    let front = encode(refusal).map_err(|_| End::Broken)?;
    write(stream, opcode, FLAG_ERROR, tag, Body { front, data: None }).await
}

pub(super) async fn write<S>(
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

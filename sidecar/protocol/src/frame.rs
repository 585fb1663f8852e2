//! Frames on the Unix socket: a 16-byte little-endian header, then a msgpack map.
//!
//! ```text
//! 0  u32 body length (<= MAX_BODY)   4  u8 version   5  u8 opcode   6  u16 flags   8  u64 tag
//! ```

use crate::PROTOCOL_VERSION;

pub const HEADER_BYTES: usize = 16;
/// Largest body.
pub const MAX_BODY: usize = 8 << 20;

/// Set in every reply.
pub const FLAG_REPLY: u16 = 1;
/// The body is an [`crate::message::ErrorBody`].
pub const FLAG_ERROR: u16 = 2;
/// More replies with this tag follow.
pub const FLAG_PARTIAL: u16 = 4;
/// File descriptors are attached to the first byte of this frame (SCM_RIGHTS). The body's `fds` names them in order.
pub const FLAG_FDS: u16 = 8;
/// Remote access: bytes follow the map ([`crate::remote::split`]).
pub const FLAG_DATA: u16 = 16;

/// The operation of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Op {
    /// Starts or resumes a session.
    Hello = 1,
    /// Describes the KV cache of a rank, or the hashing of a scheduler.
    Register = 2,
    /// Requests staging memory that the sidecar copies from and to.
    Window = 3,
    /// Asks which chunks of a prefix exist.
    Probe = 4,
    /// One-way: turns the soft pin of a PROBE into the read lease of the request.
    Pin = 5,
    /// One-way: ends the pins and leases of requests.
    Release = 6,
    /// Requests slots to write chunks into.
    Grant = 7,
    /// One-way: sections are written.
    Commit = 8,
    /// Sections will not be written. One-way from a worker without a window, answered otherwise.
    Abort = 9,
    /// Long poll for stored and removed blocks and tier states.
    Events = 10,
    /// Lookup, clear, pin, unpin, status, health.
    Admin = 11,
    /// One-way: the connector's counters (admissions, skips, copies).
    Report = 12,
    /// Removes, pins, unpins, touches or describes opaque objects.
    Objects = 13,
    /// Remote access only: reads ranges of leased objects.
    Read = 14,
    /// Remote access only: writes ranges of granted objects.
    Write = 15,
}

impl TryFrom<u8> for Op {
    type Error = FrameError;
    fn try_from(v: u8) -> Result<Self, FrameError> {
        use Op::*;
        [
            Hello, Register, Window, Probe, Pin, Release, Grant, Commit, Abort, Events, Admin,
            Report, Objects, Read, Write,
        ]
        .into_iter()
        .find(|op| *op as u8 == v)
        .ok_or(FrameError::UnknownOpcode(v))
    }
}

/// Why a header was refused. All except [`FrameError::UnknownOpcode`] end the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The peer's version differs by more than one.
    #[error(
        "frame version {0} is not supported (this side has version {PROTOCOL_VERSION}, and supports one more or one less)"
    )]
    WrongVersion(u8),
    /// The body is longer than [`MAX_BODY`], or than the reader's own limit.
    #[error("frame body of {length} bytes exceeds the limit of {limit}")]
    Oversized {
        /// Body length in the header.
        length: u32,
        /// The reader's limit in bytes.
        limit: usize,
    },
    /// This version does not know the opcode. The reply is an error, and the connection continues.
    #[error("unknown opcode {0}")]
    UnknownOpcode(u8),
}

/// A frame header as read from the wire. The opcode is not interpreted yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Length of the body in bytes.
    pub length: u32,
    /// Protocol version of the sender.
    pub version: u8,
    /// Raw opcode, see [`Op`].
    pub opcode: u8,
    /// `FLAG_*`.
    pub flags: u16,
    /// Increases per process. A reply has the tag of its request.
    pub tag: u64,
}

impl Header {
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut b = [0u8; HEADER_BYTES];
        b[0..4].copy_from_slice(&self.length.to_le_bytes());
        b[4] = self.version;
        b[5] = self.opcode;
        b[6..8].copy_from_slice(&self.flags.to_le_bytes());
        b[8..16].copy_from_slice(&self.tag.to_le_bytes());
        b
    }

    /// Decodes and validates a header. Total: any 16 bytes give a header or a named error.
    pub fn decode(b: &[u8; HEADER_BYTES]) -> Result<Self, FrameError> {
        let header = Self {
            length: u32::from_le_bytes([b[0], b[1], b[2], b[3]]),
            version: b[4],
            opcode: b[5],
            flags: u16::from_le_bytes([b[6], b[7]]),
            tag: u64::from_le_bytes([b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]]),
        };
        if header.version.abs_diff(PROTOCOL_VERSION) > 1 || header.version == 0 {
            return Err(FrameError::WrongVersion(header.version));
        }
        if header.length as usize > MAX_BODY {
            return Err(FrameError::Oversized {
                length: header.length,
                limit: MAX_BODY,
            });
        }
        Ok(header)
    }
}

/// Splits a byte stream into frames, independent of how it is fragmented. Holds at most one unfinished frame, and no more of its body than
/// was received.
#[derive(Debug)]
pub struct FrameReader {
    limit: usize,
    head: [u8; HEADER_BYTES],
    head_bytes: usize,
    header: Option<Header>,
    body: Vec<u8>,
}

impl FrameReader {
    /// A reader for one connection that accepts bodies of at most `limit` bytes, capped at [`MAX_BODY`].
    pub fn new(limit: usize) -> Self {
        Self {
            limit: limit.min(MAX_BODY),
            head: [0; HEADER_BYTES],
            head_bytes: 0,
            header: None,
            body: Vec::new(),
        }
    }

    /// Consumes bytes from the front of `input` until a frame is complete or the input is empty. Call it until it returns `None`. After an
    /// error the connection must be closed.
    pub fn take(&mut self, input: &mut &[u8]) -> Result<Option<(Header, Vec<u8>)>, FrameError> {
        let header = match self.header {
            Some(header) => header,
            None => {
                let taken = split(input, HEADER_BYTES - self.head_bytes);
                self.head[self.head_bytes..self.head_bytes + taken.len()].copy_from_slice(taken);
                self.head_bytes += taken.len();
                if self.head_bytes < HEADER_BYTES {
                    return Ok(None);
                }
                let header = Header::decode(&self.head)?;
                if header.length as usize > self.limit {
                    return Err(FrameError::Oversized {
                        length: header.length,
                        limit: self.limit,
                    });
                }
                *self.header.insert(header)
            }
        };
        let taken = split(input, header.length as usize - self.body.len());
        self.body.extend_from_slice(taken);
        if self.body.len() < header.length as usize {
            return Ok(None);
        }
        self.header = None;
        self.head_bytes = 0;
        Ok(Some((header, std::mem::take(&mut self.body))))
    }

    /// Number of buffered bytes of the unfinished frame; 0 between frames.
    pub fn pending(&self) -> usize {
        self.head_bytes + self.body.len()
    }

    /// Raw opcode and tag of the header that [`FrameReader::take`] refused, for the error reply.
    pub fn refused(&self) -> (u8, u64) {
        let [_, _, _, _, _, opcode, _, _, tag @ ..] = self.head;
        (opcode, u64::from_le_bytes(tag))
    }
}

fn split<'a>(input: &mut &'a [u8], most: usize) -> &'a [u8] {
    let (taken, rest) = input.split_at(most.min(input.len()));
    *input = rest;
    taken
}
pub fn frame(op: Op, flags: u16, tag: u64, body: &[u8]) -> Vec<u8> {
    let header = Header {
        length: body.len() as u32,
        version: PROTOCOL_VERSION,
        opcode: op as u8,
        flags,
        tag,
    };
    let mut out = Vec::with_capacity(HEADER_BYTES + body.len());
    out.extend_from_slice(&header.encode());
    out.extend_from_slice(body);
    out
}

//! Frames on the Unix socket: a 16-byte little-endian header, then a msgpack map.
//!
//! ```text
//! 0  u32 body length (<= MAX_BODY)   4  u8 version   5  u8 opcode   6  u16 flags   8  u64 tag
//! ```

use crate::PROTOCOL_VERSION;

/// Bytes of a frame header.
pub const HEADER_BYTES: usize = 16;
/// Largest body: 8 MiB.
pub const MAX_BODY: usize = 8 << 20;

/// Set in every answer.
pub const FLAG_REPLY: u16 = 1;
/// The body is an [`crate::message::ErrorBody`].
pub const FLAG_ERROR: u16 = 2;
/// More answers with this tag follow.
pub const FLAG_PARTIAL: u16 = 4;
/// File descriptors ride on the first byte of this frame (SCM_RIGHTS); the body's `fds` names them in order.
pub const FLAG_FDS: u16 = 8;

/// What a frame asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Op {
    /// Begin or continue a session.
    Hello = 1,
    /// Describe the KV cache of a rank, or the hashing of a scheduler.
    Register = 2,
    /// Staging memory that the sidecar copies from and to.
    Window = 3,
    /// Which chunks of a prefix are there?
    Probe = 4,
    /// One-way: the soft pin of a PROBE becomes the read lease of the request.
    Pin = 5,
    /// One-way: the request needs nothing any more.
    Release = 6,
    /// Slots to write chunks into.
    Grant = 7,
    /// One-way: sections are written.
    Commit = 8,
    /// Sections will not be written (one-way from a worker, answered for a scheduler).
    Abort = 9,
    /// Long poll: blocks stored and removed, tier states.
    Events = 10,
    /// Lookup, clear, pin, unpin, status, health.
    Admin = 11,
    /// One-way: what the connector counted (admissions, skips, copies).
    Report = 12,
}

impl TryFrom<u8> for Op {
    type Error = FrameError;
    fn try_from(v: u8) -> Result<Self, FrameError> {
        use Op::*;
        [
            Hello, Register, Window, Probe, Pin, Release, Grant, Commit, Abort, Events, Admin,
            Report,
        ]
        .into_iter()
        .find(|op| *op as u8 == v)
        .ok_or(FrameError::UnknownOpcode(v))
    }
}

/// Why a header was refused. All but [`FrameError::UnknownOpcode`] end the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The peer speaks a version more than one away from ours.
    #[error(
        "frame version {0} is not spoken here (this side speaks {PROTOCOL_VERSION}, one more or one less is served)"
    )]
    WrongVersion(u8),
    /// The body is longer than [`MAX_BODY`], or than the reader's own limit.
    #[error("frame body of {length} bytes is over the limit of {limit}")]
    Oversized {
        /// Bytes that the header announces.
        length: u32,
        /// Bytes that are taken.
        limit: usize,
    },
    /// The stream ended in the middle of a frame.
    #[error("the stream ended after {got} bytes of a frame")]
    Torn {
        /// Bytes of the frame that came, its header included.
        got: usize,
    },
    /// The opcode is not known to this version; answered with an error, the connection goes on.
    #[error("unknown opcode {0}")]
    UnknownOpcode(u8),
}

/// A frame header as read from the wire; the opcode is not interpreted yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Body bytes.
    pub length: u32,
    /// Protocol version of the sender.
    pub version: u8,
    /// Raw opcode, see [`Op`].
    pub opcode: u8,
    /// `FLAG_*`.
    pub flags: u16,
    /// Counts up per process; an answer carries the tag of its question.
    pub tag: u64,
}

impl Header {
    /// Header bytes for the wire.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut b = [0u8; HEADER_BYTES];
        b[0..4].copy_from_slice(&self.length.to_le_bytes());
        b[4] = self.version;
        b[5] = self.opcode;
        b[6..8].copy_from_slice(&self.flags.to_le_bytes());
        b[8..16].copy_from_slice(&self.tag.to_le_bytes());
        b
    }

    /// Reads and checks a header. Total: any 16 bytes give a header or a named error.
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

/// Cuts a byte stream into frames, whatever its pieces are. Holds one unfinished frame at most, and of its body no more
/// than the bytes that came.
#[derive(Debug)]
pub struct FrameReader {
    limit: usize,
    head: [u8; HEADER_BYTES],
    head_bytes: usize,
    header: Option<Header>,
    body: Vec<u8>,
}

impl FrameReader {
    /// A reader for one connection that takes bodies of at most `limit` bytes ([`MAX_BODY`] at most).
    pub fn new(limit: usize) -> Self {
        Self {
            limit: limit.min(MAX_BODY),
            head: [0; HEADER_BYTES],
            head_bytes: 0,
            header: None,
            body: Vec::new(),
        }
    }

    /// Takes bytes from the front of `input` until a frame is whole or the input is empty; what was taken is gone from
    /// `input`. Call it again until it gives `None`. After an error the connection is to be closed.
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

    /// Bytes of the unfinished frame; 0 between frames.
    pub fn pending(&self) -> usize {
        self.head_bytes + self.body.len()
    }

    /// Raw opcode and tag of the header that made [`FrameReader::take`] fail, for the error's answer.
    pub fn refused(&self) -> (u8, u64) {
        let [_, _, _, _, _, opcode, _, _, tag @ ..] = self.head;
        (opcode, u64::from_le_bytes(tag))
    }

    /// The stream ended: was that between two frames?
    pub fn finish(&self) -> Result<(), FrameError> {
        match self.pending() {
            0 => Ok(()),
            got => Err(FrameError::Torn { got }),
        }
    }
}

fn split<'a>(input: &mut &'a [u8], most: usize) -> &'a [u8] {
    let (taken, rest) = input.split_at(most.min(input.len()));
    *input = rest;
    taken
}

/// A whole frame.
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

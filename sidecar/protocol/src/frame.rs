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
    /// Device staging memory (not served yet).
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
    /// The body is longer than [`MAX_BODY`].
    #[error("frame body of {0} bytes is over the limit of {MAX_BODY}")]
    Oversized(u32),
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
            return Err(FrameError::Oversized(header.length));
        }
        Ok(header)
    }
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

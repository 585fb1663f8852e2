//! Messages of remote access: what differs from the socket's, because the two sides share no memory. `docs/internals/protocol.md`,
//! "Remote access", has the rules.

use crate::frame::{FLAG_DATA, MAX_BODY};
use crate::message::{BadBody, decode, encode};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// Longest body of a HELLO, which is read before the key is known.
pub const HELLO_BYTES_MAX: usize = 4 << 10;
/// Longest map of a frame of a client.
pub const MAP_BYTES_MAX: usize = 256 << 10;
/// Most keys of one PROBE.
pub const KEYS_MAX: usize = 1_024;
/// Most parts of one READ or WRITE.
pub const PARTS_MAX: usize = 4_096;

/// HELLO, the first frame of a connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Protocol version, equal to the frame's.
    pub version: u8,
    /// Name and version of the program that uses the client.
    #[serde(default)]
    pub engine: String,
    #[serde(default)]
    pub engine_version: String,
    /// One per client.
    #[serde(default)]
    pub instance: String,
    /// A key of the server's key file.
    #[serde(default)]
    pub key: String,
}

/// Reply to HELLO.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HelloReply {
    /// Protocol version of the server.
    pub version: u8,
    /// Version of the sidecar's binary.
    pub sidecar_version: String,
    /// New at every start of the sidecar's engine process.
    pub boot: u64,
    /// As in the reply on the socket.
    #[serde(default)]
    pub features: Vec<String>,
    /// Size of the sidecar's memory: no object can be longer.
    pub arena_bytes: u64,
}

/// Reply to PROBE.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ProbeReply {
    /// One byte per hash: [`crate::message::CHUNK_READY`] and its siblings.
    #[serde(with = "serde_bytes")]
    pub states: Vec<u8>,
    /// Length of each ready object, in order.
    #[serde(default)]
    pub bytes: Vec<u64>,
    /// Why there was no lookup; empty = there was one.
    #[serde(default)]
    pub reason: String,
}

/// Reply to GRANT.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct GrantReply {
    /// One byte per object: [`crate::message::GRANT_GRANTED`] and its siblings.
    #[serde(with = "serde_bytes")]
    pub results: Vec<u8>,
}

/// A range of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Position of the object in the hashes of its PROBE, or in the objects of its GRANT.
    pub index: u32,
    /// First byte in the object, with its head.
    pub offset: u64,
    /// Bytes.
    pub length: u32,
}

/// READ and WRITE: ranges of the objects of one request. The data of a WRITE follows the map.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parts {
    pub request: String,
    pub parts: Vec<(u32, u64, u32)>,
}

impl Parts {
    pub fn iter(&self) -> impl Iterator<Item = Part> + '_ {
        let part = |&(index, offset, length)| Part {
            index,
            offset,
            length,
        };
        self.parts.iter().map(part)
    }

    /// Bytes of all parts. `None` if there are too many parts or bytes for one frame, or if a part is empty.
    pub fn data_bytes(&self) -> Option<usize> {
        if self.parts.len() > PARTS_MAX || self.iter().any(|part| part.length == 0) {
            return None;
        }
        let bytes: u64 = self.iter().map(|part| u64::from(part.length)).sum();
        usize::try_from(bytes).ok().filter(|n| *n <= MAX_BODY)
    }
}

/// Reply to READ. The bytes of the parts that were found follow the map.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ReadReply {
    /// One byte per part: 1, or 0 if the memory was taken back or no lease has the object.
    #[serde(with = "serde_bytes")]
    pub found: Vec<u8>,
}

/// The object is lost: its memory was taken back.
pub const WRITE_LOST: u8 = 0;
/// The bytes were written, and more are expected.
pub const WRITE_MORE: u8 = 1;
/// The object is complete and was committed.
pub const WRITE_COMPLETE: u8 = 2;

/// Reply to WRITE.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct WriteReply {
    /// One byte per part: `WRITE_*`.
    #[serde(with = "serde_bytes")]
    pub written: Vec<u8>,
}

/// Splits the body of a frame with [`FLAG_DATA`] into its map and its data.
pub fn split<T: DeserializeOwned>(flags: u16, body: &[u8]) -> Result<(T, &[u8]), BadBody> {
    let bad = |reason: &str| BadBody {
        message: "frame with data",
        reason: reason.into(),
    };
    if flags & FLAG_DATA == 0 {
        return Err(bad("the flag for data is not set"));
    }
    let (length, rest) = body
        .split_first_chunk::<4>()
        .ok_or_else(|| bad("the length of the map is missing"))?;
    let length = u32::from_le_bytes(*length) as usize;
    if length > MAP_BYTES_MAX {
        return Err(bad("the map is too long"));
    }
    let (map, data) = rest
        .split_at_checked(length)
        .ok_or_else(|| bad("the map is longer than the frame"))?;
    Ok((decode(map)?, data))
}

/// The front of the body of a frame with data: the length of the map, and the map.
pub fn front<T: Serialize>(map: &T) -> Result<Vec<u8>, BadBody> {
    let map = encode(map)?;
    let length = u32::try_from(map.len()).unwrap_or(u32::MAX);
    Ok([&length.to_le_bytes()[..], &map].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_splits_into_the_map_and_the_data_that_it_was_made_of() {
        let parts = Parts {
            request: "7".into(),
            parts: vec![(0, 0, 3), (1, 4 << 20, 2)],
        };
        let mut body = front(&parts).unwrap();
        body.extend(b"abcde");
        let (read, data) = split::<Parts>(FLAG_DATA, &body).unwrap();
        assert_eq!((read.data_bytes(), data), (Some(5), &b"abcde"[..]));
        assert_eq!(read, parts);
    }

    #[test]
    fn a_cut_body_or_one_without_its_flag_is_refused() {
        let body = front(&ReadReply { found: vec![1] }).unwrap();
        assert!(split::<ReadReply>(0, &body).is_err());
        for cut in 0..body.len() {
            assert!(
                split::<ReadReply>(FLAG_DATA, &body[..cut]).is_err(),
                "{cut}"
            );
        }
    }

    #[test]
    fn parts_that_no_frame_can_hold_have_no_size() {
        let of = |parts| Parts {
            request: String::new(),
            parts,
        };
        assert_eq!(of(vec![]).data_bytes(), Some(0));
        assert_eq!(of(vec![(0, 0, 0)]).data_bytes(), None);
        assert_eq!(
            of(vec![(0, 0, MAX_BODY as u32)]).data_bytes(),
            Some(MAX_BODY)
        );
        assert_eq!(of(vec![(0, 0, u32::MAX); 2]).data_bytes(), None);
        assert_eq!(of(vec![(0, 0, 1); PARTS_MAX + 1]).data_bytes(), None);
    }
}

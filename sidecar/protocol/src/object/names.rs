//! Names of objects in S3 and Redis.

use super::Fidelity;
use crate::key::ChunkKey;

/// Most bytes of a Redis segment. A server's allocator has pieces of 512 KiB and then of 640 KiB, and a value takes 12 bytes more than it is
/// long. The server reads a long value into a buffer that is as large as the value before it was in its piece. Where the end of the value
/// and anything behind it lie in that buffer, the value is copied to fresh memory; where the value lies there alone, the buffer becomes the
/// value. A segment that nearly fills its piece, and has its name before it, never leaves room for anything behind it.
pub const REDIS_SEGMENT_BYTES: u64 = (512 << 10) - 16;
/// What all keys in Redis begin with.
pub const REDIS_PREFIX: &str = "kvcp:";

/// A name of an object of another kind, or of nothing of ours.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" is no name of a cache object")]
pub struct BadName(pub String);

/// Which object: enough to find it and to tell it from all others.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ObjectName {
    /// First 16 hex digits of the ModelId.
    pub model: String,
    /// First 16 hex digits of the LayoutId.
    pub layout: String,
    /// Chunk key.
    pub key: ChunkKey,
    /// What was lost: a lossy object never stands in an exact one's place.
    pub fidelity: Fidelity,
}

impl ObjectName {
    /// `<prefix>/<model>/<layout>/<2 hex of the key>/<key>.<fidelity>.kv`; an empty prefix has no slash.
    pub fn s3(&self, prefix: &str) -> String {
        let prefix = prefix.trim_matches('/');
        let slash = if prefix.is_empty() { "" } else { "/" };
        let key = self.key.hex();
        let spread: String = key.chars().take(2).collect();
        let (model, layout, fidelity) = (&self.model, &self.layout, self.fidelity.name());
        format!("{prefix}{slash}{model}/{layout}/{spread}/{key}.{fidelity}.kv")
    }

    /// Reads what [`ObjectName::s3`] wrote.
    pub fn from_s3(prefix: &str, name: &str) -> Result<Self, BadName> {
        Self::read_s3(prefix.trim_matches('/'), name)
            .ok_or_else(|| BadName(name.chars().take(200).collect()))
    }

    fn read_s3(prefix: &str, name: &str) -> Option<Self> {
        let rest = match prefix {
            "" => name,
            _ => name.strip_prefix(prefix)?.strip_prefix('/')?,
        };
        let parts: Vec<&str> = rest.split('/').collect();
        let [model, layout, _, file] = parts[..] else {
            return None;
        };
        let (key, fidelity) = file.strip_suffix(".kv")?.split_once('.')?;
        let read = Self {
            model: hex16(model)?,
            layout: hex16(layout)?,
            key: ChunkKey::from_hex(key).ok()?,
            fidelity: Fidelity::named(fidelity)?,
        };
        // One spelling only: upper case or a wrong spread is another object.
        (read.s3(prefix) == name).then_some(read)
    }

    /// `kvcp:<model>:<layout>:{<key>}.<fidelity>`: what is known of the object and its head. The braces keep all keys of an object on one
    /// node of a cluster.
    pub fn redis(&self) -> String {
        let (model, layout, key) = (&self.model, &self.layout, self.key.hex());
        let fidelity = self.fidelity.name();
        format!("{REDIS_PREFIX}{model}:{layout}:{{{key}}}.{fidelity}")
    }

    /// `...:<head>:<segment>`: at most [`REDIS_SEGMENT_BYTES`] of one section. `head` is the xxh3-128 of the object's head: objects of one name
    /// that two wrote at once have segments of their own.
    pub fn redis_segment(&self, head: &[u8; 16], segment: u32) -> String {
        let head = u128::from_be_bytes(*head);
        format!("{}:{head:032x}:{segment}", self.redis())
    }

    /// Reads what [`ObjectName::redis`] wrote, and of what [`ObjectName::redis_segment`] wrote the object: true = a segment of it.
    pub fn from_redis(key: &str) -> Result<(Self, bool), BadName> {
        Self::read_redis(key).ok_or_else(|| BadName(key.chars().take(200).collect()))
    }

    fn read_redis(text: &str) -> Option<(Self, bool)> {
        let rest = text.strip_prefix(REDIS_PREFIX)?;
        let parts: Vec<&str> = rest.split(':').collect();
        let (model, layout, last, segment) = match parts[..] {
            [model, layout, last] => (model, layout, last, None),
            [model, layout, last, head, number] => (model, layout, last, Some((head, number))),
            _ => return None,
        };
        let (key, fidelity) = last.strip_prefix('{')?.split_once("}.")?;
        let name = Self {
            model: hex16(model)?,
            layout: hex16(layout)?,
            key: ChunkKey::from_hex(key).ok()?,
            fidelity: Fidelity::named(fidelity)?,
        };
        let again = match segment {
            None => name.redis(),
            Some((head, number)) => {
                let head = u128::from_str_radix(head, 16).ok()?.to_be_bytes();
                name.redis_segment(&head, number.parse().ok()?)
            }
        };
        (again == text).then_some((name, segment.is_some()))
    }
}

fn hex16(text: &str) -> Option<String> {
    let digits = text.len() == 16 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    digits.then(|| text.to_string())
}

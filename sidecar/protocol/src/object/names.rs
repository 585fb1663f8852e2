//! Names of objects in S3 and Redis.

use super::Fidelity;
use crate::key::ChunkKey;

/// Maximum bytes of a Redis segment. The server's allocator has size classes of 512 KiB and 640 KiB, and a value takes 12 bytes more than
/// its length. The server reads a long value into a buffer as large as the size class of the previous value. If the buffer also holds bytes
/// after the value, the server copies the value to new memory; if it holds the value alone, the buffer itself becomes the value. A segment
/// that nearly fills its size class, with its name before it, leaves no room for anything after it.
pub const REDIS_SEGMENT_BYTES: u64 = (512 << 10) - 16;
/// Prefix of all keys in Redis.
pub const REDIS_PREFIX: &str = "kvcp:";

/// The name is not that of a cache object.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" is not the name of a cache object")]
pub struct BadName(pub String);

/// The identity of an object.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ObjectName {
    /// First 16 hex digits of the ModelId.
    pub model: String,
    /// First 16 hex digits of the LayoutId.
    pub layout: String,
    pub key: ChunkKey,
    /// Loss of the object. A lossy object never replaces an exact one.
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

    /// The inverse of [`ObjectName::s3`].
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
        // Names have one spelling only. Upper case, or a wrong 2-digit folder, is a foreign object.
        (read.s3(prefix) == name).then_some(read)
    }

    /// `kvcp:<model>:<layout>:{<key>}.<fidelity>`: the object's metadata and head. The braces keep all keys of an object on one node of a
    /// cluster.
    pub fn redis(&self) -> String {
        let (model, layout, key) = (&self.model, &self.layout, self.key.hex());
        let fidelity = self.fidelity.name();
        format!("{REDIS_PREFIX}{model}:{layout}:{{{key}}}.{fidelity}")
    }

    /// `...:<head>:<segment>`: at most [`REDIS_SEGMENT_BYTES`] of one section. `head` is the xxh3-128 of the object's head, so that
    /// concurrent writers of one object use separate segments.
    pub fn redis_segment(&self, head: &[u8; 16], segment: u32) -> String {
        let head = u128::from_be_bytes(*head);
        format!("{}:{head:032x}:{segment}", self.redis())
    }

    /// The inverse of [`ObjectName::redis`] and [`ObjectName::redis_segment`]. True = the key is a segment of the object.
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

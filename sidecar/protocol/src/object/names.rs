//! Names of objects in S3 and Redis.

use super::Fidelity;
use crate::key::ChunkKey;

/// Bytes of a Redis segment: 1 MiB.
pub const REDIS_SEGMENT_BYTES: u64 = 1 << 20;

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
        let key = file.strip_suffix(".exact.kv")?;
        let read = Self {
            model: hex16(model)?,
            layout: hex16(layout)?,
            key: ChunkKey::from_hex(key).ok()?,
            fidelity: Fidelity::Exact,
        };
        // One spelling only: upper case or a wrong spread is another object.
        (read.s3(prefix) == name).then_some(read)
    }

    /// `kvcp:<model>:<layout>:<key>.<fidelity>`: header and section table.
    pub fn redis(&self) -> String {
        let (model, layout, key) = (&self.model, &self.layout, self.key.hex());
        format!("kvcp:{model}:{layout}:{key}.{}", self.fidelity.name())
    }

    /// `...:<segment>`: [`REDIS_SEGMENT_BYTES`] of the payload each.
    pub fn redis_segment(&self, segment: u32) -> String {
        format!("{}:{segment}", self.redis())
    }
}

fn hex16(text: &str) -> Option<String> {
    let digits = text.len() == 16 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    digits.then(|| text.to_string())
}

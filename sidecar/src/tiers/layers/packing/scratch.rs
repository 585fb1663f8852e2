//! Memory for packed bytes: a mapping of its own for each operation, bounded over all of them.

use crate::shm::mapping::Mapping;
use crate::shm::memfd::{Pages, sealed};
use crate::tiers::{Cause, Kind, Span, TierError};
use kvcachepool_protocol::config::PACKING_BYTES;
use rustix::fd::AsFd;
use std::any::Any;
use std::sync::Arc;
use tokio::sync::Semaphore;

/// Raw bytes, what they are packed into, and that once more where a tier can reach it.
const COPIES: u64 = 3;
/// Direct I/O wants addresses that are multiples of this.
const ALIGN: u64 = 4096;
const MI: u64 = 1 << 20;

/// What keeps an operation's share of the room: until the last span is gone, and whoever else has a clone.
pub type Hold = Arc<dyn Any + Send + Sync>;

/// Room for all operations at once, in MiB.
#[derive(Debug)]
pub struct Room(Arc<Semaphore>);

impl Default for Room {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new((PACKING_BYTES / MI) as usize)))
    }
}

impl Room {
    /// Waits for room for that many bytes and their copies. One that needs more than there is takes all.
    pub async fn take(&self, bytes: u64) -> Hold {
        let wanted = (bytes * COPIES).div_ceil(MI).clamp(1, PACKING_BYTES / MI);
        // The semaphore is never closed.
        Arc::new(self.0.clone().acquire_many_owned(wanted as u32).await.ok())
    }
}

/// A mapping, cut into spans.
#[derive(Debug)]
pub struct Scratch {
    /// Of these lengths.
    pub spans: Vec<Span>,
}

impl Scratch {
    /// Spans of these lengths; each has a hold.
    pub fn new(kind: Kind, lengths: &[u64], hold: Hold) -> Result<Self, TierError> {
        let failed = |why: String| TierError::new(kind, Cause::Io, format!("no memory: {why}"));
        let bytes: u64 = lengths.iter().map(|n| n.next_multiple_of(ALIGN)).sum();
        let bytes = bytes.max(ALIGN);
        let fd = sealed("kvcachepool-packing", bytes, Pages::Base);
        let fd = fd.map_err(|e| failed(e.to_string()))?;
        let mapping = Mapping::new(fd.as_fd(), bytes).map_err(|e| failed(e.to_string()))?;
        let (mapping, mut at) = (Arc::new(mapping), 0);
        let span = |length: &u64| {
            let span = Span::new(mapping.clone(), at, *length, hold.clone());
            at += length.next_multiple_of(ALIGN);
            span
        };
        let spans: Option<Vec<_>> = lengths.iter().map(span).collect();
        let spans = spans.ok_or_else(|| failed("it does not lie in its mapping".into()))?;
        Ok(Self { spans })
    }
}

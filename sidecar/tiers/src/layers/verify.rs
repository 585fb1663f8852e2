//! Compares all bytes with the digests in the object's header: after a get those of all places (computed by the tier while it filled
//! them, or now), before a put those of all spans, unless the tier compares puts itself. A corrupt object is deleted from the tier, so
//! that it can be stored again.
//!
//! Other processes can write to the places, and such a process must not cause objects to be deleted for all. So a mismatch is read
//! again into private memory, and the object is deleted only if it does not match there either.

use super::scratch::{Room, Scratch};
use crate::{Cause, Get, Place, Put, Removal, Span, Tier, TierError, work};
use kvcachepool_protocol::object::{Object, ObjectName};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Larger sections are hashed on another thread, so that sockets are not delayed.
const HERE_BYTES_MAX: u64 = 1 << 20;

#[derive(Debug)]
pub struct Verify {
    inner: Arc<dyn Tier>,
    /// For sections that are read again.
    room: Room,
    /// Corrupt objects found in the tier.
    pub corrupt: Arc<AtomicU64>,
    /// Gets whose bytes another process overwrote.
    pub scribbled: AtomicU64,
}

impl Verify {
    pub fn new(inner: Arc<dyn Tier>, room: Room) -> Self {
        Self {
            inner,
            room,
            corrupt: Arc::default(),
            scribbled: AtomicU64::default(),
        }
    }

    fn failed(&self, cause: Cause, name: &ObjectName, detail: impl Into<String>) -> TierError {
        TierError::new(self.inner.info().kind, cause, detail).about(name.s3(""))
    }

    /// Checks the result of a get with these places, or of a head with none.
    pub async fn check_get(
        &self,
        name: &ObjectName,
        places: &[Place],
        got: Result<Object, TierError>,
    ) -> Result<Object, TierError> {
        let head = match got {
            Ok(head) => head,
            Err(e) => {
                if e.cause == Cause::Corrupt {
                    discard(self.inner.as_ref(), &self.corrupt, name).await;
                }
                return Err(e);
            }
        };
        let Some(place) = self.wrong(name, &head, places).await? else {
            return Ok(head);
        };
        let (group, shard) = (place.group, place.shard);
        let not = format!("section {group}/{shard} does not match its digest");
        let detail = match self.right_alone(name, place).await {
            Ok(false) => {
                discard(self.inner.as_ref(), &self.corrupt, name).await;
                not
            }
            Ok(true) => {
                self.scribbled.fetch_add(1, Relaxed);
                format!(
                    "{not} in the arena, but does in the tier: a process on this node writes to slots that it does not own"
                )
            }
            Err(e) => {
                format!("{not}; the object is kept, because it could not be read again: {e}")
            }
        };
        Err(self.failed(Cause::Corrupt, name, detail))
    }

    /// The first place whose bytes do not match the header.
    async fn wrong<'a>(
        &self,
        name: &ObjectName,
        head: &Object,
        places: &'a [Place],
    ) -> Result<Option<&'a Place>, TierError> {
        if head.name() != *name {
            let detail = format!("the header is that of {}", head.name().s3(""));
            return Err(self.failed(Cause::Foreign, name, detail));
        }
        let section = |place: &Place| {
            head.section(place.group, place.shard)
                .filter(|s| s.stored_bytes == place.span.length)
                .map(|s| s.stored_digest)
        };
        let expected: Option<Vec<_>> = places.iter().map(section).collect();
        let expected = expected.ok_or_else(|| {
            let detail = "a place and its section differ in length";
            self.failed(Cause::Shape, name, detail)
        })?;
        let spans = places.iter().map(|place| place.span.clone()).collect();
        let found = self.digests(name, spans).await?;
        let expected = expected.into_iter().map(Some);
        let mut compared = places.iter().zip(found.into_iter().zip(expected));
        let wrong = compared.find(|(_, (found, expected))| found != expected);
        Ok(wrong.map(|(place, _)| place))
    }

    /// Whether the section of a place matches its digest when it is read into private memory.
    async fn right_alone(&self, name: &ObjectName, place: &Place) -> Result<bool, TierError> {
        let bytes = place.span.length;
        let hold = self.room.try_take(bytes).ok_or_else(|| {
            let detail = format!("no room for {bytes} bytes of private memory now");
            self.failed(Cause::Io, name, detail)
        })?;
        let alone = Scratch::new(self.inner.info().kind, &[bytes], hold)?;
        let place = |span| Place { span, ..*place };
        let places: Vec<_> = alone.spans.into_iter().map(place).collect();
        let get = Get {
            name: name.clone(),
            places: places.clone(),
        };
        match self.inner.get(get).await {
            Ok(head) => Ok(self.wrong(name, &head, &places).await?.is_none()),
            Err(e) if e.cause == Cause::Corrupt => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// The digest of each span, as recorded or as computed now. `None`: the span is not inside its arena.
    async fn digests(
        &self,
        name: &ObjectName,
        spans: Vec<Span>,
    ) -> Result<Vec<Option<[u8; 16]>>, TierError> {
        let unseen = spans.iter().filter(|span| span.seen().is_none());
        let bytes: u64 = unseen.map(|span| span.length).sum();
        let digest = |span: &Span| span.seen().or_else(|| span.digest());
        let all = move || spans.iter().map(digest).collect();
        if bytes <= HERE_BYTES_MAX {
            return Ok(all());
        }
        let hashed = work::apart(all).await;
        hashed.map_err(|e| self.failed(Cause::Io, name, format!("cannot compute digests: {e}")))
    }

    /// Whether the spans match the header.
    pub async fn check_put(&self, put: &Put) -> Result<(), TierError> {
        let name = put.object.name();
        let lengths = put.object.sections.iter().map(|s| s.stored_bytes);
        if !lengths.eq(put.spans.iter().map(|span| span.length)) {
            let detail = "spans and sections differ in length; nothing was written";
            return Err(self.failed(Cause::Shape, &name, detail));
        }
        if self.inner.info().compares_puts {
            return Ok(());
        }
        let found = self.digests(&name, put.spans.clone()).await?;
        let expected = put.object.sections.iter().map(|s| Some(s.stored_digest));
        if !expected.eq(found) {
            let detail =
                "the bytes in memory do not match the header's digests; nothing was written";
            return Err(self.failed(Cause::Corrupt, &name, detail));
        }
        Ok(())
    }
}

/// Counts a corrupt object and deletes it, with one attempt: after a failure the next get finds the object again.
pub(super) async fn discard(tier: &dyn Tier, corrupt: &AtomicU64, name: &ObjectName) {
    corrupt.fetch_add(1, Relaxed);
    let _ = tier.remove(Removal::Unusable(name)).await;
}

#[cfg(test)]
mod tests;

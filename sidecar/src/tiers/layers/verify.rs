//! No byte passes that is not what the object's head says: after a get the digests of all places are compared, as the tier saw them when it
//! filled the places or as they are now, before a put those of all spans, where the tier does not do that itself. What is corrupt in the tier is removed from it, so that it is asked for once and can be written anew.

use crate::tiers::{
    Cause, Get, Kind, Operation, Page, Place, Put, Span, Stored, Tier, TierError, Usage, work,
};
use kvcachepool_protocol::object::{Object, ObjectName};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// More bytes than this are hashed on a thread of their own, so that the sockets beside them are not kept waiting.
const HERE_BYTES_MAX: u64 = 1 << 20;

/// The layer.
#[derive(Debug)]
pub struct Verify {
    inner: Arc<dyn Tier>,
    corrupt: Arc<AtomicU64>,
}

impl Verify {
    /// Around a tier.
    pub fn new(inner: Arc<dyn Tier>) -> Self {
        Self {
            inner,
            corrupt: Arc::default(),
        }
    }

    /// Counts objects that were found corrupt in the tier.
    pub fn corrupt(&self) -> Arc<AtomicU64> {
        self.corrupt.clone()
    }

    fn failed(&self, cause: Cause, name: &ObjectName, detail: impl Into<String>) -> TierError {
        TierError::new(self.inner.kind(), cause, detail).about(name.s3(""))
    }

    /// Runs a get or head and checks what it brought.
    fn checked<'a>(
        &'a self,
        name: ObjectName,
        places: Vec<Place>,
        inner: impl FnOnce() -> Operation<'a, Object> + Send + 'a,
    ) -> Operation<'a, Object> {
        Box::pin(async move {
            let checked = match inner().await {
                Ok(head) => self.check(&name, &head, &places).await.map(|()| head),
                Err(e) => Err(e),
            };
            if checked.as_ref().is_err_and(|e| e.cause == Cause::Corrupt) {
                discard(self.inner.as_ref(), &self.corrupt, &name).await;
            }
            checked
        })
    }

    /// Is what lies in the places what the head says?
    async fn check(
        &self,
        name: &ObjectName,
        head: &Object,
        places: &[Place],
    ) -> Result<(), TierError> {
        if head.name() != *name {
            let detail = format!("the head is of {}", head.name().s3(""));
            return Err(self.failed(Cause::Foreign, name, detail));
        }
        let section = |place: &Place| {
            head.section(place.group, place.shard)
                .filter(|s| s.stored_bytes == place.span.length)
                .map(|s| s.stored_digest)
        };
        let expected: Option<Vec<_>> = places.iter().map(section).collect();
        let expected = expected.ok_or_else(|| {
            let detail = "a place is not as long as its section";
            self.failed(Cause::Shape, name, detail)
        })?;
        let spans = places.iter().map(|place| place.span.clone()).collect();
        let found = self.digests(name, spans).await?;
        let wrong = places
            .iter()
            .zip(found.iter().zip(&expected))
            .find(|(_, (found, expected))| found != expected);
        match wrong {
            None => Ok(()),
            Some((place, _)) => {
                let (group, shard) = (place.group, place.shard);
                let detail = format!("section {group}/{shard} is not what its digest says");
                Err(self.failed(Cause::Corrupt, name, detail))
            }
        }
    }

    async fn digests(
        &self,
        name: &ObjectName,
        spans: Vec<Span>,
    ) -> Result<Vec<[u8; 16]>, TierError> {
        let unseen = spans.iter().filter(|span| span.seen().is_none());
        let bytes: u64 = unseen.map(|span| span.length).sum();
        // A span lies in its arena: none is without a digest.
        let digest = |span: &Span| span.seen().or_else(|| span.digest());
        let all = move || -> Vec<_> { spans.iter().filter_map(digest).collect() };
        if bytes <= HERE_BYTES_MAX {
            return Ok(all());
        }
        let hashed = work::apart(all).await;
        hashed.map_err(|e| self.failed(Cause::Io, name, format!("digests were not made: {e}")))
    }

    /// Are the spans what the head says?
    async fn check_put(&self, put: &Put) -> Result<(), TierError> {
        let name = put.object.name();
        let lengths = put.object.sections.iter().map(|s| s.stored_bytes);
        if !lengths.eq(put.spans.iter().map(|span| span.length)) {
            let detail = "the spans are not as long as the sections; nothing was written";
            return Err(self.failed(Cause::Shape, &name, detail));
        }
        if self.inner.compares_puts() {
            return Ok(());
        }
        let found = self.digests(&name, put.spans.clone()).await?;
        let expected = put.object.sections.iter().map(|s| s.stored_digest);
        if !expected.eq(found) {
            let detail = "the bytes in memory are not what the head says; nothing was written";
            return Err(self.failed(Cause::Corrupt, &name, detail));
        }
        Ok(())
    }
}

/// Counts a corrupt object and takes it away; one try, whatever becomes of it: the next get finds it again.
pub(super) async fn discard(tier: &dyn Tier, corrupt: &AtomicU64, name: &ObjectName) {
    corrupt.fetch_add(1, Relaxed);
    let _ = tier.remove(std::slice::from_ref(name)).await;
}

impl Tier for Verify {
    fn kind(&self) -> Kind {
        self.inner.kind()
    }

    fn lookup<'a>(&'a self, names: &'a [ObjectName]) -> Operation<'a, Vec<bool>> {
        self.inner.lookup(names)
    }

    fn head<'a>(&'a self, name: &'a ObjectName) -> Operation<'a, Object> {
        self.checked(name.clone(), Vec::new(), || self.inner.head(name))
    }

    fn get(&self, mut get: Get) -> Operation<'_, Object> {
        for place in &mut get.places {
            place.span = place.span.watched();
        }
        self.checked(get.name.clone(), get.places.clone(), || self.inner.get(get))
    }

    fn put(&self, put: Put) -> Operation<'_, Stored> {
        Box::pin(async move {
            self.check_put(&put).await?;
            self.inner.put(put).await
        })
    }

    fn remove<'a>(&'a self, names: &'a [ObjectName]) -> Operation<'a, u64> {
        self.inner.remove(names)
    }

    fn usage(&self) -> Operation<'_, Usage> {
        self.inner.usage()
    }

    fn list<'a>(&'a self, from: Option<&'a str>, limit: usize) -> Operation<'a, Page> {
        self.inner.list(from, limit)
    }
}

#[cfg(test)]
mod tests;

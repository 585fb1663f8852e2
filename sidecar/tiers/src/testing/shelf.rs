//! A tier in this process's memory, for tests: the behaviour of the trait without layers. No object outlives the process, and only invalid
//! requests and a lack of room fail; other failures come from `layers/chaos.rs`.

use kvcachepool_protocol::object::{Object, ObjectName};
use kvcachepool_tiers::{
    Cause, Get, Kind, Listed, Operation, Page, Place, Put, Removal, Span, Stored, Tier, TierError,
    TierInfo, Usage,
};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// The tier. Clones share the objects.
#[derive(Debug, Clone)]
pub struct Shelf {
    info: TierInfo,
    capacity_bytes: u64,
    objects: Arc<Mutex<BTreeMap<String, Kept>>>,
}

#[derive(Debug, Clone)]
struct Kept {
    object: Object,
    sections: Vec<Arc<Vec<u8>>>,
    written_unix_s: u64,
}

impl Kept {
    fn bytes(&self) -> u64 {
        self.object.total_bytes()
    }
}

impl Shelf {
    /// An empty tier; `kind` is the tier in its errors, `capacity_bytes` 0 means no limit.
    pub fn new(kind: Kind, capacity_bytes: u64) -> Self {
        Self {
            info: TierInfo::new(kind),
            capacity_bytes,
            objects: Arc::default(),
        }
    }

    /// Changes one byte of a stored section, as a bad disk does. False: there is no such byte.
    pub fn spoil(&self, name: &ObjectName, section: usize, at: usize) -> bool {
        let mut objects = self.objects.lock();
        let byte = objects
            .get_mut(&name.s3(""))
            .and_then(|kept| kept.sections.get_mut(section))
            .and_then(|bytes| Arc::make_mut(bytes).get_mut(at));
        byte.is_some_and(|byte| {
            *byte ^= 1;
            true
        })
    }

    fn failed(&self, cause: Cause, name: &ObjectName, detail: impl Into<String>) -> TierError {
        TierError::new(self.info.kind, cause, detail).about(name.s3(""))
    }

    fn kept(&self, name: &ObjectName) -> Result<Kept, TierError> {
        let objects = self.objects.lock();
        objects
            .get(&name.s3(""))
            .cloned()
            .ok_or_else(|| self.failed(Cause::Missing, name, "not on the shelf"))
    }

    /// Bytes of the section for each place, in the order of the places.
    fn wanted(
        &self,
        name: &ObjectName,
        kept: &Kept,
        places: &[Place],
    ) -> Result<Vec<Arc<Vec<u8>>>, TierError> {
        let of = |place: &Place| {
            let mut sections = kept.object.sections.iter().zip(&kept.sections);
            let (_, bytes) =
                sections.find(|(s, _)| (s.group, s.shard) == (place.group, place.shard))?;
            (bytes.len() as u64 == place.span.length).then(|| bytes.clone())
        };
        let shape = |place: &Place| {
            let (group, shard, length) = (place.group, place.shard, place.span.length);
            let detail = format!("no section {group}/{shard} of {length} bytes");
            self.failed(Cause::Shape, name, detail)
        };
        let find = |place| of(place).ok_or_else(|| shape(place));
        places.iter().map(find).collect()
    }

    fn copied(&self, put: &Put) -> Result<Vec<Arc<Vec<u8>>>, TierError> {
        let lengths = put.object.sections.iter().map(|s| s.stored_bytes);
        if !lengths.eq(put.spans.iter().map(|span| span.length)) {
            let detail = "spans and sections differ in length";
            return Err(self.failed(Cause::Shape, &put.object.name(), detail));
        }
        Ok(put.spans.iter().map(|span| Arc::new(bytes(span))).collect())
    }

    fn shelve(&self, kept: Kept) -> Result<Stored, TierError> {
        let name = kept.object.name();
        let mut objects = self.objects.lock();
        if objects.contains_key(&name.s3("")) {
            return Ok(Stored::Already);
        }
        let held: u64 = objects.values().map(Kept::bytes).sum();
        if self.capacity_bytes > 0 && held + kept.bytes() > self.capacity_bytes {
            return Err(self.failed(Cause::Full, &name, "no room on the shelf"));
        }
        objects.insert(name.s3(""), kept);
        Ok(Stored::New)
    }
}

fn bytes(span: &Span) -> Vec<u8> {
    let mut bytes = vec![0; span.length as usize];
    span.read(0, &mut bytes);
    bytes
}

impl Tier for Shelf {
    fn info(&self) -> &TierInfo {
        &self.info
    }

    fn lookup<'a>(&'a self, names: &'a [ObjectName]) -> Operation<'a, Vec<bool>> {
        Box::pin(async move {
            let objects = self.objects.lock();
            Ok(names
                .iter()
                .map(|name| objects.contains_key(&name.s3("")))
                .collect())
        })
    }

    fn head<'a>(&'a self, name: &'a ObjectName) -> Operation<'a, Object> {
        Box::pin(async move { Ok(self.kept(name)?.object) })
    }

    fn get(&self, get: Get) -> Operation<'_, Object> {
        Box::pin(async move {
            let kept = self.kept(&get.name)?;
            let wanted = self.wanted(&get.name, &kept, &get.places)?;
            for (place, bytes) in get.places.iter().zip(wanted) {
                // A real tier waits between its sections, so that other tasks run and the operation may be dropped.
                tokio::task::yield_now().await;
                place.span.write(0, &bytes);
            }
            Ok(kept.object)
        })
    }

    fn put(&self, put: Put) -> Operation<'_, Stored> {
        Box::pin(async move {
            let sections = self.copied(&put)?;
            tokio::task::yield_now().await;
            self.shelve(Kept {
                object: put.object,
                sections,
                written_unix_s: now_unix_s(),
            })
        })
    }

    fn remove<'a>(&'a self, removal: Removal<'a>) -> Operation<'a, u64> {
        Box::pin(async move {
            let names = removal.names();
            let mut objects = self.objects.lock();
            let removed = names
                .iter()
                .filter(|name| objects.remove(&name.s3("")).is_some());
            Ok(removed.count() as u64)
        })
    }

    fn usage(&self) -> Operation<'_, Usage> {
        Box::pin(async move {
            let objects = self.objects.lock();
            Ok(Usage {
                objects: objects.len() as u64,
                bytes: objects.values().map(Kept::bytes).sum(),
                capacity_bytes: self.capacity_bytes,
            })
        })
    }

    fn list<'a>(&'a self, from: Option<&'a str>, limit: usize) -> Operation<'a, Page> {
        Box::pin(async move {
            let objects = self.objects.lock();
            let start = from.map_or(Bound::Unbounded, Bound::Excluded);
            let mut rest = objects.range::<str, _>((start, Bound::Unbounded));
            let page: Vec<_> = rest.by_ref().take(limit.max(1)).collect();
            let last = page.last().map(|(name, _)| (*name).clone());
            Ok(Page {
                objects: page.into_iter().map(|(_, kept)| listed(kept)).collect(),
                foreign: 0,
                next: rest.next().and(last),
                unread: None,
            })
        })
    }
}

fn listed(kept: &Kept) -> Listed {
    Listed {
        name: kept.object.name(),
        bytes: kept.bytes(),
        written_unix_s: kept.written_unix_s,
    }
}

fn now_unix_s() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

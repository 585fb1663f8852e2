//! A slow tier with a directory: an existence marker per object in a faster shared place, so that a lookup of a prefix costs one
//! round trip there instead of several requests here.
//!
//! Markers are hints. A wrong marker costs a get that finds nothing and removes the marker. A missing marker, or a place that does not
//! answer, costs the lookup that the tier would have done anyway. Objects are read only from the tier.

use super::{
    Cause, Get, Operation, Page, Put, Reading, Removal, Stored, Tier, TierError, TierInfo, Usage,
    Writes,
};
use kvcachepool_protocol::object::{Object, ObjectName};
use parking_lot::Mutex;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::Instant;

/// Longest wait for markers before a lookup or a removal continues without them.
const QUESTION: Duration = Duration::from_millis(100);
/// Pause after a timeout, during which markers are not used.
const PAUSE: Duration = Duration::from_secs(1);
/// Updates of markers in flight; further ones are dropped.
const CHANGES: u32 = 64;
/// Timeout of an update.
pub const CHANGE: Duration = Duration::from_secs(2);

/// A place for existence markers.
pub trait Marks: Send + Sync + fmt::Debug {
    /// Whether each name is marked, in order.
    fn marked<'a>(&'a self, names: &'a [ObjectName]) -> Operation<'a, Vec<bool>>;

    /// Marks these names, or extends the life of their markers.
    fn mark<'a>(&'a self, names: &'a [ObjectName]) -> Operation<'a, ()>;

    fn unmark<'a>(&'a self, names: &'a [ObjectName]) -> Operation<'a, ()>;
}

/// A tier and the markers of its objects.
#[derive(Debug)]
pub struct Directory {
    /// The tier's info, with the counters of this layer added.
    info: TierInfo,
    tier: Arc<dyn Tier>,
    marks: Arc<dyn Marks>,
    /// Whether markers may be written.
    writes: Writes,
    changes: Arc<Semaphore>,
    /// Markers are not used until then.
    pause: Mutex<Option<Instant>>,
    counts: Arc<Counts>,
}

/// Results of marker operations.
#[derive(Debug, Default)]
struct Counts {
    /// Names that were marked in a lookup.
    knew: AtomicU64,
    /// Names that were looked up in the tier itself.
    left: AtomicU64,
    /// Lookups of markers without an answer.
    silent: AtomicU64,
    /// Updates that failed or were dropped.
    unchanged: AtomicU64,
}

impl Counts {
    fn named(&self) -> [(&'static str, u64); 4] {
        let own = [
            ("DirectoryKnew", &self.knew),
            ("DirectoryLeft", &self.left),
            ("DirectorySilent", &self.silent),
            ("DirectoryUnchanged", &self.unchanged),
        ];
        own.map(|(name, count)| (name, count.load(Relaxed)))
    }

    /// Runs an update, and counts a failure.
    async fn made(&self, change: impl Future<Output = Result<(), TierError>>) {
        let done = tokio::time::timeout(CHANGE, change).await;
        if !matches!(done, Ok(Ok(()))) {
            self.unchanged.fetch_add(1, Relaxed);
        }
    }
}

enum Change {
    Mark,
    Unmark,
}

impl Directory {
    /// Looks objects up in `marks` first. Marks objects of `tier` that are written or read, while `writes` allows it.
    pub fn new(tier: Arc<dyn Tier>, marks: Arc<dyn Marks>, writes: Writes) -> Self {
        let counts = Arc::new(Counts::default());
        let (inner, own) = (tier.info().counters.clone(), counts.clone());
        let counters = Reading::new(move || {
            let mut counters = inner.now();
            counters.extend(own.named());
            counters
        });
        let info = TierInfo {
            counters,
            ..tier.info().clone()
        };
        Self {
            info,
            tier,
            marks,
            writes,
            changes: Arc::new(Semaphore::new(CHANGES as usize)),
            pause: Mutex::default(),
            counts,
        }
    }

    /// Whether markers are currently not used.
    fn pauses(&self) -> bool {
        let until = *self.pause.lock();
        until.is_some_and(|until| Instant::now() < until)
    }

    /// Pauses the use of markers after a timeout.
    fn pause(&self) {
        self.counts.silent.fetch_add(1, Relaxed);
        *self.pause.lock() = Some(Instant::now() + PAUSE);
    }

    /// Number of names, from the first on, that are marked.
    async fn marked(&self, names: &[ObjectName]) -> usize {
        if self.pauses() {
            return 0;
        }
        match tokio::time::timeout(QUESTION, self.marks.marked(names)).await {
            Ok(Ok(marked)) => marked.iter().take_while(|there| **there).count(),
            Ok(Err(_)) | Err(_) => {
                self.pause();
                0
            }
        }
    }

    /// Updates markers in the background. A lost update costs a lookup or a miss.
    fn change(&self, change: Change, names: Vec<ObjectName>) {
        let Ok(permit) = self.changes.clone().try_acquire_owned() else {
            self.counts.unchanged.fetch_add(1, Relaxed);
            return;
        };
        let (marks, counts) = (self.marks.clone(), self.counts.clone());
        tokio::spawn(async move {
            let _permit = permit;
            let change = match change {
                Change::Mark => marks.mark(&names),
                Change::Unmark => marks.unmark(&names),
            };
            counts.made(change).await;
        });
    }

    /// Removes markers before their objects, and after all pending updates, so that no marker remains once the removal has ended.
    /// If that takes long, it continues in the background: a removal does not wait for it.
    async fn unmark(&self, names: Vec<ObjectName>) {
        if self.pauses() {
            return self.change(Change::Unmark, names);
        }
        let (marks, changes, counts) = (
            self.marks.clone(),
            self.changes.clone(),
            self.counts.clone(),
        );
        let (asks, mut asked) = oneshot::channel();
        let unmark = tokio::spawn(async move {
            let unmark = async {
                let _alone = changes.acquire_many(CHANGES).await;
                let _ = asks.send(());
                marks.unmark(&names).await
            };
            counts.made(unmark).await;
        });
        let late = tokio::time::timeout(QUESTION, unmark).await.is_err();
        // A timeout while earlier updates ran says nothing about the place itself.
        if late && asked.try_recv().is_ok() {
            self.pause();
        }
    }

    /// Updates the marker after an operation on one object. A wrong marker is removed.
    fn learn<T>(&self, name: ObjectName, ended: &Result<T, TierError>) {
        match ended.as_ref().map_err(|e| e.cause) {
            Ok(_) if self.writes.get() => self.change(Change::Mark, vec![name]),
            Err(Cause::Missing | Cause::Corrupt | Cause::Foreign) => {
                self.change(Change::Unmark, vec![name]);
            }
            Ok(_) | Err(_) => {}
        }
    }
}

impl Tier for Directory {
    fn info(&self) -> &TierInfo {
        &self.info
    }

    fn lookup<'a>(&'a self, names: &'a [ObjectName]) -> Operation<'a, Vec<bool>> {
        Box::pin(async move {
            let known = self.marked(names).await;
            let mut there = vec![true; known];
            let rest = names.get(known..).unwrap_or_default();
            self.counts.knew.fetch_add(known as u64, Relaxed);
            self.counts.left.fetch_add(rest.len() as u64, Relaxed);
            if !rest.is_empty() {
                there.extend(self.tier.lookup(rest).await?);
            }
            Ok(there)
        })
    }

    fn head<'a>(&'a self, name: &'a ObjectName) -> Operation<'a, Object> {
        Box::pin(async move {
            let head = self.tier.head(name).await;
            self.learn(name.clone(), &head);
            head
        })
    }

    fn get(&self, get: Get) -> Operation<'_, Object> {
        Box::pin(async move {
            let name = get.name.clone();
            let got = self.tier.get(get).await;
            self.learn(name, &got);
            got
        })
    }

    fn put(&self, put: Put) -> Operation<'_, Stored> {
        Box::pin(async move {
            let name = put.object.name();
            let stored = self.tier.put(put).await;
            self.learn(name, &stored);
            stored
        })
    }

    fn remove<'a>(&'a self, removal: Removal<'a>) -> Operation<'a, u64> {
        Box::pin(async move {
            self.unmark(removal.names().into_owned()).await;
            self.tier.remove(removal).await
        })
    }

    fn usage(&self) -> Operation<'_, Usage> {
        self.tier.usage()
    }

    fn list<'a>(&'a self, from: Option<&'a str>, limit: usize) -> Operation<'a, Page> {
        self.tier.list(from, limit)
    }
}

#[cfg(test)]
mod tests;

//! A slow tier with a directory: a mark for each of its objects lies in a quicker place that is shared as well, so that a prefix costs
//! one round trip there instead of several requests here.
//!
//! Marks are hints. One that is there may be wrong: then the get finds nothing, which takes it away. One that is missing, or a place
//! that does not answer, costs the question that the tier would have been asked anyway. What is read is the tier's alone.

use super::s3::Writes;
use super::{
    Cause, Get, Operation, Page, Put, Reading, Removal, Stored, Tier, TierError, TierInfo, Usage,
};
use kvcachepool_protocol::object::{Object, ObjectName};
use parking_lot::Mutex;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::Instant;

/// Longest wait for marks before the tier is asked, or has objects removed, as if there were none.
const QUESTION: Duration = Duration::from_millis(100);
/// After one that had no answer they are left alone for so long.
const PAUSE: Duration = Duration::from_secs(1);
/// Changes of marks that are under way at once; what comes on top is left out.
const CHANGES: u32 = 64;
/// Longest time that one may take.
pub const CHANGE: Duration = Duration::from_secs(2);

/// Where marks lie.
pub trait Marks: Send + Sync + fmt::Debug {
    /// Which of these are marked? One answer per name, in order.
    fn marked<'a>(&'a self, names: &'a [ObjectName]) -> Operation<'a, Vec<bool>>;

    /// Marks these, or lets their marks live on.
    fn mark<'a>(&'a self, names: &'a [ObjectName]) -> Operation<'a, ()>;

    /// Takes marks away.
    fn unmark<'a>(&'a self, names: &'a [ObjectName]) -> Operation<'a, ()>;
}

/// A tier and the marks of its objects.
#[derive(Debug)]
pub struct Directory {
    /// The tier's, with counts of its own.
    info: TierInfo,
    tier: Arc<dyn Tier>,
    marks: Arc<dyn Marks>,
    /// Is anything to be marked?
    writes: Writes,
    changes: Arc<Semaphore>,
    /// Marks are left alone until then.
    pause: Mutex<Option<Instant>>,
    counts: Arc<Counts>,
}

/// What came of marks.
#[derive(Debug, Default)]
struct Counts {
    /// Names that were marked, where that was asked.
    knew: AtomicU64,
    /// Names that the tier itself was asked for.
    left: AtomicU64,
    /// Questions without an answer.
    silent: AtomicU64,
    /// Changes that were not made.
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

    /// Makes a change, or counts that it was not made.
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
    /// Objects are looked up in `marks` first; those of `tier` that are written or read are marked there, as long as `writes` says so.
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

    /// Are marks left alone?
    fn pauses(&self) -> bool {
        let until = *self.pause.lock();
        until.is_some_and(|until| Instant::now() < until)
    }

    /// Marks did not answer.
    fn pause(&self) {
        self.counts.silent.fetch_add(1, Relaxed);
        *self.pause.lock() = Some(Instant::now() + PAUSE);
    }

    /// Of how many names, from the first on, marks are there.
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

    /// Changes marks beside what goes on. Nobody waits for it, and a change that is lost costs a question or a miss.
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

    /// Takes marks away before their objects go, and behind all marks of what ended before, so that nobody who is told of the end finds one.
    /// Where that takes long it goes on beside: nobody who removes objects waits for it.
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
        // Changes that are waited for say nothing of who is not asked yet.
        if late && asked.try_recv().is_ok() {
            self.pause();
        }
    }

    /// What an operation on one object says of its mark. One that is wrong goes, whoever finds it.
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

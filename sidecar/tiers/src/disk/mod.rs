//! The disk tier: objects in a folder. This module contains its files, threads and recovery. It does not decide which objects are worth
//! writing or reading, and does not check their bytes.
//!
//! ```text
//! format                           "kvcachepool-disk 1"
//! lock                             record lock of the sidecar that uses the folder
//! slots-<id>-<units>-<slots>       container: slots of `units` x 4 KiB, one object each, exactly as `protocol::object` has it
//! snapshot-<generation>            state when the journal of this generation began: records, least recently used first
//! journal-<generation>             changes since then: records
//! ```
//! Names are hex. Other files in the folder are left alone and counted.
//!
//! An object's bytes are synced, then its record, then it becomes visible. A slot is written again only after the record that removed
//! its object is durable and its readers have ended. A container number is never used again: deleting its file removes its objects,
//! whatever records say. So the recovered state contains only whole objects at any moment.
//!
//! The capacity bounds container files. Journal and snapshot add at most 88 bytes for each of some two records per object.

mod classes;
mod commit;
mod core;
mod fault;
mod files;
mod folder;
mod index;
mod journal;
mod live;
mod load;
mod lock;
mod name;
mod read;
mod record;
mod space;
mod state;
#[cfg(test)]
mod tests;
mod transfer;
mod write;

pub use state::Counts;

use self::core::Core;
use super::files::fault::busy;
use super::files::pool::Pool;
use super::{
    Cause, Get, Kind, Listed, Operation, Page, Put, Reading, Removal, Stored, Tier, TierError,
    TierInfo, Usage,
};
use fault::closed;
use index::Entry;
use kvcachepool_protocol::object::{Object, ObjectName};
use live::Live;
use name::NameKey;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

const PAGE_MAX: usize = 4096;

/// Settings of the tier.
#[derive(Debug, Clone)]
pub struct Options {
    pub read_threads: usize,
    /// Threads that write: they also wait for room, which readers do not need.
    pub write_threads: usize,
    /// Operations that may wait for a thread of either kind; further ones fail with [`Cause::Busy`].
    pub queue: usize,
    /// Eviction begins when the slots of objects exceed this share of the capacity.
    pub high_percent: u8,
    /// Eviction ends at this share.
    pub low_percent: u8,
    /// Retry interval after a failure of the folder.
    pub probe_every: Duration,
    /// Container files that are kept open.
    pub open_files: usize,
    /// Minimum of records in a journal before a snapshot replaces it.
    pub journal_records_min: u64,
    /// Use direct I/O if the file system supports it.
    pub direct: bool,
    /// Stops and fails operations in tests.
    #[cfg(test)]
    pub(crate) watch: tests::Watch,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            read_threads: 16,
            write_threads: 8,
            queue: 4096,
            high_percent: 95,
            low_percent: 90,
            probe_every: Duration::from_secs(5),
            open_files: 512,
            journal_records_min: 65_536,
            direct: true,
            #[cfg(test)]
            watch: tests::Watch::default(),
        }
    }
}

/// A folder with objects. Dropping it ends its threads soon; [`Disk::close`] waits for them.
pub struct Disk {
    info: TierInfo,
    live: Arc<Live>,
    readers: Pool,
    writers: Pool,
}

impl Disk {
    /// Opens a folder with at most `capacity_bytes` of container files. Blocks while records are read. Fails if the path is not a folder,
    /// cannot be written, has another format, or is used by another sidecar.
    pub fn open(folder: &Path, capacity_bytes: u64, options: Options) -> Result<Self, TierError> {
        let start = |kind, threads| {
            let pool = Pool::start(kind, threads, options.queue);
            pool.map_err(|e| fault::failed("start threads for", &folder.display().to_string(), e))
        };
        let readers = start("disk-read", options.read_threads)?;
        let writers = start("disk-write", options.write_threads)?;
        let live = Arc::new(Live::open(folder, capacity_bytes, options)?);
        // An info that outlives the disk must not keep its lock.
        let counted = Arc::downgrade(&live);
        let counts = move || counted.upgrade().map(|live| live.counts());
        let info = TierInfo {
            counters: Reading::new(move || counts().unwrap_or_default().named().to_vec()),
            ..TierInfo::new(Kind::Disk)
        };
        Ok(Self {
            info,
            live,
            readers,
            writers,
        })
    }

    /// Completes pending operations, writes a snapshot and releases the lock. Blocks until then.
    pub fn close(self) {
        self.end(commit::End::Snapshot);
    }

    fn end(&self, end: commit::End) {
        self.live.end(end);
        self.readers.end();
        self.writers.end();
        self.live.join();
    }

    /// The error that turned it off, if any.
    pub fn off(&self) -> Option<TierError> {
        self.live.off()
    }

    /// Counters since the folder was opened; zero while it is off.
    pub fn counts(&self) -> Counts {
        self.live.counts()
    }

    pub fn is_direct(&self) -> bool {
        self.live.now().is_some_and(|core| core.direct)
    }

    /// Changes that wait to be made durable.
    #[cfg(test)]
    fn waiting(&self) -> usize {
        self.live.now().map_or(0, |core| core.changes.waiting())
    }

    /// Names, least recently used first.
    #[cfg(test)]
    fn order(&self) -> Vec<ObjectName> {
        let Some(core) = self.live.now() else {
            return Vec::new();
        };
        let state = core.state.lock();
        let names = state.index.oldest_first().map(|entry| entry.name.name());
        names.collect::<Option<_>>().unwrap_or_default()
    }

    /// The folder's core. Opens the folder again if a retry is due.
    async fn core(&self) -> Result<Arc<Core>, TierError> {
        match self.live.core() {
            live::Answer::Core(core) => Ok(core),
            live::Answer::Off(error) => Err(error),
            live::Answer::Probe => {
                let live = self.live.clone();
                self.block(move || live.probe()).await
            }
        }
    }

    /// Runs `f` on a reader thread.
    async fn block<T: Send + 'static>(
        &self,
        f: impl FnOnce() -> Result<T, TierError> + Send + 'static,
    ) -> Result<T, TierError> {
        self.readers.run(Kind::Disk, f).await
    }

    async fn put_object(&self, put: Put) -> Result<Stored, TierError> {
        let name = put.object.name();
        let shape = || {
            TierError::new(Kind::Disk, Cause::Shape, "the object has no name").about(name.s3(""))
        };
        let key = NameKey::of(&name).ok_or_else(shape)?;
        loop {
            let core = self.core().await?;
            let claim = match core.claim(key) {
                Ok(Some(claim)) => claim,
                Ok(None) => return Ok(Stored::Already),
                Err(mut writing) => {
                    // An error means that the writer has ended, successfully or not.
                    drop(core);
                    let _ = writing.changed().await;
                    continue;
                }
            };
            let (answer, answered) = oneshot::channel();
            if !self
                .writers
                .push(Box::new(move || core.put(put, claim, answer)))
            {
                return Err(busy(Kind::Disk));
            }
            return answered.await.unwrap_or_else(|_| Err(closed(Kind::Disk)));
        }
    }

    async fn page(&self, from: Option<&str>, limit: usize) -> Result<Page, TierError> {
        let core = self.core().await?;
        let after = match from {
            Some(cursor) => {
                let name = ObjectName::from_s3("", cursor).ok();
                let bad = || TierError::new(Kind::Disk, Cause::Shape, "invalid page token");
                Some(name.and_then(|n| NameKey::of(&n)).ok_or_else(bad)?)
            }
            None => None,
        };
        let (entries, more, foreign) = {
            let state = core.state.lock();
            let mut behind = state.index.after_name(after.as_ref());
            let entries: Vec<Entry> = behind
                .by_ref()
                .take(limit.clamp(1, PAGE_MAX))
                .copied()
                .collect();
            (entries, behind.next().is_some(), state.counts.foreign_files)
        };
        let objects: Vec<Listed> = entries
            .iter()
            .filter_map(|entry| {
                Some(Listed {
                    name: entry.name.name()?,
                    bytes: entry.bytes,
                    written_unix_s: entry.written_unix_s.into(),
                })
            })
            .collect();
        let last = objects.last().filter(|_| more);
        Ok(Page {
            next: last.map(|listed| listed.name.s3("")),
            // Counted once, on the first page.
            foreign: if from.is_none() { foreign } else { 0 },
            objects,
            unread: None,
        })
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.live.end(commit::End::AsItIs);
    }
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let io = if self.is_direct() {
            "direct"
        } else {
            "buffered"
        };
        write!(f, "Disk({}, {io}", self.live.path().display())?;
        match self.off() {
            Some(error) => write!(f, ", off: {})", error.cause.name()),
            None => write!(f, ")"),
        }
    }
}

impl Tier for Disk {
    fn info(&self) -> &TierInfo {
        &self.info
    }

    fn lookup<'a>(&'a self, names: &'a [ObjectName]) -> Operation<'a, Vec<bool>> {
        Box::pin(async move {
            let core = self.core().await?;
            let keys: Vec<Option<NameKey>> = names.iter().map(NameKey::of).collect();
            let state = core.state.lock();
            let there = |key: &Option<NameKey>| {
                key.as_ref()
                    .is_some_and(|key| state.index.find(key).is_some())
            };
            Ok(keys.iter().map(there).collect())
        })
    }

    fn head<'a>(&'a self, name: &'a ObjectName) -> Operation<'a, Object> {
        Box::pin(async move {
            let (core, name) = (self.core().await?, name.clone());
            self.block(move || core.head(&name)).await
        })
    }

    fn get(&self, get: Get) -> Operation<'_, Object> {
        Box::pin(async move {
            let core = self.core().await?;
            self.block(move || core.get(get)).await
        })
    }

    fn put(&self, put: Put) -> Operation<'_, Stored> {
        Box::pin(self.put_object(put))
    }

    fn remove<'a>(&'a self, removal: Removal<'a>) -> Operation<'a, u64> {
        Box::pin(async move {
            let core = self.core().await?;
            let (answer, answered) = oneshot::channel();
            let count = core.remove(&removal.names(), answer);
            let durable = answered.await.unwrap_or_else(|_| Err(closed(Kind::Disk)));
            durable.map(|()| count)
        })
    }

    fn usage(&self) -> Operation<'_, Usage> {
        Box::pin(async move {
            let core = self.core().await?;
            let state = core.state.lock();
            Ok(Usage {
                objects: state.index.len() as u64,
                bytes: state.bytes(),
                capacity_bytes: self.live.capacity(),
            })
        })
    }

    fn list<'a>(&'a self, from: Option<&'a str>, limit: usize) -> Operation<'a, Page> {
        Box::pin(self.page(from, limit))
    }
}

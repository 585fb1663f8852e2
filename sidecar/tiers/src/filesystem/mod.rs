//! The file system tier: objects as files in a folder that many sidecars share, over NFS, Lustre or the like. This module contains its
//! files, threads and the known state of the folder. It does not decide which objects are worth writing or reading, and does not check
//! their bytes.
//!
//! ```text
//! format                                             "kvcachepool-filesystem 1"
//! counted                                            time and result of the last count, for all sidecars
//! <model>/<layout>/<2 hex of the key>/<key>.<fidelity>.kv   an object, exactly as `protocol::object` has it
//! .new-<writer>-<number>                             an unfinished file, in the folder of the finished one
//! ```
//! Names are those of the S3 tier. Other names are left alone and counted. There is no lock and no index: the names are the state, and other
//! sidecars put and remove objects at any time.
//!
//! An object is written under a temporary name, its bytes are synced, and a hard link gives it its name, which fails if the name exists; then
//! the folder is synced. So an object is there completely or not at all, the first writer wins, and a crash leaves temporary files only. The
//! census removes those that are older than a day.

mod fault;
mod object;
mod remove;
mod root;
#[cfg(test)]
mod tests;
mod turns;
mod walk;

use super::census::{self, Bounds, Census, Shared};
use super::clock::Clock;
use super::files::pool::Pool;
use super::tags::Tags;
use super::{
    Cause, Get, Kind, Operation, Page, Put, Reading, Removal, Stored, Tier, TierError, TierInfo,
    Usage, Writes, prefix,
};
use futures::future::try_join_all;
use kvcachepool_protocol::config;
use kvcachepool_protocol::object::{Object, ObjectName};
use object::Version;
use parking_lot::Mutex;
use remove::Doomed;
use root::Root;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::task::AbortHandle;
use tokio::time::timeout;

const PAGE_MAX: usize = 1_000;
/// Objects that one thread removes in a row.
const REMOVALS: usize = 32;

/// Settings of the tier.
#[derive(Debug, Clone)]
pub struct Options {
    /// Threads for lookups, listings and removals, which do not wait behind objects' bytes.
    pub threads: usize,
    pub read_threads: usize,
    pub write_threads: usize,
    /// Operations that may wait for a thread of each kind; further ones fail with [`Cause::Busy`].
    pub queue: usize,
    /// Time limit of opening the tier: a file server may never answer.
    pub opening: Duration,
    pub first_look: FirstLook,
    /// Background work; `None` disables it.
    pub census: Option<census::Options>,
    /// Whether the folder may be changed.
    pub writes: Writes,
    /// Objects get their names by hard links, until the file system refuses one. Otherwise they are renamed.
    pub links: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            threads: 16,
            read_threads: 16,
            write_threads: 8,
            queue: 4096,
            opening: Duration::from_secs(15),
            first_look: FirstLook::default(),
            census: Some(census::Options::default()),
            writes: Writes::default(),
            links: true,
        }
    }
}

/// The first look at the folder. A call into a hung mount keeps its thread for as long as the file server is silent: while one does, the
/// next attempt to open the folder does not start another. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct FirstLook(Arc<Mutex<Weak<()>>>);

impl FirstLook {
    /// What a look holds until it returns; `None`: an earlier one still runs.
    fn begin(&self) -> Option<Arc<()>> {
        let mut last = self.0.lock();
        let free = last.strong_count() == 0;
        free.then(|| {
            let look = Arc::default();
            *last = Arc::downgrade(&look);
            look
        })
    }
}

/// A shared folder with objects. Its drop ends the background work, and its threads soon.
pub struct FileSystem {
    info: TierInfo,
    live: Arc<Live>,
    census: Option<AbortHandle>,
}

/// Shared by operations and the census.
struct Live {
    folder: Arc<Folder>,
    census: Census,
    asks: Pool,
    reads: Pool,
    puts: Pool,
}

/// Shared by the threads.
#[derive(Debug)]
struct Folder {
    root: Root,
    clock: Clock,
    /// Files of the objects read last.
    tags: Tags<Version>,
}

impl FileSystem {
    /// Opens the folder of a config: tries what a sidecar does there, and starts a listing. Fails if the path is not a folder, belongs to a
    /// disk tier, does not permit the operations, or does not answer in time.
    pub async fn open(config: &config::FileSystem, options: Options) -> Result<Self, TierError> {
        if config.evict_to_percent >= config.evict_at_percent {
            let detail = "fileSystem.evictToPercent must be below fileSystem.evictAtPercent";
            return Err(TierError::new(Kind::FileSystem, Cause::Config, detail));
        }
        let writes = options.writes.get();
        let look = move |folder: &Folder| {
            folder.root.begin(writes, &folder.clock)?;
            folder.page(None, PAGE_MAX)
        };
        Self::open_after(config, options, look).await
    }

    /// Opens the folder after a look at it, which returns the first page of its listing.
    async fn open_after(
        config: &config::FileSystem,
        options: Options,
        look: impl FnOnce(&Folder) -> Result<Page, TierError> + Send + 'static,
    ) -> Result<Self, TierError> {
        let silent = |since: &str| {
            let path = path(config);
            let detail = format!(
                "no answer from {} {since}; check the mount and the file server",
                path.display()
            );
            TierError::new(Kind::FileSystem, Cause::Timeout, detail)
        };
        let first = options.first_look.begin();
        let first = first.ok_or_else(|| silent("to an earlier attempt to open it"))?;
        let begun = Live::begin(config, &options, move |folder| {
            let _until_it_returns = first;
            look(folder)
        });
        let longest = options.opening;
        let live = timeout(longest, begun).await.unwrap_or_else(|_| {
            let seconds = longest.as_secs_f64();
            Err(silent(&format!("within {seconds:.1} s")))
        })?;
        Ok(Self::over(live, options.census))
    }

    /// Opens it for a tool: without background work and without a change, so that its content is not known.
    pub async fn open_uncounted(config: &config::FileSystem) -> Result<Self, TierError> {
        let options = Options::default();
        let begun = Live::begin(config, &options, |folder| {
            folder.root.begin(false, &folder.clock)?;
            Ok(Page::default())
        });
        Ok(Self::over(begun.await?, None))
    }

    /// The same, and counts the content now, however long that takes.
    pub async fn open_counted(config: &config::FileSystem) -> Result<Self, TierError> {
        let tier = Self::open_uncounted(config).await?;
        tier.live.count().await?;
        Ok(tier)
    }

    fn over(live: Arc<Live>, census: Option<census::Options>) -> Self {
        let census =
            census.map(|options| tokio::spawn(census::run(live.clone(), options)).abort_handle());
        let (dated, counted) = (live.folder.clone(), Arc::downgrade(&live));
        let refused = move || counted.upgrade().map_or(0, |live| live.census.refused());
        let info = TierInfo {
            counters: Reading::new(move || vec![("RemovalRefused", refused())]),
            unix_s: Reading::new(move || dated.clock.unix_s()),
            ..TierInfo::new(Kind::FileSystem)
        };
        Self { info, live, census }
    }

    /// Whether the folder is that of a file system tier.
    pub fn is_at(folder: &Path) -> bool {
        root::has_format(folder)
    }
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        if let Some(census) = &self.census {
            census.abort();
        }
    }
}

impl Live {
    /// Starts the threads, and lets one of them look at the folder first: `look` returns the first page of its listing.
    async fn begin(
        config: &config::FileSystem,
        options: &Options,
        look: impl FnOnce(&Folder) -> Result<Page, TierError> + Send + 'static,
    ) -> Result<Arc<Self>, TierError> {
        let path = path(config);
        let start = |name, threads| {
            let pool = Pool::start(name, threads, options.queue);
            pool.map_err(|e| fault::failed("start threads for", &path.display().to_string(), e))
        };
        let asks = start("fs-ask", options.threads)?;
        let folder = Arc::new(Folder {
            root: Root::new(&path, options.links),
            clock: Clock::default(),
            tags: Tags::default(),
        });
        let looked = folder.clone();
        let first = asks.run(Kind::FileSystem, move || look(&looked)).await?;
        let bounds = Bounds {
            capacity_bytes: config.capacity.0,
            evict_at_percent: config.evict_at_percent,
            evict_to_percent: config.evict_to_percent,
            expire_after: config.expire_after.std(),
        };
        Ok(Arc::new(Self {
            folder,
            census: Census::new(Kind::FileSystem, options.writes.clone(), bounds, &first),
            asks,
            reads: start("fs-read", options.read_threads)?,
            puts: start("fs-write", options.write_threads)?,
        }))
    }

    /// Runs `f` on a thread for short calls. It runs even when the caller stops waiting.
    async fn ask<T: Send + 'static>(
        &self,
        f: impl FnOnce() -> Result<T, TierError> + Send + 'static,
    ) -> Result<T, TierError> {
        self.asks.run(Kind::FileSystem, f).await
    }

    async fn lookup(&self, names: &[ObjectName]) -> Result<Vec<bool>, TierError> {
        prefix::present(names.len(), |index| async move {
            let Some(name) = names.get(index) else {
                return Ok(false);
            };
            let (folder, path) = (self.folder.clone(), name.s3(""));
            self.ask(move || folder.bytes(&path).map(|bytes| bytes.is_some()))
                .await
        })
        .await
    }

    async fn get(&self, get: Get) -> Result<Object, TierError> {
        let held = self.census.hold(&get.name);
        let folder = self.folder.clone();
        let read = move || {
            let _held = held;
            folder.get(&get)
        };
        self.reads.run(Kind::FileSystem, read).await
    }

    async fn put(&self, put: Put) -> Result<Stored, TierError> {
        let (folder, bytes) = (self.folder.clone(), put.object.total_bytes());
        let stored = self
            .puts
            .run(Kind::FileSystem, move || folder.put(put))
            .await?;
        if stored == Stored::New {
            self.census.came(bytes);
        }
        Ok(stored)
    }

    /// Removes objects; returns what became of each.
    async fn remove(&self, doomed: Vec<Doomed>) -> Result<Vec<remove::Ended>, TierError> {
        let batches = doomed.chunks(REMOVALS).map(<[Doomed]>::to_vec);
        let each = batches.map(|batch| {
            let folder = self.folder.clone();
            self.ask(move || folder.remove(&batch))
        });
        let ended: Vec<_> = try_join_all(each).await?.into_iter().flatten().collect();
        for bytes in ended.iter().filter_map(remove::Ended::removed) {
            self.census.went(bytes);
        }
        Ok(ended)
    }

    async fn usage(&self) -> Result<Usage, TierError> {
        let folder = self.folder.clone();
        self.ask(move || folder.root.reach()).await?;
        Ok(self.census.usage())
    }

    async fn list(&self, from: Option<&str>, limit: usize) -> Result<Page, TierError> {
        let from = match from {
            Some(token) => {
                let bad = || TierError::new(Kind::FileSystem, Cause::Shape, "invalid page token");
                let name = ObjectName::from_s3("", token).map_err(|_| bad())?;
                Some(name.s3(""))
            }
            None => None,
        };
        let folder = self.folder.clone();
        self.ask(move || folder.page(from.as_deref(), limit.clamp(1, PAGE_MAX)))
            .await
    }
}

fn path(config: &config::FileSystem) -> PathBuf {
    config.path.clone().unwrap_or_default()
}

impl fmt::Debug for Live {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.folder.root.fmt(f)
    }
}

impl fmt::Debug for FileSystem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FileSystem({})", self.live.folder.root.place(""))
    }
}

impl Tier for FileSystem {
    fn info(&self) -> &TierInfo {
        &self.info
    }

    fn lookup<'a>(&'a self, names: &'a [ObjectName]) -> Operation<'a, Vec<bool>> {
        Box::pin(self.live.lookup(names))
    }

    fn head<'a>(&'a self, name: &'a ObjectName) -> Operation<'a, Object> {
        let get = Get {
            name: name.clone(),
            places: Vec::new(),
        };
        Box::pin(self.live.get(get))
    }

    fn get(&self, get: Get) -> Operation<'_, Object> {
        Box::pin(self.live.get(get))
    }

    fn put(&self, put: Put) -> Operation<'_, Stored> {
        Box::pin(self.live.put(put))
    }

    fn remove<'a>(&'a self, removal: Removal<'a>) -> Operation<'a, u64> {
        Box::pin(async move {
            let ended = self.live.remove(Doomed::of(removal)).await?;
            remove::count(ended)
        })
    }

    fn usage(&self) -> Operation<'_, Usage> {
        Box::pin(self.live.usage())
    }

    fn list<'a>(&'a self, from: Option<&'a str>, limit: usize) -> Operation<'a, Page> {
        Box::pin(self.live.list(from, limit))
    }
}

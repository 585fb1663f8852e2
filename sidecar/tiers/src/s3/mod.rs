//! The S3 tier: objects in a bucket of AWS or of a compatible server. This module contains the requests and the known state of the bucket.
//! It does not decide which objects are worth writing or reading or how often a request is retried, and does not check their bytes.
//!
//! Names are `<prefix>/<model>/<layout>/<2 hex of the key>/<key>.<fidelity>.kv`. Other names under the prefix are left alone and counted.
//! The bucket is shared: other sidecars put and remove objects at any time, so nothing is cached for long.

mod body;
mod bound;
mod clock;
mod connect;
mod connections;
mod credentials;
mod fault;
mod http;
mod known;
mod listing;
mod probe;
mod read;
mod request;
mod stream;
mod swept;
#[cfg(test)]
mod tests;
mod turns;
mod write;

pub use read::Parts;
pub use write::Uploads;

use super::census::{self, Bounds, Census, Shared};
use super::directory::Marks;
use super::{
    Cause, Get, Kind, Listed, Operation, Page, Put, Reading, Removal, Stored, Swept, Tier,
    TierError, TierInfo, Usage, Writes, prefix,
};
use known::Known;
use kvcachepool_protocol::config;
use kvcachepool_protocol::object::{Object, ObjectName};
use parking_lot::Mutex;
use request::Requests;
use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::AbortHandle;
use tokio::time::timeout;
use tracing::warn;

/// What a bucket with versioning needs.
const VERSIONS: &str = "the bucket keeps removed objects as noncurrent versions, so removing frees no room; \
    add a lifecycle rule with NoncurrentVersionExpiration";

/// Settings of the tier.
#[derive(Debug, Clone)]
pub struct Options {
    /// How large objects are read.
    pub parts: Parts,
    /// How large objects are written.
    pub uploads: Uploads,
    /// Number of names that are remembered as existing.
    pub known: usize,
    /// How long they are remembered.
    pub known_for: Duration,
    /// Time limit of opening the tier: a server may accept connections and never answer.
    pub opening: Duration,
    /// A reachability check is sent if the bucket's last answer is older.
    pub reach_every: Duration,
    /// Background work; `None` disables it.
    pub census: Option<census::Options>,
    /// Whether requests other than reads are allowed.
    pub writes: Writes,
    /// Existence markers of its objects, which are removed with evicted objects.
    pub marks: Option<Arc<dyn Marks>>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            parts: Parts {
                bytes: 8 << 20,
                at_once: 4,
            },
            uploads: Uploads {
                from_bytes: 64 << 20,
                part_bytes: 16 << 20,
                at_once: 4,
            },
            known: 65_536,
            known_for: Duration::from_secs(30),
            opening: Duration::from_secs(15),
            reach_every: Duration::from_secs(10),
            census: Some(census::Options::default()),
            writes: Writes::default(),
            marks: None,
        }
    }
}

/// A bucket with objects. Its drop ends the background work.
pub struct S3 {
    info: TierInfo,
    live: Arc<Live>,
    options: Options,
    census: Option<AbortHandle>,
}

/// Shared by operations and the census.
#[derive(Debug)]
struct Live {
    requests: Requests,
    known: Known,
    census: Census,
    marks: Option<Arc<dyn Marks>>,
    /// Time of the bucket's last answer; `None` after a failure.
    answered: Mutex<Option<Instant>>,
}

impl S3 {
    /// Opens the bucket of a config: tries the permissions of the credentials, and starts a listing. Fails if a file of the config is
    /// missing, there is no answer in time, the bucket does not exist or is in another region, or a permission is missing, which the error
    /// names.
    pub async fn open(config: &config::S3, options: Options) -> Result<Self, TierError> {
        let longest = options.opening;
        let opened = timeout(longest, Self::open_patiently(config, options)).await;
        opened.unwrap_or_else(|_| {
            let seconds = longest.as_secs_f64();
            let detail = format!(
                "the permissions could not be tried within {seconds:.1} s: the server or the credential source does not answer"
            );
            Err(TierError::new(Kind::S3, Cause::Timeout, detail))
        })
    }

    async fn open_patiently(config: &config::S3, options: Options) -> Result<Self, TierError> {
        let requests = Requests::open(config).await?;
        let probed = requests.probe(options.writes.get()).await?;
        let mut tier = Self::over(requests, config, options, &probed.first);
        if probed.keeps_versions {
            warn!(tier = Kind::S3.name(), bucket = config.bucket, "{VERSIONS}");
            tier.info.remark = Some(VERSIONS.into());
        }
        Ok(tier)
    }

    /// Opens it for a tool: without background work and without a request, so that its content is not known.
    pub async fn open_uncounted(config: &config::S3) -> Result<Self, TierError> {
        let requests = Requests::open(config).await?;
        let options = Options {
            census: None,
            ..Options::default()
        };
        Ok(Self::over(requests, config, options, &Page::default()))
    }

    /// The same, and counts the content now, however long that takes.
    pub async fn open_counted(config: &config::S3) -> Result<Self, TierError> {
        let tier = Self::open_uncounted(config).await?;
        tier.live.count().await?;
        Ok(tier)
    }

    /// A bucket whose listing begins with this page.
    fn over(requests: Requests, config: &config::S3, options: Options, first: &Page) -> Self {
        let live = Arc::new(Live {
            requests,
            known: Known::new(options.known, options.known_for),
            census: Census::new(Kind::S3, options.writes.clone(), bounds(config), first),
            marks: options.marks.clone(),
            answered: Mutex::new(Some(Instant::now())),
        });
        let census = options
            .census
            .map(|options| tokio::spawn(census::run(live.clone(), options)).abort_handle());
        let (asked, counted) = (live.clone(), live.clone());
        let info = TierInfo {
            counters: Reading::new(move || vec![("RemovalRefused", counted.census.refused())]),
            unix_s: Reading::new(move || asked.requests.clock.unix_s()),
            ..TierInfo::new(Kind::S3)
        };
        Self {
            info,
            live,
            options,
            census,
        }
    }

    /// Its location, for messages.
    pub fn place(config: &config::S3) -> String {
        let (bucket, prefix) = (&config.bucket, &config.prefix);
        let slash = if prefix.is_empty() { "" } else { "/" };
        let at = if config.endpoint.is_empty() {
            ""
        } else {
            " at "
        };
        format!("s3://{bucket}{slash}{prefix}{at}{}", config.endpoint)
    }
}

impl Drop for S3 {
    fn drop(&mut self) {
        if let Some(census) = &self.census {
            census.abort();
        }
    }
}

/// A request without an answer yet.
struct Asking<'a> {
    live: &'a Live,
    answered: Option<Instant>,
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        *self.live.answered.lock() = self.answered;
    }
}

impl Live {
    /// Runs an operation and records whether the bucket answered. An operation that is dropped early had no answer.
    async fn seen<T>(
        &self,
        operation: impl Future<Output = Result<T, TierError>>,
    ) -> Result<T, TierError> {
        let mut asking = Asking {
            live: self,
            answered: None,
        };
        let result = operation.await;
        if !matches!(&result, Err(e) if e.cause.of_the_tier()) {
            asking.answered = Some(Instant::now());
        }
        result
    }

    async fn lookup(&self, names: &[ObjectName]) -> Result<Vec<bool>, TierError> {
        let known = names.iter().take_while(|name| self.known.has(name)).count();
        let rest = names.get(known..).unwrap_or_default();
        let answers = prefix::present(rest.len(), |index| async move {
            let Some(name) = rest.get(index) else {
                return Ok(false);
            };
            if self.known.has(name) {
                return Ok(true);
            }
            let there = self.requests.size(name).await?.is_some();
            if there {
                self.known.add(name);
            }
            Ok(there)
        });
        let mut all = vec![true; known];
        if !rest.is_empty() {
            all.extend(self.seen(answers).await?);
        }
        Ok(all)
    }

    async fn put(&self, put: &Put, uploads: Uploads) -> Result<Stored, TierError> {
        let stored = self.requests.put(put, uploads).await?;
        self.known.add(&put.object.name());
        if stored == Stored::New {
            self.census.came(put.object.total_bytes());
        }
        Ok(stored)
    }

    async fn get(&self, get: &Get, parts: Parts) -> Result<Object, TierError> {
        let _held = self.census.hold(&get.name);
        let got = self.requests.get(get, parts).await;
        match &got {
            Ok(_) => self.known.add(&get.name),
            Err(e) if e.cause == Cause::Missing => self.known.forget(&get.name),
            Err(_) => {}
        }
        got
    }

    async fn remove(&self, removal: Removal<'_>) -> Result<u64, TierError> {
        let there = match removal {
            Removal::Named(names) => {
                for name in names {
                    self.known.forget(name);
                }
                // A removal does not report which objects existed.
                self.requests.sizes(names).await?
            }
            Removal::Listed(listed) => sizes(listed),
            Removal::Unusable(name) => return self.discard(name).await,
        };
        let swept = self.delete(&there).await?;
        swept.why.map_or(Ok(swept.objects), Err)
    }

    /// Removes existing objects, except those that the server refuses to remove.
    async fn delete(&self, there: &[(ObjectName, u64)]) -> Result<Swept, TierError> {
        for (name, _) in there {
            self.known.forget(name);
        }
        let keys: Vec<String> = there.iter().map(|(n, _)| self.requests.key(n)).collect();
        let refused = self.requests.delete_some(&keys).await?;
        let stay: HashSet<&str> = refused.iter().map(|(key, _)| key.as_str()).collect();
        let mut swept = Swept::default();
        for ((name, bytes), key) in there.iter().zip(&keys) {
            if stay.contains(key.as_str()) {
                swept.kept.push(name.clone());
                continue;
            }
            self.went(name, *bytes);
            swept.objects += 1;
            swept.bytes = swept.bytes.saturating_add(*bytes);
        }
        swept.why = refused.into_iter().next().map(|(_, why)| why);
        Ok(swept)
    }

    async fn discard(&self, name: &ObjectName) -> Result<u64, TierError> {
        let key = self.requests.key(name);
        self.known.forget(name);
        // Without an ETag a newer object could be removed, so the object is kept.
        let Some(etag) = self.requests.tags.last(&key) else {
            return Ok(0);
        };
        let Some(bytes) = self.requests.size(name).await? else {
            return Ok(0);
        };
        let removed = self.requests.delete_version(&key, &etag).await?;
        if removed {
            self.went(name, bytes);
        }
        Ok(u64::from(removed))
    }

    /// Records a removal by this process.
    fn went(&self, name: &ObjectName, bytes: u64) {
        // Again, because a lookup in the meantime may have remembered the name.
        self.known.forget(name);
        self.census.went(bytes);
    }

    async fn usage(&self, reach_every: Duration) -> Result<Usage, TierError> {
        let answered = *self.answered.lock();
        if answered.is_none_or(|at| at.elapsed() >= reach_every) {
            self.seen(self.requests.reach()).await?;
        }
        Ok(self.census.usage())
    }
}

fn bounds(config: &config::S3) -> Bounds {
    Bounds {
        capacity_bytes: config.capacity.0,
        evict_at_percent: config.evict_at_percent,
        evict_to_percent: config.evict_to_percent,
        expire_after: config.expire_after.std(),
    }
}

/// The names and bytes of listed objects.
fn sizes(listed: &[Listed]) -> Vec<(ObjectName, u64)> {
    listed.iter().map(|l| (l.name.clone(), l.bytes)).collect()
}

impl fmt::Debug for S3 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let requests = &self.live.requests;
        write!(f, "S3({}/{})", requests.bucket, requests.prefix)
    }
}

impl Tier for S3 {
    fn info(&self) -> &TierInfo {
        &self.info
    }

    fn lookup<'a>(&'a self, names: &'a [ObjectName]) -> Operation<'a, Vec<bool>> {
        Box::pin(async move { self.live.lookup(names).await })
    }

    fn head<'a>(&'a self, name: &'a ObjectName) -> Operation<'a, Object> {
        Box::pin(async move { self.live.seen(self.live.requests.head(name)).await })
    }

    fn get(&self, get: Get) -> Operation<'_, Object> {
        Box::pin(async move {
            self.live
                .seen(self.live.get(&get, self.options.parts))
                .await
        })
    }

    fn put(&self, put: Put) -> Operation<'_, Stored> {
        Box::pin(async move {
            self.live
                .seen(self.live.put(&put, self.options.uploads))
                .await
        })
    }

    fn remove<'a>(&'a self, removal: Removal<'a>) -> Operation<'a, u64> {
        Box::pin(async move { self.live.seen(self.live.remove(removal)).await })
    }

    fn usage(&self) -> Operation<'_, Usage> {
        Box::pin(async move { self.live.usage(self.options.reach_every).await })
    }

    fn list<'a>(&'a self, from: Option<&'a str>, limit: usize) -> Operation<'a, Page> {
        Box::pin(async move { self.live.seen(self.live.requests.list(from, limit)).await })
    }
}

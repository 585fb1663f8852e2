//! The Redis tier: objects in Redis or Valkey servers. This module contains the commands, connections and placement of objects. It does not
//! decide which objects are worth writing or reading, and does not check their bytes.
//!
//! Several servers are independent shards: an object is on the server with the highest score for it, so a lost or new server affects only
//! its own share. Sentinel names one server that may change; a cluster reports which node has what.
//!
//! An object is a header and segments of at most 512 KiB (`record`). One command or transaction sets both for a short object. For a longer
//! one the segments are written first, then the header, all with an expiry, until a transaction makes them permanent (`publish`). The
//! segments' names contain the digest of the header, so the bytes of two concurrent writers cannot mix. A reader that misses a segment
//! removes the object.
//!
//! Every operation runs in its own task, which ends when the caller stops waiting: after that nothing reads or writes a span.

mod auth;
mod cluster;
mod connection;
mod dial;
mod fault;
pub mod manage;
mod many;
mod marks;
mod node;
mod objects;
mod pool;
mod publish;
mod record;
mod resp;
mod scan;
mod servers;
mod stream;
mod survey;
#[cfg(test)]
mod tests;
mod tls;
mod url;
mod window;

pub use marks::Marks;
pub use node::Options;
pub use tls::TlsFiles;

use super::{
    Cause, Get, Kind, Operation, Page, Put, Reading, Removal, Server, Stored, Tier, TierError,
    TierInfo, Usage,
};
use fault::Fault;
use kvcachepool_protocol::object::{Object, ObjectName};
use many::Lost;
use node::Node;
use objects::Got;
use parking_lot::RwLock;
use pool::{Lane, Lent};
use servers::{Servers, Way};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinHandle;

/// Most redirects by cluster nodes per operation.
const REDIRECTS_MAX: usize = 5;

/// Servers, and how to connect to them.
#[derive(Clone)]
pub struct Settings {
    pub urls: Vec<String>,
    /// Folder with `username` and `password`; replaces the credentials in the URLs.
    pub auth: Option<PathBuf>,
    pub tls_files: TlsFiles,
    /// Objects expire after this long without a read or a write; zero disables expiry.
    pub ttl: Duration,
    pub options: Options,
}

/// The tier. Clones are the same tier.
#[derive(Clone)]
pub struct Redis {
    info: TierInfo,
    /// `Err`: why the settings cannot be used.
    now: Arc<RwLock<Result<Now, TierError>>>,
}

/// Settings for an operation, fixed when it begins.
#[derive(Clone)]
struct Now {
    servers: Arc<Servers>,
    ttl_ms: u64,
}

impl Redis {
    /// Parses the URLs. Nothing is connected yet: unreachable servers are reported by operations. With invalid URLs every operation fails
    /// until [`Redis::change`] replaces them.
    pub fn of(settings: &Settings) -> Self {
        let now = Arc::new(RwLock::new(Now::of(settings, None)));
        let read = now.clone();
        let servers = move || read.read().as_ref().map_or_else(|_| Vec::new(), Now::known);
        let info = TierInfo {
            compares_puts: true,
            servers: Reading::new(servers),
            ..TierInfo::new(Kind::Redis)
        };
        Self { info, now }
    }

    /// The same, but fails if the URLs are invalid.
    pub fn open(settings: &Settings) -> Result<Self, TierError> {
        Self::of(settings).checked()
    }

    /// Fails if the settings cannot be used.
    pub fn checked(self) -> Result<Self, TierError> {
        self.now().map(|_| self)
    }

    /// Applies new settings. Servers in both settings keep their connections; operations in flight end on the old ones. Invalid settings
    /// are an error, and the previous ones stay in use.
    pub fn change(&self, settings: &Settings) -> Result<(), TierError> {
        let before = self.now().ok();
        let changed = Now::of(settings, before.as_ref().map(|now| &*now.servers));
        let refused = changed.as_ref().err().cloned();
        if refused.is_none() || before.is_none() {
            *self.now.write() = changed;
        }
        refused.map_or(Ok(()), Err)
    }

    /// Location of the servers for messages, without secrets. Empty if unknown.
    pub fn place(&self) -> String {
        let place = |now: Now| now.servers.place().into();
        self.now().map(place).unwrap_or_default()
    }

    fn now(&self) -> Result<Now, TierError> {
        self.now.read().clone()
    }

    /// Runs `work` in its own task.
    fn apart<T: Send + 'static, F>(&self, work: impl FnOnce(Now) -> F) -> Operation<'_, T>
    where
        F: Future<Output = Result<T, TierError>> + Send + 'static,
    {
        match self.now() {
            Ok(now) => apart(work(now)),
            Err(e) => Box::pin(std::future::ready(Err(e))),
        }
    }
}

impl Now {
    fn of(settings: &Settings, before: Option<&Servers>) -> Result<Self, TierError> {
        let named = url::servers(&settings.urls);
        let named = named.map_err(|why| TierError::new(Kind::Redis, Cause::Config, why))?;
        Ok(Self {
            servers: Arc::new(Servers::new(named, settings, before)),
            ttl_ms: settings.ttl.as_millis().try_into().unwrap_or(u64::MAX),
        })
    }

    /// Its servers, if there are several.
    fn known(&self) -> Vec<Server> {
        let known = self.servers.known();
        let several = known.iter().filter(|node| node.one_of_many());
        let server = |node: &Arc<Node>| {
            let lost = node.trouble(false);
            Server {
                name: node.name.clone(),
                up: lost.is_none(),
                trouble: lost.or_else(|| node.trouble(true)),
            }
        };
        several.map(server).collect()
    }

    async fn first_way(&self, name: &ObjectName, writes: bool) -> Result<Way, TierError> {
        let learned = self.servers.learn().await;
        let way = learned.and_then(|()| self.servers.way(name));
        way.map_err(|fault| self.servers.error(None, fault, Some(name), writes))
    }

    /// Where an operation continues that a node did not carry out.
    fn next_way(
        &self,
        way: Way,
        fault: Fault,
        name: &ObjectName,
        writes: bool,
    ) -> Result<Way, TierError> {
        way.node.ended(writes, Some(&fault));
        let next = self.servers.redirect(&way, &fault);
        next.ok_or_else(|| {
            self.servers
                .error(Some(&way.node), fault, Some(name), writes)
        })
    }

    async fn read_head(self, name: ObjectName) -> Result<Object, TierError> {
        let mut way = self.first_way(&name, false).await?;
        loop {
            let found = match way.take_to_ask().await {
                Ok(mut c) => objects::head(&mut c, &name).await,
                Err(fault) => Err(fault),
            };
            match found {
                Ok(found) => {
                    way.node.ended(false, None);
                    return Ok(found.object);
                }
                Err(fault) => way = self.next_way(way, fault, &name, false)?,
            }
        }
    }

    async fn read(self, get: Get) -> Result<Object, TierError> {
        let mut way = self.first_way(&get.name, false).await?;
        loop {
            let got = match way.take(Lane::Bytes).await {
                Ok(mut c) => objects::get(&mut c, &get, self.ttl_ms).await,
                Err(fault) => Err(fault),
            };
            match got {
                Ok(Got::All(object)) => {
                    way.node.ended(false, None);
                    return Ok(*object);
                }
                Ok(Got::Hole(record)) => {
                    // While a slot of a cluster moves, a missing segment may still be on the other node.
                    if !way.asking
                        && let Ok(mut c) = way.take(Lane::Questions).await
                    {
                        let _ = objects::remove_rest(&mut c, &get.name, &record).await;
                    }
                    way.node.ended(false, None);
                    let why = "a segment of the object no longer exists; the rest was removed";
                    let fault = Fault::Of(Cause::Missing, why.into());
                    return Err(fault.error(&way.node.name, Some(&get.name)));
                }
                Err(fault) => way = self.next_way(way, fault, &get.name, false)?,
            }
        }
    }

    async fn write(self, put: Put) -> Result<Stored, TierError> {
        let name = put.object.name();
        let mut way = self.first_way(&name, true).await?;
        loop {
            let stored = match way.take(Lane::Bytes).await {
                Ok(mut c) => publish::put(&mut c, &put, self.ttl_ms).await,
                Err(fault) => Err(fault),
            };
            match stored {
                Ok(stored) => {
                    way.node.ended(true, None);
                    return Ok(stored);
                }
                Err(fault) => way = self.next_way(way, fault, &name, true)?,
            }
        }
    }
}

fn stopped() -> TierError {
    TierError::new(Kind::Redis, Cause::Gone, "the tier was closed")
}

/// A task that ends with its waiter.
struct Apart<T>(JoinHandle<T>);

impl<T> Drop for Apart<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Runs in its own task until the caller stops waiting, so that an operation that is not polled does not block others.
fn apart<'a, T: Send + 'static>(
    work: impl Future<Output = Result<T, TierError>> + Send + 'static,
) -> Operation<'a, T> {
    Box::pin(async move {
        let mut task = Apart(tokio::spawn(work));
        (&mut task.0).await.unwrap_or_else(|_| Err(stopped()))
    })
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Redis({})", self.place())
    }
}

impl Tier for Redis {
    fn info(&self) -> &TierInfo {
        &self.info
    }

    fn lookup<'a>(&'a self, names: &'a [ObjectName]) -> Operation<'a, Vec<bool>> {
        let names = names.to_vec();
        let exist = async |mut c: Lent, names: Vec<ObjectName>| {
            let keys: Vec<String> = names.iter().map(ObjectName::redis).collect();
            objects::exist(&mut c, &keys).await
        };
        self.apart(|now| now.each(names, Lost::IsAbsent, exist))
    }

    fn head<'a>(&'a self, name: &'a ObjectName) -> Operation<'a, Object> {
        self.apart(|now| now.read_head(name.clone()))
    }

    fn get(&self, get: Get) -> Operation<'_, Object> {
        self.apart(|now| now.read(get))
    }

    fn put(&self, put: Put) -> Operation<'_, Stored> {
        self.apart(|now| now.write(put))
    }

    fn remove<'a>(&'a self, removal: Removal<'a>) -> Operation<'a, u64> {
        let names = removal.names().into_owned();
        self.apart(|now| async move {
            let remove =
                async |mut c: Lent, names: Vec<ObjectName>| objects::remove(&mut c, &names).await;
            let removed = now.each(names, Lost::IsAnError, remove).await?;
            Ok(removed.into_iter().filter(|there| *there).count() as u64)
        })
    }

    fn usage(&self) -> Operation<'_, Usage> {
        self.apart(Now::sum)
    }

    fn list<'a>(&'a self, from: Option<&'a str>, limit: usize) -> Operation<'a, Page> {
        self.apart(|now| now.page(from.map(str::to_string), limit))
    }
}

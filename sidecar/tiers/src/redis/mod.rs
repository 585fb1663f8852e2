//! The Redis tier: objects in Redis or Valkey servers. Here lie what is said to them, over which connection, and which of them has an
//! object; which objects are worth writing or reading, and whether their sections' bytes are right, is decided elsewhere.
//!
//! Several servers are independent shards: an object lies on the one that scores highest for it, so a lost or new server concerns its own
//! share only. Sentinel names one server that may change, a cluster says itself which node has what.
//!
//! An object is a head and segments of at most 512 KiB (`record`). One command or one transaction sets both of a short object. Of
//! a longer one the segments are written first, then the head; all of them go by themselves until a transaction lets them stay (`publish`).
//! The segments' names hold the head's digest, so that two who write one object at once cannot mix their bytes. A reader that misses a
//! segment takes the object away.
//!
//! Every operation runs in a task of its own that ends when nobody waits for its answer: nothing reads or writes a span after that.

mod auth;
mod cluster;
mod connection;
mod dial;
mod fault;
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

use super::{
    Cause, Get, Kind, Operation, Page, Put, Reading, Removal, Server, Stored, Tier, TierError,
    TierInfo, Usage,
};
use fault::Fault;
use kvcachepool_protocol::object::{Object, ObjectName};
use many::{Batch, Lost};
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

/// Times that nodes of a cluster may send an operation on.
const REDIRECTS_MAX: usize = 5;

/// Which servers, and how they are spoken to.
#[derive(Clone)]
pub struct Settings {
    /// URLs of the servers.
    pub urls: Vec<String>,
    /// Folder with `username` and `password`; it counts instead of what the URLs say.
    pub auth: Option<PathBuf>,
    /// PEM file of the authorities that servers are trusted by.
    pub ca: Option<PathBuf>,
    /// An object goes when it was neither written nor read for so long; zero = never.
    pub ttl: Duration,
    /// Times and bounds.
    pub options: Options,
}

/// Servers with objects. Clones are the same tier.
#[derive(Clone)]
pub struct Redis {
    info: TierInfo,
    /// Or why the settings cannot be used.
    now: Arc<RwLock<Result<Now, TierError>>>,
}

/// What an operation that begins now goes by, to its end.
#[derive(Clone)]
struct Now {
    servers: Arc<Servers>,
    ttl_ms: u64,
}

impl Redis {
    /// Reads the URLs. Nothing is connected yet: servers that are not there say so when they are asked. URLs that cannot be right are what
    /// every operation fails by, until [`Redis::change`] has others.
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

    /// The same, where the URLs can be right.
    pub fn open(settings: &Settings) -> Result<Self, TierError> {
        Self::of(settings).checked()
    }

    /// Itself, or why it cannot be used as long as its settings are these.
    pub fn checked(self) -> Result<Self, TierError> {
        self.now().map(|_| self)
    }

    /// Goes by other settings from now on. Servers that are in both keep their connections; what is under way ends where it began. Where
    /// they cannot be right, it goes on by those that could.
    pub fn change(&self, settings: &Settings) -> Result<(), TierError> {
        let before = self.now().ok();
        let changed = Now::of(settings, before.as_ref().map(|now| &*now.servers));
        let refused = changed.as_ref().err().cloned();
        if refused.is_none() || before.is_none() {
            *self.now.write() = changed;
        }
        refused.map_or(Ok(()), Err)
    }

    /// Where the servers are, for people; without anything that is secret. Empty: nobody can know.
    pub fn place(&self) -> String {
        let place = |now: Now| now.servers.place().into();
        self.now().map(place).unwrap_or_default()
    }

    fn now(&self) -> Result<Now, TierError> {
        self.now.read().clone()
    }

    /// Does it in a task of its own.
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

    /// Its servers, where there are several.
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

    /// Where an operation goes on that a node did not do.
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
            let ask = |mut c: Lent| {
                let name = &name;
                async move { objects::head(&mut c, name).await }
            };
            match way.answers(ask).await {
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
                    // While a slot of a cluster moves, what is not here yet is no hole.
                    if !way.asking
                        && let Ok(mut c) = way.take(Lane::Questions).await
                    {
                        let _ = objects::remove_rest(&mut c, &get.name, &record).await;
                    }
                    way.node.ended(false, None);
                    let why = "a part of it is not there any more; the rest was taken away";
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

/// Runs in a task of its own, so that one that nobody polls holds up no other, until nobody waits for it any more.
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
        let exist: Batch = Arc::new(|mut c, names| {
            Box::pin(async move {
                let keys: Vec<String> = names.iter().map(ObjectName::redis).collect();
                objects::exist(&mut c, &keys).await
            })
        });
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
            let remove: Batch = Arc::new(|mut c, names| {
                Box::pin(async move { objects::remove(&mut c, &names).await })
            });
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

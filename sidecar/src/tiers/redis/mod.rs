//! The Redis tier: objects in Redis or Valkey servers. Here lie what is said to them, over which connection, and which of them has an
//! object; which objects are worth writing or reading, and whether their sections' bytes are right, is decided elsewhere.
//!
//! Several servers are independent shards: an object lies on the one that scores highest for it, so a lost or new server concerns its own
//! share only. Sentinel names one server that may change, a cluster says itself which node has what.
//!
//! An object is a head and segments of at most 1 MiB (`record`). Segments are written first and go by themselves until the head is there;
//! their names hold the head's digest, so that two who write one object at once cannot mix their bytes. A reader that misses a segment
//! takes the object away.
//!
//! Every operation runs in a task of its own that ends when nobody waits for its answer: nothing reads or writes a span after that.

mod auth;
mod cluster;
mod connection;
mod fault;
mod node;
mod objects;
mod raw;
mod record;
mod resp;
mod scan;
mod servers;
mod stream;
#[cfg(test)]
mod tests;
mod tls;
mod url;

pub use node::Options;

use super::{Cause, Get, Kind, Operation, Page, Put, Stored, Tier, TierError, Usage};
use fault::Fault;
use kvcachepool_protocol::object::{Object, ObjectName};
use node::Lane;
use objects::Got;
use scan::Place;
use servers::{Servers, Way};
use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::{JoinHandle, JoinSet};

/// Most objects of a page.
const PAGE_MAX: usize = 4096;
/// Answers of SCAN for one page: a page ends in bounded time, however few of the keys are ours.
const SCANS_MAX: usize = 64;
/// Names that one server is asked for in one go.
const NAMES_MAX: usize = 1024;
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

/// Servers with objects.
#[derive(Clone)]
pub struct Redis {
    servers: Arc<Servers>,
    ttl_ms: u64,
}

/// One answer each for names that one server has, in order.
type Answers = Result<Vec<Result<bool, Fault>>, Fault>;
/// A question about such names.
type Batch = fn(Way, Vec<ObjectName>) -> Pin<Box<dyn Future<Output = Answers> + Send>>;

/// What is made of servers that do not answer where others do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lost {
    /// What they have is not there.
    IsAbsent,
    /// The whole fails.
    IsAnError,
}

impl Redis {
    /// Reads the URLs. Nothing is connected yet: servers that are not there say so when they are asked.
    pub fn open(settings: Settings) -> Result<Self, TierError> {
        let named = url::servers(&settings.urls);
        let named = named.map_err(|why| TierError::new(Kind::Redis, Cause::Config, why))?;
        let ttl_ms = settings.ttl.as_millis().try_into().unwrap_or(u64::MAX);
        Ok(Self {
            servers: Arc::new(Servers::new(named, &settings)),
            ttl_ms,
        })
    }

    /// Where the servers are, for people; without anything that is secret.
    pub fn place(&self) -> &str {
        self.servers.place()
    }

    async fn first_way(&self, name: &ObjectName) -> Result<Way, TierError> {
        let way = self.servers.way(name).await;
        way.map_err(|fault| fault.error(self.place(), Some(name)))
    }

    /// Where an operation goes on that a node did not do.
    fn next_way(&self, way: Way, fault: Fault, name: &ObjectName) -> Result<Way, TierError> {
        match self.servers.redirect(&way, &fault) {
            Some(way) => Ok(way),
            None => Err(fault.error(&way.node.name, Some(name))),
        }
    }

    /// Asks each server about those names that it has, all at once.
    async fn each(
        &self,
        names: Vec<ObjectName>,
        lost: Lost,
        batch: Batch,
    ) -> Result<Vec<bool>, TierError> {
        let mut answers = vec![false; names.len()];
        let (mut failed, mut some) = (None, names.is_empty());
        let mut open: Vec<(usize, Option<Way>)> = (0..names.len()).map(|n| (n, None)).collect();
        while !open.is_empty() {
            let mut groups: HashMap<(usize, bool), (Way, Vec<usize>)> = HashMap::new();
            for (number, way) in open.drain(..) {
                let (Some(name), None) = (names.get(number), &way) else {
                    if let Some(way) = way {
                        let group = groups.entry(way.key()).or_insert((way, Vec::new()));
                        group.1.push(number);
                    }
                    continue;
                };
                match self.first_way(name).await {
                    Ok(way) => {
                        let group = groups.entry(way.key()).or_insert((way, Vec::new()));
                        group.1.push(number);
                    }
                    Err(e) => failed = failed.or(Some(e)),
                }
            }
            let mut asked = JoinSet::new();
            for (way, numbers) in groups.into_values() {
                for numbers in numbers.chunks(NAMES_MAX) {
                    let (way, numbers) = (way.clone(), numbers.to_vec());
                    let about = numbers
                        .iter()
                        .filter_map(|n| names.get(*n).cloned())
                        .collect();
                    asked.spawn(async move {
                        let answers = way.node.answers(batch(way.clone(), about)).await;
                        (way, numbers, answers)
                    });
                }
            }
            while let Some(ended) = asked.join_next().await {
                let Ok((way, numbers, ended)) = ended else {
                    failed = failed.or_else(|| Some(stopped()));
                    continue;
                };
                let each = match ended {
                    Ok(each) => each,
                    Err(fault) => {
                        self.servers.failed(&fault);
                        failed = failed.or_else(|| Some(fault.error(&way.node.name, None)));
                        continue;
                    }
                };
                for (number, answer) in numbers.into_iter().zip(each) {
                    match answer {
                        Ok(there) => {
                            some = true;
                            if let Some(answer) = answers.get_mut(number) {
                                *answer = there;
                            }
                        }
                        Err(fault) => match self.servers.redirect(&way, &fault) {
                            Some(way) => open.push((number, Some(way))),
                            None => {
                                failed = failed.or_else(|| {
                                    Some(fault.error(&way.node.name, names.get(number)))
                                })
                            }
                        },
                    }
                }
            }
        }
        match failed {
            Some(error) if lost == Lost::IsAnError || !some => Err(error),
            _ => Ok(answers),
        }
    }

    async fn read_head(self, name: ObjectName) -> Result<Object, TierError> {
        let mut way = self.first_way(&name).await?;
        loop {
            let read = match way.take(Lane::Questions).await {
                Ok(mut c) => objects::head(&mut c, &name).await,
                Err(fault) => Err(fault),
            };
            match read {
                Ok(found) => return Ok(found.object),
                Err(fault) => way = self.next_way(way, fault, &name)?,
            }
        }
    }

    async fn read(self, get: Get) -> Result<Object, TierError> {
        let mut way = self.first_way(&get.name).await?;
        loop {
            let got = match way.take(Lane::Bytes).await {
                Ok(mut c) => objects::get(&mut c, &get, self.ttl_ms).await,
                Err(fault) => Err(fault),
            };
            match got {
                Ok(Got::All(object)) => return Ok(*object),
                Ok(Got::Hole(record)) => {
                    // While a slot of a cluster moves, what is not here yet is no hole.
                    if !way.asking
                        && let Ok(mut c) = way.take(Lane::Questions).await
                    {
                        let _ = objects::remove_if(&mut c, &get.name, &record).await;
                    }
                    let why = "a part of it is not there any more; the rest was taken away";
                    let fault = Fault::Of(Cause::Missing, why.into());
                    return Err(fault.error(&way.node.name, Some(&get.name)));
                }
                Err(fault) => way = self.next_way(way, fault, &get.name)?,
            }
        }
    }

    async fn write(self, put: Put) -> Result<Stored, TierError> {
        let name = put.object.name();
        let mut way = self.first_way(&name).await?;
        loop {
            let stored = match way.take(Lane::Bytes).await {
                Ok(mut c) => objects::put(&mut c, &put, self.ttl_ms).await,
                Err(fault) => Err(fault),
            };
            match stored {
                Ok(stored) => return Ok(stored),
                Err(fault) => way = self.next_way(way, fault, &name)?,
            }
        }
    }

    async fn page(self, from: Option<String>, limit: usize) -> Result<Page, TierError> {
        let mut place = match from {
            Some(text) => text.parse()?,
            None => Place::default(),
        };
        let nodes = self.servers.all().await;
        let nodes = nodes.map_err(|fault| fault.error(self.place(), None))?;
        let (mut page, limit) = (Page::default(), limit.clamp(1, PAGE_MAX));
        for _ in 0..SCANS_MAX {
            let Some(node) = nodes.get(place.server) else {
                return Ok(page);
            };
            if page.objects.len() == limit {
                break;
            }
            let part = match node.take(Lane::Questions).await {
                Ok(mut c) => scan::part(&mut c, place.cursor, &place.after).await,
                Err(fault) => Err(fault),
            };
            let mut part = part.map_err(|fault| fault.error(&node.name, None))?;
            page.foreign += part.foreign;
            let room = limit - page.objects.len();
            let more = part.objects.len() > room;
            part.objects.truncate(room);
            if more {
                place.after = part
                    .objects
                    .last()
                    .map_or_else(String::new, |l| l.name.redis());
                page.objects.append(&mut part.objects);
                break;
            }
            page.objects.append(&mut part.objects);
            place = match part.cursor {
                0 => Place {
                    server: place.server + 1,
                    ..Place::default()
                },
                cursor => Place {
                    server: place.server,
                    cursor,
                    after: String::new(),
                },
            };
        }
        page.next = (place.server < nodes.len()).then(|| place.to_string());
        Ok(page)
    }

    async fn sum(self) -> Result<Usage, TierError> {
        let nodes = self.servers.all().await;
        let nodes = nodes.map_err(|fault| fault.error(self.place(), None))?;
        let mut asked = JoinSet::new();
        for node in nodes {
            asked.spawn(async move {
                let ask = async {
                    let mut c = node.take(Lane::Questions).await?;
                    scan::memory(&mut c).await
                };
                let usage = node.answers(ask).await;
                usage.map_err(|fault| {
                    let error = fault.clone().error(&node.name, None);
                    (fault, error)
                })
            });
        }
        let (mut sum, mut failed, mut bounded) = (None::<Usage>, None, true);
        while let Some(usage) = asked.join_next().await {
            match usage {
                Ok(Ok(usage)) => {
                    bounded &= usage.capacity_bytes > 0;
                    let sum = sum.get_or_insert_default();
                    sum.bytes += usage.bytes;
                    sum.capacity_bytes += usage.capacity_bytes;
                }
                Ok(Err((fault, error))) => {
                    self.servers.failed(&fault);
                    failed = failed.or(Some(error));
                }
                Err(_) => failed = failed.or_else(|| Some(stopped())),
            }
        }
        match sum {
            Some(sum) if bounded => Ok(sum),
            // One that decides itself is enough.
            Some(sum) => Ok(Usage {
                capacity_bytes: 0,
                ..sum
            }),
            None => Err(failed.unwrap_or_else(stopped)),
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
    fn kind(&self) -> Kind {
        Kind::Redis
    }

    fn lookup<'a>(&'a self, names: &'a [ObjectName]) -> Operation<'a, Vec<bool>> {
        let (redis, names) = (self.clone(), names.to_vec());
        apart(async move {
            let exist: Batch = |way, names| {
                Box::pin(async move {
                    let keys: Vec<String> = names.iter().map(ObjectName::redis).collect();
                    objects::exist(&mut *way.take(Lane::Questions).await?, &keys).await
                })
            };
            redis.each(names, Lost::IsAbsent, exist).await
        })
    }

    fn head<'a>(&'a self, name: &'a ObjectName) -> Operation<'a, Object> {
        apart(self.clone().read_head(name.clone()))
    }

    fn get(&self, get: Get) -> Operation<'_, Object> {
        apart(self.clone().read(get))
    }

    fn put(&self, put: Put) -> Operation<'_, Stored> {
        apart(self.clone().write(put))
    }

    fn remove<'a>(&'a self, names: &'a [ObjectName]) -> Operation<'a, u64> {
        let (redis, names) = (self.clone(), names.to_vec());
        apart(async move {
            let remove: Batch = |way, names| {
                Box::pin(async move {
                    objects::remove(&mut *way.take(Lane::Questions).await?, &names).await
                })
            };
            let removed = redis.each(names, Lost::IsAnError, remove).await?;
            Ok(removed.into_iter().filter(|there| *there).count() as u64)
        })
    }

    fn usage(&self) -> Operation<'_, Usage> {
        apart(self.clone().sum())
    }

    fn list<'a>(&'a self, from: Option<&'a str>, limit: usize) -> Operation<'a, Page> {
        apart(self.clone().page(from.map(str::to_string), limit))
    }
}

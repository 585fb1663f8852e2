//! The slot map of a cluster: which node has which of the 16,384 slots, learned from the nodes and corrected by redirects.
//!
//! A separate task learns the map and asks all nodes at once. The first valid answer counts, however many nodes are silent; silent nodes
//! are marked as lost afterwards. Operations that need the map wait for that task; it continues when they stop waiting.

mod slots;

use super::fault::Fault;
use super::node::{Dial, Node, Options, Reach};
use super::tls::TlsFiles;
use super::url::{Address, How};
use parking_lot::Mutex;
use slots::ask;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

pub use slots::{SLOTS, slot};

/// Minimum interval between requests for the map.
const LEARN_EVERY: Duration = Duration::from_millis(500);

pub struct Cluster {
    seeds: Vec<Address>,
    how: How,
    tls_files: TlsFiles,
    options: Options,
    map: Mutex<Map>,
}

#[derive(Default)]
struct Map {
    nodes: BTreeMap<Address, Arc<Node>>,
    /// Owner of each slot; `None` if unknown.
    slots: Vec<Option<Address>>,
    /// The map is out of date.
    stale: bool,
    learned: Option<Instant>,
    /// Signals the end of the task that learns the map.
    learning: Option<Learning>,
}

/// `None`: the task has not ended.
type Learning = watch::Receiver<Option<Result<(), Fault>>>;

impl Map {
    /// Nodes that own slots.
    fn owners(&self) -> BTreeSet<Address> {
        // Slots of one owner are mostly adjacent.
        let runs = self.slots.chunk_by(|a, b| a == b);
        runs.filter_map(|run| run.first().cloned().flatten())
            .collect()
    }
}

impl Cluster {
    /// A cluster with some known nodes.
    pub fn new(seeds: Vec<Address>, how: How, tls_files: TlsFiles, options: Options) -> Arc<Self> {
        Arc::new(Self {
            seeds,
            how,
            tls_files,
            options,
            map: Mutex::default(),
        })
    }

    /// The node of a key's slot according to the map.
    pub fn node_of(&self, key: &str) -> Result<Arc<Node>, Fault> {
        let mut map = self.map.lock();
        let owner = map.slots.get(usize::from(slot(key))).cloned().flatten();
        match owner {
            Some(address) => Ok(self.known(&mut map, address)),
            None => {
                map.stale = true;
                Err(Fault::Refused(
                    "CLUSTERDOWN no node owns the key's slot".into(),
                ))
            }
        }
    }

    /// All nodes that own slots, in order of their addresses, according to the map.
    pub fn owners(&self) -> Vec<Arc<Node>> {
        let mut map = self.map.lock();
        let owners = map.owners().into_iter();
        owners.map(|owner| self.known(&mut map, owner)).collect()
    }

    /// The node at an address that the node `asked` returned.
    pub fn named(&self, place: &str, asked: &Node) -> Option<Arc<Node>> {
        let (host, port) = place.rsplit_once(':')?;
        let host = match host.trim_matches(['[', ']']) {
            // Empty: the host of the node that answered.
            "" => match asked.address()? {
                Address::Tcp(host, _) => host,
                Address::Unix(_) => return None,
            },
            host => host.to_string(),
        };
        let address = Address::Tcp(host, port.parse().ok()?);
        Some(self.known(&mut self.map.lock(), address))
    }

    /// Records that a slot moved to another node; other slots may have moved too.
    pub fn moved(&self, slot: u16, to: &Node) {
        let mut map = self.map.lock();
        map.stale = true;
        if let (Some(owner), Some(address)) = (map.slots.get_mut(usize::from(slot)), to.address()) {
            *owner = Some(address);
        }
    }

    /// Marks the map as out of date after a node did not answer: another node may have replaced it.
    pub fn doubt(&self) {
        self.map.lock().stale = true;
    }

    fn known(&self, map: &mut Map, address: Address) -> Arc<Node> {
        let node = map.nodes.entry(address.clone()).or_insert_with(|| {
            let dial = Dial {
                reach: Reach::Fixed(address.clone()),
                how: self.how.clone(),
                tls_files: self.tls_files.clone(),
            };
            Node::new(address.to_string(), dial, self.options.clone(), true)
        });
        node.clone()
    }

    /// Waits for the map if there is none, and for a limited time if the map is out of date.
    pub async fn learn(self: &Arc<Self>) -> Result<(), Fault> {
        let (needed, mut learning) = {
            let mut map = self.map.lock();
            let needed = map.slots.is_empty();
            let lately = map.learned.is_some_and(|at| at.elapsed() < LEARN_EVERY);
            if !needed && (!map.stale || lately) {
                return Ok(());
            }
            (needed, self.learning(&mut map))
        };
        let ended = learning.wait_for(Option::is_some);
        let stopped = || Fault::unreachable("the tier was closed");
        if needed {
            let ended = ended.await.map_err(|_| stopped())?;
            return ended.clone().unwrap_or_else(|| Err(stopped()));
        }
        // The present map may still be right.
        let _ = timeout(self.options.answer / 2, ended).await;
        Ok(())
    }

    /// The task that learns the map: the running one, or a new one.
    fn learning(self: &Arc<Self>, map: &mut Map) -> Learning {
        if let Some(running) = &map.learning {
            return running.clone();
        }
        let (end, learning) = watch::channel(None);
        map.learning = Some(learning.clone());
        let cluster = self.clone();
        tokio::spawn(async move {
            let learned = cluster.ask_all().await;
            let learned = cluster.believe(learned);
            end.send_replace(Some(learned));
        });
        learning
    }

    fn believe(&self, learned: Result<Vec<Option<Address>>, Fault>) -> Result<(), Fault> {
        let mut map = self.map.lock();
        map.learning = None;
        map.learned = Some(Instant::now());
        map.slots = learned?;
        map.stale = false;
        let owners = map.owners();
        map.nodes
            .retain(|address, _| owners.contains(address) || self.seeds.contains(address));
        Ok(())
    }

    async fn ask_all(&self) -> Result<Vec<Option<Address>>, Fault> {
        let nodes: Vec<Arc<Node>> = {
            let mut map = self.map.lock();
            for seed in &self.seeds {
                self.known(&mut map, seed.clone());
            }
            map.nodes.values().cloned().collect()
        };
        let mut asked = JoinSet::new();
        for node in nodes {
            asked.spawn(async move {
                let own = node.address();
                let said = match node.take_to_ask().await {
                    Ok(mut c) => ask(&mut c, own).await,
                    Err(fault) => Err(fault),
                };
                said.map_err(|fault| fault.at(&node.name))
            });
        }
        let mut last = Fault::unreachable("no known node");
        while let Some(said) = asked.join_next().await {
            match said {
                Ok(Ok(slots)) => {
                    // The other requests continue until they are answered or their nodes are marked as lost.
                    asked.detach_all();
                    return Ok(slots);
                }
                Ok(Err(fault)) => last = fault,
                Err(_) => last = Fault::unreachable("the tier was closed"),
            }
        }
        Err(last)
    }
}

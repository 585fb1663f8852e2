//! Which node of a cluster has which key: 16,384 slots, learned from the nodes and corrected by what they say.

use super::connection::Connection;
use super::fault::Fault;
use super::node::{Lane, Node, Options, Reach};
use super::resp::Reply;
use super::url::{Address, How};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Slots of a cluster.
const SLOTS: usize = 16_384;
/// The map is asked for no more often than this.
const LEARN_EVERY: Duration = Duration::from_millis(500);

/// A cluster.
pub struct Cluster {
    seeds: Vec<Address>,
    how: How,
    ca: Option<PathBuf>,
    options: Options,
    map: Mutex<Map>,
    learning: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct Map {
    nodes: BTreeMap<Address, Arc<Node>>,
    /// Of each slot; none = nobody, as far as is known.
    slots: Vec<Option<Address>>,
    /// What it says is no longer believed.
    stale: bool,
    learned: Option<Instant>,
}

/// The slot of a key: of what stands in its first braces, where something does.
pub fn slot(key: &str) -> u16 {
    let inner = key
        .split_once('{')
        .and_then(|(_, rest)| rest.split_once('}'));
    let hashed = match inner {
        Some((tag, _)) if !tag.is_empty() => tag,
        _ => key,
    };
    // CRC-16 of XMODEM.
    let crc = hashed.bytes().fold(0u16, |crc, byte| {
        (0..8).fold(crc ^ u16::from(byte) << 8, |crc, _| {
            if crc & 0x8000 == 0 {
                crc << 1
            } else {
                crc << 1 ^ 0x1021
            }
        })
    });
    crc % SLOTS as u16
}

impl Cluster {
    /// A cluster of which some nodes are known.
    pub fn new(seeds: Vec<Address>, how: How, ca: Option<PathBuf>, options: Options) -> Self {
        Self {
            seeds,
            how,
            ca,
            options,
            map: Mutex::default(),
            learning: tokio::sync::Mutex::default(),
        }
    }

    /// The node of a key's slot.
    pub async fn node_of(&self, key: &str) -> Result<Arc<Node>, Fault> {
        self.learn().await?;
        let mut map = self.map.lock();
        let owner = map.slots.get(usize::from(slot(key))).cloned().flatten();
        match owner {
            Some(address) => Ok(self.known(&mut map, address)),
            None => {
                map.stale = true;
                Err(Fault::Refused(
                    "CLUSTERDOWN no node has the key's slot".into(),
                ))
            }
        }
    }

    /// All nodes that have slots, in order of their addresses.
    pub async fn masters(&self) -> Result<Vec<Arc<Node>>, Fault> {
        self.learn().await?;
        let mut map = self.map.lock();
        let mut owners: Vec<Address> = map.slots.iter().flatten().cloned().collect();
        owners.sort_unstable();
        owners.dedup();
        if owners.is_empty() {
            map.stale = true;
            return Err(Fault::Refused("CLUSTERDOWN no node has slots".into()));
        }
        let nodes = owners.into_iter().map(|owner| self.known(&mut map, owner));
        Ok(nodes.collect())
    }

    /// A node at an address that another one named; `asked` is that one.
    pub fn named(&self, place: &str, asked: &Node) -> Option<Arc<Node>> {
        let (host, port) = place.rsplit_once(':')?;
        let host = match host.trim_matches(['[', ']']) {
            // The same host as the one that said so.
            "" => match asked.address()? {
                Address::Tcp(host, _) => host,
                Address::Unix(_) => return None,
            },
            host => host.to_string(),
        };
        let address = Address::Tcp(host, port.parse().ok()?);
        Some(self.known(&mut self.map.lock(), address))
    }

    /// A slot belongs to another node from now on; more may have changed.
    pub fn moved(&self, slot: u16, to: &Node) {
        let mut map = self.map.lock();
        map.stale = true;
        if let (Some(owner), Some(address)) = (map.slots.get_mut(usize::from(slot)), to.address()) {
            *owner = Some(address);
        }
    }

    /// A node did not answer: another one may have its place.
    pub fn doubt(&self) {
        self.map.lock().stale = true;
    }

    fn known(&self, map: &mut Map, address: Address) -> Arc<Node> {
        let node = map.nodes.entry(address.clone()).or_insert_with(|| {
            let name = address.to_string();
            let (how, ca) = (self.how.clone(), self.ca.clone());
            Node::new(
                name,
                Reach::Fixed(address),
                how,
                ca,
                self.options.clone(),
                true,
            )
        });
        node.clone()
    }

    /// Asks for the map where there is none, or what there is is no longer believed. One asks, the others wait for it.
    async fn learn(&self) -> Result<(), Fault> {
        let (wanted, needed) = self.wants();
        if !wanted {
            return Ok(());
        }
        let _learning = self.learning.lock().await;
        if !self.wants().0 {
            return Ok(());
        }
        let learned = self.ask_all().await;
        let mut map = self.map.lock();
        map.learned = Some(Instant::now());
        match learned {
            Ok(slots) => {
                let in_use: Vec<&Address> = slots.iter().flatten().collect();
                map.nodes.retain(|address, _| in_use.contains(&address));
                map.slots = slots;
                map.stale = false;
                Ok(())
            }
            // What is known may still be right.
            Err(fault) if needed => Err(fault),
            Err(_) => Ok(()),
        }
    }

    /// Shall the map be asked for, and can nothing be done without it?
    fn wants(&self) -> (bool, bool) {
        let map = self.map.lock();
        let needed = map.slots.is_empty();
        let lately = map.learned.is_some_and(|at| at.elapsed() < LEARN_EVERY);
        (needed || (map.stale && !lately), needed)
    }

    async fn ask_all(&self) -> Result<Vec<Option<Address>>, Fault> {
        let mut nodes: Vec<Arc<Node>> = {
            let mut map = self.map.lock();
            let seeds = self.seeds.iter().cloned();
            let seeds: Vec<_> = seeds.map(|seed| self.known(&mut map, seed)).collect();
            let known = map.nodes.values().cloned();
            known.chain(seeds).collect()
        };
        nodes.dedup_by(|a, b| Arc::ptr_eq(a, b));
        let mut last = Fault::unreachable("no node is known");
        for node in nodes {
            let asked = async {
                let mut connection = node.take(Lane::Questions).await?;
                ask(&mut connection, &node).await
            };
            let asked = tokio::time::timeout(self.options.answer / 2, asked).await;
            match asked.unwrap_or_else(|_| Err(Fault::unreachable("it did not answer"))) {
                Ok(slots) => return Ok(slots),
                Err(fault) => last = fault.at(&node.name),
            }
        }
        Err(last)
    }
}

async fn ask(c: &mut Connection, node: &Node) -> Result<Vec<Option<Address>>, Fault> {
    c.command(&[b"CLUSTER", b"SLOTS"]);
    let answer = match c.answer().await {
        Err(Fault::Refused(text)) if text.contains("cluster support disabled") => {
            let why = "it is no node of a cluster: write redis:// or rediss://";
            return Err(Fault::Of(crate::tiers::Cause::Config, why.into()));
        }
        answer => answer?,
    };
    let own = match node.address() {
        Some(Address::Tcp(host, _)) => host,
        _ => String::new(),
    };
    read(&answer, &own).ok_or_else(|| Fault::protocol("CLUSTER SLOTS was answered by no slots"))
}

/// The owner of each slot; `own` is the host that answered.
fn read(answer: &Reply, own: &str) -> Option<Vec<Option<Address>>> {
    let Reply::Array(ranges) = answer else {
        return None;
    };
    let mut slots = vec![None; SLOTS];
    for range in ranges {
        let Reply::Array(parts) = range else {
            return None;
        };
        let [
            Reply::Integer(from),
            Reply::Integer(to),
            Reply::Array(master),
            ..,
        ] = &parts[..]
        else {
            return None;
        };
        let [host, Reply::Integer(port), ..] = &master[..] else {
            return None;
        };
        let host = match host {
            Reply::Bulk(host) if !host.is_empty() => String::from_utf8(host.clone()).ok()?,
            Reply::Bulk(_) | Reply::Nil => own.to_string(),
            _ => return None,
        };
        let address = Address::Tcp(host, u16::try_from(*port).ok()?);
        let (from, to) = (usize::try_from(*from).ok()?, usize::try_from(*to).ok()?);
        for owner in slots.get_mut(from..=to)? {
            *owner = Some(address.clone());
        }
    }
    Some(slots)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn slots_are_those_of_the_specification() {
        for (key, expected) in [
            ("123456789", 0x31C3),
            ("foo", 12_182),
            ("{user1000}.following", 3_443),
            ("{user1000}.followers", 3_443),
            ("foo{}{bar}", 8_363),
            ("foo{{bar}}zap", 4_015),
            ("foo{bar}{zap}", 5_061),
        ] {
            assert_eq!(slot(key), expected, "{key}");
        }
    }

    #[test]
    fn a_map_is_read_with_what_nobody_owns_left_open() {
        let bulk = |text: &str| Reply::Bulk(text.as_bytes().to_vec());
        let range = |from, to, host: Reply, port| {
            let master = Reply::Array(vec![host, Reply::Integer(port), bulk("id")]);
            Reply::Array(vec![Reply::Integer(from), Reply::Integer(to), master])
        };
        let answer = Reply::Array(vec![
            range(0, 99, bulk("a"), 1),
            range(200, 16_383, Reply::Nil, 2),
        ]);
        let slots = read(&answer, "own").unwrap();
        assert_eq!(slots[99], Some(Address::Tcp("a".into(), 1)));
        assert_eq!(slots[100], None);
        assert_eq!(slots[16_383], Some(Address::Tcp("own".into(), 2)));
        for wrong in [
            range(0, 16_384, bulk("a"), 1),
            range(-1, 5, bulk("a"), 1),
            range(6, 5, bulk("a"), 1),
            range(0, 5, bulk("a"), 70_000),
            Reply::Nil,
        ] {
            let read = read(&Reply::Array(vec![wrong.clone()]), "own");
            let nothing = read.is_none_or(|slots| slots.iter().all(Option::is_none));
            assert!(nothing, "{wrong:?}");
        }
    }

    proptest! {
        #[test]
        fn any_range_is_read_or_refused(from in any::<i64>(), to in any::<i64>(), port in any::<i64>()) {
            let master = Reply::Array(vec![Reply::Nil, Reply::Integer(port)]);
            let range = Reply::Array(vec![Reply::Integer(from), Reply::Integer(to), master]);
            read(&Reply::Array(vec![range]), "own");
        }
    }
}

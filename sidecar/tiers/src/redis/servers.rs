//! Chooses the server of an operation.

use super::auth::Auth;
use super::cluster::Cluster;
use super::fault::{Fault, Redirect, redirect};
use super::node::{Dial, Node, Reach};
use super::pool::{Lane, Lent};
use super::url::{self, How};
use super::{REDIRECTS_MAX, Settings};
use crate::{Cause, TierError};
use kvcachepool_protocol::object::ObjectName;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

pub struct Servers {
    place: String,
    auth: Option<Auth>,
    which: Which,
}

enum Which {
    Shards(Vec<Arc<Node>>),
    Cluster(Arc<Cluster>),
}

/// The route of one operation.
#[derive(Clone)]
pub struct Way {
    pub node: Arc<Node>,
    /// The node is receiving the key's slot, and serves the key only after ASKING.
    pub asking: bool,
    redirects: usize,
}

impl Way {
    /// Takes a connection to the node.
    pub async fn take(&self, lane: Lane) -> Result<Lent, Fault> {
        let mut lent = self.node.take(lane).await?;
        lent.set_asking(self.asking);
        Ok(lent)
    }

    /// Takes a connection to the node for one request: see [`Node::take_to_ask`].
    pub async fn take_to_ask(&self) -> Result<Lent, Fault> {
        let mut lent = self.node.take_to_ask().await?;
        lent.set_asking(self.asking);
        Ok(lent)
    }

    /// Equal for operations that can share a request.
    pub fn key(&self) -> (usize, bool) {
        (Arc::as_ptr(&self.node).addr(), self.asking)
    }
}

impl Servers {
    /// The servers of the URLs. A shard that existed before is the same node, with its connections and state.
    pub fn new(named: url::Servers, settings: &Settings, before: Option<&Self>) -> Self {
        let (files, options) = (&settings.tls_files, &settings.options);
        // What servers accepted lately is remembered if the folder is the same.
        let auth = settings.auth.as_deref().map(Auth::folder);
        let known = before.and_then(|before| before.auth.clone());
        let auth = if known == auth { known } else { auth };
        let how = |how: How| match &auth {
            Some(auth) => How {
                auth: auth.clone(),
                ..how
            },
            None => how,
        };
        let list = |addresses: &[url::Address]| {
            let names: Vec<String> = addresses.iter().map(ToString::to_string).collect();
            names.join(", ")
        };
        let (place, which) = match named {
            url::Servers::Shards(shards) => {
                let several = shards.len() > 1;
                let node = |(address, own): (url::Address, How)| {
                    let name = address.to_string();
                    let dial = Dial {
                        reach: Reach::Fixed(address),
                        how: how(own),
                        tls_files: files.clone(),
                    };
                    let known = before.and_then(|before| before.shard(&name));
                    let same = known.filter(|node| node.is(&dial, several));
                    same.unwrap_or_else(|| Node::new(name, dial, options.clone(), several))
                };
                let addresses: Vec<_> = shards.iter().map(|(a, _)| a.clone()).collect();
                let nodes = shards.into_iter().map(node).collect();
                (list(&addresses), Which::Shards(nodes))
            }
            url::Servers::Sentinel(sentinels, master, own) => {
                let name = format!("master \"{master}\" of {}", list(&sentinels));
                let dial = Dial {
                    reach: Reach::Sentinel(sentinels, master),
                    how: how(own),
                    tls_files: files.clone(),
                };
                let node = Node::new(name.clone(), dial, options.clone(), false);
                (name, Which::Shards(vec![node]))
            }
            url::Servers::Cluster(seeds, own) => {
                let name = format!("cluster of {}", list(&seeds));
                let cluster = Cluster::new(seeds, how(own), files.clone(), options.clone());
                (name, Which::Cluster(cluster))
            }
        };
        Self { place, auth, which }
    }

    fn shard(&self, name: &str) -> Option<Arc<Node>> {
        match &self.which {
            Which::Shards(nodes) => nodes.iter().find(|node| node.name == name).cloned(),
            Which::Cluster(_) => None,
        }
    }

    /// Location for messages.
    pub fn place(&self) -> &str {
        &self.place
    }

    /// Learns the slot map, if it is not known. Call it before `way` and `known`.
    pub async fn learn(&self) -> Result<(), Fault> {
        match &self.which {
            Which::Shards(_) => Ok(()),
            Which::Cluster(cluster) => cluster.learn().await,
        }
    }

    /// The route to an object.
    pub fn way(&self, name: &ObjectName) -> Result<Way, Fault> {
        let key = name.redis();
        let node = match &self.which {
            Which::Cluster(cluster) => cluster.node_of(&key)?,
            Which::Shards(nodes) => {
                let best = nodes.iter().max_by_key(|node| score(&node.name, &key));
                best.cloned()
                    .ok_or_else(|| Fault::unreachable("no server is known"))?
            }
        };
        Ok(Way {
            node,
            asking: false,
            redirects: 0,
        })
    }

    /// The next route after a redirect, or after a node that did not answer.
    pub fn redirect(&self, way: &Way, fault: &Fault) -> Option<Way> {
        let Which::Cluster(cluster) = &self.which else {
            return None;
        };
        self.failed(fault);
        let redirects = way.redirects + 1;
        if redirects > REDIRECTS_MAX {
            return None;
        }
        let (node, asking) = match fault.redirect()? {
            Redirect::Moved(slot, place) => {
                let node = cluster.named(&place, &way.node)?;
                cluster.moved(slot, &node);
                (node, false)
            }
            Redirect::Ask(place) => (cluster.named(&place, &way.node)?, true),
        };
        Some(Way {
            node,
            asking,
            redirects,
        })
    }

    /// Records a failure: the slot map of a cluster may be out of date.
    pub fn failed(&self, fault: &Fault) {
        let Which::Cluster(cluster) = &self.which else {
            return;
        };
        let doubtful = match fault {
            Fault::Of(cause, _) => matches!(cause, Cause::Unreachable | Cause::BreakerOpen),
            Fault::Refused(text) => fault.is_a_loss() || text.starts_with("READONLY"),
        };
        if doubtful {
            cluster.doubt();
        }
    }

    /// As an error of the tier; without a node it concerns none in particular. While other servers serve, an error of one concerns only
    /// that server; an error of all concerns the tier.
    pub fn error(
        &self,
        node: Option<&Node>,
        fault: Fault,
        object: Option<&ObjectName>,
        writes: bool,
    ) -> TierError {
        let others = self.known().iter().any(|other| {
            let another = node.is_none_or(|node| !std::ptr::eq(node, Arc::as_ptr(other)));
            another && other.trouble(writes).is_none()
        });
        let fault = match (fault, &self.which) {
            (Fault::Of(Cause::BreakerOpen, why), _) if !others => Fault::unreachable(why),
            // Redirects from node to node are limited.
            (Fault::Refused(text), Which::Cluster(_)) if redirect(&text).is_some() => {
                let why =
                    format!("nodes redirect to each other while the object's slot moves ({text})");
                Fault::Of(Cause::Throttled, why)
            }
            (fault, _) => fault,
        };
        let place = node.map_or(self.place.as_str(), |node| &node.name);
        let error = fault.error(place, object);
        TierError {
            of_a_part: others && error.cause.of_the_tier(),
            ..error
        }
    }

    /// Every server that may have objects.
    pub fn known(&self) -> Vec<Arc<Node>> {
        match &self.which {
            Which::Shards(nodes) => nodes.clone(),
            Which::Cluster(cluster) => cluster.owners(),
        }
    }
}

/// Rendezvous hashing: an object is on the server with the highest score. A new or lost server moves nothing between the others.
fn score(server: &str, key: &str) -> u64 {
    let both = [server.as_bytes(), b"\0", key.as_bytes()].concat();
    xxh3_64(&both)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::redis::auth::Login;
    use crate::redis::node::Options;
    use crate::redis::tls::TlsFiles;
    use crate::testing::suite::Sample;
    use std::time::Duration;

    fn place<'a>(servers: &[&'a str], key: &str) -> &'a str {
        servers
            .iter()
            .max_by_key(|server| score(server, key))
            .unwrap()
    }

    #[test]
    fn a_reload_keeps_the_logins_that_servers_accepted() {
        let servers = |auth: &str, before: Option<&Servers>| {
            let settings = Settings {
                urls: vec!["redis://kv".to_owned()],
                auth: Some(auth.into()),
                tls_files: TlsFiles::default(),
                ttl: Duration::ZERO,
                options: Options::default(),
            };
            let named = url::servers(&settings.urls).unwrap();
            Servers::new(named, &settings, before)
        };
        let login = |password: &str| Login {
            user: None,
            password: password.to_owned(),
        };
        let others = |servers: &Servers| servers.auth.as_ref().unwrap().others(&login("new"));
        let first = servers("/auth", None);
        first.auth.as_ref().unwrap().accepted(&login("old"));
        assert_eq!(others(&servers("/auth", Some(&first))), [login("old")]);
        assert_eq!(others(&servers("/other", Some(&first))), []);
    }

    #[test]
    fn a_server_more_or_less_moves_its_own_share_only() {
        let keys: Vec<String> = (0..3_000)
            .map(|n| Sample::new(1, n, &[1]).name().redis())
            .collect();
        let three = ["kv-0.kv:6379", "kv-1.kv:6379", "kv-2.kv:6379"];
        let mut shares = [0; 3];
        for key in &keys {
            let with = place(&three, key);
            shares[three.iter().position(|s| *s == with).unwrap()] += 1;
            // The order in which they are written does not count.
            assert_eq!(place(&[three[2], three[0], three[1]], key), with);
            let without = place(&three[..2], key);
            assert!(with == without || with == three[2], "{key}");
        }
        assert!(
            shares.iter().all(|n| (900..1_100).contains(n)),
            "{shares:?}"
        );
    }
}

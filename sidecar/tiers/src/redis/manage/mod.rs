//! Keeps a set of servers one Redis Cluster of the desired shape: forms it, replaces lost servers, moves slots, and removes servers. One
//! manager at a time. Servers keep nothing on disk, so a server that starts is empty and has a new id. Objects and the tier are not part of
//! this module.
//!
//! A pass asks all servers (`server`), plans (`plan`), and acts. Nothing is remembered between passes but how long a member was silent.

mod act;
mod member;
mod plan;
mod server;

use super::auth::Auth;
use super::fault::Fault;
use super::node::{Dial, Node, Options, Reach};
use super::tls::TlsFiles;
use super::url::{Address, How};
use crate::Cause;
use act::Members;
use futures::future::join_all;
use futures::stream::{StreamExt, TryStreamExt, iter};
use member::{Health, Id, Member};
use plan::{Action, Answer, Observed, Plan, plan};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tracing::{debug, info, warn};

/// Pause after a pass that changed something, that waits, and that had nothing to do.
const PAUSES: [Duration; 3] = [
    Duration::from_millis(100),
    Duration::from_millis(500),
    Duration::from_secs(2),
];

/// Slots that move at once. Servers transfer keys one slot after the other; this hides the round trips.
const MOVES_AT_ONCE: usize = 16;

/// Desired cluster, and how to connect to its servers.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Host and port of each server.
    pub servers: Vec<(String, u16)>,
    /// Masters. The other servers are their replicas, as many of each.
    pub shards: usize,
    /// The user of the manager, which exists on all servers. `None`: the default user.
    pub user: Option<String>,
    /// File with that user's password, read again for each connection. `None`: servers need no password.
    pub password: Option<PathBuf>,
    /// PEM file with the certificate authorities to trust. With it, connections are encrypted.
    pub ca: Option<PathBuf>,
}

/// Whether the cluster has the desired shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    pub ready: bool,
    /// What the manager does or waits for.
    pub message: String,
}

/// The manager of one cluster.
#[expect(
    missing_debug_implementations,
    reason = "connections have no useful form for debugging"
)]
pub struct Manager {
    settings: Settings,
    auth: Auth,
    state: watch::Sender<State>,
    /// The failure of the last pass.
    failure: Option<String>,
    /// Since when members have been silent.
    silent: BTreeMap<Id, Instant>,
    /// Servers, whose connections are used again in the next pass.
    nodes: BTreeMap<Address, Arc<Node>>,
}

/// A server that answered.
struct Answered {
    address: Address,
    node: Arc<Node>,
    answer: Answer,
}

impl Manager {
    /// Fails if the servers cannot form the cluster.
    pub fn new(settings: Settings) -> Result<(Self, watch::Receiver<State>), String> {
        let servers = settings.servers.len();
        if settings.shards == 0 || !servers.is_multiple_of(settings.shards) || servers == 0 {
            let shards = settings.shards;
            return Err(format!(
                "expected the same number of servers for each shard, got {servers} servers for {shards} shards"
            ));
        }
        let unique: BTreeSet<_> = settings.servers.iter().collect();
        if unique.len() < servers {
            return Err("expected different servers, got one twice".to_owned());
        }
        let (state, watched) = watch::channel(State {
            ready: false,
            message: "starts".to_owned(),
        });
        let password = settings.password.clone();
        let auth = password.map_or(Auth::None, |password| {
            Auth::password_file(settings.user.clone(), password)
        });
        let manager = Self {
            auth,
            settings,
            state,
            failure: None,
            silent: BTreeMap::new(),
            nodes: BTreeMap::new(),
        };
        Ok((manager, watched))
    }

    /// Works without end.
    pub async fn run(mut self) {
        loop {
            let pause = match self.pass().await {
                Ok(pause) => {
                    self.failure = None;
                    pause
                }
                Err(reason) => {
                    self.fail(reason);
                    PAUSES[1]
                }
            };
            sleep(pause).await;
        }
    }

    /// Asks all servers, and acts once. Returns the pause until the next pass. After an error everything is planned anew.
    async fn pass(&mut self) -> Result<Duration, String> {
        let places: Vec<Address> = self.settings.servers.iter().map(address).collect();
        let mut answered = self.ask(&places).await?;
        let others = leaving(&answered, &places);
        answered.extend(self.ask(&others).await?);
        (self.nodes).retain(|address, _| places.contains(address) || others.contains(address));
        let silent = self.note_silent(&answered);
        let find = |place: &Address| answered.iter().find(|a| a.address == *place);
        let listed: Vec<(String, Option<&Answer>)> = (places.iter())
            .map(|place| (place.to_string(), find(place).map(|a| &a.answer)))
            .collect();
        let leaving = answered.iter().filter(|a| !places.contains(&a.address));
        let leaving: Vec<&Answer> = leaving.map(|a| &a.answer).collect();
        let observed = Observed {
            listed: &listed,
            leaving: &leaving,
            silent: &silent,
        };
        let [soon, later, rest] = PAUSES;
        let shards = self.settings.shards;
        match plan(&observed, shards) {
            Plan::Ready => {
                self.report(true, format!("{} servers, {shards} shards", places.len()));
                Ok(rest)
            }
            Plan::Wait(message) => {
                self.report(false, message);
                Ok(later)
            }
            Plan::Act(actions) => {
                let login = self.auth.login().await?;
                let members = Members::new(&answered, &places, login.as_ref());
                let slots: Vec<u16> = actions.iter().filter_map(Action::moved_slot).collect();
                let at_once = if slots.len() == actions.len() {
                    MOVES_AT_ONCE
                } else {
                    1
                };
                if let Some(first) = slots.first() {
                    self.report(
                        false,
                        format!("{} slots move, from {first} on", slots.len()),
                    );
                }
                let act = async |action: &Action| {
                    if action.moved_slot().is_none() {
                        self.report(false, action.to_string());
                    }
                    let acted = members.act(action).await;
                    acted.map_err(|fault| format!("{action}: {}", fault.detail()))
                };
                let acted = iter(&actions).map(Ok).try_for_each_concurrent(at_once, act);
                acted.await?;
                Ok(soon)
            }
        }
    }

    fn report(&self, ready: bool, message: String) {
        // The same step is tried again: its failure says more.
        if (self.failure.as_ref()).is_some_and(|failure| failure.starts_with(&message)) {
            return;
        }
        let state = State { ready, message };
        let changed = self.state.send_if_modified(|old| {
            let changed = *old != state;
            old.clone_from(&state);
            changed
        });
        match (changed, ready) {
            (true, true) => info!(shape = state.message, "the cluster is ready"),
            (true, false) => info!(step = state.message, "the cluster is not ready"),
            (false, _) => {}
        }
    }

    /// Logs a failure when it is not the one of the pass before.
    fn fail(&mut self, reason: String) {
        if self.failure.as_ref() == Some(&reason) {
            return;
        }
        warn!(reason, "change of the cluster failed; it is planned again");
        self.state.send_modify(|state| {
            state.ready = false;
            state.message.clone_from(&reason);
        });
        self.failure = Some(reason);
    }

    fn node(&mut self, address: &Address) -> Arc<Node> {
        if let Some(node) = self.nodes.get(address) {
            return node.clone();
        }
        let dial = Dial {
            reach: Reach::Fixed(address.clone()),
            how: How {
                tls: self.settings.ca.is_some(),
                database: 0,
                auth: self.auth.clone(),
            },
            tls_files: TlsFiles {
                ca: self.settings.ca.clone(),
                client_certificate: None,
            },
        };
        let options = Options {
            question_connections: MOVES_AT_ONCE,
            ..Options::default()
        };
        let node = Node::new(address.to_string(), dial, options, false);
        self.nodes.insert(address.clone(), node.clone());
        node
    }

    /// Asks the servers at these addresses. Returns those that answer, in their order. A server that refuses the login is not lost: nothing
    /// may be done before it can be asked.
    async fn ask(&mut self, places: &[Address]) -> Result<Vec<Answered>, String> {
        let ask = |place: &Address| {
            let (address, node) = (place.clone(), self.node(place));
            async move {
                match server::ask(&node).await {
                    Ok(answer) => Ok(Some(Answered {
                        address,
                        node,
                        answer,
                    })),
                    Err(Fault::Of(Cause::Unauthenticated, why)) => Err(format!("{address}: {why}")),
                    Err(fault) => {
                        debug!(server = %address, reason = fault.detail(), "a server does not answer");
                        Ok(None)
                    }
                }
            }
        };
        let asked: Vec<_> = places.iter().map(ask).collect();
        let answers: Result<Vec<_>, String> = join_all(asked).await.into_iter().collect();
        Ok(answers?.into_iter().flatten().collect())
    }

    /// How long each member that did not answer has been silent.
    fn note_silent(&mut self, answered: &[Answered]) -> BTreeMap<Id, Duration> {
        let now = Instant::now();
        let members = answered.iter().flat_map(|a| &a.answer.members);
        let answers = |id: &str| answered.iter().any(|a| a.answer.own.id == id);
        let silent: BTreeSet<&Id> = members
            .map(|member| &member.id)
            .filter(|id| !answers(id))
            .collect();
        self.silent.retain(|id, _| silent.contains(id));
        for id in silent {
            self.silent.entry(id.clone()).or_insert(now);
        }
        let since = self.silent.iter();
        since
            .map(|(id, since)| (id.clone(), now - *since))
            .collect()
    }
}

/// Addresses of members that are not desired, according to servers that are.
fn leaving(answered: &[Answered], places: &[Address]) -> Vec<Address> {
    let desired = |id: &str| answered.iter().any(|a| a.answer.own.id == id);
    let members = answered.iter().flat_map(|a| &a.answer.members);
    let others = members.filter(|m| m.health == Health::Up && !desired(&m.id));
    let addresses: BTreeSet<Address> = others.map(reachable_at).collect();
    // A desired server may not have answered just now.
    addresses
        .into_iter()
        .filter(|a| !places.contains(a))
        .collect()
}

fn address((host, port): &(String, u16)) -> Address {
    Address::Tcp(host.clone(), *port)
}

/// The address of a member for clients: by its name if it has one, which is in its certificate.
fn reachable_at(member: &Member) -> Address {
    match &member.address {
        Address::Tcp(_, port) if !member.host.is_empty() => {
            Address::Tcp(member.host.clone(), *port)
        }
        address => address.clone(),
    }
}

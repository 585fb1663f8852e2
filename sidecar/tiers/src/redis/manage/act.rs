//! Carries out actions. Each can be repeated: an error leaves a state that the next pass plans from.

use super::Answered;
use super::member::{Member, Role};
use super::plan::Action;
use super::server::{Target, request, transfer};
use crate::redis::auth::Login;
use crate::redis::fault::Fault;
use crate::redis::node::Node;
use crate::redis::url::Address;
use futures::future::join_all;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The servers that answer, by their ids.
pub struct Members<'a> {
    answered: BTreeMap<&'a str, &'a Answered>,
    /// Addresses of desired servers.
    places: &'a [Address],
    login: Option<&'a Login>,
}

impl<'a> Members<'a> {
    pub fn new(answered: &'a [Answered], places: &'a [Address], login: Option<&'a Login>) -> Self {
        let by_id = |a: &'a Answered| (a.answer.own.id.as_str(), a);
        Self {
            answered: answered.iter().map(by_id).collect(),
            places,
            login,
        }
    }

    fn answered(&self, id: &str) -> Result<&'a Answered, Fault> {
        let found = self.answered.get(id).copied();
        found.ok_or_else(|| Fault::unreachable(format!("{id} does not answer")))
    }

    fn node(&self, id: &str) -> Result<&'a Arc<Node>, Fault> {
        self.answered(id).map(|a| &a.node)
    }

    /// Carries out an action.
    pub async fn act(&self, action: &Action) -> Result<(), Fault> {
        match action {
            Action::Meet { new, member } => {
                for at in new {
                    self.meet(*at, member).await?;
                }
            }
            Action::Assign { master, slots } => {
                let mut words = vec!["CLUSTER".to_owned(), "ADDSLOTSRANGE".to_owned()];
                for run in slots {
                    words.extend([run.start().to_string(), run.end().to_string()]);
                }
                let words: Vec<&str> = words.iter().map(String::as_str).collect();
                request(self.node(master)?, &words).await?;
            }
            Action::Replicate { replica, master } => {
                request(self.node(replica)?, &["CLUSTER", "REPLICATE", master]).await?;
            }
            Action::TakeOver { replica, .. } => {
                request(self.node(replica)?, &["CLUSTER", "FAILOVER", "TAKEOVER"]).await?;
            }
            Action::Promote { replica } => {
                request(self.node(replica)?, &["CLUSTER", "FAILOVER"]).await?;
            }
            Action::Forget { member } => {
                for answered in self.answered.values() {
                    let forgotten = request(&answered.node, &["CLUSTER", "FORGET", member]).await;
                    match forgotten {
                        // It does not know the member, or is the member itself.
                        Err(Fault::Refused(text)) if text.starts_with("ERR") => {}
                        forgotten => forgotten.map(drop)?,
                    }
                }
            }
            Action::Reset { server } => {
                match request(self.node(server)?, &["CLUSTER", "RESET", "SOFT"]).await {
                    // Keys of slots that it no longer owns, after a move that was given up. The server ends soon.
                    Err(Fault::Refused(text)) if text.contains("containing keys") => {}
                    reset => reset.map(drop)?,
                }
            }
            Action::Move { slot, from, to } => self.move_slot(*slot, from, to).await?,
            Action::Settle { slot, at } => {
                let slot = slot.to_string();
                request(self.node(at)?, &["CLUSTER", "SETSLOT", &slot, "STABLE"]).await?;
            }
        }
        Ok(())
    }

    /// A desired server becomes a member.
    async fn meet(&self, at: usize, member: &str) -> Result<(), Fault> {
        let place = self.places.get(at);
        let new = self.answered.values().find(|a| Some(&a.address) == place);
        let (Some(new), Some(Address::Tcp(host, port))) = (new, place) else {
            return Ok(());
        };
        // Another lookup of its name might give the address of another server.
        let Some(ip) = new.answer.ip else {
            return Err(Fault::unreachable(format!("{host} has no IP address")));
        };
        let (ip, port) = (ip.to_string(), port.to_string());
        let bus = new.answer.own.bus.to_string();
        let words = ["CLUSTER", "MEET", &ip, &port, &bus];
        request(self.node(member)?, &words).await.map(drop)
    }

    /// Moves a slot with its keys. Readers and writers go on: they are redirected to the server that has a key.
    async fn move_slot(&self, slot: u16, from: &str, to: &str) -> Result<(), Fault> {
        let (source, target) = (self.answered(from)?, self.answered(to)?);
        let slot = slot.to_string();
        let set =
            |state: &'a str, id: &str| ["CLUSTER", "SETSLOT", &slot, state, id].map(str::to_owned);
        let send = async |node: &Arc<Node>, words: [String; 5]| {
            let words = words.each_ref().map(String::as_str);
            request(node, &words).await.map(drop)
        };
        send(&target.node, set("IMPORTING", from)).await?;
        send(&source.node, set("MIGRATING", to)).await?;
        let Address::Tcp(host, port) = place_of(&source.answer.members, &target.answer.own) else {
            return Err(Fault::unreachable("the target has no address"));
        };
        let target_place = Target {
            host: &host,
            port,
            login: self.login,
        };
        transfer(&source.node, &slot, target_place).await?;
        // The new owner first: if the manager stops here, the slot has an owner.
        send(&target.node, set("NODE", to)).await?;
        send(&source.node, set("NODE", to)).await?;
        // Those that do not hear it learn it from the others.
        let others = self.answered.values().filter(|other| {
            let own = &other.answer.own;
            own.role == Role::Master && own.id != to && own.id != from
        });
        join_all(others.map(|other| send(&other.node, set("NODE", to)))).await;
        Ok(())
    }
}

/// The address of a member according to others, who know it better than the member itself.
fn place_of(members: &[Member], wanted: &Member) -> Address {
    let known = members.iter().find(|member| member.id == wanted.id);
    known.unwrap_or(wanted).address.clone()
}

//! The next actions towards a cluster of the desired shape, computed from what the servers say. Pure: every pass plans anew, so a manager
//! that stops in the middle leaves nothing that the next one has to know.

use super::member::{Health, Id, Member, Move, Role};
use crate::redis::cluster::SLOTS;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::time::Duration;

/// A lost master's own replica has this long to take over. After that the manager decides, which needs no majority of masters.
pub const GRACE: Duration = Duration::from_secs(15);
/// Slots that are moved before the servers are asked again.
const MOVES_MAX: usize = 256;

/// What a server says.
#[derive(Debug, Clone)]
pub struct Answer {
    /// Where it answered.
    pub ip: Option<IpAddr>,
    pub own: Member,
    /// All members that it knows, including itself.
    pub members: Vec<Member>,
    /// It serves its slots.
    pub serves: bool,
    /// A replica has its master's data, and follows it.
    pub in_sync: bool,
    /// Bytes of the master's stream that a replica has.
    pub offset: u64,
    /// Name of its machine; empty if unknown.
    pub machine: String,
}

/// What all servers say.
#[derive(Debug, Clone, Copy)]
pub struct Observed<'a> {
    /// The desired servers as HOST:PORT, in their order. `None`: it does not answer.
    pub listed: &'a [(String, Option<&'a Answer>)],
    /// Members that are no longer desired and answer.
    pub leaving: &'a [&'a Answer],
    /// How long members have not answered the manager.
    pub silent: &'a BTreeMap<Id, Duration>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Plan {
    /// The cluster has the desired shape.
    Ready,
    /// Something must happen first that is not the manager's to do.
    Wait(String),
    Act(Vec<Action>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Servers become members: positions in the list, and the member that they meet.
    Meet { new: Vec<usize>, member: Id },
    /// A master gets slots that nobody has.
    Assign {
        master: Id,
        slots: Vec<RangeInclusive<u16>>,
    },
    /// A server becomes a replica.
    Replicate { replica: Id, master: Id },
    /// A replica takes the slots of its lost master.
    TakeOver { replica: Id, master: Id },
    /// A replica takes the slots of its master, which hands them over.
    Promote { replica: Id },
    /// All members forget one.
    Forget { member: Id },
    /// A server forgets all other members.
    Reset { server: Id },
    /// A slot and its keys move.
    Move { slot: u16, from: Id, to: Id },
    /// A move that cannot be finished is given up.
    Settle { slot: u16, at: Id },
}

impl Action {
    /// The slot that it moves. Slots can be moved at the same time.
    pub fn moved_slot(&self) -> Option<u16> {
        match self {
            Self::Move { slot, .. } => Some(*slot),
            _ => None,
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Meet { new, .. } => write!(f, "{} servers join", new.len()),
            Self::Assign { master, slots } => {
                let slots: usize = slots.iter().map(ExactSizeIterator::len).sum();
                write!(f, "{master} gets {slots} slots")
            }
            Self::Replicate { replica, master } => write!(f, "{replica} replicates {master}"),
            Self::TakeOver { replica, master } => {
                write!(f, "{replica} takes the slots of lost {master}")
            }
            Self::Promote { replica } => write!(f, "{replica} takes the slots of its master"),
            Self::Forget { member } => write!(f, "all forget {member}"),
            Self::Reset { server } => write!(f, "{server} forgets all others"),
            Self::Move { slot, from, to } => write!(f, "slot {slot} moves from {from} to {to}"),
            Self::Settle { slot, at } => write!(f, "{at} gives up the move of slot {slot}"),
        }
    }
}

/// Plans the next actions towards `shards` masters with even slots, and all other servers as their replicas. The first step that has
/// something to do decides.
pub fn plan(observed: &Observed<'_>, shards: usize) -> Plan {
    let Some(cluster) = Cluster::of(observed, shards) else {
        return Plan::Wait("no server answers".to_owned());
    };
    let steps = [
        Cluster::give_up_lost,
        Cluster::join,
        Cluster::finish_moves,
        Cluster::find_masters,
        Cluster::assign,
        Cluster::replicate,
        Cluster::balance,
        Cluster::dismiss,
        Cluster::check,
    ];
    let next = steps.iter().find_map(|step| step(&cluster));
    next.unwrap_or(Plan::Ready)
}

/// The servers as one cluster.
struct Cluster<'a> {
    observed: &'a Observed<'a>,
    shards: usize,
    /// Desired servers that answer, in their order.
    listed: Vec<&'a Answer>,
    /// All servers that answer, by their ids.
    answers: BTreeMap<&'a str, &'a Answer>,
    /// Ids of the members that each desired server knows.
    known: BTreeMap<&'a str, BTreeSet<&'a str>>,
    /// The answer that knows most of the cluster.
    base: &'a Answer,
    /// Owner of each slot.
    owners: Vec<Option<&'a str>>,
    /// Slots of each owner.
    counts: BTreeMap<&'a str, usize>,
    /// Desired servers that own slots, or get some: at most `shards`, in their order.
    masters: Vec<&'a Answer>,
}

impl<'a> Cluster<'a> {
    fn of(observed: &'a Observed<'a>, shards: usize) -> Option<Self> {
        let listed: Vec<&Answer> = observed.listed.iter().filter_map(|(_, a)| *a).collect();
        // A server that was forgotten may return and know more than all others, but they do not know it.
        let known: BTreeMap<&str, BTreeSet<&str>> = (listed.iter().copied())
            .map(|answer| (answer.own.id.as_str(), known_to(answer)))
            .collect();
        let order = |answer: &&Answer| {
            let id = answer.own.id.as_str();
            let of_it = known.get(id).into_iter().flatten();
            let mutual = |other: &&&str| known.get(**other).is_some_and(|its| its.contains(id));
            let slots: usize = answer.members.iter().map(Member::slot_count).sum();
            let mutual = of_it.filter(mutual).count();
            (mutual, slots, answer.members.len())
        };
        // The first one of equals.
        let base = listed.iter().copied().rev().max_by_key(order)?;
        let answers: BTreeMap<&str, &Answer> = (listed.iter().copied())
            .chain(observed.leaving.iter().copied())
            .map(|answer| (answer.own.id.as_str(), answer))
            .collect();
        let mut owners = vec![None; SLOTS];
        // What the base says counts, unless the owner is silent: another one may have taken its slots just now.
        let claims = std::iter::once(&base.own).chain(&base.members);
        for member in claims.chain(answers.values().map(|answer| &answer.own)) {
            for slot in member.slots.iter().cloned().flatten() {
                if let Some(owner) = owners.get_mut(usize::from(slot))
                    && owner.is_none_or(|owner: &str| !answers.contains_key(owner))
                {
                    *owner = Some(member.id.as_str());
                }
            }
        }
        let mut counts = BTreeMap::new();
        for owner in owners.iter().copied().flatten() {
            *counts.entry(owner).or_default() += 1;
        }
        let mut cluster = Self {
            observed,
            shards,
            known,
            answers,
            listed,
            base,
            owners,
            counts,
            masters: Vec::new(),
        };
        cluster.masters = cluster.masters();
        Some(cluster)
    }

    /// The masters that the cluster keeps: those with most slots, then servers that are free for it, on other machines if possible.
    fn masters(&self) -> Vec<&'a Answer> {
        let mut with: Vec<&Answer> = self.listed.clone();
        with.retain(|answer| self.slots_of(&answer.own.id) > 0);
        with.sort_by_key(|answer| std::cmp::Reverse(self.slots_of(&answer.own.id)));
        with.truncate(self.shards);
        let mut free: Vec<&Answer> = self.listed.clone();
        free.retain(|answer| answer.own.role == Role::Master && self.slots_of(&answer.own.id) == 0);
        while with.len() < self.shards && !free.is_empty() {
            let load = |answer: &&Answer| {
                let same = |other: &&&Answer| other.machine == answer.machine;
                with.iter().filter(same).count()
            };
            let place = (0..free.len()).min_by_key(|place| free.get(*place).map(load));
            with.push(free.remove(place.unwrap_or_default()));
        }
        let mut masters = self.listed.clone();
        masters.retain(|answer| with.iter().any(|master| master.own.id == answer.own.id));
        masters
    }

    /// Whether a desired server knows a member by its id.
    fn knows(&self, by: &Answer, id: &str) -> bool {
        let known = self.known.get(by.own.id.as_str());
        known.is_some_and(|known| known.contains(id))
    }

    fn slots_of(&self, id: &str) -> usize {
        self.counts.get(id).copied().unwrap_or(0)
    }

    fn is_master(&self, id: &str) -> bool {
        self.masters.iter().any(|master| master.own.id == id)
    }

    fn replicas_of(&self, id: &str) -> impl Iterator<Item = &'a Answer> {
        let mut replicas: Vec<&Answer> = self.answers.values().copied().collect();
        replicas.retain(|answer| answer.own.is_replica_of(id));
        replicas.into_iter()
    }

    /// Desired servers that do not answer.
    fn silent(&self) -> Vec<&'a str> {
        let listed = self.observed.listed.iter();
        listed
            .filter(|(_, answer)| answer.is_none())
            .map(|(place, _)| place.as_str())
            .collect()
    }

    /// Whether another server runs at the place of a member, which is gone for good then.
    fn is_replaced(&self, member: &Member) -> bool {
        self.observed.listed.iter().any(|(place, answer)| {
            let host = place.rsplit_once(':').map_or("", |(host, _)| host);
            let same_host = !host.is_empty() && member.host == host;
            let here = same_host || member.address.to_string() == *place;
            here && answer.is_some_and(|a| a.own.id != member.id)
        })
    }

    /// Members that do not answer. Slots of one that is lost for good go to a replica, or to nobody. Until then nothing else happens: its
    /// replica would be made to copy another master.
    fn give_up_lost(&self) -> Option<Plan> {
        let members = || self.answers.values().flat_map(|answer| &answer.members);
        let silence = |id: &str| self.observed.silent.get(id).copied().unwrap_or_default();
        // Otherwise the manager may be the one that is cut off.
        let sees_most = 2 * self.listed.len() > self.observed.listed.len();
        let mut seen = BTreeSet::new();
        let mut actions = Vec::new();
        let mut waits = None;
        for member in members() {
            let id = member.id.as_str();
            if self.answers.contains_key(id) || !seen.insert(id) {
                continue;
            }
            let is_up = |m: &Member| m.id == id && m.health == Health::Up;
            let is_lost = member.health != Health::Joining && !members().any(is_up);
            let is_late = sees_most && silence(id) >= GRACE;
            let heir = self.replicas_of(id).max_by_key(|replica| replica.offset);
            let has_slots = self.slots_of(id) > 0;
            // A replica that is silent only for a moment has the only copy.
            let may_return = |m: &Member| {
                m.is_replica_of(id) && m.health != Health::Lost && silence(&m.id) < 2 * GRACE
            };
            match heir {
                Some(heir) if has_slots && is_lost && is_late => {
                    actions.push(Action::TakeOver {
                        replica: heir.own.id.clone(),
                        master: id.to_owned(),
                    });
                }
                None if is_lost
                    && (is_late || self.is_replaced(member))
                    && !(has_slots && members().any(may_return)) =>
                {
                    actions.push(Action::Forget {
                        member: id.to_owned(),
                    });
                }
                // Without slots, its replicas get another master first: a replica cannot forget its own.
                _ => waits = waits.or(has_slots.then_some(id)),
            }
        }
        match waits {
            _ if !actions.is_empty() => Some(Plan::Act(actions)),
            Some(id) => Some(Plan::Wait(format!(
                "waits for {id}, which does not answer, or for a replica that takes its slots"
            ))),
            None => None,
        }
    }

    /// New servers become members, and all agree who is one.
    fn join(&self) -> Option<Plan> {
        let silent = self.silent();
        let founded = self.owners.iter().any(Option::is_some);
        if !founded && !silent.is_empty() {
            let of = self.observed.listed.len();
            return Some(Plan::Wait(format!(
                "waits for {} of {of} servers to start: {}",
                silent.len(),
                silent.join(", ")
            )));
        }
        let mut new = Vec::new();
        for (at, (place, answer)) in self.observed.listed.iter().enumerate() {
            let Some(answer) = answer else { continue };
            let is_member = self.knows(self.base, &answer.own.id);
            // A server that was reset is still known to the others.
            if is_member && self.knows(answer, &self.base.own.id) {
                continue;
            }
            let is_ours = |other: &&Answer| {
                other.own.id != answer.own.id && self.knows(answer, &other.own.id)
            };
            if !is_member && answer.own.slot_count() > 0 && !self.listed.iter().any(is_ours) {
                return Some(Plan::Wait(format!(
                    "{place} is part of another cluster: delete its pod, and it starts empty"
                )));
            }
            new.push(at);
        }
        if !new.is_empty() {
            return Some(Plan::Act(vec![Action::Meet {
                new,
                member: self.base.own.id.clone(),
            }]));
        }
        let mut listed = self.listed.iter();
        let agrees = |by: &Answer| (self.listed.iter()).all(|other| self.knows(by, &other.own.id));
        let late = listed.find(|answer| !agrees(answer))?;
        Some(Plan::Wait(format!(
            "waits until {} knows all servers",
            late.own.id
        )))
    }

    /// Moves that an earlier manager began.
    fn finish_moves(&self) -> Option<Plan> {
        let mut actions: BTreeMap<u16, Action> = BTreeMap::new();
        // Valkey tells replicas of the moves of their masters.
        let masters = self.answers.values().filter(|a| a.own.role == Role::Master);
        for answer in masters {
            let own = &answer.own.id;
            for begun in &answer.own.moves {
                let (slot, from, to) = match begun {
                    Move::To(slot, to) => (*slot, own, to),
                    Move::From(slot, from) => (*slot, from, own),
                };
                let owner = self.owners.get(usize::from(slot)).copied().flatten();
                let both = [from, to].map(|id| self.answers.contains_key(id.as_str()));
                let settle = || Action::Settle {
                    slot,
                    at: own.clone(),
                };
                match owner == Some(from) && both == [true; 2] {
                    true => actions.entry(slot).or_insert_with(|| Action::Move {
                        slot,
                        from: from.clone(),
                        to: to.clone(),
                    }),
                    false => actions.entry(slot).or_insert_with(settle),
                };
            }
        }
        let actions: Vec<Action> = actions.into_values().take(MOVES_MAX).collect();
        act(actions)
    }

    /// More masters, if there are too few and no server is free for it.
    fn find_masters(&self) -> Option<Plan> {
        if self.masters.len() >= self.shards || !self.silent().is_empty() {
            return None;
        }
        let heir = |answer: &&&Answer| {
            let Role::ReplicaOf(master) = &answer.own.role else {
                return false;
            };
            self.slots_of(master) > 0 && !self.is_master(master) && answer.in_sync
        };
        if let Some(heir) = self.listed.iter().find(heir) {
            return Some(Plan::Act(vec![Action::Promote {
                replica: heir.own.id.clone(),
            }]));
        }
        // The last replica of the master with most of them.
        let is_replica = |answer: &&&Answer| answer.own.role != Role::Master;
        let brothers = |answer: &&&Answer| match &answer.own.role {
            Role::ReplicaOf(master) => self.replicas_of(master).count(),
            Role::Master => 0,
        };
        let spare = self.listed.iter().filter(is_replica).max_by_key(brothers)?;
        Some(Plan::Act(vec![Action::Reset {
            server: spare.own.id.clone(),
        }]))
    }

    /// Slots without an owner, evenly, as runs.
    fn assign(&self) -> Option<Plan> {
        let free = (0..).zip(&self.owners).filter(|(_, owner)| owner.is_none());
        let mut free = free.map(|(slot, _): (u16, _)| slot).peekable();
        free.peek()?;
        if self.masters.is_empty() {
            return Some(Plan::Wait("no server can own slots".to_owned()));
        }
        let mut actions = Vec::new();
        // Those who have most get the last slots, if any are left for them.
        let mut masters: Vec<(usize, usize, &Answer)> = self
            .masters
            .iter()
            .enumerate()
            .map(|(at, master)| (self.slots_of(&master.own.id), self.share(at), *master))
            .collect();
        masters.sort_by_key(|(has, _, _)| *has);
        let last = masters.len() - 1;
        for (at, (has, share, master)) in masters.into_iter().enumerate() {
            let room = if at == last {
                SLOTS
            } else {
                share.saturating_sub(has)
            };
            let slots = runs(free.by_ref().take(room));
            if !slots.is_empty() {
                actions.push(Action::Assign {
                    master: master.own.id.clone(),
                    slots,
                });
            }
        }
        Some(Plan::Act(actions))
    }

    /// Slots that the master at this position should have.
    fn share(&self, at: usize) -> usize {
        let masters = self.masters.len().max(1);
        SLOTS / masters + usize::from(at < SLOTS % masters)
    }

    /// All desired servers without slots are replicas, as many of each master, on other machines if possible.
    fn replicate(&self) -> Option<Plan> {
        let most = self.observed.listed.len().div_ceil(self.shards.max(1)) - 1;
        let mut counts: BTreeMap<&str, usize> = (self.masters.iter())
            .map(|master| (master.own.id.as_str(), 0))
            .collect();
        let mut without = Vec::new();
        for answer in &self.listed {
            let id = &answer.own.id;
            if self.is_master(id) || self.slots_of(id) > 0 {
                continue;
            }
            let place = match &answer.own.role {
                Role::ReplicaOf(master) => counts.get_mut(master.as_str()),
                Role::Master => None,
            };
            match place {
                Some(count) if *count < most => *count += 1,
                _ => without.push(*answer),
            }
        }
        let mut actions = Vec::new();
        for replica in without {
            let order = |master: &&&Answer| {
                let count = counts.get(master.own.id.as_str()).copied();
                let same = !replica.machine.is_empty() && master.machine == replica.machine;
                (count, same)
            };
            let master = self.masters.iter().min_by_key(order)?;
            if let Some(count) = counts.get_mut(master.own.id.as_str()) {
                *count += 1;
            }
            if !replica.own.is_replica_of(&master.own.id) {
                actions.push(Action::Replicate {
                    replica: replica.own.id.clone(),
                    master: master.own.id.clone(),
                });
            }
        }
        act(actions)
    }

    /// Slots move to masters with too few, and away from servers that should have none.
    fn balance(&self) -> Option<Plan> {
        let few = SLOTS / self.masters.len().max(1);
        let shares: BTreeMap<&str, usize> = (self.masters.iter().enumerate())
            .map(|(at, master)| (master.own.id.as_str(), self.share(at)))
            .collect();
        let mut has = self.counts.clone();
        let count = |has: &BTreeMap<&str, usize>, id: &str| has.get(id).copied().unwrap_or(0);
        let is_even = shares
            .keys()
            .all(|id| (few..=few + 1).contains(&count(&has, id)));
        if is_even && has.keys().all(|id| shares.contains_key(id)) {
            return None;
        }
        let silent = self.silent();
        if !silent.is_empty() {
            return Some(wait_for(&silent));
        }
        let mut actions = Vec::new();
        for (slot, owner) in (0u16..).zip(&self.owners) {
            let Some(from) = *owner else { continue };
            let surplus = count(&has, from) > shares.get(from).copied().unwrap_or(0);
            if !surplus || !self.answers.contains_key(from) {
                continue;
            }
            let needs = |(id, share): &(&&str, &usize)| count(&has, id) < **share;
            let Some((to, _)) = shares.iter().find(needs) else {
                break;
            };
            *has.entry(from).or_default() -= 1;
            *has.entry(to).or_default() += 1;
            actions.push(Action::Move {
                slot,
                from: from.to_owned(),
                to: (*to).to_owned(),
            });
            if actions.len() == MOVES_MAX {
                break;
            }
        }
        match actions.is_empty() {
            true => Some(Plan::Wait("waits for the owner of slots".to_owned())),
            false => Some(Plan::Act(actions)),
        }
    }

    /// Members that are no longer desired leave.
    fn dismiss(&self) -> Option<Plan> {
        let ids = || self.observed.leaving.iter().map(|a| a.own.id.clone());
        // All of them first: a replica cannot forget its master.
        let resets = ids().map(|server| Action::Reset { server });
        let forgets = ids().map(|member| Action::Forget { member });
        let actions: Vec<Action> = resets.chain(forgets).collect();
        act(actions)
    }

    fn check(&self) -> Option<Plan> {
        let silent = self.silent();
        if !silent.is_empty() {
            return Some(wait_for(&silent));
        }
        for (place, answer) in self.observed.listed {
            let Some(answer) = answer else { continue };
            if !answer.serves {
                return Some(Plan::Wait(format!("{place} does not serve its slots yet")));
            }
            if !answer.in_sync {
                return Some(Plan::Wait(format!("{place} copies its master's data")));
            }
        }
        let stranger = |member: &&Member| !self.answers.contains_key(member.id.as_str());
        let stranger = self.listed.iter().flat_map(|a| &a.members).find(stranger)?;
        Some(Plan::Wait(format!("waits for member {}", stranger.id)))
    }
}

/// The actions, if there are any.
fn act(actions: Vec<Action>) -> Option<Plan> {
    (!actions.is_empty()).then_some(Plan::Act(actions))
}

fn wait_for(servers: &[&str]) -> Plan {
    Plan::Wait(format!("waits for {}", servers.join(", ")))
}

/// Ids of the members that a server knows.
fn known_to(answer: &Answer) -> BTreeSet<&str> {
    let members = answer.members.iter();
    let known = members.filter(|member| member.health != Health::Joining);
    known.map(|member| member.id.as_str()).collect()
}

/// Adjacent slots as runs.
fn runs(slots: impl Iterator<Item = u16>) -> Vec<RangeInclusive<u16>> {
    let mut runs: Vec<RangeInclusive<u16>> = Vec::new();
    for slot in slots {
        match runs.last_mut() {
            Some(run) if run.end() + 1 == slot => *run = *run.start()..=slot,
            _ => runs.push(slot..=slot),
        }
    }
    runs
}

#[cfg(test)]
mod tests;

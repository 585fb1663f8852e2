//! Members of a cluster, as CLUSTER NODES of a server lists them.

use crate::redis::cluster::SLOTS;
use crate::redis::url::Address;
use std::ops::RangeInclusive;

/// Id of a member: 40 hexadecimal digits. A server gets another one with each start.
pub type Id = String;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    pub id: Id,
    /// IP address and port for clients. The address is empty while it is unknown.
    pub address: Address,
    /// Port for other members.
    pub bus: u16,
    /// Name that it announces; empty without one.
    pub host: String,
    pub role: Role,
    pub health: Health,
    pub is_self: bool,
    pub slots: Vec<RangeInclusive<u16>>,
    /// Moves of slots that have begun, only known of the server that was asked.
    pub moves: Vec<Move>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Role {
    Master,
    ReplicaOf(Id),
}

/// What the server that was asked knows of a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Health {
    Up,
    /// Its id is not known yet.
    Joining,
    /// It does not answer the server that was asked.
    Suspected,
    /// Most masters agree that it is lost.
    Lost,
}

/// A slot that is being moved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Move {
    To(u16, Id),
    From(u16, Id),
}

impl Member {
    pub fn slot_count(&self) -> usize {
        let of = |range: &RangeInclusive<u16>| usize::from(range.end() - range.start()) + 1;
        self.slots.iter().map(of).sum()
    }

    pub fn is_replica_of(&self, id: &str) -> bool {
        matches!(&self.role, Role::ReplicaOf(master) if master == id)
    }
}

/// Parses CLUSTER NODES: the server that was asked, and all members including it. `None` if a line is not as expected.
pub fn members(text: &str) -> Option<(Member, Vec<Member>)> {
    let members: Option<Vec<Member>> = text.lines().map(member).collect();
    let members = members?;
    let own = members.iter().find(|member| member.is_self)?.clone();
    Some((own, members))
}

fn member(line: &str) -> Option<Member> {
    let mut words = line.split_ascii_whitespace();
    let (id, place, flags, master) = (words.next()?, words.next()?, words.next()?, words.next()?);
    let _times_epoch_and_link = [words.next()?, words.next()?, words.next()?, words.next()?];
    let (place, names) = place.split_once(',').unwrap_or((place, ""));
    let host = names.split(',').next().unwrap_or_default();
    let (address, bus) = place.split_once('@')?;
    let (ip, port) = address.rsplit_once(':')?;
    let has = |flag: &str| flags.split(',').any(|each| each == flag);
    let health = match () {
        () if has("handshake") => Health::Joining,
        () if has("fail") || has("noaddr") => Health::Lost,
        () if has("fail?") => Health::Suspected,
        () => Health::Up,
    };
    let mut member = Member {
        id: id.to_owned(),
        address: Address::Tcp(ip.to_owned(), port.parse().ok()?),
        bus: bus.parse().ok()?,
        host: host.to_owned(),
        role: match has("slave") {
            true => Role::ReplicaOf(master.to_owned()),
            false => Role::Master,
        },
        health,
        is_self: has("myself"),
        slots: Vec::new(),
        moves: Vec::new(),
    };
    for word in words {
        match word.strip_prefix('[') {
            Some(text) => member.moves.push(begun(text.strip_suffix(']')?)?),
            None => member.slots.push(range(word)?),
        }
    }
    Some(member)
}

/// Parses `93->-<id>` or `93-<-<id>`.
fn begun(text: &str) -> Option<Move> {
    let (slot, rest) = text.split_once('-')?;
    let slot = slot_number(slot)?;
    match (rest.strip_prefix(">-"), rest.strip_prefix("<-")) {
        (Some(to), _) => Some(Move::To(slot, to.to_owned())),
        (_, Some(from)) => Some(Move::From(slot, from.to_owned())),
        _ => None,
    }
}

fn range(text: &str) -> Option<RangeInclusive<u16>> {
    let (from, to) = text.split_once('-').unwrap_or((text, text));
    let (from, to) = (slot_number(from)?, slot_number(to)?);
    (from <= to).then_some(from..=to)
}

fn slot_number(text: &str) -> Option<u16> {
    let slot: u16 = text.parse().ok()?;
    (usize::from(slot) < SLOTS).then_some(slot)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NODES: &str = "\
aaa 10.0.0.1:6379@16379,kv-0.kv.ns.svc,,shard-id=9 myself,master - 0 1 2 connected 0-5460 7000 [93->-bbb] [94-<-ccc]
bbb fd00::2:6379@16379,kv-1.kv.ns.svc slave,fail? aaa 0 1 2 connected
ccc :0@0 master,noaddr - 0 1 2 disconnected 5461-6000
ddd 10.0.0.4:6379@16379 handshake - 0 0 0 disconnected
";

    #[test]
    fn lines_of_servers_of_several_versions_are_parsed() {
        let (own, members) = members(NODES).unwrap();
        assert_eq!((own.id.as_str(), own.slot_count()), ("aaa", 5462));
        assert_eq!(own.host, "kv-0.kv.ns.svc");
        let moves = [Move::To(93, "bbb".into()), Move::From(94, "ccc".into())];
        assert_eq!(own.moves, moves);
        let [_, replica, lost, joining] = &members[..] else {
            panic!("{members:?}")
        };
        assert!(replica.is_replica_of("aaa") && replica.health == Health::Suspected);
        assert_eq!(replica.address, Address::Tcp("fd00::2".into(), 6379));
        assert_eq!((lost.health, lost.slot_count()), (Health::Lost, 540));
        assert_eq!(joining.health, Health::Joining);
    }

    #[test]
    fn slots_that_do_not_exist_are_refused() {
        for slots in ["16384", "5-16384", "9-5", "[5", "[5->]", "x"] {
            let line = format!("aaa 10.0.0.1:1@2 myself,master - 0 1 2 connected {slots}");
            assert_eq!(members(&line), None, "{slots}");
        }
        assert_eq!(members("bbb 10.0.0.1:1@2 master - 0 1 2 connected"), None);
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_or_refused(text in "[a-z0-9:@,\\[\\]<> \n-]{0,200}") {
            members(&text);
        }
    }
}

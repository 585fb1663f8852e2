//! Plans are carried out in a model of a cluster, in which servers are lost and the desired shape changes.

use super::*;
use crate::redis::url::Address;
use proptest::prelude::*;

/// Passes until a cluster must have its shape: 256 slots move in one.
const PASSES: usize = 150;

/// The others know by then that a server is lost.
const NOTICED: Duration = Duration::from_secs(5);

#[derive(Debug, Clone)]
struct Server {
    id: Id,
    role: Role,
    slots: BTreeSet<u16>,
    /// Slots whose keys it has.
    keys: BTreeSet<u16>,
    runs: bool,
    joined: bool,
    /// It answers the manager.
    answers: bool,
    silent: Duration,
}

/// Servers by their place; those that were replaced stay known until they are forgotten.
#[derive(Debug, Clone)]
struct World {
    servers: Vec<Option<Server>>,
    lost: Vec<Server>,
    desired: usize,
    shards: usize,
    made: usize,
    /// Replicas take over without the manager.
    fails_over: bool,
}

impl World {
    fn new(shards: usize, replicas: usize) -> Self {
        let mut world = Self {
            servers: Vec::new(),
            lost: Vec::new(),
            desired: 0,
            shards,
            made: 0,
            fails_over: false,
        };
        world.shape(shards, replicas);
        world
    }

    /// Another desired shape. Servers that are no longer desired run until they are forgotten.
    fn shape(&mut self, shards: usize, replicas: usize) {
        (self.shards, self.desired) = (shards, shards * (1 + replicas));
        for place in 0..self.desired {
            if self.servers.len() <= place {
                self.servers.push(None);
            }
            self.start(place);
        }
    }

    /// Starts an empty server, unless one runs.
    fn start(&mut self, place: usize) {
        if self.servers[place].is_none() {
            self.made += 1;
            self.servers[place] = Some(Server {
                id: format!("{:03}", self.made),
                role: Role::Master,
                slots: BTreeSet::new(),
                keys: BTreeSet::new(),
                runs: true,
                joined: false,
                answers: true,
                silent: Duration::ZERO,
            });
        }
    }

    fn lose(&mut self, place: usize, silent: Duration) {
        if let Some(mut server) = self.servers[place].take() {
            server.runs = false;
            server.silent = silent;
            if server.joined {
                self.lost.push(server);
            }
        }
    }

    fn all(&self) -> impl Iterator<Item = &Server> {
        self.servers.iter().flatten().chain(&self.lost)
    }

    fn find(&mut self, id: &str) -> &mut Server {
        let all = self.servers.iter_mut().flatten().chain(&mut self.lost);
        let mut all = all.filter(|server| server.id == id);
        all.next().unwrap_or_else(|| panic!("{id} does not exist"))
    }

    fn member(&self, server: &Server) -> Member {
        let place = self.servers.iter().position(|other| match other {
            Some(other) => other.id == server.id,
            None => false,
        });
        Member {
            id: server.id.clone(),
            address: Address::Tcp("10.0.0.1".into(), 6379),
            bus: 16379,
            host: place.map(|place| format!("kv-{place}")).unwrap_or_default(),
            role: server.role.clone(),
            health: match server.runs || server.silent < NOTICED {
                true => Health::Up,
                false => Health::Lost,
            },
            is_self: false,
            slots: runs(server.slots.iter().copied()),
            moves: Vec::new(),
        }
    }

    /// The members that a server knows which is one.
    fn members(&self) -> Vec<Member> {
        let members = self.all().filter(|server| server.joined);
        members.map(|server| self.member(server)).collect()
    }

    fn answer(&self, server: &Server, members: &[Member]) -> Answer {
        let own = self.member(server);
        let members = match server.joined {
            true => members.to_vec(),
            false => vec![own.clone()],
        };
        Answer {
            ip: None,
            serves: server.joined,
            in_sync: true,
            offset: 0,
            machine: String::new(),
            own,
            members,
        }
    }

    /// What all servers say, if these are the members that they know.
    fn answers(&self, members: &[Member]) -> Vec<Answer> {
        let servers = self.servers.iter().flatten();
        servers.map(|server| self.answer(server, members)).collect()
    }

    fn plan(&self) -> Plan {
        let members = self.members();
        let answer = |server: &Server| self.answer(server, &members);
        let answers: Vec<Option<Answer>> = (self.servers.iter())
            .map(|server| server.as_ref().filter(|s| s.answers).map(answer))
            .collect();
        let listed: Vec<(String, Option<&Answer>)> = (answers.iter().take(self.desired))
            .enumerate()
            .map(|(place, answer)| (format!("kv-{place}:6379"), answer.as_ref()))
            .collect();
        let others = answers.iter().skip(self.desired).flatten();
        let leaving: Vec<&Answer> = others.filter(|answer| answer.serves).collect();
        let silent = self.lost.iter();
        let silent = silent
            .map(|server| (server.id.clone(), server.silent))
            .collect();
        let observed = Observed {
            listed: &listed,
            leaving: &leaving,
            silent: &silent,
        };
        plan(&observed, self.shards)
    }

    /// What a server does, as Redis would, or refuses.
    fn act(&mut self, action: &Action) {
        match action {
            Action::Meet { new, member } => {
                assert!(self.find(member).runs);
                self.find(member).joined = true;
                for place in new {
                    let server = self.servers[*place].as_mut().unwrap();
                    assert!(server.slots.is_empty());
                    server.joined = true;
                }
            }
            Action::Assign { master, slots } => {
                for slot in slots.iter().cloned().flatten() {
                    assert!(self.all().all(|server| !server.slots.contains(&slot)));
                    self.find(master).slots.insert(slot);
                }
            }
            Action::Replicate { replica, master } => {
                assert_eq!(self.find(master).role, Role::Master);
                let server = self.find(replica);
                assert!(server.slots.is_empty() && server.runs, "{replica}");
                server.role = Role::ReplicaOf(master.clone());
            }
            Action::TakeOver { replica, .. } | Action::Promote { replica } => {
                let Role::ReplicaOf(master) = self.find(replica).role.clone() else {
                    panic!("{replica} is no replica");
                };
                if matches!(action, Action::TakeOver { .. }) {
                    assert!(!self.find(&master).runs);
                }
                let slots = std::mem::take(&mut self.find(&master).slots);
                self.find(&master).role = Role::ReplicaOf(replica.clone());
                let server = self.find(replica);
                server.slots = slots;
                server.role = Role::Master;
            }
            Action::Forget { member } => {
                let replicas = self.all().filter(|server| server.runs && server.joined);
                for server in replicas {
                    assert_ne!(server.role, Role::ReplicaOf(member.clone()));
                }
                self.lost.retain(|server| server.id != *member);
                for place in &mut self.servers {
                    // A server that leaves is stopped by who desires fewer.
                    if place.as_ref().is_some_and(|server| server.id == *member) {
                        assert!(place.take().is_some_and(|server| !server.joined));
                    }
                }
            }
            Action::Reset { server } => {
                let server = self.find(server);
                assert!(server.slots.is_empty() && server.runs);
                server.role = Role::Master;
                server.joined = false;
                server.keys.clear();
            }
            Action::Move { slot, from, to } => {
                assert!(self.find(from).slots.remove(slot));
                let had_keys = self.find(from).keys.remove(slot);
                let target = self.find(to);
                assert!(target.runs && target.role == Role::Master);
                target.slots.insert(*slot);
                if had_keys {
                    target.keys.insert(*slot);
                }
            }
            Action::Settle { .. } => {}
        }
    }

    fn act_all(&mut self, actions: &[Action]) {
        for action in actions {
            self.act(action);
        }
        self.replicate();
    }

    /// Replicas follow their masters.
    fn replicate(&mut self) {
        let masters: BTreeMap<Id, BTreeSet<u16>> = (self.all())
            .filter(|server| server.runs && server.role == Role::Master)
            .map(|server| (server.id.clone(), server.keys.clone()))
            .collect();
        for server in self.servers.iter_mut().flatten() {
            if let Role::ReplicaOf(master) = &server.role
                && let Some(keys) = masters.get(master)
            {
                server.keys.clone_from(keys);
            }
        }
    }

    /// Plans and acts until the cluster is ready. Returns the number of passes.
    fn settle(&mut self) -> usize {
        for pass in 0..PASSES {
            match self.plan() {
                Plan::Ready => {
                    self.check();
                    return pass;
                }
                Plan::Wait(why) => self.time_passes(&why),
                Plan::Act(actions) => self.act_all(&actions),
            }
        }
        panic!("not ready after {PASSES} passes; next: {:?}", self.plan());
    }

    /// Lost servers stay so for some seconds more.
    fn time_passes(&mut self, why: &str) {
        let short = self.lost.iter_mut().filter(|server| server.silent < GRACE);
        let mut passed = false;
        for server in short {
            server.silent += NOTICED;
            passed = true;
        }
        assert!(passed, "nothing will change, but the manager {why}");
        if self.fails_over {
            self.fail_over();
        }
    }

    /// Replicas take over from masters that are known to be lost.
    fn fail_over(&mut self) {
        let lost = self
            .lost
            .iter()
            .filter(|s| s.silent >= NOTICED && !s.slots.is_empty());
        let lost: Vec<Id> = lost.map(|server| server.id.clone()).collect();
        for master in lost {
            let role = Role::ReplicaOf(master.clone());
            let heir = self
                .servers
                .iter()
                .flatten()
                .find(|server| server.role == role);
            if let Some(replica) = heir.map(|server| server.id.clone()) {
                self.act(&Action::TakeOver { replica, master });
            }
        }
        self.replicate();
    }

    fn check(&self) {
        let replicas = self.desired / self.shards - 1;
        let masters: Vec<&Server> = (self.servers.iter().flatten())
            .filter(|server| !server.slots.is_empty())
            .collect();
        assert_eq!(masters.len(), self.shards);
        assert_eq!(
            self.all().filter(|server| server.joined).count(),
            self.desired
        );
        let few = SLOTS / self.shards;
        for master in masters {
            assert!((few..=few + 1).contains(&master.slots.len()));
            let role = Role::ReplicaOf(master.id.clone());
            let count = self.servers.iter().flatten().filter(|s| s.role == role);
            assert_eq!(count.count(), replicas);
        }
    }

    /// Each owner has the keys of its slots.
    fn fill(&mut self) {
        for server in self.servers.iter_mut().flatten() {
            server.keys.clone_from(&server.slots);
        }
        self.replicate();
    }

    /// Slots whose owner lost their keys.
    fn lost_slots(&self) -> usize {
        let lost = |server: &Server| server.slots.difference(&server.keys).count();
        self.servers.iter().flatten().map(lost).sum()
    }
}

#[test]
fn new_servers_form_a_cluster_with_even_slots_and_replicas() {
    for (shards, replicas) in [(3, 0), (3, 1), (3, 2), (5, 1), (300, 0)] {
        let mut world = World::new(shards, replicas);
        assert!(world.settle() <= 4);
    }
}

#[test]
fn a_cluster_is_formed_only_of_all_its_servers() {
    let mut world = World::new(3, 0);
    world.lose(1, Duration::ZERO);
    let Plan::Wait(why) = world.plan() else {
        panic!("{:?}", world.plan())
    };
    assert!(why.contains("kv-1:6379"), "{why}");
}

#[test]
fn a_replica_of_a_lost_master_is_waited_for_and_then_takes_over() {
    let mut world = World::new(3, 1);
    world.settle();
    world.fill();
    let master = (0..6).find(|place| {
        let server = world.servers[*place].as_ref().unwrap();
        !server.slots.is_empty()
    });
    world.lose(master.unwrap(), Duration::ZERO);
    world.start(master.unwrap());
    // Also before anybody else has noticed: its replica must not copy the new server.
    for silent in [Duration::ZERO, NOTICED] {
        world.lost[0].silent = silent;
        assert!(matches!(world.plan(), Plan::Wait(_)), "{:?}", world.plan());
    }
    world.lost[0].silent = GRACE;
    let Plan::Act(actions) = world.plan() else {
        panic!("{:?}", world.plan())
    };
    assert!(matches!(actions[..], [Action::TakeOver { .. }]));
    world.settle();
    assert_eq!(world.lost_slots(), 0);
}

#[test]
fn without_a_replica_the_server_at_the_same_place_gets_the_slots_at_once() {
    let mut world = World::new(3, 0);
    world.settle();
    world.fill();
    let slots = world.servers[1].as_ref().unwrap().slots.clone();
    world.lose(1, Duration::ZERO);
    world.start(1);
    world.settle();
    assert_eq!(world.servers[1].as_ref().unwrap().slots, slots);
    assert_eq!(world.lost_slots(), slots.len());
}

#[test]
fn slots_of_a_lost_machine_go_to_the_others_and_come_back() {
    let mut world = World::new(3, 0);
    world.settle();
    world.fill();
    world.lose(1, GRACE);
    for _ in 0..3 {
        if let Plan::Act(actions) = world.plan() {
            world.act_all(&actions);
        }
    }
    let owned: usize = world.all().map(|server| server.slots.len()).sum();
    assert_eq!(owned, SLOTS, "all slots have an owner again");
    assert!(matches!(world.plan(), Plan::Wait(_)));
    world.start(1);
    world.settle();
}

#[test]
fn a_server_of_another_cluster_is_named_and_left_alone() {
    let mut world = World::new(3, 0);
    world.settle();
    let server = world.servers[2].as_mut().unwrap();
    server.joined = false;
    let Plan::Wait(why) = world.plan() else {
        panic!("{:?}", world.plan())
    };
    assert!(
        why.contains("kv-2:6379 is part of another cluster"),
        "{why}"
    );
}

#[test]
fn a_manager_that_sees_only_a_few_servers_gives_nobody_up() {
    let mut world = World::new(3, 0);
    world.settle();
    for place in [1, 2] {
        world.lose(place, GRACE);
    }
    assert!(matches!(world.plan(), Plan::Wait(_)), "{:?}", world.plan());
    // Other servers at their places prove that they are lost.
    world.start(1);
    world.start(2);
    world.settle();
}

#[test]
fn a_lost_master_is_not_forgotten_while_its_replica_may_return() {
    let mut world = World::new(3, 1);
    world.settle();
    world.fill();
    let role = |world: &World, place: usize| world.servers[place].as_ref().unwrap().role.clone();
    let replica = (0..6)
        .find(|place| role(&world, *place) != Role::Master)
        .unwrap();
    let Role::ReplicaOf(master) = role(&world, replica) else {
        panic!("a replica has a master")
    };
    let is_master = |server: &Option<Server>| server.as_ref().is_some_and(|s| s.id == master);
    let place = world.servers.iter().position(is_master).unwrap();
    world.lose(place, GRACE);
    world.start(place);
    world.servers[replica].as_mut().unwrap().answers = false;
    assert!(matches!(world.plan(), Plan::Wait(_)), "{:?}", world.plan());
    world.servers[replica].as_mut().unwrap().answers = true;
    world.settle();
    assert_eq!(world.lost_slots(), 0);
}

/// The plan for servers at their places, as they answer.
fn plan_of(answers: &[Answer], silent: &[&str], shards: usize) -> Plan {
    let place = |(at, answer): (usize, &'_ Answer)| format!("{}-{at}:1", answer.own.host);
    let places: Vec<String> = answers.iter().enumerate().map(place).collect();
    let listed: Vec<(String, Option<&Answer>)> =
        places.into_iter().zip(answers.iter().map(Some)).collect();
    let silent = silent.iter().map(|id| ((*id).to_owned(), GRACE)).collect();
    let observed = Observed {
        listed: &listed,
        leaving: &[],
        silent: &silent,
    };
    plan(&observed, shards)
}

#[test]
fn a_forgotten_server_that_returns_joins_those_that_forgot_it() {
    let mut world = World::new(3, 0);
    world.settle();
    let members = world.members();
    let mut answers: Vec<Answer> = world.answers(&members);
    let [first, _, returns] = [0, 1, 2].map(|at: usize| answers[at].own.id.clone());
    for answer in &mut answers[..2] {
        answer.members.retain(|member| member.id != returns);
    }
    let Plan::Act(actions) = plan_of(&answers, &[], 3) else {
        panic!("it joins")
    };
    let meets = Action::Meet {
        new: vec![2],
        member: first,
    };
    assert_eq!(actions, [meets]);
}

#[test]
fn a_second_replica_does_not_take_over_from_the_first() {
    let mut world = World::new(3, 2);
    world.settle();
    let masters = |world: &World| {
        let owns = |place: &usize| !world.servers[*place].as_ref().unwrap().slots.is_empty();
        (0..9).find(owns).unwrap()
    };
    let master = masters(&world);
    world.lose(master, GRACE);
    let old = world.members();
    let lost = world.lost[0].id.clone();
    let role = Role::ReplicaOf(lost.clone());
    let mut heirs = world
        .servers
        .iter()
        .flatten()
        .filter(|server| server.role == role);
    let heir = heirs.next().unwrap().id.clone();
    world.act(&Action::TakeOver {
        replica: heir,
        master: lost.clone(),
    });
    // Nobody but the heir knows yet.
    let answers: Vec<Answer> = world.answers(&old);
    let plan = plan_of(&answers, &[&lost], 3);
    let takes_over = |action: &Action| matches!(action, Action::TakeOver { .. });
    assert!(
        !matches!(&plan, Plan::Act(actions) if actions.iter().any(takes_over)),
        "{plan:?}"
    );
}

#[test]
fn a_move_that_was_begun_is_finished_or_given_up() {
    let mut world = World::new(3, 0);
    world.settle();
    let members = world.members();
    let answers: Vec<Answer> = world.answers(&members);
    let plan_with = |at: usize, begun: Move| {
        let mut answers = answers.clone();
        answers[at].own.moves.push(begun);
        let listed: Vec<(String, Option<&Answer>)> = answers
            .iter()
            .map(|a| (a.own.host.clone(), Some(a)))
            .collect();
        let observed = Observed {
            listed: &listed,
            leaving: &[],
            silent: &BTreeMap::new(),
        };
        plan(&observed, 3)
    };
    let id = |at: usize| answers[at].own.id.clone();
    let moves = |slot, from, to| {
        Plan::Act(vec![Action::Move {
            slot,
            from: id(from),
            to: id(to),
        }])
    };
    let settles = |slot, at| Plan::Act(vec![Action::Settle { slot, at: id(at) }]);
    // The first server owns slot 0.
    assert_eq!(plan_with(0, Move::To(0, id(1))), moves(0, 0, 1));
    assert_eq!(plan_with(1, Move::From(0, id(0))), moves(0, 0, 1));
    assert_eq!(plan_with(0, Move::From(0, id(1))), settles(0, 0));
    assert_eq!(plan_with(1, Move::From(0, id(2))), settles(0, 1));
    assert_eq!(plan_with(0, Move::To(0, "gone".into())), settles(0, 0));
}

#[test]
fn moves_that_a_replica_repeats_are_its_masters() {
    let mut world = World::new(3, 1);
    world.settle();
    let members = world.members();
    let mut answers: Vec<Answer> = world.answers(&members);
    let replica = answers.iter_mut().find(|a| a.own.role != Role::Master);
    replica.unwrap().own.moves.push(Move::To(0, "001".into()));
    assert_eq!(plan_of(&answers, &[], 3), Plan::Ready);
}

#[derive(Debug, Clone)]
enum Event {
    /// A server is lost and another one starts, before or after its replica takes over by itself or by the manager.
    Lose {
        place: usize,
        early: bool,
        fails_over: bool,
    },
    Shape(usize, usize),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        (0..20usize, any::<bool>(), any::<bool>()).prop_map(|(place, early, fails_over)| {
            Event::Lose {
                place,
                early,
                fails_over,
            }
        }),
        (3..6usize, 0..3usize).prop_map(|(shards, replicas)| Event::Shape(shards, replicas)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// The shape is always reached, and keys are lost only with a server that had no replica.
    #[test]
    fn any_shape_is_reached_from_any_other(events in prop::collection::vec(event(), 1..6)) {
        let mut world = World::new(3, 1);
        world.settle();
        for event in events {
            world.fill();
            let had_replicas = world.desired > world.shards;
            match event {
                Event::Lose { place, early, fails_over } => {
                    let place = place % world.desired;
                    world.fails_over = fails_over;
                    world.lose(place, if early { Duration::ZERO } else { NOTICED });
                    if fails_over && !early {
                        world.fail_over();
                    }
                    world.start(place);
                }
                Event::Shape(shards, replicas) => world.shape(shards, replicas),
            }
            world.settle();
            prop_assert!(world.lost_slots() == 0 || !had_replicas);
            // Servers that are no longer desired were stopped.
            world.servers.truncate(world.desired);
        }
    }
}

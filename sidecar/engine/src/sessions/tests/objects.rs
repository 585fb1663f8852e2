//! Opaque objects: clients that look up, lease and write bytes under their own keys.

use super::lower;
use super::peer::*;
use crate::config::{Config, WritePolicy};
use crate::sessions::*;
use crate::tier::{Cause, Kind};
use crate::{Completion, Effect, Engine};
use kvcachepool_protocol::domain::{SectionPlan, opaque};
use kvcachepool_protocol::frame::Op;
use kvcachepool_protocol::key::{KeyKind, NamespaceId, chunk_key};
use kvcachepool_protocol::message::*;
use kvcachepool_protocol::object::{Cipher, Codec, Fidelity, Form, Object, Section};
use kvcachepool_protocol::refs::unpack;

const MIB: u64 = 1 << 20;

fn object(n: u8, bytes: u64) -> GrantChunk {
    GrantChunk {
        bytes,
        parent: Vec::new(),
        first_token: 0,
        tokens: 1,
        ..chunk(n)
    }
}

fn get(request: &str, keys: &[u8]) -> Probe {
    Probe {
        independent: true,
        ..probe(request, keys)
    }
}

fn exists(request: &str, keys: &[u8]) -> Probe {
    Probe {
        local_tokens: None,
        ..probe(request, keys)
    }
}

fn check(w: &World) {
    w.core.engine().unwrap().check().unwrap();
}

fn put(w: &mut World, client: ConnId, n: u8, bytes: u64) {
    let (_, reply) = w.grant(client, &[object(n, bytes)]);
    assert_eq!(reply.results, [GRANT_GRANTED]);
    w.commit(client, reply.region, &reply.refs);
    w.digest_all();
}

/// The final answer to a PROBE.
fn final_reply(w: &mut World, tag: u64) -> ProbeReply {
    loop {
        let (reply, partial) = w.answer(tag);
        if !partial {
            return reply;
        }
    }
}

/// Reads an object's references after its check.
fn read(w: &mut World, client: ConnId, request: &str, keys: &[u8]) -> ProbeReply {
    let tag = w.say(client, Op::Probe, &get(request, keys), NO_FDS);
    w.digest_all();
    final_reply(w, tag)
}

fn operation(w: &mut World, client: ConnId, op: ObjectsOp, keys: &[u8]) -> ObjectsReply {
    let objects = Objects {
        op,
        namespace: Vec::new(),
        hashes: keys.iter().flat_map(|n| hash(*n).0).collect(),
        ttl_s: 60,
    };
    w.ask(client, Op::Objects, &objects)
}

#[test]
fn an_object_is_written_and_read_in_pieces_without_registration() {
    let mut config = World::config();
    config.arena_bytes = 128 * MIB;
    let mut w = World::configured(config);
    let writer = w.attach(Role::Opaque, 1);
    let bytes = 9 * MIB + 5;
    let (_, granted) = w.grant(writer, &[object(1, bytes), object(2, 10)]);
    assert_eq!(granted.results, [GRANT_GRANTED; 2]);
    let refs = unpack(&granted.refs).unwrap();
    let lengths: Vec<u64> = refs.iter().map(|r| r.length.get().into()).collect();
    assert_eq!(lengths, [4 * MIB, 4 * MIB, MIB + 5, 10]);
    let sections: Vec<u32> = refs.iter().map(|r| r.section.get()).collect();
    assert_eq!(sections, [0, 1, 2, 0]);
    // unreadable before every piece was committed and has its digest
    w.commit(writer, granted.region, &granted.refs[..32]);
    w.digest_all();
    let reader = w.attach(Role::Opaque, 2);
    assert_eq!(w.states(reader, "early", &[1, 2]), [CHUNK_ABSENT; 2]);
    w.commit(writer, granted.region, &granted.refs[32..]);
    w.digest_all();
    let reply = read(&mut w, reader, "a", &[2, 3, 1]);
    assert_eq!(reply.states, [CHUNK_READY, CHUNK_ABSENT, CHUNK_READY]);
    let read = unpack(&reply.refs).unwrap();
    let order = [refs[3], refs[0], refs[1], refs[2]];
    assert_eq!(read, order);
    let sessions = w.core.status(w.now).sessions;
    assert!(
        sessions
            .iter()
            .all(|s| s.role == Role::Opaque && s.registered && s.ready)
    );
    // the same key again, with fewer and with more pieces
    for bytes in [77, 14 * MIB] {
        let (_, again) = w.grant(reader, &[object(1, bytes)]);
        assert_eq!(
            (again.results, again.refs),
            (vec![GRANT_EXISTS], Vec::new())
        );
    }
    check(&w);
}

#[test]
fn existence_needs_no_check_and_keys_of_chunks_are_other_keys() {
    let mut w = World::new();
    let (scheduler, worker) = w.instance();
    let client = w.attach(Role::Opaque, 5);
    w.store(scheduler, worker, &[chunk(1)]);
    put(&mut w, client, 2, 100);
    let reply: ProbeReply = w.ask(client, Op::Probe, &exists("e", &[2, 1, 9]));
    assert_ne!(reply.states[0], CHUNK_ABSENT);
    assert_eq!(reply.states[1..], [CHUNK_ABSENT; 2]);
    assert!(w.digests().is_empty());
    assert_eq!(w.states(scheduler, "s", &[2]), [CHUNK_ABSENT]);
    let elsewhere = Probe {
        namespace: vec![4; 32],
        ..exists("n", &[2])
    };
    let reply: ProbeReply = w.ask(client, Op::Probe, &elsewhere);
    assert_eq!(reply.states, [CHUNK_ABSENT]);
}

#[test]
fn lengths_that_memory_cannot_hold_are_named() {
    let mut w = World::new();
    let client = w.attach(Role::Opaque, 1);
    let short = GrantChunk {
        hash: vec![1; 31],
        ..object(5, 10)
    };
    let list = [
        object(1, 0),
        object(2, 3 * MIB),
        object(3, u64::MAX),
        short,
        object(4, 10),
    ];
    let (_, reply) = w.grant(client, &list);
    let expected = [
        GRANT_INVALID,
        GRANT_TOO_LARGE,
        GRANT_TOO_LARGE,
        GRANT_INVALID,
        GRANT_GRANTED,
    ];
    assert_eq!(reply.results, expected);
    check(&w);
}

#[test]
fn a_client_that_dies_between_grant_and_commit_leaves_nothing() {
    let mut w = World::new();
    let client = w.attach(Role::Opaque, 1);
    let (_, reply) = w.grant(client, &[object(1, MIB)]);
    assert_eq!(reply.results, [GRANT_GRANTED]);
    let process = w.process(0);
    w.input(Input::ProcessDied { process });
    let other = w.attach(Role::Opaque, 2);
    // no quarantine: the client did not write with a GPU
    let (_, reply) = w.grant(other, &[object(1, MIB)]);
    assert_eq!(reply.results, [GRANT_GRANTED]);
    check(&w);
}

#[test]
fn hello_of_one_session_takes_nothing_from_another_of_its_process() {
    let mut w = World::new();
    let (scheduler, worker) = w.instance();
    let (_, of_chunk) = w.grant(scheduler, &[chunk(1)]);
    // the worker's process is also a client
    let client = w.connect();
    let locks = w.core.host_mut().locked.clone();
    let region = of_chunk.region;
    let first = Hello {
        lock: locks.first().copied(),
        region: Some(region),
        fds: ["pidfd", "arena", "table"].map(String::from).to_vec(),
        ..hello(Role::Opaque, 1, 1)
    };
    assert_eq!(w.greet(client, &first, true).memory, Memory::Held);
    let (_, of_object) = w.grant(client, &[object(2, 10)]);
    assert_eq!(of_object.results, [GRANT_GRANTED]);
    let again = Hello {
        number: 3,
        role: Role::Worker,
        grants: of_chunk.refs.clone(),
        ..first.clone()
    };
    assert_eq!(w.greet(worker, &again, true).memory, Memory::Held);
    w.commit(client, region, &of_object.refs);
    w.digest_all();
    assert_eq!(read(&mut w, client, "a", &[2]).states, [CHUNK_READY]);
    // and the client's HELLO, which names nothing, keeps the chunk's grant but ends its own
    let (_, dropped) = w.grant(client, &[object(3, 10)]);
    assert_eq!(dropped.results, [GRANT_GRANTED]);
    let again = Hello { number: 2, ..first };
    assert_eq!(w.greet(client, &again, true).memory, Memory::Held);
    let (_, reply) = w.grant(client, &[object(3, 20)]);
    assert_eq!(reply.results, [GRANT_GRANTED], "with another length");
    w.commit(worker, region, &of_chunk.refs);
    w.digest_all();
    check(&w);
}

#[test]
fn a_void_object_may_return_with_another_length() {
    let mut config = World::config();
    config.arena_bytes = 64 * MIB;
    let mut w = World::configured(config);
    let client = w.attach(Role::Opaque, 1);
    let (_, first) = w.grant(client, &[object(1, 5 * MIB)]);
    w.commit(client, first.region, &first.refs[..16]);
    w.digest_all();
    let rest = Sections {
        region: first.region,
        refs: first.refs[16..].to_vec(),
    };
    w.say(client, Op::Abort, &rest, NO_FDS);
    put(&mut w, client, 1, 100);
    let reply = read(&mut w, client, "a", &[1]);
    assert_eq!(unpack(&reply.refs).unwrap()[0].length.get(), 100);
    check(&w);
}

#[test]
fn objects_are_removed_pinned_touched_and_described() {
    let mut w = World::new();
    let client = w.attach(Role::Opaque, 1);
    put(&mut w, client, 1, 100);
    put(&mut w, client, 2, 200);
    let reply = operation(&mut w, client, ObjectsOp::Pin, &[1, 9]);
    assert_eq!((reply.count, reply.states), (1, vec![1, 0]));
    let reply = operation(&mut w, client, ObjectsOp::Stat, &[2, 1, 9]);
    assert_eq!(reply.bytes, [200, 100, 0]);
    assert_eq!((reply.pinned, reply.states), (vec![0, 1, 0], vec![1, 1, 0]));
    assert_eq!(
        operation(&mut w, client, ObjectsOp::Touch, &[1, 9]).count,
        1
    );
    w.pass(61_000);
    let reply = operation(&mut w, client, ObjectsOp::Stat, &[1]);
    assert_eq!(reply.pinned, [0], "the pin ended");
    assert_eq!(operation(&mut w, client, ObjectsOp::Unpin, &[1]).count, 0);
    // a reader keeps what it leases
    let tag = w.say(client, Op::Probe, &get("r", &[1]), NO_FDS);
    w.digest_all();
    let pin = Pin {
        request: "r".into(),
        probe: tag,
        from: 0,
        to: 1,
    };
    w.say(client, Op::Pin, &pin, NO_FDS);
    let reply = operation(&mut w, client, ObjectsOp::Remove, &[1, 9]);
    assert_eq!(reply.states, [1, 0]);
    assert_eq!(read(&mut w, client, "x", &[1]).states, [CHUNK_ABSENT]);
    put(&mut w, client, 1, 300);
    let release = Release {
        requests: vec!["r".into()],
    };
    w.say(client, Op::Release, &release, NO_FDS);
    check(&w);
}

#[test]
fn objects_beyond_the_share_of_soft_pins_are_found_and_read() {
    let mut config = World::config();
    config.arena_bytes = 64 * MIB;
    config.limits.soft_pin_percent_max = 5;
    let mut w = World::configured(config);
    let client = w.attach(Role::Opaque, 1);
    let keys: Vec<u8> = (1..=8).collect();
    for key in &keys {
        put(&mut w, client, *key, MIB);
    }
    let found: ProbeReply = w.ask(client, Op::Probe, &exists("e", &keys));
    assert!(!found.states.contains(&CHUNK_ABSENT), "{:?}", found.states);
    let usage = |w: &World| w.core.engine().unwrap().memory.usage();
    assert_eq!(usage(&w).soft_pinned_bytes, 0, "existence needs no pin");
    let reply = read(&mut w, client, "r", &keys);
    assert_eq!(reply.states, [CHUNK_READY; 8]);
    assert_eq!(unpack(&reply.refs).unwrap().len(), 8);
    assert!((MIB..=4 * MIB).contains(&usage(&w).soft_pinned_bytes));
    check(&w);
}

#[test]
fn a_process_whose_clients_are_closed_holds_nothing_and_is_not_attached() {
    let mut w = World::new();
    let client = w.attach(Role::Opaque, 1);
    put(&mut w, client, 1, 100);
    let tag = w.say(client, Op::Probe, &get("r", &[1]), NO_FDS);
    w.digest_all();
    let pin = Pin {
        request: "r".into(),
        probe: tag,
        from: 0,
        to: 1,
    };
    w.say(client, Op::Pin, &pin, NO_FDS);
    let leased = |w: &World| w.core.engine().unwrap().usage().leased_bytes;
    assert!(leased(&w) > 0 && w.core.attached());
    // the connection ends without a RELEASE, and the lock goes
    w.input(Input::Disconnected { conn: client });
    w.core.host_mut().locked.clear();
    w.pass(2_000);
    assert_eq!(leased(&w), 0);
    assert!(!w.core.attached());
    // the next client of the process continues the session
    let conn = w.connect();
    let again = Hello {
        number: 3,
        ..hello(Role::Opaque, 1, 3)
    };
    let reply = w.greet(conn, &again, true);
    assert_eq!(reply.memory, Memory::LockFirst);
    assert_eq!(w.core.status(w.now).sessions.len(), 1);
    check(&w);
}

#[test]
fn vllm_and_clients_may_not_use_each_others_operations() {
    let mut w = World::new();
    let (scheduler, _) = w.instance();
    let client = w.attach(Role::Opaque, 7);
    let objects = Objects {
        op: ObjectsOp::Stat,
        namespace: Vec::new(),
        hashes: Vec::new(),
        ttl_s: 0,
    };
    let tag = w.say(scheduler, Op::Objects, &objects, NO_FDS);
    assert_eq!(w.error(tag).0, ErrorCode::WrongRole);
    let tag = w.say(client, Op::Register, &register_worker(), NO_FDS);
    assert_eq!(w.error(tag).0, ErrorCode::WrongRole);
    let half = Objects {
        hashes: vec![0; 33],
        ..objects
    };
    let tag = w.say(client, Op::Objects, &half, NO_FDS);
    assert_eq!(w.error(tag).0, ErrorCode::BadHashes);
}

#[test]
fn a_namespace_over_its_quota_loses_its_oldest_objects_only() {
    let mut config = World::config();
    config.arena_bytes = 128 * MIB;
    // 20 rows of 64 KiB
    config.limits.namespace_percent_max = 1;
    let mut w = World::configured(config);
    let client = w.attach(Role::Opaque, 1);
    let rows = |n: u64| n * (64 << 10);
    let (_, elsewhere) = {
        let grant = Grant {
            request: "g".into(),
            namespace: vec![4; 32],
            chunks: vec![object(9, rows(10))],
            ttl_s: 0,
        };
        let tag = w.say(client, Op::Grant, &grant, NO_FDS);
        (tag, w.answer::<GrantReply>(tag).0)
    };
    assert_eq!(elsewhere.results, [GRANT_GRANTED]);
    for n in 1..=3 {
        put(&mut w, client, n, rows(6));
    }
    assert_eq!(operation(&mut w, client, ObjectsOp::Pin, &[1]).count, 1);
    put(&mut w, client, 4, rows(6));
    let stat = operation(&mut w, client, ObjectsOp::Stat, &[1, 2, 3, 4]);
    assert_eq!(stat.states, [1, 0, 1, 1], "the oldest without a pin");
    let (_, reply) = w.grant(client, &[object(5, rows(21))]);
    assert_eq!(reply.results, [GRANT_TOO_LARGE]);
    assert_eq!(operation(&mut w, client, ObjectsOp::Pin, &[3, 4]).count, 2);
    let (_, reply) = w.grant(client, &[object(5, rows(3))]);
    assert_eq!(reply.results, [GRANT_QUOTA]);
    let (_, reply) = w.grant(client, &[object(1, rows(18))]);
    assert_eq!(reply.results, [GRANT_EXISTS], "longer, and the oldest");
    check(&w);
    operation(&mut w, client, ObjectsOp::Remove, &[1]);
    put(&mut w, client, 5, rows(3));
    check(&w);
}

// -- lower tiers

fn tiered() -> (World, ConnId) {
    let mut config = lower::config(&[Kind::Disk, Kind::Redis]);
    config.arena_bytes = 128 * MIB;
    let mut w = World::configured(config);
    let client = w.attach(Role::Opaque, 1);
    for tier in [Kind::Disk, Kind::Redis] {
        lower::state(&mut w, tier, None);
    }
    (w, client)
}

/// The head of object `n` as a tier has it; the digest of every piece is a byte repeated.
fn head(n: u8, bytes: u64) -> Object {
    let domain = opaque().unwrap();
    let plan = SectionPlan::opaque(bytes).unwrap();
    let section = |shard| Section {
        group: 0,
        shard,
        stored_bytes: plan.section_bytes(shard, 1),
        raw_bytes: plan.section_bytes(shard, 1),
        stored_digest: [n; 16],
        raw_digest: [n; 16],
    };
    Object {
        kind: KeyKind::Opaque,
        codec: Codec::None,
        fidelity: Fidelity::Exact,
        form: Form::default(),
        cipher: Cipher::None,
        model: domain.model_id,
        layout: domain.layout_id,
        namespace: NamespaceId::default(),
        last_hash: hash(n),
        parent: Default::default(),
        part: 0,
        parts: 1,
        tokens: 1,
        first_token: 0,
        created_unix_ms: 0,
        expires_unix_s: 0,
        writer: [0; 16],
        engine: "vllm".into(),
        engine_version: "0.32.0".into(),
        nonce: [0; 24],
        sections: (0..plan.sections()).map(section).collect(),
        block_hashes: Vec::new(),
        token_ids: Vec::new(),
    }
}

fn number(key: kvcachepool_protocol::key::ChunkKey) -> u8 {
    let model = opaque().unwrap().model_id;
    let named = |n: &u8| chunk_key(&model, &NamespaceId::default(), KeyKind::Opaque, &hash(*n));
    (1..=9).find(|n| named(n) == key).unwrap()
}

/// Answers the only order, a lookup of one object, with its presence. Returns the head that is ordered then.
fn head_job(w: &mut World) -> u64 {
    let [Effect::Lookup(lookup)] = &lower::orders(w)[..] else {
        panic!("no lookup")
    };
    w.input(Input::Completed(Completion::Lookup {
        lookup: lookup.lookup,
        present: Ok(vec![true]),
    }));
    let [Effect::Head(job)] = &lower::orders(w)[..] else {
        panic!("no head")
    };
    job.head
}

/// Answers all orders until none is left: the disk has `there`. Returns the numbers of the objects whose heads and bytes were read.
fn serve(w: &mut World, there: &[(u8, u64)]) -> (Vec<u8>, Vec<u8>) {
    let (mut heads, mut fetched) = (Vec::new(), Vec::new());
    let of = |n: u8| there.iter().find(|(m, _)| *m == n).map(|(_, bytes)| *bytes);
    loop {
        let orders = lower::orders(w);
        if orders.is_empty() {
            return (heads, fetched);
        }
        for order in orders {
            let done = match order {
                Effect::Lookup(job) => {
                    let has = |n: u8| job.tier == Kind::Disk && of(n).is_some();
                    Completion::Lookup {
                        lookup: job.lookup,
                        present: Ok(job.names.iter().map(|name| has(number(name.key))).collect()),
                    }
                }
                Effect::Head(job) => {
                    let n = number(job.name.key);
                    heads.push(n);
                    let object = of(n).map(|bytes| Box::new(head(n, bytes)));
                    Completion::Head {
                        head: job.head,
                        object: object.ok_or(Cause::Missing),
                    }
                }
                Effect::Fetch(job) => {
                    let n = number(job.name.key);
                    fetched.push(n);
                    let landed = crate::Landed {
                        object: Box::new(head(n, of(n).unwrap())),
                        digests: vec![Some([n; 16]); job.sections.len()],
                    };
                    Completion::Fetch {
                        fetch: job.fetch,
                        landed: Ok(landed),
                    }
                }
                other => panic!("{other:?}"),
            };
            w.input(Input::Completed(done));
            check(w);
        }
    }
}

#[test]
fn objects_of_unknown_length_are_fetched_around_missing_ones() {
    let (mut w, client) = tiered();
    let tag = w.say(client, Op::Probe, &get("r", &[1, 2, 3]), NO_FDS);
    let there = [(1, 9 * MIB), (3, 70)];
    assert_eq!(serve(&mut w, &there), (vec![1, 3], vec![1, 3]));
    let reply = final_reply(&mut w, tag);
    assert_eq!(reply.states, [CHUNK_READY, CHUNK_ABSENT, CHUNK_READY]);
    assert_eq!(reply.tiers, [2, 0, 2]);
    let lengths: Vec<u32> = unpack(&reply.refs)
        .unwrap()
        .iter()
        .map(|r| r.length.get())
        .collect();
    let piece = 4 * MIB as u32;
    assert_eq!(lengths, [piece, piece, MIB as u32, 70]);
}

#[test]
fn a_prefix_of_objects_is_not_fetched_after_its_first_hole() {
    let (mut w, client) = tiered();
    let tag = w.say(client, Op::Probe, &probe("r", &[1, 2, 3]), NO_FDS);
    let there = [(1, 10), (3, 70)];
    assert_eq!(serve(&mut w, &there).1, [1]);
    let reply = final_reply(&mut w, tag);
    assert_eq!(reply.states, [CHUNK_READY, CHUNK_ABSENT, CHUNK_ABSENT]);
    // existence reads neither heads nor objects
    let tag = w.say(client, Op::Probe, &exists("e", &[1, 3]), NO_FDS);
    assert_eq!(serve(&mut w, &there), (vec![], vec![]));
    let (reply, _) = w.answer::<ProbeReply>(tag);
    assert_ne!(reply.states[0], CHUNK_ABSENT);
}

#[test]
fn a_head_that_lies_is_a_miss_and_a_tier_that_ends_while_it_is_read_too() {
    for (object, tier_ends) in [
        (
            Ok(Object {
                kind: KeyKind::Prefix,
                ..head(1, 70)
            }),
            false,
        ),
        (
            Ok(Object {
                sections: head(1, 9 * MIB).sections[1..].to_vec(),
                ..head(1, 70)
            }),
            false,
        ),
        (Err(Cause::Timeout), false),
        (Err(Cause::Missing), false),
        (Ok(head(1, 70)), true),
    ] {
        let (mut w, client) = tiered();
        let tag = w.say(client, Op::Probe, &get("r", &[1]), NO_FDS);
        let job = head_job(&mut w);
        if tier_ends {
            lower::state(&mut w, Kind::Disk, Some("Gone"));
        }
        check(&w);
        let object = object.map(Box::new);
        w.input(Input::Completed(Completion::Head { head: job, object }));
        assert!(
            serve(&mut w, &[]).1.is_empty(),
            "Redis is asked, and has nothing"
        );
        let reply = final_reply(&mut w, tag);
        assert_eq!(reply.states, [CHUNK_ABSENT]);
        check(&w);
    }
}

#[test]
fn a_request_that_ends_while_a_head_is_read_leaves_nothing() {
    let (mut w, client) = tiered();
    w.say(client, Op::Probe, &get("r", &[1]), NO_FDS);
    let job = head_job(&mut w);
    let release = Release {
        requests: vec!["r".into()],
    };
    w.say(client, Op::Release, &release, NO_FDS);
    check(&w);
    w.input(Input::Completed(Completion::Head {
        head: job,
        object: Ok(Box::new(head(1, 70))),
    }));
    assert!(lower::orders(&mut w).is_empty());
    check(&w);
}

fn writing() -> Config {
    let mut config = lower::config(&[Kind::Disk]);
    config.tiers[0].write = WritePolicy::WriteThrough;
    config
}

/// A client of a sidecar that writes to a disk.
fn written() -> (World, ConnId) {
    let mut w = World::configured(writing());
    let client = w.attach(Role::Opaque, 1);
    lower::state(&mut w, Kind::Disk, None);
    (w, client)
}

/// The only order, which must be a write.
fn write(w: &mut World) -> u64 {
    let orders = lower::orders(w);
    let [Effect::Write(job)] = &orders[..] else {
        panic!("{orders:?}")
    };
    assert_eq!(job.object.kind, KeyKind::Opaque);
    job.put
}

fn write_ends(w: &mut World, put: u64) {
    let stored = Ok(crate::tier::Stored::New);
    w.input(Input::Completed(Completion::Write { put, stored }));
    check(w);
}

/// The only order, which must be a removal of object 1.
fn removal(w: &mut World) -> u64 {
    let orders = lower::orders(w);
    let [Effect::Remove(job)] = &orders[..] else {
        panic!("{orders:?}")
    };
    assert_eq!(number(job.names[0].key), 1);
    job.removal
}

fn removal_ends(w: &mut World, removal: u64, removed: Result<u64, Cause>) {
    w.input(Input::Completed(Completion::Remove { removal, removed }));
    check(w);
}

#[test]
fn an_object_that_is_being_written_is_removed_after_the_write() {
    let (mut w, client) = written();
    put(&mut w, client, 1, 100);
    let first = write(&mut w);
    assert_eq!(operation(&mut w, client, ObjectsOp::Remove, &[1]).count, 1);
    assert!(lower::orders(&mut w).is_empty(), "the write is in flight");
    put(&mut w, client, 1, 200);
    write_ends(&mut w, first);
    let removal = removal(&mut w);
    removal_ends(&mut w, removal, Ok(1));
    // the new object is written once the earlier one is gone
    write(&mut w);
}

#[test]
fn a_removed_object_does_not_return_before_its_tier_confirms() {
    let (mut w, client) = written();
    put(&mut w, client, 1, 100);
    let first = write(&mut w);
    write_ends(&mut w, first);
    assert_eq!(
        operation(&mut w, client, ObjectsOp::Remove, &[1, 1]).count,
        1
    );
    let first = removal(&mut w);
    let read = |w: &mut World, request| {
        let tag = w.say(client, Op::Probe, &get(request, &[1]), NO_FDS);
        let (reply, partial) = w.answer::<ProbeReply>(tag);
        assert!(!partial, "the disk is not asked");
        reply.states
    };
    assert_eq!(read(&mut w, "a"), [CHUNK_ABSENT]);
    removal_ends(&mut w, first, Err(Cause::Timeout));
    assert_eq!(read(&mut w, "b"), [CHUNK_ABSENT]);
    put(&mut w, client, 1, 200);
    assert!(
        lower::orders(&mut w).is_empty(),
        "neither removed nor written"
    );
    w.pass(5_000);
    let again = removal(&mut w);
    removal_ends(&mut w, again, Ok(1));
    write(&mut w);
}

#[test]
fn one_object_that_cannot_be_removed_holds_up_no_others() {
    let (mut w, client) = written();
    let keys: Vec<u8> = (1..=8).collect();
    operation(&mut w, client, ObjectsOp::Remove, &keys);
    let mut left = keys;
    for _ in 0..8 {
        while let [Effect::Remove(job)] = &lower::orders(&mut w)[..] {
            let ordered: Vec<u8> = job.names.iter().map(|name| number(name.key)).collect();
            let removed = match ordered.contains(&3) {
                true => Err(Cause::Denied),
                false => {
                    left.retain(|key| !ordered.contains(key));
                    Ok(ordered.len() as u64)
                }
            };
            removal_ends(&mut w, job.removal, removed);
        }
        w.pass(5_000);
    }
    assert_eq!(left, [3]);
}

#[test]
fn removals_wait_for_a_tier_that_is_down_and_are_limited() {
    let (mut w, client) = written();
    lower::state(&mut w, Kind::Disk, Some("Gone"));
    operation(&mut w, client, ObjectsOp::Remove, &[1]);
    assert!(lower::orders(&mut w).is_empty());
    lower::state(&mut w, Kind::Disk, None);
    let first = removal(&mut w);
    removal_ends(&mut w, first, Ok(0));
    lower::state(&mut w, Kind::Disk, Some("Gone"));
    let mut refused = false;
    for batch in 0u32..17 {
        let hash = |n: u32| [n.to_le_bytes().to_vec(), vec![9; 28]].concat();
        let objects = Objects {
            op: ObjectsOp::Remove,
            namespace: Vec::new(),
            hashes: (0..4_096).flat_map(|n| hash(batch * 4_096 + n)).collect(),
            ttl_s: 0,
        };
        let tag = w.say(client, Op::Objects, &objects, NO_FDS);
        if batch == 16 {
            refused = w.error(tag).0 == ErrorCode::LimitReached;
        } else {
            let _: (ObjectsReply, bool) = w.answer(tag);
        }
    }
    assert!(refused);
}

/// The next engine process over the same memory, with its tiers up.
fn restarted(w: &World, config: Config) -> World {
    let table = w.core.engine().unwrap().table().clone();
    let tiers: Vec<Kind> = config.tiers.iter().map(|tier| tier.kind).collect();
    let mut w = World::configured_with(config, table);
    check(&w);
    for tier in tiers {
        lower::state(&mut w, tier, None);
    }
    w
}

#[test]
fn a_removal_that_no_tier_confirmed_outlives_the_engine_process() {
    let (mut w, client) = written();
    put(&mut w, client, 1, 100);
    let first = write(&mut w);
    write_ends(&mut w, first);
    operation(&mut w, client, ObjectsOp::Remove, &[1, 2, 2]);
    assert!(matches!(&lower::orders(&mut w)[..], [Effect::Remove(job)] if job.names.len() == 2));
    check(&w);
    put(&mut w, client, 1, 200);
    assert!(lower::orders(&mut w).is_empty(), "the write is held back");
    for _ in 0..2 {
        w = restarted(&w, writing());
        let orders = lower::orders(&mut w);
        let [Effect::Remove(job)] = &orders[..] else {
            panic!("{orders:?}")
        };
        let mut names: Vec<u8> = job.names.iter().map(|name| number(name.key)).collect();
        names.sort_unstable();
        assert_eq!(names, [1, 2]);
        let client = w.attach(Role::Opaque, 2);
        assert_eq!(
            read(&mut w, client, "a", &[1, 2]).states,
            [CHUNK_READY, CHUNK_ABSENT]
        );
        assert!(
            lower::orders(&mut w).is_empty(),
            "the disk is neither asked nor written"
        );
        check(&w);
        let removal = job.removal;
        let table = w.core.engine().unwrap().table().clone();
        removal_ends(&mut w, removal, Ok(2));
        write(&mut w);
        // the process ends before that
        w = World::configured_with(writing(), table);
    }
    let table = w.core.engine().unwrap().table().clone();
    let mut cold = Engine::new(w.now, table, writing(), true);
    let up = Completion::Tier {
        tier: Kind::Disk,
        down: None,
    };
    cold.completed(w.now, up);
    let effects = cold.take_effects(w.now);
    let [Effect::Remove(job)] = &effects[..] else {
        panic!("{effects:?}")
    };
    let removal = job.removal;
    let removed = Ok(2);
    cold.completed(w.now, Completion::Remove { removal, removed });
    cold.check().unwrap();
    let notes = cold.memory.notes();
    assert!(notes.is_empty(), "{notes:?}");
}

#[test]
fn notes_of_removals_are_bounded_and_go_with_their_tier() {
    let (mut w, client) = written();
    lower::state(&mut w, Kind::Disk, Some("Gone"));
    let objects = Objects {
        op: ObjectsOp::Remove,
        namespace: Vec::new(),
        hashes: (0..100).flat_map(|n| hash(n).0).collect(),
        ttl_s: 0,
    };
    let _: ObjectsReply = w.ask(client, Op::Objects, &objects);
    check(&w);
    let noted = |w: &World| w.core.engine().unwrap().memory.notes().len();
    let chunks = w.core.engine().unwrap().geometry().chunks as usize;
    assert_eq!(noted(&w), chunks / 8);
    put(&mut w, client, 200, 100);
    let mut again = restarted(&w, writing());
    let orders = lower::orders(&mut again);
    assert!(matches!(&orders[..], [Effect::Remove(job)] if job.names.len() == chunks / 8));
    let client = again.attach(Role::Opaque, 2);
    for n in 100..150 {
        put(&mut again, client, n, 60_000);
    }
    check(&again);
    let without = restarted(&w, World::config());
    assert_eq!(noted(&without), 0);
    let mut with = restarted(&without, writing());
    assert!(lower::orders(&mut with).is_empty());
}

#[test]
fn the_end_of_the_process_waits_for_removals_that_may_still_succeed() {
    let (mut w, client) = written();
    let waits = |w: &World| (w.core.removes(), w.core.unremoved());
    assert_eq!(waits(&w), (false, vec![]));
    operation(&mut w, client, ObjectsOp::Remove, &[1]);
    assert_eq!(waits(&w), (true, vec![(Kind::Disk, 1)]));
    lower::state(&mut w, Kind::Disk, Some("Gone"));
    assert_eq!(
        waits(&w),
        (false, vec![(Kind::Disk, 1)]),
        "not for what is down"
    );
    lower::state(&mut w, Kind::Disk, None);
    for failed_s in (0..30).step_by(5) {
        let order = removal(&mut w);
        removal_ends(&mut w, order, Err(Cause::Denied));
        assert!(w.core.removes(), "{failed_s}");
        w.pass(5_000);
    }
    assert_eq!(
        waits(&w),
        (false, vec![(Kind::Disk, 1)]),
        "it fails all the time"
    );
    let order = removal(&mut w);
    operation(&mut w, client, ObjectsOp::Remove, &[2]);
    removal_ends(&mut w, order, Ok(1));
    assert_eq!(waits(&w), (true, vec![(Kind::Disk, 1)]));
}

#[test]
fn a_fetch_that_waits_for_its_head_ends_with_a_removal() {
    let (mut w, client) = written();
    let tag = w.say(client, Op::Probe, &get("r", &[1]), NO_FDS);
    let job = head_job(&mut w);
    operation(&mut w, client, ObjectsOp::Remove, &[1]);
    check(&w);
    w.input(Input::Completed(Completion::Head {
        head: job,
        object: Ok(Box::new(head(1, 70))),
    }));
    let reply = final_reply(&mut w, tag);
    assert_eq!(reply.states, [CHUNK_ABSENT]);
    removal(&mut w);
}

#[test]
fn a_new_boot_does_not_take_a_client_for_a_process_without_gpu() {
    let mut w = World::new();
    let (scheduler, _) = w.instance();
    let (_, granted) = w.grant(scheduler, &[chunk(1)]);
    let table = w.core.engine().unwrap().table().clone();
    let lock = w.core.host_mut().locked.first().copied();
    // the next boot: the worker's process says HELLO as a client first, and dies
    let pod = Pod {
        locked: w.core.host_mut().locked.clone(),
        ..Pod::default()
    };
    let mut w = World::of(pod, Some(table));
    let client = w.connect();
    let first = Hello {
        lock,
        region: Some(granted.region),
        fds: ["pidfd", "arena", "table"].map(String::from).to_vec(),
        ..hello(Role::Opaque, 1, 9)
    };
    assert_eq!(w.greet(client, &first, true).memory, Memory::Held);
    let process = w.process(0);
    w.input(Input::ProcessDied { process });
    let usage = w.core.engine().unwrap().usage();
    assert_eq!(usage.quarantined_slots, 1, "a GPU may still write");
    w.pass(30_000);
    assert_eq!(w.core.engine().unwrap().usage().quarantined_slots, 0);
}

#[test]
fn a_removed_object_keeps_its_writers_slot_through_a_restart() {
    let mut w = World::new();
    let (_, _) = w.instance();
    let client = w.connect();
    let lock = w.core.host_mut().locked.first().copied();
    let region = w.core.engine().unwrap().geometry().region;
    let first = Hello {
        lock,
        region: Some(region),
        fds: ["pidfd", "arena", "table"].map(String::from).to_vec(),
        ..hello(Role::Opaque, 1, 1)
    };
    assert_eq!(w.greet(client, &first, true).memory, Memory::Held);
    let (_, granted) = w.grant(client, &[object(2, 10)]);
    // its record goes, and the slot stays GRANTED
    operation(&mut w, client, ObjectsOp::Remove, &[2]);
    let table = w.core.engine().unwrap().table().clone();
    let pod = Pod {
        locked: w.core.host_mut().locked.clone(),
        ..Pod::default()
    };
    let mut w = World::of(pod, Some(table));
    let client = w.connect();
    let named = Hello {
        grants: granted.refs.clone(),
        number: 2,
        ..first.clone()
    };
    assert_eq!(w.greet(client, &named, true).memory, Memory::Held);
    let worker = w.connect();
    let of_worker = Hello {
        role: Role::Worker,
        number: 3,
        ..first.clone()
    };
    assert_eq!(w.greet(worker, &of_worker, true).memory, Memory::Held);
    let granted = |w: &World| w.core.engine().unwrap().usage().granted_slots;
    assert_eq!(granted(&w), 1, "the client still writes");
    let unnamed = Hello { number: 3, ..first };
    assert_eq!(w.greet(client, &unnamed, true).memory, Memory::Held);
    assert_eq!(granted(&w), 0);
}

#[test]
fn clients_leave_half_of_the_requests_to_vllm() {
    let mut config = World::config();
    config.limits.requests_max = 4;
    let mut w = World::configured(config);
    let (scheduler, worker) = w.instance();
    w.store(scheduler, worker, &[chunk(1)]);
    let client = w.attach(Role::Opaque, 3);
    put(&mut w, client, 1, 10);
    for request in ["a", "b"] {
        assert_eq!(read(&mut w, client, request, &[1]).states, [CHUNK_READY]);
    }
    let tag = w.say(client, Op::Probe, &get("c", &[1]), NO_FDS);
    assert_eq!(w.error(tag).0, ErrorCode::LimitReached);
    for request in ["d", "e"] {
        assert_eq!(w.states(scheduler, request, &[1]), [CHUNK_READY]);
    }
    check(&w);
}

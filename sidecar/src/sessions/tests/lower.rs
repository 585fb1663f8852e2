//! Tiers below memory: what is asked of them when, what is fetched, who waits, and how each of these ends.

use super::peer::*;
use crate::engine::config::{Config, TierConfig};
use crate::engine::table::{FREE, GRANTED, PUBLISHED, Table};
use crate::engine::{Landed, Order, Report, Target, TierStats};
use crate::sessions::*;
use crate::tiers::{Cause, Kind};
use kvcachepool_protocol::frame::Op;
use kvcachepool_protocol::key::{ChunkKey, KeyKind, LayoutId, ModelId, NamespaceId, chunk_key};
use kvcachepool_protocol::message::*;
use kvcachepool_protocol::object::{Cipher, Codec, Fidelity, Object, Section};

fn config(tiers: &[Kind]) -> Config {
    Config {
        tiers: tiers.iter().map(|kind| TierConfig::new(*kind)).collect(),
        ..World::config()
    }
}

/// A served instance whose tiers are up: (scheduler, worker).
fn tiered(tiers: &[Kind]) -> (World, ConnId, ConnId) {
    limited(config(tiers))
}

fn limited(config: Config) -> (World, ConnId, ConnId) {
    let tiers: Vec<Kind> = config.tiers.iter().map(|t| t.kind).collect();
    let mut w = World::configured(config);
    let (scheduler, worker) = w.instance();
    for tier in tiers {
        state(&mut w, tier, None);
    }
    (w, scheduler, worker)
}

fn state(w: &mut World, tier: Kind, down: Option<&str>) {
    let down = down.map(str::to_owned);
    w.input(Input::Tier(Report::State { tier, down }));
}

fn orders(w: &mut World) -> Vec<Order> {
    let mut found = Vec::new();
    w.out.retain(|o| match o {
        Output::Tier(order) => {
            found.push(order.clone());
            false
        }
        _ => true,
    });
    found
}

fn identity(w: &World) -> (ModelId, LayoutId) {
    let domain = &w.core.status(w.now).domains[0];
    (
        ModelId::from_hex(&domain.model_id).unwrap(),
        LayoutId::from_hex(&domain.layout_id).unwrap(),
    )
}

fn key(w: &World, n: u8) -> ChunkKey {
    let namespace = NamespaceId::default();
    chunk_key(&identity(w).0, &namespace, KeyKind::Prefix, &hash(n))
}

/// Numbers of the chunks of an order's names.
fn named(w: &World, keys: impl IntoIterator<Item = ChunkKey>) -> Vec<u8> {
    let number = |k: ChunkKey| (1..=9).find(|n| key(w, *n) == k);
    keys.into_iter().map(|k| number(k).unwrap()).collect()
}

/// The head of chunk `n` as a tier has it; the digest of a section is a byte repeated.
fn object(w: &World, n: u8, digest: u8) -> Object {
    let (model, layout) = identity(w);
    let bytes = 4 * BLOCK_BYTES;
    Object {
        kind: KeyKind::Prefix,
        codec: Codec::None,
        fidelity: Fidelity::Exact,
        cipher: Cipher::None,
        model,
        layout,
        namespace: NamespaceId::default(),
        last_hash: hash(n),
        parent: if n == 1 {
            ChunkKey::default()
        } else {
            key(w, n - 1)
        },
        part: 0,
        parts: 1,
        tokens: 64,
        first_token: u32::from(n - 1) * 64,
        created_unix_ms: 0,
        expires_unix_s: 0,
        writer: [0; 16],
        engine: "vllm".into(),
        engine_version: "0.32.0".into(),
        nonce: [0; 24],
        sections: vec![Section {
            group: 0,
            shard: 0,
            stored_bytes: bytes,
            raw_bytes: bytes,
            stored_digest: [digest; 16],
            raw_digest: [digest; 16],
        }],
        block_hashes: Vec::new(),
        token_ids: Vec::new(),
    }
}

/// Takes the only order, which must be a lookup; answers it with the chunks that are there. Returns tier and chunks asked for.
fn look_up(w: &mut World, there: &[u8]) -> (Kind, Vec<u8>) {
    let [
        Order::Lookup {
            lookup,
            tier,
            names,
        },
    ] = <[Order; 1]>::try_from(orders(w)).expect("one order")
    else {
        panic!("no lookup")
    };
    let asked = named(w, names.iter().map(|n| n.key));
    let present = Ok(asked.iter().map(|n| there.contains(n)).collect());
    w.input(Input::Tier(Report::LookedUp { lookup, present }));
    (tier, asked)
}

/// A fetch that was ordered.
#[derive(Debug, Clone)]
struct Fetch {
    id: crate::engine::FetchId,
    tier: Kind,
    chunk: u8,
    targets: Vec<Target>,
}

/// Takes all orders, which must be fetches.
fn fetches(w: &mut World) -> Vec<Fetch> {
    let mut found = Vec::new();
    for order in orders(w) {
        match order {
            Order::Fetch {
                fetch,
                tier,
                name,
                sections,
            } => found.push(Fetch {
                id: fetch,
                tier,
                chunk: named(w, [name.key])[0],
                targets: sections,
            }),
            other => panic!("{other:?}"),
        }
    }
    found
}

fn chunks(list: &[Fetch]) -> Vec<u8> {
    list.iter().map(|f| f.chunk).collect()
}

fn land(w: &mut World, fetch: &Fetch) {
    let object = object(w, fetch.chunk, fetch.chunk);
    land_as(w, fetch, Ok(object));
}

/// The fetch ends; the bytes in every slot have the chunk's digest.
fn land_as(w: &mut World, fetch: &Fetch, object: Result<Object, Cause>) {
    let landed = object.map(|object| Landed {
        object: Box::new(object),
        digests: vec![Some([fetch.chunk; 16]); fetch.targets.len()],
    });
    w.input(Input::Tier(Report::Fetched {
        fetch: fetch.id,
        landed,
    }));
}

fn ask(w: &mut World, scheduler: ConnId, request: &str, list: &[u8]) -> (u64, ProbeReply, bool) {
    let tag = w.say(scheduler, Op::Probe, &probe(request, list), NO_FDS);
    let (reply, partial) = w.answer(tag);
    (tag, reply, partial)
}

/// The last answer to a tag so far.
fn last(w: &mut World, asked: u64) -> Option<(ProbeReply, bool)> {
    let mut found = None;
    while w
        .out
        .iter()
        .any(|o| matches!(o, Output::Send { tag, .. } if *tag == asked))
    {
        found = Some(w.answer(asked));
    }
    found
}

fn row(w: &World, target: &Target) -> u32 {
    let slot = target.section.slot.get();
    w.core.engine().unwrap().table().row(slot).state
}

fn stats(w: &World, kind: Kind) -> TierStats {
    let mut tiers = w.core.engine().unwrap().tiers();
    tiers.find(|t| t.0 == kind).unwrap().2.clone()
}

fn audit(w: &World) {
    w.core.engine().unwrap().audit().unwrap();
}

fn release(w: &mut World, scheduler: ConnId, request: &str) {
    let requests = vec![request.to_owned()];
    w.say(scheduler, Op::Release, &Release { requests }, NO_FDS);
}

const R: u8 = CHUNK_READY;
const P: u8 = CHUNK_PENDING;
const A: u8 = CHUNK_ABSENT;

#[test]
fn an_early_probe_asks_tiers_and_the_one_at_the_first_poll_fetches_in_prefix_order() {
    let (mut w, scheduler, worker) = tiered(&[Kind::Disk]);
    w.store(scheduler, worker, &[chunk(1)]);
    let early = Probe {
        local_tokens: None,
        ..probe("r", &[1, 2, 3, 4])
    };
    let tag = w.say(scheduler, Op::Probe, &early, NO_FDS);
    let (first, partial): (ProbeReply, _) = w.answer(tag);
    assert!(partial && first.pending_ms > 0);
    assert_eq!(
        (first.states, first.tiers),
        (vec![R, P, P, P], vec![1, 2, 2, 2])
    );
    assert_eq!(look_up(&mut w, &[2, 3]), (Kind::Disk, vec![2, 3, 4]));
    let (found, partial) = last(&mut w, tag).unwrap();
    assert!(!partial, "nothing more comes of an early one");
    assert_eq!(
        (found.states, found.tiers),
        (vec![R, P, P, A], vec![1, 2, 2, 0])
    );
    assert!(orders(&mut w).is_empty());

    let (tag, reply, partial) = ask(&mut w, scheduler, "r", &[1, 2, 3, 4]);
    assert!(partial);
    assert_eq!(
        reply.states,
        [R, P, P, A],
        "what was missing is not asked for twice"
    );
    let fetching = fetches(&mut w);
    assert_eq!(chunks(&fetching), [2, 3]);
    assert_eq!(row(&w, &fetching[0].targets[0]), GRANTED);
    audit(&w);
    land(&mut w, &fetching[0]);
    let (news, partial) = last(&mut w, tag).unwrap();
    assert!(partial);
    assert_eq!(
        (news.states, news.tiers),
        (vec![R, R, P, A], vec![1, 2, 2, 0])
    );
    land(&mut w, &fetching[1]);
    let (end, partial) = last(&mut w, tag).unwrap();
    assert!(!partial);
    assert_eq!(
        (end.states, end.tiers),
        (vec![R, R, R, A], vec![1, 2, 2, 0])
    );
    assert_eq!(end.refs.len(), 3 * 16);
    assert_eq!(row(&w, &fetching[1].targets[0]), PUBLISHED);
    audit(&w);
    assert_eq!(w.states(scheduler, "q", &[2, 3]), [R, R]);
    assert_eq!(stats(&w, Kind::Disk).fetches["landed"], 2);
}

#[test]
fn without_a_tier_that_is_up_nothing_waits() {
    let (mut w, scheduler, _) = tiered(&[Kind::Disk]);
    state(&mut w, Kind::Disk, Some("Io"));
    let (_, reply, partial) = ask(&mut w, scheduler, "r", &[1]);
    assert!(!partial && orders(&mut w).is_empty());
    assert_eq!((reply.states, reply.pending_ms), (vec![A], 0));
    let tiers = w.core.status(w.now).tiers;
    assert_eq!(
        (tiers[1].name.as_str(), tiers[1].reason.as_str()),
        ("disk", "Io")
    );
}

#[test]
fn later_tiers_are_asked_only_for_what_nearer_ones_lack() {
    let (mut w, scheduler, _) = tiered(&[Kind::Disk, Kind::S3]);
    let (tag, reply, _) = ask(&mut w, scheduler, "r", &[1, 2, 3]);
    assert_eq!(reply.tiers, [2, 2, 2]);
    assert_eq!(look_up(&mut w, &[1, 3]), (Kind::Disk, vec![1, 2, 3]));
    let all = orders(&mut w);
    let [
        Order::Lookup {
            lookup,
            tier,
            names,
        },
        Order::Fetch { .. },
    ] = &all[..]
    else {
        panic!("{all:?}")
    };
    assert_eq!(
        (*tier, named(&w, names.iter().map(|n| n.key))),
        (Kind::S3, vec![2])
    );
    let (news, _) = last(&mut w, tag).unwrap();
    assert_eq!((news.states, news.tiers), (vec![P, P, P], vec![2, 4, 2]));
    let present = Ok(vec![true]);
    let lookup = *lookup;
    w.input(Input::Tier(Report::LookedUp { lookup, present }));
    let more = fetches(&mut w);
    let from: Vec<_> = more.iter().map(|f| (f.tier, f.chunk)).collect();
    assert_eq!(from, [(Kind::Disk, 3), (Kind::S3, 2)]);
    audit(&w);
}

#[test]
fn a_prefix_ends_where_no_tier_has_the_next_chunk() {
    let (mut w, scheduler, worker) = tiered(&[Kind::Disk]);
    w.store(scheduler, worker, &[chunk(1), chunk(2), chunk(3)]);
    let mut out = Vec::new();
    w.core.clear(w.now, &mut out).unwrap();
    w.store(scheduler, worker, &[chunk(1)]);
    let (tag, ..) = ask(&mut w, scheduler, "r", &[1, 2, 3, 4]);
    look_up(&mut w, &[3, 4]);
    assert!(
        orders(&mut w).is_empty(),
        "3 and 4 are worth nothing without 2"
    );
    let (end, partial) = last(&mut w, tag).unwrap();
    assert!(!partial);
    assert_eq!(end.states, [R, A, A, A]);
}

#[test]
fn what_the_engine_holds_itself_is_not_asked_for_and_a_cap_ends_it() {
    let (mut w, scheduler, _) = tiered(&[Kind::Disk]);
    let capped = Probe {
        local_tokens: Some(64),
        max_load_tokens: Some(70),
        ..probe("r", &[1, 2, 3, 4])
    };
    let tag = w.say(scheduler, Op::Probe, &capped, NO_FDS);
    let (reply, _): (ProbeReply, _) = w.answer(tag);
    assert_eq!(reply.states, [A, P, P, A]);
    assert_eq!(look_up(&mut w, &[2, 3]), (Kind::Disk, vec![2, 3]));
    let fetching = fetches(&mut w);
    assert_eq!(
        chunks(&fetching),
        [2, 3],
        "the chunk before them is not in memory"
    );
    for fetch in &fetching {
        land(&mut w, fetch);
    }
    assert_eq!(last(&mut w, tag).unwrap().0.states, [A, R, R, A]);
    audit(&w);
}

#[test]
fn what_does_not_come_ends_the_prefix_and_is_counted_by_name() {
    type Change = fn(&mut Object);
    let cases: [(&str, Change); 7] = [
        ("Corrupt", |o| o.sections[0].raw_digest = [9; 16]),
        ("Foreign", |o| o.tokens = 48),
        ("Foreign", |o| o.parent = ChunkKey([1; 32])),
        ("Foreign", |o| o.namespace = NamespaceId([1; 32])),
        ("Shape", |o| o.sections[0].raw_bytes = 1),
        ("Shape", |o| o.sections.clear()),
        ("Expired", |o| o.expires_unix_s = 1),
    ];
    for (name, change) in cases {
        let (mut w, scheduler, _) = tiered(&[Kind::Disk]);
        let (tag, ..) = ask(&mut w, scheduler, "r", &[1, 2, 3]);
        look_up(&mut w, &[1, 2, 3]);
        let fetching = fetches(&mut w);
        land(&mut w, &fetching[0]);
        let mut wrong = object(&w, 2, 2);
        change(&mut wrong);
        land_as(&mut w, &fetching[1], Ok(wrong));
        let (end, partial) = last(&mut w, tag).unwrap();
        assert!(!partial, "{name}");
        assert_eq!(end.states, [R, A, A], "{name}");
        assert_eq!(row(&w, &fetching[1].targets[0]), FREE, "{name}");
        assert_eq!(stats(&w, Kind::Disk).fetches[name], 1, "{name}");
        // the third one was under way: nobody waits for it any more
        let cancelled = orders(&mut w);
        let third = Order::CancelFetch {
            fetch: fetching[2].id,
        };
        assert_eq!(cancelled, [third]);
        assert_eq!(row(&w, &fetching[2].targets[0]), GRANTED, "{name}");
        audit(&w);
        land(&mut w, &fetching[2]);
        assert_eq!(row(&w, &fetching[2].targets[0]), FREE, "{name}");
        audit(&w);
    }
}

#[test]
fn a_failed_fetch_is_a_miss_with_its_cause() {
    let (mut w, scheduler, _) = tiered(&[Kind::Disk]);
    let (tag, ..) = ask(&mut w, scheduler, "r", &[1]);
    look_up(&mut w, &[1]);
    let fetching = fetches(&mut w);
    land_as(&mut w, &fetching[0], Err(Cause::Missing));
    assert_eq!(last(&mut w, tag).unwrap().0.states, [A]);
    assert_eq!(stats(&w, Kind::Disk).fetches["Missing"], 1);
    // and is not believed to be there
    ask(&mut w, scheduler, "q", &[1]);
    assert!(fetches(&mut w).is_empty());
    w.now.mono_ms += 1_000;
    ask(&mut w, scheduler, "p", &[1]);
    assert_eq!(look_up(&mut w, &[]).1, [1]);
    audit(&w);
}

#[test]
fn two_requests_share_a_fetch_which_ends_with_the_last_of_them() {
    let (mut w, scheduler, _) = tiered(&[Kind::Disk]);
    let (one, ..) = ask(&mut w, scheduler, "a", &[1]);
    look_up(&mut w, &[1]);
    let fetching = fetches(&mut w);
    let (other, reply, partial) = ask(&mut w, scheduler, "b", &[1]);
    assert!(partial);
    assert_eq!(reply.states, [P]);
    assert!(orders(&mut w).is_empty());
    audit(&w);
    last(&mut w, one);
    release(&mut w, scheduler, "a");
    assert!(orders(&mut w).is_empty());
    land(&mut w, &fetching[0]);
    assert!(last(&mut w, one).is_none());
    assert_eq!(last(&mut w, other).unwrap().0.states, [R]);
    audit(&w);
}

#[test]
fn a_cancelled_fetch_keeps_its_slots_until_nothing_writes_any_more() {
    let (mut w, scheduler, worker) = tiered(&[Kind::Disk]);
    ask(&mut w, scheduler, "a", &[1]);
    look_up(&mut w, &[1]);
    let fetching = fetches(&mut w);
    release(&mut w, scheduler, "a");
    let cancel = Order::CancelFetch {
        fetch: fetching[0].id,
    };
    assert_eq!(orders(&mut w), [cancel]);
    w.pass(3_600_000);
    assert_eq!(row(&w, &fetching[0].targets[0]), GRANTED);
    // the chunk itself may be stored, or fetched again, into other slots
    w.store(scheduler, worker, &[chunk(1)]);
    assert_eq!(w.states(scheduler, "b", &[1]), [R]);
    audit(&w);
    land(&mut w, &fetching[0]);
    assert_eq!(row(&w, &fetching[0].targets[0]), FREE);
    assert_eq!(stats(&w, Kind::Disk).fetches["cancelled"], 1);
    audit(&w);
}

#[test]
fn the_death_of_a_scheduler_and_its_broken_connection_cancel_what_it_waits_for() {
    for dies in [true, false] {
        let (mut w, scheduler, _) = tiered(&[Kind::Disk]);
        ask(&mut w, scheduler, "a", &[1]);
        look_up(&mut w, &[1]);
        ask(&mut w, scheduler, "b", &[5]);
        assert_eq!(orders(&mut w).len(), 2);
        if dies {
            let process = w.process(1);
            w.input(Input::ProcessDied { process });
        } else {
            w.input(Input::Disconnected { conn: scheduler });
        }
        let ended = orders(&mut w);
        assert!(
            matches!(
                ended[..],
                [Order::CancelFetch { .. }, Order::CancelLookup { .. }]
            ),
            "{ended:?}"
        );
        audit(&w);
    }
}

#[test]
fn a_tier_that_hangs_delays_what_memory_has_no_longer_than_the_wait() {
    let (mut w, scheduler, worker) = tiered(&[Kind::Disk]);
    w.store(scheduler, worker, &[chunk(1)]);
    for (request, looked_up) in [("a", false), ("b", true)] {
        let asked = Probe {
            budget_ms: 300,
            ..probe(request, &[1, 2])
        };
        let tag = w.say(scheduler, Op::Probe, &asked, NO_FDS);
        if looked_up {
            look_up(&mut w, &[2]);
        }
        last(&mut w, tag);
        w.pass(299);
        assert!(last(&mut w, tag).is_none(), "{request}");
        w.pass(1);
        let (end, partial) = last(&mut w, tag).unwrap();
        assert!(!partial);
        assert_eq!(end.states, [R, A], "{request}");
        let ended = orders(&mut w);
        let cancelled = ended
            .iter()
            .filter(|o| matches!(o, Order::CancelFetch { .. } | Order::CancelLookup { .. }));
        assert_eq!(cancelled.count(), 1, "{ended:?}");
        audit(&w);
    }
}

#[test]
fn fetches_are_bounded_and_what_waits_goes_out_in_prefix_order() {
    let mut config = config(&[Kind::Disk]);
    config.tiers[0].fetches_max = 2;
    let (mut w, scheduler, _) = limited(config.clone());
    ask(&mut w, scheduler, "a", &[1, 2, 3, 4]);
    look_up(&mut w, &[1, 2, 3, 4]);
    let fetching = fetches(&mut w);
    assert_eq!(chunks(&fetching), [1, 2]);
    land(&mut w, &fetching[1]);
    assert_eq!(chunks(&fetches(&mut w)), [3]);
    audit(&w);

    config.tiers[0].fetch_bytes_max = 1;
    let (mut w, scheduler, _) = limited(config.clone());
    ask(&mut w, scheduler, "a", &[1, 2, 3, 4]);
    look_up(&mut w, &[1, 2, 3, 4]);
    assert_eq!(chunks(&fetches(&mut w)), [1], "one may always be fetched");
    audit(&w);

    config.tiers[0].fetch_queue_max = 2;
    let (mut w, scheduler, _) = limited(config);
    let (tag, ..) = ask(&mut w, scheduler, "a", &[1, 2, 3, 4]);
    look_up(&mut w, &[1, 2, 3, 4]);
    let fetching = fetches(&mut w);
    let states = last(&mut w, tag).unwrap().0.states;
    assert_eq!((chunks(&fetching), states), (vec![1], vec![P, P, A, A]));
    assert_eq!(stats(&w, Kind::Disk).fetches["QueueFull"], 1);
    audit(&w);
}

#[test]
fn a_tier_that_goes_down_is_waited_for_by_nobody() {
    let mut config = config(&[Kind::Disk, Kind::S3]);
    config.tiers[0].fetches_max = 1;
    let (mut w, scheduler, _) = limited(config);
    let (asks, ..) = ask(&mut w, scheduler, "a", &[1]);
    let (lookup, names) = match &orders(&mut w)[..] {
        [Order::Lookup { lookup, names, .. }] => (*lookup, names.len()),
        other => panic!("{other:?}"),
    };
    state(&mut w, Kind::Disk, Some("Io"));
    let next = orders(&mut w);
    assert!(
        matches!(
            &next[..],
            [Order::CancelLookup { .. }, Order::Lookup { tier: Kind::S3, names, .. }] if names.len() == 1
        ),
        "{next:?}"
    );
    // what it says too late is not heard
    let present = Ok(vec![true; names]);
    w.input(Input::Tier(Report::LookedUp { lookup, present }));
    assert!(orders(&mut w).is_empty());
    release(&mut w, scheduler, "a");
    last(&mut w, asks);
    orders(&mut w);

    state(&mut w, Kind::Disk, None);
    let (tag, ..) = ask(&mut w, scheduler, "b", &[1, 2]);
    look_up(&mut w, &[1, 2]);
    let fetching = fetches(&mut w);
    assert_eq!(chunks(&fetching), [1]);
    last(&mut w, tag);
    state(&mut w, Kind::Disk, Some("Io"));
    assert!(
        last(&mut w, tag).is_none(),
        "news are not told all the time"
    );
    w.pass(20);
    assert_eq!(last(&mut w, tag).unwrap().0.states, [P, A]);
    audit(&w);
    land(&mut w, &fetching[0]);
    let (end, partial) = last(&mut w, tag).unwrap();
    assert!(!partial);
    assert_eq!(end.states, [R, A]);
    assert_eq!(stats(&w, Kind::Disk).fetches["TierDown"], 1);
    audit(&w);
}

#[test]
fn an_object_without_its_windows_is_a_chunk_without_them() {
    let window = Group {
        kind: "window".into(),
        window_tokens: 32,
        ..register_worker().groups.remove(0)
    };
    let mut groups = register_worker().groups;
    groups.push(window);
    let mut w = World::configured(config(&[Kind::Disk]));
    let worker = w.attach(Role::Worker, 1);
    let scheduler = w.attach(Role::Scheduler, 2);
    let with_window = Register {
        groups,
        ..register_worker()
    };
    let _: RegisterReply = w.ask(worker, Op::Register, &with_window);
    let _: RegisterReply = w.ask(scheduler, Op::Register, &register_scheduler());
    state(&mut w, Kind::Disk, None);
    let (tag, ..) = ask(&mut w, scheduler, "r", &[1]);
    look_up(&mut w, &[1]);
    let fetching = fetches(&mut w);
    assert_eq!(fetching[0].targets.len(), 2);
    let landed = Landed {
        object: Box::new(object(&w, 1, 1)),
        digests: vec![Some([1; 16]), None],
    };
    w.input(Input::Tier(Report::Fetched {
        fetch: fetching[0].id,
        landed: Ok(landed),
    }));
    assert_eq!(row(&w, &fetching[0].targets[1]), FREE);
    let (end, partial) = last(&mut w, tag).unwrap();
    assert!(!partial);
    assert_eq!(end.states, [R]);
    audit(&w);
}

#[test]
fn block_hashes_and_expiry_of_an_object_become_those_of_its_chunk() {
    let (mut w, scheduler, _) = tiered(&[Kind::Disk]);
    ask(&mut w, scheduler, "r", &[1]);
    look_up(&mut w, &[1]);
    let fetching = fetches(&mut w);
    let head = Object {
        block_hashes: vec![hash(7), hash(8), hash(9), hash(1)],
        expires_unix_s: w.now.unix_s + 5,
        ..object(&w, 1, 1)
    };
    land_as(&mut w, &fetching[0], Ok(head));
    let engine = w.core.engine().unwrap();
    let events = engine.ring().after(0).events;
    assert_eq!(events.last().unwrap().block_hashes.len(), 4 * 32);
    assert_eq!(engine.usage().chunks, 1);
    release(&mut w, scheduler, "r");
    w.pass(5_000);
    assert_eq!(w.core.engine().unwrap().usage().chunks, 0);
    audit(&w);
}

#[test]
fn a_chunk_that_is_cleared_while_it_is_fetched_does_not_come_back() {
    let (mut w, scheduler, _) = tiered(&[Kind::Disk]);
    let (tag, ..) = ask(&mut w, scheduler, "r", &[1]);
    look_up(&mut w, &[1]);
    let fetching = fetches(&mut w);
    let mut out = Vec::new();
    w.core.clear(w.now, &mut out).unwrap();
    audit(&w);
    land(&mut w, &fetching[0]);
    assert_eq!(last(&mut w, tag).unwrap().0.states, [A]);
    assert_eq!(w.core.engine().unwrap().usage().chunks, 0);
    assert_eq!(row(&w, &fetching[0].targets[0]), FREE);
    audit(&w);
}

#[test]
fn a_chunk_that_a_worker_stores_while_its_fetch_waits_is_taken_from_memory() {
    let mut config = config(&[Kind::Disk]);
    config.tiers[0].fetches_max = 1;
    let (mut w, scheduler, worker) = limited(config);
    let (tag, ..) = ask(&mut w, scheduler, "r", &[1, 2]);
    look_up(&mut w, &[1, 2]);
    let fetching = fetches(&mut w);
    w.store(scheduler, worker, &[chunk(2)]);
    land(&mut w, &fetching[0]);
    let (end, partial) = last(&mut w, tag).unwrap();
    assert!(!partial);
    assert_eq!((end.states, end.tiers), (vec![R, R], vec![2, 1]));
    assert!(orders(&mut w).is_empty());
    audit(&w);
}

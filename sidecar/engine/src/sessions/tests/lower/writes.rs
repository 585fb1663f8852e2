//! Writing down: what goes to which tier, when, within what bounds, and what holds its slots meanwhile.

use super::*;
use crate::config::Admission;
use crate::tier::Stored;
use kvcachepool_protocol::refs::unpack;

/// Tiers that everything is written to.
fn config(tiers: &[Kind]) -> Config {
    Config {
        tiers: tiers.iter().map(|kind| TierConfig::new(*kind)).collect(),
        ..super::config(tiers)
    }
}

fn tiered(tiers: &[Kind]) -> (World, ConnId, ConnId) {
    limited(config(tiers))
}

/// A write that was ordered.
#[derive(Debug, Clone)]
struct Put {
    id: u64,
    tier: Kind,
    object: Object,
    targets: Vec<Target>,
}

/// Takes all orders, which must be writes.
fn puts(w: &mut World) -> Vec<Put> {
    let mut found = Vec::new();
    for order in orders(w) {
        match order {
            Effect::Write(WriteJob {
                put,
                tier,
                object,
                sections,
                ..
            }) => found.push(Put {
                id: put,
                tier,
                object: *object,
                targets: sections,
            }),
            other => panic!("{other:?}"),
        }
    }
    found
}

fn written(w: &World, list: &[Put]) -> Vec<(Kind, u8)> {
    list.iter()
        .map(|p| (p.tier, named(w, [p.object.key()])[0]))
        .collect()
}

fn done(w: &mut World, put: &Put, stored: Result<Stored, Cause>) {
    w.input(Input::Completed(Completion::Write {
        put: put.id,
        stored,
    }));
}

fn leased(w: &World) -> u64 {
    w.core.engine().unwrap().memory.usage().leased_bytes
}

/// A load of a chunk from memory.
fn load(w: &mut World, scheduler: ConnId, n: u8) {
    let (probe, ..) = ask(w, scheduler, "load", &[n]);
    let pin = Pin {
        request: "load".into(),
        probe,
        from: 0,
        to: 1,
    };
    w.say(scheduler, Op::Pin, &pin, NO_FDS);
    release(w, scheduler, "load");
}

#[test]
fn a_stored_chunk_is_written_to_every_tier_under_a_lease() {
    let (mut w, scheduler, worker) = tiered(&[Kind::Disk, Kind::S3]);
    let hashes = GrantChunk {
        block_hashes: [hash(7).0, hash(1).0].concat(),
        ..chunk(1)
    };
    let refs = w.store(scheduler, worker, &[hashes, chunk(2)]);
    let list = puts(&mut w);
    let all = [
        (Kind::Disk, 1),
        (Kind::S3, 1),
        (Kind::Disk, 2),
        (Kind::S3, 2),
    ];
    assert_eq!(written(&w, &list), all);
    let head = &list[0].object;
    assert_eq!(
        Object {
            created_unix_ms: 0,
            block_hashes: Vec::new(),
            ..head.clone()
        },
        object(&w, 1, refs[0].slot.get() as u8)
    );
    assert_eq!(head.block_hashes, [hash(7), hash(1)]);
    assert_eq!(head.created_unix_ms, w.now.unix_s * 1000);
    assert_eq!(list[2].object.parent, key(&w, 1));
    assert_eq!(list[0].targets[0].section, refs[0]);
    assert_eq!(leased(&w), 2 << 16);
    forget(&mut w);
    assert_eq!(row(&w, &list[0].targets[0]), PUBLISHED, "it is being read");
    audit(&w);
    for put in &list {
        done(&mut w, put, Ok(Stored::New));
    }
    assert_eq!((leased(&w), row(&w, &list[0].targets[0])), (0, FREE));
    assert_eq!(stats(&w, Kind::S3).puts["stored"], 2);
    audit(&w);
}

#[test]
fn what_one_process_can_name_goes_to_its_disk_and_is_asked_of_nobody_else() {
    let of_one = [[7; 31].to_vec(), vec![1]].concat();
    let of_many = [[7; 31].to_vec(), vec![2]].concat();
    for (namespace, tiers) in [
        (of_one, &[Kind::Disk][..]),
        (of_many, &[Kind::Disk, Kind::Redis, Kind::S3]),
    ] {
        let (mut w, scheduler, worker) = tiered(&[Kind::Disk, Kind::Redis, Kind::S3]);
        let grant = Grant {
            request: "r".into(),
            namespace: namespace.clone(),
            chunks: vec![chunk(1)],
            ttl_s: 0,
        };
        let granted: GrantReply = w.ask(scheduler, Op::Grant, &grant);
        w.commit(worker, granted.region, &granted.refs);
        w.digest_all();
        let written: Vec<Kind> = puts(&mut w).iter().map(|put| put.tier).collect();
        assert_eq!(written, tiers);
        for kind in [Kind::Disk, Kind::Redis, Kind::S3] {
            let refused = stats(&w, kind).puts.get("NotShared").copied();
            assert_eq!(refused, (!tiers.contains(&kind)).then_some(1));
        }
        let question = Probe {
            namespace,
            ..probe("q", &[2])
        };
        w.say(scheduler, Op::Probe, &question, NO_FDS);
        let mut asked = Vec::new();
        while let Some(Effect::Lookup(LookupJob { lookup, tier, .. })) = orders(&mut w).pop() {
            asked.push(tier);
            let present = Ok(vec![false]);
            w.input(Input::Completed(Completion::Lookup { lookup, present }));
        }
        assert_eq!(asked, tiers);
        audit(&w);
    }
}

#[test]
fn a_chunk_is_written_once_and_not_where_it_is_known_to_be() {
    let (mut w, scheduler, worker) = tiered(&[Kind::Disk]);
    w.store(scheduler, worker, &[chunk(1)]);
    let first = puts(&mut w);
    forget(&mut w);
    w.store(scheduler, worker, &[chunk(1)]);
    assert!(puts(&mut w).is_empty(), "it is on its way");
    done(&mut w, &first[0], Ok(Stored::Already));
    forget(&mut w);
    w.store(scheduler, worker, &[chunk(1)]);
    assert!(puts(&mut w).is_empty(), "it is there");
    // and so a request finds it without asking
    forget(&mut w);
    ask(&mut w, scheduler, "r", &[1]);
    assert_eq!(chunks(&fetches(&mut w)), [1]);
    audit(&w);
}

#[test]
fn what_was_in_a_tier_long_ago_is_looked_for_before_it_is_written_or_fetched() {
    const LONG_MS: u64 = 60_000;
    let (mut w, scheduler, worker) = tiered(&[Kind::Disk]);
    w.store(scheduler, worker, &[chunk(1)]);
    let first = puts(&mut w);
    done(&mut w, &first[0], Ok(Stored::New));
    forget(&mut w);
    w.pass(LONG_MS);
    w.store(scheduler, worker, &[chunk(1)]);
    let [
        Effect::Write(WriteJob {
            put,
            look_first: true,
            ..
        }),
    ] = orders(&mut w)[..]
    else {
        panic!("it may have gone meanwhile");
    };
    let stored = Ok(Stored::Already);
    w.input(Input::Completed(Completion::Write { put, stored }));
    forget(&mut w);
    w.pass(LONG_MS);
    ask(&mut w, scheduler, "r", &[1]);
    assert_eq!(look_up(&mut w, &[1]), (Kind::Disk, vec![1]));
    assert_eq!(chunks(&fetches(&mut w)), [1]);
    audit(&w);
}

#[test]
fn what_policy_and_admission_leave_out_is_not_written() {
    let mut config = config(&[Kind::Disk, Kind::S3]);
    config.tiers[0].admission = Admission::Reused;
    config.tiers[1].write = WritePolicy::None;
    let (mut w, scheduler, worker) = limited(config);
    w.store(scheduler, worker, &[chunk(1)]);
    assert!(puts(&mut w).is_empty());
    load(&mut w, scheduler, 1);
    let list = puts(&mut w);
    assert_eq!(written(&w, &list), [(Kind::Disk, 1)]);
    done(&mut w, &list[0], Err(Cause::Full));
    assert!(puts(&mut w).is_empty(), "nobody came back for it");
    w.now.mono_ms += 30_000;
    load(&mut w, scheduler, 1);
    let list = puts(&mut w);
    assert_eq!(written(&w, &list), [(Kind::Disk, 1)], "there may be room");
    done(&mut w, &list[0], Err(Cause::Shape));
    load(&mut w, scheduler, 1);
    assert!(puts(&mut w).is_empty(), "it will never take it");
    let counted = stats(&w, Kind::Disk).puts;
    assert_eq!((counted["Full"], counted["Shape"]), (1, 1));
    audit(&w);
}

#[test]
fn what_is_written_back_waits_for_its_time_or_until_much_waits() {
    let mut config = config(&[Kind::Disk]);
    config.tiers[0].write = WritePolicy::WriteBack;
    config.tiers[0].put_wait_ms = 5_000;
    config.tiers[0].put_age_ms_max = 1_000;
    config.tiers[0].put_queue_bytes_max = 4 << 16;
    let (mut w, scheduler, worker) = limited(config.clone());
    w.store(scheduler, worker, &[chunk(1), chunk(2)]);
    w.pass(4_900);
    assert!(puts(&mut w).is_empty());
    w.store(scheduler, worker, &[chunk(3)]);
    let first = puts(&mut w);
    assert_eq!(written(&w, &first), [(Kind::Disk, 1)], "half the queue");
    w.pass(200);
    let next = puts(&mut w);
    assert_eq!(written(&w, &next), [(Kind::Disk, 2)]);
    audit(&w);
    // a change of policy takes effect at once
    config.tiers[0].write = WritePolicy::WriteThrough;
    assert!(w.core.configure(config).is_empty());
    w.pass(0);
    let last = puts(&mut w);
    assert_eq!(written(&w, &last), [(Kind::Disk, 3)]);
    audit(&w);
}

#[test]
fn what_came_from_a_tier_is_written_to_nearer_ones() {
    let (mut w, scheduler, _) = tiered(&[Kind::Disk, Kind::Redis, Kind::S3]);
    ask(&mut w, scheduler, "r", &[1]);
    look_up(&mut w, &[]);
    look_up(&mut w, &[1]);
    let fetching = fetches(&mut w);
    assert_eq!(fetching[0].tier, Kind::Redis);
    land(&mut w, &fetching[0]);
    let list = puts(&mut w);
    assert_eq!(written(&w, &list), [(Kind::Disk, 1)]);
    audit(&w);
}

#[test]
fn what_came_from_a_tier_that_went_down_meanwhile_is_looked_for_there() {
    let (mut w, scheduler, _) = tiered(&[Kind::Disk]);
    ask(&mut w, scheduler, "r", &[1]);
    look_up(&mut w, &[1]);
    let fetching = fetches(&mut w);
    state(&mut w, Kind::Disk, Some("Io"));
    state(&mut w, Kind::Disk, None);
    land(&mut w, &fetching[0]);
    assert!(orders(&mut w).is_empty());
    load(&mut w, scheduler, 1);
    let [Effect::Write(WriteJob { look_first, .. })] = orders(&mut w)[..] else {
        panic!("it may have come back without it")
    };
    assert!(look_first);
    audit(&w);
}

#[test]
fn writes_are_bounded_and_the_oldest_that_wait_are_dropped() {
    let mut config = config(&[Kind::Disk]);
    config.tiers[0].puts_max = 1;
    config.tiers[0].put_queue_bytes_max = 2 << 16;
    config.tiers[0].put_age_ms_max = 5_000;
    let (mut w, scheduler, worker) = limited(config);
    w.store(scheduler, worker, &[chunk(1)]);
    let first = puts(&mut w);
    for n in 2..=4 {
        w.store(scheduler, worker, &[chunk(n)]);
    }
    assert!(puts(&mut w).is_empty());
    assert_eq!(stats(&w, Kind::Disk).puts["QueueFull"], 1);
    assert_eq!(leased(&w), 1 << 16, "what waits may be evicted");
    audit(&w);
    done(&mut w, &first[0], Ok(Stored::New));
    let next = puts(&mut w);
    assert_eq!(written(&w, &next), [(Kind::Disk, 3)]);
    w.pass(5_000);
    done(&mut w, &next[0], Ok(Stored::New));
    assert!(puts(&mut w).is_empty());
    assert_eq!(stats(&w, Kind::Disk).puts["TooOld"], 1);
    audit(&w);
}

#[test]
fn bytes_of_writes_are_bounded_but_one_may_always_be_written() {
    let mut config = config(&[Kind::Disk]);
    config.tiers[0].put_bytes_max = 1;
    let (mut w, scheduler, worker) = limited(config);
    w.store(scheduler, worker, &[chunk(1), chunk(2)]);
    assert_eq!(puts(&mut w).len(), 1);
    audit(&w);
}

#[test]
fn nothing_is_written_to_a_tier_that_is_down() {
    let mut config = config(&[Kind::Disk]);
    config.tiers[0].puts_max = 1;
    let (mut w, scheduler, worker) = limited(config);
    w.store(scheduler, worker, &[chunk(1), chunk(2)]);
    let list = puts(&mut w);
    state(&mut w, Kind::Disk, Some("Full"));
    w.store(scheduler, worker, &[chunk(3)]);
    done(&mut w, &list[0], Err(Cause::Full));
    assert!(puts(&mut w).is_empty());
    let counted = stats(&w, Kind::Disk).puts;
    assert_eq!((counted["TierDown"], counted["Full"]), (2, 1));
    // it may have come back with less
    state(&mut w, Kind::Disk, None);
    ask(&mut w, scheduler, "r", &[4]);
    assert_eq!(look_up(&mut w, &[]).1, [4]);
    assert_eq!(leased(&w), 0);
    audit(&w);
}

#[test]
fn a_write_of_slots_that_changed_does_not_count() {
    let (mut w, scheduler, worker) = tiered(&[Kind::Disk]);
    w.store(scheduler, worker, &[chunk(1)]);
    let list = puts(&mut w);
    w.now.mono_ms += 60_001;
    ask(&mut w, scheduler, "r", &[1]);
    for job in w.digests() {
        w.digest_is(&job, [0xee; 16]);
    }
    audit(&w);
    done(&mut w, &list[0], Ok(Stored::New));
    assert_eq!(stats(&w, Kind::Disk).puts["Changed"], 1);
    audit(&w);
    release(&mut w, scheduler, "r");
    ask(&mut w, scheduler, "q", &[1]);
    assert_eq!(look_up(&mut w, &[]).1, [1], "it is not known to be there");
}

#[test]
fn bytes_that_a_tier_found_corrupt_are_checked() {
    let (mut w, scheduler, worker) = tiered(&[Kind::Disk]);
    let refs = w.store(scheduler, worker, &[chunk(1)]);
    let list = puts(&mut w);
    done(&mut w, &list[0], Err(Cause::Corrupt));
    let checks = w.digests();
    assert_eq!(checks.len(), 1);
    assert_eq!(checks[0].slot, refs[0].slot.get());
    audit(&w);
}

#[test]
fn chunks_of_a_domain_that_no_other_process_can_name_stay_in_memory() {
    let mut w = World::configured(config(&[Kind::Disk]));
    let worker = w.attach(Role::Worker, 1);
    let scheduler = w.attach(Role::Scheduler, 2);
    let mut random = register_scheduler();
    if let Some(hashing) = &mut random.hashing {
        hashing.random_root = true;
    }
    let _: RegisterReply = w.ask(worker, Op::Register, &register_worker());
    let _: RegisterReply = w.ask(scheduler, Op::Register, &random);
    state(&mut w, Kind::Disk, None);
    w.store(scheduler, worker, &[chunk(1)]);
    let (_, reply, partial) = ask(&mut w, scheduler, "r", &[1, 2]);
    assert!(!partial && orders(&mut w).is_empty());
    assert_eq!(reply.states, [R, A]);
}

#[test]
fn what_an_earlier_boot_left_is_not_written_again() {
    let (mut w, scheduler, worker) = tiered(&[Kind::Disk]);
    let granted = w.grant(scheduler, &[chunk(1)]).1;
    w.commit(worker, granted.region, &granted.refs);
    w.digest_all();
    assert_eq!(unpack(&granted.refs).unwrap().len(), 1);
    let table = w.core.engine().unwrap().table().clone();
    let mut later = World::configured_with(config(&[Kind::Disk]), table);
    state(&mut later, Kind::Disk, None);
    later.digest_all();
    assert!(orders(&mut later).is_empty());
    audit(&later);
}

#[test]
fn a_chunk_whose_fetch_was_cancelled_is_written_anew_in_case_the_tier_found_it_damaged() {
    let (mut w, scheduler, worker) = tiered(&[Kind::Disk]);
    ask(&mut w, scheduler, "a", &[1]);
    look_up(&mut w, &[1]);
    let fetching = fetches(&mut w);
    release(&mut w, scheduler, "a");
    assert!(matches!(orders(&mut w)[..], [Effect::CancelFetch { .. }]));
    w.store(scheduler, worker, &[chunk(1)]);
    let written = puts(&mut w);
    assert_eq!(written.len(), 1);
    done(&mut w, &written[0], Ok(Stored::New));
    land_as(&mut w, &fetching[0], Err(Cause::Corrupt));
    audit(&w);
}

#[test]
fn events_claim_what_the_disk_holds_until_a_lookup_does_not_find_it() {
    let (mut w, scheduler, worker) = tiered(&[Kind::Disk, Kind::Redis]);
    let poll = |cursor, snapshot| Events {
        cursor,
        wait_ms: 1_000,
        snapshot,
        ..Events::default()
    };
    let ask = |w: &mut World, body: Events| -> EventsReply { w.ask(scheduler, Op::Events, &body) };
    let told = |reply: &EventsReply| -> Vec<(String, String, Vec<u8>)> {
        let each = reply.events.iter();
        let mut all: Vec<_> = each
            .map(|e| (e.kind.clone(), e.tier.clone(), e.hash.clone()))
            .collect();
        all.sort();
        all
    };
    let event = |kind: &str, tier: &str, n: u8| (kind.into(), tier.into(), hash(n).0.to_vec());
    let none = ask(&mut w, poll(0, Some(0)));
    assert_eq!((told(&none), none.next), (vec![], None));

    w.store(scheduler, worker, &[chunk(1), chunk(2)]);
    for put in puts(&mut w) {
        done(&mut w, &put, Ok(Stored::New));
    }
    let since = Events {
        boot: none.boot,
        ..poll(none.cursor, None)
    };
    let first = ask(&mut w, since);
    assert_eq!(
        told(&first),
        [
            event("stored", "disk", 1),
            event("stored", "disk", 2),
            event("stored", "memory", 1),
            event("stored", "memory", 2),
        ],
        "Redis is shared and not claimed"
    );
    let memory = ask(&mut w, poll(0, Some(0)));
    let disk = ask(&mut w, poll(0, memory.next));
    assert_eq!(
        (told(&memory), told(&disk)),
        (told(&first)[2..].to_vec(), told(&first)[..2].to_vec())
    );
    assert_eq!(disk.next, None);

    assert_eq!(look_up(&mut w, &[1]), (Kind::Disk, vec![1]));
    let tag = w.say(scheduler, Op::Events, &poll(first.cursor, None), NO_FDS);
    w.pass(999);
    assert!(orders(&mut w).is_empty());
    w.pass(1);
    assert!(w.answer::<EventsReply>(tag).0.events.is_empty());
    assert_eq!(look_up(&mut w, &[1]).0, Kind::Disk);
    let gone = ask(&mut w, poll(first.cursor, None));
    assert_eq!(told(&gone), [event("removed", "disk", 2)]);

    state(&mut w, Kind::Disk, Some("Io"));
    let down = ask(&mut w, poll(gone.cursor, None));
    assert_eq!(told(&down), [("cleared".into(), "disk".into(), vec![])]);
    audit(&w);
}

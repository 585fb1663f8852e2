//! Fetches that fail, are cancelled, bounded, or overtaken by something else.

use super::*;
use crate::tier::Stored;

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
        let third = Effect::CancelFetch {
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
fn what_has_expired_by_every_clock_is_taken_away_and_written_anew() {
    const CLOCKS_DIFFER_S: u64 = 300;
    for (ago_s, goes) in [(CLOCKS_DIFFER_S - 1, false), (CLOCKS_DIFFER_S, true)] {
        for policy in [WritePolicy::WriteThrough, WritePolicy::None] {
            let mut config = config(&[Kind::Disk]);
            config.tiers[0].write = policy;
            let (mut w, scheduler, worker) = limited(config);
            ask(&mut w, scheduler, "r", &[1]);
            look_up(&mut w, &[1]);
            let fetching = fetches(&mut w);
            let expired = Object {
                expires_unix_s: w.now.unix_s - ago_s,
                ..object(&w, 1, 1)
            };
            land_as(&mut w, &fetching[0], Ok(expired));
            assert_eq!(stats(&w, Kind::Disk).fetches["Expired"], 1);
            let discards = goes && policy != WritePolicy::None;
            let discard = Effect::Discard {
                tier: Kind::Disk,
                name: object(&w, 1, 1).name(),
            };
            let expected = discards.then_some(discard);
            assert_eq!(
                orders(&mut w),
                Vec::from_iter(expected),
                "{ago_s} {policy:?}"
            );
            w.store(scheduler, worker, &[chunk(1)]);
            for order in orders(&mut w) {
                let Effect::Write(WriteJob { put, .. }) = order else {
                    panic!("{order:?}")
                };
                // it lies there still, or is new
                let stored = if discards {
                    Stored::New
                } else {
                    Stored::Already
                };
                let stored = Ok(stored);
                w.input(Input::Completed(Completion::Write { put, stored }));
            }
            let lacks = policy != WritePolicy::None && !discards;
            let unwritten: u64 = w.core.unwritten().iter().map(|u| u.chunks).sum();
            assert_eq!(unwritten, u64::from(lacks), "{ago_s} {policy:?}");
            audit(&w);
        }
    }
}

#[test]
fn what_a_later_build_wrote_is_a_miss_that_is_recomputed_and_not_read_again_at_once() {
    let (mut w, scheduler, _) = tiered(&[Kind::Disk]);
    let (tag, ..) = ask(&mut w, scheduler, "r", &[1]);
    look_up(&mut w, &[1]);
    let fetching = fetches(&mut w);
    land_as(&mut w, &fetching[0], Err(Cause::Foreign));
    assert_eq!(last(&mut w, tag).unwrap().0.states, [A]);
    assert_eq!(stats(&w, Kind::Disk).fetches["Foreign"], 1);
    ask(&mut w, scheduler, "q", &[1]);
    assert!(fetches(&mut w).is_empty());
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
    let cancel = Effect::CancelFetch {
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
                [Effect::CancelFetch { .. }, Effect::CancelLookup { .. }]
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
        w.digest_all();
        if looked_up {
            look_up(&mut w, &[2]);
        }
        last(&mut w, tag);
        w.pass(299);
        let ended = last(&mut w, tag).is_some_and(|(_, partial)| !partial);
        assert!(!ended, "{request}");
        w.pass(1);
        let (end, partial) = last(&mut w, tag).unwrap();
        assert!(!partial);
        assert_eq!(end.states, [R, A], "{request}");
        let ended = orders(&mut w);
        let cancelled = ended
            .iter()
            .filter(|o| matches!(o, Effect::CancelFetch { .. } | Effect::CancelLookup { .. }));
        assert_eq!(cancelled.count(), 1, "{ended:?}");
        audit(&w);
    }
}

#[test]
fn what_takes_longer_than_before_is_expected_to_take_as_long() {
    let (mut w, scheduler, _) = tiered(&[Kind::Disk]);
    ask(&mut w, scheduler, "a", &[1]);
    w.pass(700);
    let (_, reply, _) = ask(&mut w, scheduler, "b", &[2]);
    assert!(reply.pending_ms >= 700, "the lookup hangs");
    for order in orders(&mut w) {
        if let Effect::Lookup(LookupJob { lookup, .. }) = order {
            let present = Ok(vec![true]);
            w.input(Input::Completed(Completion::Lookup { lookup, present }));
        }
    }
    let fetching = fetches(&mut w);
    w.pass(900);
    let (_, reply, _) = ask(&mut w, scheduler, "c", &[1]);
    assert!((900..2_000).contains(&reply.pending_ms), "the fetch hangs");
    land(&mut w, &fetching[0]);
    audit(&w);
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
        [Effect::Lookup(LookupJob { lookup, names, .. })] => (*lookup, names.len()),
        other => panic!("{other:?}"),
    };
    state(&mut w, Kind::Disk, Some("Io"));
    let next = orders(&mut w);
    assert!(
        matches!(
            &next[..],
            [Effect::CancelLookup { .. }, Effect::Lookup(LookupJob { tier: Kind::S3, names, .. })] if names.len() == 1
        ),
        "{next:?}"
    );
    // what it says too late is not heard
    let present = Ok(vec![true; names]);
    w.input(Input::Completed(Completion::Lookup { lookup, present }));
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
    assert_eq!(look_up(&mut w, &[]), (Kind::S3, vec![2]));
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
    w.input(Input::Completed(Completion::Fetch {
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
    w.core.engine_mut().unwrap().want_events();
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
    let head = object(&w, 1, 1);
    let events = engine.ring().after(0, (head.model, head.layout)).events;
    assert_eq!(events.last().unwrap().block_hashes.len(), 4 * 32);
    assert_eq!(engine.memory.usage().chunks, 1);
    release(&mut w, scheduler, "r");
    w.pass(5_000);
    assert_eq!(w.core.engine().unwrap().memory.usage().chunks, 0);
    audit(&w);
}

#[test]
fn a_chunk_that_is_cleared_while_it_is_fetched_does_not_come_back() {
    let (mut w, scheduler, _) = tiered(&[Kind::Disk]);
    let (tag, ..) = ask(&mut w, scheduler, "r", &[1]);
    look_up(&mut w, &[1]);
    let fetching = fetches(&mut w);
    forget(&mut w);
    audit(&w);
    land(&mut w, &fetching[0]);
    assert_eq!(last(&mut w, tag).unwrap().0.states, [A]);
    assert_eq!(w.core.engine().unwrap().memory.usage().chunks, 0);
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

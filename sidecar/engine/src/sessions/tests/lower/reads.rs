//! What lower tiers are asked and give when all goes well.

use super::*;

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
fn a_hit_that_had_to_be_checked_is_told_while_a_fetch_goes_on() {
    let (mut w, scheduler, worker) = tiered(&[Kind::Disk]);
    w.store(scheduler, worker, &[chunk(1)]);
    let table = w.core.engine().unwrap().table().clone();
    let mut w = World::configured_with(config(&[Kind::Disk]), table);
    let (scheduler, _) = w.instance();
    state(&mut w, Kind::Disk, None);
    w.digests();
    let (tag, reply, partial) = ask(&mut w, scheduler, "r", &[1, 2]);
    assert!(partial);
    assert_eq!((reply.states, reply.tiers), (vec![P, P], vec![1, 2]));
    look_up(&mut w, &[2]);
    let fetching = fetches(&mut w);
    last(&mut w, tag);
    w.digest_all();
    w.pass(20);
    let (news, partial) = last(&mut w, tag).unwrap();
    assert!(partial);
    assert_eq!(news.states, [R, P]);
    land(&mut w, &fetching[0]);
    assert_eq!(last(&mut w, tag).unwrap().0.states, [R, R]);
    audit(&w);
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
        Effect::Lookup(LookupJob {
            lookup,
            tier,
            names,
            ..
        }),
        Effect::Fetch(FetchJob { .. }),
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
    w.input(Input::Completed(Completion::Lookup { lookup, present }));
    let more = fetches(&mut w);
    let from: Vec<_> = more.iter().map(|f| (f.tier, f.chunk)).collect();
    assert_eq!(from, [(Kind::Disk, 3), (Kind::S3, 2)]);
    audit(&w);
}

#[test]
fn a_prefix_ends_where_no_tier_has_the_next_chunk() {
    let (mut w, scheduler, worker) = tiered(&[Kind::Disk]);
    w.store(scheduler, worker, &[chunk(1), chunk(2), chunk(3)]);
    forget(&mut w);
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

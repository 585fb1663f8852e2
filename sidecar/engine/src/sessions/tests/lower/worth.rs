//! What is left in a tier although it is there: too little of it, or more than computing is worth.

use super::*;
use crate::config::LoadOrRecompute;

/// With a least gain of two chunks.
fn at_least_two(tiers: &[Kind]) -> (World, ConnId, ConnId) {
    let mut config = config(tiers);
    config.settings.min_load_tokens = 128;
    limited(config)
}

fn choices(w: &World) -> Vec<(&'static str, u64)> {
    let loads = w.core.engine().unwrap().loads();
    loads.choices.iter().map(|(k, v)| (*k, *v)).collect()
}

fn outcomes(w: &World) -> Vec<(&'static str, u64)> {
    let loads = w.core.engine().unwrap().loads();
    loads.outcomes.iter().map(|(k, v)| (*k, *v)).collect()
}

#[test]
fn a_tier_that_adds_too_little_is_left_alone_by_name() {
    let (mut w, scheduler, worker) = at_least_two(&[Kind::Disk]);
    w.store(scheduler, worker, &[chunk(1)]);
    let (tag, _, partial) = ask(&mut w, scheduler, "r", &[1, 2, 3]);
    assert!(partial);
    look_up(&mut w, &[2]);
    assert!(orders(&mut w).is_empty());
    let (end, partial) = last(&mut w, tag).unwrap();
    assert!(!partial);
    assert_eq!((end.states, end.tiers), (vec![R, P, A], vec![1, 2, 0]));
    assert_eq!(end.declined, "min_load_tokens");
    assert_eq!(choices(&w), [("min_load_tokens", 1)]);
    audit(&w);
    w.pass(1_001);
    ask(&mut w, scheduler, "q", &[2, 3]);
    look_up(&mut w, &[3]);
    assert_eq!(chunks(&fetches(&mut w)), [2, 3]);
    audit(&w);
}

#[test]
fn a_chunk_that_joins_others_in_memory_adds_these_too() {
    let (mut w, scheduler, _) = at_least_two(&[Kind::Disk]);
    let ask = |w: &mut World, request: &str| {
        let asked = Probe {
            local_tokens: Some(64),
            ..probe(request, &[1, 2, 3])
        };
        w.say(scheduler, Op::Probe, &asked, NO_FDS);
        look_up(w, &[2, 3])
    };
    ask(&mut w, "r");
    let fetching = fetches(&mut w);
    land(&mut w, &fetching[1]);
    land_as(&mut w, &fetching[0], Err(Cause::Missing));
    w.pass(1_001);
    assert_eq!(ask(&mut w, "q"), (Kind::Disk, vec![2]));
    assert_eq!(chunks(&fetches(&mut w)), [2], "3 is in memory");
    audit(&w);
}

#[test]
fn what_a_farther_tier_adds_counts_too() {
    let (mut w, scheduler, _) = at_least_two(&[Kind::Disk, Kind::S3]);
    let (tag, ..) = ask(&mut w, scheduler, "r", &[1, 2, 3]);
    look_up(&mut w, &[1]);
    last(&mut w, tag);
    assert_eq!(look_up(&mut w, &[2]), (Kind::S3, vec![2, 3]));
    let fetching = fetches(&mut w);
    assert_eq!(chunks(&fetching), [1, 2]);
    for fetch in &fetching {
        land(&mut w, fetch);
    }
    let (end, _) = last(&mut w, tag).unwrap();
    assert_eq!((end.states, end.declined.as_str()), (vec![R, R, A], ""));
    audit(&w);
}

#[test]
fn a_tier_is_asked_for_the_rest_of_what_was_begun() {
    let (mut w, scheduler, _) = at_least_two(&[Kind::Disk, Kind::S3]);
    let (tag, ..) = ask(&mut w, scheduler, "r", &[1, 2]);
    look_up(&mut w, &[1, 2]);
    let near = fetches(&mut w);
    land(&mut w, &near[0]);
    land_as(&mut w, &near[1], Err(Cause::Io));
    look_up(&mut w, &[2]);
    let far = fetches(&mut w);
    assert_eq!(chunks(&far), [2], "one chunk alone, but of a load of two");
    land(&mut w, &far[0]);
    assert_eq!(last(&mut w, tag).unwrap().0.states, [R, R]);
    audit(&w);
}

#[test]
fn a_cap_of_the_request_counts_before_the_least() {
    let (mut w, scheduler, _) = at_least_two(&[Kind::Disk]);
    let capped = Probe {
        max_load_tokens: Some(127),
        ..probe("r", &[1, 2])
    };
    let tag = w.say(scheduler, Op::Probe, &capped, NO_FDS);
    look_up(&mut w, &[1, 2]);
    assert!(orders(&mut w).is_empty());
    assert_eq!(last(&mut w, tag).unwrap().0.declined, "min_load_tokens");
}

/// Lets a tier be seen to take so long, by chunks that nobody else asks for. The first tier that is asked has them.
fn taught(w: &mut World, scheduler: ConnId, lookups: usize, ms: u64, chunks: [u8; 3]) {
    for n in chunks {
        ask(w, scheduler, "teacher", &[n]);
        for _ in 1..lookups {
            look_up(w, &[]);
        }
        look_up(w, &[n]);
        let fetching = fetches(w);
        w.pass(ms);
        land(w, &fetching[0]);
        release(w, scheduler, "teacher");
        w.out.clear();
    }
}

fn ask_at(w: &mut World, scheduler: ConnId, request: &str, list: &[u8], speed: u64) -> u64 {
    let asked = Probe {
        prefill_tokens_per_s: speed,
        ..probe(request, list)
    };
    w.say(scheduler, Op::Probe, &asked, NO_FDS)
}

#[test]
fn what_is_computed_quicker_is_not_fetched() {
    let (mut w, scheduler, _) = tiered(&[Kind::Disk]);
    taught(&mut w, scheduler, 1, 1_000, [7, 8, 9]);
    assert_eq!(choices(&w), [("unknown", 3)], "nothing was known");
    // 128 tokens: 0.1 s to compute, or 1.5 s to load
    let tag = ask_at(&mut w, scheduler, "quick", &[1, 2], 1_000);
    look_up(&mut w, &[1, 2]);
    assert!(orders(&mut w).is_empty());
    let (end, partial) = last(&mut w, tag).unwrap();
    assert!(!partial);
    assert_eq!(
        (end.states, end.declined.as_str()),
        (vec![P, P], "recompute")
    );
    assert_eq!(choices(&w), [("recompute", 1), ("unknown", 3)]);
    audit(&w);
    // 12 s to compute
    let tag = ask_at(&mut w, scheduler, "slow", &[1, 2], 10);
    let fetching = fetches(&mut w);
    assert_eq!(chunks(&fetching), [1, 2]);
    w.pass(1_500);
    for fetch in &fetching {
        land(&mut w, fetch);
    }
    assert_eq!(last(&mut w, tag).unwrap().0.states, [R, R]);
    assert!(choices(&w).contains(&("load", 1)));
    assert!(outcomes(&w).contains(&("quicker", 1)));
    let loads = w.core.engine().unwrap().loads();
    assert_eq!(loads.took_us, 1_500_000);
    assert!((1_400_000..1_600_000).contains(&loads.expected_us));
    audit(&w);
}

#[test]
fn where_nothing_is_known_or_wanted_to_be_it_is_fetched() {
    for (speed, config, idle_ms) in [
        (0, LoadOrRecompute::Auto, 0),
        (1_000, LoadOrRecompute::AlwaysLoad, 0),
        (1_000, LoadOrRecompute::Auto, 30_001),
    ] {
        let mut made = self::config(&[Kind::Disk]);
        made.load_or_recompute = config;
        let (mut w, scheduler, _) = limited(made);
        taught(&mut w, scheduler, 1, 1_000, [7, 8, 9]);
        w.pass(idle_ms);
        ask_at(&mut w, scheduler, "r", &[1], speed);
        look_up(&mut w, &[1]);
        assert_eq!(chunks(&fetches(&mut w)), [1], "{speed} {config:?}");
        audit(&w);
    }
}

#[test]
fn the_longest_prefix_is_fetched_that_is_loaded_quicker_than_computed() {
    let (mut w, scheduler, _) = tiered(&[Kind::Disk, Kind::S3]);
    taught(&mut w, scheduler, 1, 1, [4, 5, 6]);
    taught(&mut w, scheduler, 2, 1_000, [7, 8, 9]);
    let tag = ask_at(&mut w, scheduler, "r", &[1, 2, 3], 1_000);
    look_up(&mut w, &[1, 2]);
    let [
        Effect::Lookup(LookupJob { lookup, .. }),
        Effect::Fetch(FetchJob { .. }),
        Effect::Fetch(FetchJob { .. }),
    ] = orders(&mut w)[..]
    else {
        panic!("a lookup of what is farther, and fetches of what is near")
    };
    let present = Ok(vec![true]);
    w.input(Input::Completed(Completion::Lookup { lookup, present }));
    assert!(orders(&mut w).is_empty());
    w.pass(100);
    let (news, _) = last(&mut w, tag).unwrap();
    assert_eq!((news.states, news.tiers), (vec![P, P, P], vec![2, 2, 4]));
    assert_eq!(news.declined, "recompute");
    audit(&w);
}

#[test]
fn what_is_expected_after_the_wait_is_not_fetched() {
    let (mut w, scheduler, _) = tiered(&[Kind::Disk]);
    taught(&mut w, scheduler, 1, 1_000, [7, 8, 9]);
    // four chunks take 2.5 s, or 26 s to compute
    let tag = ask_at(&mut w, scheduler, "r", &[1, 2, 3, 4], 10);
    look_up(&mut w, &[1, 2, 3, 4]);
    let fetching = fetches(&mut w);
    assert_eq!(chunks(&fetching), [1, 2, 3]);
    w.pass(1_900);
    for fetch in &fetching {
        land(&mut w, fetch);
    }
    let (end, partial) = last(&mut w, tag).unwrap();
    assert!(!partial);
    assert_eq!(
        (end.states, end.declined.as_str()),
        (vec![R, R, R, P], "recompute")
    );
    audit(&w);
}

/// A request whose fetches end without a byte, after so long. Returns false if nothing is fetched for it.
fn nothing_comes(w: &mut World, scheduler: ConnId, list: &[u8], ms: u64, leaves: bool) -> bool {
    let tag = ask_at(w, scheduler, "late", list, 10);
    look_up(w, list);
    let fetching = fetches(w);
    w.pass(ms);
    if leaves {
        release(w, scheduler, "late");
    }
    let cancelled = orders(w);
    assert!(
        cancelled
            .iter()
            .all(|o| matches!(o, Effect::CancelFetch { .. }))
    );
    assert_eq!(cancelled.len(), fetching.len());
    for fetch in &fetching {
        land_as(w, fetch, Err(Cause::Timeout));
    }
    if !leaves {
        let (end, partial) = last(w, tag).unwrap();
        let declined = if fetching.is_empty() { "recompute" } else { "" };
        assert_eq!((partial, end.declined.as_str()), (false, declined));
    }
    release(w, scheduler, "late");
    audit(w);
    !fetching.is_empty()
}

#[test]
fn a_tier_that_delivers_nothing_in_time_is_left_alone_for_half_a_minute() {
    let (mut w, scheduler, _) = tiered(&[Kind::S3]);
    let fetched = |w: &mut World, list: &[u8]| nothing_comes(w, scheduler, list, 2_000, false);
    for list in [[1, 2, 3], [4, 5, 6], [7, 8, 9]] {
        assert!(fetched(&mut w, &list), "nothing is known");
    }
    // 6.4 s to compute
    for list in [&[1][..], &[4, 5, 6]] {
        assert!(!fetched(&mut w, list));
    }
    w.pass(30_000);
    assert!(fetched(&mut w, &[7, 8, 9]), "one request tries again");
    assert!(!fetched(&mut w, &[2, 3]));
}

#[test]
fn requests_that_leave_early_say_nothing_of_a_tier() {
    let (mut w, scheduler, _) = tiered(&[Kind::S3]);
    for list in [[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 2, 3], [4, 5, 6]] {
        assert!(nothing_comes(&mut w, scheduler, &list, 1_999, true));
    }
}

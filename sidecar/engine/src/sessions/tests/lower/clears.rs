//! Clear: what tiers hold is not served any more, from that moment on.

use super::*;
use crate::Domains;
use crate::tier::Stored;

/// Takes the only order, which must be a clear.
fn clear_ordered(w: &mut World) -> (Kind, Option<Domains>) {
    let [Effect::Clear(ClearJob { tier, domains })] =
        <[Effect; 1]>::try_from(orders(w)).expect("one order")
    else {
        panic!("no clear")
    };
    (tier, domains)
}

fn clear(w: &mut World) {
    w.core.clear(w.now, &mut w.out).unwrap();
}

fn cleared(w: &mut World, tier: Kind, removed: Result<u64, Cause>) {
    w.input(Input::Completed(Completion::Clear { tier, removed }));
}

#[test]
fn a_tier_is_not_asked_before_it_has_removed_what_it_holds() {
    let (mut w, scheduler, worker) = tiered(&[Kind::Disk]);
    w.store(scheduler, worker, &[chunk(1)]);
    assert_eq!(w.core.clear(w.now, &mut w.out).unwrap(), 1);
    assert_eq!(clear_ordered(&mut w), (Kind::Disk, None));
    let tier = &w.core.status(w.now).tiers[1];
    assert_eq!(tier.reason, "Clearing");
    assert_eq!(w.states(scheduler, "r", &[1, 2]), [A, A]);
    assert!(orders(&mut w).is_empty());
    audit(&w);
    cleared(&mut w, Kind::Disk, Ok(7));
    assert_eq!(stats(&w, Kind::Disk).cleared_objects, 7);
    assert_eq!(w.core.status(w.now).tiers[1].reason, "");
    ask(&mut w, scheduler, "q", &[1]);
    assert_eq!(look_up(&mut w, &[]), (Kind::Disk, vec![1]));
    audit(&w);
}

#[test]
fn of_a_tier_that_others_share_only_what_is_served_here_goes() {
    let (mut w, ..) = tiered(&[Kind::S3]);
    clear(&mut w);
    let (tier, domains) = clear_ordered(&mut w);
    assert_eq!((tier, domains), (Kind::S3, Some([identity(&w)].into())));
}

#[test]
fn what_is_on_its_way_from_a_tier_is_not_readable_after_a_clear() {
    let (mut w, scheduler, _) = tiered(&[Kind::Disk]);
    let (looking, ..) = ask(&mut w, scheduler, "a", &[3]);
    let Effect::Lookup(LookupJob { lookup, .. }) = orders(&mut w)[0] else {
        panic!("no lookup")
    };
    let (fetching, ..) = ask(&mut w, scheduler, "b", &[1]);
    look_up(&mut w, &[1]);
    let fetch = fetches(&mut w);
    clear(&mut w);
    for order in orders(&mut w) {
        assert!(!matches!(
            order,
            Effect::Lookup(LookupJob { .. }) | Effect::Fetch(FetchJob { .. })
        ));
    }
    let present = Ok(vec![true]);
    w.input(Input::Completed(Completion::Lookup { lookup, present }));
    land(&mut w, &fetch[0]);
    cleared(&mut w, Kind::Disk, Ok(2));
    for tag in [looking, fetching] {
        let (end, partial) = last(&mut w, tag).unwrap();
        assert!(!partial);
        assert_eq!(end.states, [A]);
    }
    assert_eq!(row(&w, &fetch[0].targets[0]), FREE);
    assert!(orders(&mut w).is_empty());
    audit(&w);
}

#[test]
fn what_is_being_written_ends_before_the_removal_begins() {
    let mut config = config(&[Kind::Disk]);
    config.tiers[0].write = WritePolicy::WriteThrough;
    let (mut w, scheduler, worker) = limited(config);
    ask(&mut w, scheduler, "r", &[9]);
    look_up(&mut w, &[]);
    w.store(scheduler, worker, &[chunk(1)]);
    let [Effect::Write(WriteJob { put, .. })] = orders(&mut w)[..] else {
        panic!("no put")
    };
    clear(&mut w);
    assert!(orders(&mut w).is_empty());
    let stored = Ok(Stored::New);
    w.input(Input::Completed(Completion::Write { put, stored }));
    assert_eq!(clear_ordered(&mut w).0, Kind::Disk);
    audit(&w);
}

#[test]
fn a_removal_that_fails_is_tried_again_until_it_works() {
    let (mut w, scheduler, _) = tiered(&[Kind::Disk]);
    clear(&mut w);
    clear_ordered(&mut w);
    clear(&mut w);
    assert!(orders(&mut w).is_empty(), "one at a time");
    let reason = |w: &World| w.core.status(w.now).tiers[1].reason.clone();
    assert_eq!(reason(&w), "Clearing");
    cleared(&mut w, Kind::Disk, Err(Cause::Denied));
    assert_eq!(reason(&w), "Denied");
    w.pass(4_999);
    assert!(orders(&mut w).is_empty());
    assert_eq!(w.states(scheduler, "r", &[1]), [A]);
    w.pass(1);
    clear_ordered(&mut w);
    assert_eq!(reason(&w), "Denied", "while it is tried again");
    state(&mut w, Kind::Disk, Some("Io"));
    cleared(&mut w, Kind::Disk, Err(Cause::Io));
    w.pass(60_000);
    assert!(orders(&mut w).is_empty(), "it is down");
    state(&mut w, Kind::Disk, None);
    clear_ordered(&mut w);
    cleared(&mut w, Kind::Disk, Ok(0));
    let clears = stats(&w, Kind::Disk).clears;
    assert_eq!(
        (clears["Denied"], clears["Io"], clears["cleared"]),
        (1, 1, 1)
    );
    assert_eq!(reason(&w), "");
    ask(&mut w, scheduler, "q", &[1]);
    look_up(&mut w, &[1]);
    audit(&w);
}

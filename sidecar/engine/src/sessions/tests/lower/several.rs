//! Several tiers: what one does not give is asked of the next, and what cannot be used is not asked for again.

use super::*;
use crate::tier::Stored;

const ALL: [Kind; 3] = [Kind::Disk, Kind::Redis, Kind::S3];

/// The only fetch that was ordered.
fn fetch(w: &mut World) -> Fetch {
    let [fetch] = <[Fetch; 1]>::try_from(fetches(w)).expect("one fetch");
    fetch
}

#[test]
fn what_one_tier_does_not_give_is_asked_of_the_next() {
    for failure in [Cause::Corrupt, Cause::Missing, Cause::Timeout, Cause::Io] {
        let (mut w, scheduler, _) = tiered(&ALL);
        let (tag, ..) = ask(&mut w, scheduler, "r", &[1, 2]);
        look_up(&mut w, &[1, 2]);
        let fetching = fetches(&mut w);
        assert_eq!(chunks(&fetching), [1, 2]);
        land(&mut w, &fetching[0]);
        last(&mut w, tag);
        land_as(&mut w, &fetching[1], Err(failure));
        assert_eq!(look_up(&mut w, &[]), (Kind::Redis, vec![2]));
        assert_eq!(look_up(&mut w, &[2]), (Kind::S3, vec![2]));
        audit(&w);
        let far = fetch(&mut w);
        assert_eq!((far.tier, far.chunk), (Kind::S3, 2));
        land(&mut w, &far);
        let (end, partial) = last(&mut w, tag).unwrap();
        assert!(!partial);
        assert_eq!((end.states, end.tiers), (vec![R, R], vec![2, 4]));
        audit(&w);
    }
}

#[test]
fn what_waits_behind_a_chunk_that_comes_from_farther_goes_on_coming() {
    let (mut w, scheduler, _) = tiered(&[Kind::Disk, Kind::S3]);
    let (tag, ..) = ask(&mut w, scheduler, "r", &[1, 2, 3]);
    look_up(&mut w, &[1, 2, 3]);
    let near = fetches(&mut w);
    land_as(&mut w, &near[0], Err(Cause::Corrupt));
    look_up(&mut w, &[1]);
    let far = fetch(&mut w);
    for fetch in [&near[1], &near[2], &far] {
        land(&mut w, fetch);
    }
    let (end, partial) = last(&mut w, tag).unwrap();
    assert!(!partial);
    assert_eq!((end.states, end.tiers), (vec![R, R, R], vec![4, 2, 2]));
    // where no tier gives it, nothing behind it is waited for
    let (tag, ..) = ask(&mut w, scheduler, "q", &[4, 5]);
    look_up(&mut w, &[4, 5]);
    let near = fetches(&mut w);
    land_as(&mut w, &near[0], Err(Cause::Corrupt));
    look_up(&mut w, &[]);
    let ended = orders(&mut w);
    assert!(
        matches!(ended[..], [Effect::CancelFetch { .. }]),
        "{ended:?}"
    );
    assert_eq!(last(&mut w, tag).unwrap().0.states, [A, A]);
    audit(&w);
}

#[test]
fn a_tier_that_goes_down_leaves_its_chunks_to_the_next() {
    let mut config = config(&[Kind::Disk, Kind::S3]);
    config.tiers[0].fetches_max = 1;
    let (mut w, scheduler, _) = limited(config);
    ask(&mut w, scheduler, "r", &[1, 2]);
    look_up(&mut w, &[1, 2]);
    assert_eq!(chunks(&fetches(&mut w)), [1]);
    state(&mut w, Kind::Disk, Some("Io"));
    assert_eq!(look_up(&mut w, &[2]), (Kind::S3, vec![2]));
    assert_eq!(fetch(&mut w).tier, Kind::S3);
    audit(&w);
}

#[test]
fn two_that_wait_for_a_chunk_that_did_not_come_share_the_next_fetch_too() {
    let (mut w, scheduler, _) = tiered(&[Kind::Disk, Kind::S3]);
    let (one, ..) = ask(&mut w, scheduler, "a", &[1]);
    look_up(&mut w, &[1]);
    let near = fetch(&mut w);
    let (other, ..) = ask(&mut w, scheduler, "b", &[1]);
    last(&mut w, one);
    last(&mut w, other);
    land_as(&mut w, &near, Err(Cause::Io));
    let lookups = orders(&mut w);
    assert_eq!(lookups.len(), 2, "each asks: {lookups:?}");
    for order in lookups {
        if let Effect::Lookup(LookupJob { lookup, .. }) = order {
            let present = Ok(vec![true]);
            w.input(Input::Completed(Completion::Lookup { lookup, present }));
        }
    }
    let far = fetch(&mut w);
    land(&mut w, &far);
    for tag in [one, other] {
        assert_eq!(last(&mut w, tag).unwrap().0.states, [R]);
    }
    audit(&w);
}

#[test]
fn a_corrupt_object_is_not_asked_for_again_until_it_was_written_anew() {
    let mut config = config(&[Kind::Disk, Kind::S3]);
    config.tiers[0].write = WritePolicy::WriteThrough;
    let (mut w, scheduler, _) = limited(config);
    ask(&mut w, scheduler, "r", &[1]);
    look_up(&mut w, &[1]);
    let near = fetch(&mut w);
    land_as(&mut w, &near, Err(Cause::Corrupt));
    look_up(&mut w, &[1]);
    let far = fetch(&mut w);
    land(&mut w, &far);
    // what came from the far tier is offered to the nearer one, which still has the wrong bytes
    let promote = |w: &mut World| match &orders(w)[..] {
        [Effect::Write(WriteJob { put, tier, .. })] => {
            assert_eq!(*tier, Kind::Disk);
            *put
        }
        other => panic!("{other:?}"),
    };
    let forget = |w: &mut World| {
        release(w, scheduler, "r");
        super::forget(w);
    };
    let put = promote(&mut w);
    let stored = Ok(Stored::Already);
    w.input(Input::Completed(Completion::Write { put, stored }));
    forget(&mut w);
    ask(&mut w, scheduler, "r", &[1]);
    let again = fetch(&mut w);
    assert_eq!(again.tier, Kind::S3, "the disk is not asked");
    land(&mut w, &again);
    let put = promote(&mut w);
    let stored = Ok(Stored::New);
    w.input(Input::Completed(Completion::Write { put, stored }));
    forget(&mut w);
    ask(&mut w, scheduler, "r", &[1]);
    assert_eq!(fetch(&mut w).tier, Kind::Disk);
    audit(&w);
}

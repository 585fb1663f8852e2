//! What tiers below memory are given, and given again.

use super::rig::*;
use crate::config::{Config, TierConfig, WritePolicy};
use crate::tier::{Cause, Kind, Stored};
use crate::{Completion, Effect, WriteJob};
use kvcachepool_protocol::domain::{Descriptor, Domain};
use kvcachepool_protocol::key::{LayoutId, ModelId};
use kvcachepool_protocol::object::{Element, Form};

/// Of each chunk.
const CHUNK_BYTES: u64 = 64 << 10;

/// An engine with Redis and S3 behind it that have not answered yet.
pub(super) fn with_tiers() -> Rig {
    with_tiers_as(|_| {})
}

/// The same with other bounds.
pub(super) fn with_tiers_as(change: impl Fn(&mut TierConfig)) -> Rig {
    let mut tiers = [Kind::Redis, Kind::S3].map(TierConfig::new);
    tiers.iter_mut().for_each(change);
    let config = Config {
        tiers: tiers.to_vec(),
        ..Config::default()
    };
    let mut rig = Rig::new(4 << 20, config, plan(1, false, 16 << 10));
    let empty = Descriptor::parse("{}").unwrap();
    let domain = Domain {
        model_id: ModelId::default(),
        layout_id: rig.layout,
        object_layout: LayoutId([9; 32]),
        portable: None,
        model: empty.clone(),
        layout: empty,
        plan: rig.plan.clone(),
        form: Form::flat(Element::F32),
        not_shareable: None,
    };
    rig.engine.learn(&domain, "vllm", "0.32.0");
    rig
}

pub(super) fn is_now(rig: &mut Rig, tier: Kind, down: Option<&str>) {
    let down = down.map(str::to_owned);
    rig.engine
        .completed(rig.now, Completion::Tier { tier, down });
}

/// Puts that were ordered since: number, tier, and whether it is to be looked up first.
pub(super) fn puts(rig: &mut Rig) -> Vec<(u64, Kind, bool)> {
    let effects = rig.engine.take_effects(rig.now);
    let put = effects.iter().filter_map(|order| match order {
        Effect::Write(WriteJob {
            put,
            tier,
            look_first,
            ..
        }) => Some((*put, *tier, *look_first)),
        _ => None,
    });
    put.collect()
}

pub(super) fn end(rig: &mut Rig, put: u64, stored: Result<Stored, Cause>) {
    rig.engine
        .completed(rig.now, Completion::Write { put, stored });
}

/// Stores a chunk, which only Redis is up to take; the number of its put.
pub(super) fn ordered(rig: &mut Rig, path: u8) -> u64 {
    is_now(rig, Kind::Redis, None);
    rig.store(&[path]);
    let [(put, Kind::Redis, false)] = puts(rig)[..] else {
        panic!("S3 is not up")
    };
    put
}

/// Redis goes down, and is back at once.
pub(super) fn fails_over(rig: &mut Rig) {
    is_now(rig, Kind::Redis, Some("Unreachable"));
    is_now(rig, Kind::Redis, None);
}

#[test]
fn a_chunk_that_a_tier_did_not_take_is_offered_to_it_when_a_request_comes_back() {
    let mut rig = with_tiers();
    is_now(&mut rig, Kind::S3, None);
    is_now(&mut rig, Kind::Redis, Some("Unreachable"));
    rig.store(&[1]);
    let [(put, Kind::S3, false)] = puts(&mut rig)[..] else {
        panic!("Redis is down")
    };
    end(&mut rig, put, Ok(Stored::New));
    rig.read(&[1]);
    assert_eq!(puts(&mut rig), [], "it still is");
    is_now(&mut rig, Kind::Redis, None);
    assert_eq!(puts(&mut rig), [], "nobody came back for it");
    rig.read(&[1]);
    let [(put, Kind::Redis, true)] = puts(&mut rig)[..] else {
        panic!("once, to the tier that lacks it, which may have it from somebody else")
    };
    rig.read(&[1]);
    assert_eq!(puts(&mut rig), [], "it is on its way");
    end(&mut rig, put, Ok(Stored::Already));
    rig.read(&[1]);
    assert_eq!(puts(&mut rig), [], "it is there");
    rig.check();
}

#[test]
fn what_a_tier_refuses_for_now_is_offered_again_and_what_it_will_never_take_is_not() {
    for (cause, again) in [
        (Cause::Timeout, true),
        (Cause::BreakerOpen, true),
        (Cause::Denied, true),
        (Cause::Shape, false),
        (Cause::Foreign, false),
    ] {
        let mut rig = with_tiers();
        let put = ordered(&mut rig, 1);
        end(&mut rig, put, Err(cause));
        assert_eq!(puts(&mut rig), [], "{cause:?}");
        rig.now.mono_ms += 30_000;
        rig.read(&[1]);
        assert_eq!(puts(&mut rig).len(), usize::from(again), "{cause:?}");
        rig.check();
    }
}

#[test]
fn what_a_tier_may_have_lost_is_looked_for_when_a_request_comes_back() {
    let mut rig = with_tiers();
    let put = ordered(&mut rig, 1);
    end(&mut rig, put, Ok(Stored::New));
    fails_over(&mut rig);
    rig.read(&[1]);
    let [(_, Kind::Redis, true)] = puts(&mut rig)[..] else {
        panic!("it may have come back with less")
    };
    rig.check();
}

#[test]
fn a_tier_that_refuses_everything_is_left_alone_for_a_while() {
    let mut rig = with_tiers();
    let put = ordered(&mut rig, 1);
    end(&mut rig, put, Err(Cause::Full));
    for _ in 0..10 {
        rig.now.mono_ms += 2_000;
        rig.read(&[1]);
        assert_eq!(puts(&mut rig), []);
    }
    // What it never saw is tried.
    rig.store(&[2]);
    let [(put, Kind::Redis, false)] = puts(&mut rig)[..] else {
        panic!("it may have room")
    };
    end(&mut rig, put, Ok(Stored::New));
    rig.now.mono_ms += 10_000;
    rig.read(&[1]);
    assert_eq!(puts(&mut rig).len(), 1, "after 30 s");
    // Back after it was down it is another one.
    let mut rig = with_tiers();
    let put = ordered(&mut rig, 1);
    end(&mut rig, put, Err(Cause::Full));
    fails_over(&mut rig);
    rig.read(&[1]);
    assert_eq!(puts(&mut rig).len(), 1);
    rig.check();
}

#[test]
fn what_a_tier_says_to_have_taken_while_it_went_down_is_looked_for() {
    let mut rig = with_tiers();
    let put = ordered(&mut rig, 1);
    is_now(&mut rig, Kind::Redis, Some("Unreachable"));
    end(&mut rig, put, Ok(Stored::New));
    is_now(&mut rig, Kind::Redis, None);
    rig.read(&[1]);
    let [(_, Kind::Redis, true)] = puts(&mut rig)[..] else {
        panic!("another one may have its place")
    };
    rig.check();
}

#[test]
fn what_is_offered_again_takes_no_place_from_what_was_not_offered_yet() {
    let mut rig = with_tiers_as(|tier| {
        tier.puts_max = 1;
        tier.put_queue_bytes_max = 2 * CHUNK_BYTES;
    });
    is_now(&mut rig, Kind::Redis, Some("Unreachable"));
    for path in 1..=3 {
        rig.store(&[path]);
    }
    assert_eq!(puts(&mut rig), [], "it is down");
    let first = ordered(&mut rig, 4);
    rig.store(&[5]);
    for path in 1..=3 {
        rig.read(&[path]);
    }
    end(&mut rig, first, Ok(Stored::New));
    let [(second, Kind::Redis, false)] = puts(&mut rig)[..] else {
        panic!("what nobody has but this memory goes first")
    };
    end(&mut rig, second, Ok(Stored::New));
    let [(third, Kind::Redis, true)] = puts(&mut rig)[..] else {
        panic!("there was room for one more")
    };
    end(&mut rig, third, Ok(Stored::Already));
    assert_eq!(puts(&mut rig), [], "there was none for the others");
    rig.read(&[2]);
    assert_eq!(puts(&mut rig).len(), 1, "now there is");
    let refused = &rig.engine.tiers().next().unwrap().stats.puts;
    assert_eq!(refused.get("QueueFull"), None);
    rig.check();
}

#[test]
fn a_budget_is_not_used_up_by_what_is_there() {
    let mut rig = with_tiers();
    let put = ordered(&mut rig, 1);
    end(&mut rig, put, Ok(Stored::New));
    fails_over(&mut rig);
    rig.read(&[1]);
    let [(put, Kind::Redis, true)] = puts(&mut rig)[..] else {
        panic!("it may have come back with less")
    };
    end(&mut rig, put, Ok(Stored::Already));
    assert_eq!(rig.engine.writes.stats.bytes, CHUNK_BYTES);
    rig.check();
}

#[test]
fn what_somebody_else_wrote_before_it_was_stored_here_is_looked_for_when_a_request_comes_back() {
    let mut rig = with_tiers();
    let put = ordered(&mut rig, 1);
    end(&mut rig, put, Ok(Stored::New));
    rig.engine.memory.clear();
    assert!(rig.store(&[1]));
    assert_eq!(puts(&mut rig), [], "it was there a moment ago");
    rig.read(&[1]);
    assert_eq!(puts(&mut rig), [], "and is");
    rig.now.mono_ms += 60_000;
    rig.read(&[1]);
    let [(_, Kind::Redis, true)] = puts(&mut rig)[..] else {
        panic!("Redis may have dropped it since")
    };
    rig.check();
}

#[test]
fn what_is_stored_anew_while_its_name_is_being_written_is_written_where_that_fails() {
    for (stored, again) in [
        (Err(Cause::Timeout), true),
        (Err(Cause::Shape), true),
        (Ok(Stored::New), false),
    ] {
        let mut rig = with_tiers();
        let put = ordered(&mut rig, 1);
        rig.engine.memory.clear();
        assert!(rig.store(&[1]));
        assert_eq!(puts(&mut rig), [], "it is on its way");
        end(&mut rig, put, stored);
        assert_eq!(puts(&mut rig).len(), usize::from(again), "{stored:?}");
        rig.check();
    }
}

#[test]
fn one_of_several_servers_that_refuses_keeps_nothing_from_the_others() {
    let mut rig = with_tiers();
    let first = ordered(&mut rig, 1);
    let second = ordered(&mut rig, 2);
    end(&mut rig, first, Err(Cause::Full));
    end(&mut rig, second, Ok(Stored::New));
    rig.read(&[1]);
    assert_eq!(puts(&mut rig).len(), 1, "it takes others");
    rig.check();
}

#[test]
fn a_tier_that_refuses_what_was_on_its_way_while_it_went_down_is_another_one_when_it_is_back() {
    let mut rig = with_tiers();
    let put = ordered(&mut rig, 1);
    is_now(&mut rig, Kind::Redis, Some("ReadOnly"));
    end(&mut rig, put, Err(Cause::ReadOnly));
    is_now(&mut rig, Kind::Redis, None);
    rig.read(&[1]);
    assert_eq!(puts(&mut rig).len(), 1);
    rig.check();
}

#[test]
fn what_was_stored_under_another_policy_is_written_when_a_request_comes_back() {
    let mut rig = with_tiers_as(|tier| tier.write = WritePolicy::None);
    is_now(&mut rig, Kind::Redis, None);
    rig.store(&[1]);
    rig.read(&[1]);
    assert_eq!(puts(&mut rig), []);
    let tiers = [Kind::Redis, Kind::S3].map(TierConfig::new);
    let config = Config {
        tiers: tiers.to_vec(),
        ..Config::default()
    };
    rig.engine.configure(&config);
    rig.read(&[1]);
    let [(put, Kind::Redis, true)] = puts(&mut rig)[..] else {
        panic!("it is one for it now")
    };
    end(&mut rig, put, Ok(Stored::New));
    rig.engine.configure(&config);
    rig.now.mono_ms += 60_000;
    rig.read(&[1]);
    assert_eq!(
        puts(&mut rig),
        [],
        "it is there, and the policy is the same"
    );
    rig.check();
}

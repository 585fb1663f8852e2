//! What tiers below memory are given, and given again.

use super::rig::*;
use crate::engine::config::{Config, TierConfig};
use crate::engine::{Order, Report};
use crate::tiers::{Cause, Kind, Stored};
use kvcachepool_protocol::domain::{Descriptor, Domain};
use kvcachepool_protocol::key::ModelId;
use kvcachepool_protocol::object::{Element, Form};

/// An engine with Redis and S3 behind it that have not answered yet.
fn with_tiers() -> Rig {
    let config = Config {
        tiers: [Kind::Redis, Kind::S3].map(TierConfig::new).to_vec(),
        ..Config::default()
    };
    let mut rig = Rig::new(4 << 20, config, plan(1, false, 16 << 10));
    let empty = Descriptor::parse("{}").unwrap();
    let domain = Domain {
        model_id: ModelId::default(),
        layout_id: rig.layout,
        model: empty.clone(),
        layout: empty,
        plan: rig.plan.clone(),
        form: Form::flat(Element::F32),
        not_shareable: None,
    };
    rig.engine.learn(&domain, "vllm", "0.32.0");
    rig
}

fn is_now(rig: &mut Rig, tier: Kind, down: Option<&str>) {
    let down = down.map(str::to_owned);
    rig.engine.reported(rig.now, Report::State { tier, down });
}

/// Puts that were ordered since: number, tier, and whether it is to be looked up first.
fn puts(rig: &mut Rig) -> Vec<(u64, Kind, bool)> {
    let orders = rig.engine.take_orders(rig.now);
    let put = orders.iter().filter_map(|order| match order {
        Order::Put {
            put,
            tier,
            look_first,
            ..
        } => Some((*put, *tier, *look_first)),
        _ => None,
    });
    put.collect()
}

fn end(rig: &mut Rig, put: u64, stored: Result<Stored, Cause>) {
    rig.engine
        .reported(rig.now, Report::PutDone { put, stored });
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
    rig.audit();
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
        is_now(&mut rig, Kind::Redis, None);
        rig.store(&[1]);
        let [(put, Kind::Redis, false)] = puts(&mut rig)[..] else {
            panic!("{cause:?}")
        };
        end(&mut rig, put, Err(cause));
        assert_eq!(puts(&mut rig), [], "{cause:?}");
        rig.read(&[1]);
        assert_eq!(puts(&mut rig).len(), usize::from(again), "{cause:?}");
        rig.audit();
    }
}

#[test]
fn what_a_tier_may_have_lost_is_looked_for_when_a_request_comes_back() {
    let mut rig = with_tiers();
    is_now(&mut rig, Kind::Redis, None);
    rig.store(&[1]);
    let [(put, Kind::Redis, false)] = puts(&mut rig)[..] else {
        panic!("S3 is not up")
    };
    end(&mut rig, put, Ok(Stored::New));
    is_now(&mut rig, Kind::Redis, Some("Unreachable"));
    is_now(&mut rig, Kind::Redis, None);
    rig.read(&[1]);
    let [(_, Kind::Redis, true)] = puts(&mut rig)[..] else {
        panic!("it may have come back with less")
    };
    rig.audit();
}

//! Flushes of what tiers below memory lack: what goes first, what is tried again, and when one is over.

use super::rig::*;
use super::writes::{end, fails_over, is_now, ordered, puts, with_tiers, with_tiers_as};
use crate::config::WritePolicy;
use crate::tier::{Cause, Kind, Stored};

/// Redis is up, and what is stored waits for a flush.
fn writing_back() -> Rig {
    let mut rig = with_tiers_as(|tier| {
        tier.write = WritePolicy::WriteBack;
        tier.puts_max = 1;
    });
    is_now(&mut rig, Kind::Redis, None);
    rig
}

#[test]
fn a_flush_looks_for_what_a_tier_was_seen_to_have_a_minute_ago_after_what_it_lacks() {
    let mut rig = with_tiers_as(|tier| tier.puts_max = 1);
    let put = ordered(&mut rig, 1);
    end(&mut rig, put, Ok(Stored::New));
    rig.engine.flush();
    assert_eq!(puts(&mut rig), [], "it was there a moment ago");
    assert!(!rig.engine.flushes());
    rig.now.mono_ms += 60_000;
    let lost = ordered(&mut rig, 2);
    end(&mut rig, lost, Err(Cause::Timeout));
    rig.engine.flush();
    let [(second, Kind::Redis, true)] = puts(&mut rig)[..] else {
        panic!("what nobody has but this memory goes first")
    };
    assert_eq!(
        rig.engine.lower.written_key(second),
        key(&[2], CHUNK_TOKENS)
    );
    end(&mut rig, second, Ok(Stored::New));
    let [(first, Kind::Redis, true)] = puts(&mut rig)[..] else {
        panic!("Redis may have dropped it since")
    };
    assert_eq!(rig.engine.lower.written_key(first), key(&[1], CHUNK_TOKENS));
    assert!(rig.engine.flushes());
    end(&mut rig, first, Ok(Stored::Already));
    assert_eq!(puts(&mut rig), []);
    assert!(!rig.engine.flushes(), "it is over");
    assert_eq!(rig.engine.unwritten()[0].chunks, 0);
    rig.check();
}

#[test]
fn what_a_tier_refused_in_a_flush_is_not_offered_twice_by_it() {
    let mut rig = with_tiers();
    let put = ordered(&mut rig, 1);
    end(&mut rig, put, Err(Cause::Full));
    rig.engine.flush();
    let [(put, Kind::Redis, true)] = puts(&mut rig)[..] else {
        panic!("there may be room by now")
    };
    end(&mut rig, put, Err(Cause::Full));
    assert_eq!(puts(&mut rig), []);
    assert!(!rig.engine.flushes());
    rig.check();
}

#[test]
fn what_is_stored_anew_while_its_name_still_waits_is_written_in_its_place() {
    let mut rig = writing_back();
    rig.store(&[1]);
    assert_eq!(puts(&mut rig), [], "it waits");
    rig.engine.memory.clear();
    assert!(rig.store(&[1]));
    assert_eq!(puts(&mut rig), [], "its name waits");
    rig.engine.flush();
    let mut ordered = puts(&mut rig);
    ordered.extend(puts(&mut rig));
    let [(put, Kind::Redis, _)] = ordered[..] else {
        panic!("nobody has it but this memory: {ordered:?}")
    };
    end(&mut rig, put, Ok(Stored::New));
    assert_eq!(puts(&mut rig), []);
    assert!(!rig.engine.flushes());
    assert_eq!(rig.engine.unwritten()[0].chunks, 0);
    rig.check();
}

#[test]
fn a_flush_waits_where_writes_fail_for_a_moment_and_loses_nothing() {
    let mut rig = writing_back();
    for path in 1..=3 {
        rig.store(&[path]);
    }
    rig.engine.flush();
    let mut first = puts(&mut rig);
    for _ in 0..3 {
        let [(put, Kind::Redis, _)] = first[..] else {
            panic!("{first:?}")
        };
        end(&mut rig, put, Err(Cause::BreakerOpen));
        assert_eq!(puts(&mut rig), [], "others would fail as well");
        assert!(rig.engine.flushes());
        rig.check();
        rig.now.mono_ms += 1_000;
        first = puts(&mut rig);
    }
    let mut written = 0;
    while let [(put, Kind::Redis, _)] = first[..] {
        written += 1;
        end(&mut rig, put, Ok(Stored::New));
        first = puts(&mut rig);
    }
    assert_eq!(written, 3);
    assert!(!rig.engine.flushes());
    assert_eq!(rig.engine.unwritten()[0].chunks, 0);
    rig.check();
}

#[test]
fn a_flush_ends_where_one_chunk_or_everything_goes_on_failing() {
    for all in [true, false] {
        let mut rig = writing_back();
        for path in 1..=3 {
            rig.store(&[path]);
        }
        rig.engine.flush();
        let (mut tries, begin_ms) = (0, rig.now.mono_ms);
        for _ in 0..200 {
            for (put, ..) in puts(&mut rig) {
                tries += 1;
                let fails = all || rig.engine.lower.written_key(put) == key(&[2], CHUNK_TOKENS);
                let stored = if fails {
                    Err(Cause::Timeout)
                } else {
                    Ok(Stored::New)
                };
                end(&mut rig, put, stored);
            }
            rig.check();
            if !rig.engine.flushes() {
                break;
            }
            rig.now.mono_ms += 500;
        }
        assert!(!rig.engine.flushes());
        // each chunk is tried eight times at most
        assert!(tries <= if all { 24 } else { 10 }, "{tries}");
        assert!(rig.now.mono_ms - begin_ms <= 31_000);
        assert_eq!(rig.engine.unwritten()[0].chunks, if all { 3 } else { 1 });
    }
}

#[test]
fn a_flush_that_a_tier_was_down_for_or_went_down_in_begins_when_it_is_up() {
    for down_before in [true, false] {
        let mut rig = writing_back();
        rig.store(&[1]);
        assert_eq!(puts(&mut rig), []);
        if down_before {
            is_now(&mut rig, Kind::Redis, Some("Unreachable"));
        }
        rig.engine.flush();
        is_now(&mut rig, Kind::Redis, Some("Unreachable"));
        assert!(!rig.engine.flushes(), "nobody waits for what is down");
        assert_eq!(puts(&mut rig), []);
        is_now(&mut rig, Kind::Redis, None);
        let [(put, Kind::Redis, true)] = puts(&mut rig)[..] else {
            panic!("it is owed since")
        };
        end(&mut rig, put, Ok(Stored::New));
        assert_eq!(puts(&mut rig), []);
        fails_over(&mut rig);
        assert_eq!(puts(&mut rig), [], "once");
        rig.check();
    }
}

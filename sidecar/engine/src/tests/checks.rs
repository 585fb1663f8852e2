//! What is compared, and for whom.

use super::rig::*;
use crate::config::{Config, Verify};
use crate::{Changed, DigestJob, Durations, Engine};
use kvcachepool_protocol::key::ChunkKey;
use kvcachepool_protocol::message::{CHUNK_ABSENT, CHUNK_PENDING, CHUNK_READY};

/// One chunk of one section, stored some time ago; every question waits for a check.
fn stored() -> Rig {
    let config = Config {
        verify: Verify::Always,
        ..Config::default()
    };
    let mut rig = Rig::new(4 << 20, config, plan(1, false, 16 << 10));
    assert!(rig.store(&[1]));
    rig.now.mono_ms += 100;
    rig
}

/// Asks for the chunk, which must be checked first.
fn ask(rig: &mut Rig, request: &str) {
    assert_eq!(rig.probe(request, &[1]).1.states, [CHUNK_PENDING]);
}

/// Digests that are asked for, and how many questions were answered; each of them must find the chunk.
fn actions(rig: &mut Rig) -> (Vec<DigestJob>, usize) {
    let digests = rig.digests();
    let answers = rig.engine.take_changed();
    for answer in &answers {
        if let Changed::Final { probe } = answer {
            let (_, _, answer) = rig.engine.final_answer(rig.now, *probe).unwrap();
            assert_eq!(answer.states, [CHUNK_READY]);
        }
    }
    rig.check();
    (digests, answers.len())
}

#[test]
fn answers_and_loads_are_counted_by_duration() {
    let mut rig = stored();
    let (tag, asked) = rig.probe("loading", &[1]);
    assert_eq!(asked.states, [CHUNK_PENDING]);
    rig.now.mono_ms += 40;
    rig.digest_all();
    assert_eq!(actions(&mut rig).1, 1);
    for passed_ms in [0, 200] {
        rig.now.mono_ms += passed_ms;
        rig.engine.pin(rig.now, 1, "loading", tag, 0, 1);
    }
    // Only the first RELEASE ends a load.
    rig.engine.release(rig.now, 1, "loading");
    rig.engine.release(rig.now, 1, "loading");
    let (tag, _) = rig.probe("absent", &[2]);
    rig.engine.pin(rig.now, 1, "absent", tag, 0, 1);
    rig.engine.release(rig.now, 1, "absent");
    let stats = rig.engine.stats();
    assert_eq!(stats.probes, durations(&[40, 0]));
    assert_eq!(stats.loads, durations(&[200]));
}

fn durations(ms: &[u64]) -> Durations {
    let mut durations = Durations::default();
    ms.iter().for_each(|ms| durations.add(*ms));
    durations
}

#[test]
fn a_store_is_counted_when_its_last_section_is_readable() {
    let mut rig = Rig::new(4 << 20, Config::default(), plan(2, false, 16 << 10));
    let groups = rig.plan.all_groups();
    let (_, refs) = rig.grant(&[1], CHUNK_TOKENS, groups);
    let (last, first) = refs.split_last().unwrap();
    rig.now.mono_ms += 30;
    rig.commit(first);
    rig.digest_all();
    assert_eq!(rig.engine.stats().stores, durations(&[]));
    rig.now.mono_ms += 70;
    rig.commit(&[*last]);
    rig.digest_all();
    assert!(rig.has(&[1]));
    assert_eq!(rig.engine.stats().stores, durations(&[100]));

    let (_, refs) = rig.grant(&[2], CHUNK_TOKENS, groups);
    let (last, first) = refs.split_last().unwrap();
    rig.commit(first);
    let owner = OWNERS[last.section.get() as usize % 2];
    assert!(rig.engine.memory.abort(owner, *last));
    rig.digest_all();
    let (fetch, refs) = rig.fetch(&[3]).unwrap();
    assert!(rig.engine.memory.fetch_stands(fetch));
    for section in refs {
        rig.engine.memory.fetched(rig.now, section, [1; 16]);
    }
    assert!(rig.has(&[3]));
    assert_eq!(
        rig.engine.stats().stores,
        durations(&[100]),
        "given back, fetched"
    );
}

#[test]
fn who_asks_while_a_check_is_under_way_waits_for_one_that_began_later() {
    let mut rig = stored();
    ask(&mut rig, "first");
    let (checks, _) = actions(&mut rig);
    rig.now.mono_ms += 10;
    ask(&mut rig, "second");
    assert_eq!(actions(&mut rig), (vec![], 0), "one at a time");
    rig.now.mono_ms += 10;
    rig.end_digest(checks[0]);
    let (again, answered) = actions(&mut rig);
    assert_eq!((again.len(), answered), (1, 1));
    ask(&mut rig, "third");
    rig.now.mono_ms += 10;
    rig.end_digest(again[0]);
    assert_eq!(actions(&mut rig), (vec![], 2));
}

#[test]
fn a_digest_of_an_earlier_check_ends_no_later_one() {
    let mut rig = stored();
    let (table, config) = (rig.engine.table().clone(), rig.engine.memory.config.clone());
    rig.engine = Engine::new(rig.now, table, config, false);
    let (swept, _) = actions(&mut rig);
    ask(&mut rig, "first");
    let (urgent, _) = actions(&mut rig);
    assert_eq!(
        (swept.len(), urgent.len()),
        (1, 1),
        "two digests of one slot"
    );
    rig.end_digest(swept[0]);
    assert_eq!(actions(&mut rig), (vec![], 1));
    rig.now.mono_ms += 10;
    ask(&mut rig, "second");
    let (later, _) = actions(&mut rig);
    rig.end_digest(urgent[0]);
    assert_eq!(actions(&mut rig), (vec![], 0));
    rig.end_digest(later[0]);
    assert_eq!(actions(&mut rig), (vec![], 1));
}

/// Two chunks that depend on nothing, the second stored first.
fn two() -> (Rig, Vec<ChunkKey>) {
    let mut rig = stored();
    assert!(rig.store(&[2]));
    rig.now.mono_ms += 100;
    (rig, vec![key(&[2], CHUNK_TOKENS), key(&[1], CHUNK_TOKENS)])
}

fn slots(digests: &[DigestJob]) -> Vec<u32> {
    digests.iter().map(|job| job.slot).collect()
}

#[test]
fn chunks_are_checked_in_prefix_order() {
    let (mut rig, keys) = two();
    let (_, found) = rig.probe_keys("stored", vec![keys[1]], None);
    assert_eq!(found.states, [CHUNK_PENDING]);
    let (first, _) = actions(&mut rig);
    rig.end_digest(first[0]);
    actions(&mut rig);
    rig.now.mono_ms += 10;
    rig.probe_keys("both", keys, None);
    let (digests, _) = actions(&mut rig);
    assert_eq!(digests.len(), 2);
    assert_eq!(slots(&digests)[1], slots(&first)[0]);
}

#[test]
fn what_the_engine_holds_itself_is_not_checked() {
    let (mut rig, keys) = two();
    let local = u64::from(CHUNK_TOKENS);
    let (_, all) = rig.probe_keys("held", keys.clone(), Some(2 * local));
    assert_eq!(
        (all.states, all.refs, all.pending),
        (vec![CHUNK_PENDING; 2], vec![], false)
    );
    assert_eq!(actions(&mut rig), (vec![], 0), "the answer is final");
    let (_, behind) = rig.probe_keys("behind", keys, Some(2 * local - 1));
    assert_eq!(
        (behind.states, behind.pending),
        (vec![CHUNK_PENDING; 2], true)
    );
    let (digests, _) = actions(&mut rig);
    assert_eq!(digests.len(), 1, "of the chunk that reaches beyond");
}

#[test]
fn a_chunk_whose_bytes_changed_is_dropped_and_its_parent_is_answered() {
    let mut rig = stored();
    assert!(rig.store(&[1, 2]));
    rig.now.mono_ms += 100;
    let (_, asked) = rig.probe("reader", &[1, 2]);
    assert_eq!(asked.states, [CHUNK_PENDING; 2]);
    let digests = rig.digests();
    assert_eq!(digests.len(), 2);
    rig.end_digest(digests[0]);
    rig.digested(digests[1], Some([0xee; 16]));
    let Some(Changed::Final { probe }) = rig.engine.take_changed().pop() else {
        panic!("no answer")
    };
    let (_, _, answer) = rig.engine.final_answer(rig.now, probe).unwrap();
    assert_eq!(answer.states, [CHUNK_READY, CHUNK_ABSENT]);
    assert_eq!(rig.engine.stats().corrupt_chunks, 1);
    rig.check();
}

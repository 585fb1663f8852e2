//! What goes when room is needed, and what never does.

use super::rig::*;
use crate::config::{Config, EvictionPolicy};
use kvcachepool_protocol::message::*;

const ALL: [EvictionPolicy; 4] = [
    EvictionPolicy::S3Fifo,
    EvictionPolicy::Lru,
    EvictionPolicy::Lfu,
    EvictionPolicy::Fifo,
];

/// Chunks that fit into the small rig's arena.
const FIT: u8 = 64;

#[test]
fn every_policy_makes_room_for_ever_and_evicts_children_first() {
    for policy in ALL {
        let mut rig = Rig::small(policy);
        for prompt in 0..60u8 {
            for depth in 1..=20 {
                assert!(
                    rig.store(&vec![prompt; depth]),
                    "{policy:?} {prompt} {depth}"
                );
            }
            rig.check();
            for other in 0..=prompt {
                let held: Vec<bool> = (1..=20).map(|d| rig.has(&vec![other; d])).collect();
                assert!(
                    held.windows(2).all(|w| w[0] || !w[1]),
                    "{policy:?}: a child outlived its parent: {held:?}"
                );
            }
        }
        assert_eq!(
            rig.engine.memory.usage().chunks,
            u64::from(FIT),
            "{policy:?}"
        );
    }
}

#[test]
fn what_is_used_again_outlives_a_scan_but_not_with_fifo() {
    for (policy, survives) in [
        (EvictionPolicy::S3Fifo, true),
        (EvictionPolicy::Lru, true),
        (EvictionPolicy::Lfu, true),
        (EvictionPolicy::Fifo, false),
    ] {
        let mut rig = Rig::small(policy);
        rig.store(&[200]);
        rig.store(&[200, 1]);
        for scan in 0..150 {
            rig.read(&[200, 1]);
            rig.store(&[scan]);
        }
        assert_eq!(rig.has(&[200, 1]), survives, "{policy:?}");
    }
}

#[test]
fn s3_fifo_keeps_a_working_set_that_a_scan_would_flush_from_lru() {
    let hits = |policy| {
        let mut rig = Rig::small(policy);
        let mut hits = 0;
        for round in 0..20u8 {
            for hot in 0..40u8 {
                if rig.has(&[1, hot]) {
                    hits += 1;
                    rig.read(&[1, hot]);
                } else {
                    rig.store(&[1]);
                    rig.store(&[1, hot]);
                }
            }
            for scan in 0..60 {
                rig.store(&[2 + round, scan]);
                rig.store(&[2 + round]);
                rig.store(&[2 + round, scan]);
            }
        }
        hits
    };
    let (s3, lru) = (hits(EvictionPolicy::S3Fifo), hits(EvictionPolicy::Lru));
    assert!(s3 > lru, "S3-FIFO {s3} hits, LRU {lru}");
}

#[test]
fn lfu_forgets_yesterdays_favourite() {
    let mut rig = Rig::small(EvictionPolicy::Lfu);
    rig.store(&[200]);
    for _ in 0..30 {
        rig.read(&[200]);
    }
    for today in 0..40u32 {
        for n in 0..100 {
            rig.store(&[(today % 200) as u8, n]);
            rig.store(&[(today % 200) as u8]);
            rig.store(&[(today % 200) as u8, n]);
        }
    }
    assert!(!rig.has(&[200]));
}

#[test]
fn incomplete_chunks_go_first_and_die_young() {
    let mut rig = Rig::new(4 << 20, Config::default(), plan(2, false, 16 << 10));
    for n in 0..31 {
        assert!(rig.store(&[n]));
    }
    // one shard is published, the other aborted
    let (_, refs) = rig.grant(&[100], CHUNK_TOKENS, 1);
    rig.commit(&refs[..1]);
    rig.digest_all();
    rig.engine.memory.abort(OWNERS[1], refs[1]);
    assert_eq!(rig.engine.memory.usage().incomplete_chunks, 1);
    rig.check();
    assert!(rig.store(&[101]));
    assert_eq!(rig.engine.memory.usage().incomplete_chunks, 0);
    assert_eq!(
        rig.engine.stats().evicted_chunks,
        0,
        "no readable chunk had to go"
    );

    let (_, refs) = rig.grant(&[102], CHUNK_TOKENS, 1);
    rig.commit(&refs[..1]);
    rig.digest_all();
    rig.engine.memory.abort(OWNERS[1], refs[1]);
    rig.engine.tick(rig.now);
    rig.now.mono_ms += 30_000;
    rig.engine.tick(rig.now);
    assert_eq!(rig.engine.memory.usage().incomplete_chunks, 0);
    rig.check();
}

#[test]
fn a_tail_goes_before_the_full_chunk_over_the_same_tokens() {
    for policy in ALL {
        let mut rig = Rig::small(policy);
        rig.store(&[9]);
        rig.store(&[9, 1]);
        for tokens in [16, 32, 48] {
            assert!(rig.store_tokens(&[9, 1], tokens));
        }
        for n in 0..250 {
            rig.store(&[n]);
            let tails = [16, 32, 48]
                .into_iter()
                .filter(|t| rig.has_tail(&[9, 1], *t))
                .count();
            assert!(
                rig.has(&[9, 1]) || tails == 0,
                "{policy:?}: the full chunk went before {tails} tails"
            );
        }
        rig.check();
    }
}

#[test]
fn what_is_leased_pinned_or_granted_is_never_evicted() {
    let mut rig = Rig::small(EvictionPolicy::Lru);
    for n in 0..8 {
        rig.store(&[n]);
    }
    let (tag, _) = rig.probe("leased", &[0]);
    rig.engine.pin(rig.now, 1, "leased", tag, 0, 1);
    rig.probe("waiting", &[1]);
    rig.engine
        .memory
        .pin_key(rig.now, &key(&[2], CHUNK_TOKENS), 5_000)
        .unwrap();
    let (_, granted) = rig.grant(&[3, 3], CHUNK_TOKENS, 1);
    for n in 10..250 {
        assert!(rig.store(&[n]));
    }
    assert!(
        rig.has(&[0]) && rig.has(&[1]) && rig.has(&[2]) && rig.has(&[3]),
        "the last is a parent of what is granted"
    );
    assert!(!rig.has(&[4]));
    rig.commit(&granted);
    rig.digest_all();
    rig.engine.release(rig.now, 1, "leased");
    rig.now.mono_ms += 30_000;
    rig.engine.tick(rig.now);
    rig.check();
    for n in 10..250 {
        assert!(rig.store(&[n, n]) || rig.store(&[n]));
    }
    assert!(!rig.has(&[0]) && !rig.has(&[1]) && !rig.has(&[2]));
}

#[test]
fn two_hundred_waiting_long_prompts_do_not_pin_everything() {
    let mut rig = Rig::small(EvictionPolicy::S3Fifo);
    for prompt in 0..6u8 {
        for depth in 1..=10 {
            rig.store(&vec![prompt; depth]);
        }
    }
    for waiting in 0..200u32 {
        let path = vec![(waiting % 6) as u8; 10];
        rig.probe(&format!("w{waiting}"), &path);
        rig.check();
        assert!(rig.engine.memory.usage().soft_pinned_bytes <= 2 << 20);
    }
    for n in 100..132 {
        assert!(rig.store(&[n]), "stores go on");
    }
    for waiting in 0..200u32 {
        rig.engine.release(rig.now, 1, &format!("w{waiting}"));
    }
    assert_eq!(rig.engine.memory.usage().soft_pinned_bytes, 0);
    rig.check();
}

#[test]
fn nothing_but_leases_refuses_room_and_room_returns_with_them() {
    let mut rig = Rig::small(EvictionPolicy::S3Fifo);
    for n in 0..FIT {
        rig.store(&[n]);
        let (tag, _) = rig.probe(&format!("r{n}"), &[n]);
        rig.engine.pin(rig.now, 1, &format!("r{n}"), tag, 0, 1);
    }
    assert_eq!(rig.grant(&[200], CHUNK_TOKENS, 1).0, GRANT_NO_ROOM);
    rig.check();
    rig.engine.release(rig.now, 1, "r5");
    assert!(rig.store(&[200]));
    assert!(!rig.has(&[5]));
    rig.check();
}

#[test]
fn a_domain_with_other_slot_sizes_gets_segments_of_the_first() {
    let mut rig = Rig::new(32 << 20, Config::default(), plan(1, false, 16 << 10));
    for n in 0..=255 {
        rig.store(&[n]);
        rig.store(&[n, 1]);
    }
    assert_eq!(rig.engine.memory.usage().chunks, 512);
    rig.plan = plan(1, false, 256 << 10);
    rig.layout = kvcachepool_protocol::key::LayoutId([2; 32]);
    for n in 0..100 {
        assert!(rig.store(&[n, 0]) || rig.store(&[n]), "{n}");
        rig.check();
    }
}

#[test]
fn a_segment_that_changes_its_slot_size_raises_the_generations_of_all_its_rows() {
    use crate::table::Table;
    let mut config = Config::default();
    config.limits.granted_bytes_max = 0;
    let mut rig = Rig::new(4 << 20, config, plan(1, false, 16 << 10));
    for n in 0..FIT {
        rig.store(&[n]);
    }
    let before: Vec<u32> = (0..64)
        .map(|r| rig.engine.table().row(r).generation)
        .collect();
    rig.engine.clear();
    rig.plan = plan(1, false, 1 << 20);
    rig.layout = kvcachepool_protocol::key::LayoutId([2; 32]);
    assert_eq!(
        rig.grant(&[0], CHUNK_TOKENS, 1).0,
        GRANT_NOT_READY,
        "over a quarter of the arena"
    );
    rig.plan = plan(1, false, 256 << 10);
    assert!(rig.store(&[0]));
    for (row, before) in (0..64).zip(before) {
        assert!(rig.engine.table().row(row).generation > before, "row {row}");
    }
}

#[test]
fn a_window_group_is_added_later_and_the_chunk_stays_readable_meanwhile() {
    let mut rig = Rig::new(4 << 20, Config::default(), plan(2, true, 16 << 10));
    let (_, refs) = rig.grant(&[1], CHUNK_TOKENS, 1);
    assert_eq!(refs.len(), 2);
    rig.commit(&refs);
    rig.digest_all();
    assert!(rig.has(&[1]));
    assert_eq!(rig.grant(&[1], CHUNK_TOKENS, 1).0, GRANT_EXISTS);
    let (result, refs) = rig.grant(&[1], CHUNK_TOKENS, 3);
    assert_eq!((result, refs.len()), (GRANT_GRANTED, 1));
    assert!(rig.has(&[1]));
    assert_eq!(
        rig.grant(&[1], CHUNK_TOKENS, 3).0,
        GRANT_EXISTS,
        "in flight"
    );
    rig.engine.memory.abort(OWNERS[0], refs[0]);
    assert!(rig.has(&[1]), "as readable as before");
    let (_, refs) = rig.grant(&[1], CHUNK_TOKENS, 3);
    rig.commit(&refs);
    rig.digest_all();
    let (_, answer) = rig.probe("r", &[1]);
    assert_eq!(answer.refs.len(), 3 * 16);
    rig.check();
    assert_eq!(
        rig.grant(&[2], CHUNK_TOKENS, 2).0,
        GRANT_INVALID,
        "full groups are needed first"
    );
}

#[test]
fn nothing_is_remembered_for_ever_of_chunks_that_lost_their_parent() {
    let mut rig = Rig::small(EvictionPolicy::S3Fifo);
    for n in 0..200u8 {
        rig.store(&[n]);
        rig.store(&[n, 1]);
        let (_, refs) = rig.grant(&[n, 1, 2], CHUNK_TOKENS, 1);
        rig.engine.clear();
        rig.engine.memory.abort(OWNERS[0], refs[0]);
        rig.check();
    }
    for n in 0..200u8 {
        // the parent is lost to a wrong digest, the child stays until it is evicted
        rig.store(&[n]);
        rig.store(&[n, 1]);
        rig.now.mono_ms += 60_001;
        rig.probe("r", &[n]);
        for job in rig.digests() {
            rig.digested(job, Some([0xEE; 16]));
        }
        rig.engine.release(rig.now, 1, "r");
        rig.check();
    }
    assert!(rig.engine.memory.index.orphans() <= usize::from(FIT));
}

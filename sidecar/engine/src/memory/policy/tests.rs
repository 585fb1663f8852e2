//! Checks every policy against a simple model: it must not lose an entry, return one twice, or return a removed one.

use super::new;
use crate::config::EvictionPolicy;
use proptest::prelude::*;
use std::collections::BTreeSet;

proptest! {
    #[test]
    fn entries_are_given_once_and_never_lost(
        kind in prop_oneof![
            Just(EvictionPolicy::S3Fifo), Just(EvictionPolicy::Lru), Just(EvictionPolicy::Lfu), Just(EvictionPolicy::Fifo)
        ],
        steps in prop::collection::vec((0u8..6, 0u32..24), 1..500)
    ) {
        let mut policy = new(kind);
        let (mut waiting, mut out): (BTreeSet<u32>, BTreeSet<u32>) = Default::default();
        for (what, entry) in steps {
            let known = waiting.contains(&entry) || out.contains(&entry);
            match what {
                0 | 1 if !known => {
                    policy.insert(entry, u64::from(entry), 1 << 16);
                    waiting.insert(entry);
                }
                2 if waiting.contains(&entry) => policy.touch(entry),
                3 if known => {
                    policy.remove(entry, entry % 2 == 0);
                    waiting.remove(&entry);
                    out.remove(&entry);
                }
                4 => match policy.next() {
                    Some(next) => {
                        prop_assert!(waiting.remove(&next), "{} was not waiting", next);
                        out.insert(next);
                    }
                    None => prop_assert!(waiting.is_empty()),
                },
                5 if out.remove(&entry) => {
                    policy.retry(entry);
                    waiting.insert(entry);
                }
                _ => {}
            }
            prop_assert_eq!(policy.waiting(), waiting.len());
        }
        while let Some(next) = policy.next() {
            prop_assert!(waiting.remove(&next));
            policy.remove(next, true);
        }
        prop_assert!(waiting.is_empty());
    }
}

#[test]
fn lru_gives_the_one_that_was_not_used_for_longest() {
    let mut policy = new(EvictionPolicy::Lru);
    for entry in 0..3 {
        policy.insert(entry, 0, 1);
    }
    policy.touch(0);
    assert_eq!(policy.next(), Some(1));
}

#[test]
fn s3_fifo_takes_back_into_the_main_queue_what_it_evicted_a_moment_ago() {
    let mut policy = new(EvictionPolicy::S3Fifo);
    for entry in 0..20 {
        policy.insert(entry, u64::from(entry), 1);
    }
    assert_eq!(policy.next(), Some(0));
    policy.remove(0, true);
    policy.insert(0, 0, 1);
    // 0 is in the main queue now: the probation queue is evicted first, down to its share
    for expected in 1..18 {
        assert_eq!(policy.next(), Some(expected));
        policy.remove(expected, true);
    }
}

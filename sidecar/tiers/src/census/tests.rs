//! Which objects go first.

use super::*;
use crate::testing::suite::Sample;

fn listed(number: u64, written_unix_s: u64, bytes: u64) -> Listed {
    Listed {
        name: Sample::new(1, number, &[1]).name(),
        bytes,
        written_unix_s,
    }
}

#[test]
fn the_oldest_bytes_go_and_of_those_written_together_no_more_than_needed() {
    let all: Vec<_> = (0..10).map(|n| listed(n, 1_000 + n / 4, 10)).collect();
    let mut ages = Ages::default();
    for listed in &all {
        ages.add(listed);
    }
    let went = |excess, expired| {
        let Some(mut cut) = ages.cut(excess, expired) else {
            return 0;
        };
        // A listing has its own order: the youngest come first here.
        let went = all.iter().rev().filter(|listed| cut.takes(listed));
        let went: Vec<u64> = went.map(|listed| listed.written_unix_s).collect();
        let until = 1_000 + excess.div_ceil(40);
        assert!(expired > 0 || went.iter().all(|at| *at < until), "{went:?}");
        went.len()
    };
    for (excess, count) in [
        (0, 0),
        (1, 1),
        (10, 1),
        (35, 4),
        (40, 4),
        (41, 5),
        (100, 10),
        (1_000, 10),
    ] {
        assert_eq!(went(excess, 0), count, "{excess}");
    }
    assert_eq!(went(0, 1_001), 4, "what is too old");
    assert_eq!(went(10, 1_002), 8, "the older of both");
    assert_eq!(went(0, 500), 0);
}

#[test]
fn many_ages_are_told_apart_less_finely() {
    let mut ages = Ages::default();
    for n in 0..100_000 {
        ages.add(&listed(0, n, 1));
        assert!(ages.bytes.len() <= AGES_MAX);
    }
    assert_eq!(ages.bytes.values().sum::<u64>(), 100_000);
    let cut = ages.cut(50_000, 0).unwrap();
    assert!((49_000..=50_000).contains(&cut.before_s), "{cut:?}");
}

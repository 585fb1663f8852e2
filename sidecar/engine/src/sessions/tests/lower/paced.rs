//! Bounds of bytes per second: what waits for its turn, and for how long.

use super::*;
use crate::config::Verify;
use crate::tier::Stored;

/// Bytes of a chunk.
const CHUNK: u64 = 4 * BLOCK_BYTES;

fn paced(tiers: &[Kind], read_chunks: u64, write_chunks: u64) -> Config {
    let mut config = Config {
        read_bytes_per_s: read_chunks * CHUNK,
        write_bytes_per_s: write_chunks * CHUNK,
        ..config(tiers)
    };
    for tier in &mut config.tiers {
        tier.write = WritePolicy::WriteThrough;
    }
    config
}

fn puts(w: &mut World) -> Vec<(Kind, u64)> {
    let mut list = Vec::new();
    for order in orders(w) {
        match order {
            Effect::Write(WriteJob { tier, put, .. }) => list.push((tier, put)),
            other => panic!("{other:?}"),
        }
    }
    list
}

fn waited_s(w: &World, direction: &str) -> f64 {
    let mut found = None;
    w.core.metrics(&mut |metric, labels, value| {
        if metric == "pacing_waited_seconds_total" && labels == [direction] {
            found = Some(value);
        }
    });
    found.unwrap()
}

#[test]
fn fetches_wait_for_their_bytes() {
    let (mut w, scheduler, _) = limited(paced(&[Kind::Disk], 4, 0));
    ask(&mut w, scheduler, "r", &[1, 2, 3]);
    look_up(&mut w, &[1, 2, 3]);
    assert_eq!(chunks(&fetches(&mut w)), [1], "a quarter of a second's");
    w.pass(1);
    assert_eq!(chunks(&fetches(&mut w)), [2], "one is never cut");
    w.pass(200);
    assert!(fetches(&mut w).is_empty());
    w.pass(60);
    assert_eq!(chunks(&fetches(&mut w)), [3]);
    assert!((waited_s(&w, "read") - 0.261).abs() < 1e-9);
    audit(&w);
}

#[test]
fn a_bound_that_is_lifted_holds_nothing_back() {
    let mut config = paced(&[Kind::Disk], 1, 0);
    let (mut w, scheduler, _) = limited(config.clone());
    ask(&mut w, scheduler, "r", &[1, 2, 3]);
    look_up(&mut w, &[1, 2, 3]);
    assert_eq!(chunks(&fetches(&mut w)), [1]);
    config.read_bytes_per_s = 0;
    w.core.configure(config);
    w.pass(1);
    assert_eq!(chunks(&fetches(&mut w)), [2, 3]);
    audit(&w);
}

#[test]
fn two_tiers_that_are_written_to_share_a_bound() {
    let (mut w, scheduler, worker) = limited(paced(&[Kind::Disk, Kind::S3], 0, 4));
    ask(&mut w, scheduler, "r", &[9]);
    look_up(&mut w, &[]);
    look_up(&mut w, &[]);
    for n in 1..=6 {
        w.store(scheduler, worker, &[chunk(n)]);
    }
    let mut written = Vec::new();
    for _ in 0..16 {
        for (tier, put) in puts(&mut w) {
            written.push(tier);
            let stored = Ok(Stored::New);
            w.input(Input::Completed(Completion::Write { put, stored }));
        }
        w.pass(250);
    }
    let of = |kind| written.iter().filter(|k| **k == kind).count();
    assert_eq!((of(Kind::Disk), of(Kind::S3)), (6, 6));
    let first: Vec<_> = written[..6].to_vec();
    assert_eq!(
        first.iter().filter(|k| **k == Kind::S3).count(),
        3,
        "{first:?}"
    );
    audit(&w);
}

#[test]
fn writes_and_checks_that_nobody_waits_for_share_a_bound() {
    let mut config = paced(&[Kind::Disk], 0, 4);
    config.verify = Verify::Background;
    config.verify_age_ms = 100;
    let (mut w, scheduler, worker) = limited(config);
    ask(&mut w, scheduler, "r", &[9]);
    look_up(&mut w, &[]);
    w.store(scheduler, worker, &[chunk(1)]);
    let mut begun = Vec::new();
    w.pass(1_000);
    for n in 2..=8 {
        w.store(scheduler, worker, &[chunk(n)]);
    }
    for _ in 0..8 {
        // everybody asks for the first chunk, whose check is old each time
        w.states(scheduler, "hot", &[1]);
        for job in w.digests() {
            assert!(!job.urgent);
            begun.push("check");
            w.digest_is(&job, [job.slot as u8; 16]);
        }
        for (_, put) in puts(&mut w) {
            begun.push("put");
            let stored = Ok(Stored::New);
            w.input(Input::Completed(Completion::Write { put, stored }));
        }
        w.pass(250);
    }
    let checks = begun.iter().filter(|b| **b == "check").count();
    assert!((3..=5).contains(&checks), "{begun:?}");
    assert!((6..=10).contains(&begun.len()), "{begun:?}");
    audit(&w);
}

//! The hot path's cost inside the state machine.

use super::rig::*;
use crate::config::Config;
use std::time::{Duration, Instant};

#[test]
fn a_probe_of_512_chunks_stays_under_half_a_millisecond() {
    let mut rig = Rig::new(64 << 20, Config::default(), plan(1, false, 16 << 10));
    let path = vec![1u8; 512];
    for depth in 1..=512 {
        assert!(rig.store(&path[..depth]));
    }
    let mut best = Duration::MAX;
    for _ in 0..50 {
        let begin = Instant::now();
        let (_, answer) = rig.probe("r", &path);
        best = best.min(begin.elapsed());
        assert_eq!(answer.refs.len(), 512 * 16);
    }
    println!("PROBE of 512 chunks: {best:?}, keys made in it");
    assert!(best < Duration::from_micros(500), "{best:?}");
}

//! The hot path's cost from frame to frame.

use super::peer::*;
use crate::config::Config;
use crate::sessions::*;
use kvcachepool_protocol::frame::Op;
use kvcachepool_protocol::message::*;

#[test]
fn a_probe_of_512_chunks_is_answered_within_half_a_millisecond() {
    // an arena whose index could hold them all: a PROBE of more is refused
    let mut w = World::configured(Config {
        arena_bytes: 64 << 20,
        ..World::config()
    });
    let (scheduler, worker) = w.instance();
    w.store(scheduler, worker, &[chunk(1)]);
    let asked = Probe {
        hashes: (0..512u32)
            .flat_map(|n| hash((n % 2 + 1) as u8).0)
            .collect(),
        ..probe("r", &[])
    };
    let body = encode(&asked).unwrap();
    let mut best = std::time::Duration::MAX;
    for tag in 0..50 {
        let header = kvcachepool_protocol::frame::Header {
            length: body.len() as u32,
            version: 1,
            opcode: Op::Probe as u8,
            flags: 0,
            tag,
        };
        let begin = std::time::Instant::now();
        w.input(Input::Frame {
            conn: scheduler,
            header,
            body: &body,
            fds: NO_FDS,
        });
        best = best.min(begin.elapsed());
        let (reply, partial): (ProbeReply, _) = w.answer(tag);
        let ready = reply.states.iter().filter(|s| **s == CHUNK_READY);
        assert_eq!((ready.count(), partial), (256, false));
    }
    println!("PROBE of 512 chunks, from frame to frame: {best:?}");
    assert!(best < std::time::Duration::from_micros(500), "{best:?}");
}

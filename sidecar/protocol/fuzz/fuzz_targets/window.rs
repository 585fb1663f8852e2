//! Any record of a flag page gives runs that lie in arena and stage, apart from each other; or a named error.
#![no_main]

use kvcachepool_protocol::window::{Word, decode};
use libfuzzer_sys::fuzz_target;

const ARENA: u64 = 64 << 20;
const STAGE: u64 = 1 << 20;

fuzz_target!(|bytes: &[u8]| {
    let Some(word) = bytes.first_chunk::<8>() else {
        return;
    };
    let Some(word) = Word::decode(u64::from_le_bytes(*word)) else {
        return;
    };
    assert_eq!(Word::decode(word.encode()), Some(word));
    let Ok(order) = decode(word, bytes, ARENA, STAGE) else {
        return;
    };
    let mut end = 0;
    for (at, run) in order.runs {
        assert!(at >= end && run.bytes > 0);
        end = at + u64::from(run.bytes);
        assert!(end <= STAGE && run.arena_offset() + u64::from(run.bytes) <= ARENA);
    }
});

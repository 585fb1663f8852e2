//! Load without pause on one sidecar: prompts drawn at random from more than its tiers hold are asked for, compared byte by byte, and stored
//! where they are missing. It ends with exit code 1 on the first wrong byte.
//!
//! ```text
//! soak_engine SOCKET PROMPTS CHUNKS BLOCK_KIB SEED      a line of JSON per second, until it is killed
//! ```
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a tool for developers"
)]
#![allow(dead_code, reason = "the tests use more of these parts")]

#[path = "../tests/served/client.rs"]
mod client;
#[path = "../tests/served/vllm.rs"]
mod vllm;
#[path = "../tests/served/wait.rs"]
mod wait;

use kvcachepool_protocol::frame::Op;
use kvcachepool_protocol::message::{CHUNK_READY, GRANT_GRANTED, GrantReply};
use kvcachepool_protocol::refs::unpack;
use std::path::Path;
use std::time::{Duration, Instant};
use vllm::{Vllm, content_of, hashes};

/// What happened since the last line.
#[derive(Default, serde::Serialize)]
struct Counts {
    prompts: u64,
    loaded_chunks: u64,
    stored_chunks: u64,
}

const USAGE: &str = "soak_engine SOCKET PROMPTS CHUNKS BLOCK_KIB SEED";

fn main() {
    let args: Vec<_> = std::env::args().skip(1).collect();
    let [socket, numbers @ ..] = args.as_slice() else {
        panic!("{USAGE}");
    };
    let numbers: Vec<u64> = numbers
        .iter()
        .map(|n| n.parse().expect("a number"))
        .collect();
    let [prompts, chunks_of_prompt, block_kib, seed] = numbers[..] else {
        panic!("{USAGE}");
    };
    let mut random = fastrand::Rng::with_seed(seed);
    let mut engine = Vllm::attach_with(Path::new(socket), block_kib << 10);
    let (mut counts, mut said) = (Counts::default(), Instant::now());
    for round in 0u64.. {
        let chunks = hashes(random.u64(..prompts), chunks_of_prompt as u32);
        let loaded = load(&mut engine, &format!("load-{round}"), &chunks);
        counts.prompts += 1;
        counts.loaded_chunks += loaded as u64;
        if loaded < chunks.len() {
            counts.stored_chunks += store(&mut engine, &format!("store-{round}"), &chunks);
        }
        if said.elapsed() > Duration::from_secs(1) {
            println!("{}", serde_json::to_string(&counts).unwrap());
            (counts, said) = (Counts::default(), Instant::now());
        }
    }
}

/// Takes the prefix that memory and tiers give, compares it, and returns how many chunks that were.
fn load(engine: &mut Vllm, request: &str, chunks: &[[u8; 32]]) -> usize {
    let (probe, reply) = engine.probe_below(request, chunks);
    let ready = reply.states.iter().take_while(|s| **s == CHUNK_READY);
    let ready = ready.count();
    engine.pin(request, probe, ready);
    for (slot, hash) in unpack(&reply.refs).unwrap().iter().zip(chunks).take(ready) {
        if engine.read(slot) != content_of(hash, slot.length.get() as usize) {
            println!(
                r#"{{"wrong": "bytes of {hash:02x?} in slot {}"}}"#,
                slot.slot.get()
            );
            std::process::exit(1);
        }
    }
    engine.release(request);
    ready
}

/// Writes the chunks that the sidecar grants slots for, and returns how many those were.
fn store(engine: &mut Vllm, request: &str, chunks: &[[u8; 32]]) -> u64 {
    let message = engine.grant_message(request, chunks);
    let reply: GrantReply = engine.scheduler.ask(Op::Grant, &message).read();
    let granted = chunks.iter().zip(&reply.results);
    let granted = granted.filter_map(|(hash, result)| (*result == GRANT_GRANTED).then_some(hash));
    let slots = unpack(&reply.refs).unwrap();
    for (slot, hash) in slots.iter().zip(granted) {
        engine.write(slot, &content_of(hash, slot.length.get() as usize));
    }
    engine.commit(&slots);
    engine.release(request);
    slots.len() as u64
}

//! A stand-in for vLLM where no vLLM fits in: speaks the real protocol as scheduler and worker of one rank, stores chunks, loads them and
//! compares every byte. It lives on while the sidecar is away, as vLLM does, and ends with exit code 1 on the first wrong byte.
//!
//! ```text
//! stand_in_engine [FOLDER=/kvcachepool] [ROUNDS=0] [PROMPTS=1] [CHUNKS=16]      a line of JSON per round; 0 = for ever
//! ```
// A connection that is cut ends a round by a panic, which is caught.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![allow(dead_code, reason = "the tests use more of these parts")]

#[path = "../tests/served/client.rs"]
mod client;
#[path = "../tests/served/vllm.rs"]
mod vllm;
#[path = "../tests/served/wait.rs"]
mod wait;

use kvcachepool_protocol::message::CHUNK_READY;
use kvcachepool_protocol::refs::unpack;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::Duration;
use vllm::{Vllm, content, hashes};

/// From round to round.
const PACE: Duration = Duration::from_millis(500);

/// What a round found, over all prompts.
#[derive(Default)]
struct Round {
    hits: usize,
    /// Numbers of the tiers that the hits came from.
    tiers: BTreeSet<u8>,
    /// Prompts that were not there as a whole.
    missed: Vec<u64>,
}

fn main() {
    let mut args = std::env::args().skip(1);
    let folder = args.next().unwrap_or("/kvcachepool".into());
    let mut number = |absent: u64| {
        let given = args.next();
        given.map_or(absent, |n| n.parse().expect("a number"))
    };
    let (rounds, prompts, chunks) = (number(0), number(1), number(16) as u32);
    let socket = Path::new(&folder).join("sidecar.sock");
    let mut engine = attach(&socket);
    let mut round = 0;
    while rounds == 0 || round < rounds {
        match catch_unwind(AssertUnwindSafe(|| play(&mut engine, prompts, chunks))) {
            Ok(found) => {
                round += 1;
                let region = engine.memory.as_ref().map(|m| m.region);
                println!(
                    "{}",
                    serde_json::json!({
                        "round": round, "hits": found.hits, "chunks": prompts * u64::from(chunks),
                        "tiers": found.tiers, "missed": found.missed, "region": region,
                    })
                );
                std::thread::sleep(PACE);
            }
            Err(_) => {
                println!(
                    "{}",
                    serde_json::json!({"round": round, "lost": "the sidecar"})
                );
                while catch_unwind(AssertUnwindSafe(|| engine.reconnect())).is_err() {}
            }
        }
    }
}

fn attach(socket: &Path) -> Vllm {
    loop {
        if let Ok(engine) = catch_unwind(|| Vllm::attach(socket)) {
            return engine;
        }
        std::thread::sleep(PACE);
    }
}

/// Asks for every prompt once.
fn play(engine: &mut Vllm, prompts: u64, chunks: u32) -> Round {
    let mut round = Round::default();
    for prompt in 1..=prompts {
        let (hits, tiers) = ask(engine, &hashes(prompt, chunks));
        round.hits += hits;
        round.tiers.extend(tiers);
        if hits < chunks as usize {
            round.missed.push(prompt);
        }
    }
    round
}

/// Loads what is there of a prompt, in memory or below it, and compares it; stores the prompt where nothing is there. Returns the hits,
/// and the numbers of the tiers that they came from.
fn ask(engine: &mut Vllm, chunks: &[[u8; 32]]) -> (usize, Vec<u8>) {
    let (probe, reply) = engine.probe_below("load", chunks);
    let slots = unpack(&reply.refs).unwrap();
    let ready = reply
        .states
        .iter()
        .take_while(|s| **s == CHUNK_READY)
        .count();
    engine.pin("load", probe, ready);
    for (slot, hash) in slots.iter().zip(chunks).take(ready) {
        if engine.read(slot) != content(hash) {
            println!(
                "{}",
                serde_json::json!({"wrong": "bytes", "slot": slot.slot.get()})
            );
            std::process::exit(1);
        }
    }
    engine.release("load");
    if ready == 0 {
        engine.store("store", chunks);
    }
    (ready, reply.tiers.into_iter().take(ready).collect())
}

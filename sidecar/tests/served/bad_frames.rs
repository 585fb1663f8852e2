//! What cannot be a frame, and frames that say what they must not.

use crate::client::Connection;
use crate::harness::{Sidecar, wait_for};
use crate::vllm::{self, Vllm, hashes, hello};
use kvcachepool_protocol::PROTOCOL_VERSION;
use kvcachepool_protocol::frame::{HEADER_BYTES, Header, MAX_BODY, Op, frame};
use kvcachepool_protocol::message::*;
use kvcachepool_protocol::refs::{SectionRef, pack};

fn header(length: u32, version: u8, opcode: u8, tag: u64) -> [u8; HEADER_BYTES] {
    Header {
        length,
        version,
        opcode,
        flags: 0,
        tag,
    }
    .encode()
}

/// The sidecar still serves, and what was stored before is still there.
fn unharmed(sidecar: &Sidecar, vllm: &mut Vllm) {
    vllm.check("after", &hashes(1, 2));
    assert_eq!(sidecar.metric("engine_starts_total"), 1.0);
}

fn served() -> (Sidecar, Vllm) {
    let sidecar = Sidecar::small();
    let mut vllm = Vllm::attach(&sidecar.socket());
    vllm.store("before", &hashes(1, 2));
    (sidecar, vllm)
}

#[test]
fn frames_that_are_none_are_answered_by_name_and_end_their_connection_only() {
    let (sidecar, mut vllm) = served();

    let mut wrong = Connection::open(&sidecar.socket());
    wrong.send_raw(&header(0, PROTOCOL_VERSION + 2, Op::Hello as u8, 9), &[]);
    let answers = wrong.until_closed();
    assert_eq!(answers[0].code(), Some(ErrorCode::WrongVersion));
    assert_eq!(answers[0].header.tag, 9);
    sidecar.wait_metric("connections_closed_total{reason=\"wrong_version\"}", 1.0);

    let mut large = Connection::open(&sidecar.socket());
    large.send_raw(
        &header(MAX_BODY as u32 + 1, PROTOCOL_VERSION, Op::Hello as u8, 10),
        &[],
    );
    let answers = large.until_closed();
    assert_eq!(answers[0].code(), Some(ErrorCode::LimitReached));
    assert!(answers[0].error().unwrap().message.contains("8388608"));
    sidecar.wait_metric("connections_closed_total{reason=\"oversized_frame\"}", 1.0);

    let torn = Connection::open(&sidecar.socket());
    torn.send_raw(&header(100, PROTOCOL_VERSION, Op::Hello as u8, 11), &[]);
    torn.send_raw(b"half a body", &[]);
    drop(torn);
    sidecar.wait_metric("connections_closed_total{reason=\"torn_frame\"}", 1.0);

    unharmed(&sidecar, &mut vllm);
}

#[test]
fn a_frame_that_comes_byte_by_byte_is_a_frame() {
    let sidecar = Sidecar::small();
    let mut slow = Connection::open(&sidecar.socket());
    let message = hello(Role::Admin, 1, &vllm::incarnation());
    for byte in frame(Op::Hello, 0, 5, &encode(&message).unwrap()) {
        slow.send_raw(&[byte], &[]);
    }
    let reply: HelloReply = slow.answer(5).unwrap().read();
    assert_eq!(reply.version, PROTOCOL_VERSION);
}

#[test]
fn unknown_opcodes_bodies_and_roles_are_refused_by_name_and_the_connection_goes_on() {
    let (sidecar, mut vllm) = served();

    let mut first = Connection::open(&sidecar.socket());
    let answer = first.ask(Op::Probe, &vllm.probe_message("r", &hashes(1, 1)));
    assert_eq!(answer.code(), Some(ErrorCode::HelloFirst));

    vllm.scheduler
        .send_raw(&header(0, PROTOCOL_VERSION, 200, 1 << 40), &[]);
    let answer = vllm.scheduler.answer(1 << 40).unwrap();
    assert_eq!(answer.code(), Some(ErrorCode::UnknownOpcode));

    vllm.scheduler
        .send_raw(&frame(Op::Probe, 0, 1 << 41, b"\xc1 no msgpack"), &[]);
    let answer = vllm.scheduler.answer(1 << 41).unwrap();
    assert_eq!(answer.code(), Some(ErrorCode::BadBody));

    let message = vllm.probe_message("r", &hashes(1, 1));
    let answer = vllm.worker.ask(Op::Probe, &message);
    assert_eq!(answer.code(), Some(ErrorCode::WrongRole));

    let mut short = vllm.probe_message("r", &hashes(1, 1));
    short.hashes.truncate(31);
    let answer = vllm.scheduler.ask(Op::Probe, &short);
    assert_eq!(answer.code(), Some(ErrorCode::BadHashes));

    let mut grant = vllm.grant_message("r", &hashes(3, 1));
    grant.chunks[0].hash.push(0);
    let answer = vllm.scheduler.ask(Op::Grant, &grant);
    let invalid = answer.code() == Some(ErrorCode::BadHashes)
        || answer.read::<GrantReply>().results == [GRANT_INVALID];
    assert!(invalid);

    for code in [
        "hello_first",
        "unknown_opcode",
        "bad_body",
        "wrong_role",
        "bad_hashes",
    ] {
        sidecar.wait_metric(&format!("refused_total{{code=\"{code}\"}}"), 1.0);
    }
    unharmed(&sidecar, &mut vllm);
}

#[test]
fn slots_of_another_process_of_another_region_or_out_of_range_are_ignored() {
    let (sidecar, mut owner) = served();
    let chunks = hashes(4, 2);
    let refs = owner.grant("owner", &chunks);
    let region = owner.memory.as_ref().unwrap().region;

    let mut thief = Vllm::attach(&sidecar.socket());
    let mut steal = |region: u64, refs: &[SectionRef]| {
        let message = Sections {
            region,
            refs: pack(refs),
        };
        thief.worker.send(Op::Commit, &message, &[]);
        thief.worker.send(Op::Abort, &message, &[]);
    };
    steal(region, &refs);
    steal(region + 1, &refs);
    steal(region, &[SectionRef::new(u32::MAX - 1, 1, u32::MAX, 0)]);
    steal(region, &[SectionRef::new(1 << 24, 1, 1, 77)]);
    let stale = SectionRef::new(refs[0].slot.get(), refs[0].generation.get() + 1, 1, 0);
    steal(region, &[stale]);
    // One-way frames are not answered: a question behind them shows that they were read.
    thief.ready("thief", &chunks);
    assert_eq!(
        owner.ready("owner", &chunks),
        0,
        "nothing was committed by the thief"
    );

    for (slot, hash) in refs.iter().zip(&chunks) {
        owner.write(slot, &vllm::content(hash));
    }
    owner.commit(&refs);
    owner.check("owner", &chunks);
    wait_for("the refusals to be counted", || {
        let metrics = sidecar.metrics();
        let counted: f64 = metrics
            .iter()
            .filter(|(name, _)| {
                name.starts_with("frames_ignored_total") || *name == "commits_ignored_total"
            })
            .map(|(_, value)| value)
            .sum();
        (counted >= 5.0).then_some(())
    });
    unharmed(&sidecar, &mut owner);
}

#[test]
fn another_sessions_lease_cannot_be_released_and_an_unknown_pin_is_ignored() {
    let (sidecar, mut owner) = served();
    let (tag, reply) = owner.probe("held", &hashes(1, 2));
    assert_eq!(reply.states, [CHUNK_READY; 2]);
    owner.pin("held", tag, 2);
    let leased = wait_for("the lease", || {
        let bytes = sidecar.status()["memory"]["leased_bytes"].as_u64()?;
        (bytes > 0).then_some(bytes)
    });

    let mut other = Vllm::attach(&sidecar.socket());
    other.pin("held", tag, 2);
    other.pin("held", 1 << 50, 2);
    other.release("held");
    other.ready("sync", &hashes(9, 1));
    assert_eq!(
        sidecar.status()["memory"]["leased_bytes"].as_u64(),
        Some(leased)
    );
    owner.release("held");
    wait_for("the end of the lease", || {
        (sidecar.status()["memory"]["leased_bytes"].as_u64()? == 0).then_some(())
    });
    unharmed(&sidecar, &mut owner);
}

#[test]
fn a_descriptor_that_does_not_fit_is_refused_at_register() {
    let sidecar = Sidecar::small();
    let mut vllm = Vllm::silent(&sidecar.socket());
    vllm.hello_until_mapped();
    let register = |change: fn(&mut Register)| {
        let mut message = vllm::worker_register();
        change(&mut message);
        message
    };
    type Change = fn(&mut Register);
    let cases: [(Change, ErrorCode); 4] = [
        (|r| r.layout = "{".into(), ErrorCode::BadBody),
        (|r| r.groups[0].shard = 4, ErrorCode::BadBody),
        (
            |r| r.groups[0].block_bytes = 1 << 30,
            ErrorCode::SectionTooLarge,
        ),
        (|r| r.world = 2, ErrorCode::MultiNodeUnsupported),
    ];
    for (change, code) in cases {
        let answer = vllm.worker.ask(Op::Register, &register(change));
        assert_eq!(answer.code(), Some(code));
    }
    let mut weak = vllm::scheduler_register();
    weak.hashing.as_mut().unwrap().algorithm = "xxhash".into();
    let answer = vllm.scheduler.ask(Op::Register, &weak);
    assert_eq!(answer.code(), Some(ErrorCode::HashAlgorithmRefused));
    sidecar.wait_metric("refused_total{code=\"section_too_large\"}", 1.0);
    // The right one is taken after all the wrong ones.
    vllm.register();
    vllm.store("r", &hashes(1, 1));
}

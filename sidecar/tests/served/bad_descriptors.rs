//! Descriptors of the wrong kind, unsealed ones, memory of another format, missing proofs of death.

use crate::cgroup::Cgroup;
use crate::client::Connection;
use crate::harness::{Sidecar, signal_to};
use crate::vllm::{Vllm, hashes, hello, incarnation, own_pidfd};
use kvcachepool_engine::table::Geometry;
use kvcachepool_memory::arena::Arena;
use kvcachepool_memory::memfd::Pages;
use kvcachepool_protocol::frame::Op;
use kvcachepool_protocol::message::*;
use kvcachepool_protocol::table;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
use rustix::process::Signal;

fn plain_memfd(bytes: u64) -> OwnedFd {
    let fd = memfd_create("unsealed", MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&fd, bytes).unwrap();
    fd
}

#[test]
fn surplus_descriptors_are_closed_and_counted() {
    let sidecar = Sidecar::small();
    let mut client = Connection::open(&sidecar.socket());
    let fds: Vec<OwnedFd> = (0..3).map(|_| plain_memfd(4096)).collect();
    let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let message = hello(Role::Admin, 1, &incarnation());
    // Without the flag no frame claims them.
    let body = encode(&message).unwrap();
    client.send_raw(
        &kvcachepool_protocol::frame::frame(Op::Hello, 0, 1, &body),
        &borrowed,
    );
    let _: HelloReply = client.answer(1).unwrap().read();
    sidecar.wait_metric("descriptors_surplus_total", 3.0);
}

#[test]
fn memory_that_is_not_ours_is_answered_unmap_and_the_live_arena_stays() {
    let sidecar = Sidecar::small();
    let mut owner = Vllm::attach(&sidecar.socket());
    owner.store("r", &hashes(1, 2));

    let foreign = Arena::create(Geometry::new(99, 64 << 20, 1024), 1024, Pages::Base).unwrap();
    let files: [(OwnedFd, OwnedFd); 3] = [
        // Unsealed: anybody could truncate it under the sidecar's mapping.
        (plain_memfd(64 << 20), plain_memfd(1 << 20)),
        // No memory at all.
        (own_pidfd(), own_pidfd()),
        // Sealed and well-formed, but not the file of an earlier HELLO.
        (
            foreign.arena_fd.try_clone().unwrap(),
            foreign.table_fd.try_clone().unwrap(),
        ),
    ];
    for (arena, table) in files {
        let mut liar = Vllm::silent(&sidecar.socket());
        let first = liar.hello(Role::Worker);
        liar.take(&first.read(), first.fds);
        liar.number += 1;
        let mut message = hello(Role::Worker, liar.number, &liar.incarnation);
        message.lock = liar.lock;
        message.region = Some(99);
        message.fds = ["pidfd", "arena", "table"].map(String::from).to_vec();
        let answer = liar.worker.ask_with(
            Op::Hello,
            &message,
            &[liar.pidfd.as_fd(), arena.as_fd(), table.as_fd()],
        );
        match answer.code() {
            Some(code) => assert_eq!(code, ErrorCode::BadDescriptor),
            None => assert_eq!(answer.read::<HelloReply>().memory, Memory::Unmap),
        }
    }
    owner.check("r", &hashes(1, 2));
}

#[test]
fn a_table_of_another_version_is_answered_unmap_after_a_restart() {
    let mut sidecar = Sidecar::small();
    let mut vllm = Vllm::attach(&sidecar.socket());
    vllm.store("r", &hashes(1, 2));
    sidecar.kill_all();
    // Another build's format, as a vLLM that outlived it would hand back.
    let version = std::mem::offset_of!(table::Header, version) as u64;
    let memory = vllm.memory.as_ref().unwrap();
    rustix::io::pwrite(&memory.table, &(table::VERSION + 1).to_ne_bytes(), version).unwrap();
    sidecar.run();
    sidecar.wait_socket();
    vllm.worker = Connection::open(&sidecar.socket());
    let reply: HelloReply = vllm.hello(Role::Worker).read();
    assert_eq!(reply.memory, Memory::Unmap, "{}", reply.reason);
    assert!(!reply.reason.is_empty());
    vllm.memory = None;
    // Unmapped everywhere: a new arena is made.
    vllm.scheduler = Connection::open(&sidecar.socket());
    vllm.hello_until_mapped();
    vllm.register();
    sidecar.wait_populated();
    vllm.store("again", &hashes(1, 2));
}

/// Hands `foreign` back as the memory of `vllm` to a sidecar that has none, and looks at what became of it: nothing may.
fn hand_back_in_vain(sidecar: &Sidecar, vllm: &mut Vllm, foreign: &Arena) -> HelloReply {
    let memory = vllm.memory.as_mut().unwrap();
    memory.arena = foreign.arena_fd.try_clone().unwrap();
    memory.table = foreign.table_fd.try_clone().unwrap();
    vllm.worker = Connection::open(&sidecar.socket());
    let reply: HelloReply = vllm.hello(Role::Worker).read();
    assert_eq!(reply.memory, Memory::Unmap, "{}", reply.reason);
    // What the supervisor kept would be the memory of the next engine.
    signal_to(sidecar.engine(), Signal::KILL);
    sidecar.wait_metric("engine_starts_total", 2.0);
    sidecar.wait_socket();
    assert!(
        !sidecar
            .log()
            .contains("adopted the memory of the last engine process")
    );
    assert_eq!(fstat(&foreign.arena_fd).unwrap().st_blocks, 0, "populated");
    reply
}

#[test]
fn memory_of_another_region_than_the_named_one_is_neither_kept_nor_populated() {
    let mut sidecar = Sidecar::small();
    let mut vllm = Vllm::attach(&sidecar.socket());
    sidecar.kill_all();
    sidecar.run();
    sidecar.wait_socket();
    let foreign = Arena::create(Geometry::new(999, 256 << 20, 1024), 4096, Pages::Base).unwrap();
    let reply = hand_back_in_vain(&sidecar, &mut vllm, &foreign);
    assert_eq!(reply.reason, "OtherRegion");
}

#[test]
fn memory_beyond_the_limit_of_the_container_is_neither_kept_nor_populated() {
    let Some(cgroup) = Cgroup::with_limit(224 << 20) else {
        return;
    };
    let mut sidecar = Sidecar::prepare("memory: {size: 64Mi}\n");
    sidecar.run_below(&cgroup.procs());
    sidecar.wait_socket();
    sidecar.wait_populated();
    let mut vllm = Vllm::attach(&sidecar.socket());
    let region = vllm.memory.as_ref().unwrap().region;
    sidecar.kill_all();
    sidecar.run_below(&cgroup.procs());
    sidecar.wait_socket();
    let foreign = Arena::create(Geometry::new(region, 512 << 20, 1024), 8192, Pages::Base).unwrap();
    hand_back_in_vain(&sidecar, &mut vllm, &foreign);
}

#[test]
fn a_lock_that_is_not_held_and_a_stale_hello_are_refused() {
    let sidecar = Sidecar::small();
    let mut vllm = Vllm::attach(&sidecar.socket());

    let mut liar = Connection::open(&sidecar.socket());
    let pidfd = own_pidfd();
    let mut message = hello(Role::Worker, 1, &incarnation());
    message.fds = vec!["pidfd".into()];
    message.lock = Some(4_000);
    let answer = liar.ask_with(Op::Hello, &message, &[pidfd.as_fd()]);
    assert_eq!(answer.code(), Some(ErrorCode::LockNotHeld));

    let mut old = Connection::open(&sidecar.socket());
    let mut message = hello(Role::Worker, 1, &vllm.incarnation);
    message.fds = vec!["pidfd".into()];
    message.lock = vllm.lock;
    let tag = old.send(Op::Hello, &message, &[pidfd.as_fd()]);
    let refused = old.answer(tag).map(|answer| answer.code());
    assert!(matches!(refused, None | Some(Some(ErrorCode::StaleHello))));
    assert!(old.until_closed().is_empty());

    sidecar.wait_metric("refused_total{code=\"lock_not_held\"}", 1.0);
    sidecar.wait_metric("refused_total{code=\"stale_hello\"}", 1.0);
    vllm.store("r", &hashes(1, 1));
}

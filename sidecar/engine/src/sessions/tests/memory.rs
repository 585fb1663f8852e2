//! Whose memory is whose after the death of a container.

use super::peer::*;
use crate::memory_table::MemoryTable;
use crate::sessions::{ConnId, Output};
use crate::table::{FREE, GRANTED, Table};
use kvcachepool_protocol::frame::Op;
use kvcachepool_protocol::message::*;
use kvcachepool_protocol::refs::{SectionRef, pack};

fn handing_back(role: Role, process: u8, number: u64, lock: u32, region: u64) -> Hello {
    Hello {
        lock: Some(lock),
        region: Some(region),
        fds: vec!["pidfd".into(), "arena".into(), "table".into()],
        ..hello(role, process, number)
    }
}

/// A table with one chunk stored and another granted, and the pod after the container's death.
fn left_behind() -> (Pod, MemoryTable, Vec<SectionRef>) {
    let mut w = World::new();
    let (scheduler, worker) = w.instance();
    w.store(scheduler, worker, &[chunk(1)]);
    let granted =
        kvcachepool_protocol::refs::unpack(&w.grant(scheduler, &[chunk(2)]).1.refs).unwrap();
    let table = w.core.engine().unwrap().table().clone();
    (
        Pod {
            locked: [1, 2].into(),
            next_lock: 2,
            next_region: 1,
            ..Pod::default()
        },
        table,
        granted,
    )
}

#[test]
fn no_new_arena_while_a_lock_of_an_earlier_boot_is_held_and_its_memory_is_not_back() {
    let (pod, _, _) = left_behind();
    let mut w = World::of(pod, None);
    assert!(w.core.engine().is_none());
    assert_eq!(
        w.core.status(w.now).reasons[0].code,
        "ArenaHeldByEarlierBoot"
    );
    w.pass(1_000);
    assert!(w.core.engine().is_none());
    // a process that never mapped anything says so
    let conn = w.connect();
    let reply = w.greet(
        conn,
        &Hello {
            lock: Some(2),
            ..hello(Role::Scheduler, 2, 5)
        },
        false,
    );
    assert_eq!(
        (reply.memory, reply.reason.as_str()),
        (Memory::None, "ArenaHeldByEarlierBoot")
    );
    w.core.host_mut().locked.remove(&1);
    w.pass(1_000);
    assert_eq!(w.core.engine().unwrap().geometry().region, 2);
}

#[test]
fn the_memory_comes_back_with_what_was_published_and_what_is_still_being_written() {
    let (mut pod, table, granted) = left_behind();
    pod.kept.insert(11, table);
    let mut w = World::of(pod, None);
    let worker = w.connect();
    let mut back = handing_back(Role::Worker, 1, 5, 1, 1);
    back.grants = pack(&granted);
    assert_eq!(w.greet(worker, &back, false).memory, Memory::Held);
    let row = w.core.engine().unwrap().table().row(granted[0].slot.get());
    assert_eq!((row.state, row.owner), (GRANTED, 1));
    w.commit(worker, 1, &pack(&granted));
    w.digest_all();
    let scheduler = w.connect();
    w.greet(scheduler, &handing_back(Role::Scheduler, 2, 5, 2, 1), true);
    let _: RegisterReply = w.ask(worker, Op::Register, &register_worker());
    let _: RegisterReply = w.ask(scheduler, Op::Register, &register_scheduler());
    assert_eq!(w.states(scheduler, "r", &[1, 2]), [CHUNK_READY; 2]);
}

#[test]
fn memory_that_cannot_be_used_is_unmapped_by_all_before_there_is_a_new_one() {
    let (pod, _, _) = left_behind();
    let mut w = World::of(pod, None);
    let worker = w.connect();
    let reply = w.greet(worker, &handing_back(Role::Worker, 1, 5, 1, 1), false);
    assert_eq!(
        (reply.memory, reply.reason.as_str()),
        (Memory::Unmap, "Unusable")
    );
    let scheduler = w.connect();
    assert_eq!(
        w.greet(scheduler, &handing_back(Role::Scheduler, 2, 5, 2, 1), false)
            .memory,
        Memory::Unmap
    );
    let reply = w.greet(
        worker,
        &Hello {
            lock: Some(1),
            ..hello(Role::Worker, 1, 6)
        },
        false,
    );
    assert_eq!(reply.memory, Memory::None);
    let reply = w.greet(
        scheduler,
        &Hello {
            lock: Some(2),
            ..hello(Role::Scheduler, 2, 6)
        },
        false,
    );
    assert_eq!((reply.memory, reply.region), (Memory::Sent, Some(2)));
}

#[test]
fn another_region_than_the_live_one_is_unmapped_and_its_frames_are_ignored() {
    let mut w = World::new();
    let (scheduler, worker) = w.instance();
    let (_, granted) = w.grant(scheduler, &[chunk(1)]);
    let slot = kvcachepool_protocol::refs::unpack(&granted.refs).unwrap()[0]
        .slot
        .get();
    w.commit(worker, granted.region + 1, &granted.refs);
    assert!(w.digests().is_empty());
    assert_eq!(w.core.engine().unwrap().table().row(slot).state, GRANTED);
    let reply = w.greet(worker, &handing_back(Role::Worker, 1, 3, 1, 77), false);
    assert_eq!(
        (reply.memory, reply.reason.as_str()),
        (Memory::Unmap, "OtherRegion")
    );
    let tag = w.say(worker, Op::Register, &register_worker(), NO_FDS);
    assert_eq!(w.error(tag), (ErrorCode::NoArena, false));
}

#[test]
fn owners_of_an_earlier_boot_are_asked_for_and_their_slots_wait_30_s() {
    let (mut pod, table, granted) = left_behind();
    pod.locked.clear();
    let mut w = World::of(pod, Some(table));
    let state = |w: &World| {
        w.core
            .engine()
            .unwrap()
            .table()
            .row(granted[0].slot.get())
            .state
    };
    w.pass(1_000);
    w.pass(29_999);
    assert_eq!(state(&w), GRANTED);
    w.pass(1);
    assert_eq!(state(&w), FREE);
}

#[test]
fn a_failed_arena_is_a_reason_and_is_tried_again() {
    let mut w = World::of(
        Pod {
            arenas_fail: true,
            ..Pod::default()
        },
        None,
    );
    let status = w.core.status(w.now);
    assert_eq!(
        (
            status.memory.reason.as_str(),
            status.reasons[0].message.as_str()
        ),
        ("ArenaFailed", "no memory")
    );
    assert_eq!(w.core.health(), (status.state, status.reasons));
    w.core.host_mut().arenas_fail = false;
    w.pass(60_000);
    assert!(w.core.engine().is_some());
}

/// The next engine over a table, with the processes of the one before: (world, scheduler, worker).
fn restart(table: MemoryTable) -> (World, ConnId, ConnId) {
    let pod = Pod {
        locked: [1, 2].into(),
        next_lock: 2,
        next_region: 1,
        ..Pod::default()
    };
    let mut w = World::of(pod, Some(table));
    let (worker, scheduler) = (w.connect(), w.connect());
    w.greet(worker, &handing_back(Role::Worker, 1, 9, 1, 1), true);
    w.greet(scheduler, &handing_back(Role::Scheduler, 2, 9, 2, 1), true);
    let _: RegisterReply = w.ask(worker, Op::Register, &register_worker());
    let _: RegisterReply = w.ask(scheduler, Op::Register, &register_scheduler());
    (w, scheduler, worker)
}

#[test]
fn a_record_that_a_granted_slot_still_names_is_not_used_twice_after_a_restart() {
    let mut w = World::new();
    let (scheduler, _) = w.instance();
    let grant = Grant {
        request: "x".into(),
        namespace: Vec::new(),
        chunks: vec![chunk(1)],
        ttl_s: 1,
    };
    let _: GrantReply = w.ask(scheduler, Op::Grant, &grant);
    w.pass(2_000);
    let table = w.core.engine().unwrap().table().clone();
    let (mut w, scheduler, worker) = restart(table);
    let of = |n: u8| GrantChunk {
        hash: hash(n).0.to_vec(),
        ..chunk(1)
    };
    let a = w.store(scheduler, worker, &[of(10)]);
    let b = w.store(scheduler, worker, &[of(11)]);
    assert_ne!(a[0].slot, b[0].slot);
    let found: ProbeReply = w.ask(scheduler, Op::Probe, &probe("r", &[10]));
    assert_eq!((found.states, found.refs), (vec![CHUNK_READY], pack(&a)));
    w.core.engine().unwrap().check().unwrap();
}

#[test]
fn records_and_rows_that_no_engine_wrote_are_not_believed() {
    let mut w = World::new();
    let (scheduler, worker) = w.instance();
    let refs = w.store(scheduler, worker, &[chunk(1), chunk(2), chunk(3)]);
    let table = w.core.engine().unwrap().table().clone();
    let record = |n: usize| table.row(refs[n].slot.get()).chunk;
    let (one, two) = (record(0), record(1));

    let mut far = table.clone();
    let mut c = far.chunk(one);
    c.first_token = u32::MAX - 1;
    far.set_chunk(one, &c);
    let (mut w, scheduler, _) = restart(far);
    assert_eq!(w.states(scheduler, "r", &[1]), [CHUNK_ABSENT]);
    w.grant(scheduler, &[chunk(2), chunk(1)]);

    let mut circle = table.clone();
    let (mut c1, c2) = (circle.chunk(one), circle.chunk(two));
    c1.parent = c2.key;
    circle.set_chunk(one, &c1);
    let (w, _, _) = restart(circle);
    w.core.engine().unwrap().check().unwrap();

    let mut foreign = table.clone();
    c1.last_hash = [0xaa; 32];
    foreign.set_chunk(one, &c1);
    let (mut w, scheduler, _) = restart(foreign);
    assert_eq!(
        w.states(scheduler, "r", &[1]),
        [CHUNK_ABSENT],
        "the key does not match its parts"
    );

    for slot_rows in [0, 65, u32::MAX] {
        let mut torn = table.clone();
        let slot = refs[0].slot.get();
        let row = torn.row(slot);
        torn.set_fields(slot, &crate::table::Row { slot_rows, ..row });
        let (mut w, scheduler, worker) = restart(torn);
        assert_eq!(w.states(scheduler, "r", &[1]), [CHUNK_ABSENT]);
        w.store(scheduler, worker, &[chunk(1)]);
    }
}

#[test]
fn no_new_arena_while_the_lock_file_cannot_say_who_maps_an_earlier_one() {
    let (pod, _, _) = left_behind();
    let mut w = World::of(
        Pod {
            lock_file_fails: true,
            ..pod
        },
        None,
    );
    let logged = |w: &World| {
        let failed = |o: &&Output| {
            matches!(
                o,
                Output::Log {
                    event: "LockFileFailed",
                    ..
                }
            )
        };
        w.out.iter().filter(failed).count()
    };
    assert_eq!(w.core.status(w.now).reasons[0].code, "LockFileFailed");
    w.pass(1_000);
    w.pass(1_000);
    assert!(w.core.engine().is_none());
    assert_eq!(logged(&w), 1, "once, not every second");
    assert_eq!(w.session_events("LockFileFailed"), 3);
    w.core.host_mut().lock_file_fails = false;
    w.pass(1_000);
    assert_eq!(
        w.core.status(w.now).reasons[0].code,
        "ArenaHeldByEarlierBoot"
    );
    w.core.host_mut().locked.clear();
    w.pass(1_000);
    assert_eq!(w.core.engine().unwrap().geometry().region, 2);
}

#[test]
fn the_first_question_that_the_lock_file_answers_does_not_hold_up_who_asks_for_memory() {
    let (mut pod, _, _) = left_behind();
    pod.locked = [2].into();
    pod.lock_file_fails = true;
    let mut w = World::of(pod, None);
    w.core.host_mut().lock_file_fails = false;
    let conn = w.connect();
    let maps_nothing = Hello {
        lock: Some(2),
        ..hello(Role::Scheduler, 2, 5)
    };
    assert_eq!(w.greet(conn, &maps_nothing, false).memory, Memory::Sent);
}

#[test]
fn a_lock_that_cannot_be_asked_for_counts_as_held_and_confirms_nobody() {
    let mut w = World::new();
    let (scheduler, _) = w.instance();
    let (_, granted) = w.grant(scheduler, &[chunk(1)]);
    let slot = kvcachepool_protocol::refs::unpack(&granted.refs).unwrap()[0]
        .slot
        .get();
    w.core.host_mut().lock_file_fails = true;
    w.core.host_mut().locked.clear();
    w.pass(1_000);
    w.pass(60_000);
    assert_eq!(
        w.core.engine().unwrap().table().row(slot).state,
        GRANTED,
        "its writer may live"
    );
    let conn = w.connect();
    let named = Hello {
        lock: Some(1),
        ..hello(Role::Worker, 1, 9)
    };
    let tag = w.say(conn, Op::Hello, &named, &[pidfd()]);
    assert_eq!(w.error(tag), (ErrorCode::NoArena, true));
    w.core.host_mut().lock_file_fails = false;
    w.pass(1_000);
    w.pass(30_000);
    assert_eq!(w.core.engine().unwrap().table().row(slot).state, FREE);
}

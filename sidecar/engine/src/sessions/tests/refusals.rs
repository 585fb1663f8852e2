//! Every bad input has a name, and hurts nobody else.

use super::peer::*;
use crate::sessions::*;
use kvcachepool_protocol::frame::{Header, Op};
use kvcachepool_protocol::message::*;
use std::collections::BTreeMap;

fn raw(w: &mut World, conn: ConnId, opcode: u8, body: &[u8]) -> u64 {
    let header = Header {
        length: body.len() as u32,
        version: 1,
        opcode,
        flags: 0,
        tag: 4711,
    };
    w.input(Input::Frame {
        conn,
        header,
        body,
        fds: NO_FDS,
    });
    4711
}

#[test]
fn hello_comes_first() {
    let mut w = World::new();
    let conn = w.connect();
    let tag = w.say(conn, Op::Probe, &probe("r", &[1]), NO_FDS);
    assert_eq!(w.error(tag), (ErrorCode::HelloFirst, true));
    let again = w.out.len();
    w.say(conn, Op::Probe, &probe("r", &[1]), NO_FDS);
    assert_eq!(w.out.len(), again, "nothing of a closed connection is read");
}

#[test]
fn a_process_whose_death_cannot_be_seen_is_refused() {
    let mut w = World::new();
    let conn = w.connect();
    let none = Hello {
        fds: Vec::new(),
        ..hello(Role::Worker, 1, 1)
    };
    let tag = w.say(conn, Op::Hello, &none, NO_FDS);
    assert_eq!(w.error(tag), (ErrorCode::NoProofOfDeath, true));
    let conn = w.connect();
    let deaf = FdFacts {
        id: FdId(1),
        kind: FdType::Other,
    };
    let tag = w.say(conn, Op::Hello, &hello(Role::Worker, 1, 1), &[deaf]);
    assert_eq!(w.error(tag), (ErrorCode::NoProofOfDeath, true));
    let conn = ConnId(99);
    w.input(Input::Connected {
        conn,
        peer: Some(pidfd()),
        pid: 0,
    });
    let tag = w.say(conn, Op::Hello, &none, NO_FDS);
    let (reply, _): (HelloReply, _) = w.answer(tag);
    assert_eq!(reply.memory, Memory::LockFirst, "SO_PEERPIDFD is as good");
}

#[test]
fn an_older_hello_closes_its_own_connection() {
    let mut w = World::new();
    let (conn, late) = (w.connect(), w.connect());
    w.greet(conn, &hello(Role::Worker, 1, 5), true);
    let tag = w.say(late, Op::Hello, &hello(Role::Worker, 1, 5), &[pidfd()]);
    assert_eq!(w.error(tag), (ErrorCode::StaleHello, true));
    w.greet(conn, &hello(Role::Worker, 1, 6), true);
}

#[test]
fn the_next_hello_closes_the_older_connection_and_drops_its_frames() {
    let mut w = World::new();
    let (scheduler, worker) = w.instance();
    let (_, granted) = w.grant(scheduler, &[chunk(1)]);
    let conn = w.connect();
    w.greet(
        conn,
        &Hello {
            lock: Some(1),
            ..hello(Role::Worker, 1, 3)
        },
        true,
    );
    assert!(w.out.contains(&Output::Close {
        conn: worker,
        reason: "Superseded"
    }));
    w.commit(worker, granted.region, &granted.refs);
    assert!(w.digests().is_empty());
}

#[test]
fn a_rank_that_begins_is_granted_nothing_by_a_scheduler_of_the_ranks_before_it() {
    for buried_first in [true, false] {
        let mut w = World::new();
        let (earlier, _) = w.instance();
        let bury = |w: &mut World| {
            let process = w.process(0);
            w.input(Input::ProcessDied { process });
        };
        if buried_first {
            bury(&mut w);
        }
        let rank = w.attach(Role::Worker, 3);
        if !buried_first {
            bury(&mut w);
        }
        let _: RegisterReply = w.ask(rank, Op::Register, &register_worker());
        let grant = Grant {
            request: "r".into(),
            namespace: Vec::new(),
            chunks: vec![chunk(1)],
            ttl_s: 0,
        };
        w.say(earlier, Op::Grant, &grant, NO_FDS);
        let usage = w.core.engine().unwrap().memory.usage();
        assert_eq!(usage.granted_bytes, 0, "buried first: {buried_first}");
        assert!(w.out.contains(&Output::Close {
            conn: earlier,
            reason: "RankBegan",
        }));
        assert_eq!(w.session_events("RankBegan"), 1);
    }
}

#[test]
fn a_scheduler_greets_anew_once_for_a_rank_of_another_process_and_never_for_its_own() {
    let mut w = World::new();
    w.instance();
    let dead = w.process(0);
    w.input(Input::ProcessDied { process: dead });
    let rank = w.attach(Role::Worker, 3);
    let scheduler = w.connect();
    let again = Hello {
        lock: Some(2),
        ..hello(Role::Scheduler, 2, 3)
    };
    w.greet(scheduler, &again, true);
    let _: RegisterReply = w.ask(rank, Op::Register, &register_worker());
    let ready: RegisterReply = w.ask(scheduler, Op::Register, &register_scheduler());
    assert!(ready.ready);
    assert_eq!(w.grant(scheduler, &[chunk(1)]).1.results, [GRANT_GRANTED]);
    // the rank's next HELLO continues its session: nothing begins
    let next = Hello {
        lock: Some(3),
        ..hello(Role::Worker, 3, 3)
    };
    w.greet(rank, &next, true);
    assert_eq!(w.session_events("RankBegan"), 1);
    assert_eq!(w.states(scheduler, "r", &[1]), [CHUNK_ABSENT]);

    let mut w = World::new();
    let scheduler = w.attach(Role::Scheduler, 1);
    let rank = w.connect();
    let same_process = Hello {
        lock: Some(1),
        ..hello(Role::Worker, 1, 1)
    };
    w.greet(rank, &same_process, true);
    assert_eq!(w.session_events("RankBegan"), 0);
    assert_eq!(w.states(scheduler, "r", &[1]), [CHUNK_ABSENT]);
}

#[test]
fn nothing_is_read_of_a_process_after_its_proven_death() {
    let mut w = World::new();
    let (_, worker) = w.instance();
    let dead = w.process(0);
    w.input(Input::ProcessDied { process: dead });
    assert!(w.out.contains(&Output::Close {
        conn: worker,
        reason: "ProcessDied"
    }));
    let conn = w.connect();
    let tag = w.say(conn, Op::Hello, &hello(Role::Worker, 1, 9), &[pidfd()]);
    assert_eq!(w.error(tag), (ErrorCode::StaleHello, true));
}

#[test]
fn a_lock_must_be_held_and_ones_own() {
    let mut w = World::new();
    w.attach(Role::Worker, 1);
    for (process, lock) in [(2, 9), (3, 1), (4, 0)] {
        let conn = w.connect();
        let tag = w.say(
            conn,
            Op::Hello,
            &Hello {
                lock: Some(lock),
                ..hello(Role::Worker, process, 1)
            },
            &[pidfd()],
        );
        assert_eq!(
            w.error(tag),
            (ErrorCode::LockNotHeld, true),
            "{process} {lock}"
        );
    }
}

#[test]
fn bodies_that_are_no_messages_are_named_and_the_connection_goes_on() {
    let mut w = World::new();
    let (scheduler, worker) = w.instance();
    for op in [
        Op::Register,
        Op::Probe,
        Op::Pin,
        Op::Release,
        Op::Grant,
        Op::Abort,
        Op::Events,
        Op::Report,
    ] {
        for body in [&b""[..], b"\xc1", b"\x93\xc0\xc0\xc0", &[0xff; 64]] {
            let tag = raw(&mut w, scheduler, op as u8, body);
            assert_eq!(w.error(tag), (ErrorCode::BadBody, false), "{op:?}");
        }
    }
    let tag = raw(&mut w, worker, Op::Commit as u8, b"\xc1");
    assert_eq!(w.error(tag), (ErrorCode::BadBody, false));
    let tag = w.say(
        worker,
        Op::Commit,
        &Sections {
            region: 1,
            refs: vec![0; 15],
        },
        NO_FDS,
    );
    assert_eq!(w.error(tag), (ErrorCode::BadBody, false));
    let tag = w.say(
        scheduler,
        Op::Probe,
        &Probe {
            hashes: vec![0; 33],
            ..probe("r", &[])
        },
        NO_FDS,
    );
    assert_eq!(w.error(tag), (ErrorCode::BadHashes, false));
    let tag = w.say(
        scheduler,
        Op::Probe,
        &Probe {
            namespace: vec![0; 3],
            ..probe("r", &[])
        },
        NO_FDS,
    );
    assert_eq!(w.error(tag), (ErrorCode::BadHashes, false));
    let tag = raw(&mut w, scheduler, 77, b"");
    assert_eq!(w.error(tag), (ErrorCode::UnknownOpcode, false));
    assert_eq!(w.states(scheduler, "r", &[1]), [CHUNK_ABSENT]);
}

#[test]
fn roles_may_do_only_what_is_theirs() {
    let mut w = World::new();
    let (scheduler, worker) = w.instance();
    for (conn, op) in [
        (worker, Op::Probe),
        (worker, Op::Grant),
        (scheduler, Op::Commit),
        (worker, Op::Events),
        (worker, Op::Admin),
    ] {
        let tag = raw(&mut w, conn, op as u8, b"\x80");
        assert_eq!(w.error(tag), (ErrorCode::WrongRole, false), "{op:?}");
    }
    let tag = raw(&mut w, scheduler, Op::Window as u8, b"\x80");
    assert_eq!(w.error(tag), (ErrorCode::WrongRole, false));
}

#[test]
fn what_a_commit_or_abort_may_not_touch_it_does_not() {
    let mut w = World::new();
    let (scheduler, worker) = w.instance();
    let stored = w.store(scheduler, worker, &[chunk(1)]);
    let before = w.core.engine().unwrap().memory.usage();
    for slot in [0, 1, 5, u32::MAX - 1, u32::MAX] {
        for generation in [0, 1, 2, u32::MAX] {
            let section = kvcachepool_protocol::refs::SectionRef::new(slot, generation, 1, 200);
            let refs = kvcachepool_protocol::refs::pack(&[section, stored[0]]);
            w.say(
                worker,
                Op::Commit,
                &Sections {
                    region: 1,
                    refs: refs.clone(),
                },
                NO_FDS,
            );
            w.say(worker, Op::Abort, &Sections { region: 1, refs }, NO_FDS);
        }
    }
    assert_eq!(w.core.engine().unwrap().memory.usage(), before);
}

#[test]
fn ranks_that_disagree_and_instances_over_pods_are_refused_by_name() {
    let mut w = World::new();
    let (_, worker) = w.instance();
    let over_pods = Register {
        world: 2,
        local_world: 1,
        ..register_worker()
    };
    let tag = w.say(worker, Op::Register, &over_pods, NO_FDS);
    assert_eq!(w.error(tag), (ErrorCode::MultiNodeUnsupported, false));
    let two = Register {
        world: 2,
        local_world: 2,
        ..register_worker()
    };
    let tag = w.say(worker, Op::Register, &two, NO_FDS);
    assert_eq!(w.error(tag), (ErrorCode::DescriptorMismatch, false));
    let mut large = register_worker();
    large.groups[0].block_bytes = 4 << 20;
    let tag = w.say(worker, Op::Register, &large, NO_FDS);
    assert_eq!(w.error(tag), (ErrorCode::SectionTooLarge, false));
    let scheduler = w.attach(Role::Scheduler, 3);
    let mut weak = register_scheduler();
    weak.hashing.as_mut().unwrap().algorithm = "xxhash".into();
    let tag = w.say(scheduler, Op::Register, &weak, NO_FDS);
    assert_eq!(w.error(tag), (ErrorCode::HashAlgorithmRefused, false));
}

#[test]
fn bounds_are_named() {
    let mut w = World::new();
    let (scheduler, worker) = w.instance();
    w.store(scheduler, worker, &[chunk(1)]);
    let mut config = World::config();
    config.limits.requests_max = 1;
    config.limits.sessions_max = 2;
    config.limits.granted_bytes_max = 1;
    w.core.configure(config);
    assert_eq!(w.states(scheduler, "a", &[1]), [CHUNK_READY]);
    let tag = w.say(scheduler, Op::Probe, &probe("b", &[1]), NO_FDS);
    assert_eq!(w.error(tag), (ErrorCode::LimitReached, false));
    assert_eq!(w.grant(scheduler, &[chunk(2)]).1.results, [GRANT_NOT_READY]);
    let conn = w.connect();
    let tag = w.say(conn, Op::Hello, &hello(Role::Worker, 9, 1), &[pidfd()]);
    assert_eq!(w.error(tag), (ErrorCode::LimitReached, true));
    let too_long = Probe {
        hashes: vec![0; 32 * 4096],
        ..probe("a", &[])
    };
    let tag = w.say(scheduler, Op::Probe, &too_long, NO_FDS);
    assert_eq!(w.error(tag), (ErrorCode::LimitReached, false));
}

#[test]
fn why_the_cache_is_off_is_kept_for_status() {
    let mut w = World::new();
    let conn = w.connect();
    let off = Hello {
        off: Some("VllmTooOld".into()),
        fds: Vec::new(),
        ..hello(Role::Plugin, 1, 1)
    };
    let tag = w.say(conn, Op::Hello, &off, NO_FDS);
    let (reply, _): (HelloReply, _) = w.answer(tag);
    assert_eq!(reply.memory, Memory::None);
    let status = w.core.status(w.now);
    assert_eq!(status.sessions[0].off, "VllmTooOld");
    assert!(!w.core.attached());
}

#[test]
fn reports_are_counted_and_tools_are_passed_on() {
    let mut w = World::new();
    let (scheduler, _) = w.instance();
    let report = Report {
        requested_tokens: 100,
        hit_tokens: BTreeMap::from([("memory".into(), 60)]),
        miss_tokens: BTreeMap::from([("absent".into(), 40)]),
        ..Report::default()
    };
    w.say(scheduler, Op::Report, &report, NO_FDS);
    let status = w.core.status(w.now);
    assert_eq!(status.counters.requested_tokens, 100);
    let mut seen = Vec::new();
    w.core
        .metrics(&mut |name, labels, value| seen.push((name, labels.join(","), value)));
    assert!(seen.contains(&("hit_tokens_total", "memory".into(), 60.0)));
    let tool = w.connect();
    w.greet(
        tool,
        &Hello {
            fds: Vec::new(),
            ..hello(Role::Admin, 9, 1)
        },
        true,
    );
    let admin = Admin {
        op: "status".into(),
        keys: Vec::new(),
        ttl_s: 0,
        token: String::new(),
    };
    w.say(tool, Op::Admin, &admin, NO_FDS);
    assert!(
        w.out
            .iter()
            .any(|o| matches!(o, Output::Admin { request, .. } if request.op == "status"))
    );
}

//! What works when nothing goes wrong, and what comes back when something does.

use super::peer::*;
use crate::config::{Config, Verify};
use crate::sessions::*;
use crate::table::{FREE, GRANTED, PUBLISHED, Table};
use kvcachepool_protocol::frame::Op;
use kvcachepool_protocol::message::*;
use kvcachepool_protocol::refs::{SectionRef, pack, unpack};

fn state(w: &World, s: &SectionRef) -> u32 {
    w.core.engine().unwrap().table().row(s.slot.get()).state
}

#[test]
fn a_chunk_is_granted_committed_published_found_pinned_and_released() {
    let mut w = World::new();
    let (scheduler, worker) = w.instance();
    assert_eq!(w.states(scheduler, "r", &[1, 2]), [CHUNK_ABSENT; 2]);
    let (_, granted) = w.grant(scheduler, &[chunk(1), chunk(2)]);
    assert_eq!(granted.results, [GRANT_GRANTED; 2]);
    let refs = unpack(&granted.refs).unwrap();
    assert_eq!(refs[0].length.get(), 4 * BLOCK_BYTES as u32);
    assert_eq!(state(&w, &refs[0]), GRANTED);
    w.commit(worker, granted.region, &granted.refs);
    assert_eq!(
        w.states(scheduler, "r", &[1, 2]),
        [CHUNK_ABSENT; 2],
        "not before its digest is taken"
    );
    w.digest_all();
    let tag = w.say(scheduler, Op::Probe, &probe("r", &[1, 2, 3]), NO_FDS);
    let (found, partial): (ProbeReply, _) = w.answer(tag);
    assert!(!partial);
    assert_eq!(found.states, [CHUNK_READY, CHUNK_READY, CHUNK_ABSENT]);
    assert_eq!(found.refs, granted.refs);
    assert_eq!(found.tiers, [1, 1, 0]);
    w.say(
        scheduler,
        Op::Pin,
        &Pin {
            request: "r".into(),
            probe: tag,
            from: 0,
            to: 2,
        },
        NO_FDS,
    );
    let usage = w.core.engine().unwrap().memory.usage();
    assert_eq!((usage.leased_bytes, usage.soft_pinned_bytes), (2 << 16, 0));
    w.say(
        scheduler,
        Op::Release,
        &Release {
            requests: vec!["r".into()],
        },
        NO_FDS,
    );
    assert_eq!(w.core.engine().unwrap().memory.usage().leased_bytes, 0);
}

#[test]
fn a_chunk_is_granted_once_and_only_under_its_parent() {
    let mut w = World::new();
    let (scheduler, worker) = w.instance();
    let tail = GrantChunk {
        tokens: 16,
        ..chunk(2)
    };
    assert_eq!(w.grant(scheduler, &[chunk(2)]).1.results, [GRANT_NO_PARENT]);
    assert_eq!(w.grant(scheduler, &[chunk(1)]).1.results, [GRANT_GRANTED]);
    assert_eq!(w.grant(scheduler, &[chunk(1)]).1.results, [GRANT_EXISTS]);
    assert_eq!(
        w.grant(scheduler, &[tail]).1.results,
        [GRANT_GRANTED],
        "the parent may still be on its way"
    );
    let bad = [
        GrantChunk {
            groups: 2,
            ..chunk(1)
        },
        GrantChunk {
            tokens: 65,
            ..chunk(1)
        },
        GrantChunk {
            tokens: 0,
            ..chunk(1)
        },
        GrantChunk {
            first_token: 1,
            ..chunk(1)
        },
        GrantChunk {
            hash: vec![1],
            ..chunk(1)
        },
        GrantChunk {
            first_token: 64,
            ..chunk(1)
        },
    ];
    assert_eq!(w.grant(scheduler, &bad).1.results, [GRANT_INVALID; 6]);
    let _ = worker;
}

#[test]
fn a_tail_is_found_by_its_token_count_only() {
    let mut w = World::new();
    let (scheduler, worker) = w.instance();
    let tail = GrantChunk {
        tokens: 32,
        ..chunk(2)
    };
    w.store(scheduler, worker, &[chunk(1), tail]);
    let ask = |w: &mut World, tail_tokens| -> Vec<u8> {
        let reply: ProbeReply = w.ask(
            scheduler,
            Op::Probe,
            &Probe {
                tail_tokens,
                ..probe("r", &[1, 2])
            },
        );
        reply.states
    };
    assert_eq!(ask(&mut w, 32), [CHUNK_READY, CHUNK_READY]);
    assert_eq!(ask(&mut w, 16), [CHUNK_READY, CHUNK_ABSENT]);
    assert_eq!(ask(&mut w, 0), [CHUNK_READY, CHUNK_ABSENT]);
}

#[test]
fn a_closed_socket_frees_nothing_and_the_next_hello_returns_what_it_does_not_name() {
    let mut w = World::new();
    let (scheduler, worker) = w.instance();
    let (_, granted) = w.grant(scheduler, &[chunk(1), chunk(2)]);
    let refs = unpack(&granted.refs).unwrap();
    w.input(Input::Disconnected { conn: worker });
    w.pass(3_600_000);
    assert_eq!(state(&w, &refs[0]), GRANTED);
    let lock = w
        .core
        .engine()
        .unwrap()
        .table()
        .row(refs[0].slot.get())
        .owner;
    let conn = w.connect();
    let mut again = Hello {
        lock: Some(lock),
        region: Some(granted.region),
        ..hello(Role::Worker, 1, 3)
    };
    again.fds = vec!["pidfd".into(), "arena".into(), "table".into()];
    again.grants = pack(&refs[..1]);
    assert_eq!(w.greet(conn, &again, true).memory, Memory::Held);
    assert_eq!((state(&w, &refs[0]), state(&w, &refs[1])), (GRANTED, FREE));
    w.commit(conn, granted.region, &granted.refs);
    w.digest_all();
    assert_eq!(
        w.states(scheduler, "r", &[1, 2]),
        [CHUNK_READY, CHUNK_ABSENT]
    );
}

#[test]
fn the_schedulers_abort_frees_its_own_grant_and_is_always_answered() {
    let mut w = World::new();
    let (scheduler, _) = w.instance();
    let (tag, first) = w.grant(scheduler, &[chunk(1)]);
    let freed: AbortReply = w.ask(
        scheduler,
        Op::Abort,
        &Abort {
            grant: tag,
            hashes: Vec::new(),
        },
    );
    assert_eq!(freed.freed, 1);
    let (_, second) = w.grant(scheduler, &[chunk(1)]);
    assert_ne!(first.refs, second.refs, "another generation");
    let freed: AbortReply = w.ask(
        scheduler,
        Op::Abort,
        &Abort {
            grant: tag,
            hashes: Vec::new(),
        },
    );
    assert_eq!(
        freed.freed, 0,
        "the tag names the first grant, which is over"
    );
    assert_eq!(state(&w, &unpack(&second.refs).unwrap()[0]), GRANTED);
}

#[test]
fn slots_of_a_dead_cpu_writer_come_back_and_its_instance_is_not_served() {
    let mut w = World::new();
    let (scheduler, _) = w.instance();
    let refs = unpack(&w.grant(scheduler, &[chunk(1)]).1.refs).unwrap();
    let worker = w.process(0);
    w.input(Input::ProcessDied { process: worker });
    assert_eq!(state(&w, &refs[0]), FREE);
    assert_eq!(w.grant(scheduler, &[chunk(1)]).1.results, [GRANT_NOT_READY]);
    let reply: ProbeReply = w.ask(scheduler, Op::Probe, &probe("r", &[1]));
    assert_eq!(reply.reason, "NotRegistered");
}

#[test]
fn slots_of_a_dead_gpu_writer_wait_30_s_but_its_chunks_may_be_granted_anew_at_once() {
    let mut w = World::new();
    let worker = w.attach(Role::Worker, 1);
    let scheduler = w.attach(Role::Scheduler, 2);
    let gpu = Register {
        device: "cuda".into(),
        ..register_worker()
    };
    let _: RegisterReply = w.ask(worker, Op::Register, &gpu);
    let _: RegisterReply = w.ask(scheduler, Op::Register, &register_scheduler());
    let refs = unpack(&w.grant(scheduler, &[chunk(1)]).1.refs).unwrap();
    let dead = w.process(0);
    w.input(Input::ProcessDied { process: dead });
    w.pass(29_999);
    assert_eq!(state(&w, &refs[0]), GRANTED);
    w.pass(1);
    assert_eq!(state(&w, &refs[0]), FREE);
}

#[test]
fn the_schedulers_hello_ends_what_it_does_not_name_and_its_death_ends_all() {
    let mut w = World::new();
    let (scheduler, worker) = w.instance();
    w.store(scheduler, worker, &[chunk(1), chunk(2)]);
    for (request, n) in [("a", 1), ("b", 2)] {
        let tag = w.say(scheduler, Op::Probe, &probe(request, &[n]), NO_FDS);
        w.say(
            scheduler,
            Op::Pin,
            &Pin {
                request: request.into(),
                probe: tag,
                from: 0,
                to: 1,
            },
            NO_FDS,
        );
    }
    let leased = |w: &World| w.core.engine().unwrap().memory.usage().leased_bytes >> 16;
    assert_eq!(leased(&w), 2);
    let conn = w.connect();
    let again = Hello {
        requests: vec!["b".into()],
        lock: Some(2),
        ..hello(Role::Scheduler, 2, 3)
    };
    w.greet(conn, &again, true);
    assert_eq!(leased(&w), 1);
    let scheduler = w.process(1);
    w.input(Input::ProcessDied { process: scheduler });
    assert_eq!(leased(&w), 0);
}

#[test]
fn soft_pins_expire_and_timers_do_not_run_before_a_tick() {
    let mut w = World::new();
    let (scheduler, worker) = w.instance();
    w.store(scheduler, worker, &[chunk(1)]);
    w.states(scheduler, "r", &[1]);
    let pinned = |w: &World| w.core.engine().unwrap().memory.usage().soft_pinned_bytes;
    w.now.mono_ms += 60_000;
    w.say(scheduler, Op::Probe, &probe("r", &[1]), NO_FDS);
    w.digest_all();
    assert_eq!(pinned(&w), 1 << 16);
    w.pass(29_999);
    assert_eq!(pinned(&w), 1 << 16, "the second PROBE renewed it");
    w.pass(1);
    assert_eq!(pinned(&w), 0);
}

#[test]
fn after_a_start_a_hit_waits_for_its_own_check() {
    let mut w = World::new();
    let (scheduler, worker) = w.instance();
    w.store(scheduler, worker, &[chunk(1), chunk(2)]);
    let table = w.core.engine().unwrap().table().clone();
    let pod = Pod {
        locked: [1, 2].into(),
        next_lock: 2,
        next_region: 1,
        ..Pod::default()
    };
    let mut w = World::of(pod, Some(table));
    let swept = w.digests();
    assert!(swept.iter().all(|job| !job.urgent));
    assert_eq!(swept.len(), 2);
    let held = |role, process, number, lock| Hello {
        lock: Some(lock),
        region: Some(1),
        fds: vec!["pidfd".into(), "arena".into(), "table".into()],
        ..hello(role, process, number)
    };
    let (worker, scheduler) = (w.connect(), w.connect());
    assert_eq!(
        w.greet(worker, &held(Role::Worker, 1, 9, 1), true).memory,
        Memory::Held
    );
    assert_eq!(
        w.greet(scheduler, &held(Role::Scheduler, 2, 9, 2), true)
            .memory,
        Memory::Held
    );
    let _: RegisterReply = w.ask(worker, Op::Register, &register_worker());
    let _: RegisterReply = w.ask(scheduler, Op::Register, &register_scheduler());
    let tag = w.say(scheduler, Op::Probe, &probe("r", &[1, 2]), NO_FDS);
    let (reply, partial): (ProbeReply, _) = w.answer(tag);
    assert!(partial);
    assert_eq!(reply.states, [CHUNK_PENDING; 2]);
    let urgent = w.digests();
    assert_eq!(urgent.len(), 2);
    w.pass(1_500);
    for job in urgent {
        assert!(job.urgent);
        // the bytes of the second chunk changed
        let digest = if job.slot == 1 {
            [0xbb; 16]
        } else {
            [job.slot as u8; 16]
        };
        w.digest_is(&job, digest);
    }
    let (reply, partial): (ProbeReply, _) = w.answer(tag);
    assert!(!partial);
    assert_eq!(reply.states, [CHUNK_READY, CHUNK_ABSENT]);
    assert_eq!(w.core.engine().unwrap().stats().corrupt_chunks, 1);
    let pinned = |w: &World| w.core.engine().unwrap().memory.usage().soft_pinned_bytes;
    w.pass(29_999);
    assert!(pinned(&w) > 0, "pins last from the answer on");
    w.pass(1);
    assert_eq!(pinned(&w), 0);
}

#[test]
fn an_old_hit_is_checked_behind_its_answer_and_a_mismatch_changes_the_generation() {
    let mut w = World::configured(Config {
        verify: Verify::Background,
        ..World::config()
    });
    let (scheduler, worker) = w.instance();
    let refs = w.store(scheduler, worker, &[chunk(1)]);
    w.now.mono_ms += 60_001;
    assert_eq!(w.states(scheduler, "r", &[1]), [CHUNK_READY]);
    let checks = w.digests();
    assert_eq!(checks.len(), 1);
    assert!(!checks[0].urgent);
    w.digest_is(&checks[0], [0xee; 16]);
    let row = w.core.engine().unwrap().table().row(checks[0].slot);
    assert_ne!(row.generation, refs[0].generation.get());
    assert_eq!(row.state, FREE);
    assert_eq!(w.states(scheduler, "r", &[1]), [CHUNK_ABSENT]);
}

fn events(cursor: u64) -> Events {
    Events {
        cursor,
        wait_ms: 1_000,
        ..Events::default()
    }
}

fn page(from: u32) -> Events {
    Events {
        snapshot: Some(from),
        ..events(0)
    }
}

fn kinds(reply: &EventsReply) -> Vec<&str> {
    reply.events.iter().map(|e| e.kind.as_str()).collect()
}

#[test]
fn events_tell_what_was_stored_and_removed_and_say_when_something_was_lost() {
    let mut w = World::new();
    let (scheduler, worker) = w.instance();
    let tag = w.say(scheduler, Op::Events, &events(0), NO_FDS);
    let hashes = GrantChunk {
        block_hashes: hash(9).0.repeat(2),
        ..chunk(1)
    };
    w.store(scheduler, worker, &[hashes]);
    let (reply, _): (EventsReply, _) = w.answer(tag);
    assert_eq!(kinds(&reply), ["stored"]);
    assert_eq!(reply.events[0].block_hashes.len(), 64);
    let mut out = Vec::new();
    w.core.clear(w.now, &mut out).unwrap();
    let next: EventsReply = w.ask(scheduler, Op::Events, &events(reply.cursor));
    assert_eq!(kinds(&next), ["removed"]);
    let foreign: EventsReply = w.ask(scheduler, Op::Events, &events(1_000_000));
    assert!(foreign.lost);
    let tag = w.say(scheduler, Op::Events, &events(0), NO_FDS);
    w.pass(1_000);
    let (empty, _): (EventsReply, _) = w.answer(tag);
    assert!(empty.events.is_empty());
}

#[test]
fn events_name_the_chunk_and_the_engine_hash_of_the_block_before_it() {
    let mut w = World::new();
    let (scheduler, worker) = w.instance();
    let tag = w.say(scheduler, Op::Events, &events(0), NO_FDS);
    w.store(scheduler, worker, &[chunk(1)]);
    let (first, _): (EventsReply, _) = w.answer(tag);
    w.store(scheduler, worker, &[chunk(2)]);
    let second: EventsReply = w.ask(scheduler, Op::Events, &events(first.cursor));
    let (first, second) = (&first.events[0], &second.events[0]);
    assert_eq!(first.hash, hash(1).0);
    assert_eq!((first.first_token, first.parent.len()), (0, 0));
    assert_eq!(
        (&second.hash[..], &second.parent[..]),
        (&hash(2).0[..], &hash(1).0[..])
    );
    assert_eq!(second.first_token, first.tokens);
    let (all, end): (Vec<Event>, _) = {
        let reply: EventsReply = w.ask(scheduler, Op::Events, &page(0));
        (reply.events, reply.next)
    };
    assert_eq!(all, [first.clone(), second.clone()]);
    assert_eq!(end, None);
}

#[test]
fn a_cursor_of_an_earlier_boot_is_lost_whatever_its_number() {
    let mut w = World::new();
    let (scheduler, worker) = w.instance();
    let here: EventsReply = w.ask(scheduler, Op::Events, &page(0));
    w.store(scheduler, worker, &[chunk(1), chunk(2)]);
    let asked = |boot| Events { boot, ..events(1) };
    let same: EventsReply = w.ask(scheduler, Op::Events, &asked(here.boot));
    assert!(!same.lost);
    assert_eq!(same.events.len(), 1);
    let other: EventsReply = w.ask(scheduler, Op::Events, &asked(here.boot + 1));
    assert!(other.lost);
    assert_eq!((other.boot, other.events.len()), (here.boot, 0));
}

#[test]
fn an_engine_hears_of_chunks_of_its_own_domain_only() {
    let mut w = World::new();
    let (scheduler, worker) = w.instance();
    let other = w.another_model();
    let tag = w.say(other, Op::Events, &events(0), NO_FDS);
    w.store(scheduler, worker, &[chunk(1)]);
    let all: EventsReply = w.ask(other, Op::Events, &page(0));
    assert_eq!((all.events.len(), all.next), (0, None));
    let (older, _): (EventsReply, _) = w.answer(tag);
    assert!(older.events.is_empty());
    let tag = w.say(other, Op::Events, &events(1), NO_FDS);
    w.store(scheduler, worker, &[chunk(2)]);
    w.pass(1_000);
    let (none, _): (EventsReply, _) = w.answer(tag);
    assert_eq!((none.events.len(), none.cursor, none.lost), (0, 2, false));
    let mine: EventsReply = w.ask(scheduler, Op::Events, &page(0));
    assert_eq!(mine.events.len(), 2);
}

#[test]
fn an_engine_that_is_not_served_yet_is_told_to_ask_again() {
    let mut w = World::new();
    let scheduler = w.attach(Role::Scheduler, 2);
    let tag = w.say(scheduler, Op::Events, &page(0), NO_FDS);
    w.pass(1_000);
    let (reply, _): (EventsReply, _) = w.answer(tag);
    assert_eq!((reply.events.len(), reply.next), (0, Some(0)));
}

#[test]
fn clear_leaves_what_is_being_read_in_place_until_its_lease_ends() {
    let mut w = World::new();
    let (scheduler, worker) = w.instance();
    let refs = w.store(scheduler, worker, &[chunk(1)]);
    let tag = w.say(scheduler, Op::Probe, &probe("r", &[1]), NO_FDS);
    w.say(
        scheduler,
        Op::Pin,
        &Pin {
            request: "r".into(),
            probe: tag,
            from: 0,
            to: 1,
        },
        NO_FDS,
    );
    let mut out = Vec::new();
    assert_eq!(w.core.clear(w.now, &mut out), Ok(1));
    assert_eq!(w.states(scheduler, "q", &[1]), [CHUNK_ABSENT]);
    assert_eq!(state(&w, &refs[0]), PUBLISHED);
    w.say(
        scheduler,
        Op::Release,
        &Release {
            requests: vec!["r".into()],
        },
        NO_FDS,
    );
    assert_eq!(state(&w, &refs[0]), FREE);
}

#[test]
fn chunks_expire() {
    let mut w = World::new();
    let (scheduler, worker) = w.instance();
    let grant = Grant {
        request: "r".into(),
        namespace: Vec::new(),
        chunks: vec![chunk(1)],
        ttl_s: 5,
    };
    let granted: GrantReply = w.ask(scheduler, Op::Grant, &grant);
    w.commit(worker, granted.region, &granted.refs);
    w.digest_all();
    assert_eq!(w.states(scheduler, "r", &[1]), [CHUNK_READY]);
    w.say(
        scheduler,
        Op::Release,
        &Release {
            requests: vec!["r".into()],
        },
        NO_FDS,
    );
    w.pass(5_000);
    assert_eq!(w.core.engine().unwrap().memory.usage().chunks, 0);
}

#[test]
fn a_rank_that_goes_off_stops_its_instance_until_it_registers_again() {
    for role in [Role::Worker, Role::Plugin] {
        let mut w = World::new();
        let (scheduler, worker) = w.instance();
        let side = w.connect();
        let off = Hello {
            off: Some("LayoutUnknown".into()),
            fds: Vec::new(),
            ..hello(role, 1, 9)
        };
        w.greet(side, &off, true);
        assert_eq!(w.grant(scheduler, &[chunk(1)]).1.results, [GRANT_NOT_READY]);
        let reply: RegisterReply = w.ask(worker, Op::Register, &register_worker());
        assert_eq!(
            reply.ready,
            role == Role::Worker,
            "the plugin speaks for the scheduler too"
        );
        let _: RegisterReply = w.ask(scheduler, Op::Register, &register_scheduler());
        assert_eq!(w.grant(scheduler, &[chunk(1)]).1.results, [GRANT_GRANTED]);
    }
}

#[test]
fn ranks_that_learn_their_weights_at_different_times_are_served_before_and_behind_but_not_between()
{
    let with = |rank: u32, weights: &str| {
        let mut register = register_worker();
        (register.world, register.local_world) = (2, 2);
        register.model = format!(r#"{{"model":{{"weights":{weights}}}}}"#);
        (register.groups[0].shards, register.groups[0].shard) = (2, rank);
        register
    };
    let hashing = r#"{"kind":"unshared","reason":"WeightsHashing","instance":"i"}"#;
    let known = r#"{"kind":"files","digest":"ab"}"#;
    let mut w = World::new();
    let ranks = [0, 1].map(|rank| {
        w.attach_as(Hello {
            rank,
            ..hello(Role::Worker, rank as u8 + 1, 1)
        })
    });
    let scheduler = w.attach(Role::Scheduler, 3);
    let mut both = register_scheduler();
    (both.world, both.local_world) = (2, 2);
    let _: RegisterReply = w.ask(scheduler, Op::Register, &both);
    for rank in [0, 1] {
        let reply: RegisterReply = w.ask(ranks[rank], Op::Register, &with(rank as u32, hashing));
        assert_eq!(reply.ready, rank == 1);
    }
    assert_eq!(w.grant(scheduler, &[chunk(1)]).1.results, [GRANT_GRANTED]);
    let provisional = &w.core.status(w.now).domains[0];
    assert_eq!(provisional.reason, "NotShareable/WeightsHashing");

    let reply: RegisterReply = w.ask(ranks[1], Op::Register, &with(1, known));
    assert!(
        !reply.ready,
        "no error, and nothing is served under either name"
    );
    assert_eq!(w.grant(scheduler, &[chunk(2)]).1.results, [GRANT_NOT_READY]);
    let reply: RegisterReply = w.ask(ranks[0], Op::Register, &with(0, known));
    assert!(reply.ready);
    assert_eq!(w.core.status(w.now).domains.len(), 1);
    assert!(w.core.status(w.now).domains[0].shareable);
    assert_eq!(
        w.grant(scheduler, &[chunk(1)]).1.results,
        [GRANT_GRANTED],
        "what was stored under the provisional name is not found under the final one"
    );

    let tag = w.say(
        ranks[1],
        Op::Register,
        &with(1, r#"{"kind":"files","digest":"cd"}"#),
        NO_FDS,
    );
    assert_eq!(w.error(tag).0, ErrorCode::DescriptorMismatch);
}

#[test]
fn a_rank_whose_lock_is_gone_stops_its_instance_and_its_slots_wait_30_s() {
    let mut w = World::new();
    let (scheduler, worker) = w.instance();
    let (_, granted) = w.grant(scheduler, &[chunk(1)]);
    let slot = unpack(&granted.refs).unwrap()[0];
    w.core.host_mut().locked.remove(&1);
    w.pass(1_000);
    assert_eq!(w.grant(scheduler, &[chunk(2)]).1.results, [GRANT_NOT_READY]);
    w.commit(worker, granted.region, &granted.refs);
    assert_eq!(state(&w, &slot), GRANTED, "nothing of it counts");
    let tag = w.say(worker, Op::Register, &register_worker(), NO_FDS);
    assert_eq!(w.error(tag), (ErrorCode::NoArena, false));
    w.pass(30_000);
    assert_eq!(state(&w, &slot), FREE);
    w.core.host_mut().locked.insert(7);
    let again = Hello {
        lock: Some(7),
        ..hello(Role::Worker, 1, 9)
    };
    assert_eq!(w.greet(worker, &again, true).memory, Memory::Sent);
    let _: RegisterReply = w.ask(worker, Op::Register, &register_worker());
    assert_eq!(
        w.grant(scheduler, &[chunk(2), chunk(1)]).1.results,
        [GRANT_NO_PARENT, GRANT_GRANTED]
    );
}

#[test]
fn before_the_arena_is_populated_a_grant_may_be_asked_again() {
    let mut w = World::new();
    let (scheduler, _) = w.instance();
    let mut fresh = World::empty();
    let (early, _) = fresh.instance();
    assert_eq!(fresh.grant(early, &[chunk(1)]).1.results, [GRANT_NOT_READY]);
    fresh.populate();
    assert_eq!(fresh.grant(early, &[chunk(1)]).1.results, [GRANT_GRANTED]);
    let large = |n| GrantChunk {
        hash: hash(n).0.to_vec(),
        ..chunk(1)
    };
    let mut results = Vec::new();
    for n in 0..200 {
        results.extend(w.grant(scheduler, &[large(n)]).1.results);
    }
    assert_eq!(
        results.last(),
        Some(&GRANT_NOT_READY),
        "the bound of granted bytes"
    );
}

#[test]
fn a_process_has_one_session_per_role_which_moves_to_the_engine_it_begins_next() {
    let mut w = World::new();
    let (scheduler, worker) = w.instance();
    for (conn, role, process, lock) in [
        (worker, Role::Worker, 1, 1),
        (scheduler, Role::Scheduler, 2, 2),
    ] {
        for rank in 1..5 {
            let next = Hello {
                instance: "j".into(),
                rank,
                lock: Some(lock),
                ..hello(role, process, 2 + u64::from(rank))
            };
            w.greet(conn, &next, true);
        }
    }
    assert_eq!(w.core.status(w.now).sessions.len(), 2);
    assert_eq!(w.grant(scheduler, &[chunk(1)]).1.results, [GRANT_NOT_READY]);
    let first = Hello {
        instance: "j".into(),
        lock: Some(1),
        ..hello(Role::Worker, 1, 9)
    };
    w.greet(worker, &first, true);
    let _: RegisterReply = w.ask(worker, Op::Register, &register_worker());
    let ready: RegisterReply = w.ask(scheduler, Op::Register, &register_scheduler());
    assert!(ready.ready);
    assert_eq!(w.grant(scheduler, &[chunk(1)]).1.results, [GRANT_GRANTED]);
}

#[test]
fn status_names_the_process_behind_a_session_as_its_last_connection_showed_it() {
    let mut w = World::new();
    w.attach(Role::Worker, 1);
    let pid = |w: &World| w.core.status(w.now).sessions[0].pid;
    assert_eq!(pid(&w), 4_001);
    let conn = w.connect();
    let again = Hello {
        lock: Some(1),
        ..hello(Role::Worker, 1, 3)
    };
    w.greet(conn, &again, true);
    assert_eq!(pid(&w), 4_002);
}

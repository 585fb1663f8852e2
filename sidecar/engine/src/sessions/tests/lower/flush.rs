//! Flush: what begins one, what it writes, and when it is over. And what an earlier boot left.

use super::*;
use crate::Unwritten;
use crate::config::Admission;
use crate::tier::Stored;

/// Tiers that write back, one write at a time.
fn slow(tiers: &[Kind]) -> Config {
    let mut config = config(tiers);
    for tier in &mut config.tiers {
        tier.write = WritePolicy::WriteBack;
        tier.puts_max = 1;
    }
    config
}

/// Takes all orders, which must be writes, and ends each well: tier, chunk, and whether it is to be looked up first.
fn write_all(w: &mut World) -> Vec<(Kind, u8, bool)> {
    let mut found = Vec::new();
    loop {
        let list = orders(w);
        if list.is_empty() {
            return found;
        }
        for order in list {
            let Effect::Write(WriteJob {
                put,
                tier,
                object,
                look_first,
                ..
            }) = order
            else {
                panic!("{order:?}")
            };
            let number = (1..=9).find(|n| hash(*n) == object.last_hash);
            found.push((tier, number.unwrap(), look_first));
            let stored = Ok(Stored::New);
            w.input(Input::Completed(Completion::Write { put, stored }));
            audit(w);
        }
    }
}

fn flush(w: &mut World) -> Vec<Unwritten> {
    let mut out = Vec::new();
    let unwritten = w.core.flush_now(w.now, &mut out);
    w.out.extend(out);
    unwritten
}

#[test]
fn a_flush_writes_at_once_what_waits_and_what_had_been_dropped() {
    let mut config = slow(&[Kind::Disk]);
    config.tiers[0].put_queue_bytes_max = 2 << 16;
    let (mut w, scheduler, worker) = limited(config);
    state(&mut w, Kind::Disk, Some("Io"));
    w.store(scheduler, worker, &[chunk(1), chunk(2), chunk(3)]);
    state(&mut w, Kind::Disk, None);
    w.store(scheduler, worker, &[chunk(4), chunk(5)]);
    let [Effect::Write(WriteJob { put, .. })] = orders(&mut w)[..] else {
        panic!("more than half of the queue waits")
    };
    let unwritten = flush(&mut w);
    let bytes = 5 * 4 * BLOCK_BYTES;
    assert_eq!(
        unwritten,
        [Unwritten {
            tier: Kind::Disk,
            chunks: 5,
            bytes
        }]
    );
    assert!(w.core.flushes());
    let stored = Ok(Stored::New);
    w.input(Input::Completed(Completion::Write { put, stored }));
    let written: Vec<u8> = write_all(&mut w).iter().map(|x| x.1).collect();
    assert_eq!(written, [5, 1, 2, 3]);
    assert!(!w.core.flushes());
    assert_eq!(stats(&w, Kind::Disk).puts["TierDown"], 3);
}

#[test]
fn a_large_chunk_of_a_flush_does_not_take_the_place_of_a_small_one_that_waits() {
    let mut config = slow(&[Kind::Disk]);
    config.tiers[0].put_queue_bytes_max = 4 * BLOCK_BYTES;
    let (mut w, scheduler, worker) = limited(config);
    state(&mut w, Kind::Disk, Some("Io"));
    let small = GrantChunk {
        tokens: 16,
        ..chunk(1)
    };
    let large = GrantChunk {
        parent: Vec::new(),
        first_token: 0,
        ..chunk(2)
    };
    w.store(scheduler, worker, &[small, large]);
    state(&mut w, Kind::Disk, None);
    flush(&mut w);
    let written: Vec<u8> = write_all(&mut w).iter().map(|x| x.1).collect();
    assert_eq!(written, [1, 2]);
    assert!(!w.core.flushes());
}

#[test]
fn a_flush_ends_when_everything_is_there_and_the_next_one_finds_nothing() {
    let (mut w, scheduler, worker) = limited(slow(&[Kind::Disk, Kind::S3]));
    w.store(scheduler, worker, &[chunk(1), chunk(2)]);
    assert!(orders(&mut w).is_empty());
    flush(&mut w);
    assert_eq!(write_all(&mut w).len(), 4);
    assert!(!w.core.flushes());
    assert!(w.core.unwritten().iter().all(|u| u.chunks == 0));
    flush(&mut w);
    assert!(orders(&mut w).is_empty());
    w.pass(0);
    assert!(!w.core.flushes());
}

#[test]
fn one_tier_that_hangs_holds_up_the_flush_of_no_other() {
    let (mut w, scheduler, worker) = limited(slow(&[Kind::Disk, Kind::S3]));
    w.store(scheduler, worker, &[chunk(1), chunk(2), chunk(3)]);
    flush(&mut w);
    let mut disk = 0;
    for _ in 0..3 {
        for order in orders(&mut w) {
            if let Effect::Write(WriteJob {
                put,
                tier: Kind::Disk,
                ..
            }) = order
            {
                disk += 1;
                let stored = Ok(Stored::New);
                w.input(Input::Completed(Completion::Write { put, stored }));
            }
        }
    }
    assert_eq!(disk, 3);
    let left: Vec<_> = w.core.unwritten().iter().map(|u| u.chunks).collect();
    assert_eq!(left, [0, 3]);
    // it goes down: nothing is waited for, and what was lost is known
    state(&mut w, Kind::S3, Some("Unreachable"));
    assert!(!w.core.flushes());
    assert_eq!(w.core.unwritten()[1].chunks, 3);
    audit(&w);
}

#[test]
fn what_policy_and_admission_leave_out_is_not_flushed() {
    let mut config = slow(&[Kind::Disk, Kind::S3]);
    config.tiers[0].admission = Admission::Reused;
    config.tiers[1].write = WritePolicy::None;
    let (mut w, scheduler, worker) = limited(config);
    w.store(scheduler, worker, &[chunk(1), chunk(2)]);
    let (probe, ..) = ask(&mut w, scheduler, "load", &[1]);
    let pin = Pin {
        request: "load".into(),
        probe,
        from: 0,
        to: 1,
    };
    w.say(scheduler, Op::Pin, &pin, NO_FDS);
    release(&mut w, scheduler, "load");
    flush(&mut w);
    assert_eq!(write_all(&mut w), [(Kind::Disk, 1, false)]);
}

#[test]
fn a_flush_begins_when_the_last_session_of_an_engine_ended() {
    let (mut w, scheduler, worker) = limited(slow(&[Kind::Disk]));
    w.store(scheduler, worker, &[chunk(1)]);
    let [one, other] = [0, 1].map(|nth| w.process(nth));
    w.input(Input::ProcessDied { process: one });
    assert!(orders(&mut w).is_empty());
    w.input(Input::ProcessDied { process: other });
    assert_eq!(write_all(&mut w), [(Kind::Disk, 1, false)]);
    w.pass(0);
    assert!(!w.core.flushes());
}

#[test]
fn a_sidecar_that_is_told_to_end_flushes_unless_an_engine_is_attached() {
    for attached in [true, false] {
        let (mut w, scheduler, worker) = limited(slow(&[Kind::Disk]));
        w.store(scheduler, worker, &[chunk(1)]);
        if !attached {
            state(&mut w, Kind::Disk, Some("Io"));
            let all = [0, 1].map(|nth| w.process(nth));
            for process in all {
                w.input(Input::ProcessDied { process });
            }
            state(&mut w, Kind::Disk, None);
        }
        w.input(Input::Drain);
        assert_eq!(w.core.flushes(), !attached);
        assert_eq!(write_all(&mut w).len(), usize::from(!attached));
    }
}

#[test]
fn what_an_earlier_boot_left_is_looked_up_and_written_once_tier_and_domain_are_known() {
    let (mut w, scheduler, worker) = limited(slow(&[Kind::Disk]));
    w.store(scheduler, worker, &[chunk(1), chunk(2)]);
    let table = w.core.engine().unwrap().table().clone();
    for tier_first in [true, false] {
        let mut later = World::configured_with(slow(&[Kind::Disk]), table.clone());
        if tier_first {
            state(&mut later, Kind::Disk, None);
        }
        let (scheduler, _) = later.instance();
        assert!(orders(&mut later).is_empty());
        // whose chunks these are is learned with the first question
        later.say(scheduler, Op::Probe, &probe("r", &[]), NO_FDS);
        if !tier_first {
            assert!(orders(&mut later).is_empty());
            state(&mut later, Kind::Disk, None);
        }
        let mut written = write_all(&mut later);
        written.sort_unstable();
        assert_eq!(written, [(Kind::Disk, 1, true), (Kind::Disk, 2, true)]);
        // once
        state(&mut later, Kind::Disk, Some("Io"));
        state(&mut later, Kind::Disk, None);
        later.say(scheduler, Op::Probe, &probe("q", &[]), NO_FDS);
        assert!(orders(&mut later).is_empty());
        audit(&later);
    }
}

#[test]
fn what_memory_held_before_a_codec_that_loses_something_is_neither_hit_nor_written_under_it() {
    let (mut w, scheduler, worker) = limited(slow(&[Kind::Disk]));
    w.store(scheduler, worker, &[chunk(1)]);
    let table = w.core.engine().unwrap().table().clone();
    for (fidelity, there) in [(Fidelity::Exact, P), (Fidelity::Fp8, A)] {
        let config = Config {
            fidelity,
            ..slow(&[Kind::Disk])
        };
        let mut later = World::configured_with(config, table.clone());
        let (scheduler, _) = later.instance();
        // what an earlier boot left waits for its check
        assert_eq!(later.states(scheduler, "r", &[1]), [there], "{fidelity:?}");
        later.digest_all();
        state(&mut later, Kind::Disk, None);
        let written = usize::from(fidelity == Fidelity::Exact);
        assert_eq!(write_all(&mut later).len(), written, "{fidelity:?}");
        audit(&later);
    }
}

#[test]
fn a_chunk_whose_other_sections_are_on_their_way_is_written_with_them() {
    let window = Group {
        kind: "window".into(),
        window_tokens: 32,
        ..register_worker().groups.remove(0)
    };
    let mut groups = register_worker().groups;
    groups.push(window);
    let mut config = slow(&[Kind::Disk]);
    config.tiers[0].put_wait_ms = 1_000;
    let mut w = World::configured(config);
    let worker = w.attach(Role::Worker, 1);
    let scheduler = w.attach(Role::Scheduler, 2);
    let with_window = Register {
        groups,
        ..register_worker()
    };
    let _: RegisterReply = w.ask(worker, Op::Register, &with_window);
    let _: RegisterReply = w.ask(scheduler, Op::Register, &register_scheduler());
    state(&mut w, Kind::Disk, None);
    w.say(scheduler, Op::Probe, &probe("q", &[]), NO_FDS);
    w.store(scheduler, worker, &[chunk(1)]);
    let more = GrantChunk {
        groups: 3,
        ..chunk(1)
    };
    let (_, granted) = w.grant(scheduler, &[more]);
    w.pass(1_000);
    assert!(orders(&mut w).is_empty());
    assert_eq!(stats(&w, Kind::Disk).puts["SectionsComing"], 1);
    w.commit(worker, granted.region, &granted.refs);
    w.digest_all();
    w.pass(1_000);
    let [Effect::Write(WriteJob { object, .. })] = &orders(&mut w)[..] else {
        panic!("it is written")
    };
    assert_eq!(object.sections.len(), 2);
    audit(&w);
}

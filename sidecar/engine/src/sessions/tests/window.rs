//! Copies that the sidecar makes for a worker: when one may begin, and what waits for its end. Each rule is also left out once, to show
//! that its test would see that.

use super::peer::*;
use crate::config::{Config, TransferMode};
use crate::mistake::{Mistake, make};
use crate::sessions::*;
use crate::table::{COMMITTED, FREE, GRANTED, Table};
use kvcachepool_protocol::frame::Op;
use kvcachepool_protocol::message::*;
use kvcachepool_protocol::refs::{SectionRef, pack, unpack};
use kvcachepool_protocol::window::{Direction, Order, Reason, Run};

fn world() -> World {
    World::configured(Config {
        transfer: TransferMode::CudaWindow,
        ..World::config()
    })
}

fn offering() -> Register {
    Register {
        transfer_modes: vec!["engine".into(), "cuda_window".into()],
        ..register_worker()
    }
}

/// A world with one instance whose worker has a window that works.
struct Rig {
    w: World,
    scheduler: ConnId,
    worker: ConnId,
    window: WindowId,
}

impl Rig {
    fn new() -> Self {
        let mut w = world();
        let worker = w.attach(Role::Worker, 1);
        let scheduler = w.attach(Role::Scheduler, 2);
        let reply: RegisterReply = w.ask(worker, Op::Register, &offering());
        assert_eq!(reply.transfer, "cuda_window");
        let _: RegisterReply = w.ask(scheduler, Op::Register, &register_scheduler());
        let window = open(&mut w, worker);
        let news = WindowNews::Works {
            memory: "host memory".into(),
        };
        w.input(Input::Window { window, news });
        Self {
            w,
            scheduler,
            worker,
            window,
        }
    }

    fn granted(&mut self, n: u8) -> (u64, SectionRef) {
        let (_, granted) = self.w.grant(self.scheduler, &[chunk(n)]);
        assert_eq!(granted.results, [GRANT_GRANTED]);
        (granted.region, unpack(&granted.refs).unwrap()[0])
    }

    fn begins(&mut self, direction: Direction, runs: Vec<Run>) -> Result<Order, Reason> {
        let order = Order {
            direction,
            sequence: 1,
            runs: runs.into_iter().map(|run| (0, run)).collect(),
        };
        let (window, region) = (self.window, 1);
        self.w.core.window_copy_begins(window, region, &order)?;
        Ok(order)
    }

    fn store_begins(&mut self, section: &SectionRef) -> Order {
        self.begins(Direction::Store, vec![run(section)]).unwrap()
    }

    fn ended(&mut self, order: &Order) {
        let World { core, now, out, .. } = &mut self.w;
        core.window_copy_ended(*now, order, out);
    }

    fn state(&self, section: &SectionRef) -> u32 {
        let table = self.w.core.engine().unwrap().table();
        table.row(section.slot.get()).state
    }

    fn sections(section: &SectionRef) -> Sections {
        Sections {
            region: 1,
            refs: pack(&[*section]),
        }
    }

    fn answered(&self, asked: u64) -> bool {
        let to = |o: &Output| matches!(o, Output::Send { frame, .. } if frame.tag == asked);
        self.w.out.iter().any(to)
    }

    fn status(&self) -> (String, String) {
        let status = self.w.core.status(self.w.now);
        let worker = status.sessions.iter().find(|s| !s.transfer.is_empty());
        let worker = worker.unwrap();
        (worker.transfer.clone(), worker.transfer_reason.clone())
    }
}

fn open(w: &mut World, worker: ConnId) -> WindowId {
    w.say(worker, Op::Window, &Window::default(), NO_FDS);
    let Some(Output::OpenWindow(job)) = w.out.pop() else {
        panic!("no window was asked for");
    };
    job.window
}

fn run(section: &SectionRef) -> Run {
    Run {
        slot: section.slot.get(),
        generation: section.generation.get(),
        offset: 0,
        bytes: section.length.get(),
    }
}

/// What `scenario` gives as it is, and with a rule left out.
fn with_and_without<R>(rule: Mistake, scenario: impl Fn() -> R) -> (R, R) {
    let kept = scenario();
    make(&[rule]);
    let broken = scenario();
    make(&[]);
    (kept, broken)
}

#[test]
fn a_window_is_for_registered_workers_that_were_told_to_ask_for_one() {
    let refused = |w: &mut World, conn, window: &Window| {
        let tag = w.say(conn, Op::Window, window, NO_FDS);
        w.error(tag).0
    };
    let mut w = world();
    let worker = w.attach(Role::Worker, 1);
    assert_eq!(
        refused(&mut w, worker, &Window::default()),
        ErrorCode::NotRegistered
    );
    let reply: RegisterReply = w.ask(worker, Op::Register, &register_worker());
    assert_eq!(
        (&*reply.transfer, &*reply.transfer_reason),
        ("engine", "WindowNotOffered")
    );
    assert_eq!(
        refused(&mut w, worker, &Window::default()),
        ErrorCode::WindowUnavailable
    );
    let reply: RegisterReply = w.ask(worker, Op::Register, &offering());
    assert_eq!(
        (&*reply.transfer, &*reply.transfer_reason),
        ("cuda_window", "WindowAsked")
    );
    let seen = Window {
        seen: true,
        ..Window::default()
    };
    assert_eq!(refused(&mut w, worker, &seen), ErrorCode::WindowUnavailable);
    let large = Window {
        bytes: u64::MAX,
        ..Window::default()
    };
    assert_eq!(
        refused(&mut w, worker, &large),
        ErrorCode::WindowUnavailable
    );

    let mut w = World::new();
    let worker = w.attach(Role::Worker, 1);
    let reply: RegisterReply = w.ask(worker, Op::Register, &offering());
    assert_eq!(
        (&*reply.transfer, &*reply.transfer_reason),
        ("engine", "TransferNotChosen")
    );
    assert_eq!(
        refused(&mut w, worker, &Window::default()),
        ErrorCode::WindowUnavailable
    );
}

#[test]
fn status_says_which_mode_is_in_use_and_why_not_the_other() {
    let mut rig = Rig::new();
    assert_eq!(rig.status(), ("cuda_window".into(), "host memory".into()));
    let news = WindowNews::Unavailable {
        reason: "NoDriver: libcuda.so.1".into(),
    };
    let window = rig.window;
    rig.w.input(Input::Window { window, news });
    assert_eq!(
        rig.status(),
        ("engine".into(), "NoDriver: libcuda.so.1".into())
    );
}

#[test]
fn a_store_is_copied_only_into_slots_granted_to_this_worker_in_this_generation() {
    let (kept, broken) = with_and_without(Mistake::CopyUnowned, || {
        let mut rig = Rig::new();
        let (_, section) = rig.granted(1);
        let good = run(&section);
        let stored = rig.w.store(rig.scheduler, rig.worker, &[chunk(2)]);
        [
            Run {
                generation: good.generation + 1,
                ..good
            },
            Run {
                slot: good.slot + 7,
                ..good
            },
            run(&stored[0]),
        ]
        .map(|bad| rig.begins(Direction::Store, vec![good, bad]).err())
    });
    assert_eq!(kept, [Some(Reason::NotGranted); 3]);
    assert_ne!(broken, kept);
    let mut rig = Rig::new();
    let (_, section) = rig.granted(1);
    let long = Run {
        bytes: 65_537,
        ..run(&section)
    };
    assert_eq!(
        rig.begins(Direction::Store, vec![long]),
        Err(Reason::BadRecord)
    );
    let nowhere = Run {
        slot: u32::MAX,
        ..run(&section)
    };
    assert_eq!(
        rig.begins(Direction::Store, vec![nowhere]),
        Err(Reason::BadRecord)
    );
    assert!(rig.begins(Direction::Store, vec![run(&section)]).is_ok());
}

#[test]
fn a_load_is_copied_only_from_the_generation_it_names() {
    let mut rig = Rig::new();
    let stored = rig.w.store(rig.scheduler, rig.worker, &[chunk(1)]);
    let good = run(&stored[0]);
    assert!(rig.begins(Direction::Load, vec![good]).is_ok());
    let old = Run {
        generation: good.generation.wrapping_sub(1),
        ..good
    };
    assert_eq!(
        rig.begins(Direction::Load, vec![old]),
        Err(Reason::Generation)
    );
}

#[test]
fn an_abort_is_answered_and_the_slot_comes_back_only_when_the_copy_has_ended() {
    let (kept, broken) = with_and_without(Mistake::CopyOutlives, || {
        let mut rig = Rig::new();
        let (_, section) = rig.granted(1);
        let order = rig.store_begins(&section);
        let tag = rig
            .w
            .say(rig.worker, Op::Abort, &Rig::sections(&section), NO_FDS);
        let during = (rig.answered(tag), rig.state(&section));
        let again = rig.begins(Direction::Store, vec![run(&section)]).is_err();
        rig.ended(&order);
        (during, again, (rig.answered(tag), rig.state(&section)))
    });
    assert_eq!(kept, ((false, GRANTED), true, (true, FREE)));
    assert_eq!(broken.0.1, FREE);
    let mut rig = Rig::new();
    let (_, section) = rig.granted(1);
    let reply: AbortReply = rig.w.ask(rig.worker, Op::Abort, &Rig::sections(&section));
    assert_eq!(reply.freed, 1, "answered at once where nothing is copied");
}

#[test]
fn an_abort_waits_for_the_last_of_several_stages() {
    let mut rig = Rig::new();
    let (_, section) = rig.granted(1);
    let first = rig.store_begins(&section);
    let second = rig.store_begins(&section);
    let tag = rig
        .w
        .say(rig.worker, Op::Abort, &Rig::sections(&section), NO_FDS);
    rig.ended(&first);
    assert_eq!((rig.answered(tag), rig.state(&section)), (false, GRANTED));
    rig.ended(&second);
    assert_eq!((rig.answered(tag), rig.state(&section)), (true, FREE));
}

#[test]
fn no_more_aborts_of_a_connection_wait_than_their_bound() {
    let mut rig = Rig::new();
    let (_, section) = rig.granted(1);
    let order = rig.store_begins(&section);
    let abort = |rig: &mut Rig| {
        let body = Rig::sections(&section);
        rig.w.say(rig.worker, Op::Abort, &body, NO_FDS)
    };
    let waiting: Vec<u64> = (0..256).map(|_| abort(&mut rig)).collect();
    let refused = abort(&mut rig);
    assert_eq!(rig.w.error(refused).0, ErrorCode::LimitReached);
    rig.ended(&order);
    assert!(waiting.iter().all(|tag| rig.answered(*tag)));
    assert_eq!(rig.state(&section), FREE);
    let later = abort(&mut rig);
    assert!(rig.answered(later));
}

#[test]
fn one_window_is_made_at_a_time_for_a_connection() {
    let mut w = world();
    let worker = w.attach(Role::Worker, 1);
    let _: RegisterReply = w.ask(worker, Op::Register, &offering());
    let window = open(&mut w, worker);
    let second = w.say(worker, Op::Window, &Window::default(), NO_FDS);
    assert_eq!(w.error(second).0, ErrorCode::WindowUnavailable);
    let news = WindowNews::Unavailable {
        reason: "OutOfMemory".into(),
    };
    w.input(Input::Window { window, news });
    open(&mut w, worker);
}

#[test]
fn a_dead_workers_slots_come_back_only_when_the_copy_has_ended() {
    let (kept, broken) = with_and_without(Mistake::CopyOutlives, || {
        let mut rig = Rig::new();
        let (_, section) = rig.granted(1);
        let order = rig.store_begins(&section);
        let process = rig.w.process(0);
        rig.w.input(Input::ProcessDied { process });
        rig.w.pass(60_000);
        let during = rig.state(&section);
        assert_eq!(
            rig.begins(Direction::Store, vec![run(&section)]),
            Err(Reason::Closed)
        );
        rig.ended(&order);
        rig.w.pass(100);
        let audit = rig.w.core.engine().unwrap().check();
        (during, rig.state(&section), audit)
    });
    assert_eq!(kept, (GRANTED, FREE, Ok(())));
    assert_eq!(broken.0, FREE);
}

#[test]
fn what_a_hello_does_not_name_comes_back_only_when_the_copy_has_ended() {
    let (kept, broken) = with_and_without(Mistake::CopyOutlives, || {
        let mut rig = Rig::new();
        let (region, section) = rig.granted(1);
        let order = rig.store_begins(&section);
        rig.w.input(Input::Disconnected { conn: rig.worker });
        assert_eq!(
            rig.begins(Direction::Store, vec![run(&section)]),
            Err(Reason::Closed)
        );
        let lock = rig
            .w
            .core
            .engine()
            .unwrap()
            .table()
            .row(section.slot.get())
            .owner;
        let conn = rig.w.connect();
        let mut again = hello(Role::Worker, 1, 3);
        (again.lock, again.region) = (Some(lock), Some(region));
        again.fds = vec!["pidfd".into(), "arena".into(), "table".into()];
        assert_eq!(rig.w.greet(conn, &again, true).memory, Memory::Held);
        let during = rig.state(&section);
        rig.ended(&order);
        (during, rig.state(&section))
    });
    assert_eq!(kept, (GRANTED, FREE));
    assert_eq!(broken.0, FREE);
}

#[test]
fn a_commit_counts_only_when_the_copy_has_ended() {
    let (kept, broken) = with_and_without(Mistake::CopyCommit, || {
        let mut rig = Rig::new();
        let (region, section) = rig.granted(1);
        let order = rig.store_begins(&section);
        rig.w.commit(rig.worker, region, &pack(&[section]));
        let during = rig.state(&section);
        rig.ended(&order);
        rig.w.commit(rig.worker, region, &pack(&[section]));
        (during, rig.state(&section))
    });
    assert_eq!(kept, (GRANTED, COMMITTED));
    assert_eq!(broken.0, COMMITTED);
}

#[test]
fn another_register_ends_what_the_window_before_it_may_do_and_lets_ask_for_another() {
    let mut rig = Rig::new();
    let (_, section) = rig.granted(1);
    let again = rig
        .w
        .say(rig.worker, Op::Window, &Window::default(), NO_FDS);
    assert_eq!(
        rig.w.error(again).0,
        ErrorCode::WindowUnavailable,
        "one at a time"
    );
    let _: RegisterReply = rig.w.ask(rig.worker, Op::Register, &offering());
    assert_eq!(
        rig.begins(Direction::Store, vec![run(&section)]),
        Err(Reason::Closed)
    );
    let newer = open(&mut rig.w, rig.worker);
    let older = rig.window;
    let news = WindowNews::Unavailable {
        reason: "HungUp".into(),
    };
    rig.w.input(Input::Window {
        window: older,
        news,
    });
    rig.window = newer;
    assert!(rig.begins(Direction::Store, vec![run(&section)]).is_ok());
}

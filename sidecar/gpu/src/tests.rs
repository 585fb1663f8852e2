//! Stages that change hands over host memory, with copies that are paused half-way.

use super::copy_engine::{CopyEngine, Slots, Step};
use super::device::{Device, DeviceError, Progress};
use super::host::HostDevice;
use super::page::FlagPage;
use super::stand_in::StandIn;
use kvcachepool_memory::mapping::Mapping;
use kvcachepool_protocol::window::*;
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::{AsFd, OwnedFd};
use std::cell::RefCell;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

const STAGE: u64 = 1 << 20;
const ARENA: u64 = 4 << 20;

/// Calls in order.
#[derive(Default)]
struct Told {
    refuse: Option<Reason>,
    log: RefCell<Vec<String>>,
}

impl Slots for Told {
    fn begins(&self, order: &Order) -> Result<(), Reason> {
        self.log
            .borrow_mut()
            .push(format!("begins {}", order.sequence));
        self.refuse.map_or(Ok(()), Err)
    }
    fn ended(&self, order: &Order, moved: bool) {
        self.log
            .borrow_mut()
            .push(format!("ended {} {moved}", order.sequence));
    }
    fn in_doubt(&self, order: &Order) {
        self.log
            .borrow_mut()
            .push(format!("in doubt {}", order.sequence));
    }
}

struct Rig {
    copy_engine: CopyEngine,
    /// The worker's mapping of the page.
    page: Mapping,
    window: Mapping,
    arena: Arc<Mapping>,
    ended: Arc<OwnedFd>,
    slots: Told,
    half_way: Receiver<()>,
    go_on: Sender<()>,
}

impl Rig {
    /// With `held`, each copy pauses half-way until it is released.
    fn new(held: bool) -> Self {
        let ended = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        let (tell, half_way) = channel();
        let (go_on, wait) = channel::<()>();
        let hook = move || {
            if held {
                tell.send(()).unwrap();
                let _ = wait.recv();
            }
        };
        let device = HostDevice::with(2 * STAGE, ended.clone(), Box::new(hook)).unwrap();
        let window = Mapping::new(device.export().fd.unwrap().as_fd(), 2 * STAGE).unwrap();
        let page = FlagPage::new(2, STAGE).unwrap();
        let theirs = Mapping::new(page.fd().as_fd(), page_bytes(2)).unwrap();
        let arena = Arc::new(Mapping::private("arena", ARENA).unwrap());
        Self {
            copy_engine: CopyEngine::new(page, Box::new(device), arena.clone(), STAGE),
            page: theirs,
            window,
            arena,
            ended,
            slots: Told::default(),
            half_way,
            go_on,
        }
    }

    fn hand_over(&self, stage: u32, state: State, sequence: u64, runs: &[Run]) {
        self.page.write(record_at(stage) + 8, &encode(runs)[8..]);
        let word = Word {
            state,
            reason: Reason::None,
            sequence,
        };
        self.store_word(stage, word);
    }

    fn store_word(&self, stage: u32, word: Word) {
        let shared = self.page.word64(record_at(stage)).unwrap();
        shared.store(word.encode(), std::sync::atomic::Ordering::Release);
    }

    fn word(&self, stage: u32) -> Word {
        let shared = self.page.word64(record_at(stage)).unwrap();
        Word::decode(shared.load(std::sync::atomic::Ordering::Acquire)).unwrap()
    }

    fn step(&mut self) -> Step {
        self.copy_engine.step(&self.slots)
    }

    /// Steps until no copy is in flight. Woken by the ends of copies.
    fn settle(&mut self) {
        let begun = Instant::now();
        while self.step().moving > 0 {
            assert!(begun.elapsed().as_secs() < 10, "a copy does not end");
            let mut fds = [PollFd::new(&self.ended, PollFlags::IN)];
            let second = Timespec {
                tv_sec: 1,
                tv_nsec: 0,
            };
            if poll(&mut fds, Some(&second)).unwrap() > 0 {
                rustix::io::read(self.ended.as_fd(), &mut [0u8; 8]).unwrap();
            }
        }
    }

    fn log(&self) -> Vec<String> {
        self.slots.log.take()
    }
}

fn run(slot: u32, offset: u32, bytes: u32) -> Run {
    Run {
        slot,
        generation: 1,
        offset,
        bytes,
    }
}

fn bytes_of(map: &Mapping, at: u64, count: usize) -> Vec<u8> {
    let mut out = vec![0; count];
    assert!(map.read(at, &mut out));
    out
}

#[test]
fn a_filled_stage_is_moved_to_the_slots_it_names_and_then_given_back() {
    let mut rig = Rig::new(false);
    let (a, b) = (vec![1u8; 300_000], vec![2u8; 100]);
    rig.window.write(STAGE, &a);
    rig.window
        .write(STAGE + 300_000u64.next_multiple_of(RUN_ALIGN), &b);
    rig.hand_over(
        1,
        State::Filled,
        5,
        &[run(8, 4096, 300_000), run(3, 0, 100)],
    );
    rig.settle();
    let moved = Word {
        state: State::Moved,
        reason: Reason::None,
        sequence: 5,
    };
    assert_eq!(rig.word(1), moved);
    assert_eq!(bytes_of(&rig.arena, 8 * 65_536 + 4096, a.len()), a);
    assert_eq!(bytes_of(&rig.arena, 3 * 65_536, b.len()), b);
    assert_eq!(rig.log(), ["begins 5", "ended 5 true"]);
}

#[test]
fn a_wanted_stage_is_filled_from_the_slots_it_names() {
    let mut rig = Rig::new(false);
    let bytes: Vec<u8> = (0..200_000u32).map(|i| i as u8).collect();
    rig.arena.write(5 * 65_536, &bytes);
    rig.hand_over(0, State::Wanted, 1, &[run(5, 0, 200_000)]);
    rig.settle();
    assert_eq!(rig.word(0).state, State::Moved);
    assert_eq!(bytes_of(&rig.window, 0, bytes.len()), bytes);
}

#[test]
fn a_stage_is_given_back_and_its_end_is_told_only_when_the_copy_has_ended() {
    let mut rig = Rig::new(true);
    rig.hand_over(0, State::Filled, 1, &[run(0, 0, 500_000)]);
    assert_eq!(rig.step().moving, 1);
    rig.half_way.recv().unwrap();
    assert_eq!(
        rig.step(),
        Step {
            moving: 1,
            ..Step::default()
        }
    );
    assert_eq!(
        (rig.word(0).state, rig.log()),
        (State::Filled, vec!["begins 1".into()])
    );
    rig.copy_engine.close();
    assert_eq!(
        rig.step().moving,
        1,
        "a window that ends waits for its copies"
    );
    rig.go_on.send(()).unwrap();
    rig.settle();
    assert_eq!(
        (rig.word(0).state, rig.log()),
        (State::Moved, vec!["ended 1 true".into()])
    );
    rig.hand_over(0, State::Filled, 2, &[run(0, 0, 1)]);
    rig.settle();
    assert_eq!((rig.word(0).reason, rig.log()), (Reason::Closed, vec![]));
}

#[test]
fn what_was_copied_from_the_page_counts_whatever_is_written_there_later() {
    let mut rig = Rig::new(true);
    rig.window.write(0, &[7; 400_000]);
    rig.hand_over(0, State::Filled, 1, &[run(0, 0, 400_000)]);
    rig.step();
    rig.half_way.recv().unwrap();
    rig.page.write(
        record_at(0) + 8,
        &encode(&[run(16, 0, 400_000), run(32, 0, 9)])[8..],
    );
    rig.store_word(
        0,
        Word {
            state: State::Filled,
            reason: Reason::None,
            sequence: 9,
        },
    );
    rig.go_on.send(()).unwrap();
    while rig.copy_engine.step(&rig.slots).answered == 0 {
        std::thread::yield_now();
    }
    let held = Word {
        state: State::Filled,
        reason: Reason::None,
        sequence: 9,
    };
    assert_eq!(rig.word(0), held, "a word that changed is not answered");
    assert_eq!(bytes_of(&rig.arena, 0, 400_000), vec![7; 400_000]);
    assert_eq!(bytes_of(&rig.arena, 16 * 65_536, 1), [0]);
    assert_eq!(rig.log(), ["begins 1", "ended 1 true"]);
}

#[test]
fn a_record_that_no_worker_means_and_a_copy_that_may_not_begin_move_nothing() {
    let mut rig = Rig::new(false);
    rig.window.write(0, &[7; 100]);
    rig.hand_over(0, State::Filled, 1, &[run(64, 0, 100)]);
    rig.settle();
    assert_eq!(
        (rig.word(0).state, rig.word(0).reason),
        (State::Refused, Reason::BadRecord)
    );
    assert!(rig.log().is_empty());
    rig.slots.refuse = Some(Reason::NotGranted);
    rig.hand_over(0, State::Filled, 2, &[run(0, 0, 100)]);
    rig.settle();
    assert_eq!(
        (rig.word(0).state, rig.word(0).reason),
        (State::Refused, Reason::NotGranted)
    );
    assert_eq!(bytes_of(&rig.arena, 0, 100), [0; 100]);
    assert_eq!(rig.log(), ["begins 2"], "what may not begin has no end");
}

#[test]
fn a_stage_is_moved_once_for_each_time_it_is_handed_over() {
    let mut rig = Rig::new(false);
    rig.hand_over(0, State::Filled, 3, &[run(0, 0, 100)]);
    rig.settle();
    for sequence in [3, 2] {
        rig.hand_over(0, State::Filled, sequence, &[run(0, 0, 100)]);
        rig.settle();
    }
    assert_eq!(rig.log(), ["begins 3", "ended 3 true"]);
    rig.store_word(
        0,
        Word {
            state: State::Moved,
            reason: Reason::None,
            sequence: 8,
        },
    );
    rig.settle();
    rig.hand_over(0, State::Filled, 4, &[run(0, 0, 100)]);
    rig.settle();
    assert_eq!(rig.log(), ["begins 4", "ended 4 true"]);
}

#[test]
fn a_copy_in_doubt_gives_nothing_back_before_its_end_is_known() {
    let mut rig = Rig::new(false);
    let error = DeviceError("no such luck".into());
    let copy = Arc::new(Mutex::new(Progress::Unknown(error.clone())));
    let device = StandIn(copy.clone());
    let page = FlagPage::new(2, STAGE).unwrap();
    rig.page = Mapping::new(page.fd().as_fd(), page_bytes(2)).unwrap();
    rig.copy_engine = CopyEngine::new(page, Box::new(device), rig.arena.clone(), STAGE);
    rig.hand_over(0, State::Filled, 1, &[run(0, 0, 100)]);
    rig.step();
    for _ in 0..3 {
        let step = rig.step();
        assert_eq!((step.moving, step.in_doubt, step.answered), (1, 1, 0));
        assert_eq!(rig.word(0).state, State::Filled);
    }
    assert_eq!(rig.log(), ["begins 1", "in doubt 1"]);
    *copy.lock() = Progress::Failed(error);
    let step = rig.step();
    assert_eq!((step.moving, step.in_doubt, step.answered), (0, 0, 1));
    assert_eq!(rig.word(0).reason, Reason::CopyFailed);
    assert_eq!(rig.log(), ["ended 1 false"]);
}

#[test]
fn a_copy_that_is_given_up_keeps_its_stage_and_its_slots_until_it_ends() {
    let mut rig = Rig::new(true);
    rig.hand_over(0, State::Filled, 1, &[run(0, 0, 500_000)]);
    assert_eq!(rig.step().moving, 1);
    rig.half_way.recv().unwrap();
    rig.copy_engine.close();
    for _ in 0..2 {
        rig.copy_engine.give_up(&rig.slots);
        let step = rig.step();
        assert_eq!((step.moving, step.in_doubt, step.answered), (1, 1, 0));
    }
    assert_eq!(rig.log(), ["begins 1", "in doubt 1"]);
    rig.go_on.send(()).unwrap();
    rig.settle();
    assert_eq!(rig.step(), Step::default());
    assert_eq!(rig.log(), ["ended 1 true"]);
}

#[test]
fn an_unknown_ticket_never_counts_as_done() {
    let ended = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
    let mut device = HostDevice::new(STAGE, ended).unwrap();
    let unknown = super::device::Ticket(77);
    assert!(matches!(device.progress(unknown), Progress::Failed(_)));
}

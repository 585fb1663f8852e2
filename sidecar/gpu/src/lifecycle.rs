//! Life cycle of a window, without threads or clocks: when copies may begin, when the worker must learn of the window's end, and when no
//! copy is left.

use super::copy_engine::{CopyEngine, Slots, Step};
use kvcachepool_engine::mistake::Mistake;
use std::time::Duration;

/// A copy that still runs this long after its window's end is in doubt. A stage normally takes milliseconds.
const OVERDUE: Duration = Duration::from_secs(10);

/// State of a window between its first copy and its last.
#[derive(Debug, Default)]
pub struct WindowLifecycle {
    works: bool,
    over: bool,
    closed_at: Option<Duration>,
    in_doubt: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Turn {
    /// Result of the step over all stages.
    pub step: Step,
    /// The earlier number of copies in doubt, if it changed. The worker must learn at once that no stage is handed back.
    pub doubted: Option<usize>,
    /// The window is closed, and no copy is left.
    pub ended: bool,
}

impl WindowLifecycle {
    /// Both sides have verified that they share the memory: stages are processed from now on.
    pub fn works(&mut self) {
        self.works = true;
    }

    /// The connection ended, or the worker hung up: no more copies begin.
    pub fn end(&mut self) {
        self.over = true;
    }

    /// True if the window is closed. Copies may still run.
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// Processes the stages. `now` is the time since an arbitrary start.
    pub fn turn(&mut self, copy_engine: &mut CopyEngine, slots: &dyn Slots, now: Duration) -> Turn {
        if self.over {
            copy_engine.close();
            let closed_at = *self.closed_at.get_or_insert(now);
            if now.saturating_sub(closed_at) >= OVERDUE {
                copy_engine.give_up(slots);
            }
        }
        let step = match self.works {
            true => copy_engine.step(slots),
            false => Step::default(),
        };
        let before = std::mem::replace(&mut self.in_doubt, step.in_doubt);
        let doubted = (before != step.in_doubt).then_some(before);
        if doubted.is_some() {
            self.over = true;
            copy_engine.close();
        }
        Turn {
            step,
            doubted,
            ended: self.over && (step.moving == 0 || slots.makes(Mistake::WindowEnds)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{DeviceError, Progress};
    use crate::page::FlagPage;
    use crate::stand_in::StandIn;
    use kvcachepool_memory::mapping::Mapping;
    use kvcachepool_protocol::window::*;
    use parking_lot::Mutex;
    use std::sync::Arc;
    use std::sync::atomic::Ordering;

    const STAGE: u64 = 1 << 20;

    struct Anything;

    impl Slots for Anything {
        fn begins(&self, _: &Order) -> Result<(), Reason> {
            Ok(())
        }
        fn ended(&self, _: &Order, _: bool) {}
        fn in_doubt(&self, _: &Order) {}
    }

    /// A window with one stage handed over, and the state of its copy.
    fn window() -> (CopyEngine, Arc<Mutex<Progress>>) {
        let stands = Arc::new(Mutex::new(Progress::Running));
        let page = FlagPage::new(1, STAGE).unwrap();
        let theirs = Mapping::new(rustix::fd::AsFd::as_fd(&page.fd()), page_bytes(1)).unwrap();
        let run = Run {
            slot: 0,
            generation: 1,
            offset: 0,
            bytes: 100,
        };
        theirs.write(record_at(0) + 8, &encode(&[run])[8..]);
        let word = Word {
            state: State::Filled,
            reason: Reason::None,
            sequence: 1,
        };
        let shared = theirs.word64(record_at(0)).unwrap();
        shared.store(word.encode(), Ordering::Release);
        let arena = Arc::new(Mapping::private("arena", STAGE).unwrap());
        let device = Box::new(StandIn(stands.clone()));
        (CopyEngine::new(page, device, arena, STAGE), stands)
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn nothing_moves_before_a_window_works_and_its_end_waits_for_what_moves() {
        let (mut copy_engine, stands) = window();
        let mut lifecycle = WindowLifecycle::default();
        assert_eq!(
            lifecycle
                .turn(&mut copy_engine, &Anything, at(0))
                .step
                .moving,
            0
        );
        lifecycle.works();
        assert_eq!(
            lifecycle
                .turn(&mut copy_engine, &Anything, at(1))
                .step
                .moving,
            1
        );
        lifecycle.end();
        assert!(!lifecycle.turn(&mut copy_engine, &Anything, at(2)).ended);
        *stands.lock() = Progress::Done;
        assert!(lifecycle.turn(&mut copy_engine, &Anything, at(3)).ended);
    }

    #[test]
    fn a_window_of_which_a_copy_is_in_doubt_is_over_and_ends_when_that_is_settled() {
        let (mut copy_engine, stands) = window();
        let mut lifecycle = WindowLifecycle::default();
        lifecycle.works();
        lifecycle.turn(&mut copy_engine, &Anything, at(0));
        let fault = DeviceError("a fault".into());
        *stands.lock() = Progress::Unknown(fault.clone());
        let turn = lifecycle.turn(&mut copy_engine, &Anything, at(1));
        assert_eq!((turn.doubted, turn.ended), (Some(0), false));
        assert!(lifecycle.is_over());
        *stands.lock() = Progress::Failed(fault);
        let turn = lifecycle.turn(&mut copy_engine, &Anything, at(2));
        assert_eq!((turn.doubted, turn.ended), (Some(1), true));
    }

    #[test]
    fn a_copy_that_outlasts_its_window_by_long_is_in_doubt() {
        let (mut copy_engine, _stands) = window();
        let mut lifecycle = WindowLifecycle::default();
        lifecycle.works();
        lifecycle.turn(&mut copy_engine, &Anything, at(0));
        lifecycle.end();
        assert_eq!(
            lifecycle.turn(&mut copy_engine, &Anything, at(1)).doubted,
            None
        );
        assert_eq!(
            lifecycle.turn(&mut copy_engine, &Anything, at(10)).doubted,
            None
        );
        let turn = lifecycle.turn(&mut copy_engine, &Anything, at(11));
        assert_eq!((turn.doubted, turn.step.in_doubt), (Some(0), 1));
    }
}

//! The order in which a stage changes hands, without threads or clocks: look at the page, ask whether a copy may begin, begin it, and give
//! the stage back only after the copy has ended and those who wait for that were told.

use super::device::{Device, Part, Progress, Ticket};
use super::page::FlagPage;
use kvcachepool_engine::mistake::{Mistake, made};
use kvcachepool_memory::mapping::Mapping;
use kvcachepool_protocol::window::{Order, Reason, State, Word, decode};
use std::sync::Arc;

/// Who says whose slots are whose.
pub trait Slots {
    /// May this copy begin? What is allowed is ended by [`Slots::ended`].
    fn begins(&self, order: &Order) -> Result<(), Reason>;
    /// A copy has ended, well or not: nothing of it runs any more. Said before the worker can see it.
    fn ended(&self, order: &Order, moved: bool);
    /// A copy has failed, and nobody says whether it has ended: until that is known nothing that it touches is given to anybody.
    fn in_doubt(&self, order: &Order);
}

struct Moving {
    word: Word,
    order: Order,
    ticket: Ticket,
    in_doubt: bool,
}

#[derive(Default)]
struct Stage {
    /// Sequence of the word that was looked at last; the worker raises it with every use.
    looked_at: u64,
    moving: Option<Moving>,
}

/// What a look at all stages did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Step {
    /// Copies under way, or in doubt.
    pub moving: usize,
    /// Those that failed and of which nobody says whether they have ended.
    pub in_doubt: usize,
    pub answered: usize,
}

/// One window: its page, its memory, its copies.
pub struct Mover {
    page: FlagPage,
    device: Box<dyn Device>,
    arena: Arc<Mapping>,
    stage_bytes: u64,
    stages: Vec<Stage>,
    closed: bool,
}

impl Mover {
    /// A window of `page.stages()` stages, for this arena.
    pub fn new(
        page: FlagPage,
        device: Box<dyn Device>,
        arena: Arc<Mapping>,
        stage_bytes: u64,
    ) -> Self {
        let stages = (0..page.stages()).map(|_| Stage::default()).collect();
        Self {
            page,
            device,
            arena,
            stage_bytes,
            stages,
            closed: false,
        }
    }

    pub fn device(&mut self) -> &mut dyn Device {
        &mut *self.device
    }

    pub fn page(&self) -> &FlagPage {
        &self.page
    }

    /// No further copy begins; those under way are to be waited for by [`Mover::step`].
    pub fn close(&mut self) {
        self.closed = true;
    }

    /// What still runs has had its time: it counts as in doubt, and what it touches stays with it as long as it does.
    pub fn give_up(&mut self, slots: &dyn Slots) {
        let stages = self.stages.iter_mut().enumerate();
        for (number, moving) in stages.filter_map(|(n, stage)| Some((n, stage.moving.as_mut()?))) {
            if !moving.in_doubt {
                tracing::error!(
                    stage = number,
                    "a copy of a window that is over does not end"
                );
                self.device.doubt(moving.ticket);
                slots.in_doubt(&moving.order);
                moving.in_doubt = true;
            }
        }
    }

    /// Looks at every stage once.
    pub fn step(&mut self, slots: &dyn Slots) -> Step {
        let mut step = Step::default();
        for stage in 0..self.page.stages() {
            step.answered += usize::from(self.look(stage, slots));
        }
        let moving = self.stages.iter().filter_map(|s| s.moving.as_ref());
        (step.moving, step.in_doubt) = moving.fold((0, 0), |(moving, in_doubt), m| {
            (moving + 1, in_doubt + usize::from(m.in_doubt))
        });
        step
    }

    /// True where the stage was given back.
    fn look(&mut self, number: u32, slots: &dyn Slots) -> bool {
        let Some(stage) = self.stages.get_mut(number as usize) else {
            return false;
        };
        if let Some(mut moving) = stage.moving.take() {
            let moved = match self.device.progress(moving.ticket) {
                Progress::Running if made(Mistake::CopyEnds) => true,
                Progress::Unknown(_) if made(Mistake::DoubtEnds) => false,
                Progress::Running => {
                    stage.moving = Some(moving);
                    return false;
                }
                Progress::Unknown(error) => {
                    if !moving.in_doubt {
                        tracing::error!(stage = number, %error, "a copy of a window failed, and nobody says whether it has ended");
                        slots.in_doubt(&moving.order);
                        moving.in_doubt = true;
                    }
                    stage.moving = Some(moving);
                    return false;
                }
                Progress::Done => true,
                Progress::Failed(error) => {
                    tracing::warn!(stage = number, %error, "a copy of a window failed");
                    false
                }
            };
            let (state, reason) = match moved {
                true => (State::Moved, Reason::None),
                false => (State::Refused, Reason::CopyFailed),
            };
            if made(Mistake::FlagFirst) {
                self.page.answer(number, moving.word, state, reason);
            }
            slots.ended(&moving.order, moved);
            self.page.answer(number, moving.word, state, reason);
            return true;
        }
        let Some(word) = self.page.word(number) else {
            return false;
        };
        let handed_over = matches!(word.state, State::Filled | State::Wanted);
        if !handed_over || word.sequence <= stage.looked_at {
            return false;
        }
        stage.looked_at = word.sequence;
        match self.begin(number, word, slots) {
            Ok(moving) => {
                if made(Mistake::StageEarly) {
                    self.page.answer(number, word, State::Moved, Reason::None);
                }
                if let Some(stage) = self.stages.get_mut(number as usize) {
                    stage.moving = Some(moving);
                }
                false
            }
            Err(reason) => {
                self.page.answer(number, word, State::Refused, reason);
                true
            }
        }
    }

    fn begin(&mut self, number: u32, word: Word, slots: &dyn Slots) -> Result<Moving, Reason> {
        if self.closed {
            return Err(Reason::Closed);
        }
        let record = self.page.record(number);
        let order =
            decode(word, &record, self.arena.length(), self.stage_bytes).map_err(|bad| {
                tracing::warn!(stage = number, %bad, "a stage of a window cannot be followed");
                Reason::BadRecord
            })?;
        slots.begins(&order)?;
        let base = u64::from(number) * self.stage_bytes;
        let parts = order.runs.iter().map(|(at, run)| Part {
            window: base + at,
            arena: run.arena_offset(),
            bytes: u64::from(run.bytes),
        });
        match self
            .device
            .begin(order.direction, &self.arena, parts.collect())
        {
            Ok(ticket) => Ok(Moving {
                word,
                order,
                ticket,
                in_doubt: false,
            }),
            Err(error) => {
                tracing::warn!(stage = number, %error, "a copy of a window did not begin");
                slots.ended(&order, false);
                Err(Reason::CopyFailed)
            }
        }
    }
}

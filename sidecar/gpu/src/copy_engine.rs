//! The order in which a stage changes hands, without threads or clocks: read the page, ask for permission to copy, start the copy, and hand
//! the stage back only after the copy has ended and the waiters for its end were notified.

use super::device::{Device, Part, Progress, Ticket};
use super::page::FlagPage;
use kvcachepool_engine::mistake::Mistake;
use kvcachepool_memory::mapping::Mapping;
use kvcachepool_protocol::window::{Order, Reason, State, Word, decode};
use std::sync::Arc;

/// Ownership of slots.
pub trait Slots {
    /// True if a window makes a mistake on purpose. Only the simulation makes any.
    fn makes(&self, _: Mistake) -> bool {
        false
    }
    /// Asks for permission to start a copy. A permitted copy is ended with [`Slots::ended`].
    fn begins(&self, order: &Order) -> Result<(), Reason>;
    /// A copy has ended, successfully or not. Called before the worker can see the end.
    fn ended(&self, order: &Order, moved: bool);
    /// A copy failed and its end is unknown: until it is known, nothing that the copy touches is reused.
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
    /// Sequence number of the last handled word. The worker raises it with every use.
    looked_at: u64,
    moving: Option<Moving>,
}

/// Result of a step over all stages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Step {
    /// Copies in flight or in doubt.
    pub moving: usize,
    /// Failed copies whose end is unknown.
    pub in_doubt: usize,
    pub answered: usize,
}

/// One window: its page, memory and copies.
pub struct CopyEngine {
    page: FlagPage,
    device: Box<dyn Device>,
    arena: Arc<Mapping>,
    stage_bytes: u64,
    stages: Vec<Stage>,
    closed: bool,
}

impl CopyEngine {
    /// A window of `page.stages()` stages for this arena.
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

    /// No more copies begin. Call [`CopyEngine::step`] until those in flight have ended.
    pub fn close(&mut self) {
        self.closed = true;
    }

    /// Marks the remaining copies as in doubt after a timeout. They keep what they touch until they end.
    pub fn give_up(&mut self, slots: &dyn Slots) {
        let stages = self.stages.iter_mut().enumerate();
        for (number, moving) in stages.filter_map(|(n, stage)| Some((n, stage.moving.as_mut()?))) {
            if !moving.in_doubt {
                tracing::error!(
                    stage = number,
                    "a window copy still runs long after its window ended"
                );
                self.device.doubt(moving.ticket);
                slots.in_doubt(&moving.order);
                moving.in_doubt = true;
            }
        }
    }

    /// Handles every stage once.
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

    /// Handles one stage. Returns true if it was handed back.
    fn look(&mut self, number: u32, slots: &dyn Slots) -> bool {
        let Some(stage) = self.stages.get_mut(number as usize) else {
            return false;
        };
        if let Some(mut moving) = stage.moving.take() {
            let moved = match self.device.progress(moving.ticket) {
                Progress::Running if slots.makes(Mistake::CopyEnds) => true,
                Progress::Unknown(_) if slots.makes(Mistake::DoubtEnds) => false,
                Progress::Running => {
                    stage.moving = Some(moving);
                    return false;
                }
                Progress::Unknown(error) => {
                    if !moving.in_doubt {
                        tracing::error!(stage = number, %error, "a window copy failed and may still run");
                        slots.in_doubt(&moving.order);
                        moving.in_doubt = true;
                    }
                    stage.moving = Some(moving);
                    return false;
                }
                Progress::Done => true,
                Progress::Failed(error) => {
                    tracing::warn!(stage = number, %error, "a window copy failed");
                    false
                }
            };
            let (state, reason) = match moved {
                true => (State::Moved, Reason::None),
                false => (State::Refused, Reason::CopyFailed),
            };
            if slots.makes(Mistake::FlagFirst) {
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
                if slots.makes(Mistake::StageEarly) {
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
                tracing::warn!(stage = number, error = %bad, "invalid record of a window stage; its copy is refused");
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
                tracing::warn!(stage = number, %error, "a window copy could not be started");
                slots.ended(&order, false);
                Err(Reason::CopyFailed)
            }
        }
    }
}

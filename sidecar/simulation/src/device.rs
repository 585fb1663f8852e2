//! The memory of a window, and a device whose copies go a run at a time: each may hang, fail, or end without anybody saying so.

use super::counts::Fault;
use super::memory::COPIES;
use super::world::{World, say};
use kvcachepool_gpu::device::{DeviceError, Part, Progress, Ticket};
use kvcachepool_gpu::stand_in;
use kvcachepool_memory::mapping::Mapping;
use kvcachepool_protocol::table::ROW_BYTES;
use kvcachepool_protocol::window::Direction;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What is true of a copy, known or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Running,
    Done,
    Failed,
    /// The device has failed and says nothing of it; bytes may still move.
    Doubtful,
}

/// One copy.
#[derive(Debug, Clone)]
pub struct Copy {
    pub ticket: Ticket,
    pub direction: Direction,
    pub parts: Vec<Part>,
    /// Parts whose bytes are there.
    pub moved: usize,
    pub state: State,
    /// Memory has heard of it.
    pub begun: bool,
    /// Whoever ordered it knows that it has ended.
    pub told: bool,
    /// Nothing of it moves before.
    pub hung_until: u64,
}

impl Copy {
    /// Bytes of it may still move.
    pub fn runs(&self) -> bool {
        matches!(self.state, State::Running | State::Doubtful)
    }
}

/// The copies of one window.
#[derive(Debug, Default)]
pub struct Copies {
    pub list: Vec<Copy>,
    next: u64,
    /// The next one does not begin.
    pub refuses: bool,
}

/// What the copy_engine drives; the world makes it go on.
impl stand_in::Copies for Copies {
    fn begin(&mut self, direction: Direction, parts: Vec<Part>) -> Result<Ticket, DeviceError> {
        self.next += 1;
        let (ticket, refused) = (Ticket(self.next), std::mem::take(&mut self.refuses));
        self.list.push(Copy {
            ticket,
            direction,
            parts,
            moved: 0,
            state: if refused {
                State::Failed
            } else {
                State::Running
            },
            begun: false,
            told: refused,
            hung_until: 0,
        });
        match refused {
            true => Err(DeviceError("it does not begin".into())),
            false => Ok(ticket),
        }
    }

    fn progress(&mut self, ticket: Ticket) -> Progress {
        let error = DeviceError("a fault".into());
        let Some(copy) = self.list.iter_mut().find(|c| c.ticket == ticket) else {
            return Progress::Failed(error);
        };
        copy.told = !copy.runs();
        match copy.state {
            State::Running => Progress::Running,
            State::Done => Progress::Done,
            State::Failed => Progress::Failed(error),
            State::Doubtful => Progress::Unknown(error),
        }
    }
}

/// What worker and sidecar share of a window. It is there for as long as one of them is.
#[derive(Debug)]
pub struct Pane {
    /// The worker's process.
    pub pid: usize,
    /// Boot that made it.
    pub boot: u64,
    /// Index of the region that its copies go from and to.
    pub region: usize,
    /// The flag page, as the worker maps it.
    pub page: Mapping,
    pub stages: u32,
    pub stage_bytes: u64,
    /// Uses of each stage.
    pub sequences: Vec<u64>,
    /// Rows in its memory, by their first byte.
    pub cells: BTreeMap<u64, u64>,
    pub copies: Arc<Mutex<Copies>>,
    /// Each side's end of the bell.
    pub sidecar_there: bool,
    pub worker_there: bool,
    /// The worker wrote where the sidecar looks.
    pub seen: bool,
}

impl Pane {
    /// A copy may still touch this stage.
    pub fn copied(&self, stage: u32) -> bool {
        let of = |at: u64| at / self.stage_bytes == u64::from(stage);
        let copies = self.copies.lock();
        let mut running = copies.list.iter().filter(|c| c.runs());
        running.any(|c| c.parts.iter().any(|p| of(p.window)))
    }
}

impl World {
    /// A copy of a window goes on, or something happens to it.
    pub fn copy_step(&mut self) -> bool {
        let (now, faults) = (self.now, self.faults_on);
        let mut all = Vec::new();
        for (at, pane) in self.panes.iter().enumerate() {
            let copies = pane.copies.lock();
            let moves = |c: &&Copy| c.runs() && (!faults || c.hung_until <= now);
            all.extend(copies.list.iter().filter(moves).map(|c| (at, c.ticket)));
        }
        if all.is_empty() {
            return false;
        }
        let (pane, ticket) = all[self.rng.below(all.len())];
        let fails = faults && self.rng.chance(self.p.rates.window);
        let settles = !faults || self.rng.chance(100);
        let what = self.rng.below(3);
        let hangs = now + self.rng.span(100, 20_000);
        let copies = self.panes[pane].copies.clone();
        let mut copies = copies.lock();
        let Some(copy) = copies.list.iter_mut().find(|c| c.ticket == ticket) else {
            return false;
        };
        match copy.state {
            State::Running if fails && what == 0 => {
                copy.hung_until = hangs;
                self.hit(Fault::CopyHung);
            }
            State::Running if fails && what == 1 => {
                self.hit(Fault::CopyFailed);
                self.copy_ends(pane, copy, State::Failed);
            }
            State::Running if fails => {
                say!(self, "copy {} of window {pane} is in doubt", copy.ticket.0);
                copy.state = State::Doubtful;
                self.hit(Fault::CopyInDoubt);
            }
            State::Doubtful if settles => {
                self.hit(Fault::DoubtSettled);
                self.copy_ends(pane, copy, State::Failed);
            }
            _ => self.moves(pane, copy),
        }
        true
    }

    /// The next part of a copy is there.
    fn moves(&mut self, at: usize, copy: &mut Copy) {
        let Some(part) = copy.parts.get(copy.moved).copied() else {
            return;
        };
        let pane = &mut self.panes[at];
        let mut m = self.memory.borrow_mut();
        let first = part.arena / ROW_BYTES;
        for n in 0..part.bytes.div_ceil(ROW_BYTES) {
            let (cell, row) = (part.window + n * ROW_BYTES, (first + n) as usize);
            let content = &mut m.regions[pane.region].content;
            match copy.direction {
                Direction::Store => content[row] = pane.cells.get(&cell).copied().unwrap_or(0),
                Direction::Load => {
                    pane.cells.insert(cell, content[row]);
                }
            }
        }
        drop(m);
        copy.moved += 1;
        if copy.moved == copy.parts.len() && copy.state == State::Running {
            self.copy_ends(at, copy, State::Done);
        }
    }

    /// Nothing of a copy moves any more.
    fn copy_ends(&mut self, at: usize, copy: &mut Copy, state: State) {
        let (region, pid) = (self.panes[at].region, self.panes[at].pid);
        say!(
            self,
            "copy {} of window {at} ends: {state:?}",
            copy.ticket.0
        );
        copy.state = state;
        if !self.procs[pid].alive {
            self.hit(Fault::CopyOutlivedWorker);
        }
        if copy.direction == Direction::Store {
            let mut m = self.memory.borrow_mut();
            for part in &copy.parts {
                m.end_write(region, COPIES, (part.arena / ROW_BYTES) as u32, None);
            }
        }
    }

    /// The engine process is gone: what its windows copied moves on for a while where a GPU does it.
    pub(super) fn windows_die(&mut self) {
        let mut hits = Vec::new();
        for window in std::mem::take(&mut self.side.windows) {
            let pane = &mut self.panes[window.pane];
            pane.sidecar_there = false;
            let mut copies = pane.copies.lock();
            for copy in copies.list.drain(..) {
                if copy.runs() {
                    hits.push(if self.p.gpu {
                        Fault::CopyOutlivedEngine
                    } else {
                        Fault::CrashUnderCopy
                    });
                } else if copy.state == State::Done && !copy.told {
                    hits.push(Fault::CrashBeforeFlag);
                }
            }
        }
        self.side.wishes.clear();
        self.side.confirms.clear();
        for fault in hits {
            self.hit(fault);
        }
    }
}

//! A job that goes through a window: cut into stages that are filled, handed over, waited for and emptied.

use super::counts::Fault;
use super::device::State as CopyState;
use super::memory::{FLIPPED, right};
use super::profile::Slip;
use super::rules::Rule;
use super::worker::{Job, JobPiece, Step};
use super::world::{Part, World, say};
use kvcachepool_protocol::table::ROW_BYTES;
use kvcachepool_protocol::window::{
    RUN_ALIGN, RUNS_MAX, Reason, Run, State, Word, encode, record_at,
};
use std::collections::VecDeque;
use std::sync::atomic::Ordering;

/// A job waits so long for its stages, and the window is lost then.
const PATIENCE_MS: u64 = 5_000;

/// What goes through a stage at once: runs with their place in it and the section that they are of.
type Staged = Vec<(u64, Run, JobPiece)>;

/// A job on its way.
#[derive(Debug)]
pub struct Through {
    pub pane: usize,
    parts: Vec<Staged>,
    next: usize,
    /// The stage of the next part is filled.
    filled: bool,
    /// Parts that the sidecar has.
    out: VecDeque<usize>,
    refused: Option<Reason>,
    waits_since: Option<u64>,
    patience_ms: u64,
    /// A section of which the sidecar gave other bytes.
    pub wrong: Option<JobPiece>,
}

impl Through {
    /// Cuts a job.
    pub fn new(pane: usize, job: &Job, stage_bytes: u64) -> Self {
        let (mut parts, mut now, mut at) = (Vec::new(), Staged::new(), 0u64);
        for piece in &job.pieces {
            let mut offset = 0;
            while offset < piece.length {
                let begin = at.next_multiple_of(RUN_ALIGN);
                let room = stage_bytes.saturating_sub(begin) / ROW_BYTES * ROW_BYTES;
                if room == 0 || now.len() == RUNS_MAX as usize {
                    parts.push(std::mem::take(&mut now));
                    at = 0;
                    continue;
                }
                let bytes = u64::from(piece.length - offset).min(room) as u32;
                let run = Run {
                    slot: piece.slot,
                    generation: piece.generation,
                    offset,
                    bytes,
                };
                now.push((begin, run, *piece));
                offset += bytes;
                at = begin + u64::from(bytes);
            }
        }
        if !now.is_empty() {
            parts.push(now);
        }
        Self {
            pane,
            parts,
            next: 0,
            filled: false,
            out: VecDeque::new(),
            refused: None,
            waits_since: None,
            patience_ms: PATIENCE_MS,
            wrong: None,
        }
    }
}

/// Rows of a part: first byte in the stage, section, row of the section.
fn rows(part: &Staged) -> impl Iterator<Item = (u64, &JobPiece, u32)> {
    part.iter().flat_map(|(at, run, piece)| {
        let first = (u64::from(run.offset) / ROW_BYTES) as u32;
        let count = u64::from(run.bytes).div_ceil(ROW_BYTES);
        (0..count).map(move |n| (at + n * ROW_BYTES, piece, first + n as u32))
    })
}

impl World {
    /// One step of a job that goes through a window.
    pub(super) fn through_step(&mut self, part: Part) -> bool {
        let w = &mut self.instances[part.instance].workers[part.rank.unwrap_or(0)];
        let (Some(mut t), Some(job)) = (w.through.take(), w.current.clone()) else {
            return false;
        };
        let stages = self.panes[t.pane].stages as usize;
        let more = t.refused.is_none() && t.next < t.parts.len();
        let moved = if more && t.out.len() < stages {
            self.fill(&mut t, &job);
            true
        } else if let Some(oldest) = t.out.front().copied() {
            match self.back(&mut t, &job, oldest) {
                Some(true) => {
                    self.lost_through(part, t, job);
                    return true;
                }
                Some(false) => true,
                None => false,
            }
        } else {
            self.through_ends(part, t, job);
            return true;
        };
        let w = &mut self.instances[part.instance].workers[part.rank.unwrap_or(0)];
        w.through = Some(t);
        moved
    }

    /// The next stage is filled, or handed over.
    fn fill(&mut self, t: &mut Through, job: &Job) {
        let stage = t.next as u32 % self.panes[t.pane].stages;
        if !job.load && !t.filled {
            self.stage_is_mine(t.pane, stage, "is filled");
            let pane = &mut self.panes[t.pane];
            let base = u64::from(stage) * pane.stage_bytes;
            for (at, piece, row) in rows(&t.parts[t.next]) {
                let content = right(piece.hash, piece.section, row);
                pane.cells.insert(base + at, content);
            }
            t.filled = true;
            return;
        }
        let runs: Vec<Run> = t.parts[t.next].iter().map(|(_, run, _)| *run).collect();
        let pane = &mut self.panes[t.pane];
        pane.sequences[stage as usize] += 1;
        let word = Word {
            state: if job.load {
                State::Wanted
            } else {
                State::Filled
            },
            reason: Reason::None,
            sequence: pane.sequences[stage as usize],
        };
        pane.page.write(record_at(stage) + 8, &encode(&runs)[8..]);
        let shared = pane.page.word64(record_at(stage)).unwrap();
        shared.store(word.encode(), Ordering::Release);
        say!(
            self,
            "stage {stage} of window {} is {:?}",
            t.pane,
            word.state
        );
        t.out.push_back(t.next);
        t.next += 1;
        t.filled = false;
    }

    /// Looks for the oldest stage that the sidecar has. Some(true): the window is lost; None: nothing happened.
    fn back(&mut self, t: &mut Through, job: &Job, oldest: usize) -> Option<bool> {
        let now = self.now;
        let pane = &self.panes[t.pane];
        let stage = oldest as u32 % pane.stages;
        let shared = pane.page.word64(record_at(stage)).unwrap();
        let word = Word::decode(shared.load(Ordering::Acquire)).unwrap();
        let answered = matches!(word.state, State::Moved | State::Refused);
        let mine = word.sequence == pane.sequences[stage as usize];
        let since = *t.waits_since.get_or_insert(now);
        if !(answered && mine || !job.load && self.p.slips(Slip::StageUnwaited)) {
            return (!pane.sidecar_there || now >= since + t.patience_ms).then_some(true);
        }
        t.patience_ms = t.patience_ms.saturating_sub(now - since);
        t.waits_since = None;
        t.out.pop_front();
        if word.state == State::Refused {
            t.refused.get_or_insert(word.reason);
        } else if job.load && t.refused.is_none() {
            self.stage_is_mine(t.pane, stage, "is read");
            let pane = &self.panes[t.pane];
            let base = u64::from(stage) * pane.stage_bytes;
            let differs = |(at, piece, row): &(u64, &JobPiece, u32)| {
                let cell = pane.cells.get(&(base + at)).copied().unwrap_or(0);
                cell & !FLIPPED != right(piece.hash, piece.section, *row)
            };
            let wrong = rows(&t.parts[oldest]).find(differs);
            t.wrong = t.wrong.or(wrong.map(|(_, piece, _)| *piece));
        }
        Some(false)
    }

    fn stage_is_mine(&mut self, pane: usize, stage: u32, what: &str) {
        // a worker that does not wait is not given its stages back
        if self.panes[pane].copied(stage) && !self.p.slips(Slip::StageUnwaited) {
            self.broke(Rule::S12, || {
                format!("stage {stage} of window {pane} {what} while it is copied")
            });
        }
    }

    /// A stage does not come back: nothing is said of the job, what was granted for it is kept.
    fn lost_through(&mut self, part: Part, t: Through, job: Job) {
        self.lose_window(part, t.pane, job);
        self.end_job(part.instance, part.rank.unwrap_or(0), false);
    }

    /// Every stage is back.
    fn through_ends(&mut self, part: Part, t: Through, job: Job) {
        let (instance, rank) = (part.instance, part.rank.unwrap_or(0));
        let w = &mut self.instances[instance].workers[rank];
        let Some(reason) = t.refused else {
            w.step = if job.load {
                Step::Reading
            } else {
                Step::Written
            };
            w.through = Some(t);
            return;
        };
        let broken = matches!(
            reason,
            Reason::CopyFailed | Reason::BadRecord | Reason::Closed
        );
        if broken && w.keeper.live == Some(t.pane) {
            w.keeper.retire();
        }
        say!(
            self,
            "{part:?}: a stage of job {} is refused: {reason:?}",
            job.request
        );
        if reason == Reason::BadRecord {
            self.broke(Rule::P1, || {
                format!("a record of job {} is refused", job.request)
            });
        }
        if !job.load {
            self.abort_slots(part, &job);
        }
        self.end_job(instance, rank, false);
    }

    /// A worker died with a job on its way: what is counted of it.
    pub(super) fn died_within(&mut self, t: &Through, load: bool) {
        let pane = &self.panes[t.pane];
        let copies = pane.copies.lock();
        let copied = copies.list.iter().any(|c| c.runs());
        let done = |c: &super::device::Copy| c.state == CopyState::Done && !c.told;
        let done = copies.list.iter().any(done);
        let begun = copies.list.iter().filter(|c| c.runs() || !c.told).count();
        drop(copies);
        if t.filled && !load {
            self.hit(Fault::DeathBeforeHandOver);
        }
        if t.out.len() > begun {
            self.hit(Fault::DeathBeforeMove);
        }
        if copied || done {
            self.hit(Fault::DeathBeforeFlag);
        }
    }
}

//! A worker's window from REGISTER's answer to its end, and the grants of stores that were lost with one.

use super::counts::Fault;
use super::memory::FdObject;
use super::profile::Slip;
use super::rules::Rule;
use super::worker::{Job, Step};
use super::world::{Part, Phase, Wire, World, say};
use kvcachepool_protocol::frame::{FLAG_ERROR, Op};
use kvcachepool_protocol::message::{self, Window, WindowReply};

/// A copy of a dead sidecar may go on for less than this.
const DEAD_COPIES_MS: u64 = 30_000;

/// Grants of a store that the sidecar may still copy for.
#[derive(Debug)]
pub struct Lost {
    job: Job,
    /// Boot that copied.
    boot: u64,
    /// When it was seen to be gone.
    gone_at: Option<u64>,
    /// Tag of the ABORT that is out.
    asked: Option<u64>,
}

/// The window in use, if any.
#[derive(Debug, Default)]
pub struct Keeper {
    /// Jobs that begin go through it.
    pub live: Option<usize>,
    asked: Option<usize>,
    retired: Vec<usize>,
    wanted: bool,
    question: u64,
    /// It had one.
    pub had: bool,
    pub lost: Vec<Lost>,
}

impl Keeper {
    /// Sections of lost stores.
    pub fn held(&self) -> impl Iterator<Item = &Job> {
        self.lost.iter().map(|l| &l.job)
    }

    /// No further job goes through its window.
    pub fn retire(&mut self) {
        self.retired.extend(self.live.take());
        self.retired.extend(self.asked.take());
        self.wanted = false;
    }
}

impl World {
    fn keeper(&mut self, part: Part) -> &mut Keeper {
        &mut self.instances[part.instance].workers[part.rank.unwrap_or(0)].keeper
    }

    /// REGISTER was answered.
    pub fn keeper_registered(&mut self, part: Part, transfer: &str) {
        self.keeper(part).wanted = transfer == "cuda_window";
    }

    /// Between two jobs: what was retired is unmapped, a window is asked for, and what no dead boot can write to goes back.
    pub fn keeper_step(&mut self, part: Part) -> bool {
        let (now, gpu) = (self.now, self.p.gpu);
        let up = self.link_of(part).phase == Phase::Up;
        let w = &mut self.instances[part.instance].workers[part.rank.unwrap_or(0)];
        if w.step != Step::Idle {
            return false;
        }
        if !w.keeper.retired.is_empty() {
            for pane in std::mem::take(&mut w.keeper.retired) {
                self.panes[pane].worker_there = false;
            }
            return true;
        }
        // on a GPU with the first job: vLLM has sized its own memory then
        if up && w.keeper.wanted && !(gpu && w.queue.is_empty()) {
            w.keeper.wanted = false;
            self.ask_window(part, false);
            return true;
        }
        let over = |l: &Lost| l.gone_at.is_some_and(|at| now >= at + DEAD_COPIES_MS);
        let at = w.keeper.lost.iter().position(over).filter(|_| up);
        let Some(at) = at else { return false };
        let lost = w.keeper.lost.remove(at);
        self.hit(Fault::LostStoreGivenBack);
        say!(
            self,
            "{part:?} gives back the lost store {}",
            lost.job.request
        );
        self.say_sections(part, Op::Abort, &lost.job);
        true
    }

    fn ask_window(&mut self, part: Part, seen: bool) {
        let tag = self.tag(part);
        let window = Window {
            seen,
            ..Window::default()
        };
        let body = message::encode(&window).unwrap();
        self.send(part, Op::Window, tag, body, Vec::new());
        self.keeper(part).question = tag;
    }

    /// WINDOW was answered.
    pub fn read_window(&mut self, part: Part, wire: &Wire) {
        let mismatch = self.faults_on && self.rng.chance(self.p.rates.window);
        if self.keeper(part).question != wire.frame.tag {
            return;
        }
        if wire.frame.flags & FLAG_ERROR != 0 {
            let keeper = self.keeper(part);
            keeper.retired.extend(keeper.asked.take());
            return;
        }
        let reply: WindowReply = message::decode(&wire.frame.body).unwrap();
        if reply.working {
            let keeper = self.keeper(part);
            keeper.live = keeper.asked.take();
            keeper.had = true;
            self.hit(Fault::WindowWorks);
        } else if let Some(FdObject::Window(pane)) = wire.fds.first().copied() {
            self.panes[pane].seen = !mismatch;
            self.keeper(part).asked = Some(pane);
            self.ask_window(part, true);
        }
    }

    /// The sidecar gave a stage not back. What it copies for this job may go on.
    pub fn lose_window(&mut self, part: Part, pane: usize, job: Job) {
        self.hit(Fault::WindowLost);
        let boot = self.panes[pane].boot;
        say!(self, "{part:?} loses window {pane} in job {}", job.request);
        let keeper = self.keeper(part);
        if keeper.live == Some(pane) {
            keeper.retire();
        }
        if job.load || self.p.slips(Slip::ForgetLost) {
            return;
        }
        self.keeper(part).lost.push(Lost {
            job,
            boot,
            gone_at: None,
            asked: None,
        });
        let link = self.link_of(part);
        if link.phase == Phase::Up {
            let at = self.keeper(part).lost.len() - 1;
            self.meet(part, at, link.boot);
        }
    }

    /// HELLO was answered by this boot.
    pub fn greeted(&mut self, part: Part, boot: u64) {
        for at in 0..self.keeper(part).lost.len() {
            self.meet(part, at, boot);
        }
    }

    fn meet(&mut self, part: Part, at: usize, boot: u64) {
        let now = if self.p.slips(Slip::LostAtOnce) {
            self.now - self.now.min(DEAD_COPIES_MS)
        } else {
            self.now
        };
        let lost = &mut self.keeper(part).lost[at];
        if lost.boot != boot {
            lost.gone_at.get_or_insert(now);
        }
        if lost.gone_at.is_none() {
            let job = lost.job.clone();
            let tag = self.say_sections(part, Op::Abort, &job);
            self.keeper(part).lost[at].asked = Some(tag);
        }
    }

    /// The boot that copied says that no copy of it runs any more.
    pub fn abort_answered(&mut self, part: Part, tag: u64) {
        let before = self.keeper(part).lost.len();
        let keeper = self.keeper(part);
        keeper.lost.retain(|l| l.asked != Some(tag));
        if keeper.lost.len() < before {
            self.hit(Fault::LostStoreAnswered);
        }
    }

    /// The process unmaps: its window goes, and what was granted means nothing any more.
    pub fn keeper_ends(&mut self, part: Part) {
        let keeper = self.keeper(part);
        keeper.retire();
        keeper.lost.clear();
        for pane in std::mem::take(&mut keeper.retired) {
            self.panes[pane].worker_there = false;
        }
    }

    /// At the end no store counts as lost any more, and no window that is over is left.
    pub(super) fn windows_rest(&mut self) {
        let workers = self.instances.iter().flat_map(|i| &i.workers);
        let lost: usize = workers.map(|w| w.keeper.lost.len()).sum();
        let over = self.side.windows.iter().filter(|w| w.is_over()).count();
        if lost + over > 0 {
            self.broke(Rule::L1, || {
                format!("{lost} lost stores are never given back, {over} windows never end")
            });
        }
    }
}

//! One history: a pod with its sidecar, its vLLM instances and what lies between them.

use super::counts::{Counts, Fault};
use super::device::Pane;
use super::lower::Lower;
use super::memory::{FdObject, Memory, Shared};
use super::profile::{Profile, Slip};
use super::rng::Rng;
use super::rules::{Rule, Violation};
use super::scheduler::Scheduler;
use super::sidecar::Sidecar;
use super::worker::Worker;
use kvcachepool_engine::sessions::Frame;
use kvcachepool_protocol::frame::Op;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

/// Prints a line of the trace, where one is wanted.
macro_rules! say {
    ($w:expr, $($arg:tt)*) => { if $w.tracing { $w.line(&format!($($arg)*)); } };
}
pub(super) use say;

/// One role of one process of one instance: the scheduler, or the worker of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    pub instance: usize,
    pub rank: Option<usize>,
}

/// A frame under way, with the objects that its descriptors stand for.
#[derive(Debug, Clone)]
pub struct Wire {
    pub frame: Frame,
    pub fds: Vec<FdObject>,
}

/// One socket.
#[derive(Debug)]
pub struct Conn {
    pub id: u64,
    pub part: Part,
    pub pid: usize,
    pub accepted: bool,
    pub client_open: bool,
    pub server_open: bool,
    /// Nobody looks at it before, unless everything is read.
    pub lags_until: u64,
    pub up: VecDeque<Wire>,
    pub down: VecDeque<Wire>,
}

/// One process of a vLLM.
#[derive(Debug, Clone)]
pub struct Process {
    pub alive: bool,
    pub stopped: bool,
    pub incarnation: [u8; 16],
    pub lock: Option<u32>,
    /// Index of the region that it maps.
    pub region: Option<usize>,
    pub unmapping: bool,
    pub greeting: Option<Part>,
    pub hello: [u64; 2],
    pub next_tag: u64,
    pub off: bool,
}

/// Where a part is with its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Phase {
    #[default]
    Off,
    /// HELLO is out.
    Greeting,
    /// Its answer is in, and asks for another HELLO (lock first, unmap).
    Between,
    /// Its answer is in.
    Up,
}

/// A part's connection.
#[derive(Debug, Clone, Copy, Default)]
pub struct Link {
    pub conn: Option<u64>,
    pub phase: Phase,
    pub hello_tag: u64,
    /// Not to connect, or to say HELLO again, before.
    pub at: u64,
    /// HELLO again at `at` although this one stands: there was no memory.
    pub again: bool,
    pub register_tag: u64,
    pub registered: bool,
    pub boot: u64,
}

/// One vLLM.
#[derive(Debug)]
pub struct Instance {
    pub name: String,
    pub scheduler: Scheduler,
    pub workers: Vec<Worker>,
    /// (request, rank, good): what the ranks report to the scheduler.
    pub reports: VecDeque<(u32, usize, bool)>,
    pub restart_at: u64,
}

/// Everything.
pub struct World {
    pub rng: Rng,
    pub now: u64,
    pub p: Profile,
    pub memory: Shared,
    pub side: Sidecar,
    pub lower: Lower,
    /// What was shared by windows, the last ones last.
    pub panes: Vec<Pane>,
    pub procs: Vec<Process>,
    pub instances: Vec<Instance>,
    pub conns: Vec<Conn>,
    pub next_conn: u64,
    pub next_request: u32,
    pub counts: Counts,
    pub events: u64,
    pub faults_on: bool,
    pub violation: Option<Violation>,
    pub tracing: bool,
}

impl World {
    /// A pod at its start.
    pub fn new(seed: u64, p: Profile, tracing: bool) -> Self {
        let mut memory = Memory::new(seed);
        memory.flock = p.slips(Slip::Flock);
        let mut w = Self {
            rng: Rng::new(seed, 2),
            now: 1_000,
            p,
            memory: Rc::new(RefCell::new(memory)),
            side: Sidecar::default(),
            lower: Lower::default(),
            panes: Vec::new(),
            procs: Vec::new(),
            instances: Vec::new(),
            conns: Vec::new(),
            next_conn: 1,
            next_request: 1,
            counts: Counts::default(),
            events: 0,
            faults_on: true,
            violation: None,
            tracing,
        };
        for at in 0..p.instances {
            w.instances.push(Instance {
                name: format!("engine-{at}"),
                scheduler: Scheduler::default(),
                workers: (0..p.world).map(|_| Worker::default()).collect(),
                reports: VecDeque::new(),
                restart_at: 0,
            });
            w.start_instance(at);
        }
        w.fill_tiers();
        w
    }

    /// Prints a line of the trace.
    pub fn line(&self, text: &str) {
        println!("{:5} {:9} ms  {text}", self.events, self.now);
    }

    /// A rule is broken: the history ends.
    pub fn broke(&mut self, rule: Rule, what: impl FnOnce() -> String) {
        if self.violation.is_none() {
            self.violation = Some(Violation { rule, what: what() });
        }
    }

    /// Takes over what the tables noticed.
    pub fn collect(&mut self) {
        if self.violation.is_none() {
            self.violation = self.memory.borrow_mut().violation.take();
        }
    }

    /// Counts a fault.
    pub fn hit(&mut self, fault: Fault) {
        self.counts.hit(fault);
    }

    /// New processes for a vLLM.
    pub fn start_instance(&mut self, at: usize) {
        let scheduler = self.start_process();
        let mut workers = Vec::new();
        for _ in 0..self.p.world {
            workers.push(if self.p.one_process {
                scheduler
            } else {
                self.start_process()
            });
        }
        let instance = &mut self.instances[at];
        instance.scheduler = Scheduler {
            pid: scheduler,
            ..Scheduler::default()
        };
        instance.workers = (0..)
            .zip(workers)
            .map(|(rank, pid)| Worker {
                pid,
                rank,
                ..Worker::default()
            })
            .collect();
        instance.reports.clear();
        say!(self, "vLLM {at} starts: scheduler {scheduler}");
    }

    fn start_process(&mut self) -> usize {
        let mut incarnation = [0; 16];
        incarnation[..8].copy_from_slice(&self.rng.bits().to_le_bytes());
        incarnation[8..].copy_from_slice(&(self.procs.len() as u64).to_le_bytes());
        self.procs.push(Process {
            alive: true,
            stopped: false,
            incarnation,
            lock: None,
            region: None,
            unmapping: false,
            greeting: None,
            hello: [0; 2],
            next_tag: 1,
            off: false,
        });
        self.procs.len() - 1
    }

    pub fn pid(&self, part: Part) -> usize {
        let i = &self.instances[part.instance];
        part.rank.map_or(i.scheduler.pid, |r| i.workers[r].pid)
    }

    pub fn process(&mut self, part: Part) -> &mut Process {
        let pid = self.pid(part);
        &mut self.procs[pid]
    }

    pub fn link(&mut self, part: Part) -> &mut Link {
        let i = &mut self.instances[part.instance];
        match part.rank {
            None => &mut i.scheduler.link,
            Some(r) => &mut i.workers[r].link,
        }
    }

    pub fn link_of(&self, part: Part) -> Link {
        let i = &self.instances[part.instance];
        part.rank.map_or(i.scheduler.link, |r| i.workers[r].link)
    }

    /// All parts of all instances.
    pub fn parts(&self) -> Vec<Part> {
        let mut list = Vec::new();
        for instance in 0..self.instances.len() {
            list.push(Part {
                instance,
                rank: None,
            });
            list.extend((0..self.p.world as usize).map(|r| Part {
                instance,
                rank: Some(r),
            }));
        }
        list
    }

    /// A part chosen by chance.
    pub fn any_part(&mut self) -> Part {
        let instance = self.rng.below(self.instances.len());
        let at = self.rng.below(self.p.world as usize + 1);
        Part {
            instance,
            rank: at.checked_sub(1),
        }
    }

    pub fn conn(&mut self, id: u64) -> Option<&mut Conn> {
        self.conns.iter_mut().find(|c| c.id == id)
    }

    /// Can anybody connect? A stopped sidecar still has its backlog.
    pub fn listening(&self) -> bool {
        self.side.driver.is_some()
    }

    /// Sends a frame from a part; where there is no connection, nothing is said.
    pub fn send(
        &mut self,
        part: Part,
        op: Op,
        tag: u64,
        body: Vec<u8>,
        fds: Vec<FdObject>,
    ) -> bool {
        let Some(id) = self.link_of(part).conn else {
            return false;
        };
        let Some(conn) = self.conn(id) else {
            return false;
        };
        if !conn.client_open {
            return false;
        }
        if conn.server_open {
            let frame = Frame {
                op,
                flags: 0,
                tag,
                body,
            };
            conn.up.push_back(Wire { frame, fds });
        }
        true
    }

    /// May this part say something besides HELLO: its HELLO is out, answered or not?
    pub fn may_say(&self, part: Part) -> bool {
        matches!(
            self.link_of(part).phase,
            Phase::Up | Phase::Greeting | Phase::Between
        )
    }

    /// The next tag of a part's process.
    pub fn tag(&mut self, part: Part) -> u64 {
        let process = self.process(part);
        process.next_tag += 1;
        process.next_tag - 1
    }

    /// A part's connection is over at its own end.
    pub fn lose(&mut self, part: Part, backoff: u64) {
        let pid = self.pid(part);
        let now = self.now;
        let link = self.link(part);
        let Some(id) = link.conn.take() else { return };
        *link = Link {
            at: now + backoff,
            ..Link::default()
        };
        if self.procs[pid].greeting == Some(part) {
            self.procs[pid].greeting = None;
        }
        let lags = if self.rng.chance(500) {
            now + self.rng.span(20, 300)
        } else {
            0
        };
        if let Some(conn) = self.conn(id) {
            conn.client_open = false;
            conn.lags_until = lags;
            let lost = !conn.down.is_empty();
            conn.down.clear();
            if lost {
                self.hit(Fault::AnswersLost);
            }
        }
        if self.procs[pid].region.is_none() {
            self.holds_nothing(pid);
        }
        match part.rank {
            None => self.scheduler_lost(part.instance),
            Some(rank) => self.worker_lost(part.instance, rank),
        }
    }

    /// A process ends: sockets, locks and mappings with it. Its device may write on for a while.
    pub fn kill(&mut self, pid: usize) {
        if !self.procs[pid].alive {
            return;
        }
        say!(self, "process {pid} dies");
        for part in self.parts() {
            if self.pid(part) == pid {
                self.lose(part, 0);
                if let Some(rank) = part.rank {
                    self.worker_dies(part.instance, rank);
                } else {
                    self.instances[part.instance].scheduler.end();
                }
            }
        }
        self.end_process(pid);
        self.procs[pid].alive = false;
        self.procs[pid].stopped = false;
    }

    /// Lock and mappings of a process end.
    pub fn end_process(&mut self, pid: usize) {
        let mut m = self.memory.borrow_mut();
        m.held.retain(|(_, p)| *p != pid);
        m.holders.retain(|(_, p)| *p != pid);
        drop(m);
        self.procs[pid].lock = None;
        self.procs[pid].region = None;
        self.procs[pid].unmapping = false;
    }

    /// A process maps, or is sent, a region.
    pub fn holds(&mut self, region: usize, pid: usize) {
        let mut m = self.memory.borrow_mut();
        if !m.holders.contains(&(region, pid)) {
            m.holders.push((region, pid));
        }
    }

    /// A process maps nothing any more.
    pub fn holds_nothing(&mut self, pid: usize) {
        self.procs[pid].region = None;
        self.memory.borrow_mut().holders.retain(|(_, p)| *p != pid);
    }

    /// Bytes begin to change: who reads them sees both.
    pub fn touched(&mut self, region: usize, slot: u32, rows: u32) {
        use super::memory::{overlap, rows_of};
        for i in &mut self.instances {
            for w in &mut i.workers {
                let reads = w.reading == Some(region)
                    && w.current.as_ref().is_some_and(|j| {
                        j.pieces
                            .iter()
                            .any(|p| overlap(p.slot, rows_of(u64::from(p.length)), slot, rows))
                    });
                if reads {
                    w.clean = false;
                }
            }
        }
        for d in &mut self.side.digests {
            if d.region == region && overlap(d.work.slot, rows_of(d.work.length), slot, rows) {
                d.clean = false;
            }
        }
    }
}

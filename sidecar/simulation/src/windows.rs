//! The sidecar's side of windows: the real copy_engine and its lifecycle, on threads that take their turns by chance.

use super::counts::Fault;
use super::device::{Copies, Pane, State};
use super::memory::{FdObject, rows_of};
use super::owner::Owner;
use super::rules::Rule;
use super::sidecar::survives;
use super::world::{World, say};
use kvcachepool_engine::driver;
use kvcachepool_engine::sessions::{ConnId, ProcessId, WindowId, WindowJob};
use kvcachepool_gpu::copy_engine::CopyEngine;
use kvcachepool_gpu::lifecycle::{Turn, WindowLifecycle};
use kvcachepool_gpu::page::FlagPage;
use kvcachepool_gpu::stand_in::StandIn;
use kvcachepool_memory::mapping::Mapping;
use kvcachepool_protocol::message::WindowReply;
use kvcachepool_protocol::table::ROW_BYTES;
use kvcachepool_protocol::window::{Direction, Order, Unavailable, page_bytes};
use parking_lot::Mutex;
use rustix::fd::AsFd;
use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::Duration;

/// A window as the sidecar has it.
pub struct Window {
    id: WindowId,
    process: ProcessId,
    region: u64,
    pub pane: usize,
    copy_engine: CopyEngine,
    lifecycle: WindowLifecycle,
    /// Its connection is over, or has another one.
    withdrawn: bool,
}

impl Window {
    /// No copy of it begins any more.
    pub fn is_over(&self) -> bool {
        self.lifecycle.is_over()
    }
}

impl World {
    pub(super) fn has_window(&self, conn: ConnId) -> bool {
        let mut windows = self.side.windows.iter();
        windows.any(|w| w.id.conn == conn && !w.withdrawn)
    }

    /// A connection is over, or gets another window.
    pub(super) fn withdraw_window(&mut self, conn: ConnId) {
        for (job, withdrawn) in &mut self.side.wishes {
            *withdrawn |= job.window.conn == conn;
        }
        for window in &mut self.side.windows {
            window.withdrawn |= window.id.conn == conn;
        }
    }

    /// The sidecar gives up some window.
    pub(super) fn withdraw(&mut self) -> bool {
        let at = self.rng.below(self.side.windows.len());
        let Some(window) = self.side.windows.get_mut(at) else {
            return false;
        };
        let pane = window.pane;
        if std::mem::replace(&mut window.withdrawn, true) {
            return false;
        }
        say!(self, "window {pane} is withdrawn");
        self.hit(Fault::WindowWithdrawn);
        true
    }

    /// Something of a window moves: a copy, or the thread of one.
    pub fn window_step(&mut self) -> bool {
        let stopped = self.side.stopped;
        if stopped && !self.p.gpu {
            return false;
        }
        if stopped || self.rng.chance(450) {
            return self.copy_step();
        }
        if self.rng.chance(200) && (self.make_window() || self.confirm_step()) {
            return true;
        }
        let count = self.side.windows.len();
        let start = self.rng.below(count);
        (0..count).any(|n| self.turn((start + n) % count))
    }

    /// Every thread of a window takes its turn, and every copy goes on.
    pub(super) fn windows_move(&mut self) -> bool {
        let mut any = self.make_window() | self.confirm_step();
        for at in (0..self.side.windows.len()).rev() {
            any |= self.turn(at);
        }
        while self.copy_step() {
            any = true;
        }
        any
    }

    fn make_window(&mut self) -> bool {
        if self.side.driver.is_none() || self.side.wishes.is_empty() {
            return false;
        }
        let at = self.rng.below(self.side.wishes.len());
        let (job, withdrawn) = self.side.wishes.remove(at);
        let window = job.window;
        if self.side.windows.iter().any(|w| w.process == job.process) {
            self.broke(Rule::S12, || format!("a second window: {job:?}"));
        }
        let region = self.memory.borrow().supervisor;
        let scarce = self.faults_on && self.rng.chance(self.p.rates.window);
        let pid = self.conn(window.conn.0).map(|c| c.pid);
        if let (Some(region), Some(pid), false) = (region, pid, scarce) {
            self.made(&job, withdrawn, region, pid);
        } else {
            self.refuse_window(window, window.tag, Unavailable::OutOfMemory);
            self.shell(|w| driver::window_released(w, job.process));
        }
        true
    }

    fn made(&mut self, job: &WindowJob, withdrawn: bool, region: usize, pid: usize) {
        let window = job.window;
        let (stages, stage_bytes) = (self.p.stages, u64::from(self.p.stage_rows) * ROW_BYTES);
        let page = FlagPage::new(stages, stage_bytes).unwrap();
        let theirs = Mapping::new(page.fd().as_fd(), page_bytes(stages)).unwrap();
        let geometry = self.memory.borrow().regions[region].geometry;
        // never touched: bytes are the device's affair
        let arena = Arc::new(Mapping::private("arena", geometry.arena_bytes).unwrap());
        let copies = Arc::new(Mutex::new(Copies::default()));
        let device = Box::new(StandIn(copies.clone()));
        let pane = self.panes.len();
        self.panes.push(Pane {
            pid,
            boot: self.side.boot,
            region,
            page: theirs,
            stages,
            stage_bytes,
            sequences: vec![0; stages as usize],
            cells: Default::default(),
            copies,
            sidecar_there: true,
            worker_there: self.procs[pid].alive,
            seen: false,
        });
        self.side.windows.push(Window {
            id: window,
            process: job.process,
            region: geometry.region,
            pane,
            copy_engine: CopyEngine::new(page, device, arena, stage_bytes),
            lifecycle: WindowLifecycle::default(),
            withdrawn,
        });
        say!(self, "window {pane} is made for process {pid}");
        let reply = WindowReply {
            stages,
            stage_bytes,
            ..WindowReply::default()
        };
        let answer = Ok((reply, vec![FdObject::Window(pane)]));
        self.shell(|w| driver::window_answered(w, window, window.tag, answer, None));
    }

    fn refuse_window(&mut self, window: WindowId, tag: u64, why: Unavailable) {
        self.hit(Fault::WindowRefused);
        let answer = Err(format!("{why:?}: simulated"));
        self.shell(|w| driver::window_answered(w, window, tag, answer, None));
    }

    /// A worker says that it has written where the sidecar looks.
    fn confirm_step(&mut self) -> bool {
        let Some(question) = self.side.confirms.pop() else {
            return false;
        };
        let WindowId { conn, tag } = question;
        let of = |w: &&mut Window| w.id.conn == conn && !w.withdrawn;
        let Some(window) = self.side.windows.iter_mut().find(of) else {
            self.refuse_window(question, tag, Unavailable::Busy);
            return true;
        };
        let id = window.id;
        if !self.panes[window.pane].seen {
            self.refuse_window(id, tag, Unavailable::PatternMismatch);
            return true;
        }
        window.lifecycle.works();
        let reply = WindowReply {
            working: true,
            ..WindowReply::default()
        };
        let (answer, memory) = (Ok((reply, Vec::new())), Some("simulated memory".into()));
        self.shell(|w| driver::window_answered(w, id, tag, answer, memory));
        true
    }

    /// The thread of a window looks at its stages. False: there was nothing to do.
    fn turn(&mut self, at: usize) -> bool {
        if at >= self.side.windows.len() {
            return false;
        }
        let Some(driver) = self.side.driver.take() else {
            return false;
        };
        let mut window = self.side.windows.remove(at);
        let (id, process, pane) = (window.id, window.process, window.pane);
        if window.withdrawn || !self.panes[pane].worker_there {
            window.lifecycle.end();
        }
        let refuses = self.faults_on && self.rng.chance(self.p.rates.window / 4);
        self.panes[pane].copies.lock().refuses = refuses;
        let owner = Owner {
            driver: RefCell::new(driver),
            id,
            region: window.region,
            now: self.core_now(),
            page: &self.panes[pane].page,
            begun: RefCell::default(),
            refused: Cell::default(),
            doubted: Cell::default(),
            early: Cell::default(),
        };
        let now = Duration::from_millis(self.now);
        let turn = survives(|| window.lifecycle.turn(&mut window.copy_engine, &owner, now));
        let Owner {
            driver,
            begun,
            refused,
            doubted,
            early,
            ..
        } = owner;
        self.side.driver = Some(driver.into_inner());
        self.side.windows.insert(at, window);
        let begun = begun.into_inner();
        if early.get() {
            self.broke(Rule::S12, || {
                format!("a stage of window {pane} is back before its copy's end is known")
            });
        }
        let moved = !begun.is_empty() || refused.get() > 0;
        self.copies_begin(pane, begun);
        for _ in 0..refused.get() {
            self.hit(Fault::StageRefused);
        }
        self.overdue(pane, doubted.get());
        self.shell(driver::carry_out);
        let Some(turn) = turn else { return true };
        self.turned((id, process), pane, turn);
        moved || turn.step.answered > 0 || turn.doubted.is_some() || turn.ended
    }

    /// Copies began: memory hears of them, in the order in which they were allowed.
    fn copies_begin(&mut self, pane: usize, orders: Vec<Order>) {
        let region = self.panes[pane].region;
        let lock = self.procs[self.panes[pane].pid].lock.unwrap_or(0);
        let copies = self.panes[pane].copies.clone();
        let mut copies = copies.lock();
        copies.list.retain(|c| !(c.told && c.begun));
        let fresh = copies.list.iter_mut().filter(|c| !c.begun);
        for (copy, order) in fresh.zip(orders) {
            copy.begun = true;
            if copy.state == State::Failed {
                self.hit(Fault::CopyRefused);
                continue;
            }
            say!(
                self,
                "copy {} of window {pane} begins: {order:?}",
                copy.ticket.0
            );
            if order.direction == Direction::Load {
                self.hit(Fault::StageLoaded);
                continue;
            }
            self.hit(Fault::StageStored);
            for (_, run) in &order.runs {
                let first = (u64::from(run.offset) / ROW_BYTES) as u32;
                let rows = rows_of(u64::from(run.bytes));
                self.touched(region, run.slot + first, rows);
                let mut m = self.memory.borrow_mut();
                m.begin_copy(region, lock, run.slot, run.generation, first, rows);
            }
        }
    }

    /// Copies that only take long count as in doubt, too.
    fn overdue(&mut self, pane: usize, doubted: u32) {
        let copies = self.panes[pane].copies.clone();
        let runs = copies.lock().list.iter().any(|c| c.state == State::Running);
        if doubted > 0 && runs {
            self.hit(Fault::CopyOverdue);
        }
    }

    fn turned(&mut self, (id, process): (WindowId, ProcessId), pane: usize, turn: Turn) {
        if turn.doubted.is_some() {
            self.panes[pane].sidecar_there = false;
            self.shell(|w| driver::window_ended(w, id, "CopyInDoubt".into()));
        }
        if turn.ended {
            self.panes[pane].sidecar_there = false;
            self.side.windows.retain(|w| w.pane != pane);
            let copies = self.panes[pane].copies.clone();
            if copies.lock().list.iter().any(|c| c.runs()) {
                self.broke(Rule::S12, || {
                    format!("the memory of window {pane} is freed under a copy")
                });
            }
            say!(self, "window {pane} has ended");
            self.shell(|w| driver::window_ended(w, id, "HungUp".into()));
            self.shell(|w| driver::window_released(w, process));
        }
    }
}

//! The sidecar: the real driver over devices of this world. It dies at any table write.

use super::counts::Fault;
use super::digests::Digest;
use super::host::SimHost;
use super::lower::{TierJob, configs};
use super::memory::{COPIES, ENGINE, EngineDied, FdObject};
use super::profile::{Profile, Slip};
use super::table::SimTable;
use super::windows::Window;
use super::world::{Wire, World, say};
use kvcachepool_engine::Effect;
use kvcachepool_engine::config::{Config, Limits, TransferMode};
use kvcachepool_engine::driver::{self, Broken, Devices, Driver, EarlierMemory, HEALTHY_AFTER_MS};
use kvcachepool_engine::sessions::{
    ConnId, Core, FdFacts, FdId, FdKind, FdType, Frame, Input, Now, ProcessId, Start, WindowId,
    WindowJob,
};
use kvcachepool_engine::table::ROW_BYTES;
use kvcachepool_protocol::PROTOCOL_VERSION;
use kvcachepool_protocol::frame::Header;
use kvcachepool_protocol::message::Admin;
use std::collections::BTreeMap;

/// What this boot answered to a PROBE.
#[derive(Debug, Clone, Default)]
pub struct Asked {
    pub request: u32,
    pub hashes: Vec<u64>,
    /// (slot, generation) per section of the ready chunks, by chunk.
    pub ready: Vec<Option<Vec<(u32, u32)>>>,
    pub pins_ended: u64,
    /// Hashes in full.
    pub full: Vec<[u8; 32]>,
    /// Chunks that the engine holds; none = an early PROBE.
    pub local: Option<usize>,
    pub conn: u64,
    /// Time of the world when it was asked.
    pub asked_at: u64,
    pub asked_ms: u64,
    pub wait_ms: u64,
    /// The final answer is out, or the question is over.
    pub answered: bool,
}

/// The sidecar container.
#[derive(Default)]
pub struct Sidecar {
    pub driver: Option<Driver<SimHost>>,
    /// An engine process runs, or has just died in a call.
    pub up: bool,
    pub container: bool,
    pub stopped: bool,
    pub boot: u64,
    pub unhealthy: u32,
    pub booted_at: u64,
    pub restart_at: u64,
    pub watched: Vec<(ProcessId, usize)>,
    pub digests: Vec<Digest>,
    pub jobs: Vec<TierJob>,
    pub populated: u32,
    pub asked: BTreeMap<(usize, u64), Asked>,
    /// Soft pins that had ended when the core was called last.
    pub pins_ended: u64,
    /// Rows whose bytes flipped, and when; 0 = before this boot.
    pub flips: BTreeMap<u32, u64>,
    pub mismatches: Vec<(u32, u32, u32)>,
    /// Windows that are to be made (true: withdrawn), that a worker says to see, and that are there.
    pub wishes: Vec<(WindowJob, bool)>,
    pub confirms: Vec<WindowId>,
    pub windows: Vec<Window>,
}

impl Sidecar {
    /// The state machine of the engine process of the moment.
    pub fn core(&self) -> Option<&Core<SimHost>> {
        self.driver.as_ref().map(Driver::core)
    }
}

fn config(p: &Profile) -> Config {
    let mut base = Config::default();
    base.settings.min_load_tokens = p.min_load_tokens;
    Config {
        arena_bytes: u64::from(p.segments) * 64 * ROW_BYTES,
        policy: p.policy,
        verify: p.verify,
        sweep_in_flight_max: 2,
        limits: Limits {
            granted_bytes_max: u64::from(p.segments) * 64 * ROW_BYTES,
            soft_pin_percent_max: p.soft_pin_percent,
            namespace_percent_max: 100,
            events_max: 64,
            ..base.limits
        },
        fetch_outlives_engine: p.fetch_outlives,
        tiers: configs(p.tiers),
        read_bytes_per_s: p.paces[0],
        write_bytes_per_s: p.paces[1],
        transfer: match p.windows {
            0 => TransferMode::Auto,
            _ => TransferMode::CudaWindow,
        },
        ..base
    }
}

/// Calls the state machine; it may die in the call.
pub(super) fn survives<T>(call: impl FnOnce() -> T) -> Option<T> {
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)) {
        Ok(value) => Some(value),
        Err(why) if why.is::<EngineDied>() => None,
        Err(why) => std::panic::resume_unwind(why),
    }
}

impl World {
    /// The time, as the engine process of the moment counts it.
    pub(super) fn core_now(&self) -> Now {
        Now {
            mono_ms: self.now - self.side.booted_at + 5,
            unix_s: 1_700_000_000 + self.now / 1000,
        }
    }

    /// The container or the engine process starts, where that is due.
    pub fn boot_step(&mut self) -> bool {
        if self.side.driver.is_some() || self.now < self.side.restart_at {
            return false;
        }
        if !self.side.container {
            self.side.container = true;
            say!(self, "a new container starts");
        }
        let found = self.memory.borrow().supervisor;
        let earlier = EarlierMemory::after(self.side.unhealthy);
        if earlier == EarlierMemory::Dropped && found.is_some() {
            say!(self, "engine drops the memory and ends");
            self.hit(Fault::MemoryDropped);
            self.memory.borrow_mut().supervisor = None;
            self.side.restart_at = self.now + self.rng.span(1, 300);
            return true;
        }
        let cold = earlier != EarlierMemory::Warm;
        if cold {
            self.hit(Fault::ColdStart);
        }
        let side = &mut self.side;
        side.boot += 1;
        side.unhealthy += 1;
        side.booted_at = self.now;
        side.populated = 0;
        let die = self.faults_on && self.rng.chance(self.p.rates.crash_at_write * 10);
        let boot = self.side.boot;
        self.note_flips(found);
        say!(
            self,
            "engine boots ({boot}), finds region index {found:?}, cold {cold}"
        );
        if die {
            self.memory.borrow_mut().writes_left = Some(self.rng.below(20) as u32);
        }
        let start = Start {
            boot,
            version: "0.1.0".into(),
            found: found.map(|at| SimTable::of(&self.memory, at)),
            cold,
        };
        let host = SimHost {
            memory: self.memory.clone(),
            most_bytes: 2 * u64::from(self.p.segments) * 64 * ROW_BYTES,
            takes_back: earlier != EarlierMemory::Dropped,
        };
        let now = self.core_now();
        let settings = config(&self.p);
        self.side.driver = survives(|| Driver::new(settings, host, start, now));
        self.side.up = true;
        self.called(Fault::CrashInBoot, driver::carry_out);
        self.memory.borrow_mut().writes_left = None;
        self.tell_tiers();
        true
    }

    /// One input for the state machine.
    pub(super) fn drive(&mut self, input: Input<'_>) {
        self.shell(|w| driver::handle(w, input));
    }

    /// A call of the driver, where there is one.
    pub(super) fn shell<R>(&mut self, call: impl FnOnce(&mut Self) -> R) -> Option<R> {
        self.side.driver.as_ref()?;
        self.called(Fault::CrashAtTableWrite, call)
    }

    /// The engine may die in a call, and nothing follows from it then.
    fn called<R>(&mut self, how: Fault, call: impl FnOnce(&mut Self) -> R) -> Option<R> {
        let crashed = self.memory.borrow().crashed;
        let answer = (!crashed).then(|| survives(|| call(self))).flatten();
        if self.memory.borrow().crashed {
            self.hit(how);
            self.crash();
        }
        self.side.pins_ended = self.pins_ended();
        self.collect();
        answer
    }

    /// The engine process is gone.
    pub fn crash(&mut self) {
        self.side.driver = None;
        if !std::mem::take(&mut self.side.up) {
            return;
        }
        say!(self, "ENGINE CRASH");
        for conn in &mut self.conns {
            conn.server_open = false;
            conn.up.clear();
        }
        self.windows_die();
        let until = self.now + self.rng.span(0, 29_000);
        let mut outlives = false;
        {
            let mut m = self.memory.borrow_mut();
            m.writes_left = None;
            m.crashed = false;
            m.fds.clear();
            for region in &mut m.regions {
                region.leased.clear();
                for w in region
                    .writers
                    .iter_mut()
                    .filter(|w| w.pid == ENGINE && w.ghost_until.is_none())
                {
                    w.ghost_until = Some(until);
                    outlives = true;
                }
                if !self.p.fetch_outlives {
                    region.writers.retain(|w| w.pid != ENGINE);
                }
                for w in region.writers.iter_mut().filter(|w| w.pid == COPIES) {
                    w.ghost_until.get_or_insert(until);
                }
                if !self.p.gpu {
                    region.writers.retain(|w| w.pid != COPIES);
                }
            }
        }
        if outlives && self.p.fetch_outlives {
            self.hit(Fault::FetchOutlivedEngine);
        }
        let restart = self.now + self.rng.span(1, 300);
        let side = &mut self.side;
        side.watched.clear();
        side.digests.clear();
        side.jobs.clear();
        side.asked.clear();
        side.mismatches.clear();
        side.stopped = false;
        side.restart_at = restart;
    }

    /// The whole container is gone, and what only it held.
    pub fn container_dies(&mut self, upgrade: bool) {
        say!(self, "CONTAINER DEATH, upgrade {upgrade}");
        self.crash();
        self.side.container = false;
        self.side.restart_at = self.now + self.rng.span(1, 3_000);
        let mut m = self.memory.borrow_mut();
        m.supervisor = None;
        if upgrade {
            m.format += 1;
        }
    }

    /// Reads one frame of a connection, or its end.
    pub fn sidecar_reads(&mut self, at: usize) -> bool {
        let c = &mut self.conns[at];
        if self.side.driver.is_none() || !c.server_open {
            return false;
        }
        let (id, pid, part) = (ConnId(c.id), c.pid, c.part);
        if !c.accepted {
            c.accepted = true;
            let peer = (self.p.kernel_pidfd).then(|| self.admit(FdObject::Pidfd(pid)));
            self.shell(|w| driver::connected(w, id, peer, 0));
            return true;
        }
        let c = &mut self.conns[at];
        let Some(wire) = c.up.pop_front() else {
            if c.client_open {
                return false;
            }
            say!(
                self,
                "sidecar sees the end of connection {} of {part:?}",
                id.0
            );
            self.shell(|w| driver::lost(w, id));
            return true;
        };
        if !c.client_open {
            // the end may be noticed before what was not read yet
            if self.rng.chance(150) {
                self.hit(Fault::FramesDroppedUnread);
                say!(
                    self,
                    "sidecar drops what connection {} of {part:?} still had",
                    id.0
                );
                self.shell(|w| driver::lost(w, id));
                return true;
            }
            self.hit(Fault::FramesReadAfterBreak);
        }
        let id_number = id.0;
        let older = self.conns.iter().any(|o| {
            o.part == part && o.pid == pid && o.id < id_number && !o.up.is_empty() && o.server_open
        });
        if older && wire.frame.op == kvcachepool_protocol::frame::Op::Hello {
            self.hit(Fault::NewerHelloReadFirst);
        }
        self.deliver(id, part.instance, part.rank.is_none(), wire);
        true
    }

    /// A descriptor comes in.
    fn admit(&mut self, object: FdObject) -> FdFacts {
        let mut m = self.memory.borrow_mut();
        m.next_fd += 1;
        let id = FdId(m.next_fd);
        m.fds.push((id, object));
        let kind = match object {
            FdObject::Pidfd(_) => FdType::Pidfd,
            FdObject::Arena(at) | FdObject::Table(at) => FdType::Memfd {
                sealed: true,
                live: m.supervisor == Some(at),
            },
            FdObject::Lock | FdObject::Window(_) => FdType::Other,
        };
        FdFacts { id, kind }
    }

    fn deliver(&mut self, conn: ConnId, instance: usize, scheduler: bool, wire: Wire) {
        let facts: Vec<_> = wire.fds.iter().map(|object| self.admit(*object)).collect();
        say!(
            self,
            "sidecar reads {:?} tag {} on connection {}",
            wire.frame.op,
            wire.frame.tag,
            conn.0
        );
        if scheduler {
            self.before_frame(conn, instance, &wire);
        }
        let header = Header {
            length: wire.frame.body.len() as u32,
            version: PROTOCOL_VERSION,
            opcode: wire.frame.op as u8,
            flags: wire.frame.flags,
            tag: wire.frame.tag,
        };
        self.memory.borrow_mut().forget_evictions();
        let dies = wire.frame.op == kvcachepool_protocol::frame::Op::Grant
            && self.p.slips(Slip::ReplyFirst)
            && self.faults_on
            && self.rng.chance(100);
        let call = |w: &mut Self| driver::frame(w, conn, header, &wire.frame.body, &facts);
        if dies {
            self.answer_then_die(call);
        } else {
            self.shell(call);
        }
        if scheduler {
            self.after_frame(instance, &wire);
        }
    }

    /// The answer of a call leaves, nothing of what it stored does.
    fn answer_then_die(&mut self, call: impl FnOnce(&mut Self)) {
        let before = {
            let m = self.memory.borrow();
            m.supervisor
                .map(|at| (at, m.regions[at].rows.clone(), m.regions[at].chunks.clone()))
        };
        self.shell(call);
        if let (Some((at, rows, chunks)), true) = (before, self.side.driver.is_some()) {
            let mut m = self.memory.borrow_mut();
            m.regions[at].rows = rows;
            m.regions[at].chunks = chunks;
            drop(m);
            self.crash();
        }
    }

    /// The kernel gives more pages.
    pub fn populate_step(&mut self) -> bool {
        let engine = self.side.core().and_then(|c| c.engine());
        let Some((geometry, capacity)) =
            engine.map(|e| (e.geometry(), (e.capacity_bytes() / ROW_BYTES) as u32))
        else {
            return false;
        };
        if let Some(end) = self.memory.borrow_mut().released.take() {
            self.side.populated = self.side.populated.min(end);
        }
        if self.side.populated >= capacity {
            return false;
        }
        self.side.populated += geometry.segment_rows();
        let rows = self.side.populated;
        self.drive(Input::Populated { rows });
        true
    }

    /// A pidfd of a dead process becomes readable.
    pub fn death_step(&mut self) -> bool {
        let Some(at) = self
            .side
            .watched
            .iter()
            .position(|(_, pid)| !self.procs[*pid].alive)
        else {
            return false;
        };
        let (process, pid) = self.side.watched.swap_remove(at);
        say!(self, "sidecar learns of the death of process {pid}");
        self.forget_leases_of(pid);
        self.shell(|w| driver::died(w, process));
        true
    }

    /// Reads everything that is readable, then lets the timers run.
    pub fn tick(&mut self) -> bool {
        if self.side.driver.is_none() {
            return false;
        }
        let mut any = true;
        while any && self.side.driver.is_some() && self.violation.is_none() {
            any = false;
            let start = self.rng.below(self.conns.len());
            for n in 0..self.conns.len() {
                let at = (start + n) % self.conns.len();
                let waits = !self.conns[at].accepted
                    || !self.conns[at].up.is_empty()
                    || !self.conns[at].client_open;
                if waits && self.conns[at].server_open && self.sidecar_reads(at) {
                    self.events += 1;
                    any = true;
                }
            }
        }
        if self.now >= self.side.booted_at + HEALTHY_AFTER_MS {
            self.side.unhealthy = 0;
        }
        let expired = self.core_stats(|s| s.expired_chunks);
        self.shell(driver::tick);
        self.answers_in_time();
        self.audit_tiers();
        if self.core_stats(|s| s.expired_chunks) > expired {
            self.hit(Fault::Expired);
        }
        true
    }

    /// A counter of the engine, 0 while there is none.
    pub fn core_stats(&self, read: impl Fn(&kvcachepool_engine::Stats) -> u64) -> u64 {
        let engine = self.side.core().and_then(|c| c.engine());
        engine.map_or(0, |e| read(e.stats()))
    }

    /// A hook wants everything written down.
    pub fn flush(&mut self) -> bool {
        if self.side.driver.is_none() {
            return false;
        }
        self.hit(Fault::Flush);
        say!(self, "a flush begins");
        self.shell(|w| driver::with_core(w, |core, now, out| drop(core.flush_now(now, out))));
        true
    }

    /// A person clears everything.
    /// The config asks for another size of the arena.
    pub fn resize(&mut self) -> bool {
        if self.side.driver.is_none() {
            return false;
        }
        self.hit(Fault::OtherSizeWanted);
        let segments = self
            .rng
            .span(self.p.segments.into(), 2 * u64::from(self.p.segments));
        let arena_bytes = segments * 64 * ROW_BYTES;
        say!(self, "the config asks for {segments} segments");
        let config = Config {
            arena_bytes,
            ..config(&self.p)
        };
        self.shell(|w| {
            let now = w.now();
            // a seam that dies in the call is started again
            let _ = w.driver().ask(now, |core, _, _| core.configure(config));
            driver::carry_out(w);
        });
        true
    }

    pub fn clear(&mut self) -> bool {
        if self.side.driver.is_none() {
            return false;
        }
        self.hit(Fault::Cleared);
        say!(self, "everything is cleared");
        self.shell(|w| {
            let now = w.now();
            let cleared = w.driver().ask(now, |core, now, out| core.clear(now, out));
            if cleared.is_ok() {
                w.clear_tiers();
            }
            driver::carry_out(w);
        });
        true
    }
}

impl Devices for World {
    type Host = SimHost;
    type Fd = FdObject;

    fn driver(&mut self) -> &mut Driver<SimHost> {
        self.side.driver.as_mut().unwrap()
    }

    fn now(&self) -> Now {
        self.core_now()
    }

    fn send(&mut self, conn: ConnId, frame: Frame, fds: Vec<FdObject>) -> Result<bool, Broken> {
        self.check_answer(conn, &frame);
        let slow = self.faults_on && self.rng.chance(1);
        let Some(c) = self.conn(conn.0) else {
            return Err(Broken);
        };
        let (pid, open) = (c.pid, c.client_open);
        if slow || !open {
            self.hit(Fault::SendFailed);
            return Err(Broken);
        }
        let region = fds.iter().find_map(|fd| match fd {
            FdObject::Arena(at) => Some(*at),
            _ => None,
        });
        c.down.push_back(Wire { frame, fds });
        if let Some(at) = region {
            self.holds(at, pid);
        }
        Ok(true)
    }

    fn close(&mut self, conn: ConnId, reason: Option<&'static str>) {
        say!(self, "sidecar closes connection {}: {reason:?}", conn.0);
        self.answers_lost(conn);
        if let Some(c) = self.conn(conn.0) {
            c.server_open = false;
            c.up.clear();
        }
    }

    fn descriptor(&self, kind: FdKind) -> Option<FdObject> {
        let live = self.memory.borrow().supervisor;
        match kind {
            FdKind::Arena => live.map(FdObject::Arena),
            FdKind::Table => live.map(FdObject::Table),
            FdKind::Lock => Some(FdObject::Lock),
        }
    }

    fn close_descriptors(&mut self, fds: &[FdFacts]) {
        let mut m = self.memory.borrow_mut();
        m.fds.retain(|(id, _)| fds.iter().all(|fd| fd.id != *id));
    }

    fn watch(&mut self, process: ProcessId, fd: FdId) {
        let mut m = self.memory.borrow_mut();
        let at = m.fds.iter().position(|(id, _)| *id == fd);
        if let Some((_, FdObject::Pidfd(pid))) = at.map(|at| m.fds.swap_remove(at)) {
            self.side.watched.push((process, pid));
        }
    }

    fn start(&mut self, effect: Effect) {
        match effect {
            Effect::Digest(work) => {
                if let Some(region) = self.memory.borrow().supervisor {
                    self.side.digests.push(Digest {
                        region,
                        work,
                        begun: None,
                        clean: true,
                    });
                }
            }
            effect => self.effect(effect),
        }
    }

    fn open_window(&mut self, job: WindowJob) -> Result<(), String> {
        self.side.wishes.push((job, false));
        Ok(())
    }

    fn confirm_window(&mut self, window: WindowId) -> bool {
        let has = self.has_window(window.conn);
        if has {
            self.side.confirms.push(window);
        }
        has
    }

    fn close_window(&mut self, conn: ConnId) {
        self.withdraw_window(conn);
    }

    fn unmapped(&mut self, _: ProcessId) {}

    fn admin(&mut self, _: ConnId, _: u64, _: Admin) {}

    fn log(&mut self, event: &'static str, detail: String) {
        if event == "ArenaAdopted" {
            self.hit(Fault::HandedBack);
            if self.memory.borrow().holders.len() > 1 {
                self.hit(Fault::HandedBackByOneOfTwo);
            }
            self.side.populated = 0;
            let live = self.memory.borrow().supervisor;
            self.note_flips(live);
        }
        if event == "ArenaResized" {
            self.hit(Fault::ArenaResized);
        }
        if event == "ArenaUnusable" {
            self.hit(Fault::OtherFormat);
        }
        say!(self, "sidecar: {event} {detail}");
    }
}

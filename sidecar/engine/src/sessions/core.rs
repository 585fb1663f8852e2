//! Entry point of the state machine: one call per input.

use super::counters::Counters;
use super::events::Poll;
use super::peers::{Conn, Peers, Session};
use super::register::Instance;
use super::seam::{ConnId, FdFacts, FdKind, Frame, Host, Input, Now, Output, Start};
use super::window::WaitingAbort;
use crate::config::Config;
use crate::mistake::Mistake;
use crate::table::Table;
use crate::tier::Kind;
use crate::{Changed, Completion, Engine, Unwritten};
use kvcachepool_protocol::PROTOCOL_VERSION;
use kvcachepool_protocol::frame::{FLAG_ERROR, FLAG_FDS, FLAG_REPLY, Header, Op};
use kvcachepool_protocol::message::{self, ErrorBody, ErrorCode, Role};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Interval of F_GETLK for the owners of slots.
const LOCK_POLL_MS: u64 = 1_000;
/// Limit on kept texts of peers. Bytes.
pub(super) const TEXT_MAX: usize = 128;

/// Sessions and engine together. The shell keeps one behind a short-held lock, and passes every event to [`Core::handle`].
#[derive(Debug)]
pub struct Core<H: Host> {
    pub(super) config: Config,
    pub(super) host: H,
    pub(super) engine: Option<Engine<H::Table>>,
    /// Why there is no memory tier: the reason's name, and a text for people.
    pub(super) no_arena: (&'static str, String),
    pub(super) retry_arena_ms: u64,
    /// Why the arena does not have the size in the config yet; empty if it has.
    pub(super) resize_waits: String,
    pub(super) next_resize_ms: u64,
    /// The sidecar may have page-locked the arena for windows: it keeps its size until the next start.
    pub(super) windows_used: bool,
    /// Locks of an earlier boot whose holders may still map an arena that was not handed back. None: the lock file was not read yet.
    pub(super) earlier_locks: Option<BTreeSet<u32>>,
    /// The last query of the lock file failed.
    pub(super) lock_file_failed: bool,
    pub(super) boot: u64,
    pub(super) version: String,
    pub(super) started: Now,
    pub(super) cold: bool,
    pub(super) draining: bool,
    pub(super) peers: Peers,
    pub(super) instances: BTreeMap<String, Instance>,
    pub(super) polls: BTreeMap<u64, Poll>,
    pub(super) waiting_aborts: Vec<WaitingAbort>,
    pub(super) offs: BTreeMap<String, String>,
    pub(super) counters: Counters,
    /// Last reported reason why each tier is down; none = up. Passed to an engine that starts later.
    pub(super) tiers_down: BTreeMap<Kind, Option<String>>,
    next_lock_poll_ms: u64,
}

/// A frame that needs a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Asked {
    pub conn: ConnId,
    pub op: Op,
    pub tag: u64,
}

impl<H: Host> Core<H> {
    /// Creates a state machine at the start of an engine process. Makes or adopts the arena if that is possible now.
    pub fn new(
        config: Config,
        host: H,
        start: Start<H::Table>,
        now: Now,
        out: &mut Vec<Output>,
    ) -> Self {
        let mut core = Self {
            config,
            host,
            engine: None,
            no_arena: ("Starting", String::new()),
            retry_arena_ms: 0,
            resize_waits: String::new(),
            next_resize_ms: now.mono_ms,
            windows_used: false,
            earlier_locks: None,
            lock_file_failed: false,
            boot: start.boot,
            version: start.version,
            started: now,
            cold: start.cold,
            draining: false,
            peers: Peers::default(),
            instances: BTreeMap::new(),
            polls: BTreeMap::new(),
            waiting_aborts: Vec::new(),
            offs: BTreeMap::new(),
            counters: Counters::default(),
            tiers_down: BTreeMap::new(),
            next_lock_poll_ms: now.mono_ms,
        };
        match start.found {
            Some(table) => {
                core.engine = Some(Engine::new(now, table, core.config.clone(), core.cold))
            }
            None => core.make_arena(now, out),
        }
        core.act(now, out);
        core
    }

    /// Handles one input. Appends commands for the shell to `out`, in order.
    pub fn handle(&mut self, now: Now, input: Input<'_>, out: &mut Vec<Output>) {
        match input {
            Input::Connected { conn, peer, pid } => {
                self.peers.conns.insert(
                    conn,
                    Conn {
                        peer,
                        pid,
                        ..Conn::default()
                    },
                );
            }
            Input::Frame {
                conn,
                header,
                body,
                fds,
            } => self.frame(now, conn, header, body, fds, out),
            Input::Disconnected { conn } => self.disconnected(conn),
            Input::ProcessDied { process } => self.process_died(now, process, out),
            Input::Populated { rows } => {
                if let Some(engine) = &mut self.engine {
                    engine.populated(rows);
                }
            }
            Input::Completed(completion) => self.completed(now, completion),
            Input::Window { window, news } => self.window_news(window, news, out),
            Input::Tick => self.tick(now, out),
            Input::Drain => {
                self.draining = true;
                if !self.attached() {
                    self.flush();
                }
            }
        }
        self.act(now, out);
    }

    /// Applies a changed configuration. Returns the names of settings that need a restart.
    pub fn configure(&mut self, config: Config) -> Vec<&'static str> {
        let mut restart = Vec::new();
        let mut arena_bytes = config.arena_bytes;
        if arena_bytes != self.config.arena_bytes && !self.may_resize(arena_bytes) {
            restart.push("memory.size");
            arena_bytes = self.config.arena_bytes;
        }
        if config.policy != self.config.policy {
            restart.push("memory.evictionPolicy");
        }
        if config.fidelity != self.config.fidelity {
            restart.push("write.codec");
        }
        let kinds = |c: &Config| c.tiers.iter().map(|t| t.kind).collect::<Vec<_>>();
        if kinds(&config) != kinds(&self.config) {
            restart.push("tiers");
        }
        let Config {
            policy, fidelity, ..
        } = self.config;
        let mut tiers = std::mem::take(&mut self.config.tiers);
        for tier in &mut tiers {
            if let Some(changed) = config.tiers.iter().find(|c| c.kind == tier.kind) {
                *tier = *changed;
            }
        }
        self.config = Config {
            arena_bytes,
            policy,
            fidelity,
            tiers,
            ..config
        };
        if let Some(engine) = &mut self.engine {
            engine.configure(&self.config);
        }
        self.next_resize_ms = 0;
        restart
    }

    /// The engine, if there is a memory tier.
    pub fn engine(&self) -> Option<&Engine<H::Table>> {
        self.engine.as_ref()
    }

    /// The engine, for tests that call it directly.
    #[cfg(test)]
    pub fn engine_mut(&mut self) -> Option<&mut Engine<H::Table>> {
        self.engine.as_mut()
    }

    pub fn host(&self) -> &H {
        &self.host
    }

    /// The host, for the shell's use between calls.
    pub fn host_mut(&mut self) -> &mut H {
        &mut self.host
    }

    /// True while a process that uses the memory is alive.
    pub fn attached(&self) -> bool {
        let lock = |s: &Session| self.peers.processes.get(&s.process).and_then(|p| p.lock);
        self.peers.sessions.values().any(|s| match s.role {
            Role::Scheduler | Role::Worker => true,
            // a process without open clients keeps its session, and no lock
            Role::Opaque => lock(s).is_some(),
            Role::Admin | Role::Plugin => false,
        })
    }

    fn frame(
        &mut self,
        now: Now,
        conn: ConnId,
        header: Header,
        body: &[u8],
        fds: &[FdFacts],
        out: &mut Vec<Output>,
    ) {
        let Some(known) = self.peers.conns.get(&conn) else {
            self.counters.ignored("ClosedConnection");
            return;
        };
        let (session, greeted) = (known.session, known.greeted);
        let asked = |op| Asked {
            conn,
            op,
            tag: header.tag,
        };
        let op = match Op::try_from(header.opcode) {
            Ok(op) => op,
            Err(e) => {
                let refusal = ErrorBody::new(ErrorCode::UnknownOpcode, e.to_string());
                // the tag identifies the request; a bad opcode cannot be echoed
                self.refuse(asked(Op::Hello), refusal, out);
                return;
            }
        };
        let asked = asked(op);
        let done = match (op, session, greeted) {
            (Op::Hello, _, _) => {
                self.hello(now, asked, body, fds, out);
                Ok(())
            }
            (Op::Admin, _, Some(Role::Admin)) => message::decode(body)
                .map_err(ErrorBody::from)
                .map(|request| {
                    let tag = header.tag;
                    out.push(Output::Admin { conn, tag, request });
                }),
            (_, None, None) => {
                let refusal = ErrorBody::new(
                    ErrorCode::HelloFirst,
                    "the first frame of a connection must be HELLO",
                );
                self.refuse(asked, refusal, out);
                self.close(conn, "HelloFirst", out);
                return;
            }
            (_, Some(session), _) => self.serve(now, asked, session, body, out),
            (_, None, Some(role)) => Err(wrong_role(role, op)),
        };
        if let Err(refusal) = done {
            self.refuse(asked, refusal, out);
        }
    }

    fn serve(
        &mut self,
        now: Now,
        asked: Asked,
        session: u64,
        body: &[u8],
        out: &mut Vec<Output>,
    ) -> Result<(), ErrorBody> {
        let Some(role) = self.peers.sessions.get(&session).map(|s| s.role) else {
            return Ok(());
        };
        match (asked.op, role) {
            (Op::Register, Role::Worker | Role::Scheduler) => {
                self.register(asked, session, body, out)
            }
            (Op::Probe, Role::Scheduler | Role::Opaque) => {
                self.probe(now, asked, session, role, body, out)
            }
            (Op::Pin, Role::Scheduler | Role::Opaque) => self.pin_request(now, session, body),
            (Op::Release, Role::Scheduler | Role::Opaque) => self.release(now, session, body),
            (Op::Grant, Role::Scheduler | Role::Opaque) => {
                self.grant(now, asked, session, role, body, out)
            }
            (Op::Commit, Role::Worker | Role::Opaque) => self.commit(session, body),
            (Op::Abort, Role::Worker | Role::Opaque) => self.abort(asked, session, body, out),
            (Op::Abort, Role::Scheduler) => self.abort_grant(asked, session, body, out),
            (Op::Events, Role::Scheduler) => self.events(now, asked, session, body, out),
            (Op::Report, Role::Worker | Role::Scheduler) => self.report(session, body),
            (Op::Window, Role::Worker) => self.window(asked, session, body, out),
            (Op::Objects, Role::Opaque) => self.objects(now, asked, session, body, out),
            (op, role) => Err(wrong_role(role, op)),
        }
    }

    pub(super) fn reply<B: Serialize>(
        &mut self,
        asked: Asked,
        flags: u16,
        body: &B,
        fds: Vec<FdKind>,
        out: &mut Vec<Output>,
    ) {
        let Asked { conn, op, tag } = asked;
        match message::encode(body) {
            Ok(body) => {
                let fd_flag = if fds.is_empty() { 0 } else { FLAG_FDS };
                let flags = flags | FLAG_REPLY | fd_flag;
                let frame = Frame {
                    op,
                    flags,
                    tag,
                    body,
                };
                out.push(Output::Send { conn, frame, fds });
            }
            Err(e) => out.push(Output::Log {
                event: "EncodeFailed",
                detail: e.to_string(),
            }),
        }
    }

    pub(super) fn refuse(&mut self, asked: Asked, refusal: ErrorBody, out: &mut Vec<Output>) {
        self.counters.refused(refusal.code);
        self.reply(asked, FLAG_ERROR, &refusal, Vec::new(), out);
    }

    /// Closes a connection. No further frames of it are read.
    pub(super) fn close(&mut self, conn: ConnId, reason: &'static str, out: &mut Vec<Output>) {
        if self.peers.conns.contains_key(&conn) {
            self.disconnected(conn);
            out.push(Output::Close { conn, reason });
        }
    }

    /// The session continues without a connection, and keeps its grants and leases.
    fn disconnected(&mut self, conn: ConnId) {
        let Some(gone) = self.peers.conns.remove(&conn) else {
            return;
        };
        let Some(id) = gone.session else { return };
        self.window_disconnected(id, conn);
        let Some(session) = self.peers.sessions.get_mut(&id) else {
            return;
        };
        if session.conn != Some(conn) {
            return;
        }
        session.conn = None;
        let (role, process) = (session.role, session.process);
        self.polls.remove(&id);
        if let Some(engine) = &mut self.engine {
            if matches!(role, Role::Scheduler | Role::Opaque) {
                engine.cancel_waiting(id);
            }
            if H::Table::makes(Mistake::FreeOnEof)
                && role == Role::Worker
                && let Some(lock) = self.peers.processes.get(&process).and_then(|p| p.lock)
            {
                engine.memory.reconcile(lock, &[], false);
            }
        }
    }

    /// Starts a flush of the chunks that only memory holds.
    pub(super) fn flush(&mut self) {
        if let Some(engine) = self.engine.as_mut().filter(|e| e.tiers().next().is_some()) {
            engine.flush();
            self.counters.event("Flush");
        }
    }

    /// Starts a flush on request. Returns the chunks to write, per tier.
    pub fn flush_now(&mut self, now: Now, out: &mut Vec<Output>) -> Vec<Unwritten> {
        let unwritten = self.unwritten();
        self.flush();
        self.act(now, out);
        unwritten
    }

    /// Chunks in memory that tiers are not known to have.
    pub fn unwritten(&self) -> Vec<Unwritten> {
        self.engine
            .as_ref()
            .map(Engine::unwritten)
            .unwrap_or_default()
    }

    /// True while a flush is running or due.
    pub fn flushes(&self) -> bool {
        self.engine.as_ref().is_some_and(Engine::flushes)
    }

    /// Removals of opaque objects that tiers have not confirmed.
    pub fn unremoved(&self) -> Vec<(Kind, usize)> {
        self.engine
            .as_ref()
            .map(Engine::unremoved)
            .unwrap_or_default()
    }

    /// True while a tier is expected to confirm removals.
    pub fn removes(&self) -> bool {
        self.engine.as_ref().is_some_and(Engine::removes)
    }

    fn tick(&mut self, now: Now, out: &mut Vec<Output>) {
        if now.mono_ms >= self.next_lock_poll_ms {
            self.next_lock_poll_ms = now.mono_ms + LOCK_POLL_MS;
            self.ask_for_locks(now, out);
        }
        self.resize(now, out);
        if let Some(engine) = &mut self.engine {
            engine.tick(now);
        }
    }

    fn completed(&mut self, now: Now, completion: Completion) {
        if let Completion::Tier { tier, down } = &completion {
            self.tiers_down.insert(*tier, down.clone());
        }
        if let Some(engine) = &mut self.engine {
            engine.completed(now, completion);
        }
    }

    /// Installs the engine: the memory tier exists from now on.
    pub(super) fn take_engine(&mut self, now: Now, mut engine: Engine<H::Table>) {
        for (tier, down) in &self.tiers_down {
            let (tier, down) = (*tier, down.clone());
            engine.completed(now, Completion::Tier { tier, down });
        }
        self.engine = Some(engine);
    }

    /// Converts the engine's effects and changed answers to outputs.
    pub(super) fn act(&mut self, now: Now, out: &mut Vec<Output>) {
        while let Some(engine) = &mut self.engine {
            let effects = engine.take_effects(now);
            let changed = engine.take_changed();
            if effects.is_empty() && changed.is_empty() {
                break;
            }
            out.extend(effects.into_iter().map(Output::Effect));
            for change in changed {
                match change {
                    Changed::Partial { probe } => self.probe_news(probe, out),
                    Changed::Final { probe } => self.finish_probe(now, probe, out),
                }
            }
        }
        self.tell_polls(now, out);
    }
}

fn wrong_role(role: Role, op: Op) -> ErrorBody {
    ErrorBody::new(
        ErrorCode::WrongRole,
        format!("a session of role {role:?} may not send {op:?}"),
    )
}

/// True if this protocol version is served.
pub(super) fn version_served(version: u8) -> bool {
    version != 0 && version.abs_diff(PROTOCOL_VERSION) <= 1
}

/// A peer's text, cut to [`TEXT_MAX`].
pub(super) fn text(said: &str) -> String {
    said.chars().take(TEXT_MAX).collect()
}

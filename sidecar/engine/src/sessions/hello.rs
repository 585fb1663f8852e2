//! HELLO: identifies the peer, requires a proof of its death and its lock, reconciles what it holds, and assigns its memory.

use super::core::{Asked, Core, text, version_served};
use super::memory::{Verdict, fd};
use super::peers::Session;
use super::seam::{ConnId, FdFacts, FdKind, FdType, Host, Now, Output, ProcessId};
use super::window::Mode;
use crate::mistake::Mistake;
use crate::table::Table;
use kvcachepool_protocol::PROTOCOL_VERSION;
use kvcachepool_protocol::message::{
    self, ErrorBody, ErrorCode, FEATURE_OBJECTS, Hello, HelloReply, Memory, Role,
};
use kvcachepool_protocol::refs;

/// Retry interval of a process without an arena. Milliseconds.
const RETRY_MS: u64 = 500;
/// Limit on instances whose `off` reason is kept.
const OFFS_MAX: usize = 64;

impl<H: Host> Core<H> {
    pub(super) fn hello(
        &mut self,
        now: Now,
        asked: Asked,
        body: &[u8],
        fds: &[FdFacts],
        out: &mut Vec<Output>,
    ) {
        if let Err(refusal) = self.greet(now, asked, body, fds, out) {
            let reason = if refusal.code == ErrorCode::StaleHello {
                "StaleHello"
            } else {
                "HelloRefused"
            };
            self.refuse(asked, refusal, out);
            self.close(asked.conn, reason, out);
        }
    }

    fn greet(
        &mut self,
        now: Now,
        asked: Asked,
        body: &[u8],
        fds: &[FdFacts],
        out: &mut Vec<Output>,
    ) -> Result<(), ErrorBody> {
        let conn = asked.conn;
        let hello: Hello = message::decode(body)?;
        if !version_served(hello.version) {
            let said = format!(
                "the connector speaks protocol version {}, but this sidecar supports version {PROTOCOL_VERSION}, one more and one less; recreate the pod",
                hello.version
            );
            return Err(ErrorBody::new(ErrorCode::WrongVersion, said));
        }
        if hello.off.is_some() || matches!(hello.role, Role::Admin | Role::Plugin) {
            self.greet_without_session(asked, &hello, out);
            return Ok(());
        }
        let incarnation: [u8; 16] = hello.incarnation.as_slice().try_into().map_err(|_| {
            let got = hello.incarnation.len();
            let said = format!("expected an incarnation of 16 bytes, got {got}");
            ErrorBody::new(ErrorCode::BadBody, said)
        })?;
        if self.peers.is_dead(&incarnation) {
            return Err(ErrorBody::new(
                ErrorCode::StaleHello,
                "the process with this incarnation has ended",
            ));
        }
        if hello.fds.len() != fds.len() {
            let said = format!(
                "HELLO names {} descriptors, but {} were passed",
                hello.fds.len(),
                fds.len()
            );
            return Err(ErrorBody::new(ErrorCode::BadDescriptor, said));
        }
        let process = self.meet(conn, incarnation, &hello, fds, out)?;
        let session = self.continue_session(conn, process, &hello, out)?;
        let verdict = self.about_memory(now, process, &hello, fds, out)?;
        self.take_list(session, process, &hello, &verdict)?;
        self.answer_hello(asked, session, verdict, out);
        Ok(())
    }

    fn greet_without_session(&mut self, asked: Asked, hello: &Hello, out: &mut Vec<Output>) {
        if let Some(c) = self.peers.conns.get_mut(&asked.conn) {
            c.greeted = Some(hello.role);
        }
        if let Some(reason) = &hello.off {
            self.counters.event("Off");
            let instance = text(&hello.instance);
            self.part_goes_off(&instance, hello);
            if self.offs.len() < OFFS_MAX || self.offs.contains_key(&instance) {
                self.offs.insert(instance, text(reason));
            }
            out.push(Output::Log {
                event: "ConnectorOff",
                detail: text(reason),
            });
        }
        let verdict = Verdict {
            memory: Memory::None,
            reason: "NoSession".into(),
        };
        let reply = self.hello_reply(0, verdict, None, Vec::new());
        self.reply(asked, 0, &reply, Vec::new(), out);
    }

    /// A part of an instance went off: the instance is not served until that part registers again. The plugin reports for all parts.
    fn part_goes_off(&mut self, instance: &str, hello: &Hello) {
        if instance.is_empty() {
            return;
        }
        let speaks_for = |s: &Session| {
            s.instance == instance
                && (!matches!(hello.role, Role::Worker | Role::Scheduler)
                    || (s.role == hello.role && s.rank == hello.rank))
        };
        let gone: Vec<u64> = self
            .peers
            .sessions
            .iter()
            .filter(|(_, s)| speaks_for(s))
            .map(|(id, _)| *id)
            .collect();
        for session in gone {
            self.leave_instance(session);
        }
    }

    /// Finds or creates the process of a HELLO. A new process must provide a way to observe its death.
    fn meet(
        &mut self,
        conn: ConnId,
        incarnation: [u8; 16],
        hello: &Hello,
        fds: &[FdFacts],
        out: &mut Vec<Output>,
    ) -> Result<ProcessId, ErrorBody> {
        if let Some(known) = self.peers.process_of(&incarnation) {
            return Ok(known);
        }
        let own = fd(hello, fds, "pidfd");
        let peer = self.peers.conns.get(&conn).and_then(|c| c.peer);
        let pollable = |f: &FdFacts| f.kind == FdType::Pidfd;
        let Some(pidfd) = own.filter(pollable).or(peer.filter(pollable)) else {
            return Err(ErrorBody::new(
                ErrorCode::NoProofOfDeath,
                "no pidfd that supports poll: HELLO passes none, and the kernel provides none for this socket; use Linux 5.3 or newer, and allow pidfd_open",
            ));
        };
        self.room_for_a_session()?;
        let process = self.peers.add_process(incarnation);
        out.push(Output::WatchProcess {
            process,
            fd: pidfd.id,
        });
        Ok(process)
    }

    fn room_for_a_session(&self) -> Result<(), ErrorBody> {
        let sessions_max = self.config.limits.sessions_max as usize;
        if self.peers.sessions.len() < sessions_max {
            return Ok(());
        }
        let said = format!(
            "limit of sessions reached (limits.sessions = {sessions_max}); raise the limit"
        );
        Err(ErrorBody::later(ErrorCode::LimitReached, said))
    }

    /// Begins or continues the session of a HELLO. Closes its older connection and drops that connection's unread frames.
    fn continue_session(
        &mut self,
        conn: ConnId,
        process: ProcessId,
        hello: &Hello,
        out: &mut Vec<Output>,
    ) -> Result<u64, ErrorBody> {
        let of_process = self
            .peers
            .processes
            .get(&process)
            .map(|p| p.sessions.clone())
            .unwrap_or_default();
        let known = of_process.into_iter().find(|id| {
            self.peers
                .sessions
                .get(id)
                .is_some_and(|s| s.role == hello.role)
        });
        let of_conn = self.peers.conns.get(&conn).and_then(|c| c.session);
        if of_conn.is_some() && of_conn != known {
            return Err(ErrorBody::new(
                ErrorCode::BadBody,
                "this connection belongs to another session",
            ));
        }
        let Some(id) = known else {
            self.room_for_a_session()?;
            let id = self.peers.number();
            let session = Session {
                process,
                role: hello.role,
                rank: hello.rank,
                instance: text(&hello.instance),
                engine: text(&hello.engine),
                engine_version: text(&hello.engine_version),
                conn: Some(conn),
                pid: 0,
                hello: hello.number,
                oldest_job_ms: 0,
                prefill_tokens_per_s: 0,
                transfer: Mode::default(),
                had_window: false,
            };
            self.peers.sessions.insert(id, session);
            if let Some(p) = self.peers.processes.get_mut(&process) {
                p.sessions.push(id);
            }
            self.tie(conn, id);
            self.rank_begins(id, out);
            return Ok(id);
        };
        let Some(session) = self.peers.sessions.get_mut(&id) else {
            return Ok(id);
        };
        if hello.number <= session.hello && !H::Table::makes(Mistake::HelloNumbers) {
            let said = format!(
                "HELLO number {} is not higher than the last one, {}",
                hello.number, session.hello
            );
            return Err(ErrorBody::later(ErrorCode::StaleHello, said));
        }
        session.hello = hello.number;
        let older = session.conn.filter(|c| *c != conn);
        if let Some(older) = older
            && !H::Table::makes(Mistake::OldFrames)
        {
            self.close(older, "Superseded", out);
        }
        self.move_session(id, hello);
        self.tie(conn, id);
        Ok(id)
    }

    /// A process may begin another engine in the same incarnation: moves its session to that instance.
    fn move_session(&mut self, id: u64, hello: &Hello) {
        let instance = text(&hello.instance);
        let stays = |s: &Session| s.instance == instance && s.rank == hello.rank;
        if self.peers.sessions.get(&id).is_some_and(stays) {
            return;
        }
        self.leave_instance(id);
        if let Some(s) = self.peers.sessions.get_mut(&id) {
            s.instance = instance;
            s.rank = hello.rank;
        }
    }

    /// A new rank begins: closes the connections of schedulers in other processes. Their unread frames were meant for the earlier ranks,
    /// and slots that a dead scheduler's GRANT takes from this rank would never be given back. A live scheduler says HELLO again.
    fn rank_begins(&mut self, id: u64, out: &mut Vec<Output>) {
        let Some(rank) = self.peers.sessions.get(&id) else {
            return;
        };
        if rank.role != Role::Worker {
            return;
        }
        let earlier = |s: &&Session| {
            s.role == Role::Scheduler && s.instance == rank.instance && s.process != rank.process
        };
        let sessions = self.peers.sessions.values();
        let conns: Vec<ConnId> = sessions.filter(earlier).filter_map(|s| s.conn).collect();
        self.counters.add_event("RankBegan", conns.len() as u64);
        for conn in conns {
            self.close(conn, "RankBegan", out);
        }
    }

    fn tie(&mut self, conn: ConnId, session: u64) {
        let Some(c) = self.peers.conns.get_mut(&conn) else {
            return;
        };
        c.session = Some(session);
        if let Some(s) = self.peers.sessions.get_mut(&session) {
            s.conn = Some(conn);
            s.pid = c.pid;
        }
    }

    fn about_memory(
        &mut self,
        now: Now,
        process: ProcessId,
        hello: &Hello,
        fds: &[FdFacts],
        out: &mut Vec<Output>,
    ) -> Result<Verdict, ErrorBody> {
        if let Some(p) = self.peers.processes.get_mut(&process) {
            p.watches_shrinks = hello.watches_shrinks;
        }
        let unfit =
            |name| fd(hello, fds, name).is_some_and(|f| !matches!(f.kind, FdType::Memfd { .. }));
        if unfit("arena") || unfit("table") {
            return Err(ErrorBody::new(
                ErrorCode::BadDescriptor,
                "the descriptors `arena` and `table` must be memfds",
            ));
        }
        match hello.lock {
            Some(lock) => self.confirm_lock(process, lock, out)?,
            None if H::Table::makes(Mistake::LockFirst) => {}
            None => {
                if let Some(p) = self.peers.processes.get_mut(&process) {
                    p.lock = None;
                    p.maps = hello.region;
                }
                return Ok(Verdict {
                    memory: Memory::LockFirst,
                    reason: String::new(),
                });
            }
        }
        self.judge_memory(now, process, hello, fds, out)
    }

    /// Reconciles what the process still holds, and takes everything else back.
    fn take_list(
        &mut self,
        session: u64,
        process: ProcessId,
        hello: &Hello,
        verdict: &Verdict,
    ) -> Result<(), ErrorBody> {
        let named = refs::unpack(&hello.grants)
            .map_err(|torn| ErrorBody::new(ErrorCode::BadBody, torn.to_string()))?;
        let mapped = matches!(verdict.memory, Memory::Held | Memory::Sent);
        if hello.role == Role::Scheduler {
            if let Some(engine) = &mut self.engine {
                if !H::Table::makes(Mistake::NoLeaseEnd) {
                    engine.keep_requests(session, &hello.requests);
                }
                if H::Table::makes(Mistake::RoleHello)
                    && let Some(lock) = self.peers.processes.get(&process).and_then(|p| p.lock)
                {
                    engine.memory.reconcile(lock, &[], false);
                }
            }
            return Ok(());
        }
        if hello.role == Role::Opaque
            && let Some(engine) = &mut self.engine
        {
            engine.keep_requests(session, &hello.requests);
        }
        if verdict.memory != Memory::Held {
            // the process does not map the live arena, so it is not ready before its next REGISTER
            self.leave_instance(session);
        }
        if mapped
            && let Some(engine) = &mut self.engine
            && let Some(lock) = self.peers.processes.get(&process).and_then(|p| p.lock)
        {
            let named: Vec<(u32, u32)> = named
                .iter()
                .map(|r| (r.slot.get(), r.generation.get()))
                .collect();
            let back = engine
                .memory
                .reconcile(lock, &named, hello.role == Role::Opaque);
            self.counters.add_event("GrantsNotNamed", u64::from(back));
        }
        Ok(())
    }

    fn answer_hello(
        &mut self,
        asked: Asked,
        session: u64,
        mut verdict: Verdict,
        out: &mut Vec<Output>,
    ) {
        let mut lock = None;
        let fds = match verdict.memory {
            Memory::LockFirst => match self.host.next_lock() {
                Ok(number) => {
                    lock = Some(number);
                    self.owns_nothing_yet(session);
                    vec![FdKind::Lock]
                }
                Err(e) => {
                    out.push(Output::Log {
                        event: "LockFileFailed",
                        detail: e.to_string(),
                    });
                    verdict = Verdict {
                        memory: Memory::None,
                        reason: "LockFileFailed".into(),
                    };
                    Vec::new()
                }
            },
            Memory::Sent => vec![FdKind::Arena, FdKind::Table],
            _ => Vec::new(),
        };
        self.counters.event(match verdict.memory {
            Memory::LockFirst => "HelloLockFirst",
            Memory::Sent => "HelloSent",
            Memory::Held => "HelloHeld",
            Memory::Unmap => "HelloUnmap",
            Memory::None => "HelloNoArena",
        });
        let reply = self.hello_reply(session, verdict, lock, fds.clone());
        self.reply(asked, 0, &reply, fds, out);
    }

    /// A client's process gets a new lock, so it owns no slots of an earlier boot. A GPU writes for it only once it is also a worker.
    fn owns_nothing_yet(&mut self, session: u64) {
        if let Some(s) = self.peers.sessions.get(&session)
            && s.role == Role::Opaque
            && let Some(p) = self.peers.processes.get_mut(&s.process)
        {
            p.gpu = Some(p.gpu.unwrap_or(false));
        }
    }

    fn hello_reply(
        &self,
        session: u64,
        verdict: Verdict,
        lock: Option<u32>,
        fds: Vec<FdKind>,
    ) -> HelloReply {
        let geometry = self.engine.as_ref().map(|e| e.geometry());
        let waits = matches!(verdict.memory, Memory::None | Memory::Unmap) && session != 0;
        HelloReply {
            version: PROTOCOL_VERSION,
            sidecar_version: self.version.clone(),
            session,
            boot: self.boot,
            features: vec![FEATURE_OBJECTS.to_owned()],
            settings: self.config.settings.clone(),
            retry_ms: if waits { RETRY_MS } else { 0 },
            memory: verdict.memory,
            reason: verdict.reason,
            lock,
            region: geometry.map(|g| g.region),
            arena_bytes: geometry.map_or(0, |g| g.arena_bytes),
            table_bytes: geometry.map_or(0, |g| g.table_bytes()),
            fds: fds.into_iter().map(|f| f.name().to_owned()).collect(),
        }
    }
}

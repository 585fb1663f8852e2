//! Connections, processes (one incarnation each) and sessions (one role of a process).

use super::seam::{ConnId, FdFacts, ProcessId};
use super::window::Mode;
use kvcachepool_protocol::message::Role;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Limit on remembered dead incarnations. Without them, an unread HELLO of a dead process would look like a new process.
const GRAVES_MAX: usize = 4096;

#[derive(Debug, Default)]
pub(super) struct Conn {
    /// The peer's pidfd, if the kernel provides one.
    pub peer: Option<FdFacts>,
    /// The peer's process id from the kernel; 0 = hidden.
    pub pid: u32,
    pub session: Option<u64>,
    /// Role of a tool or plugin that said HELLO. Such a connection has no session.
    pub greeted: Option<Role>,
}

/// One incarnation of a process.
#[derive(Debug)]
pub(super) struct Process {
    pub incarnation: [u8; 16],
    /// Byte of the lock file that the process holds.
    pub lock: Option<u32>,
    /// Mapped region, according to its last HELLO or to the reply.
    pub maps: Option<u64>,
    pub sessions: Vec<u64>,
    /// True if a GPU writes for the process; none = unknown.
    pub gpu: Option<bool>,
    /// The process drops page locks of pages that are given back.
    pub watches_shrinks: bool,
}

/// One role of a process.
#[derive(Debug)]
pub(super) struct Session {
    pub process: ProcessId,
    pub role: Role,
    pub rank: u32,
    pub instance: String,
    pub engine: String,
    pub engine_version: String,
    pub conn: Option<ConnId>,
    /// Process id from its last connection; 0 = hidden.
    pub pid: u32,
    /// Number of the last HELLO that was read.
    pub hello: u64,
    pub oldest_job_ms: u64,
    /// A scheduler's prefill speed from its last PROBE; 0 = unknown.
    pub prefill_tokens_per_s: u64,
    pub transfer: Mode,
    /// The session has requested a window: its ABORTs get replies from then on.
    pub had_window: bool,
}

#[derive(Debug, Default)]
pub(super) struct Peers {
    pub conns: BTreeMap<ConnId, Conn>,
    pub processes: BTreeMap<ProcessId, Process>,
    pub sessions: BTreeMap<u64, Session>,
    incarnations: BTreeMap<[u8; 16], ProcessId>,
    graves: BTreeSet<[u8; 16]>,
    grave_order: VecDeque<[u8; 16]>,
    last: u64,
}

impl Peers {
    /// Allocates a number that is unique in this boot.
    pub fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    pub fn is_dead(&self, incarnation: &[u8; 16]) -> bool {
        self.graves.contains(incarnation)
    }

    pub fn process_of(&self, incarnation: &[u8; 16]) -> Option<ProcessId> {
        self.incarnations.get(incarnation).copied()
    }

    pub fn add_process(&mut self, incarnation: [u8; 16]) -> ProcessId {
        let id = ProcessId(self.number());
        self.incarnations.insert(incarnation, id);
        self.processes.insert(
            id,
            Process {
                incarnation,
                lock: None,
                maps: None,
                sessions: Vec::new(),
                gpu: None,
                watches_shrinks: false,
            },
        );
        id
    }

    /// Forgets a process that is proven dead. No further frames of it are read.
    pub fn bury(&mut self, id: ProcessId) -> Option<Process> {
        let process = self.processes.remove(&id)?;
        self.incarnations.remove(&process.incarnation);
        self.graves.insert(process.incarnation);
        self.grave_order.push_back(process.incarnation);
        if self.grave_order.len() > GRAVES_MAX
            && let Some(old) = self.grave_order.pop_front()
        {
            self.graves.remove(&old);
        }
        Some(process)
    }

    pub fn process_of_session(&self, session: u64) -> Option<&Process> {
        self.processes.get(&self.sessions.get(&session)?.process)
    }

    /// The live process that named this lock in its HELLO.
    pub fn holder(&self, lock: u32) -> Option<ProcessId> {
        self.processes
            .iter()
            .find(|(_, p)| p.lock == Some(lock))
            .map(|(id, _)| *id)
    }
}

//! Proof of death: the locks of processes, and what ends with a process.

use super::core::Core;
use super::seam::{Host, HostError, Now, Output, ProcessId};
use crate::mistake::Mistake;
use crate::table::Table;
use kvcachepool_protocol::message::Role;
use std::collections::BTreeSet;

impl<H: Host> Core<H> {
    /// A process is proven dead: everything it had ends, and no further frames of it are read.
    pub(super) fn process_died(&mut self, now: Now, id: ProcessId, out: &mut Vec<Output>) {
        let attached = self.attached();
        let Some(process) = self.peers.bury(id) else {
            return;
        };
        for session in &process.sessions {
            if let Some(conn) = self.peers.sessions.get(session).and_then(|s| s.conn) {
                self.close(conn, "ProcessDied", out);
            }
            self.leave_instance(*session);
            self.polls.remove(session);
            if let Some(engine) = &mut self.engine {
                engine.cancel_waiting(*session);
                engine.keep_requests(*session, &[]);
            }
            self.peers.sessions.remove(session);
        }
        self.counters.event("ProcessDied");
        if let Some(lock) = process.lock {
            self.maps_nothing(lock);
            let quarantine_ms = self.quarantine_ms(process.gpu);
            if let Some(engine) = &mut self.engine {
                engine.memory.owner_died(now, lock, quarantine_ms);
            }
        }
        self.make_arena(now, out);
        if attached && !self.attached() {
            self.flush();
        }
    }

    /// Quarantine of a dead process's slots. An unknown use of a GPU counts as use.
    fn quarantine_ms(&self, gpu: Option<bool>) -> u64 {
        let gpu = match gpu {
            Some(gpu) => gpu,
            None => !H::Table::makes(Mistake::BootQuarantine),
        };
        if gpu && !H::Table::makes(Mistake::NoQuarantine) {
            self.config.quarantine_ms
        } else {
            0
        }
    }

    /// Queries F_GETLK for every relevant lock: those of processes that said HELLO, and of writers that an earlier boot served.
    pub(super) fn ask_for_locks(&mut self, now: Now, out: &mut Vec<Output>) {
        let owners = self
            .engine
            .as_ref()
            .map(|e| e.memory.grants.living_owners())
            .unwrap_or_default();
        let held = self.peers.processes.values().filter_map(|p| p.lock);
        let locks: BTreeSet<u32> = held.chain(owners).collect();
        for lock in locks {
            if self.lock_held(lock, out) == Some(false) {
                self.lock_gone(now, lock);
            }
        }
        if self.engine.is_none() {
            for lock in self.earlier_locks.clone().unwrap_or_default() {
                if self.lock_held(lock, out) == Some(false) {
                    self.maps_nothing(lock);
                }
            }
            self.make_arena(now, out);
        }
    }

    /// F_GETLK for one lock. None: the query failed, and the lock's holder must be assumed alive.
    pub(super) fn lock_held(&mut self, lock: u32, out: &mut Vec<Output>) -> Option<bool> {
        let answer = self.host.lock_held(lock);
        self.lock_answer(answer, out)
    }

    /// Counts a failed query of the lock file, and logs the first one in a row.
    pub(super) fn lock_answer<T>(
        &mut self,
        answer: Result<T, HostError>,
        out: &mut Vec<Output>,
    ) -> Option<T> {
        let failed = answer.is_err();
        let first = failed && !self.lock_file_failed;
        self.lock_file_failed = failed;
        match answer {
            Ok(value) => Some(value),
            Err(e) => {
                self.counters.event("LockFileFailed");
                if first {
                    out.push(Output::Log {
                        event: "LockFileFailed",
                        detail: e.to_string(),
                    });
                }
                None
            }
        }
    }

    /// The clients of a process are closed.
    fn end_leases_of_client(&mut self, session: u64) {
        let role = self.peers.sessions.get(&session).map(|s| s.role);
        if let Some(engine) = self.engine.as_mut().filter(|_| role == Some(Role::Opaque)) {
            engine.cancel_waiting(session);
            engine.keep_requests(session, &[]);
        }
    }

    /// A lock has no holder any more: its process is dead or went off. A live process is not trusted to have ended its transfers, and is
    /// served again only after it took a new lock and registered.
    fn lock_gone(&mut self, now: Now, lock: u32) {
        self.counters.event("LockGone");
        let attached = self.attached();
        if let Some(holder) = self.peers.holder(lock)
            && let Some(process) = self.peers.processes.get_mut(&holder)
        {
            process.lock = None;
            for session in process.sessions.clone() {
                self.leave_instance(session);
                self.end_leases_of_client(session);
            }
        }
        let quarantine_ms = self.quarantine_ms(None);
        if let Some(engine) = &mut self.engine {
            engine.memory.owner_died(now, lock, quarantine_ms);
        }
        if attached && !self.attached() {
            self.flush();
        }
    }
}

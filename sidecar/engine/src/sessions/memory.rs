//! Whose memory is whose: making an arena, taking one back, and what a process that says HELLO is told about it.

use super::core::{Core, Refusal};
use super::seam::{FdFacts, FdId, FdType, Host, Now, Output, ProcessId};
use crate::Engine;
use crate::mistake::{Mistake, made};
use crate::table::{Geometry, Table};
use kvcachepool_protocol::message::{ErrorCode, Hello, Memory};
use std::collections::BTreeSet;

/// Making an arena failed: tried again after this.
const ARENA_RETRY_MS: u64 = 60_000;

/// What HELLO's answer says about memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Verdict {
    pub memory: Memory,
    pub reason: String,
}

impl Verdict {
    fn plain(memory: Memory) -> Self {
        Self {
            memory,
            reason: String::new(),
        }
    }

    fn unmap(reason: impl Into<String>) -> Self {
        Self {
            memory: Memory::Unmap,
            reason: reason.into(),
        }
    }
}

impl<H: Host> Core<H> {
    /// Region of the live arena.
    pub(super) fn region(&self) -> Option<u64> {
        self.engine.as_ref().map(|e| e.geometry().region)
    }

    /// Makes a new arena, unless there is one or a process of an earlier boot may still map another: the pages of both would be
    /// charged to this pod together.
    pub(super) fn make_arena(&mut self, now: Now, out: &mut Vec<Output>) {
        if self.engine.is_some() || now.mono_ms < self.retry_arena_ms {
            return;
        }
        self.ask_earlier_locks(out);
        let Some(earlier) = &self.earlier_locks else {
            self.no_arena = (
                "LockFileFailed",
                "the lock file cannot be asked which processes still map the memory of an earlier boot; the folder of the socket must be readable and writable".into(),
            );
            return;
        };
        if !earlier.is_empty() && !made(Mistake::Populate) {
            let count = earlier.len();
            self.no_arena = (
                "ArenaHeldByEarlierBoot",
                format!(
                    "{count} processes still map the memory of an earlier boot; waiting until they hand it back, unmap it or end"
                ),
            );
            return;
        }
        let made = self.host.next_region().and_then(|region| {
            let geometry = Geometry::new(
                region,
                self.config.arena_bytes,
                self.config.limits.index_entries_max,
            );
            self.host.create(geometry)
        });
        match made {
            Ok(table) => {
                out.push(Output::Log {
                    event: "ArenaMade",
                    detail: format!("region {}", table.geometry().region),
                });
                let engine = Engine::new(now, table, self.config.clone(), self.cold);
                self.take_engine(now, engine);
            }
            Err(e) => {
                out.push(Output::Log {
                    event: "ArenaFailed",
                    detail: e.to_string(),
                });
                self.no_arena = ("ArenaFailed", e.to_string());
                self.retry_arena_ms = now.mono_ms + ARENA_RETRY_MS;
            }
        }
    }

    /// Asks once who may still map the memory of an earlier boot; again where the lock file did not say.
    fn ask_earlier_locks(&mut self, out: &mut Vec<Output>) {
        if self.earlier_locks.is_none() {
            let held = self.host.locks_held();
            let held = self.lock_answer(held, out);
            self.earlier_locks = held.map(|held| held.into_iter().collect());
        }
    }

    /// The holder of this lock is dead, or maps no memory of an earlier boot: a new arena need not wait for it any more.
    pub(super) fn maps_nothing(&mut self, lock: u32) {
        if let Some(earlier) = &mut self.earlier_locks {
            earlier.remove(&lock);
        }
    }

    /// Confirms the lock that a HELLO names.
    pub(super) fn confirm_lock(
        &mut self,
        process: ProcessId,
        lock: u32,
        out: &mut Vec<Output>,
    ) -> Result<(), Refusal> {
        let holder = self.peers.holder(lock);
        let of_another = holder.is_some_and(|h| h != process);
        let held = if lock == 0 || of_another {
            Some(false)
        } else {
            self.lock_held(lock, out)
        };
        let Some(held) = held else {
            // not "take a new lock": the process may hold this one, and what it was granted hangs on it
            return Err(Refusal::later(
                ErrorCode::NoArena,
                "the lock file cannot be asked now",
            ));
        };
        if !held {
            return Err(Refusal::new(
                ErrorCode::LockNotHeld,
                format!(
                    "byte {lock} of the lock file is not locked by this process; take a new lock"
                ),
            ));
        }
        if let Some(p) = self.peers.processes.get_mut(&process) {
            p.lock = Some(lock);
        }
        Ok(())
    }

    /// What becomes of the memory of a process that holds its lock.
    pub(super) fn judge_memory(
        &mut self,
        now: Now,
        process: ProcessId,
        hello: &Hello,
        fds: &[FdFacts],
        out: &mut Vec<Output>,
    ) -> Result<Verdict, Refusal> {
        let verdict = match (hello.region, self.region()) {
            (None, Some(_)) => Verdict::plain(Memory::Sent),
            (None, None) => {
                // Asked later, the list would name this process anew.
                self.ask_earlier_locks(out);
                if let Some(lock) = hello.lock {
                    self.maps_nothing(lock);
                }
                self.make_arena(now, out);
                match self.region() {
                    Some(_) => Verdict::plain(Memory::Sent),
                    None => Verdict {
                        memory: Memory::None,
                        reason: self.no_arena.0.to_owned(),
                    },
                }
            }
            (Some(theirs), Some(ours)) => {
                let same_files = passed(hello, fds)
                    .iter()
                    .all(|(_, f)| !matches!(f, FdType::Memfd { live: false, .. }));
                if (theirs == ours && same_files) || made(Mistake::Regions) {
                    Verdict::plain(Memory::Held)
                } else {
                    Verdict::unmap("OtherRegion")
                }
            }
            (Some(theirs), None) => self.take_back(now, hello, fds, theirs, out)?,
        };
        let maps = match verdict.memory {
            Memory::Sent => self.region(),
            _ => hello.region,
        };
        if let Some(p) = self.peers.processes.get_mut(&process) {
            p.maps = maps;
        }
        Ok(verdict)
    }

    /// A connector hands back the memory of an earlier boot.
    fn take_back(
        &mut self,
        now: Now,
        hello: &Hello,
        fds: &[FdFacts],
        theirs: u64,
        out: &mut Vec<Output>,
    ) -> Result<Verdict, Refusal> {
        let passed = passed(hello, fds);
        let find = |name: &str| passed.iter().find(|(n, _)| *n == name).map(|(_, f)| *f);
        let (Some(arena), Some(table)) = (find("arena"), find("table")) else {
            return Err(Refusal::new(
                ErrorCode::BadDescriptor,
                "a process that maps a region passes its arena and table with HELLO",
            ));
        };
        let sealed = |f| matches!(f, FdType::Memfd { sealed: true, .. });
        if !sealed(arena) || !sealed(table) {
            return Ok(Verdict::unmap("Unsealed"));
        }
        let (Some(arena), Some(table)) = (fd_id(hello, fds, "arena"), fd_id(hello, fds, "table"))
        else {
            return Ok(Verdict::unmap("Unsealed"));
        };
        match self.host.adopt(arena, table) {
            Ok(table) if table.geometry().region == theirs || made(Mistake::Regions) => {
                out.push(Output::Log {
                    event: "ArenaAdopted",
                    detail: format!("region {theirs}"),
                });
                let engine = Engine::new(now, table, self.config.clone(), self.cold);
                self.take_engine(now, engine);
                self.host.keep();
                self.earlier_locks = Some(BTreeSet::new());
                self.counters.event("ArenaAdopted");
                if made(Mistake::OneBack)
                    && let Some(engine) = &mut self.engine
                {
                    for owner in engine.living_owners() {
                        if Some(owner) != hello.lock {
                            engine.reconcile(owner, &[]);
                        }
                    }
                }
                Ok(Verdict::plain(Memory::Held))
            }
            Ok(_) => Ok(Verdict::unmap("OtherRegion")),
            Err(e) => {
                out.push(Output::Log {
                    event: "ArenaUnusable",
                    detail: e.to_string(),
                });
                self.counters.event("ArenaUnusable");
                Ok(Verdict::unmap("Unusable"))
            }
        }
    }
}

/// Descriptors of a HELLO with their names.
pub(super) fn passed<'a>(hello: &'a Hello, fds: &[FdFacts]) -> Vec<(&'a str, FdType)> {
    hello
        .fds
        .iter()
        .map(String::as_str)
        .zip(fds.iter().map(|f| f.kind))
        .collect()
}

fn fd_id(hello: &Hello, fds: &[FdFacts], name: &str) -> Option<FdId> {
    let at = hello.fds.iter().position(|n| n == name)?;
    fds.get(at).map(|f| f.id)
}

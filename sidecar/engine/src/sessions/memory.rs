//! Arena ownership: creating an arena, adopting one, and the memory part of HELLO's reply.

use super::core::Core;
use super::peers::Process;
use super::seam::{FdFacts, FdType, Host, Now, Output, ProcessId};
use crate::Engine;
use crate::memory::Resize;
use crate::mistake::Mistake;
use crate::table::{Geometry, Table};
use kvcachepool_protocol::message::{ErrorBody, ErrorCode, Hello, Memory};
use std::collections::BTreeSet;

/// Retry interval after a failed creation of an arena. Milliseconds.
const ARENA_RETRY_MS: u64 = 60_000;

/// Interval between attempts to change the size of the arena. Milliseconds.
const RESIZE_RETRY_MS: u64 = 1_000;

/// The memory part of HELLO's reply.
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
    pub(super) fn region(&self) -> Option<u64> {
        self.engine.as_ref().map(|e| e.geometry().region)
    }

    /// Creates an arena, unless one exists or a process of an earlier boot may still map another: this pod would be charged for the pages
    /// of both.
    pub(super) fn make_arena(&mut self, now: Now, out: &mut Vec<Output>) {
        if self.engine.is_some() || now.mono_ms < self.retry_arena_ms {
            return;
        }
        self.ask_earlier_locks(out);
        let Some(earlier) = &self.earlier_locks else {
            self.no_arena = (
                "LockFileFailed",
                "cannot query the lock file for processes that still map the memory of an earlier boot; make the socket's folder readable and writable".into(),
            );
            return;
        };
        if !earlier.is_empty() && !H::Table::makes(Mistake::Populate) {
            let count = earlier.len();
            self.no_arena = (
                "ArenaHeldByEarlierBoot",
                format!(
                    "{count} processes still map the memory of an earlier boot; waiting for them to hand it back, unmap it or exit"
                ),
            );
            return;
        }
        let bytes = self.config.arena_bytes;
        let made = self.host.next_region().and_then(|region| {
            let geometry = Geometry::reserving(
                region,
                bytes,
                self.host.most_bytes(),
                self.config.limits.index_entries_max,
            );
            self.host.create(geometry, geometry.rows_of(bytes))
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

    /// True if the arena can get this size while it is in use.
    pub(super) fn may_resize(&self, bytes: u64) -> bool {
        let Some(engine) = &self.engine else {
            return true;
        };
        let geometry = engine.geometry();
        let fits = bytes < geometry.arena_bytes + geometry.segment_bytes;
        fits && !self.windows_used && self.host.can_resize()
    }

    /// Brings the arena closer to the size in the config.
    pub(super) fn resize(&mut self, now: Now, out: &mut Vec<Output>) {
        if now.mono_ms < self.next_resize_ms {
            return;
        }
        self.next_resize_ms = now.mono_ms + RESIZE_RETRY_MS;
        let wanted = match &self.engine {
            Some(engine) => engine.memory.resize(),
            None => Resize::Done,
        };
        let held_back = match wanted {
            Resize::Done => self.falls_short(),
            _ if !self.host.can_resize() => {
                Some("an arena of huge pages keeps its size: restart the pod".to_owned())
            }
            _ if self.windows_used => {
                Some("the sidecar has copied through windows: restart it".to_owned())
            }
            _ if self.host.is_populating() => Some("pages are still being populated".to_owned()),
            Resize::Shrink => self.unwatching(out),
            Resize::Grow(_) => None,
        };
        let Some(engine) = &mut self.engine else {
            return;
        };
        if held_back.is_some() || wanted == Resize::Done {
            engine.memory.stay();
            self.resize_waits = held_back.unwrap_or_default();
            return;
        }
        match wanted {
            Resize::Grow(rows) => {
                engine.memory.stay();
                match self.host.grow(rows.clone()) {
                    Ok(()) => engine.memory.slots.grow(rows.end),
                    Err(e) => {
                        self.resize_waits = e.to_string();
                        return;
                    }
                }
            }
            _ => {
                let Some(rows) = engine.memory.cut() else {
                    self.resize_waits =
                        "slots at the arena's end are pinned, leased or being written".to_owned();
                    return;
                };
                if let Err(e) = self.host.release(rows) {
                    out.push(Output::Log {
                        event: "ReleaseFailed",
                        detail: e.to_string(),
                    });
                }
            }
        }
        if engine.memory.resize() == Resize::Done {
            self.resize_waits.clear();
            out.push(Output::Log {
                event: "ArenaResized",
                detail: format!("{} bytes", engine.capacity_bytes()),
            });
        } else {
            self.resize_waits = "memory is being given back".to_owned();
            self.next_resize_ms = now.mono_ms;
        }
    }

    /// Why the arena has another size than the config asks for, although nothing is left to do.
    fn falls_short(&self) -> Option<String> {
        let engine = self.engine.as_ref()?;
        let (geometry, wanted) = (engine.geometry(), self.config.arena_bytes);
        let (most, segment) = (geometry.arena_bytes, geometry.segment_bytes);
        if wanted >= most + segment {
            return Some(format!(
                "the memory that vLLM maps can have {most} bytes at most: restart the pod"
            ));
        }
        (wanted < segment).then(|| {
            format!("the memory that vLLM maps has segments of {segment} bytes: restart the pod")
        })
    }

    /// Why the arena cannot shrink now: a process may keep page locks of pages that are given back, and copy into them later.
    fn unwatching(&mut self, out: &mut Vec<Output>) -> Option<String> {
        let held = self.host.locks_held();
        let Some(held) = self.lock_answer(held, out) else {
            return Some("the lock file cannot be queried".to_owned());
        };
        let watches = |lock: &u32| {
            let of = |p: &Process| p.lock == Some(*lock) && p.watches_shrinks;
            self.peers.processes.values().any(of)
        };
        let others = held.iter().filter(|lock| !watches(lock)).count();
        (others > 0).then(|| {
            format!("{others} processes with an older connector, or not connected now, use the memory: restart them")
        })
    }

    /// Queries once which locks may belong to memory of an earlier boot. Retries after a failure.
    fn ask_earlier_locks(&mut self, out: &mut Vec<Output>) {
        if self.earlier_locks.is_none() {
            let held = self.host.locks_held();
            let held = self.lock_answer(held, out);
            self.earlier_locks = held.map(|held| held.into_iter().collect());
        }
    }

    /// The holder of this lock is dead or maps no memory of an earlier boot: a new arena does not wait for it.
    pub(super) fn maps_nothing(&mut self, lock: u32) {
        if let Some(earlier) = &mut self.earlier_locks {
            earlier.remove(&lock);
        }
    }

    /// Verifies the lock named by a HELLO.
    pub(super) fn confirm_lock(
        &mut self,
        process: ProcessId,
        lock: u32,
        out: &mut Vec<Output>,
    ) -> Result<(), ErrorBody> {
        let holder = self.peers.holder(lock);
        let of_another = holder.is_some_and(|h| h != process);
        let held = if lock == 0 || of_another {
            Some(false)
        } else {
            self.lock_held(lock, out)
        };
        let Some(held) = held else {
            // not "take a new lock": the process may hold this one, and its grants depend on it
            return Err(ErrorBody::later(
                ErrorCode::NoArena,
                "cannot query the lock file now; retry",
            ));
        };
        if !held {
            return Err(ErrorBody::new(
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

    /// Decides about the memory of a process that holds its lock.
    pub(super) fn judge_memory(
        &mut self,
        now: Now,
        process: ProcessId,
        hello: &Hello,
        fds: &[FdFacts],
        out: &mut Vec<Output>,
    ) -> Result<Verdict, ErrorBody> {
        let verdict = match (hello.region, self.region()) {
            (None, Some(_)) => Verdict::plain(Memory::Sent),
            (None, None) => {
                // A later query would list this process as well.
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
                let same_files = fds
                    .iter()
                    .all(|f| !matches!(f.kind, FdType::Memfd { live: false, .. }));
                if (theirs == ours && same_files) || H::Table::makes(Mistake::Regions) {
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

    /// Adopts memory of an earlier boot that a connector hands back.
    fn take_back(
        &mut self,
        now: Now,
        hello: &Hello,
        fds: &[FdFacts],
        theirs: u64,
        out: &mut Vec<Output>,
    ) -> Result<Verdict, ErrorBody> {
        let (Some(arena), Some(table)) = (fd(hello, fds, "arena"), fd(hello, fds, "table")) else {
            return Err(ErrorBody::new(
                ErrorCode::BadDescriptor,
                "HELLO names a mapped region, but carries no arena and table descriptors",
            ));
        };
        let sealed = |f: FdFacts| matches!(f.kind, FdType::Memfd { sealed: true, .. });
        if !sealed(arena) || !sealed(table) {
            return Ok(Verdict::unmap("Unsealed"));
        }
        match self.host.adopt(arena.id, table.id) {
            Ok(table) if table.geometry().region == theirs || H::Table::makes(Mistake::Regions) => {
                out.push(Output::Log {
                    event: "ArenaAdopted",
                    detail: format!("region {theirs}"),
                });
                let engine = Engine::new(now, table, self.config.clone(), self.cold);
                self.take_engine(now, engine);
                self.host.keep();
                self.earlier_locks = Some(BTreeSet::new());
                self.counters.event("ArenaAdopted");
                if H::Table::makes(Mistake::OneBack)
                    && let Some(engine) = &mut self.engine
                {
                    for owner in engine.memory.grants.living_owners() {
                        if Some(owner) != hello.lock {
                            for opaque in [false, true] {
                                engine.memory.reconcile(owner, &[], opaque);
                            }
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

/// The descriptor of a HELLO with this name.
pub(super) fn fd(hello: &Hello, fds: &[FdFacts], name: &str) -> Option<FdFacts> {
    let at = hello.fds.iter().position(|n| n == name)?;
    fds.get(at).copied()
}

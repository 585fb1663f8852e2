//! Short system calls whose results the core needs at once: lock file, new memory, returned memory.

use super::boot::Link;
use super::daemon::Daemon;
use super::descriptors::Descriptors;
use super::shell::Posted;
use kvcachepool_engine::sessions::{FdId, Host, HostError};
use kvcachepool_engine::table::{Geometry, Table};
use kvcachepool_memory::arena::{Arena, ArenaError, MappedTable};
use kvcachepool_memory::limit::{self, ExceedsLimit};
use kvcachepool_memory::lockfile::LockFile;
use kvcachepool_memory::memfd::Pages;
use kvcachepool_memory::populate::{self, Population, Progress};
use kvcachepool_protocol::config::{HugePages, Memory};
use kvcachepool_protocol::table::ROW_BYTES;
use parking_lot::Mutex;
use rustix::fd::AsFd;
use std::ops::Range;
use std::sync::Arc;
use tokio::sync::mpsc::UnboundedSender;

/// The live memory, shared with the code that sends its descriptors and reads its bytes.
#[derive(Debug, Default)]
pub struct Live {
    arena: Mutex<Option<Arena>>,
}

impl Live {
    pub fn get(&self) -> Option<Arena> {
        self.arena.lock().clone()
    }
}

/// The core's access to the operating system.
pub struct Machine {
    pub lock: Arc<LockFile>,
    pub descriptors: Arc<Descriptors>,
    /// Where the live memory is published.
    pub live: Arc<Live>,
    pub link: Arc<Link>,
    /// Where reasons are reported.
    pub daemon: Arc<Daemon>,
    /// Configuration of the memory tier.
    pub memory: Memory,
    /// Bytes needed beside the arena, independent of its size.
    pub extras_bytes: u64,
    /// Where the population thread reports.
    pub post: UnboundedSender<Posted>,
    /// Memory that a connector returned, mapped until the core keeps it; otherwise dropped after the frame.
    pub handed_back: Option<Arena>,
    /// Accept memory of earlier boots from a connector that returns it.
    pub takes_back: bool,
    /// The last population that was started.
    pub population: Population,
}

impl Machine {
    /// Makes an arena the live one and returns its table, which the core reads next.
    pub fn install(&mut self, arena: Arena) -> MappedTable {
        if let Err(e) = self.may_use(&arena, arena.capacity_bytes()) {
            tracing::warn!(error = %e, "the memory of the last engine process says that it is larger than allowed");
            if let Err(error) = arena.distrust_capacity() {
                tracing::warn!(%error, "cannot read the size of the arena's file");
            }
        }
        let table = self.table_to_read(&arena);
        self.hold(arena);
        table
    }

    /// The supervisor is notified first: reading a large table takes longer than the heartbeat may be silent.
    fn table_to_read(&self, arena: &Arena) -> MappedTable {
        self.link.reads(arena);
        arena.table()
    }

    /// The supervisor gets it first, so that the arena outlives this process from the first slot on.
    fn hold(&mut self, arena: Arena) {
        self.link.keep(&arena);
        let inodes = [&arena.arena_fd, &arena.table_fd].map(|fd| {
            rustix::fs::fstat(fd.as_fd()).map_or((0, 0), |stat| (stat.st_dev, stat.st_ino))
        });
        self.descriptors.set_live(Some(inodes));
        // An earlier boot may have ended between the two steps of a shrink.
        let end = arena.capacity_bytes();
        if arena.has_pages_from(end) {
            let mut table = arena.table();
            table.count_shrink(table.capacity_rows());
            if let Err(error) = arena.release_from(end) {
                tracing::warn!(%error, "cannot free the pages behind the arena's end");
            }
        }
        self.populate(&arena, 0..end);
        *self.live.arena.lock() = Some(arena);
    }

    /// Starts from the beginning even if an earlier boot did it: connectors can write the table's record of it, and existing pages only
    /// get mapped, which digests need anyway.
    fn populate(&mut self, arena: &Arena, bytes: Range<u64>) {
        let post = self.post.clone();
        self.population = populate::start(
            arena.bytes.clone(),
            bytes,
            self.memory.populate_threads as usize,
            move |progress| {
                let posted = match progress {
                    Progress::UpTo(bytes) => Posted::Populated {
                        rows: u32::try_from(bytes / ROW_BYTES).unwrap_or(u32::MAX),
                    },
                    Progress::Failed(at, e) => Posted::PopulationFailed {
                        at_bytes: at,
                        reason: e.to_string(),
                    },
                };
                // A closed channel means that the process ends.
                let _ = post.send(posted);
            },
        );
    }

    fn make(&self, geometry: Geometry, rows: u32, pages: Pages) -> Result<Arena, NoArena> {
        let used = geometry.of_size(u64::from(rows) * ROW_BYTES);
        limit::check(&used, pages, self.extras_bytes)?;
        Ok(Arena::create(geometry, rows, pages)?)
    }

    /// Whether this container may use so many bytes of an arena that exists.
    fn may_use(&self, arena: &Arena, bytes: u64) -> Result<(), ExceedsLimit> {
        let pages = Pages::of(&arena.arena_fd);
        limit::check(&arena.geometry.of_size(bytes), pages, self.extras_bytes)
    }

    fn live(&self) -> Result<Arena, HostError> {
        let none = || HostError("there is no arena".to_owned());
        self.live.get().ok_or_else(none)
    }

    fn pages(&self) -> Pages {
        match self.memory.huge_pages {
            HugePages::None => Pages::Base,
            HugePages::Size2Mi => Pages::Huge2Mi,
            HugePages::Size1Gi => Pages::Huge1Gi,
        }
    }
}

/// Why an arena with this page size cannot be created.
#[derive(Debug, thiserror::Error)]
enum NoArena {
    #[error("ArenaExceedsMemoryLimit: {0}")]
    TooLarge(#[from] ExceedsLimit),
    #[error(transparent)]
    Kernel(#[from] ArenaError),
}

fn host_error(e: impl std::fmt::Display) -> HostError {
    HostError(e.to_string())
}

impl Host for Machine {
    type Table = MappedTable;

    fn next_lock(&mut self) -> Result<u32, HostError> {
        self.lock.draw_lock().map_err(host_error)
    }

    fn next_region(&mut self) -> Result<u64, HostError> {
        self.lock.draw_region().map_err(host_error)
    }

    fn lock_held(&mut self, number: u32) -> Result<bool, HostError> {
        self.lock.is_held(number).map_err(host_error)
    }

    fn locks_held(&mut self) -> Result<Vec<u32>, HostError> {
        self.lock.held().map_err(host_error)
    }

    /// Mapping a file of huge pages reserves all of them, so such an arena has no room to grow.
    fn most_bytes(&mut self) -> u64 {
        match self.pages() {
            Pages::Base => limit::machine_bytes(),
            Pages::Huge2Mi | Pages::Huge1Gi => 0,
        }
    }

    fn create(&mut self, geometry: Geometry, rows: u32) -> Result<MappedTable, HostError> {
        let wanted = self.pages();
        let mut made = self.make(geometry, rows, wanted);
        if let Err(e) = &made
            && wanted != Pages::Base
        {
            self.daemon
                .degrade("HugePagesUnavailable", format!("using normal pages: {e}"));
            made = self.make(geometry, rows, Pages::Base);
        }
        let arena = made.map_err(|e| {
            if let NoArena::TooLarge(e) = &e {
                self.daemon
                    .degrade("ArenaExceedsMemoryLimit", e.to_string());
            }
            host_error(e)
        })?;
        self.daemon.recovered("ArenaExceedsMemoryLimit");
        tracing::info!(
            region = geometry.region,
            bytes = arena.capacity_bytes(),
            most_bytes = geometry.arena_bytes,
            "arena created"
        );
        Ok(self.install(arena))
    }

    fn grow(&mut self, rows: Range<u32>) -> Result<(), HostError> {
        let arena = self.live()?;
        let [from, end] = [rows.start, rows.end].map(|row| u64::from(row) * ROW_BYTES);
        self.may_use(&arena, end).map_err(host_error)?;
        self.populate(&arena, from..end);
        Ok(())
    }

    fn release(&mut self, rows: Range<u32>) -> Result<(), HostError> {
        let arena = self.live()?;
        let end = u64::from(rows.start) * ROW_BYTES;
        arena.release_from(end).map_err(host_error)
    }

    fn is_populating(&self) -> bool {
        self.population.is_running()
    }

    /// A hole in huge pages can end the process that touches it.
    fn can_resize(&self) -> bool {
        let arena = self.live.get();
        arena.is_none_or(|arena| Pages::of(&arena.arena_fd) == Pages::Base)
    }

    fn adopt(&mut self, arena: FdId, table: FdId) -> Result<MappedTable, HostError> {
        if !self.takes_back {
            return Err(HostError(
                "memory of an earlier boot is refused: too many boots in a row failed with it"
                    .into(),
            ));
        }
        let fds = (self.descriptors.take(arena), self.descriptors.take(table));
        let (Some(arena), Some(table)) = fds else {
            return Err(HostError(
                "HELLO names descriptors of arena and slot table that were not passed".into(),
            ));
        };
        let arena = Arena::adopt(arena, table).map_err(host_error)?;
        // The length is the peer's claim, and the remaining pages are populated here.
        self.may_use(&arena, arena.capacity_bytes())
            .map_err(|e| host_error(NoArena::from(e)))?;
        let table = self.table_to_read(&arena);
        self.handed_back = Some(arena);
        Ok(table)
    }

    fn keep(&mut self) {
        if let Some(arena) = self.handed_back.take() {
            tracing::info!(
                region = arena.geometry.region,
                bytes = arena.capacity_bytes(),
                "adopted the memory that a connector returned"
            );
            self.hold(arena);
        }
    }

    fn drop_adopted(&mut self) {
        self.handed_back = None;
    }
}

//! The quick system calls that the core needs answered at once: lock file, new memory, memory that came back.

use super::boot::Link;
use super::daemon::Daemon;
use super::descriptors::Descriptors;
use super::shell::Posted;
use kvcachepool_engine::sessions::{FdId, Host, HostError};
use kvcachepool_engine::table::Geometry;
use kvcachepool_memory::arena::{Arena, ArenaError, MappedTable};
use kvcachepool_memory::limit::{self, ExceedsLimit};
use kvcachepool_memory::lockfile::LockFile;
use kvcachepool_memory::memfd::Pages;
use kvcachepool_memory::populate::{self, Progress};
use kvcachepool_protocol::config::{HugePages, Memory};
use kvcachepool_protocol::table::ROW_BYTES;
use parking_lot::Mutex;
use rustix::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::mpsc::UnboundedSender;

/// The live memory, shared with those who send its descriptors and read its bytes.
#[derive(Debug, Default)]
pub struct Live {
    arena: Mutex<Option<Arena>>,
}

impl Live {
    /// The arena of the moment.
    pub fn get(&self) -> Option<Arena> {
        self.arena.lock().clone()
    }
}

/// The core's hands.
pub struct Machine {
    /// Lock file of the socket's folder.
    pub lock: Arc<LockFile>,
    /// Descriptors that came in.
    pub descriptors: Arc<Descriptors>,
    /// Where the live memory is shown.
    pub live: Arc<Live>,
    /// To the supervisor.
    pub link: Arc<Link>,
    /// Where reasons are reported.
    pub daemon: Arc<Daemon>,
    /// How the memory tier is configured.
    pub memory: Memory,
    /// Bytes that are needed beside it and do not grow with it.
    pub extras_bytes: u64,
    /// Where population reports.
    pub post: UnboundedSender<Posted>,
    /// Memory that came back and is mapped, until the core keeps it; what it did not keep is let go behind the frame.
    pub handed_back: Option<Arena>,
    /// Memory of earlier boots is trusted: it is taken from a connector that hands it back.
    pub takes_back: bool,
    /// Ends the population under way.
    pub stop_population: Arc<AtomicBool>,
}

impl Machine {
    /// Puts an arena in place and returns its table, which the core reads next.
    pub fn install(&mut self, arena: Arena) -> MappedTable {
        let table = self.table_to_read(&arena);
        self.hold(arena);
        table
    }

    /// The supervisor is told beforehand: a large table takes longer to read than any silence may last.
    fn table_to_read(&self, arena: &Arena) -> MappedTable {
        self.link.reads(arena);
        arena.table()
    }

    /// Supervisor first, so that the arena outlives this process from the first slot on.
    fn hold(&mut self, arena: Arena) {
        self.link.keep(&arena);
        let inodes = [&arena.arena_fd, &arena.table_fd].map(|fd| {
            rustix::fs::fstat(fd.as_fd()).map_or((0, 0), |stat| (stat.st_dev, stat.st_ino))
        });
        self.descriptors.set_live(Some(inodes));
        self.populate(&arena);
        *self.live.arena.lock() = Some(arena);
    }

    /// From the beginning also where an earlier boot did it: what the table says of it every connector can write, and pages that are
    /// there only get mapped, as the digests of them would have it anyway.
    fn populate(&mut self, arena: &Arena) {
        self.stop_population.store(true, Ordering::Relaxed);
        self.stop_population = Arc::new(AtomicBool::new(false));
        let (post, region) = (self.post.clone(), arena.geometry.region);
        populate::start(
            arena.bytes.clone(),
            arena.geometry.arena_bytes,
            self.memory.populate_threads as usize,
            self.stop_population.clone(),
            move |progress| {
                let posted = match progress {
                    Progress::UpTo(bytes) => Posted::Populated {
                        region,
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

    fn make(&self, geometry: Geometry, pages: Pages) -> Result<Arena, NoArena> {
        limit::check(&geometry, pages, self.extras_bytes)?;
        Ok(Arena::create(geometry, pages)?)
    }

    fn pages(&self) -> Pages {
        match self.memory.huge_pages {
            HugePages::None => Pages::Base,
            HugePages::Size2Mi => Pages::Huge2Mi,
            HugePages::Size1Gi => Pages::Huge1Gi,
        }
    }
}

/// Why no arena of some pages can be had.
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

    fn create(&mut self, geometry: Geometry) -> Result<MappedTable, HostError> {
        let wanted = self.pages();
        let mut made = self.make(geometry, wanted);
        if let Err(e) = &made
            && wanted != Pages::Base
        {
            self.daemon
                .degrade("HugePagesUnavailable", format!("base pages are used: {e}"));
            made = self.make(geometry, Pages::Base);
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
            bytes = geometry.arena_bytes,
            rows = geometry.rows,
            "arena created"
        );
        Ok(self.install(arena))
    }

    fn adopt(&mut self, arena: FdId, table: FdId) -> Result<MappedTable, HostError> {
        if !self.takes_back {
            return Err(HostError(
                "too many boots without health began in memory of earlier ones".into(),
            ));
        }
        let fds = (self.descriptors.take(arena), self.descriptors.take(table));
        let (Some(arena), Some(table)) = fds else {
            return Err(HostError("a named descriptor did not come along".into()));
        };
        let arena = Arena::adopt(arena, table).map_err(host_error)?;
        // Its length is a peer's word, and the rest of it is populated here.
        let pages = Pages::of(&arena.arena_fd);
        limit::check(&arena.geometry, pages, self.extras_bytes)
            .map_err(|e| host_error(NoArena::from(e)))?;
        let table = self.table_to_read(&arena);
        self.handed_back = Some(arena);
        Ok(table)
    }

    fn keep(&mut self) {
        if let Some(arena) = self.handed_back.take() {
            tracing::info!(
                region = arena.geometry.region,
                bytes = arena.geometry.arena_bytes,
                "arena handed back by a connector"
            );
            self.hold(arena);
        }
    }
}

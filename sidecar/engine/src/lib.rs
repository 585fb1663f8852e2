//! The cache engine: index, allocator, slot states, leases and eviction.
//! Pure decision code: no clocks, sockets, threads or wire format. Time is an argument, and side effects are returned as [`Action`]s.
//! `sessions/` checks permissions and decides when a process counts as dead.

mod admin;
mod allocator;
mod audit;
mod boot;
mod check;
pub mod config;
mod entry;
mod evict;
mod fetch;
mod give_back;
mod grant;
mod index;
pub mod lower;
pub mod memory_table;
mod mirror;
pub mod mistake;
mod pace;
mod policy;
mod probe;
mod ring;
pub mod sessions;
pub mod table;
pub mod tier;
mod window;

#[cfg(test)]
mod tests;

pub use admin::{Found, PinError, Usage};
pub use fetch::FetchId;
pub use grant::{GrantContext, Wish};
pub use lower::{
    Domains, Estimate, Landed, LoadStats, Order, Reach, Report, Target, TierStats, TierView,
    Unwritten,
};
pub use pace::PaceStats;
pub use probe::{Answer, Question};
pub use ring::{EventDomain, Ring};

use allocator::Allocator;
use check::Check;
use config::Config;
use entry::{Class, Entry, Handle};
use grant::{Grant, Owner};
use index::{FastMap, Name};
use kvcachepool_protocol::key::LayoutId;
use lower::Lower;
use mirror::Mirror;
use pace::Pace;
use policy::Policy;
use probe::Leases;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use table::{Geometry, Table};
use window::Copied;

/// The current time. The shell reads it once before each call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Time {
    /// Monotonic milliseconds since an arbitrary start within this boot.
    pub mono_ms: u64,
    /// Unix time in seconds, for expiry and for display.
    pub unix_s: u64,
}

/// A side effect that the engine requests from the shell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Compute the digest of a slot and return it through [`Engine::digest_done`].
    Digest {
        slot: u32,
        generation: u32,
        /// Number of the check, returned with the digest. 0 marks the digest that publishes a slot.
        check: u64,
        length: u64,
        urgent: bool,
    },
    /// The answer to a waiting PROBE is ready: call [`Engine::final_answer`].
    ProbeDone { probe: u64 },
}

/// Counters since the engine's start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    pub granted_chunks: u64,
    /// Grants voided before completion.
    pub voided_grants: u64,
    /// Chunks that became readable.
    pub stored_chunks: u64,
    /// Readable chunks adopted from an earlier boot.
    pub adopted_chunks: u64,
    /// Readable chunks evicted to make room.
    pub evicted_chunks: u64,
    pub evicted_bytes: u64,
    /// Incomplete chunks evicted to make room.
    pub evicted_incomplete: u64,
    /// Chunks removed because they expired.
    pub expired_chunks: u64,
    /// Digests that did not match.
    pub corrupt_chunks: u64,
    /// Digest checks started.
    pub checks: u64,
    /// GRANTs refused because nothing could be evicted.
    pub no_room_refusals: u64,
    /// GRANTs refused because of the limit on granted bytes.
    pub granted_bytes_refusals: u64,
    /// COMMITs ignored because the named section was not GRANTED to the sender.
    pub commits_ignored: u64,
    /// Soft pins that timed out.
    pub soft_pins_expired: u64,
    pub soft_pins_displaced: u64,
}

/// Index, slots, leases and order of eviction over one arena.
#[derive(Debug)]
pub struct Engine<T> {
    table: Mirror<T>,
    geometry: Geometry,
    config: Config,
    entries: Vec<Entry>,
    census: [u64; Class::COUNT],
    vacant: Vec<u32>,
    index: FastMap<Name, u32>,
    layouts: Vec<LayoutId>,
    /// Entries whose parent is not in the index, by the parent's name.
    orphans: FastMap<Name, Vec<Handle>>,
    alloc: Allocator,
    grants: FastMap<u64, Grant>,
    next_grant: u64,
    /// Grant id of each GRANTED or COMMITTED row.
    by_row: FastMap<u32, u64>,
    by_tag: FastMap<(u64, u64), Vec<u64>>,
    owners: FastMap<u32, Owner>,
    /// Rows that the sidecar itself copies from a window.
    copied: FastMap<u32, Copied>,
    granted_bytes: u64,
    /// Bytes of COMMITTED slots. They share a limit with granted bytes.
    committed_bytes: u64,
    policy: Box<dyn Policy>,
    /// Evictable incomplete chunks, with the time since which each one waits.
    incomplete: VecDeque<(Handle, Option<u64>)>,
    expiries: BinaryHeap<Reverse<(u64, Handle)>>,
    leases: Leases,
    admin_pins: BTreeMap<u32, u64>,
    admin_pinned_bytes: u64,
    /// Digest checks in flight, by row.
    checks: FastMap<u32, Check>,
    last_check: u64,
    sweeping: u32,
    sweep_queue: VecDeque<Handle>,
    ring: Ring,
    lower: Lower,
    /// Rate limit of reads from tiers.
    reads: Pace,
    /// Rate limit of writes to tiers and of background digest checks.
    writes: Pace,
    stats: Stats,
    actions: Vec<Action>,
}

impl<T: Table> Engine<T> {
    /// Creates an engine over an empty table or over the table of an earlier engine. `cold` frees everything PUBLISHED.
    pub fn new(now: Time, table: T, config: Config, cold: bool) -> Self {
        let geometry = table.geometry();
        let mut engine = Self {
            geometry,
            entries: Vec::new(),
            census: [0; Class::COUNT],
            vacant: Vec::new(),
            index: FastMap::default(),
            layouts: Vec::new(),
            orphans: FastMap::default(),
            alloc: Allocator::new(geometry.rows, geometry.segment_rows()),
            grants: FastMap::default(),
            next_grant: 1,
            by_row: FastMap::default(),
            by_tag: FastMap::default(),
            owners: FastMap::default(),
            copied: FastMap::default(),
            granted_bytes: 0,
            committed_bytes: 0,
            policy: policy::new(config.policy),
            incomplete: VecDeque::new(),
            expiries: BinaryHeap::new(),
            leases: Leases::default(),
            admin_pins: BTreeMap::new(),
            admin_pinned_bytes: 0,
            checks: FastMap::default(),
            last_check: 0,
            sweeping: 0,
            sweep_queue: VecDeque::new(),
            ring: Ring::new(config.limits.events_max),
            lower: Lower::new(&config.tiers),
            reads: Pace::new(config.read_bytes_per_s),
            writes: Pace::new(config.write_bytes_per_s),
            stats: Stats::default(),
            actions: Vec::new(),
            table: Mirror::new(table),
            config,
        };
        engine.take_over(now, cold);
        engine
    }

    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    pub fn table(&self) -> &T {
        &self.table.shared
    }

    /// Rows whose pages are present.
    pub fn populated_rows(&self) -> u32 {
        self.table.populated_rows()
    }

    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Counters of the two rate limits: reads from tiers; writes to tiers and background digest checks.
    pub fn paces(&self) -> [PaceStats; 2] {
        [self.reads.stats, self.writes.stats]
    }

    /// Events of stored and removed chunks.
    pub fn ring(&self) -> &Ring {
        &self.ring
    }

    /// Actions requested since the last call.
    pub fn take_actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    /// Applies a changed configuration. Sizes, the eviction policy and the set of tiers keep their values.
    pub fn configure(&mut self, config: &Config) {
        let (arena_bytes, policy) = (self.config.arena_bytes, self.config.policy);
        let otherwise = self.lower.configure(&config.tiers);
        for e in &mut self.entries {
            // the next request for the chunk may qualify it for these tiers
            e.missed |= otherwise & !e.written;
        }
        self.reads.configure(config.read_bytes_per_s);
        self.writes.configure(config.write_bytes_per_s);
        self.config = Config {
            arena_bytes,
            policy,
            ..config.clone()
        };
    }

    /// Marks the first `rows` rows of the arena as populated.
    pub fn populated(&mut self, rows: u32) {
        let rows = rows.min(self.geometry.rows);
        if rows > self.table.populated_rows() {
            self.table.set_populated_rows(rows);
            self.alloc.populate(rows);
        }
    }

    /// Runs timers. Call it only after every readable socket was read.
    pub fn tick(&mut self, now: Time) {
        self.end_pins(now);
        self.end_quarantines(now);
        self.end_by_time(now);
        self.end_admin_pins(now);
        self.sweep(now);
    }

    fn layout_number(&mut self, layout: LayoutId) -> u32 {
        if let Some(at) = self.layouts.iter().position(|l| *l == layout) {
            return at as u32;
        }
        self.layouts.push(layout);
        self.layouts.len() as u32 - 1
    }
}

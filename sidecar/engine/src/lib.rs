//! The cache engine: index, allocator, slot states, leases and eviction.
//! Here live decisions; no clocks, no sockets, no threads, no wire format: time is an argument, actions are returned.
//! Who may ask for what, and when a process counts as dead, is decided in `sessions/`.

mod admin;
mod allocator;
#[cfg(any(test, feature = "simulation"))]
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
#[cfg(any(test, feature = "simulation"))]
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

/// The time, read once by the shell before each call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Time {
    /// Monotonic milliseconds since any fixed moment of this boot of the engine.
    pub mono_ms: u64,
    /// Unix time in seconds, for expiry and for people.
    pub unix_s: u64,
}

/// What the engine wants to have done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Take the digest of a slot and say [`Engine::digest_done`].
    Digest {
        slot: u32,
        generation: u32,
        /// To be said back, too: the number of the check; 0 = of the digest that makes a slot readable.
        check: u64,
        length: u64,
        urgent: bool,
    },
    /// A PROBE that waited can be answered: [`Engine::final_answer`].
    ProbeDone {
        probe: u64,
    },
}

/// Counters since the engine's start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    pub granted_chunks: u64,
    /// Grants that became void.
    pub voided_grants: u64,
    /// Chunks that became readable.
    pub stored_chunks: u64,
    /// Readable chunks taken over from an earlier boot.
    pub adopted_chunks: u64,
    /// Readable chunks that went to make room.
    pub evicted_chunks: u64,
    pub evicted_bytes: u64,
    /// Incomplete chunks that went to make room.
    pub evicted_incomplete: u64,
    /// Chunks whose time was over.
    pub expired_chunks: u64,
    /// Digests that did not match.
    pub corrupt_chunks: u64,
    /// Comparisons of digests begun.
    pub checks: u64,
    /// GRANTs refused because nothing could go.
    pub no_room_refusals: u64,
    /// GRANTs refused by the bound of granted bytes.
    pub granted_bytes_refusals: u64,
    /// COMMITs of what was not GRANTED to the sender as named.
    pub commits_ignored: u64,
    /// Soft pins that ended because their time was over.
    pub soft_pins_expired: u64,
    /// Soft pins that ended because newer ones needed their share.
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
    /// Entries whose parent (by name) is not there.
    orphans: FastMap<Name, Vec<Handle>>,
    alloc: Allocator,
    grants: FastMap<u64, Grant>,
    next_grant: u64,
    /// Grant of a GRANTED or COMMITTED row.
    by_row: FastMap<u32, u64>,
    by_tag: FastMap<(u64, u64), Vec<u64>>,
    owners: FastMap<u32, Owner>,
    /// Rows that the sidecar itself copies into, from a window.
    copied: FastMap<u32, Copied>,
    granted_bytes: u64,
    /// Written, digest not taken: bounded together with what is granted.
    committed_bytes: u64,
    policy: Box<dyn Policy>,
    /// Incomplete chunks that may go, with when they began to wait.
    incomplete: VecDeque<(Handle, Option<u64>)>,
    expiries: BinaryHeap<Reverse<(u64, Handle)>>,
    leases: Leases,
    admin_pins: BTreeMap<u32, u64>,
    admin_pinned_bytes: u64,
    /// Comparisons under way, by row.
    checks: FastMap<u32, Check>,
    last_check: u64,
    sweeping: u32,
    sweep_queue: VecDeque<Handle>,
    ring: Ring,
    lower: Lower,
    /// Bytes that come from tiers.
    reads: Pace,
    /// Bytes that go to tiers, and those of checks that nobody waits for.
    writes: Pace,
    stats: Stats,
    actions: Vec<Action>,
}

impl<T: Table> Engine<T> {
    /// An engine over a table: empty, or left by an earlier engine. `cold`: everything PUBLISHED is freed.
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

    /// The slot table that connectors map.
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

    /// Bytes that came into memory from tiers; and that went out of it, or were compared beside the answers.
    pub fn paces(&self) -> [PaceStats; 2] {
        [self.reads.stats, self.writes.stats]
    }

    /// What was stored and removed.
    pub fn ring(&self) -> &Ring {
        &self.ring
    }

    /// What the engine wants to have done since this was called last.
    pub fn take_actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    /// Takes a changed configuration; sizes, the policy and which tiers there are stay.
    pub fn configure(&mut self, config: &Config) {
        let (arena_bytes, policy) = (self.config.arena_bytes, self.config.policy);
        let otherwise = self.lower.configure(&config.tiers);
        for e in &mut self.entries {
            // when a request comes back it may be one for them
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

    /// The first `rows` rows of the arena are populated.
    pub fn populated(&mut self, rows: u32) {
        let rows = rows.min(self.geometry.rows);
        if rows > self.table.populated_rows() {
            self.table.set_populated_rows(rows);
            self.alloc.populate(rows);
        }
    }

    /// Timers. Must run only after everything that waited in the sockets was read.
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

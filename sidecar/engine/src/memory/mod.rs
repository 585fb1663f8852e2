//! The memory tier: chunks, their slots, grants, pins and order of eviction over one arena.
//! It reports what the other parts of the engine must know as [`Event`]s.

mod admin;
mod allocator;
mod audit;
mod boot;
mod entry;
mod evict;
mod fetch;
mod give_back;
mod grant;
mod mirror;
mod pins;
mod policy;
mod ring;
mod window;

pub use admin::{Found, PinError, Usage};
pub use fetch::FetchId;
pub use grant::{GrantContext, Wish};
pub use ring::{EventDomain, Ring};

pub(crate) use audit::say;
pub(crate) use entry::{Entry, Handle, NONE};
pub(crate) use grant::{record, sections_of};
pub(crate) use ring::ENTRIES_PER_PAGE_MAX;

use crate::config::Config;
use crate::effect::DigestJob;
use crate::name::{FastMap, Name};
use crate::table::{Geometry, Table};
use crate::{Stats, Time};
use allocator::Allocator;
use entry::Class;
use grant::{Grant, Owner};
use kvcachepool_protocol::key::LayoutId;
use mirror::Mirror;
use pins::Pins;
use policy::Policy;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use window::Copied;

/// A change that other parts of the engine must learn of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// A slot was committed: its digest is needed.
    Committed(DigestJob),
    /// A chunk became readable, or a readable chunk gained sections.
    Readable(Handle),
    /// A chunk left the index.
    Unlisted(Handle),
    /// A row was freed. Its generation is the one that it had in use.
    Freed { row: u32, generation: u32 },
}

/// Index, slots, grants, pins and order of eviction over one arena.
#[derive(Debug)]
pub(crate) struct MemoryTier<T> {
    pub table: Mirror<T>,
    pub geometry: Geometry,
    config: Config,
    pub entries: Vec<Entry>,
    census: [u64; Class::COUNT],
    vacant: Vec<u32>,
    index: FastMap<Name, u32>,
    layouts: Vec<LayoutId>,
    /// Entries whose parent is not in the index, by the parent's name.
    pub orphans: FastMap<Name, Vec<Handle>>,
    alloc: Allocator,
    pub grants: FastMap<u64, Grant>,
    next_grant: u64,
    /// Grant id of each GRANTED or COMMITTED row.
    by_row: FastMap<u32, u64>,
    pub by_tag: FastMap<(u64, u64), Vec<u64>>,
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
    pub pins: Pins,
    pub ring: Ring,
    pub stats: Stats,
    events: Vec<Event>,
}

impl<T: Table> MemoryTier<T> {
    /// Creates the tier over an empty table or over the table of an earlier engine. `cold` frees everything PUBLISHED. Returns the chunks
    /// adopted from an earlier engine, too.
    pub fn new(now: Time, table: T, config: Config, cold: bool) -> (Self, Vec<Handle>) {
        let geometry = table.geometry();
        let mut memory = Self {
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
            pins: Pins::default(),
            ring: Ring::new(config.limits.events_max),
            stats: Stats::default(),
            events: Vec::new(),
            table: Mirror::new(table),
            config,
        };
        let adopted = memory.take_over(now, cold);
        memory.events.clear();
        (memory, adopted)
    }

    /// Events since the last call.
    pub fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// Applies a changed configuration. The eviction policy keeps its value.
    pub fn configure(&mut self, config: &Config) {
        self.config = config.clone();
    }

    /// Marks the first `rows` rows of the arena as populated.
    pub fn populated(&mut self, rows: u32) {
        let rows = rows.min(self.geometry.rows);
        if rows > self.table.populated_rows() {
            self.table.set_populated_rows(rows);
            self.alloc.populate(rows);
        }
    }

    /// Runs timers.
    pub fn tick(&mut self, now: Time) {
        self.end_quarantines(now);
        self.end_by_time(now);
        self.end_admin_pins(now);
    }

    /// The number of a layout. New layouts are numbered at their first use.
    pub fn layout_number(&mut self, layout: LayoutId) -> u32 {
        if let Some(at) = self.layouts.iter().position(|l| *l == layout) {
            return at as u32;
        }
        self.layouts.push(layout);
        self.layouts.len() as u32 - 1
    }

    /// The layout of a number.
    pub fn layout(&self, number: u32) -> Option<LayoutId> {
        self.layouts.get(number as usize).copied()
    }
}

//! The memory tier: chunks, their slots, grants, pins and order of eviction over one arena.
//! It reports what the other parts of the engine must know as [`Event`]s.

mod admin;
mod allocator;
mod boot;
mod check;
mod entry;
mod evict;
mod eviction;
mod give_back;
mod grant;
mod grants;
mod index;
mod notes;
mod pins;
mod policy;
mod quota;
mod resize;
mod ring;
mod slots;
mod window;

pub use admin::{Found, PinError, Usage};
pub use grant::{FetchId, GrantContext, Wish};
pub use ring::{EventDomain, Ring};

pub(crate) use check::say;
pub(crate) use entry::{Entry, Handle, NONE};
pub(crate) use grant::{record, sections_of};
pub(crate) use notes::Note;
pub(crate) use resize::Resize;
pub(crate) use ring::ENTRIES_PER_PAGE_MAX;
pub(crate) use slots::SlotTable;

use crate::config::Config;
use crate::effect::DigestJob;
use crate::table::Table;
use crate::{Stats, Time};
use eviction::Eviction;
use grants::Grants;
use index::ChunkIndex;
use pins::Pins;
use quota::Quotas;

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
    pub slots: SlotTable<T>,
    /// Configuration of the whole engine. The eviction policy and the set of tiers count only at the start.
    pub config: Config,
    pub index: ChunkIndex,
    pub grants: Grants,
    pub eviction: Eviction,
    pub pins: Pins,
    quotas: Quotas,
    /// Number of notes in the slot table.
    noted: u32,
    pub ring: Ring,
    pub stats: Stats,
    events: Vec<Event>,
}

impl<T: Table> MemoryTier<T> {
    /// Creates the tier over an empty table or over the table of an earlier engine. `cold` frees everything PUBLISHED. Returns the chunks
    /// adopted from an earlier engine, too.
    pub fn new(now: Time, table: T, config: Config, cold: bool) -> (Self, Vec<Handle>) {
        let mut memory = Self {
            index: ChunkIndex::default(),
            grants: Grants::default(),
            eviction: Eviction::new(config.policy),
            pins: Pins::default(),
            quotas: Quotas::default(),
            noted: 0,
            ring: Ring::new(config.limits.events_max),
            stats: Stats::default(),
            events: Vec::new(),
            slots: SlotTable::new(table),
            config,
        };
        let adopted = memory.take_over(now, cold);
        memory.events = Vec::new();
        (memory, adopted)
    }

    /// Events since the last call.
    pub fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// A share of the arena in bytes.
    fn share(&self, percent: u32) -> u64 {
        self.slots.capacity_bytes() * u64::from(percent) / 100
    }

    /// Runs timers.
    pub fn tick(&mut self, now: Time) {
        self.end_quarantines(now);
        self.end_by_time(now);
        self.end_admin_pins(now);
    }
}

//! The cache engine: index, allocator, slot states, leases and eviction.
//! Pure decision code: no clocks, sockets, threads or wire format. Time is an argument, and side effects are returned as [`Effect`]s.
//! `sessions/` checks permissions and decides when a process counts as dead.

mod check;
pub mod config;
pub mod driver;
mod durations;
mod effect;
mod leases;
pub mod lower;
mod memory;
pub mod memory_table;
pub mod mistake;
mod name;
mod named;
mod pace;
mod probe;
pub mod sessions;
pub mod table;
pub mod tier;
mod verifier;

#[cfg(test)]
mod tests;

pub use durations::{Buckets, Durations, SECONDS, bucket};
pub use effect::{
    ClearJob, Completion, DigestJob, Domains, Effect, FetchJob, HeadJob, Landed, LookupJob,
    RemoveJob, Target, WriteJob,
};
pub use lower::{Estimate, LoadStats, Reach, TierStats, TierView, TooManyRemovals, Unwritten};
pub use memory::{EventDomain, FetchId, Found, GrantContext, PinError, Ring, Usage, Wish};
pub use pace::PaceStats;
pub use probe::{Answer, Question};

use config::Config;
use kvcachepool_protocol::key::ChunkKey;
use kvcachepool_protocol::message::Event as ChunkEvent;
use leases::Leases;
use lower::TierPlanner;
use memory::{ENTRIES_PER_PAGE_MAX, Event, MemoryTier};
use mistake::Mistake;
use pace::Pace;
use table::{COMMITTED, Geometry, PUBLISHED, Table};
use verifier::Verifier;

/// The current time. The shell reads it once before each call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Time {
    /// Monotonic milliseconds since an arbitrary start within this boot.
    pub mono_ms: u64,
    /// Unix time in seconds, for expiry and for display.
    pub unix_s: u64,
}

/// A waiting PROBE whose answer changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Changed {
    /// More is known: call [`Engine::partial_answer`].
    Partial { probe: u64 },
    /// The answer is ready: call [`Engine::final_answer`].
    Final { probe: u64 },
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
    /// Times from a PROBE of vLLM to its final answer.
    pub probes: Durations,
    /// Times from PIN to RELEASE of vLLM's requests: what a load takes.
    pub loads: Durations,
    /// From the grant to the readable chunk, of chunks that workers of vLLM stored.
    pub stores: Durations,
}

/// Snapshot pages of chunks from this number on cover the disk.
const DISK_PAGES: u32 = 1 << 31;

/// The parts of the engine, and what one part must learn of another.
#[derive(Debug)]
pub struct Engine<T> {
    pub(crate) memory: MemoryTier<T>,
    verifier: Verifier,
    leases: Leases,
    lower: TierPlanner,
    /// Rate limit of reads from tiers.
    reads: Pace,
    /// Rate limit of writes to tiers and of background digest checks.
    writes: Pace,
    effects: Vec<Effect>,
    changed: Vec<Changed>,
}

impl<T: Table> Engine<T> {
    /// Creates an engine over an empty table or over the table of an earlier engine. `cold` frees everything PUBLISHED.
    pub fn new(now: Time, table: T, config: Config, cold: bool) -> Self {
        let (memory, adopted) = MemoryTier::new(now, table, config, cold);
        let config = &memory.config;
        let mut engine = Self {
            verifier: Verifier::default(),
            leases: Leases::default(),
            lower: TierPlanner::new(&config.tiers),
            reads: Pace::new(config.read_bytes_per_s),
            writes: Pace::new(config.write_bytes_per_s),
            effects: Vec::new(),
            changed: Vec::new(),
            memory,
        };
        engine.adopt_removals();
        // an earlier boot may have written its chunks, so they are looked up first
        if !adopted.is_empty() {
            engine.lower.adopted();
        }
        engine.verifier.adopt(adopted);
        engine.sweep(now);
        engine
    }

    pub fn geometry(&self) -> Geometry {
        self.memory.slots.geometry()
    }

    pub fn table(&self) -> &T {
        self.memory.slots.shared()
    }

    /// Sizes and counts of the memory tier.
    pub fn usage(&self) -> Usage {
        self.memory.usage()
    }

    /// Chunks of this key, in all layouts.
    pub fn find_key(&self, key: &ChunkKey) -> Vec<Found> {
        self.memory.find_key(key)
    }

    /// Counts the readable chunks of this key as used. False: there are none.
    pub fn touch_key(&mut self, key: &ChunkKey) -> bool {
        let mut any = false;
        for entry in self.memory.index.with_key(key) {
            let handle = self.memory.index.handle(entry);
            if self.memory.index.get(handle).is_some_and(|e| e.known) {
                self.memory.eviction.touch(&self.memory.index, handle);
                self.touched(handle);
                any = true;
            }
        }
        any
    }

    /// Bytes of the arena.
    pub fn capacity_bytes(&self) -> u64 {
        self.memory.slots.capacity_bytes()
    }

    /// Rows whose pages are present.
    pub fn populated_rows(&self) -> u32 {
        self.memory.slots.populated_rows()
    }

    pub fn stats(&self) -> &Stats {
        &self.memory.stats
    }

    /// Counters of the two rate limits: reads from tiers; writes to tiers and background digest checks.
    pub fn paces(&self) -> [PaceStats; 2] {
        [self.reads.stats, self.writes.stats]
    }

    /// Events of stored and removed chunks.
    pub fn ring(&self) -> &Ring {
        &self.memory.ring
    }

    /// Effects requested since the last call. Also starts queued work for which there is room now.
    pub fn take_effects(&mut self, now: Time) -> Vec<Effect> {
        self.settle();
        self.advance_tiers(now);
        self.settle();
        std::mem::take(&mut self.effects)
    }

    /// Waiting PROBEs whose answers changed since the last call.
    pub fn take_changed(&mut self) -> Vec<Changed> {
        std::mem::take(&mut self.changed)
    }

    /// An effect has ended, or a tier went up or down.
    pub fn completed(&mut self, now: Time, completion: Completion) {
        self.settle();
        match completion {
            Completion::Digest {
                slot,
                generation,
                check,
                digest,
            } => self.digest_done(now, slot, generation, check, digest),
            Completion::Lookup { lookup, present } => self.looked_up(now, lookup, present),
            Completion::Head { head, object } => self.head_read(now, head, object),
            Completion::Fetch { fetch, landed } => self.landed(now, fetch, landed),
            Completion::Write { put, stored } => self.put_done(now, put, stored),
            Completion::Remove { removal, removed } => self.removal_done(now, removal, removed),
            Completion::Clear { tier, removed } => self.lower.cleared(now, tier, removed),
            Completion::Tier { tier, down } => self.tier_state(now, tier, down),
        }
        self.settle();
    }

    /// Handles a digest. `None`: it could not be computed, which counts as a mismatch.
    fn digest_done(
        &mut self,
        now: Time,
        row_number: u32,
        generation: u32,
        check: u64,
        digest: Option<[u8; 16]>,
    ) {
        let row = self.memory.slots.row(row_number);
        let same = row.generation == generation;
        match row.state {
            COMMITTED if same || T::makes(Mistake::DigestGeneration) => match digest {
                Some(digest) => self.memory.publish(now, row_number, &row, digest),
                // a committed section without a digest
                None => self.memory.void_row(row_number),
            },
            PUBLISHED if same => self.compare(now, row_number, check, digest),
            _ => {}
        }
        // checks of rows that were freed just now make room for others
        self.settle();
        self.sweep(now);
    }

    /// Applies a changed configuration. The eviction policy and the set of tiers keep their values.
    pub fn configure(&mut self, config: &Config) {
        let otherwise = self.lower.configure(&config.tiers);
        for e in self.memory.index.entries_mut() {
            // the next request for the chunk may qualify it for these tiers
            e.missed |= otherwise & !e.written;
        }
        self.reads.configure(config.read_bytes_per_s);
        self.writes.configure(config.write_bytes_per_s);
        self.memory.config = config.clone();
    }

    /// Marks the first `rows` rows of the arena as populated.
    pub fn populated(&mut self, rows: u32) {
        self.memory.slots.populate(rows);
    }

    /// Runs timers. Call it only after every readable socket was read.
    pub fn tick(&mut self, now: Time) {
        self.end_pins(now);
        self.memory.tick(now);
        self.settle();
        self.sweep(now);
    }

    /// Passes the memory tier's events on to the parts that they concern.
    fn settle(&mut self) {
        for event in self.memory.take_events() {
            match event {
                Event::Committed(job) => self.effects.push(Effect::Digest(job)),
                Event::Readable(chunk) => self.offer(chunk),
                Event::Unlisted(chunk) => self.wake_waiters(chunk),
                Event::Freed { row, generation } => self.verifier.forget(row, generation),
            }
        }
    }

    /// Removes every chunk from memory and from the tiers below it. Lower tiers are not asked before they have removed their objects.
    /// Returns the number of chunks removed from the index.
    pub fn clear(&mut self) -> u64 {
        self.clear_tiers();
        self.memory.clear()
    }

    /// A page of a domain's chunks in memory and on disk, and the start of the next page.
    pub fn resident(&self, from: u32, domain: EventDomain) -> (Vec<ChunkEvent>, Option<u32>) {
        if let Some(number) = from.checked_sub(DISK_PAGES) {
            let (events, next) =
                self.claimed(number as usize, ENTRIES_PER_PAGE_MAX as usize, domain);
            return (events, next.map(|number| DISK_PAGES + number as u32));
        }
        let (events, next) = self.memory.resident(from, domain);
        let disk = self.lower.claims_any().then_some(DISK_PAGES);
        (events, next.or(disk))
    }
}

//! Arenas, slot tables and the lock file: what survives the engine process. Every write to a table is checked here, against who
//! is writing and reading the bytes at that moment; and a write can be the last one before the engine dies.

use super::rng::{Rng, mix};
use super::rules::{Rule, Violation};
use kvcachepool_engine::sessions::FdId;
use kvcachepool_engine::table::{ChunkRecord, FREE, GRANTED, Geometry, PUBLISHED, ROW_BYTES, Row};
use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

/// Bytes that are no key's: a write was under way, or was never finished.
pub const TORN: u64 = 1 << 63;
/// A bit of them flipped.
pub const FLIPPED: u64 = 1 << 62;

/// The right content of one row of a section.
pub fn right(hash: u64, section: u32, at: u32) -> u64 {
    mix(hash ^ u64::from(section) << 40 ^ u64::from(at) << 8) & !(TORN | FLIPPED)
}

/// Digest of the right content of a section.
pub fn right_digest(hash: u64, section: u32, length: u64) -> [u8; 16] {
    digest_of(
        length,
        (0..rows_of(length)).map(|at| right(hash, section, at)),
    )
}

fn digest_of(length: u64, rows: impl Iterator<Item = u64>) -> [u8; 16] {
    let sum = rows.fold(mix(length), |sum, content| mix(sum ^ content));
    let mut out = [0; 16];
    out[..8].copy_from_slice(&sum.to_le_bytes());
    out[8..].copy_from_slice(&mix(sum ^ 1).to_le_bytes());
    out
}

/// The part of an engine hash that stands for its content here.
pub fn short(hash: &[u8; 32]) -> u64 {
    u64::from_le_bytes([
        hash[0], hash[1], hash[2], hash[3], hash[4], hash[5], hash[6], hash[7],
    ])
}

/// Somebody's bytes change.
#[derive(Debug, Clone)]
pub struct Writer {
    /// Process, [`ENGINE`], or [`COPIES`].
    pub pid: usize,
    /// First row that it writes.
    pub slot: u32,
    /// Rows that it writes.
    pub rows: u32,
    /// Its process is dead; a device goes on until then.
    pub ghost_until: Option<u64>,
}

/// The engine itself, as a writer.
pub const ENGINE: usize = usize::MAX;
/// What the sidecar copies from windows, as a writer.
pub const COPIES: usize = ENGINE - 1;

/// One arena with its slot table.
#[derive(Debug)]
pub struct Region {
    pub geometry: Geometry,
    pub format: u32,
    pub populated: u32,
    /// Rows that may hold slots.
    pub capacity: u32,
    /// Number of releases of pages that it counts.
    pub shrinks: u32,
    pub rows: Vec<Row>,
    pub chunks: Vec<ChunkRecord>,
    pub content: Vec<u64>,
    pub writers: Vec<Writer>,
    /// Rows that a live read lease covers for certain.
    pub leased: Vec<(u32, u32, u32)>,
}

/// Everything on the machine that outlives the engine.
#[derive(Debug)]
pub struct Memory {
    pub regions: Vec<Region>,
    pub next_lock: u32,
    pub next_region: u64,
    /// Locks that are held, and by whom.
    pub held: Vec<(u32, usize)>,
    /// Format that the sidecar of the moment writes and reads.
    pub format: u32,
    /// What the supervisor holds.
    pub supervisor: Option<usize>,
    /// What was adopted last and is not kept yet.
    pub adopted: Option<usize>,
    /// First row whose pages were released since the last populated ones.
    pub released: Option<u32>,
    /// Descriptors of the frame under way.
    pub fds: Vec<(FdId, FdObject)>,
    pub next_fd: u64,
    /// Who maps or was sent a region.
    pub holders: Vec<(usize, usize)>,
    /// Table writes until the engine dies.
    pub writes_left: Option<u32>,
    pub crashed: bool,
    /// A row is known to be corrupt: it may go under its leases.
    pub may_go: Option<u32>,
    /// Since a frame was read: records that lost a PUBLISHED slot, and the keys of those that ended after it.
    pub emptied: Vec<u32>,
    pub evicted: Vec<[u8; 32]>,
    pub flock: bool,
    pub violation: Option<Violation>,
    pub torn: u64,
    pub rng: Rng,
}

/// What a descriptor stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FdObject {
    Pidfd(usize),
    Arena(usize),
    Table(usize),
    Lock,
    /// Memory, page and bell of a window.
    Window(usize),
}

/// What a call unwinds with when the engine dies in it.
#[derive(Debug)]
pub struct EngineDied;

/// Shared by the engine's host, its table and the world.
pub type Shared = Rc<RefCell<Memory>>;

impl Memory {
    pub fn new(seed: u64) -> Self {
        Self {
            regions: Vec::new(),
            next_lock: 1,
            next_region: 1,
            held: Vec::new(),
            format: 1,
            supervisor: None,
            adopted: None,
            released: None,
            fds: Vec::new(),
            next_fd: 1,
            holders: Vec::new(),
            writes_left: None,
            crashed: false,
            may_go: None,
            emptied: Vec::new(),
            evicted: Vec::new(),
            flock: false,
            violation: None,
            torn: TORN,
            rng: Rng::new(seed, 7),
        }
    }

    /// What was evicted until now is of no interest any more.
    pub fn forget_evictions(&mut self) {
        self.emptied.clear();
        self.evicted.clear();
    }

    pub fn broke(&mut self, rule: Rule, what: impl FnOnce() -> String) {
        if self.violation.is_none() {
            self.violation = Some(Violation { rule, what: what() });
        }
    }

    /// Where the engine has just died, nothing of the call follows.
    pub(super) fn end_if_dead(&self) {
        if self.crashed {
            std::panic::resume_unwind(Box::new(EngineDied));
        }
    }

    /// One write to what outlives the engine; false: the engine died before it.
    pub(super) fn spend(&mut self) -> bool {
        if self.crashed {
            return false;
        }
        match &mut self.writes_left {
            None => true,
            Some(0) => {
                self.crashed = true;
                false
            }
            Some(left) => {
                *left -= 1;
                true
            }
        }
    }

    pub fn tear(&mut self, region: usize, first: u32, rows: u32) {
        for row in first..first + rows {
            self.torn += 1;
            if let Some(c) = self.regions[region].content.get_mut(row as usize) {
                *c = self.torn;
            }
        }
    }

    /// How the bytes of a slot compare with those of its key: right, flipped or wrong.
    pub fn compare(&self, region: usize, slot: u32, rows: u32, hash: u64, section: u32) -> Bytes {
        let r = &self.regions[region];
        let mut flipped = false;
        for at in 0..rows {
            let want = right(hash, section, at);
            match r.content.get((slot + at) as usize) {
                Some(c) if *c == want => {}
                Some(c) if *c == want | FLIPPED => flipped = true,
                _ => return Bytes::Wrong,
            }
        }
        if flipped {
            Bytes::Flipped
        } else {
            Bytes::Right
        }
    }

    /// Digest of some rows as they are.
    pub fn digest(&self, region: usize, slot: u32, length: u64) -> [u8; 16] {
        let content = &self.regions[region].content;
        let row = |at| content.get((slot + at) as usize).copied().unwrap_or(0);
        digest_of(length, (0..rows_of(length)).map(row))
    }

    /// Pages are released: nobody may use them, and their bytes are gone.
    pub(super) fn release(&mut self, region: usize, rows: Range<u32>) {
        let count = rows.end - rows.start;
        let r = &self.regions[region];
        let writer = r
            .writers
            .iter()
            .find(|w| overlap(w.slot, w.rows, rows.start, count))
            .cloned();
        if let Some(w) = writer {
            self.broke(Rule::S3, || {
                format!("rows {rows:?} are released while {w:?} writes")
            });
        }
        for row in rows.clone() {
            let state = self.regions[region].rows[row as usize].state;
            if state != FREE {
                self.broke(Rule::S3, || {
                    format!("slot {row} in state {state} is released")
                });
            }
        }
        self.tear(region, rows.start, count);
        let first = self.released.unwrap_or(u32::MAX);
        self.released = Some(first.min(rows.start));
    }

    pub(super) fn state_changes(&mut self, region: usize, row: u32, state: u32) {
        let r = &self.regions[region];
        let Some(now) = r.rows.get(row as usize).copied() else {
            return;
        };
        let size = now.slot_rows.max(1);
        let writer = r
            .writers
            .iter()
            .find(|w| overlap(w.slot, w.rows, row, size))
            .cloned();
        if let Some(w) = writer {
            let what =
                ["comes back", "is granted", "is committed", "is published"][state as usize & 3];
            let rule = if state == PUBLISHED {
                Rule::S2
            } else {
                Rule::S3
            };
            // a fetch that ends says so in the same step
            self.broke(rule, || format!("slot {row} {what} while {w:?} writes"));
        }
        match state {
            GRANTED => self.granted(region, row, size, &now),
            PUBLISHED => self.published(region, row, &now),
            FREE if now.state == PUBLISHED => {
                let leased = self.regions[region]
                    .leased
                    .iter()
                    .find(|l| l.0 == row && l.1 == now.generation);
                if let Some((_, _, request)) = leased.copied()
                    && self.may_go != Some(row)
                {
                    self.broke(Rule::S3, || {
                        format!("slot {row} comes back under the lease of request {request}")
                    });
                }
            }
            _ => {}
        }
    }

    fn granted(&mut self, region: usize, row: u32, size: u32, now: &Row) {
        if now.state != FREE {
            let now = *now;
            self.broke(Rule::S3, || {
                format!("slot {row} is granted while it is {now:?}")
            });
        }
        let r = &self.regions[region];
        if row + size > r.populated {
            self.broke(Rule::S9, || {
                format!("slot {row} is granted before it is populated")
            });
        }
        let r = &self.regions[region];
        let segment = r.geometry.segment_rows().max(1);
        let first = row / segment * segment;
        let mut other = None;
        for at in first..(first + segment).min(r.geometry.rows) {
            let x = &r.rows[at as usize];
            if at != row && x.state != FREE && overlap(at, x.slot_rows.max(1), row, size) {
                other = Some((at, *x));
            }
        }
        if let Some((at, x)) = other {
            self.broke(Rule::S3, || {
                format!("slot {row} ({size} rows) is granted over slot {at}: {x:?}")
            });
        }
        if (row % segment) + size > segment {
            self.broke(Rule::S3, || {
                format!("slot {row} ({size} rows) crosses its segment")
            });
        }
    }

    fn published(&mut self, region: usize, row: u32, now: &Row) {
        let r = &self.regions[region];
        let Some(record) = r.chunks.get(now.chunk as usize) else {
            return;
        };
        let (used, hash, key) = (record.state, short(&record.last_hash), record.key);
        let bound = used == 1 && key[..8] == now.key_prefix;
        let bytes = self.compare(region, row, rows_of(now.length), hash, now.section);
        if !bound {
            return;
        }
        if bytes != Bytes::Right {
            self.broke(Rule::S2, || {
                format!("slot {row} is published with {bytes:?} bytes")
            });
        } else if self.digest(region, row, now.length) != now.digest {
            self.broke(Rule::S2, || {
                format!("slot {row} is published with a digest of other bytes")
            });
        }
    }
}

/// Bytes compared with those of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bytes {
    Right,
    Flipped,
    Wrong,
}

/// Rows that a length takes.
pub fn rows_of(length: u64) -> u32 {
    length.div_ceil(ROW_BYTES) as u32
}

/// Do two ranges share a row?
pub fn overlap(a: u32, an: u32, b: u32, bn: u32) -> bool {
    a < b + bn && b < a + an
}

/// States in which a slot is nobody's burden.
pub fn settled(state: u32) -> bool {
    state == FREE || state == PUBLISHED
}

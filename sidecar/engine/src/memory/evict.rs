//! Eviction: incomplete chunks first, then in the policy's order. Tails go before full chunks over the same tokens, and children before
//! their parent.

use super::MemoryTier;
use super::entry::NONE;
use crate::Time;
use crate::mistake::Mistake;
use crate::name::Name;
use crate::table::{PUBLISHED, Table};
use kvcachepool_protocol::key::{EngineHash, KeyKind, ModelId, NamespaceId, chunk_key};

/// Why a slot or an entry ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Why {
    /// Evicted to make room.
    Evicted,
    Ended,
}

/// Evictions by policy before a whole segment is emptied for another slot size.
const EVICTIONS_BEFORE_RECLAIM: u32 = 64;
/// Segments examined for that.
const RECLAIM_TRIES: usize = 8;

impl<T: Table> MemoryTier<T> {
    /// Allocates a slot of exactly `size` rows for a section, with evictions as needed.
    pub(crate) fn take_row(&mut self, size: u32, section: u32) -> Option<u32> {
        if size > self.slots.segment_rows() {
            return None;
        }
        for _ in 0..EVICTIONS_BEFORE_RECLAIM {
            if let Some(row) = self.slots.take(size, section) {
                return Some(row);
            }
            if !self.evict_one() {
                return None;
            }
        }
        for (first, slot_rows) in self.slots.reclaimable(size, RECLAIM_TRIES) {
            self.empty_segment(first, slot_rows);
            if let Some(row) = self.slots.take(size, section) {
                return Some(row);
            }
        }
        while self.evict_one() {
            if let Some(row) = self.slots.take(size, section) {
                return Some(row);
            }
        }
        None
    }

    /// True if this entry can be evicted.
    pub(crate) fn evictable(&self, entry: u32) -> bool {
        self.index.entry(entry).is_some_and(|e| {
            e.live
                && e.open.is_none()
                && (!e.pinned() || T::makes(Mistake::EvictPinned))
                && (e.first_child == NONE || T::makes(Mistake::ParentFirst))
        })
    }

    /// Evicts one chunk. Returns false if nothing can be evicted.
    pub(crate) fn evict_one(&mut self) -> bool {
        for _ in 0..self.eviction.incomplete() {
            let Some((handle, since_ms)) = self.eviction.next_incomplete(&mut self.index) else {
                break;
            };
            if self.evictable(handle.entry) {
                self.stats.evicted_incomplete += 1;
                self.remove(handle.entry, Why::Evicted);
                return true;
            }
            self.eviction.queue(&mut self.index, handle, since_ms);
        }
        while let Some(entry) = self.eviction.next() {
            if !self.evictable(entry) {
                self.eviction.park(&mut self.index, entry);
                continue;
            }
            if let Some(tail) = self.tail_over(entry) {
                self.eviction.retry(entry);
                self.evict(tail);
            } else {
                self.evict(entry);
            }
            return true;
        }
        false
    }

    pub(super) fn evict(&mut self, entry: u32) {
        self.stats.evicted_chunks += 1;
        self.stats.evicted_bytes += self.index.entry(entry).map_or(0, |e| e.bytes);
        self.remove(entry, Why::Evicted);
    }

    /// An evictable tail over the first tokens of a full chunk.
    pub(crate) fn tail_over(&self, entry: u32) -> Option<u32> {
        let record = self.slots.record(entry);
        let e = self.index.entry(entry)?;
        let (layout, first_token) = (e.name.layout, e.first_token);
        let hashes = record
            .block_hashes
            .get(..record.block_hash_count as usize)?;
        let (_, before_last) = hashes.split_last()?;
        before_last.iter().rev().find_map(|hash| {
            let key = chunk_key(
                &ModelId(record.model),
                &NamespaceId(record.namespace),
                KeyKind::Prefix,
                &EngineHash(*hash),
            );
            let tail = self.index.find(&Name { layout, key })?;
            let same_place = self.index.entry(tail)?.first_token == first_token;
            (tail != entry && same_place && self.evictable(tail)).then_some(tail)
        })
    }

    /// Evicts all chunks of a segment and their descendants, if all of them can be evicted.
    pub(super) fn empty_segment(&mut self, first: u32, slot_rows: u32) {
        let rows: Vec<u32> = (0..self.slots.segment_rows() / slot_rows.max(1))
            .map(|i| first + i * slot_rows)
            .collect();
        let mut chunks = Vec::new();
        for row in rows {
            let row = self.slots.row(row);
            match row.state {
                PUBLISHED => chunks.push(row.chunk),
                kvcachepool_protocol::table::FREE => {}
                _ => return,
            }
        }
        chunks.sort_unstable();
        chunks.dedup();
        if !chunks.iter().all(|chunk| self.tree_evictable(*chunk)) {
            return;
        }
        for chunk in chunks {
            if !self.evict_tree(chunk) {
                return;
            }
        }
    }

    /// True if an entry and all its descendants can be evicted, each after its children.
    fn tree_evictable(&self, root: u32) -> bool {
        let mut open = vec![root];
        while let Some(entry) = open.pop() {
            let Some(e) = self.index.entry(entry).filter(|e| e.live) else {
                continue;
            };
            if e.open.is_some() || e.pinned() {
                return false;
            }
            let mut child = e.first_child;
            while child != NONE {
                open.push(child);
                child = self.index.entry(child).map_or(NONE, |c| c.sibling_after);
            }
        }
        true
    }

    /// Evicts an entry after its descendants. Returns false at the first that cannot be evicted; the others stay evicted.
    fn evict_tree(&mut self, root: u32) -> bool {
        let mut path = vec![root];
        while let Some(entry) = path.last().copied() {
            let Some(e) = self.index.entry(entry).filter(|e| e.live) else {
                path.pop();
                continue;
            };
            if e.first_child != NONE {
                path.push(e.first_child);
            } else if self.evictable(entry) {
                self.evict(entry);
                path.pop();
            } else {
                return false;
            }
        }
        true
    }

    /// Retries an entry whose obstacle to eviction may be gone.
    pub(crate) fn unpark(&mut self, entry: u32) {
        let Some(e) = self.index.entry(entry) else {
            return;
        };
        let (handle, complete, listed) = (self.index.handle(entry), e.complete(), e.listed);
        if !complete && listed && e.idle() {
            self.eviction.queue(&mut self.index, handle, None);
        } else if complete && self.evictable(entry) {
            self.eviction.unpark(&mut self.index, entry);
        }
    }

    /// Removes chunks that stayed incomplete for too long, and expired ones.
    pub(crate) fn end_by_time(&mut self, now: Time) {
        for _ in 0..self.eviction.incomplete() {
            let Some((handle, since_ms)) = self.eviction.next_incomplete(&mut self.index) else {
                break;
            };
            let since_ms = since_ms.unwrap_or(now.mono_ms);
            if now.mono_ms >= since_ms + self.config.incomplete_ms {
                // children, if any, stay readable and wait for the entry's return
                self.remove(handle.entry, Why::Ended);
            } else {
                self.eviction.queue(&mut self.index, handle, Some(since_ms));
            }
        }
        while let Some(entry) = self.index.pop_expired(now.unix_s) {
            self.stats.expired_chunks += 1;
            self.doom(entry);
        }
    }
}

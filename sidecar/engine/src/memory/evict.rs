//! Eviction: incomplete chunks first, then in the policy's order. Tails go before full chunks over the same tokens, and children before
//! their parent.

use super::entry::{Handle, NONE};
use super::{Event, MemoryTier};
use crate::Time;
use crate::mistake::Mistake;
use crate::name::Name;
use crate::table::{PUBLISHED, ROW_BYTES, Table};
use kvcachepool_protocol::key::{EngineHash, KeyKind, ModelId, NamespaceId, chunk_key};
use std::cmp::Reverse;

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
        if size > self.alloc.segment_rows() {
            return None;
        }
        for _ in 0..EVICTIONS_BEFORE_RECLAIM {
            if let Some(row) = self.take_free_row(size, section) {
                return Some(row);
            }
            if !self.evict_one() {
                return None;
            }
        }
        for (first, slot_rows) in self.alloc.reclaimable(size, RECLAIM_TRIES) {
            self.empty_segment(first, slot_rows);
            if let Some(row) = self.take_free_row(size, section) {
                return Some(row);
            }
        }
        while self.evict_one() {
            if let Some(row) = self.take_free_row(size, section) {
                return Some(row);
            }
        }
        None
    }

    fn take_free_row(&mut self, size: u32, section: u32) -> Option<u32> {
        let taken = self.alloc.take(size, section)?;
        if let Some((first, count)) = taken.resized
            && !T::makes(Mistake::Carve)
        {
            // a reader may hold references to slots that began at other rows of this segment
            for row in first..first + count {
                let generation = self.table.row(row).generation;
                if generation != 0 {
                    self.table.set_generation(row, generation.wrapping_add(1));
                }
            }
        }
        Some(taken.row)
    }

    /// True if this entry can be evicted.
    pub(crate) fn evictable(&self, entry: u32) -> bool {
        self.entries.get(entry as usize).is_some_and(|e| {
            e.live
                && e.open.is_none()
                && (!e.pinned() || T::makes(Mistake::EvictPinned))
                && (e.first_child == NONE || T::makes(Mistake::ParentFirst))
        })
    }

    /// Evicts one chunk. Returns false if nothing can be evicted.
    pub(crate) fn evict_one(&mut self) -> bool {
        for _ in 0..self.incomplete.len() {
            let Some((handle, since_ms)) = self.next_incomplete() else {
                break;
            };
            if self.evictable(handle.entry) {
                self.stats.evicted_incomplete += 1;
                self.remove(handle.entry, Why::Evicted);
                return true;
            }
            self.queue(handle, since_ms);
        }
        while let Some(entry) = self.policy.next() {
            if !self.evictable(entry) {
                if let Some(e) = self.entries.get_mut(entry as usize) {
                    e.parked = true;
                }
                continue;
            }
            if let Some(tail) = self.tail_over(entry) {
                self.policy.retry(entry);
                self.evict(tail);
            } else {
                self.evict(entry);
            }
            return true;
        }
        false
    }

    fn evict(&mut self, entry: u32) {
        self.stats.evicted_chunks += 1;
        self.stats.evicted_bytes += self.entries.get(entry as usize).map_or(0, |e| e.bytes);
        self.remove(entry, Why::Evicted);
    }

    /// An evictable tail over the first tokens of a full chunk.
    pub(crate) fn tail_over(&self, entry: u32) -> Option<u32> {
        let record = self.table.chunk(entry);
        let e = self.entries.get(entry as usize)?;
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
            let tail = self.find(&Name { layout, key })?;
            let same_place = self.entries.get(tail as usize)?.first_token == first_token;
            (tail != entry && same_place && self.evictable(tail)).then_some(tail)
        })
    }

    /// Evicts all chunks of a segment and their descendants, if all of them can be evicted.
    fn empty_segment(&mut self, first: u32, slot_rows: u32) {
        let rows: Vec<u32> = (0..self.alloc.segment_rows() / slot_rows.max(1))
            .map(|i| first + i * slot_rows)
            .collect();
        let mut chunks = Vec::new();
        for row in rows {
            let row = self.table.row(row);
            match row.state {
                PUBLISHED => chunks.push(row.chunk),
                kvcachepool_protocol::table::FREE => {}
                _ => return,
            }
        }
        chunks.sort_unstable();
        chunks.dedup();
        for chunk in chunks {
            if !self.evict_tree(chunk) {
                return;
            }
        }
    }

    /// Evicts an entry after its descendants. Returns false at the first that cannot be evicted; the others stay evicted.
    fn evict_tree(&mut self, root: u32) -> bool {
        let mut path = vec![root];
        while let Some(entry) = path.last().copied() {
            let Some(e) = self.entries.get(entry as usize).filter(|e| e.live) else {
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
        let Some(e) = self.entries.get(entry as usize) else {
            return;
        };
        let (handle, complete, listed) = (self.handle(entry), e.complete(), e.listed);
        if !complete && listed && self.idle(entry) {
            self.queue(handle, None);
        } else if complete && e.parked && e.known && self.evictable(entry) {
            if let Some(e) = self.get_mut(handle) {
                e.parked = false;
            }
            self.policy.retry(entry);
        }
    }

    fn queue(&mut self, handle: Handle, since_ms: Option<u64>) {
        if let Some(e) = self.get_mut(handle)
            && !std::mem::replace(&mut e.queued, true)
        {
            self.incomplete.push_back((handle, since_ms));
        }
    }

    fn not_queued(&mut self, handle: Handle) {
        if let Some(e) = self.get_mut(handle) {
            e.queued = false;
        }
    }

    /// The incomplete chunk that has waited longest, and since when, if known.
    fn next_incomplete(&mut self) -> Option<(Handle, Option<u64>)> {
        loop {
            let (handle, since_ms) = self.incomplete.pop_front()?;
            self.not_queued(handle);
            if self.get(handle).is_some_and(|e| !e.complete()) && self.idle(handle.entry) {
                return Some((handle, since_ms));
            }
        }
    }

    /// True if nothing reads, writes or pins the entry.
    fn idle(&self, entry: u32) -> bool {
        let e = self.entries.get(entry as usize);
        e.is_some_and(|e| e.live && e.open.is_none() && !e.pinned())
    }

    /// Removes chunks that stayed incomplete for too long, and expired ones.
    pub(crate) fn end_by_time(&mut self, now: Time) {
        for _ in 0..self.incomplete.len() {
            let Some((handle, since_ms)) = self.next_incomplete() else {
                break;
            };
            let since_ms = since_ms.unwrap_or(now.mono_ms);
            if now.mono_ms >= since_ms + self.config.incomplete_ms {
                // children, if any, stay readable and wait for the entry's return
                self.remove(handle.entry, Why::Ended);
            } else {
                self.queue(handle, Some(since_ms));
            }
        }
        while let Some(Reverse((at, handle))) = self.expiries.peek().copied() {
            if at > now.unix_s {
                break;
            }
            self.expiries.pop();
            if self.get(handle).is_some() {
                self.stats.expired_chunks += 1;
                self.doom(handle.entry);
            }
        }
    }

    /// Sets the expiry of an entry. Past entries are pruned now and then, so that the list stays as short as the index.
    pub(crate) fn expires_at(&mut self, entry: u32, unix_s: u64) {
        if self.expiries.len() > 2 * self.entries.len() + 1024 {
            let mut expiries = std::mem::take(&mut self.expiries);
            expiries.retain(|Reverse((_, handle))| self.get(*handle).is_some());
            self.expiries = expiries;
        }
        self.expiries.push(Reverse((unix_s, self.handle(entry))));
    }

    /// An entry has all needed sections.
    pub(crate) fn became_readable(&mut self, entry: u32) {
        let Some(e) = self.entries.get_mut(entry as usize) else {
            return;
        };
        e.known = true;
        e.weight = e.bytes;
        let mut word = [0; 8];
        word.copy_from_slice(&e.name.key.0[8..16]);
        let (name, bytes) = (
            u64::from_le_bytes(word) ^ u64::from(e.name.layout),
            e.bytes.max(ROW_BYTES),
        );
        self.policy.insert(entry, name, bytes);
        self.stats.stored_chunks += 1;
        self.tell_stored(entry);
        self.events.push(Event::Readable(self.handle(entry)));
    }

    /// Tells the order of eviction that a readable chunk was used.
    pub fn touch(&mut self, chunk: Handle) {
        if self.get(chunk).is_some_and(|e| e.known) {
            self.policy.touch(chunk.entry);
        }
    }
}

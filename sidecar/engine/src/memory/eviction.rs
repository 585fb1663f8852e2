//! The order of eviction: incomplete chunks first, then readable ones in the policy's order.

use super::check::say;
use super::entry::Handle;
use super::index::ChunkIndex;
use super::policy::{self, Policy};
use crate::config::EvictionPolicy;
use crate::table::ROW_BYTES;
use std::collections::VecDeque;

/// Chunks in the order in which they are to be evicted. Whether one may be evicted now is the caller's decision.
#[derive(Debug)]
pub(crate) struct Eviction {
    policy: Box<dyn Policy>,
    /// Idle incomplete chunks, with the time since which each one waits, if known. Monotonic milliseconds.
    incomplete: VecDeque<(Handle, Option<u64>)>,
}

impl Eviction {
    pub fn new(policy: EvictionPolicy) -> Self {
        Self {
            policy: policy::new(policy),
            incomplete: VecDeque::new(),
        }
    }

    /// Queues an incomplete chunk, unless it is queued.
    pub fn queue(&mut self, index: &mut ChunkIndex, chunk: Handle, since_ms: Option<u64>) {
        if let Some(e) = index.get_mut(chunk)
            && !std::mem::replace(&mut e.queued, true)
        {
            self.incomplete.push_back((chunk, since_ms));
        }
    }

    /// Number of queued incomplete chunks.
    pub fn incomplete(&self) -> usize {
        self.incomplete.len()
    }

    /// Takes out the incomplete and idle chunk that has waited longest, and since when, if known.
    pub fn next_incomplete(&mut self, index: &mut ChunkIndex) -> Option<(Handle, Option<u64>)> {
        loop {
            let (chunk, since_ms) = self.incomplete.pop_front()?;
            if let Some(e) = index.get_mut(chunk) {
                e.queued = false;
                if !e.complete() && e.idle() {
                    return Some((chunk, since_ms));
                }
            }
        }
    }

    /// Takes out the readable chunk to evict next. The caller removes it, parks it, or retries it.
    pub fn next(&mut self) -> Option<u32> {
        self.policy.next()
    }

    /// Keeps a chunk from [`Eviction::next`] that cannot be evicted now.
    pub fn park(&mut self, index: &mut ChunkIndex, entry: u32) {
        if let Some(e) = index.entry_mut(entry) {
            e.parked = true;
        }
    }

    /// The obstacle to the eviction of a parked chunk is gone: it is next again.
    pub fn unpark(&mut self, index: &mut ChunkIndex, entry: u32) {
        if let Some(e) = index.entry_mut(entry)
            && e.known
            && std::mem::take(&mut e.parked)
        {
            self.policy.retry(entry);
        }
    }

    /// Returns a chunk from [`Eviction::next`]: it is next again.
    pub fn retry(&mut self, entry: u32) {
        self.policy.retry(entry);
    }

    /// A chunk became readable.
    pub fn insert(&mut self, index: &mut ChunkIndex, entry: u32) {
        if let Some(e) = index.entry_mut(entry) {
            e.known = true;
            let mut word = [0; 8];
            word.copy_from_slice(&e.name.key.0[8..16]);
            let name = u64::from_le_bytes(word) ^ u64::from(e.name.layout);
            self.policy.insert(entry, name, e.bytes.max(ROW_BYTES));
        }
    }

    /// A readable chunk was used.
    pub fn touch(&mut self, index: &ChunkIndex, chunk: Handle) {
        if index.get(chunk).is_some_and(|e| e.known) {
            self.policy.touch(chunk.entry);
        }
    }

    /// A chunk is removed. `evicted`: to make room.
    pub fn remove(&mut self, index: &mut ChunkIndex, entry: u32, evicted: bool) {
        if let Some(e) = index.entry_mut(entry)
            && std::mem::take(&mut e.known)
        {
            self.policy.remove(entry, evicted);
        }
    }

    /// Every readable chunk has a place in the order, and every queued one is in the queue.
    pub fn check(&self, index: &ChunkIndex) -> Result<(), String> {
        let mut queued = 0;
        for (chunk, e) in index.live() {
            let ordered = !e.complete() || !e.listed || e.known;
            say(ordered, "ReadableIsOrdered", || format!("{chunk:?}"))?;
            queued += usize::from(e.queued);
        }
        let live = |(chunk, _): &&(Handle, Option<u64>)| index.get(*chunk).is_some();
        let waiting = self.incomplete.iter().filter(live).count();
        say(queued == waiting, "QueuedIsInQueue", || {
            format!("{queued} marked, {waiting} queued")
        })
    }
}

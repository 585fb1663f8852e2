//! Eviction policies. A policy only orders entries. The engine decides whether a candidate is evictable (not leased, pinned, a parent or
//! being written): it takes a candidate with `next`, and returns one that is not evictable with `retry` once the obstacle is gone.

mod lfu;
mod list;
mod queue;
mod s3fifo;

use crate::config::EvictionPolicy;

/// An eviction order. An entry is identified by its chunk record, and known from `insert` to `remove`. All methods are amortised O(1).
pub trait Policy: std::fmt::Debug + Send {
    /// A chunk becomes readable. `name` is a hash of its key, stable over eviction and return; `bytes` is its size.
    fn insert(&mut self, entry: u32, name: u64, bytes: u64);
    /// A request used a chunk.
    fn touch(&mut self, entry: u32);
    /// A chunk is removed. `evicted`: to make room, so that its return is a signal.
    fn remove(&mut self, entry: u32, evicted: bool);
    /// Takes out the entry to evict next. The caller removes it, or retries it later.
    fn next(&mut self) -> Option<u32>;
    /// Returns an entry from `next` that was not evictable before: it is next again.
    fn retry(&mut self, entry: u32);
    /// Number of entries that `next` can still return.
    fn waiting(&self) -> usize;
}

pub fn new(kind: EvictionPolicy) -> Box<dyn Policy> {
    match kind {
        EvictionPolicy::S3Fifo => Box::new(s3fifo::S3Fifo::new()),
        EvictionPolicy::Lru => Box::new(queue::Queue::new(true)),
        EvictionPolicy::Lfu => Box::new(lfu::Lfu::new()),
        EvictionPolicy::Fifo => Box::new(queue::Queue::new(false)),
    }
}

#[cfg(test)]
mod tests;

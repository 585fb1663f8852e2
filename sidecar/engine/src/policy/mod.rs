//! Which chunk goes next when room is needed. A policy only orders entries; whether a candidate may go (leased, pinned, has
//! children, is being written) is the engine's to decide: it takes a candidate out with `next`, and puts one that may not go
//! back with `retry` when the reason is over.

mod fifo;
mod lfu;
mod list;
mod lru;
mod s3fifo;

use super::config::PolicyKind;

/// An order of eviction. Entries are numbered by their chunk record; an entry is known from `insert` to `remove`.
/// All methods are O(1) amortised.
pub trait Policy: std::fmt::Debug + Send {
    /// A chunk can be read for the first time. `name` is stable over eviction and return (a hash of its key), `bytes` what it takes.
    fn insert(&mut self, entry: u32, name: u64, bytes: u64);
    /// A chunk was used by a request.
    fn touch(&mut self, entry: u32);
    /// A chunk is gone. `evicted`: to make room, so that its return tells something.
    fn remove(&mut self, entry: u32, evicted: bool);
    /// Takes out the entry that should go next. The caller either removes it or retries it later.
    fn next(&mut self) -> Option<u32>;
    /// An entry that `next` gave and that could not go may go now: it is next again.
    fn retry(&mut self, entry: u32);
    /// Entries that `next` may still give: those known and not taken out.
    fn waiting(&self) -> usize;
}

pub fn new(kind: PolicyKind) -> Box<dyn Policy> {
    match kind {
        PolicyKind::S3Fifo => Box::new(s3fifo::S3Fifo::new()),
        PolicyKind::Lru => Box::new(lru::Lru::new()),
        PolicyKind::Lfu => Box::new(lfu::Lfu::new()),
        PolicyKind::Fifo => Box::new(fifo::Fifo::new()),
    }
}

#[cfg(test)]
mod tests;

//! Least recently used first.

use super::{Policy, list::Lists};

#[derive(Debug)]
pub struct Lru(Lists);

impl Lru {
    pub fn new() -> Self {
        Self(Lists::new(1))
    }
}

impl Policy for Lru {
    fn insert(&mut self, entry: u32, _name: u64, _bytes: u64) {
        self.0.push_back(0, entry);
    }
    fn touch(&mut self, entry: u32) {
        // an entry that was taken out and used again is not next any more: it moves to the back
        self.0.push_back(0, entry);
    }
    fn remove(&mut self, entry: u32, _evicted: bool) {
        self.0.remove(entry);
    }
    fn next(&mut self) -> Option<u32> {
        self.0.pop_front(0)
    }
    fn retry(&mut self, entry: u32) {
        if self.0.list_of(entry).is_none() {
            self.0.push_front(0, entry);
        }
    }
    fn waiting(&self) -> usize {
        self.0.len(0) as usize
    }
}

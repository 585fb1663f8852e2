//! One queue: oldest first, or least recently used first.

use super::{Policy, list::Lists};

#[derive(Debug)]
pub struct Queue {
    entries: Lists,
    /// A used entry moves to the back.
    moves: bool,
}

impl Queue {
    pub fn new(moves: bool) -> Self {
        Self {
            entries: Lists::new(1),
            moves,
        }
    }
}

impl Policy for Queue {
    fn insert(&mut self, entry: u32, _name: u64, _bytes: u64) {
        self.entries.push_back(0, entry);
    }
    fn touch(&mut self, entry: u32) {
        if self.moves {
            // an entry that was taken out and used again is not next any more
            self.entries.push_back(0, entry);
        }
    }
    fn remove(&mut self, entry: u32, _evicted: bool) {
        self.entries.remove(entry);
    }
    fn next(&mut self) -> Option<u32> {
        self.entries.pop_front(0)
    }
    fn retry(&mut self, entry: u32) {
        if self.entries.list_of(entry).is_none() {
            self.entries.push_front(0, entry);
        }
    }
    fn waiting(&self) -> usize {
        self.entries.len(0) as usize
    }
}

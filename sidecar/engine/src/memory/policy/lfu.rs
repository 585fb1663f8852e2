//! Least frequently used first, oldest first among equals. Counts age: after as many evictions as there are entries, every count falls by
//! one, so that formerly popular chunks are evicted eventually.

use super::{Policy, list::Lists};

/// Limit on counts. List `i` of the ring holds one count.
const COUNTS: u8 = 32;

#[derive(Debug)]
pub struct Lfu {
    lists: Lists,
    /// Ring position of count 0.
    base: u8,
    /// Evictions since the last ageing.
    removed_since_ageing: u32,
}

impl Lfu {
    pub fn new() -> Self {
        Self {
            lists: Lists::new(COUNTS),
            base: 0,
            removed_since_ageing: 0,
        }
    }

    fn list(&self, count: u8) -> u8 {
        (self.base + count) % COUNTS
    }

    fn age(&mut self) {
        let zero = self.list(0);
        let one = self.list(1);
        // count 0 stays 0: its entries precede those that fall from 1 to 0
        self.lists.append(zero, one);
        self.lists.append(one, zero);
        self.base = one;
    }
}

impl Policy for Lfu {
    fn insert(&mut self, entry: u32, _name: u64, _bytes: u64) {
        self.lists.push_back(self.list(0), entry);
    }
    fn touch(&mut self, entry: u32) {
        let count = match self.lists.list_of(entry) {
            Some(list) => (list + COUNTS - self.base) % COUNTS,
            None => 0,
        };
        self.lists
            .push_back(self.list((count + 1).min(COUNTS - 1)), entry);
    }
    fn remove(&mut self, entry: u32, evicted: bool) {
        self.lists.remove(entry);
        if evicted {
            self.removed_since_ageing += 1;
            if self.removed_since_ageing as usize > self.waiting() {
                self.removed_since_ageing = 0;
                self.age();
            }
        }
    }
    fn next(&mut self) -> Option<u32> {
        (0..COUNTS).find_map(|count| {
            let list = self.list(count);
            self.lists.pop_front(list)
        })
    }
    fn retry(&mut self, entry: u32) {
        if self.lists.list_of(entry).is_none() {
            self.lists.push_front(self.list(0), entry);
        }
    }
    fn waiting(&self) -> usize {
        (0..COUNTS).map(|l| self.lists.len(l) as usize).sum()
    }
}

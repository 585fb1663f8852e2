//! S3-FIFO (Yang et al., SOSP 2023): a small probation queue, a main queue with up to three second chances, and a ghost queue of names that
//! left the small queue. A name that returns soon enters the main queue at once. The small queue holds a tenth of the bytes. One use is
//! enough for the main queue: a prefix that was requested again will be requested once more.

use super::{Policy, list::Lists};
use crate::name::FastMap;
use std::collections::VecDeque;

const SMALL: u8 = 0;
const MAIN: u8 = 1;
const USES_MAX: u8 = 3;
/// The small queue's share of the bytes is one over this.
const SMALL_SHARE: u64 = 10;

#[derive(Debug, Clone, Copy, Default)]
struct Known {
    name: u64,
    bytes: u64,
    uses: u8,
    main: bool,
}

/// Small, main and ghost queue.
#[derive(Debug)]
pub struct S3Fifo {
    lists: Lists,
    known: Vec<Known>,
    small_bytes: u64,
    main_bytes: u64,
    ghosts: FastMap<u64, u64>,
    ghost_order: VecDeque<(u64, u64)>,
    clock: u64,
}

impl S3Fifo {
    pub fn new() -> Self {
        Self {
            lists: Lists::new(2),
            known: Vec::new(),
            small_bytes: 0,
            main_bytes: 0,
            ghosts: FastMap::default(),
            ghost_order: VecDeque::new(),
            clock: 0,
        }
    }

    fn remember(&mut self, name: u64) {
        self.clock += 1;
        self.ghosts.insert(name, self.clock);
        self.ghost_order.push_back((name, self.clock));
        // as many names as the main queue has entries, and at least 64
        let names_max = (self.lists.len(MAIN) as usize).max(64);
        while self.ghost_order.len() > names_max {
            if let Some((name, at)) = self.ghost_order.pop_front()
                && self.ghosts.get(&name) == Some(&at)
            {
                self.ghosts.remove(&name);
            }
        }
    }

    fn promote(&mut self, entry: u32) {
        if let Some(known) = self.known.get_mut(entry as usize) {
            known.main = true;
            known.uses = 0;
            self.small_bytes -= known.bytes;
            self.main_bytes += known.bytes;
        }
        self.lists.push_back(MAIN, entry);
    }
}

impl Policy for S3Fifo {
    fn insert(&mut self, entry: u32, name: u64, bytes: u64) {
        let at = entry as usize;
        if self.known.len() <= at {
            self.known.resize(at + 1, Known::default());
        }
        let main = self.ghosts.remove(&name).is_some();
        self.known[at] = Known {
            name,
            bytes,
            uses: 0,
            main,
        };
        if main {
            self.main_bytes += bytes;
            self.lists.push_back(MAIN, entry);
        } else {
            self.small_bytes += bytes;
            self.lists.push_back(SMALL, entry);
        }
    }

    fn touch(&mut self, entry: u32) {
        if let Some(known) = self.known.get_mut(entry as usize) {
            known.uses = (known.uses + 1).min(USES_MAX);
        }
    }

    fn remove(&mut self, entry: u32, evicted: bool) {
        self.lists.remove(entry);
        let Some(known) = self.known.get(entry as usize).copied() else {
            return;
        };
        if known.main {
            self.main_bytes -= known.bytes;
        } else {
            self.small_bytes -= known.bytes;
            if evicted {
                self.remember(known.name);
            }
        }
        self.known[entry as usize] = Known::default();
    }

    fn next(&mut self) -> Option<u32> {
        loop {
            let small_is_full =
                self.small_bytes * SMALL_SHARE >= self.small_bytes + self.main_bytes;
            let from_small =
                self.lists.len(SMALL) > 0 && (small_is_full || self.lists.len(MAIN) == 0);
            let entry = self
                .lists
                .pop_front(if from_small { SMALL } else { MAIN })?;
            let uses = self.known.get(entry as usize).map_or(0, |k| k.uses);
            if uses == 0 {
                return Some(entry);
            }
            if from_small {
                self.promote(entry);
            } else {
                self.known[entry as usize].uses = uses - 1;
                self.lists.push_back(MAIN, entry);
            }
        }
    }

    fn retry(&mut self, entry: u32) {
        let main = self.known.get(entry as usize).is_some_and(|k| k.main);
        self.lists
            .push_front(if main { MAIN } else { SMALL }, entry);
    }

    fn waiting(&self) -> usize {
        (self.lists.len(SMALL) + self.lists.len(MAIN)) as usize
    }
}

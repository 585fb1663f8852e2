//! The index of objects: name -> place, and the order of use. No I/O, no pointers per object.

use super::name::NameKey;
use super::space::At;
use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Unbounded};

const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
pub struct Entry {
    pub at: At,
    pub bytes: u64,
    /// Logical time of the last use.
    pub used: u64,
    /// Write time, Unix seconds.
    pub written_unix_s: u32,
    older: u32,
    newer: u32,
    pub name: NameKey,
}

/// All objects: some 170 bytes each.
#[derive(Debug)]
pub struct Index {
    names: BTreeMap<NameKey, u32>,
    entries: Vec<Option<Entry>>,
    vacant: Vec<u32>,
    oldest: u32,
    newest: u32,
    clock: u64,
}

impl Default for Index {
    fn default() -> Self {
        Self {
            names: BTreeMap::new(),
            entries: Vec::new(),
            vacant: Vec::new(),
            oldest: NONE,
            newest: NONE,
            clock: 0,
        }
    }
}

impl Index {
    pub fn len(&self) -> usize {
        self.names.len()
    }

    /// Upper bound (exclusive) of entry numbers.
    pub fn numbers(&self) -> u32 {
        self.entries.len() as u32
    }

    pub fn find(&self, name: &NameKey) -> Option<u32> {
        self.names.get(name).copied()
    }

    pub fn entry(&self, number: u32) -> Option<&Entry> {
        self.entries.get(number as usize)?.as_ref()
    }

    fn entry_mut(&mut self, number: u32) -> Option<&mut Entry> {
        self.entries.get_mut(number as usize)?.as_mut()
    }

    /// Adds a new object as the most recently used. Returns its number.
    pub fn insert(&mut self, name: NameKey, at: At, bytes: u64, written_unix_s: u64) -> u32 {
        let entry = Entry {
            at,
            bytes,
            used: 0,
            written_unix_s: u32::try_from(written_unix_s).unwrap_or(u32::MAX),
            older: NONE,
            newer: NONE,
            name,
        };
        let number = match self.vacant.pop() {
            Some(number) => number,
            None => {
                self.entries.push(None);
                (self.entries.len() - 1) as u32
            }
        };
        if let Some(place) = self.entries.get_mut(number as usize) {
            *place = Some(entry);
        }
        self.names.insert(name, number);
        self.link(number);
        number
    }

    pub fn remove(&mut self, name: &NameKey) -> Option<Entry> {
        let number = self.names.remove(name)?;
        self.unlink(number);
        self.vacant.push(number);
        self.entries.get_mut(number as usize)?.take()
    }

    /// Marks an object as used now.
    pub fn touch(&mut self, number: u32) {
        if self.entry(number).is_some() {
            self.unlink(number);
            self.link(number);
        }
    }

    /// Objects, least recently used first.
    pub fn oldest_first(&self) -> impl Iterator<Item = &Entry> {
        let mut next = self.oldest;
        std::iter::from_fn(move || {
            let entry = self.entry(next)?;
            next = entry.newer;
            Some(entry)
        })
    }

    /// Objects in the order of names, after `after`.
    pub fn after_name(&self, after: Option<&NameKey>) -> impl Iterator<Item = &Entry> {
        let from = after.map_or(Unbounded, |name| Excluded(*name));
        self.names
            .range((from, Unbounded))
            .filter_map(|(_, number)| self.entry(*number))
    }

    fn link(&mut self, number: u32) {
        self.clock += 1;
        let (clock, newest) = (self.clock, self.newest);
        if let Some(entry) = self.entry_mut(number) {
            (entry.used, entry.older, entry.newer) = (clock, newest, NONE);
        }
        match self.entry_mut(newest) {
            Some(before) => before.newer = number,
            None => self.oldest = number,
        }
        self.newest = number;
    }

    fn unlink(&mut self, number: u32) {
        let Some((older, newer)) = self.entry(number).map(|e| (e.older, e.newer)) else {
            return;
        };
        match self.entry_mut(older) {
            Some(entry) => entry.newer = newer,
            None => self.oldest = newer,
        }
        match self.entry_mut(newer) {
            Some(entry) => entry.older = older,
            None => self.newest = older,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use zerocopy::FromBytes;

    fn name(i: u8) -> NameKey {
        NameKey::read_from_bytes(&[[i; 48].as_slice(), &[0]].concat()).unwrap()
    }

    proptest! {
        #[test]
        fn order_of_use_and_of_names_are_those_of_a_plain_list(
            steps in proptest::collection::vec((0u8..3, 0u8..12), 0..200),
        ) {
            let (mut index, mut model) = (Index::default(), Vec::<u8>::new());
            for (step, i) in steps {
                let there = model.iter().position(|j| *j == i);
                match (step, there) {
                    (0, None) => {
                        let at = At { container: 1, slot: i.into() };
                        index.insert(name(i), at, u64::from(i), 7);
                        model.push(i);
                    }
                    (1, Some(place)) => {
                        prop_assert_eq!(index.remove(&name(i)).unwrap().bytes, u64::from(i));
                        model.remove(place);
                    }
                    (2, Some(place)) => {
                        index.touch(index.find(&name(i)).unwrap());
                        model.remove(place);
                        model.push(i);
                    }
                    _ => prop_assert_eq!(index.find(&name(i)).is_some(), there.is_some()),
                }
                let used: Vec<u8> = index.oldest_first().map(|e| e.at.slot as u8).collect();
                prop_assert_eq!(&used, &model);
                let mut sorted = model.clone();
                sorted.sort_unstable();
                let named: Vec<u8> = index.after_name(None).map(|e| e.at.slot as u8).collect();
                prop_assert_eq!(&named, &sorted);
                let behind: Vec<u8> =
                    index.after_name(Some(&name(5))).map(|e| e.at.slot as u8).collect();
                sorted.retain(|i| *i > 5);
                prop_assert_eq!(&behind, &sorted);
                prop_assert_eq!(index.len(), model.len());
            }
        }
    }
}

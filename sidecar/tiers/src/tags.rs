//! Versions of recently read objects: if one turns out to be corrupt, exactly that version is removed, and none written since then.

use parking_lot::Mutex;
use std::collections::VecDeque;

/// Number of remembered reads: more than can be in flight or have their digests computed.
const MOST: usize = 1_024;

/// Versions of read objects, the latest at the end. A version is what the tier tells them apart by.
#[derive(Debug)]
pub struct Tags<T>(Mutex<VecDeque<(String, Option<T>)>>);

impl<T> Default for Tags<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T: Clone> Tags<T> {
    /// Records a read of this version; `None`: it is not known.
    pub fn read(&self, key: &str, version: Option<T>) {
        let mut tags = self.0.lock();
        if tags.len() >= MOST {
            tags.pop_front();
        }
        tags.push_back((key.to_string(), version));
    }

    /// The version that was read last under the key, if it is remembered.
    pub fn last(&self, key: &str) -> Option<T> {
        let tags = self.0.lock();
        let found = tags.iter().rev().find(|(read, _)| read == key);
        found.and_then(|(_, version)| version.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_read_of_a_name_counts_and_only_so_many_are_remembered() {
        let tags = Tags::default();
        for (key, version) in [("a", Some(1)), ("b", Some(2)), ("a", Some(3))] {
            tags.read(key, version);
        }
        assert_eq!(tags.last("a"), Some(3));
        assert_eq!(tags.last("b"), Some(2));
        assert_eq!(tags.last("c"), None);
        tags.read("b", None);
        assert_eq!(tags.last("b"), None);
        for n in 0..MOST {
            tags.read("c", Some(n));
        }
        assert_eq!((tags.last("a"), tags.0.lock().len()), (None, MOST));
    }
}
